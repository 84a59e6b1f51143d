"""Which runs there are, in what state, and what they take of the disk: `rar runs list | show | rm`.

A folder is looked at, never repaired and never trusted: a link is not followed, a folder whose content belongs to another name is
foreign, and one that cannot be read is broken, each with the reason. Looking needs no engine and works while a run goes on, since every
file of a run is replaced whole.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from rar_lib.config import JobConfig
from rar_lib.errors import RarError, RunError
from rar_lib.runs.files import holder, human, leaves, locked, read_table, size_of
from rar_lib.runs.result import RunResult, label_of
from rar_lib.runs.store import require_schema, short_digest
from rar_lib.summary import settings

State = Literal["complete", "running", "interrupted", "broken", "foreign"]
NAME = re.compile(r"(none|R2|R3)(-[a-z_]+)?-seed\d+-[0-9a-f]{12}")


@dataclass(frozen=True)
class RunEntry:
    """A run folder as it was found.

    Attributes:
        path: of the folder.
        state: `complete` has a summary; `running` is held by a process; `interrupted` continues when it is started again; `broken`
            cannot be read; `foreign` is a link, or holds another run than its name says.
        note: who holds it, why it is broken or foreign, at which step it diverged.
        label: what tables call the run; empty if its config cannot be read.
        seed, done, steps: finished steps, and those that were asked for.
        reward, k3: of the last finished step (k3 rollout/old); None before the first.
        size: bytes.
        modified: when a table or the summary was last written, seconds since the epoch.
    """

    path: Path
    state: State
    note: str = ""
    label: str = ""
    seed: int | None = None
    done: int = 0
    steps: int | None = None
    reward: float | None = None
    k3: float | None = None
    size: int = 0
    modified: float = 0.0

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.path.name

    def metrics(self) -> pd.DataFrame:
        """The table of steps so far, also while the run goes on.

        Raises:
            RunError: if it cannot be read, or the folder is a link.
        """
        if self.path.is_symlink():
            raise RunError(f"run folder {self.path}: {self.note}")
        try:
            return read_table(self.path / "metrics.parquet")
        except (OSError, ValueError) as error:  # pyarrow's errors are among them
            raise RunError(f"run folder {self.path}: metrics.parquet cannot be read: {error}") from None


def is_run(path: Path) -> bool:
    """A folder, or a link, that has a run's name or a run's config.json."""
    if NAME.fullmatch(path.name):
        return True
    try:
        stored = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(stored, dict) and {"config", "computed", "digests"} <= set(stored)


def find(runs_dir: Path) -> list[RunEntry]:
    """Every run folder of a folder, by name; other folders (sweeps, points, figures) are left alone.

    Raises:
        RunError: if the folder is not there.
    """
    if not runs_dir.is_dir():
        raise RunError(f"runs folder {runs_dir}: not there")
    return [inspect(path) for path in sorted(runs_dir.iterdir()) if is_run(path)]


def inspect(path: Path) -> RunEntry:
    """Look at one run folder."""
    if path.is_symlink():
        return RunEntry(path, "foreign", f"a link to {path.readlink()}, which is not followed")
    if not path.is_dir():
        return RunEntry(path, "foreign", "a file" if path.exists() else "not there")
    size, held = size_of(path), holder(path)
    stored = path / "config.json"
    if not stored.exists():
        if held:
            return RunEntry(path, "running", f"held by process {held}", size=size)
        empty = not any(p.is_file() for p in path.rglob("*") if p.name not in (".lock", "config.json.partial"))
        if empty:
            return RunEntry(path, "interrupted", "before its first step", size=size)
        return RunEntry(path, "broken", "no config.json", size=size)
    try:
        return _read(path, json.loads(stored.read_text()), held, size)
    except RarError as error:
        return RunEntry(path, "broken", str(error).removeprefix(f"run folder {path}: "), size=size)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # pyarrow's and json's errors are among them
        return RunEntry(path, "broken", f"{type(error).__name__}: {error}", size=size)


def _read(path: Path, config: Any, held: str | None, size: int) -> RunEntry:
    known = _known(path, config)
    metrics = read_table(path / "metrics.parquet")
    summary = RunResult.read(path).summary if (path / "summary.json").exists() else None
    wrong = _foreign(path, config)
    if wrong:
        return RunEntry(path, "foreign", wrong, size=size)
    last: Any = {} if metrics.empty else metrics.iloc[-1]
    written = (p for p in map(path.joinpath, ("config.json", "metrics.parquet", "summary.json")) if p.exists())
    known |= {
        "size": size,
        "done": len(metrics),
        "reward": _float(last.get("reward/mean")),
        "k3": _float(last.get("mismatch/rollout_old/k3")),
        "modified": max(p.stat().st_mtime for p in written),
    }
    if summary is not None:
        return RunEntry(path, "complete", f"diverged: {summary['diverged']}" if summary["diverged"] else "", **known)
    return RunEntry(path, "running" if held else "interrupted", f"held by process {held}" if held else "", **known)


def _known(path: Path, stored: Any) -> dict[str, Any]:
    if not isinstance(stored, dict) or not isinstance(stored.get("config"), dict):
        raise RunError(f"run folder {path}: config.json has no config")
    require_schema(path, stored)
    config = JobConfig.build(stored["config"])
    return {"label": label_of(settings(config)), "seed": config.seed, "steps": config.steps}


def _foreign(path: Path, stored: dict[str, Any]) -> str:
    content = {name: stored.get(name) for name in ("computed", "digests", "version")}
    digest = short_digest(content)
    if not path.name.endswith(f"-{digest}"):
        return f"holds the run {digest}, which its name does not say"
    return ""


def _float(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def resolve(name: str, runs_dir: Path) -> Path:
    """The folder of a run that is given by its path, its name, or the beginning or end of its name; absolute, the last part not followed.

    Raises:
        RunError: if nothing, or more than one run, is called so.
    """
    if not name.strip():
        raise RunError("run: expected a folder, a name, or the beginning or end of a name; found an empty text")
    given = Path(name)
    given = given if given.name not in ("", "..") else given.resolve()
    if given.is_dir() and (is_run(given) or given.is_symlink()):
        return given.parent.resolve() / given.name
    names = [p for p in sorted(runs_dir.iterdir()) if is_run(p)] if runs_dir.is_dir() else []
    exact = [p for p in names if p.name == name]
    found = exact or [p for p in names if p.name.startswith(name) or p.name.endswith(name)]
    if len(found) != 1:
        told = ", ".join(p.name for p in found[:5]) + (", ..." if len(found) > 5 else "")
        raise RunError(f"run {name!r}: expected one run in {runs_dir}, found {told or 'none'}")
    return found[0].parent.resolve() / found[0].name


def remove(paths: Sequence[Path], *, checkpoints_only: bool = False, dry: bool = False) -> int:
    """Remove run folders, or only the trainer states of complete ones. Returns the bytes that become free.

    Args:
        paths: run folders; one that is given twice counts once.
        checkpoints_only: keep everything but the trainer states.
        dry: remove nothing.

    Raises:
        RunError: before anything is removed, if one is a link, not a run, held by a process, or (checkpoints_only) not complete.
    """
    paths = list(dict.fromkeys(path.parent.resolve() / path.name for path in paths))
    with contextlib.ExitStack() as held:
        for path in paths:
            if path.is_symlink() or not path.is_dir() or not is_run(path):
                told = inspect(path).note if path.is_symlink() or not path.is_dir() else "another folder"
                raise RunError(f"{path}: expected a run folder, found {told}; nothing was removed")
            try:
                held.enter_context(locked(path, "run folder"))
            except (RunError, OSError) as error:
                raise RunError(f"{error}; nothing was removed") from None
            part = path / "checkpoints"
            if checkpoints_only and (part.is_symlink() or not (path / "summary.json").is_file()):
                what = "a link" if part.is_symlink() else "an incomplete run, which needs its checkpoints to continue"
                raise RunError(f"run folder {path}: {what}; nothing was removed")
        parts = [path / "checkpoints" if checkpoints_only else path for path in paths]
        freed = sum(size_of(part) for part in parts)
        for part in parts if not dry else ():
            if part.exists():
                try:
                    shutil.rmtree(part)
                except OSError as error:
                    raise RunError(f"{part}: {error.strerror or error}; it is removed in part") from None
    return freed


def plain(entry: RunEntry) -> dict[str, Any]:
    """An entry as JSON types."""
    return {**asdict(entry), "path": str(entry.path), "name": entry.name}


def details(entry: RunEntry) -> dict[str, Any]:
    """What `rar runs show` adds: settings that are not the defaults, the summary, the environment, bytes by part.

    What is not there, or cannot be read, is None.
    """

    def read(name: str) -> dict[str, Any] | None:
        try:
            found = json.loads((entry.path / name).read_text()) if not entry.path.is_symlink() else None
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    stored = read("config.json")
    parts = {p.name: size_of(p) if p.is_dir() else p.lstat().st_size for p in _inside(entry.path)}
    return {
        "computed": stored.get("computed") if stored else None,
        "digests": stored.get("digests") if stored else None,
        "summary": read("summary.json"),
        "environment": read("environment.json"),
        "bytes": parts,
    }


def describe(entry: RunEntry) -> str:
    """One run as text."""
    found = details(entry)
    lines = [f"{entry.name}: {entry.state}" + (f" ({entry.note})" if entry.note else "")]
    lines.append(f"  {entry.path}")
    if entry.label:
        lines.append(f"  {entry.label}, seed {entry.seed}, step {entry.done} of {entry.steps}")
    for title, values in (("settings beside the defaults", found["computed"]), ("summary", found["summary"])):
        if values:
            lines += [title, *(f"  {name}: {_short(value)}" for name, value in leaves(values))]
    environment = found["environment"]
    if environment:
        versions = ", ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())
        revision = environment.get("git_revision")
        lines += [
            "made with",
            f"  rar-lib {environment.get('rar_lib')} at {revision or 'an unknown revision'}; {versions}",
        ]
    lines += [
        f"disk: {human(entry.size)}",
        *(f"  {name}: {human(n)}" for name, n in sorted(found["bytes"].items()) if n),
    ]
    return "\n".join(lines)


def _inside(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else []


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_table(entries: Iterable[RunEntry]) -> pd.DataFrame:
    """A row a run, as text."""
    rows = [
        {
            "run": e.name,
            "policy": e.label,
            "seed": "" if e.seed is None else str(e.seed),
            "state": e.state,
            "steps": f"{e.done}/{'?' if e.steps is None else e.steps}",
            "last reward": "" if e.reward is None else f"{e.reward:.3f}",
            "last k3": "" if e.k3 is None else f"{e.k3:.2e}",
            "size": human(e.size),
            "note": e.note,
        }
        for e in entries
    ]
    return pd.DataFrame(
        rows, columns=["run", "policy", "seed", "state", "steps", "last reward", "last k3", "size", "note"]
    )
