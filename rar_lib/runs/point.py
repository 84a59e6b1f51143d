"""One point of a sweep: a notebook executed by papermill in a kernel process of its own, and the record of how it ended.

    data/runs/points/<id>/
        point.json             what the point is: notebook, parameters
        notebook.ipynb         the executed notebook; of a failed point up to its error
        out/                   figures and tables of the notebook
        kernel.log             what the kernel wrote beside its messages: of a crash the last words
        record.json            written last: done or failed, why, how long, how much memory, which runs

A point that cannot be executed is a record too, with its cause: nothing that a notebook does ends the sweep. Whoever executes a point
holds its folder; when the process that executes is killed, its kernel ends by itself within two seconds, and the next to come waits for
that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from rar_lib.errors import RunError
from rar_lib.runs.files import commit, locked, write_json

SCHEMA_VERSION = 1
PATIENCE = 30.0  # seconds for the kernel of a killed sweep to end
LOOK = 0.25  # seconds between two looks at a kernel


@dataclass(frozen=True)
class Task:
    """What an executor hands to a process, on this machine or another: plain data.

    Attributes:
        id: of the point.
        folder: of the point; made if it is not there.
        notebook: to execute.
        parameters: all of them, the places too.
        cwd: folder that relative paths among the parameters start from.
        limit: seconds after which the kernel is killed; None: no limit.
        retry: execute a point again whose record says that it failed.
        memory: bytes that it may take, as estimated.
        environment: variables that its kernel gets beside those of the executor.
    """

    id: str
    folder: str
    notebook: str
    parameters: dict[str, Any]
    cwd: str
    limit: float | None = None
    retry: bool = False
    memory: int = 0
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """How a point ended.

    Attributes:
        id: of the point.
        state: `done`, or `failed`.
        cause: of a failure: what, and in which cell.
        seconds: from the start of the kernel to its end; 0 if none was started.
        peak: bytes of the kernel at most; None if it was not seen.
        runs: names of the run folders that the notebook lists in its out_dir's policies.csv.
        finished: seconds since the epoch.
    """

    id: str
    state: Literal["done", "failed"]
    cause: str = ""
    seconds: float = 0.0
    peak: int | None = None
    runs: tuple[str, ...] = ()
    finished: float = 0.0
    schema_version: int = SCHEMA_VERSION


def read_record(folder: Path) -> Record | None:
    """The record of a point; None if it has not ended.

    Raises:
        RunError: for a record that cannot be read.
    """
    path = folder / "record.json"
    try:
        values = json.loads(path.read_text())
        if values["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"expected schema version {SCHEMA_VERSION}, found {values['schema_version']!r}")
        return Record(**{**values, "runs": tuple(values["runs"])})
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"point {folder}: record.json cannot be read: {error}") from None


def execute(task: Task) -> Record:
    """Execute a point, or return its record if it has ended. Never raises but for KeyboardInterrupt: what went wrong is the record's cause.

    A failure that cannot be written, since the folder is not writable, is returned all the same.
    """
    folder = Path(task.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, "point", PATIENCE):
            try:
                before = read_record(folder)
            except RunError:
                if not task.retry:
                    raise
                before = None
            if before is not None and not (before.state == "failed" and task.retry):
                return before
            record = _attempt(task, folder)
            write_json(folder / "record.json", asdict(record))
            return record
    except (OSError, RunError) as error:
        told = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
        return Record(task.id, "failed", told, finished=time.time())


def _attempt(task: Task, folder: Path) -> Record:
    out, partial = folder / "out", folder / "notebook.partial.ipynb"
    out.mkdir(exist_ok=True)
    (folder / "record.json").unlink(missing_ok=True)
    asked = {"id": task.id, "notebook": task.notebook, "parameters": task.parameters}
    write_json(folder / "point.json", {"schema_version": SCHEMA_VERSION, **asked})
    begun = time.monotonic()
    watch = _Watch(task.limit)
    cause = ""
    with watch, _environment(task.environment):
        try:
            _papermill(task, partial, folder / "kernel.log", watch)
        except Exception as error:
            cause = watch.cause or _explain(error)
    if partial.exists():
        commit(partial, folder / "notebook.ipynb")
    runs = _runs_of(out)
    seconds = time.monotonic() - begun
    return Record(task.id, "failed" if cause else "done", cause, seconds, watch.peak, runs, time.time())


def _papermill(task: Task, target: Path, log: Path, watch: _Watch) -> None:
    import papermill
    from jupyter_client.manager import AsyncKernelManager

    class Kernel(AsyncKernelManager):
        async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
            with log.open("w") as file:
                await super().start_kernel(stdout=file, stderr=file, **options)
            watch.kernel = getattr(self.provisioner, "pid", None)

    logging.getLogger("papermill").setLevel(logging.ERROR)
    papermill.execute_notebook(
        task.notebook, str(target), task.parameters, cwd=task.cwd, progress_bar=False, kernel_name="python3", language="python",
        start_timeout=120, kernel_manager_class=Kernel,
    )  # fmt: skip


def _explain(error: Exception) -> str:
    name = type(error).__name__
    if name == "PapermillExecutionError":
        return f"cell {error.exec_count}: {error.ename}: {_one_line(str(error.evalue))}"  # type: ignore[attr-defined]
    if name == "DeadKernelError":
        return "the kernel died; if nobody ended it, the machine may have run out of memory (kernel.log has its last words)"
    return f"{name}: {_one_line(str(error))}"


def _one_line(text: str, longest: int = 500) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", " ".join(text.split()))
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _runs_of(out: Path) -> tuple[str, ...]:
    import pandas as pd

    table = out / "policies.csv"
    if not table.exists():
        return ()
    runs = pd.read_csv(table, dtype=str)
    return tuple(runs["run"]) if "run" in runs else ()


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Watch:
    """Looks at a kernel while it works: its peak of memory, and its limit of time.

    Attributes:
        kernel: its process, once there is one.
        cause: why the kernel was ended from here; empty if it was not.
        peak: bytes at most, as last seen.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit, self._stop = limit, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.kernel: int | None = None
        self.cause = ""
        self.peak: int | None = None

    def _look(self) -> None:
        begun = time.monotonic()
        while not self._stop.wait(LOOK):
            if self.kernel is not None:
                self.peak = _high_water(self.kernel) or self.peak
            if self._limit is not None and time.monotonic() - begun > self._limit and self.kernel and not self.cause:
                self.cause = f"exceeded its limit of {self._limit:g} s, and was ended"
                end_process(self.kernel)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.kernel is not None and any(exc):
            end_process(self.kernel)  # of an interrupted point; papermill ends the kernel of any other


def end_process(pid: int) -> None:
    """Kill a process that this one started, and its children."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.Error):
                one.kill()


def _high_water(pid: int) -> int | None:
    """Bytes that a process held at most; None where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
