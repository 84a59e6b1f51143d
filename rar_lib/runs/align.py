"""Runs, sweeps and studies laid side by side: what is comparable with what. `rar compare`

Runs that differ in something a policy's name does not say (a learning rate, a number of updates, a model) are of another setting, and
compared only within it. Within a setting a run is told by its policy and seed, and both together are there once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rar_lib.checkpoint import DATA_DIR
from rar_lib.config import JobConfig
from rar_lib.errors import ConfigError, RunError
from rar_lib.runs.files import leaves
from rar_lib.runs.registry import inspect, resolve
from rar_lib.runs.result import RunResult, label_of
from rar_lib.runs.studies import Study, values_of

STUDIES = DATA_DIR / "studies"
OF_THE_POLICY = ("router_replay.", "algorithm.objective", "algorithm.anchor", "algorithm.corrections", "algorithm.freeze_router",
                 "algorithm.clip_")  # fmt: skip
UNTOLD = ("seed", "checkpoint_every", "diagnostics.", "evaluation.every", "model.path")  # not of what is compared
AT_THE_END = ("evaluation_last", "k3_rollout_old", "extreme_fraction_tau2", "ratio_max", "grad_norm")


@dataclass(frozen=True)
class Setting:
    """Runs that differ in policy and seed only.

    Attributes:
        name: what sets it apart from the other settings, such as `lr=0.0003`; empty if there is one setting.
        study: its runs and their steps.
        baseline: policy that the others are compared with; None if it has none.
    """

    name: str
    study: Study
    baseline: str | None

    def values(self) -> pd.DataFrame:
        """A row a run, the baseline first: policy, seed, run, best, best_step, lowest, collapsed_at, diverged and the QUANTITIES, `reward`
        the final one."""
        steps = self.study.steps
        rewards = steps[["policy", "seed", "step", "reward/mean"]].dropna()
        lowest = rewards.groupby(["policy", "seed"])["reward/mean"].min().rename("lowest").reset_index()
        top = rewards.loc[rewards.groupby(["policy", "seed"], sort=False)["reward/mean"].idxmax()]
        top = top.set_axis(["policy", "seed", "best_step", "best"], axis=1)
        runs = self.study.runs[["policy", "seed", "run", "steps", "collapsed_at", "diverged"]]
        table = runs.merge(values_of(self.study), on=["policy", "seed"]).merge(top, on=["policy", "seed"], how="left")
        table = table.merge(lowest, on=["policy", "seed"], how="left")
        order = list(dict.fromkeys([*([self.baseline] if self.baseline else []), *table["policy"]]))
        return table.sort_values(
            ["policy", "seed"], key=lambda c: c.map(order.index) if c.name == "policy" else c, ignore_index=True
        )


@dataclass(frozen=True)
class Comparison:
    """What was read.

    Attributes:
        settings: each with its runs.
        left_out: what of the sources is not compared, with the reason.

    Raises:
        ConfigError: for a setting that has a policy and seed twice.
    """

    settings: Sequence[Setting]
    left_out: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for setting in self.settings:
            twice = setting.study.runs[setting.study.runs.duplicated(["policy", "seed"])]
            if len(twice):
                policy, seed = twice.iloc[0][["policy", "seed"]]
                raise ConfigError(
                    f"{setting.name or 'runs'}: expected every policy and seed once, found {policy}, seed {seed} twice"
                )


def read_comparison(sources: Sequence[str | Path], runs_dir: Path, baseline: str | None = None) -> Comparison:
    """Read and align.

    Args:
        sources: run folders, names of runs, and sweeps and studies by folder or name, in any number.
        runs_dir: where names are looked for.
        baseline: policy to compare with; by default `none`, if there is one.

    Raises:
        ConfigError: for a source that is none of these, two runs of one arm and seed, or a baseline that is nowhere.
        RunError: for a run or sweep that cannot be read.
    """
    folders: dict[Path, None] = {}
    studies: dict[Path, Study] = {}
    left_out: list[str] = []
    for source in sources:
        study, sweep = _found(source, STUDIES, "steps.parquet"), _found(source, runs_dir / "sweeps", "status.json")
        if study is not None and sweep is not None:
            raise ConfigError(
                f"{source}: expected one thing of that name, found a study and a sweep; give the folder: {study} or {sweep}"
            )
        if study is not None:
            studies[study] = Study.read(study)
        elif sweep is not None:
            names, untold = _of_sweep(sweep)
            left_out += untold
            folders |= dict.fromkeys(sweep.parent.parent / name for name in names)
        else:
            try:
                folders[resolve(str(source), runs_dir)] = None
            except RunError as error:
                known = {"sweeps": (runs_dir / "sweeps", "status.json"), "studies": (STUDIES, "steps.parquet")}
                elsewhere = {
                    what: sorted(p.parent.name for p in f.glob(f"*/{file}")) for what, (f, file) in known.items()
                }
                told = "; ".join(f"{what}: {', '.join(names_of) or 'none'}" for what, names_of in elsewhere.items())
                raise RunError(f"{error}, and no sweep or study ({told})") from None
    runs = []
    for folder in folders:
        entry = inspect(folder)
        if entry.state == "complete":
            runs.append(RunResult.read(folder))
        else:
            left_out.append(f"{folder.name}: {entry.state}" + (f", {entry.note}" if entry.note else ""))
    settings = [*_settings_of_runs(runs), *(part for study in studies.values() for part in _settings_of_study(study))]
    if not settings:
        raise ConfigError("compare: expected at least one complete run\n" + "\n".join(left_out))
    found = [Setting(name, _judged(study), _baseline(study, baseline)) for name, study in settings]
    if baseline is not None and all(setting.baseline is None for setting in found):
        there = sorted({p for setting in found for p in setting.study.runs["policy"]})
        raise ConfigError(f"baseline: expected one of {', '.join(there)}; found {baseline!r}")
    return Comparison(found, tuple(left_out))


def _found(source: str | Path, folder: Path, file: str) -> Path | None:
    """A folder with that file: given by its path, else by its name among those of `folder`."""
    given = Path(source)
    named = folder / given if len(given.parts) == 1 and given.name not in ("", "..") else None
    return next((p.resolve() for p in (given, named) if p is not None and (p / file).is_file()), None)


def _judged(study: Study) -> Study:
    """Without the end of what diverged: its weights were pushed before that, and its means are over other steps than those of the others."""
    runs = study.runs.copy()
    gone = runs["diverged"].notna()
    runs[list(AT_THE_END)] = runs[list(AT_THE_END)].astype(float).mask(gone)
    return Study(study.name, runs, study.steps)


def _of_sweep(folder: Path) -> tuple[list[str], list[str]]:
    try:
        points = json.loads((folder / "status.json").read_text())["points"]
        done = [run for point in points if point["state"] == "done" for run in point["runs"]]
        untold = [
            f"{p['id']}: {p['state']}{': ' + p['cause'] if p.get('cause') else ''}"
            for p in points
            if p["state"] != "done"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"sweep {folder}: status.json cannot be read: {error}") from None
    return list(dict.fromkeys(done)), untold


def _settings_of_runs(runs: Sequence[RunResult]) -> list[tuple[str, Study]]:
    groups: dict[tuple[tuple[str, Any], ...], list[tuple[str, RunResult]]] = {}
    for run, (policy, values) in zip(runs, arms_of(runs), strict=True):
        groups.setdefault(values, []).append((policy, run))
    found = []
    for values, members in sorted(groups.items(), key=lambda group: [_in_order(v) for _, v in group[0]]):
        setting = ", ".join(f"{name}={_plain(value)}" for name, value in values)
        seen: dict[tuple[str, int], RunResult] = {}
        for policy, run in members:
            other = seen.setdefault((policy, run.summary["seed"]), run)
            if other is not run:
                raise ConfigError(
                    f"{other.path} and {run.path} are both {policy}, seed {run.summary['seed']}: compare one of them"
                )
        found.append((setting, Study.of_runs(setting or "runs", [r for _, r in members], [p for p, _ in members])))
    return found


def _in_order(value: Any) -> tuple[bool, float, str]:
    """Sorts numbers as numbers, before all else."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (False, float(value), "") if number else (True, 0.0, str(value))


