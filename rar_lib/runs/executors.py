"""Who executes the points of a sweep, behind one call: one by one, a pool of processes on this machine, or Ray tasks.

    for task, record in get_executor("pool")(tasks, options): ...

Every executor yields a record a task in the order in which they end, and leaves no kernel behind when its caller stops early, is
interrupted or killed. The pool starts a point only where its memory fits beside what runs; with GPUs each point gets one of its own. A
script that uses the pool needs the usual `if __name__ == "__main__":`, since its processes import the script.
Ray gets the same needs as resources of its tasks and must see the runs folder under the same path on every node.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from rar_lib.errors import ConfigError, EngineError
from rar_lib.runs.files import human
from rar_lib.runs.point import Record, Task, end_process, execute, record_failure

SHARE = 0.9  # of the memory that is free at the start; the rest is left to the machine


@dataclass(frozen=True)
class Options:
    """How to execute.

    Attributes:
        workers: points at a time, or processes where a point's trainer has several; None: as many as there are cores (or GPUs, if there are any).
        memory: bytes that all points together may take; None: 90 % of what is free at the start.
        gpus: of this machine, or a Ray task; 0 on a machine without any.
        told: called when a point starts.
    """

    workers: int | None = None
    memory: int | None = None
    gpus: int = 0
    told: Callable[[Task], None] = lambda task: None

    @property
    def at_a_time(self) -> int:
        """Workers, asked for or not."""
        return self.workers or self.gpus or os.cpu_count() or 1


Executor = Callable[[Sequence[Task], Options], Iterator[tuple[Task, Record]]]


def get_executor(name: str) -> Executor:
    """By name: serial, pool or ray.

    Raises:
        ConfigError: names those that there are.
    """
    if name not in EXECUTORS:
        raise ConfigError(f"executor: expected one of {', '.join(EXECUTORS)}, found {name!r}")
    return EXECUTORS[name]


def serial(tasks: Sequence[Task], options: Options) -> Iterator[tuple[Task, Record]]:
    """One by one, papermill in this process, each kernel in its own."""
    memory = free_memory() if options.memory is None else options.memory
    for task in tasks:
        if task.memory > memory:
            yield task, _too_large(task, memory)
            continue
        options.told(task)
        yield task, execute(task)


# ---------------------------------------------------------------- a pool on this machine


@dataclass(frozen=True)
class _Running:
    task: Task
    process: Any
    result: Connection  # the record comes from here
    life: Connection  # closed, or gone with this process, it ends the other one and its kernel


def pool(tasks: Sequence[Task], options: Options) -> Iterator[tuple[Task, Record]]:
    """As many at a time as there are workers and memory, each in a process of its own, forked from a server that has papermill."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["papermill", "nbclient", "rar_lib.runs.point"])
    memory = free_memory() if options.memory is None else options.memory
    workers = options.at_a_time if not options.gpus else min(options.at_a_time, options.gpus)
    devices = _devices(options.gpus)
    waiting, running = list(tasks), list[_Running]()
    peaks: dict[int, int] = {}  # what points of one estimate were seen to take
    try:
        while waiting or running:
            taken = sum(_need(one.task, peaks) for one in running)
            busy = {one.task.run for one in running} - {""}
            at_work = sum(one.task.processes for one in running)
            task = next((t for t in waiting if taken + _need(t, peaks) <= memory and t.run not in busy), None)
            if task is not None and (not running or at_work + task.processes <= workers):
                waiting.remove(task)
                if devices:
                    used = {d for one in running for d in one.task.environment["CUDA_VISIBLE_DEVICES"].split(",")}
                    free = [device for device in devices if device not in used][: task.processes]
                    task = replace(task, environment={**task.environment, "CUDA_VISIBLE_DEVICES": ",".join(free)})
                running.append(_start(context, task))
                options.told(task)
                continue
            if not running:  # nothing runs, and yet none of those that wait fits
                for task in waiting:
                    yield task, _too_large(replace(task, memory=_need(task, peaks)), memory)
                return
            ready = wait([one.result for one in running])
            for one in [one for one in running if one.result in ready]:
                running.remove(one)
                record = _receive(one)
                one.life.close()
                one.process.join()
                if record.peak:
                    peaks[one.task.memory] = max(record.peak, peaks.get(one.task.memory, 0))
                yield one.task, record
    finally:
        for one in running:
            one.life.close()
        for one in running:
            one.process.join()


