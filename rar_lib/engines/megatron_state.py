"""A Megatron trainer's state on disk: weights (fp32 masters under bf16) and AdamW moments, exact, readable under any layout.

Every process writes the slices that it speaks for, under Hugging Face names; a process reads what its own layout holds of
them. Megatron's dist_checkpointing (0.16) is not used: the optimizer is chained under some layouts and not under others, and
its keys with it, so that what EP = 2 wrote could not be read under PP = 2; it also starts a process to write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rar_lib.engines.megatron_weights import hf_shards, load_weights
from rar_lib.engines.slices import MOMENTS, Shard, Slices, require_one_step, save_slices


class _Optimizer:
    """Main parameters and AdamW states of a trainer, whose optimizer may be several."""

    def __init__(self, trainer: Any) -> None:
        chain = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
        self._owner = {
            id(p): one.optimizer for one in chain for group in one.optimizer.param_groups for p in group["params"]
        }

    def main(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """fp32, also under bf16."""
        return getattr(parameter, "main_param", parameter)

    def state(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """Empty before the first step, and for a frozen parameter, which never moves."""
        main = self.main(parameter)
        return self._owner[id(main)].state[main] if id(main) in self._owner else {}


def _parameters(trainer: Any) -> Iterator[torch.nn.Parameter]:
    for chunk in trainer.chunks:
        yield from chunk.parameters()


def _shards(trainer: Any, optimizer: _Optimizer, stepped: bool) -> Iterator[Shard]:
    weights = hf_shards(trainer.chunks, lambda p: optimizer.main(p).detach())
    yield from (replace(shard, name=f"model.{shard.name}") for shard in weights)
    for key in MOMENTS if stepped else ():

        def moment(parameter: torch.nn.Parameter, key: str = key) -> torch.Tensor:
            return optimizer.state(parameter).get(key, torch.zeros_like(parameter, dtype=torch.float32))

        yield from (replace(shard, name=f"optimizer.{key}.{shard.name}") for shard in hf_shards(trainer.chunks, moment))


def save_state(trainer: Any, folder: Path) -> None:
    """Write this process's part of a MegatronTrainer's state.

    Raises:
        EngineError: if parameters that learn took different numbers of steps.
    """
    optimizer = _Optimizer(trainer)
    states = [optimizer.state(p) for p in _parameters(trainer) if p.requires_grad]
    step = require_one_step(float(state["step"]) if state else 0.0 for state in states)
    save_slices(folder, trainer.name, trainer.ranks, step, _shards(trainer, optimizer, step > 0))


def load_state(trainer: Any, folder: Path) -> None:
    """Continue from a folder that `save_state` wrote, under whatever layout.

    Raises:
        EngineError: if files, slices or tensors are missing.
    """
    state, optimizer = Slices(folder, trainer.name), _Optimizer(trainer)

    def into(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        main = optimizer.main(parameter)
        main.copy_(value)
        parameter.copy_(main)

    load_weights(trainer.chunks, lambda name: state.read(f"model.{name}"), into)
    for parameter in _parameters(trainer):
        optimizer.state(parameter).clear()  # a state saved before the first step has none
    for key in MOMENTS if state.step else ():

        def moment(parameter: torch.nn.Parameter, value: torch.Tensor, key: str = key) -> None:
            if parameter.requires_grad:
                optimizer.state(parameter).update({"step": state.step.clone(), key: value.float().clone()})

        load_weights(trainer.chunks, lambda name, key=key: state.read(f"optimizer.{key}.{name}"), moment)  # type: ignore[misc]
