"""A sweep: the points of a grid, executed until each has a record. `rar sweep GRID.yaml`

    data/runs/sweeps/<name>/
        grid.yaml       the grid as it was read
        table.csv       a row a point: state, cause, time, and the numbers of its run
        status.json     what table.csv shows, for whoever looks while the sweep goes on

Points lie in data/runs/points, runs in data/runs, so two grids that share a point, or two points that share a run, compute it once. A
point that has ended is skipped, a failed one too unless it is retried; what was interrupted or killed continues from the run's last
checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from rar_lib.config import JobConfig
from rar_lib.errors import RunError
from rar_lib.estimate import estimate
from rar_lib.runs.executors import Options, get_executor
from rar_lib.runs.files import locked, write_json, write_text
from rar_lib.runs.grid import PLACES, Grid, Point, points_of
from rar_lib.runs.point import Record, Task, lacks, read_record
from rar_lib.runs.store import RUNS_DIR

logger = logging.getLogger("rar")
# What a kernel takes beside the parts that the estimate counts: interpreter, libraries and kernels' caches (benchmarks/sweep.py).
RANK = 700_000_000  # bytes of libraries that each rank of a trainer holds beside the kernel
LIBRARIES = {"hf": 1_500_000_000, "vllm": 1_700_000_000, "vllm_server": 3_000_000_000}  # its two processes included
NUMBERS = ("reward_first", "reward_last", "evaluation_last", "k3_rollout_old", "extreme_fraction_tau2", "router_flip", "collapsed_at",
           "diverged")  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """What a grid became.

    Attributes:
        folder: of the sweep.
        points: of the grid, in order.
        records: of those that have ended, by id.
        ran: ids of those whose execution this call started.
    """

    folder: Path
    points: Sequence[Point]
    records: Mapping[str, Record]
    ran: set[str] = field(default_factory=set)

    def count(self, state: str) -> int:
        """Points that ended in a state."""
        return sum(record.state == state for record in self.records.values())

    def runs(self) -> list[str]:
        """Names of the run folders of all done points, each once."""
        return list(dict.fromkeys(run for p in self.points for run in _runs(self.records.get(p.id))))

    def brief(self, runs_dir: Path) -> pd.DataFrame:
        """The table as a terminal shows it: arm, axes, state, the numbers that matter, run."""
        whole = self.table(runs_dir)
        axes = [
            name
            for name in dict.fromkeys(n for p in self.points for n in p.axes)
            if whole[name].nunique(dropna=False) > 1
        ]
        shown = whole[["arm", *axes, "state"]].copy()
        for name, title, form in (
            ("reward_last", "last reward", ".3f"),
            ("k3_rollout_old", "k3", ".2e"),
            ("evaluation_last", "held out", ".3f"),
        ):
            if name in whole:
                shown[title] = ["" if pd.isna(v) else format(v, form) for v in whole[name]]
        for name, title in (("collapsed_at", "collapsed at"), ("diverged", "diverged")):
            if name in whole and whole[name].notna().any():
                shown[title] = whole[name]
        if (whole["run"] != "").any():
            shown["run"] = whole["run"]
        return shown

    def table(self, runs_dir: Path) -> pd.DataFrame:
        """A row a point: point, arm, what its axes set, state, cause, seconds, run, and numbers of its run's summary."""
        rows = []
        for point in self.points:
            record = self.records.get(point.id)
            runs = _runs(record)
            row: dict[str, Any] = {"point": point.id, "arm": point.arm, "label": point.label, **point.axes}
            row["state"] = "left" if record is None else record.state
            row["cause"] = "" if record is None else record.cause
            row["seconds"] = None if record is None else round(record.seconds, 1)
            row["run"] = " ".join(runs)
            if len(runs) == 1:
                row |= _summary(runs_dir / runs[0])
            rows.append(row)
        return pd.DataFrame(rows)


def run_sweep(
    grid: Grid,
    *,
    runs_dir: Path = RUNS_DIR,
    executor: str = "pool",
    options: Options | None = None,
    retry: bool = False,
    limit: float | None = None,
) -> Sweep:
    """Execute what is left of a grid.

    Args:
        grid: what to run.
        runs_dir: folder of runs, points and sweeps.
        executor: serial, pool or ray.
        options: of the executor.
        retry: execute failed points again.
        limit: seconds that a point may take.

    Returns:
        The sweep with a record for every point.

    Raises:
        ConfigError: for a grid with faults, all of them.
        RunError: if the sweep's folder cannot be written, or another process holds it.
        KeyboardInterrupt: after every kernel was ended; start it again to continue.
    """
    execute, options = get_executor(executor), options or Options()
    points = points_of(grid, lambda point: ended(point, runs_dir, quiet=True) is None)
    folder = runs_dir / "sweeps" / (grid.name or points[0].notebook.stem)
    with _folder(folder):
        records = {p.id: record for p in points if (record := ended(p, runs_dir)) is not None}
        left = [p for p in points if p.id not in records or (retry and records[p.id].state == "failed")]
        for point in left:
            records.pop(point.id, None)
        sweep = Sweep(folder, points, records)
        _keep_grid(grid, folder)
        tasks = [task_of(point, runs_dir, limit=limit, retry=retry) for point in left]
        unwritten = _write(sweep, runs_dir)
        with (
            _Line(folder.name, sweep, len(left)) as line,
            contextlib.closing(execute(tasks, replace(options, told=line.started))) as ending,  # type: ignore[type-var]
        ):
            for task, record in ending:
                records[task.id] = record
                unwritten = _write(sweep, runs_dir)
                line.ended(record)
        for point in points:  # somebody may have removed a run meanwhile
            if point.id in records and ended(point, runs_dir, quiet=True) is None and records[point.id].state == "done":
                logger.warning("%s: its run is gone again; the sweep is not complete", point.id)
                del records[point.id]
                unwritten = _write(sweep, runs_dir)
        if unwritten is not None:
            raise RunError(f"sweep {folder}: every point has ended, but the table could not be written: {unwritten}")
        return sweep


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
    except OSError as error:
        raise RunError(f"sweep {folder}: {error.strerror or error}") from None
    with locked(folder, "sweep"):
        yield


