"""One point of a sweep: a notebook executed by papermill in a kernel process of its own, and the record of how it ended.

    data/runs/points/<id>/
        point.json             what the point is: notebook, parameters
        notebook.ipynb         the executed notebook; of a failed point up to its error
        out/                   figures and tables of the notebook
        kernel.log             what the kernel wrote beside its messages: of a crash the last words
        record.json            written last: done or failed, why, how long, how much memory, which runs

A point that cannot be executed is a record too, with its cause: nothing that a notebook does ends the sweep. Whoever executes a point
holds its folder, and so does the kernel; when the process that executes is killed, the kernel ends with it (Linux), and whoever comes
next, be it another sweep, waits for the folder and reads the record that it finds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from rar_lib.child import end_with_parent
from rar_lib.errors import RunError
from rar_lib.runs.files import commit, locked, write_json

SCHEMA_VERSION = 1
PATIENCE = math.inf  # seconds: another sweep may be computing the point
LOOK = 0.25  # seconds between two looks at a kernel


@dataclass(frozen=True)
class Task:
    """What an executor hands to a process, on this machine or another: plain data.

    Attributes:
        id: of the point.
        folder: of the point; made if it is not there.
        notebook: where the notebook lies, for whoever reads point.json.
        source: the notebook itself without outputs, as it was when the point got its id.
        parameters: all of them, the places too.
        runs_dir: folder of all runs.
        cwd: folder that relative paths among the parameters start from.
        limit: seconds from its start after which the kernel is killed; None: no limit.
        retry: execute a point again whose record says that it failed.
        memory: bytes that it may take, as estimated.
        run: folder of the run that it makes; two points of one run are not executed at the same time. Empty: none, or not known.
        environment: variables that its kernel gets beside those of the executor.
        processes: of its trainer; it counts as so many workers, and gets so many GPUs.
    """

    id: str
    folder: str
    notebook: str
    source: str
    parameters: dict[str, Any]
    runs_dir: str
    cwd: str
    limit: float | None = None
    retry: bool = False
    memory: int = 0
    run: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    processes: int = 1


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
        if values["id"] != folder.name or values["state"] not in ("done", "failed"):
            raise ValueError(f"expected {folder.name}, done or failed, found {values['id']!r}, {values['state']!r}")
        return Record(**{**values, "cause": str(values["cause"]), "runs": tuple(map(str, values["runs"]))})
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"point {folder}: record.json cannot be read: {error}") from None


def lacks(record: Record, runs_dir: Path) -> list[str]:
    """Runs of a done point that are no longer there, or not complete."""
    return [run for run in record.runs if record.state == "done" and not (runs_dir / run / "summary.json").is_file()]


def execute(task: Task) -> Record:
    """Execute a point, or return its record if it has ended. Never raises but for KeyboardInterrupt: what went wrong is the record's cause.

    A done point whose run is gone is executed again.

    A failure that cannot be written, since the folder is not writable, is returned all the same.
    """
    folder = Path(task.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, "point", PATIENCE) as lock:
            try:
                before = read_record(folder)
            except RunError:
                if not task.retry:
                    raise
                before = None
            again = before is not None and (
                (task.retry and before.state == "failed") or lacks(before, Path(task.runs_dir))
            )
            if before is not None and not again:
                return before
            record = _attempt(task, folder, lock)
            write_json(folder / "record.json", asdict(record))
            return record
    except Exception as error:
        return Record(task.id, "failed", _explain(error), finished=time.time())


def record_failure(task: Task, cause: str) -> Record:
    """The record of a point whose process is gone: the one that it left, or a failure that is written if it can be."""
    folder = Path(task.folder)
    record = Record(task.id, "failed", cause, finished=time.time())
    with contextlib.suppress(OSError, RunError), locked(folder, "point", 5.0):
        before = read_record(folder)
        if before is not None:
            return before
        write_json(folder / "record.json", asdict(record))
    return record


def _attempt(task: Task, folder: Path, lock: int) -> Record:
    out, partial = folder / "out", folder / "notebook.partial.ipynb"
    for name in ("record.json", "notebook.ipynb", partial.name, "kernel.log"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(out, ignore_errors=True)  # nothing of an earlier attempt may pass for this one's
    out.mkdir()
    asked = {"id": task.id, "notebook": task.notebook, "parameters": task.parameters}
    write_json(folder / "point.json", {"schema_version": SCHEMA_VERSION, **asked})
    begun = time.monotonic()
    watch, cause = _Watch(task.limit), ""
    runs: tuple[str, ...] = ()
    with watch, _environment(task.environment):
        try:
            _papermill(task, partial, folder / "kernel.log", watch, lock)
            runs = _runs_of(out)
        except Exception as error:
            cause = watch.cause or _explain(error)
    if partial.exists():
        try:
            json.loads(partial.read_text())
            commit(partial, folder / "notebook.ipynb")
        except ValueError:
            cause = cause or f"{partial.name} was not written whole"
    seconds = time.monotonic() - begun
    return Record(task.id, "failed" if cause else "done", cause, seconds, watch.peak, runs, time.time())


def _papermill(task: Task, target: Path, log: Path, watch: _Watch, lock: int) -> None:
    import nbformat
    import papermill
    from jupyter_client.manager import AsyncKernelManager

    class Kernel(AsyncKernelManager):
        async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
            with log.open("w") as file:
                await super().start_kernel(
                    stdout=file, stderr=file, pass_fds=(lock,), preexec_fn=end_with_parent, **options
                )
            watch.kernel = getattr(self.provisioner, "pid", None)

    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what went wrong is the record's cause
    path = str(target).replace("{", "{{").replace("}", "}}")  # papermill formats paths with the parameters
    for last in (False, True):
        try:
            done = papermill.execute_notebook(
                nbformat.reads(task.source, as_version=4), path, task.parameters, cwd=task.cwd, progress_bar=False, kernel_name="python3",
                language="python", start_timeout=120, kernel_manager_class=Kernel,
            )  # fmt: skip
            break
        except RuntimeError as error:  # two kernels that start at once may choose the same ports; nothing was executed
            if last or watch.cause or "before replying" not in str(error):
                raise
    left = [c for c in done.cells if c.cell_type == "code" and c.source.strip() and c.execution_count is None]
    if left:  # papermill takes an exit with status 0 for an end
        raise RunError(f"{len(left)} cells were not executed: the kernel was left early")


def _explain(error: Exception) -> str:
    name = type(error).__name__
    if name == "PapermillExecutionError":
        return f"cell {error.exec_count}: {error.ename}: {_one_line(str(error.evalue))}"  # type: ignore[attr-defined]
    if name == "DeadKernelError":
        return "the kernel died; if nobody ended it, the machine may have run out of memory (kernel.log has its last words)"
    return _one_line(str(error)) if isinstance(error, RunError) else f"{name}: {_one_line(str(error))}"


def _one_line(text: str, longest: int = 500) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", " ".join(text.split()))
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _runs_of(out: Path) -> tuple[str, ...]:
    import pandas as pd

    table = out / "policies.csv"
    if not table.exists():
        return ()
    try:
        runs = pd.read_csv(table, dtype=str)
    except ValueError as error:  # pandas' errors and wrong encodings are among them
        raise RunError(f"out/policies.csv cannot be read: {error}") from None
    if "run" in runs and runs["run"].isna().any():
        raise RunError("out/policies.csv: expected the name of a run in every row, found none in some")
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
        begun = math.inf
        while not self._stop.wait(LOOK):
            if self.kernel is None:
                continue
            begun = min(begun, time.monotonic())
            self.peak = max(_high_water(self.kernel) or 0, self.peak or 0) or None
            if self._limit is not None and time.monotonic() - begun > self._limit and not self.cause:
                self.cause = f"exceeded its limit of {self._limit:g} s, and was ended"
                end_process(self.kernel)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        if (
            self.kernel is not None
        ):  # of an interrupted point; papermill ends the kernel of any other, but not what it started
            end_process(self.kernel)


def end_process(kernel: int) -> None:
    """Kill a kernel, and whatever it started and did not give another session."""
    with contextlib.suppress(psutil.Error):
        psutil.Process(kernel).kill()  # first, so that it starts nothing any more
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == kernel:
                process.kill()


def _high_water(pid: int) -> int | None:
    """Bytes that a process and those that it started held at most, each by itself; None where the system does not say."""
    with contextlib.suppress(psutil.Error):
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        return sum(_own_high_water(one) for one in family) or None
    return None


def _own_high_water(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
