"""EngineSession: who owns the engines of a process.

vLLM tolerates one engine a process and takes torch.distributed (and any Megatron model) down with it, so one session
creates it, several runs share it by pushing their own weights, and it goes last. A run in a shared session computes what
it computes alone: trainers are built anew from the checkpoint for each run, rollouts are reseeded at every step.
A vLLM server is a process of its own and bound by none of this; one that a session starts is shared and ended likewise.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from rar_lib.checkpoint import SpecialTokens, load_model_config
from rar_lib.config import JobConfig, RolloutConfig
from rar_lib.engines.base import Rollout, Trainer
from rar_lib.engines.seen import require_experts
from rar_lib.engines.trainers import build_trainer
from rar_lib.errors import EngineError
from rar_lib.replay.scores import SignalRequest

logger = logging.getLogger("rar")


def available(engine: str) -> bool:
    """Whether an engine's package is installed, without importing it."""
    package = {"vllm": "vllm", "megatron": "megatron.core"}.get(engine)
    if package is None:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def resolve_engines(config: JobConfig, say: Callable[[str], None] = print) -> JobConfig:
    """Replace `auto` by the real engine (vLLM, Megatron-Core) where it is installed, else by `hf`, and say so in one line.

    Raises:
        ConfigError: if the engine that is found refuses other settings of the config.
    """
    choice = {"rollout": config.rollout.engine, "trainer": config.trainer.engine}
    if "auto" not in choice.values():
        return config
    real = {"rollout": "vllm", "trainer": "megatron"}
    missing = [real[part] for part, engine in choice.items() if engine == "auto" and not available(real[part])]
    chosen = {p: (real[p] if available(real[p]) else "hf") if e == "auto" else e for p, e in choice.items()}
    if config.rollout.zero_mismatch or config.rollout.router_noise:
        chosen["rollout"] = "hf"
    if missing:
        say(f"engine auto: {' and '.join(missing)} not installed, falling back to hf")
    tree = config.resolved()
    for part, engine in chosen.items():
        tree[part]["engine"] = engine
    return JobConfig.build(tree)  # what an engine refuses it refuses here too


def require_fit(config: JobConfig, path: Path, signals: SignalRequest | None) -> None:
    """Refuse a layout that cannot do what a run asks of it, before any engine starts.

    Args:
        config: with resolved engines.
        path: checkpoint folder.
        signals: what planning passes will ask for.

    Raises:
        EngineError: see megatron_model.require_layout and seen.require_experts.
    """
    if config.trainer.engine == "megatron":
        from rar_lib.engines.megatron_model import require_layout

        require_layout(load_model_config(path), config.trainer)
    require_experts(config.trainer, signals)


def open_server(path: Path, config: RolloutConfig, special: SpecialTokens) -> Any:
    """A rollout over the server at `config.url`; without one, a vLLM server is started, and ended by the rollout's `shutdown`.

    Raises:
        EngineError: if the server does not start or answer, or is not fit to be a rollout engine.
    """
    from rar_lib.engines.http import OwnServer, Server
    from rar_lib.engines.sglang_server import SGLangServerRollout
    from rar_lib.engines.vllm_server import VLLMServerRollout

    if config.url is None and not available("vllm"):
        raise EngineError(
            "rollout.engine vllm_server: vLLM is not installed; install the extra rar-lib[vllm], or give rollout.url"
        )
    own = OwnServer(path, config.dtype) if config.url is None else None
    if own is not None:
        logger.info("starting a vLLM server for %s in %s; its log: %s", path.name, config.dtype, own.log)
    server = Server(config.url or (own.url if own else ""), own)
    try:
        if own is not None:
            server.wait_until_up()
        kind = SGLangServerRollout if config.engine == "sglang_server" else VLLMServerRollout
        return kind(path, config, special, server)
    except BaseException:
        server.close()
        raise


