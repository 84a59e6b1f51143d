"""A folder that another process holds."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CODE = (
    "import sys, pathlib; from rar_lib.runs.files import locked\n"
    "with locked(pathlib.Path(sys.argv[1]), 'x'): print('held', flush=True); sys.stdin.read()"
)


@contextlib.contextmanager
def held_elsewhere(folder: Path) -> Iterator[int]:
    """The id of a process that holds a folder until the end of the block."""
    command = [sys.executable, "-c", CODE, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield other.pid
        other.communicate("")
