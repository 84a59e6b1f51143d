"""A run's numbers for a tracker: `rar export RUN... --to tensorboard | wandb`.

What is written is what the run folder holds: every numeric column of metrics.parquet at its step, the config, and the summary. Nothing
is computed and nothing leaves the machine: TensorBoard gets event files, W&B an offline run that `wandb sync` would upload. A run that
goes on can be exported as far as it is; exporting it again replaces what was written before.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rar_lib.errors import ConfigError, EngineError, RunError
from rar_lib.runs.files import leaves
from rar_lib.runs.registry import RunEntry, inspect

Write = Callable[[RunEntry, Path], None]


def export(runs: Sequence[Path], to: str, out: Path) -> list[Path]:
    """Write runs for a tracker; returns a folder a run.

    Args:
        runs: run folders.
        to: tensorboard or wandb.
        out: folder to write into; a folder `<to>/<run>` in it is replaced.

    Raises:
        ConfigError: for another tracker.
        EngineError: if the tracker is not installed.
        RunError: for a folder that is no run, or has no step yet.
    """
    if to not in TRACKERS:
        raise ConfigError(f"to: expected one of {', '.join(TRACKERS)}, found {to!r}")
    entries = [inspect(path) for path in runs]
    for entry in entries:
        if entry.state in ("broken", "foreign"):
            raise RunError(f"run folder {entry.path}: {entry.state}: {entry.note}")
        if entry.done == 0:
            raise RunError(f"run folder {entry.path}: expected at least one finished step, found none")
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise RunError(
            f"runs: expected each name once, found {', '.join(sorted({n for n in names if names.count(n) > 1}))} twice"
        )
    write = TRACKERS[to]()
    folders = []
    for entry in entries:
        folder = out / to / entry.name
        partial = folder.with_name(f"{folder.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write(entry, partial)
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)
        except OSError as error:
            raise RunError(f"export {folder}: {error.strerror or error}") from None
        folders.append(folder)
    return folders


def scalars(table: pd.DataFrame) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, column -> value) of every row; absent values are left out, and infinite ones stay what they are."""
    numbers = table.select_dtypes("number").drop(columns="step", errors="ignore")
    for step, (_, row) in zip(table["step"], numbers.iterrows(), strict=True):
        yield int(step), {str(name): float(value) for name, value in row.items() if not math.isnan(float(value))}


def _stored(entry: RunEntry) -> tuple[dict[str, Any], dict[str, Any]]:
    config = json.loads((entry.path / "config.json").read_text())["config"]
    summary = entry.path / "summary.json"
    return config, json.loads(summary.read_text()) if summary.exists() else {}


def _tensorboard() -> Write:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise EngineError("tensorboard is not installed; install the extra rar-lib[trackers]") from None

    def write(entry: RunEntry, folder: Path) -> None:
        config, summary = _stored(entry)
        last = 0
        with SummaryWriter(str(folder)) as writer:
            for step, values in scalars(entry.metrics()):
                last = step
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
            for name, value in leaves(summary, "/"):
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    writer.add_scalar(f"summary/{name}", float(value), last)
            writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```")
            if summary:
                writer.add_text("summary", f"```json\n{json.dumps(summary, indent=2)}\n```")

    return write


def _wandb() -> Write:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb
    except ImportError:
        raise EngineError("wandb is not installed; install the extra rar-lib[trackers]") from None
    settings = wandb.Settings(
        console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True, save_code=False
    )

    def write(entry: RunEntry, folder: Path) -> None:
        config, summary = _stored(entry)
        with wandb.init(
            project="rar", id=entry.name, name=entry.name, group=entry.label, dir=folder, mode="offline", config=config,
            settings=settings, tags=["rar", entry.state],
        ) as run:  # fmt: skip
            for step, values in scalars(entry.metrics()):
                run.log(values, step=step)
            run.summary.update({name: value for name, value in summary.items() if value is not None})

    return write


TRACKERS: dict[str, Callable[[], Write]] = {"tensorboard": _tensorboard, "wandb": _wandb}
