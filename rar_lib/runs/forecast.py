"""What a sweep will take, before it runs: `rar sweep GRID --dry-run`.

Memory follows from sizes. Time is that of a finished point that costs alike, scaled with its steps; where there is none, one share of a
batch is measured for every group of points that cost alike (rar_lib.estimate).
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rar_lib.config import JobConfig
from rar_lib.engines.session import EngineSession
from rar_lib.estimate import estimate
from rar_lib.runs.executors import Options, free_memory
from rar_lib.runs.files import human
from rar_lib.runs.grid import Grid, points_of
from rar_lib.runs.point import Record
from rar_lib.runs.sweep import clock, ended, memory_of

logger = logging.getLogger("rar")
CHEAP = ("seed", "lr", "weight_decay", "max_grad_norm", "clip_low", "clip_high", "steps", "model", "checkpoint_every")
NOTEBOOK_SECONDS = (
    12.0  # kernel, imports and figures of 07_policies beside its run, on two shared cores (benchmarks/sweep.py)
)


@dataclass(frozen=True)
class Forecast:
    """What is to come.

    Attributes:
        points: a row a point: point, arm, label, axes, state, seconds (NaN if unknown), memory (bytes), how.
        workers: points at a time, as many as fit into memory.
        retry: failed points are executed again.
        room: bytes that points may take together.
    """

    points: pd.DataFrame
    workers: int
    retry: bool = False
    room: int | None = None

    def __str__(self) -> str:
        shown = self.points.assign(
            seconds=[("unknown" if pd.isna(s) else clock(s)) for s in self.points["seconds"]],
            memory=[human(m) for m in self.points["memory"]],
        )
        ended = ("done",) if self.retry else ("done", "failed")
        left = self.points[~self.points["state"].isin(ended)]
        failed = 0 if self.retry else int((self.points["state"] == "failed").sum())
        total = left["seconds"].sum(min_count=1)
        lines = [shown.rename(columns={"seconds": "time"}).to_string(index=False, na_rep="")]
        told = "an unknown time" if left["seconds"].isna().any() else f"about {clock(total / self.workers)}"
        if len(left):
            lines.append(f"{len(left)} of {len(self.points)} points to run, {told} with {self.workers} at a time")
        else:
            lines.append(f"none of {len(self.points)} points to run")
        large = 0 if self.room is None else int((left["memory"] > self.room).sum())
        if large:
            lines.append(
                f"{large} of them need more memory than may be taken ({human(self.room or 0)}) and would not be started"
            )
        if failed:
            lines.append(f"{failed} failed before and are left alone; --retry executes them again")
        return "\n".join(lines)


def forecast(grid: Grid, runs_dir: Path, options: Options, *, retry: bool = False, measure: bool = True) -> Forecast:
    """What the points of a grid will take; nothing is run.

    Args:
        grid: as run_sweep takes it.
        runs_dir: where finished points are looked for.
        options: as run_sweep takes them; `workers` is 1 for one by one.
        retry: failed points would be executed again.
        measure: start engines for what no finished point tells.

    Raises:
        ConfigError: for a grid with faults, all of them.
    """
    points = points_of(grid)
    records = {p.id: ended(p, runs_dir) for p in points}
    known: dict[str, tuple[float, float, str]] = {}
    for point in points:
        record = records[point.id]
        if point.job is not None and record is not None and record.state == "done":
            known.setdefault(_cost(point.job), (*_line(record, point.job, runs_dir), f"as {point.id} took"))
    missing = {_cost(p.job): p.job for p in points if p.job is not None and _cost(p.job) not in known}
    if measure and missing:
        with EngineSession() as session:
            for number, (cost, job) in enumerate(missing.items(), 1):
                logger.info("measuring %d of %d groups of points that cost alike", number, len(missing))
                seconds = estimate(job, session).seconds
                steps = float(seconds["a_step"].sum())
                once = float(seconds["in_all"].sum()) - steps * job.steps
                known[cost] = (once + NOTEBOOK_SECONDS, steps, "measured on a share of a batch")
    rows = []
    for point in points:
        record, told = records[point.id], known.get(_cost(point.job)) if point.job is not None else None
        row: dict[str, Any] = {"point": point.id, "arm": point.arm, "label": point.label, **point.axes}
        row["state"] = "left" if record is None else record.state
        row["seconds"], row["how"] = float("nan"), ""
        if record is not None and record.state == "done":
            row["seconds"], row["how"] = record.seconds, "took"
        elif told is not None and point.job is not None:
            row["seconds"], row["how"] = told[0] + told[1] * point.job.steps, told[2]
        row["memory"] = (record.peak if record is not None and record.state == "done" else None) or memory_of(point.job)
        rows.append(row)
    table = pd.DataFrame(rows)
    memory = free_memory() if options.memory is None else options.memory
    at_a_time = min(options.at_a_time, max(1, int(memory // max(1, table["memory"].max()))))
    return Forecast(table, at_a_time, retry, memory)


def _cost(job: JobConfig) -> str:
    """What the time of a step depends on."""
    values = job.resolved()
    model = values["model"]["path"]
    for group in (values, values["algorithm"], values["router_replay"]):
        for name in CHEAP:
            group.pop(name, None)
    if job.router_replay.arm == "none":
        values["router_replay"] = None
    return json.dumps([model, values], sort_keys=True)


def _line(record: Record, job: JobConfig, runs_dir: Path) -> tuple[float, float]:
    """Seconds beside the steps, and of a step, of a point that is done."""
    a_step = 0.0
    for run in record.runs:
        summary = json.loads((runs_dir / run / "summary.json").read_text())
        a_step += sum(value or 0.0 for value in summary["seconds_per_step"].values())
    return max(0.0, record.seconds - a_step * job.steps), a_step
