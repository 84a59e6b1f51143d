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


def _moments(trainer: Any, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, dict[str, Any]]:
    """The main parameter (fp32, also under bf16) and its AdamW state, which may be empty."""
    main = getattr(parameter, "main_param", parameter)
    optimizers = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    for one in optimizers:
        if any(main is p for group in one.optimizer.param_groups for p in group["params"]):
            return main, one.optimizer.state[main]
    return main, {}  # frozen


def _parameters(trainer: Any) -> Iterator[torch.nn.Parameter]:
    for chunk in trainer.chunks:
        yield from chunk.parameters()


def _shards(trainer: Any, stepped: bool) -> Iterator[Shard]:
    def main(parameter: torch.nn.Parameter) -> torch.Tensor:
        return _moments(trainer, parameter)[0].detach()

    yield from (replace(shard, name=f"model.{shard.name}") for shard in hf_shards(trainer.chunks, main))
    for key in MOMENTS if stepped else ():

        def moment(parameter: torch.nn.Parameter, key: str = key) -> torch.Tensor:
            state = _moments(trainer, parameter)[1]  # empty for a frozen parameter, which never moves
            return state.get(key, torch.zeros_like(parameter, dtype=torch.float32))

        yield from (replace(shard, name=f"optimizer.{key}.{shard.name}") for shard in hf_shards(trainer.chunks, moment))


def save_state(trainer: Any, folder: Path) -> None:
    """Write this process's part of the state."""
    states = [_moments(trainer, p)[1] for p in _parameters(trainer) if p.requires_grad]
    step = require_one_step(float(state["step"]) if state else 0.0 for state in states)
    save_slices(folder, trainer.name, trainer.ranks, step, _shards(trainer, step > 0))


def load_state(trainer: Any, folder: Path) -> None:
    """Continue from a folder that `save_state` wrote, under whatever layout.

    Raises:
        EngineError: if files, slices or tensors are missing.
    """
    state = Slices(folder, trainer.name)

    def into(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        main = _moments(trainer, parameter)[0]
        main.copy_(value)
        parameter.copy_(main)

    load_weights(trainer.chunks, lambda name: state.read(f"model.{name}"), into)
    for parameter in _parameters(trainer):
        _moments(trainer, parameter)[1].clear()  # a state saved before the first step has none
    for key in MOMENTS if state.step else ():

        def moment(parameter: torch.nn.Parameter, value: torch.Tensor, key: str = key) -> None:
            if parameter.requires_grad:
                _moments(trainer, parameter)[1].update({"step": state.step.clone(), key: value.float().clone()})

        load_weights(trainer.chunks, lambda name, key=key: state.read(f"optimizer.{key}.{name}"), moment)  # type: ignore[misc]
