"""How a run shows that it moves: a bar in a notebook, a log line every few seconds in batch, or nothing."""

from __future__ import annotations

import logging
import sys
import time
from typing import Literal, Protocol

from tqdm.auto import tqdm

Style = Literal["auto", "bar", "log", "none"]
LOG_SECONDS = 5.0
logger = logging.getLogger("rar")


class Progress(Protocol):
    """Told about each finished step."""

    def step(self, done: int, note: str) -> None:
        """`done` steps are finished; `note` says how it goes."""

    def close(self) -> None:
        """The run ended."""


class _Bar:
    def __init__(self, name: str, total: int, start: int) -> None:
        self._bar = tqdm(total=total, initial=start, desc=name, unit="step")

    def step(self, done: int, note: str) -> None:
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


class _Log:
    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._last = name, total, 0.0

    def step(self, done: int, note: str) -> None:
        if done == self._total or time.monotonic() - self._last >= LOG_SECONDS:
            self._last = time.monotonic()
            logger.info("%s step %d/%d %s", self._name, done, self._total, note)

    def close(self) -> None:
        """Every line is out already."""


class _Silent:
    def step(self, done: int, note: str) -> None:
        """Nobody looks."""

    def close(self) -> None:
        """Nobody looks."""


def in_notebook() -> bool:
    """True inside an IPython kernel (JupyterLab, papermill, nbval)."""
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"


def progress(name: str, total: int, start: int = 0, style: Style = "auto") -> Progress:
    """A progress display for a run of `total` steps of which `start` are done; `auto` is a bar in a notebook, log lines elsewhere."""
    if style == "auto":
        style = "bar" if in_notebook() else "log"
    if style == "bar":
        return _Bar(name, total, start)
    return _Log(name, total) if style == "log" else _Silent()
