"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

PARENT = "RAR_PARENT"  # process id of the parent, told by it where it may be gone before the child asks


def end_with_parent() -> None:
    """In a child, before anything that takes time: be killed when the thread that started this process ends (Linux: PR_SET_PDEATHSIG);
    elsewhere nothing. Ends at once if the parent is gone already."""
    if _LIBC is None:
        return
    _LIBC.prctl(1, int(signal.SIGKILL))
    if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
        os._exit(1)


try:
    _LIBC: Any = ctypes.CDLL(None)
    _LIBC.prctl  # noqa: B018 - is it there?
except (OSError, AttributeError):
    _LIBC = None
