"""A complete run, run again, and every difference: `rar reproduce RUN`.

The run is made anew from its config.json in a folder of its own, and then compared value by value: tables, tokens, replay records,
traces, final weights and summary. Times are what they are and do not count; versions and machine are reported beside the result. On the
hf engines nothing may differ, on one machine and one build of torch. vLLM and Megatron-Core are deterministic here too (CPU); nothing
promises it for a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from safetensors.torch import load_file

from rar_lib.checkpoint import digest_checkpoint, resolve_checkpoint
from rar_lib.config import JobConfig
from rar_lib.engines.session import EngineSession
from rar_lib.errors import RunError
from rar_lib.job import run_job
from rar_lib.progress import Style
from rar_lib.runs.files import leaves, read_table
from rar_lib.runs.registry import inspect, remove
from rar_lib.runs.result import RunResult
from rar_lib.runs.store import run_id
from rar_lib.tasks import Task


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same.

    Attributes:
        where: file of the run folder.
        what: column, field or tensor.
        step: first step at which it differs, where there are steps.
        first, second: the values there, as text; of the run, and of its repetition.
        largest: largest absolute difference over the whole column; None for what is no number.
    """

    where: str
    what: str
    step: int | None
    first: str
    second: str
    largest: float | None


@dataclass(frozen=True)
class Reproduction:
    """What came out.

    Attributes:
        run, again: the two folders.
        compared: values that were compared.
        differences: every one, in the order of the files.
        environment: what of versions and machine is not the same: name, then and now; it does not count as a difference.
        absent: what could not be compared, since the first run does not have it any more.
    """

    run: Path
    again: Path
    compared: int
    differences: tuple[Difference, ...]
    environment: tuple[tuple[str, str, str], ...]
    absent: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Nothing differs."""
        return not self.differences

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return {**asdict(self), "run": str(self.run), "again": str(self.again), "equal": self.equal}

    def __str__(self) -> str:
        lines = [f"run again in {self.again}"]
        lines += [f"environment: {name} was {then}, is {now}" for name, then, now in self.environment]
        for d in self.differences:
            at = "" if d.step is None else f" from step {d.step} on"
            by = "" if d.largest is None else f" (largest difference {d.largest:.3g})"
            lines.append(f"{d.where}: {d.what} differs{at}: {d.first} and {d.second}{by}")
        lines += [f"not compared: {what}, which the run no longer has" for what in self.absent]
        told = "none differs" if self.equal else f"{len(self.differences)} columns or fields differ"
        return "\n".join([*lines, f"{self.compared:,} values compared, {told}"])


def reproduce(run: Path, out: Path, session: EngineSession | None = None, *, show: Style = "auto") -> Reproduction:
    """Run a complete run again and compare.

    Args:
        run: a complete run folder.
        out: folder to run it in; an earlier repetition of the same run there is removed first.
        session: engines to share.
        show: progress of the run.

    Raises:
        RunError: if the run is not complete, or its checkpoint or task files are no longer what they were.
    """
    entry = inspect(run)
    if entry.state != "complete":
        raise RunError(f"run folder {run}: expected a complete run, found {entry.state} {entry.note}".rstrip())
    stored = json.loads((run / "config.json").read_text())
    config = JobConfig.build(stored["config"])
    digests = {
        "checkpoint": digest_checkpoint(resolve_checkpoint(config.model.path)),
        "task": Task(config.task).digest(),
    }
    moved = [name for name, digest in digests.items() if stored["digests"].get(name) != digest]
    if moved:
        raise RunError(f"run folder {run}: its {' and '.join(moved)} changed since; it cannot be run again")
    again = out / run_id(config, digests)
    if again.resolve() == run.resolve():
        raise RunError(f"run folder {run}: it would be run again in its own place; choose another folder")
    if again.exists() or again.is_symlink():
        remove([again])
    done = run_job(config, session, runs_dir=out, show=show)
    return compare(run, done.path)


def compare(run: Path, again: Path) -> Reproduction:
    """Every difference between two complete run folders.

    Args:
        run, again: the run, and its repetition.

    Raises:
        RunError: if one of them is not complete.
    """
    first, second = RunResult.read(run), RunResult.read(again)
    found: list[Difference] = []
    compared = 0
    for name in ("metrics", "paired", "tokens"):
        count, differences = _tables(
            f"{name}.parquet", read_table(run / f"{name}.parquet"), read_table(again / f"{name}.parquet")
        )
        compared, found = compared + count, found + differences
    pairs = {
        "replay.jsonl": (_records(first), _records(second)),
        "summary.json": (_timeless(first.summary), _timeless(second.summary)),
    }
    last = _last(run)
    if last:  # what planners keep from batch to batch; its tables are those above
        pairs[f"{last}/state.json"] = tuple(
            {"planner": _json(p / last / "state.json").get("planner")} for p in (run, again)
        )  # type: ignore[assignment]
    for name, (a, b) in pairs.items():
        count, differences = _trees(name, a, b)
        compared, found = compared + count, found + differences
    for count, differences in _tensors(run, again):
        compared, found = compared + count, found + differences
    then, now = (_json(p / "environment.json") for p in (run, again))
    flat = [dict(leaves(e)) for e in (then, now)]
    names = list(dict.fromkeys([*flat[0], *flat[1]]))
    moved = [(n, str(flat[0].get(n)), str(flat[1].get(n))) for n in names if flat[0].get(n) != flat[1].get(n)]
    absent = [] if last else ["the trainer state"]
    absent += [] if any((run / "traces").glob("*.safetensors")) else ["traces"]
    return Reproduction(run, again, compared, tuple(found), tuple(moved), tuple(absent))


def _timed(name: str) -> bool:
    return name.startswith("time/") or "seconds" in name


def _timeless(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if not _timed(name)}


def _records(run: RunResult) -> dict[str, Any]:
    lines = [record.model_dump(mode="json") for record in run.replay]
    return {str(i): {k: v for k, v in line.items() if not _timed(k)} for i, line in enumerate(lines)}


def _tables(where: str, a: pd.DataFrame, b: pd.DataFrame) -> tuple[int, list[Difference]]:
    count, found = 0, []
    if len(a) != len(b):
        found.append(Difference(where, "number of rows", None, str(len(a)), str(len(b)), abs(len(a) - len(b))))
    rows = min(len(a), len(b))
    for column in dict.fromkeys([*a.columns, *b.columns]):
        if _timed(str(column)):
            continue
        if column not in a or column not in b:
            have = ["absent" if column not in t else "there" for t in (a, b)]
            found.append(Difference(where, str(column), None, have[0], have[1], None))
            continue
        left, right = a[column].iloc[:rows], b[column].iloc[:rows]
        count += rows
        both_absent = (left.isna() & right.isna()).to_numpy()
        differs = ~((left.to_numpy() == right.to_numpy()) | both_absent)
        if differs.any():
            i = int(np.argmax(differs))
            step = int(a["step"].iloc[i]) if "step" in a else None
            number = pd.api.types.is_numeric_dtype(left) and pd.api.types.is_numeric_dtype(right)
            gaps = (left[differs].to_numpy(float) - right[differs].to_numpy(float)) if number else None
            largest = None if gaps is None or not np.isfinite(gaps).any() else float(np.nanmax(np.abs(gaps)))
            found.append(Difference(where, str(column), step, str(left.iloc[i]), str(right.iloc[i]), largest))
    return count, found


def _trees(where: str, a: dict[str, Any], b: dict[str, Any]) -> tuple[int, list[Difference]]:
    left, right = dict(leaves(a)), dict(leaves(b))
    found = []
    for name in dict.fromkeys([*left, *right]):
        x, y = left.get(name, "absent"), right.get(name, "absent")
        if x != y:
            number = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (x, y))
            found.append(Difference(where, name, None, str(x), str(y), abs(x - y) if number else None))
    return len(left.keys() | right.keys()), found


def _tensors(run: Path, again: Path) -> Iterator[tuple[int, list[Difference]]]:
    """Traces, and the last trainer state, tensor by tensor. What the first run no longer has (traces of the reference runs that ship,
    trainer states that were removed) is no difference."""
    for folder, pattern in (("traces", "*.safetensors"), (_last(run), "*.safetensors")):
        for path in sorted((run / folder).glob(pattern)) if folder else ():
            where, other = f"{folder}/{path.name}", again / folder / path.name
            if not other.exists():
                yield 1, [Difference(where, "file", None, "there", "absent", None)]
                continue
            left, right = load_file(path), load_file(other)
            found, count = [], 0
            for name in dict.fromkeys([*left, *right]):
                x, y = left.get(name), right.get(name)
                if x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
                    shapes = ["absent" if v is None else f"{v.dtype} {tuple(v.shape)}" for v in (x, y)]
                    found.append(Difference(where, name, None, shapes[0], shapes[1], None))
                    continue
                count += x.numel()
                differs = ~((x == y) | ((x != x) & (y != y)))  # NaN at one place in both is the same
                if differs.any():
                    a, b = x[differs], y[differs]
                    gap = float((a.double() - b.double()).abs().max())
                    found.append(Difference(where, name, None, str(a[0].item()), str(b[0].item()), gap))
            yield count, found


def _last(run: Path) -> str:
    last = max((p for p in (run / "checkpoints").glob("step-*") if p.suffix != ".partial"), default=None)
    return f"checkpoints/{last.name}" if last else ""


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
