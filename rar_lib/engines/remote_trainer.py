"""A trainer whose ranks are processes of their own, and the group of these processes.

The loop, the rollout and the run folder stay in one process, in a notebook or behind `rar run`; every method of the trainer is
sent to the ranks and made by all of them together. So vLLM in process keeps its torch.distributed to itself, and a rank that
dies takes neither the notebook nor the run's last checkpoint with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import torch

import rar_lib.errors
from rar_lib.child import PARENT
from rar_lib.config import AlgorithmConfig, TrainerConfig
from rar_lib.engines.base import Capture, LogprobResult, Objective, Replay, TokenBatch, UpdateResult
from rar_lib.engines.launcher import NODES
from rar_lib.engines.rank import FOLDER, KEY
from rar_lib.errors import EngineError, RarError
from rar_lib.replay.scores import SignalRequest

LONGEST = 80  # characters of a folder in which a socket may lie
GRACE = 20.0  # seconds that the other ranks have to come to the same end as one that failed
START = 300.0  # seconds that ranks may take to import their engines


class RankGroup:
    """N processes under torchrun's agent that build and drive one trainer after another.

    Args:
        processes: N.

    Attributes:
        folder: socket, logs by rank, and what failed. Removed at the end if nothing did.

    Raises:
        EngineError: if the ranks do not come up; names the first that failed and its log.
    """

    def __init__(self, processes: int) -> None:
        here = processes // int(os.environ.get(NODES, "1"))
        if torch.cuda.is_available() and torch.cuda.device_count() < here:
            raise EngineError(
                f"trainer.processes {processes}: expected a GPU for each of the {here} on this machine, found {torch.cuda.device_count()}"
            )
        self.processes, self.built, self._named = processes, 0, False
        self.folder = Path(tempfile.mkdtemp(prefix="rar-ranks-"))
        if len(str(self.folder)) > LONGEST:
            self.folder.rmdir()
            self.folder = Path(tempfile.mkdtemp(prefix="rar-ranks-", dir="/tmp"))
        key = secrets.token_bytes(16)
        listener = Listener(str(self.folder / "socket"), authkey=key)
        environment = {**os.environ, FOLDER: str(self.folder), KEY: key.hex(), PARENT: str(os.getpid())}
        environment["TORCHDYNAMO_DISABLE"] = "1"
        environment.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set it, and say so
        root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
        with (self.folder / "launcher.log").open("wb") as log:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "rar_lib.engines.launcher", str(self.folder), str(processes)],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._connection: Any = None
        try:
            self._connection = self._accept(listener)
        except BaseException:
            self.kill()
            raise
        finally:
            listener.close()

    def _accept(self, listener: Listener) -> Any:
        """The connection of the first rank; other ranks are proven by the first call."""
        waiting = listener._listener._socket  # type: ignore[attr-defined]
        waiting.settimeout(0.2)
        until = time.monotonic() + START
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                return listener.accept()
            self._require_alive("start")
        self._named = True
        raise EngineError(f"trainer: {self.processes} ranks did not start within {START:.0f} s; logs in {self.folder}")

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make every rank call a method of its trainer (or `build` one); the result of the first.

        Raises:
            RarError: what the ranks raised, if all raised the same.
            EngineError: if a rank failed alone, or died; names it and its log. The group is then gone.
        """
        if not self.alive:
            raise EngineError(f"trainer, {name}: the ranks are gone; open the engines again")
        try:
            message = pickle.dumps((name, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EngineError(
                f"trainer, {name}: what is sent to the ranks must be picklable (an objective: a function or class of a module): {error}"
            ) from None
        try:
            self._connection.send_bytes(message)
            failed_since = None
            while not self._connection.poll(0.1):
                self._require_alive(name)
                if failed_since is None and self._errors():
                    failed_since = time.monotonic()
                if failed_since is not None and time.monotonic() - failed_since > GRACE:
                    raise self._failed(name, self._errors())
            result, errors = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError, BrokenPipeError):
            self._launcher_end()
            self._require_alive(name, over=True)
            raise
        except BaseException:  # in the middle of a call there is no way back to a common state
            self.kill()
            raise
        if errors:
            raised = self._failed(name, errors)
            if not self._alike(errors):  # the ranks may not hold the same any more
                self.kill()
                raise raised
            for file in self.folder.glob("error-*.json"):
                file.unlink()
            raise raised
        return result

    def _alike(self, errors: list[dict[str, Any]]) -> bool:
        return len(errors) == self.processes and len({(e["type"], e["message"]) for e in errors}) == 1

    def _errors(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("error-*.json"))]

    def _failed(self, name: str, errors: list[dict[str, Any]]) -> RarError:
        first = errors[0]
        kind = getattr(rar_lib.errors, first["type"], None)
        if self._alike(errors) and kind is not None:
            return kind(first["message"])
        told = "; ".join(f"rank {e['rank']} of {self.processes}: {e['type']}: {e['message']}" for e in errors)
        return (kind or EngineError)(f"trainer, {name}: {told} (log: {self.log(first['rank'])})")

    def log(self, rank: int) -> Path:
        """Where a rank writes what it says. An error that names it keeps it."""
        self._named = True
        found = sorted(self.folder.glob(f"logs/*/attempt_0/{rank}/stderr.log"))
        return found[-1] if found else self.folder / "launcher.log"

    def _launcher_end(self) -> None:
        """Wait for the agent to notice what happened and to end the other ranks."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(GRACE)

    def _require_alive(self, name: str, over: bool = False) -> None:
        if not over and self._launcher.poll() is None:
            return
        self.kill()
        file = self.folder / "failure.json"
        if not file.exists():
            self._named = True
            raise EngineError(f"trainer, {name}: the ranks are gone (log: {self.folder / 'launcher.log'})")
        failure = json.loads(file.read_text())
        code = failure["exitcode"]
        how = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with status {code}"
        errors = [e for e in self._errors() if e["rank"] == failure["rank"]]
        why = f": {errors[0]['type']}: {errors[0]['message']}" if errors else ""
        raise EngineError(
            f"trainer, {name}: rank {failure['rank']} of {self.processes} (process {failure['pid']}) {how}{why}; the other ranks were "
            f"ended; log: {self.log(failure['rank'])}"
        )

    def kill(self) -> None:
        """End all processes at once; logs stay."""
        if self._launcher.poll() is None:
            self._launcher.terminate()  # the agent passes it on to the ranks
            try:
                self._launcher.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait()
        if self._connection is not None:
            self._connection.close()

    @property
    def alive(self) -> bool:
        """The processes are there and wait for a call."""
        return self._launcher.poll() is None and not self._connection.closed

    def close(self) -> None:
        """End the ranks in peace, and remove their folder unless an error named a log of it."""
        if self.alive:
            with contextlib.suppress(OSError):
                self._connection.send_bytes(pickle.dumps(("close", (), {})))
            self._launcher_end()
            self.kill()
        if not self._named:
            shutil.rmtree(self.folder, ignore_errors=True)


class RemoteTrainer:
    """See `Trainer` in base.py: the same calls, made by all ranks of a group.

    Args:
        group: of as many processes as the config asks for; it holds one trainer at a time.
        path, config, algorithm: as for MegatronTrainer and HFTrainer.
    """

    def __init__(self, group: RankGroup, path: Path, config: TrainerConfig, algorithm: AlgorithmConfig) -> None:
        self.name: str = config.engine
        group.built += 1
        self._number = group.built
        self.config, self.algorithm, self.model_id, self._group = config, algorithm, path.name, group
        group.call("build", path, config, algorithm)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._number != self._group.built:
            raise EngineError(
                f"trainer, {name}: its ranks serve another trainer since (number {self._group.built}, this is {self._number}); ranks hold "
                "one at a time"
            )
        return self._group.call(name, *args, **kwargs)

    def logprobs(
        self,
        batch: TokenBatch,
        *,
        temperature: float,
        replay: Replay | None = None,
        capture: Capture = False,
        micro_batch_size: int | None = None,
        signals: SignalRequest | None = None,
        measure: bool = False,
    ) -> LogprobResult:
        """See `Trainer.logprobs`."""
        return self._call(
            "logprobs", batch, temperature=temperature, replay=replay, capture=capture, micro_batch_size=micro_batch_size, signals=signals,
            measure=measure,
        )  # fmt: skip

    def update(
        self,
        batch: TokenBatch,
        objective: Objective,
        *,
        temperature: float,
        replay: Replay | None = None,
        measure: bool = False,
        routers: bool = False,
    ) -> UpdateResult:
        """See `Trainer.update`. The objective travels to the ranks, so it must be picklable."""
        return self._call(
            "update", batch, objective, temperature=temperature, replay=replay, measure=measure, routers=routers
        )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Trainer.weights`; of any shape."""
        yield from self._call("weights")

    def save(self, folder: Path) -> None:
        """See `Trainer.save`; every rank writes its part, so the folder must be one that all see."""
        self._call("save", folder.absolute())

    def load(self, folder: Path) -> None:
        """See `Trainer.load`."""
        self._call("load", folder.absolute())
