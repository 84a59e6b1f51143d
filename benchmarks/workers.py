"""Processes that take turns: each does one round of work when it is told to, and says what it took.

Engines that cannot share a process (two vLLM engines, another environment's packages) are compared round by round all the same.
A worker is `python -m MODULE FD ARGUMENTS...`; in it, `Turn` waits for the word and answers over the inherited descriptor.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.alternate import orders

ROOT = Path(__file__).resolve().parent.parent


class Turn:
    """The worker's end: `wait` until told, `done` when the round is over."""

    def __init__(self, descriptor: int) -> None:
        self._end = Connection(descriptor)
        self._cpu = self._wall = 0.0

    def wait(self) -> None:
        """Until the next round begins. Exits where the other side is gone or has had enough."""
        try:
            if not self._end.recv():
                os._exit(0)  # in the middle of a training loop, which would go on otherwise
        except EOFError:
            os._exit(1)
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def done(self, **more: Any) -> None:
        """Answer with CPU and wall seconds since `wait`, and whatever else there is to tell."""
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        self._end.send({"cpu": cpu, "wall": wall, **more})


class Worker:
    """The other end.

    Args:
        module: what to run.
        arguments: after the descriptor.
        python: interpreter; by default this one.
    """

    def __init__(self, module: str, *arguments: str, python: str | Path = sys.executable) -> None:
        ours, theirs = socket.socketpair()
        self._folder = tempfile.TemporaryDirectory()  # for its own temporary files: it ends without tidying up
        self.name = " ".join((module, *arguments))
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [str(python), "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=sys.stderr, cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TMPDIR": self._folder.name},
        )  # fmt: skip
        theirs.close()
        self._end = Connection(ours.detach())

    def round(self) -> dict[str, Any]:
        """Let it do one round; its answer.

        Raises:
            RuntimeError: if it died; its own words are on stderr.
        """
        try:
            self._end.send(True)
            return self._end.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise RuntimeError(f"worker {self.name}: ended with status {self._process.wait()}") from None

    def close(self) -> None:
        """Tell it to end, and wait for that."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._end.send(False)
        self._process.wait()
        self._end.close()
        self._folder.cleanup()


def answers(workers: dict[str, Worker], rounds: int, warm: int) -> dict[str, list[dict[str, Any]]]:
    """What each worker answers in each counted round."""
    names = list(workers)
    try:
        for _ in range(warm):
            for name in names:
                workers[name].round()
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for order in orders(names, rounds):
            for name in order:
                found[name].append(workers[name].round())
    finally:
        for worker in workers.values():
            worker.close()
    return found