def arms_of(runs: Sequence[RunResult]) -> list[tuple[str, tuple[tuple[str, Any], ...]]]:
    """(policy, what sets its setting apart) of every run, as short as they may be to tell all runs of one seed apart."""
    flat = [_computed(run) for run in runs]
    varying = {key for key in {k for f in flat for k in f} if len({json.dumps(f.get(key)) for f in flat}) > 1}
    varying = {key for key in varying if not key.startswith(UNTOLD)}
    settings = sorted(key for key in varying if not key.startswith(OF_THE_POLICY))
    rounding = any(key.startswith("rollout.") for key in settings)
    names = [
        label_of({**r.summary, "computes_alike": False, "precision": "fp8_weights"} if rounding else r.summary)
        for r in runs
    ]
    found = []
    for name, values in zip(names, flat, strict=True):
        alike = [f for other, f in zip(names, flat, strict=True) if other == name]
        own = sorted(
            key for key in varying if key.startswith(OF_THE_POLICY) and len({json.dumps(f.get(key)) for f in alike}) > 1
        )
        policy = " ".join([name, *(f"{_short(key, own)}={_plain(values.get(key))}" for key in own)])
        found.append((policy, tuple((_short(key, settings), values.get(key)) for key in settings)))
    return found


def _computed(run: RunResult) -> dict[str, Any]:
    """What a run computes, flat, with today's defaults for settings that came later; how replay is switched off does not count."""
    values = dict(leaves(JobConfig.build(run.config).resolved()))
    if run.arm == "none":
        values = {key: value for key, value in values.items() if not key.startswith("router_replay.")}
    stored = json.loads((run.path / "config.json").read_text())
    digests = {name: str(digest)[:8] for name, digest in stored["digests"].items()}
    lists = {key: json.dumps(value) for key, value in values.items() if isinstance(value, list)}
    return values | lists | {"library": stored["version"], **digests}


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a key, with its group where another key ends in the same."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else ".".join(key.split(".")[-2:])


def _settings_of_study(study: Study) -> list[tuple[str, Study]]:
    keys = [key for key in ("lr", "updates_per_batch") if study.runs[key].nunique() > 1]
    if not keys:
        return [("" if study.name == "runs" else study.name, study)]
    found = []
    for values in study.runs[keys].drop_duplicates().sort_values(keys).to_dict("records"):
        name = ", ".join(f"{key}={_plain(value)}" for key, value in values.items())
        found.append((f"{study.name}, {name}", study.only(**{str(k): v for k, v in values.items()})))
    return found


def _baseline(study: Study, wanted: str | None) -> str | None:
    policies = list(dict.fromkeys(study.runs["policy"]))
    if wanted is not None or "none" in policies:
        return (wanted or "none") if (wanted or "none") in policies else None
    return next((policy for policy in policies if policy.split()[0] == "none"), None)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
