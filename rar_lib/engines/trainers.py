"""Trainers by the name that `trainer.engine` gives them, for the session and for every rank of a spread trainer.

Each is imported when it is asked for: whoever asks for another does not miss its packages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rar_lib.config import AlgorithmConfig, TrainerConfig
from rar_lib.engines.base import Trainer
from rar_lib.errors import EngineError


def _megatron(path: Path, config: TrainerConfig, algorithm: AlgorithmConfig) -> Trainer:
    from rar_lib.engines.megatron_trainer import MegatronTrainer

    return MegatronTrainer(path, config, algorithm)


def _hf(path: Path, config: TrainerConfig, algorithm: AlgorithmConfig) -> Trainer:
    from rar_lib.engines.hf_trainer import HFTrainer

    return HFTrainer(path, config, algorithm)


TRAINERS: dict[str, Callable[[Path, TrainerConfig, AlgorithmConfig], Trainer]] = {"hf": _hf, "megatron": _megatron}


def build_trainer(path: Path, config: TrainerConfig, algorithm: AlgorithmConfig) -> Trainer:
    """A fresh trainer in this process, at the weights of the checkpoint folder `path`.

    Raises:
        EngineError: for `auto`, which is to be resolved before (session.resolve_engines), and whatever the engine refuses.
    """
    if config.engine not in TRAINERS:
        raise EngineError(f"trainer.engine: expected one of {', '.join(TRAINERS)}, found {config.engine!r}")
    return TRAINERS[config.engine](path, config, algorithm)
