"""How run folders are written: beside the place, to the disk, then renamed into it; and how a folder is held against other processes.

A kill at any moment leaves the file of before or the new one, and so does a lost machine, since a file reaches the disk before its name
does. Nothing here imports torch: a sweep's own processes stay small.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from rar_lib.errors import RunError

PATIENCE = 1.0  # seconds: whoever lists runs holds each of them for a moment
STEP = 0.05


def write_json(path: Path, value: Any) -> None:
    """Write beside, then rename. NaN and infinity are refused (ValueError)."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write beside, then rename."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    commit(partial, path)


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a parquet table beside, then rename."""
    partial = path.with_name(path.name + ".partial")
    table.to_parquet(partial, index=False)
    commit(partial, path)


def read_table(path: Path) -> pd.DataFrame:
    """A parquet table, or an empty one if it is not there yet."""
    return pd.read_parquet(path) if path.exists() else pd.DataFrame()


def commit(partial: Path, final: Path) -> None:
    """Bring a file, or a folder of files, to the disk and give it its name, in place of a file that had it."""
    for path in sorted(partial.rglob("*")) if partial.is_dir() else []:
        _flush(path)
    _flush(partial)
    partial.replace(final)
    _flush(final.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(folder: Path, what: str, patience: float = PATIENCE) -> Iterator[int]:
    """Hold a folder against other processes.

    Args:
        folder: gets a file `.lock`, which says who holds it.
        what: what an error calls the folder.
        patience: seconds to wait for another process to let go.

    Yields:
        The file's descriptor: a child process that inherits it holds the folder too.

    Raises:
        RunError: if another process still holds it; names the process and its machine.
    """
    with (folder / ".lock").open("a+") as file:
        end = time.monotonic() + patience
        while not _try(file):
            if time.monotonic() >= end:
                raise RunError(f"{what} {folder}: held by process {holder(folder) or 'unknown'}")
            time.sleep(STEP)
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield file.fileno()


def _try(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def holder(folder: Path) -> str | None:
    """`<process> on <machine>` of whoever holds a folder now; None if nobody does."""
    try:
        with (folder / ".lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return file.read().strip() or "unknown"
    except OSError:  # no lock file, or none that may be read
        return None
    return None


def size_of(folder: Path) -> int:
    """Bytes of the files under a folder; links are not followed, and a link to a folder has none."""
    total = 0
    if folder.is_symlink():
        return 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # a file may be renamed meanwhile
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def leaves(tree: Mapping[str, Any], separator: str = ".", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(joined names, value) of everything in nested mappings that is no mapping itself."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, separator, f"{prefix}{name}{separator}")
        else:
            yield f"{prefix}{name}", value


def human(count: float) -> str:
    """Bytes as a person reads them, in powers of 1000."""
    value, units = float(count), ["B", "KB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
