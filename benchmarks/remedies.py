"""Router replay beside everything else that is done against the mismatch, on equal terms: ten arms, eight paired seeds, 60 steps.

    OMP_NUM_THREADS=1 python -m benchmarks.remedies run [--study remedies] [--seeds 0 1 2 3]
    python -m benchmarks.remedies collect [--study remedies]

`run` makes or continues the runs in data/runs, so several processes can share the seeds; `collect` writes data/studies/NAME: `runs.parquet`
(a row a run), `steps.parquet` (a row a step of each run), `facts.json`. Studies:

    remedies    the ten arms, hf engines, rollout rounded to fp8, 4 updates a batch, lr 1e-4
    real        none, R2, R3, fisher, random_route at a quarter of the routes, vLLM and Megatron-Core, 3 seeds, 20 steps
    staleness   none, R2, R3 at 1, 2, 4 and 8 updates a batch, 4 seeds
    rates       none and R3 at learning rates up to collapse, 3 seeds
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from typing import Any

from rar_lib.checkpoint import DATA_DIR, digest_checkpoint, resolve_checkpoint
from rar_lib.config import JobConfig
from rar_lib.engines.session import EngineSession
from rar_lib.job import run_job
from rar_lib.runs.files import write_json
from rar_lib.runs.result import RunResult
from rar_lib.runs.store import RUNS_DIR, describe_environment, run_id
from rar_lib.runs.studies import Study
from rar_lib.tasks import Task

STUDIES = DATA_DIR / "studies"
SMALL = {
    "engine": "hf",
    "prompts_per_step": 32,
    "steps": 60,
    "eval_prompts": 256,
    "eval_every": 15,
    "checkpoint_every": 30,
}
QUARTER = {"policy": "R3", "budget": "0.25"}
ARMS: dict[str, dict[str, Any]] = {
    "none": {"policy": "none"},
    "R2": {"policy": "R2"},
    "R3": {"policy": "R3"},
    "tis": {"policy": "none", "corrections": "tis"},
    "icepop": {"policy": "none", "corrections": "icepop"},
    "R3+tis": {"policy": "R3", "corrections": "tis"},
    "fisher 0.25": {**QUARTER, "routes": "fisher"},
    "margin 0.25": {**QUARTER, "routes": "margin"},
    "uniform 0.25": {**QUARTER, "routes": "uniform"},
    "random_route 0.25": {**QUARTER, "routes": "random_route"},
}


def points(study: str) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(label, parameters, seed) of every run, seeds outermost."""
    if study == "remedies":
        for seed in range(8):
            for label, arm in ARMS.items():
                yield label, {**SMALL, **arm}, seed
    elif study == "real":
        names = ("none", "R2", "R3", "fisher 0.25", "random_route 0.25")
        for seed in range(3):
            for label in names:
                more = {"engine": "real", "steps": 20, "eval_prompts": 256, "checkpoint_every": 20}
                yield label, {**more, **ARMS[label]}, seed
    elif study == "staleness":
        for seed in range(4):
            for updates in (1, 2, 4, 8):
                for label in ("none", "R2", "R3"):
                    yield label, {**SMALL, **ARMS[label], "updates_per_batch": updates}, seed
    elif study == "rates":
        for seed in range(3):
            for lr in (3e-4, 5e-4, 7e-4, 1e-3):
                for label in ("none", "R3"):
                    yield label, {**SMALL, **ARMS[label], "lr": lr}, seed
    else:
        raise SystemExit(f"study: expected remedies, real, staleness or rates, found {study!r}")


def config_of(parameters: dict[str, Any], seed: int) -> JobConfig:
    """The job of one run."""
    return JobConfig.from_flat(**parameters, seed=seed)


def run(study: str, seeds: list[int]) -> None:
    """Make or continue the runs of some seeds."""
    with EngineSession() as session:
        for label, parameters, seed in points(study):
            if seed in seeds:
                done = run_job(config_of(parameters, seed), session, show="none")
                logging.info(
                    "%s seed %d: %s, reward %.3f", label, seed, done.path.name, done.summary["reward_last"] or 0.0
                )


def collect(study: str) -> None:
    """Gather the runs that are complete; says how many are missing."""
    found: list[RunResult] = []
    labels: list[str] = []
    missing = 0
    digests: dict[str, str] = {}
    for label, parameters, seed in points(study):
        config = config_of(parameters, seed)
        if not digests:
            digests = {
                "checkpoint": digest_checkpoint(resolve_checkpoint(config.model.path)),
                "task": Task(config.task).digest(),
            }
        path = RUNS_DIR / run_id(config, digests)
        if not (path / "summary.json").exists():
            missing += 1
            continue
        found.append(RunResult.read(path))
        labels.append(label)
    if not found:
        raise SystemExit(f"study {study}: none of its {missing} runs is complete in {RUNS_DIR}; `run` makes them")
    made = Study.of_runs(study, found, labels)
    folder = STUDIES / study
    folder.mkdir(parents=True, exist_ok=True)
    made.write(folder)
    facts = {"study": study, "runs": len(found), "missing": missing, "environment": describe_environment(0)}
    write_json(folder / "facts.json", facts)
    print(json.dumps({name: facts[name] for name in ("study", "runs", "missing")}))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "collect"))
    parser.add_argument("--study", default="remedies")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(8)))
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    if options.what == "run":
        run(options.study, options.seeds)
    else:
        collect(options.study)


if __name__ == "__main__":
    main()
