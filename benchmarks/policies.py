"""Every policy trains to the end on the real pair: 20 steps, 3 seeds, a quarter of the routes.

    OMP_NUM_THREADS=1 python -m benchmarks.policies [--out FILE]

Prints one JSON object: a row a run, with engines, realised budget, whether executed routes were those that were resolved,
reward, k3 and deployment. Three seeds support no claim about differences; they show that the runs hold together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rar_lib.config import JobConfig
from rar_lib.engines.session import EngineSession
from rar_lib.job import run_job
from rar_lib.runs.store import describe_environment

PARTIAL = ("fisher", "uniform", "random_route", "margin", "disagree")
SHOWN = (
    "rollout_engine", "trainer_engine", "steps", "executed_equals_resolved", "nominal", "binding", "reward_first", "reward_last",
    "evaluation_first", "evaluation_last", "k3_rollout_old", "target_shift", "evaluation_last_k3_native", "evaluation_last_k3_replayed",
)  # fmt: skip


def main() -> None:
    """Run, or load what was run before, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    arms: list[tuple[str, dict[str, str]]] = [("none", {}), ("R2", {}), ("R3", {})]
    arms += [("R3", {"routes": name, "budget": "0.25"}) for name in PARTIAL]
    rows = []
    with EngineSession() as session:
        for seed in range(3):
            for arm, more in arms:
                config = JobConfig.from_flat(policy=arm, engine="real", steps=20, seed=seed, **more)
                run = run_job(config, session, show="none")
                budgets = {(record.budget, record.valid) for record in run.replay}
                exact = all(b == int(v * 0.25 + 0.5) for b, v in budgets) if more else None
                row = {name: run.summary[name] for name in SHOWN}
                rows.append({"policy": run.label, "seed": seed, "budget_exact": exact, **row})
    text = json.dumps({"runs": rows, "environment": describe_environment(0)}, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
