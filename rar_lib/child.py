"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import signal
from typing import Any


def end_with_parent() -> None:
    """In a child: be killed when the thread that started this process ends (Linux: PR_SET_PDEATHSIG); elsewhere nothing."""
    if _LIBC is not None:
        _LIBC.prctl(1, int(signal.SIGKILL))


try:
    _LIBC: Any = ctypes.CDLL(None)
    _LIBC.prctl  # noqa: B018 - is it there?
except (OSError, AttributeError):
    _LIBC = None