class EngineSession:
    """Engines of this process; a context manager.

    Raises:
        EngineError: when a second session asks for vLLM while the first still holds it.
    """

    _vllm_owner: ClassVar[EngineSession | None] = None

    def __init__(self) -> None:
        self._vllm: Any = None
        self._ranks: Any = None
        self._key: tuple[str, str] | None = None
        self._served: Any = None
        self._served_key: tuple[str | None, ...] = ()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # several threads on a few shared cores cost more than they bring at this size

    def open(self, config: JobConfig, path: Path, special: SpecialTokens) -> tuple[Rollout, Trainer]:
        """A rollout and a fresh trainer, both at the checkpoint's weights (version 0).

        Args:
            config: with resolved engines, none of them `auto`.
            path: checkpoint folder.
            special: tokens that end and pad a response.

        Raises:
            EngineError: if an engine is missing or does not start, another session holds vLLM, or pushed weights do not arrive.
        """
        if config.rollout.engine == "vllm":  # before Megatron: creating vLLM may restart torch.distributed
            self._require_vllm(config, path, special)
        trainer = self.trainer(config, path)
        if config.rollout.engine == "vllm":
            self._vllm.reconfigure(config.rollout)
            rollout: Rollout = self._vllm
        elif config.rollout.engine in ("vllm_server", "sglang_server"):
            rollout = self._require_server(config, path, special)
        else:
            from rar_lib.engines.hf_rollout import HFRollout

            scores = config.router_replay.gates == "recorded"
            rollout = HFRollout(path, config.rollout, special, trainer, config.algorithm.updates_per_batch, scores)
        rollout.check_sync(trainer.weights())
        rollout.load_weights(trainer.weights(), 0)
        return rollout, trainer

    def trainer(self, config: JobConfig, path: Path) -> Trainer:
        """A fresh trainer at the checkpoint's weights, in ranks of its own where the config asks for several processes.

        Ranks serve one trainer at a time: that of the run before is gone.

        Raises:
            EngineError: if the engine is missing, or its ranks do not start.
        """
        if config.trainer.processes > 1:
            from rar_lib.engines.remote_trainer import RankGroup, RemoteTrainer

            if self._ranks is None or not self._ranks.alive or self._ranks.processes != config.trainer.processes:
                if self._ranks is not None:
                    self._ranks.close()
                logger.info("starting %d processes for the trainer", config.trainer.processes)
                self._ranks = RankGroup(config.trainer.processes)
            return RemoteTrainer(self._ranks, path, config.trainer, config.algorithm)
        return build_trainer(path, config.trainer, config.algorithm)

    def _require_vllm(self, config: JobConfig, path: Path, special: SpecialTokens) -> None:
        key = (str(path), config.rollout.dtype)
        if key == self._key:
            return
        owner = EngineSession._vllm_owner
        if owner is not None and owner is not self:
            raise EngineError(
                "another EngineSession of this process holds vLLM, which tolerates one engine a process; close it first"
            )
        self._close_vllm()
        from rar_lib.engines.vllm_rollout import VLLMRollout

        logger.info("starting vLLM for %s in %s", path.name, config.rollout.dtype)
        self._vllm = VLLMRollout(path, config.rollout, special)
        self._key, EngineSession._vllm_owner = key, self

    def _require_server(self, config: JobConfig, path: Path, special: SpecialTokens) -> Rollout:
        """A client of a server; the session's own server is started once and shared by its runs."""
        wanted = config.rollout
        key = (wanted.engine, wanted.url, str(path), wanted.dtype)
        if key != self._served_key:
            self._leave_server()
            self._served, self._served_key = open_server(path, wanted, special), key
        self._served.reconfigure(wanted)
        return self._served

    def _leave_server(self) -> None:
        if self._served is not None:
            self._served.shutdown()
        self._served, self._served_key = None, ()

    def close(self) -> None:
        """Shut down what this session holds. Trainers that it handed out must not be used afterwards."""
        self._leave_server()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        self._close_vllm()

    def _close_vllm(self) -> None:
        if self._vllm is None:
            return
        if available("megatron"):
            from rar_lib.engines.megatron_cpu import stop_parallel_state

            stop_parallel_state()
        self._vllm.shutdown()
        self._vllm, self._key, EngineSession._vllm_owner = None, None, None

    def __enter__(self) -> EngineSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