def _need(task: Task, peaks: dict[int, int]) -> int:
    return max(task.memory, peaks.get(task.memory, 0))


def _too_large(task: Task, memory: int) -> Record:
    told = f"not started: it needs about {human(task.memory)} of memory, and {human(memory)} may be taken"
    return Record(task.id, "failed", told, finished=time.time())


def _start(context: Any, task: Task) -> _Running:
    result, sender = context.Pipe(duplex=False)
    ear, life = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(task, sender, ear), daemon=False)
    process.start()
    sender.close()
    ear.close()
    return _Running(task, process, result, life)


def _serve(task: Task, sender: Connection, ear: Connection) -> None:
    """In a process of its own: execute, send, end. When the other side is gone, the kernel and this process go too."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they reach the whole group; the sweep decides
        signal.signal(name, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_sweep, args=(ear,), daemon=True).start()
    sender.send(execute(task))


def _end_with_the_sweep(ear: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        ear.recv()
    for child in psutil.Process().children():
        end_process(child.pid)
    os._exit(1)


def _receive(one: _Running) -> Record:
    try:
        return one.result.recv()
    except (EOFError, OSError):
        one.process.join()
        code = one.process.exitcode
        told = f"the process that executed it ended with status {code}"
        if code == 1:
            told += '; a script that runs a sweep needs `if __name__ == "__main__":`'
        elif code == -signal.SIGKILL:
            told = "the process that executed it was killed; if nobody did, the machine may have run out of memory"
        return record_failure(one.task, told)


def _devices(count: int) -> list[str]:
    """Names of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)] if visible is None else [name.strip() for name in visible.split(",")]
    return names[:count]


def gpus() -> int:
    """Devices of this machine."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_memory() -> int:
    """Bytes that points may take: a share of what is free, within the limit of the control group."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, StopIteration):  # "max" is no number: no limit
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        lines = (group / "memory.stat").read_text().splitlines()
        given_back = next(
            int(line.split()[1]) for line in lines if line.startswith("inactive_file ")
        )  # files in the cache
        free = min(free, limit - used + given_back)
    return int(SHARE * free)


# ---------------------------------------------------------------- Ray


def ray_tasks(tasks: Sequence[Task], options: Options) -> Iterator[tuple[Task, Record]]:
    """A Ray task a point: on the cluster of RAY_ADDRESS, or embedded.

    Raises:
        ConfigError: for a bound that Ray decides itself.
        EngineError: if Ray is not installed, or its cluster is not reached.
    """
    if options.memory is not None or (options.workers is not None and os.environ.get("RAY_ADDRESS")):
        raise ConfigError("executor ray: memory, and on a cluster workers, are what its nodes say; leave them out")
    try:
        import ray
    except ImportError:
        raise EngineError("executor ray: not installed; install the extra rar-lib[ray]") from None
    mine = not ray.is_initialized()
    if mine:
        address = os.environ.get("RAY_ADDRESS")
        cores: dict[str, Any] = {} if address else {"num_cpus": options.workers}
        try:
            ray.init(
                address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **cores
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise EngineError(f"executor ray: {address or 'embedded'}: {error}") from None
    gpus = 1 if options.gpus else 0
    remote = ray.remote(max_retries=1)(execute)
    room = max((node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]), default=0)
    pending: dict[Any, Task] = {}
    waiting = []
    try:
        for task in tasks:
            if task.memory > room:
                yield task, _too_large(task, int(room))
            else:
                waiting.append(task)
        while waiting or pending:
            busy = {task.run for task in pending.values()} - {""}
            for task in list(waiting):
                if task.run not in busy:
                    busy |= {task.run} - {""}
                    waiting.remove(task)
                    needs = {"num_cpus": task.processes, "num_gpus": gpus * task.processes, "memory": task.memory}
                    pending[remote.options(**needs).remote(task)] = task
            (ended,), _ = ray.wait(list(pending), num_returns=1)
            task = pending.pop(ended)
            try:
                yield task, ray.get(ended)
            except ray.exceptions.RayError as error:
                yield task, record_failure(task, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)
        if mine:
            ray.shutdown()


EXECUTORS: dict[str, Executor] = {"serial": serial, "pool": pool, "ray": ray_tasks}