def _keep_grid(grid: Grid, folder: Path) -> None:
    """Write the grid; says so if the folder had another one, whose table it replaces."""
    path, text = folder / "grid.yaml", grid.text()
    try:
        if path.exists() and path.read_text() != text:
            logger.warning(
                "%s: another grid of this name was here; its table is replaced, its points and runs stay", folder.name
            )
        write_text(path, text)
    except OSError as error:
        raise RunError(f"sweep {folder}: {error.strerror or error}") from None


def task_of(point: Point, runs_dir: Path, *, limit: float | None = None, retry: bool = False) -> Task:
    """What an executor needs of a point."""
    folder = folder_of(point, runs_dir)
    places = {"runs_dir": str(runs_dir.resolve()), "out_dir": str((folder / "out").resolve())}
    given = {**point.parameters, **{name: places[name] for name in PLACES if name in point.places}}
    return Task(
        point.id, str(folder.resolve()), str(point.notebook), point.source, given, places["runs_dir"], os.getcwd(), limit, retry,
        memory_of(point.job), point.run, processes=1 if point.job is None else point.job.trainer.processes,
    )  # fmt: skip


def folder_of(point: Point, runs_dir: Path) -> Path:
    """Where a point writes."""
    return runs_dir / "points" / point.id


def memory_of(job: JobConfig | None) -> int:
    """Bytes that the kernel of a point takes, as far as sizes tell."""
    if job is None:
        return LIBRARIES["vllm"]
    parts = int(estimate(job, measure=False).memory["bytes"].sum())
    ranks = job.trainer.processes if job.trainer.processes > 1 else 0
    return parts + LIBRARIES.get(job.rollout.engine, LIBRARIES["vllm"]) + ranks * RANK


def ended(point: Point, runs_dir: Path, *, quiet: bool = False) -> Record | None:
    """How a point ended; None if it did not, or if its run is gone since. A record that cannot be read is a failure."""
    try:
        record = read_record(folder_of(point, runs_dir))
    except RunError as error:
        return Record(point.id, "failed", str(error))
    gone = [] if record is None else lacks(record, runs_dir)
    if gone and quiet:
        return None
    if gone:
        logger.warning("%s: its run %s is gone; it is executed again", point.id, gone[0])
        return None
    return record


def _runs(record: Record | None) -> tuple[str, ...]:
    return record.runs if record is not None and record.state == "done" else ()


def _summary(run: Path) -> dict[str, Any]:
    try:
        summary = json.loads((run / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return {name: summary.get(name) for name in NUMBERS}


def _write(sweep: Sweep, runs_dir: Path) -> OSError | None:
    """Write status and table; a failure is said and returned, since the next point may bring both up to date."""
    points = []
    for point in sweep.points:
        record = sweep.records.get(point.id)
        points.append(
            {"arm": point.arm, "id": point.id, **(asdict(record) if record else {"state": "left", "runs": []})}
        )
    try:
        write_json(sweep.folder / "status.json", {"written": time.time(), "points": points})
        write_text(sweep.folder / "table.csv", sweep.table(runs_dir).to_csv(index=False))
    except OSError as error:
        logger.warning("%s: the table could not be written: %s", sweep.folder.name, error.strerror or error)
        return error
    return None


class _Line:
    """One line of progress on a terminal, a log line every point otherwise: done, failed, left, time left."""

    def __init__(self, name: str, sweep: Sweep, left: int) -> None:
        self._name, self._sweep, self._left, self._all = name, sweep, left, left
        self._begun, self._running = time.monotonic(), 0
        self._bar = tqdm(total=len(sweep.points), initial=len(sweep.points) - left, desc=name, unit="point",
                         disable=not sys.stderr.isatty(), bar_format="{desc} |{bar:20}| {n_fmt}/{total_fmt}{postfix}")  # fmt: skip
        self._show()

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()

    def started(self, task: Task) -> None:
        """A point starts."""
        self._sweep.ran.add(task.id)
        self._running += 1
        self._show(quiet=True)

    def ended(self, record: Record) -> None:
        """A point ended."""
        self._left, self._running = self._left - 1, max(0, self._running - 1)
        self._bar.n += 1
        if record.state == "failed":
            self._bar.clear()
            logger.warning("%s failed: %s", record.id, record.cause)
        self._show()

    def text(self) -> str:
        """What the line says."""
        parts = [f"{self._sweep.count('done')} done", f"{self._sweep.count('failed')} failed", f"{self._left} left"]
        finished = self._all - self._left
        if self._left and finished:
            parts.append(f"about {clock((time.monotonic() - self._begun) / finished * self._left)} left")
        return ", ".join(parts)

    def _show(self, quiet: bool = False) -> None:
        self._bar.set_postfix_str(self.text() + (f", {self._running} running" if self._running else ""))
        if self._bar.disable and not quiet:
            logger.info("%s: %s", self._name, self.text())


def clock(seconds: float) -> str:
    """A duration as a person says it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
