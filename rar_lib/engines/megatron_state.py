"""A Megatron trainer's state on disk: weights (fp32 masters under bf16) and AdamW moments, exact, readable under any layout.

Every process writes the slices that it speaks for, under Hugging Face names; a process reads what its own layout holds of
them. Megatron's dist_checkpointing (0.16) is not used: the optimizer is chained under some layouts and not under others, and
its keys with it, so that what EP = 2 wrote could not be read under PP = 2; it also starts a process to write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rar_lib.engines.megatron_weights import Shard, hf_shards, load_weights
from rar_lib.errors import EngineError

MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "optimizer.step"


def _moments(trainer: Any, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, dict[str, Any]]:
    """The main parameter (fp32, also under bf16) and its AdamW state, which may be empty."""
    main = getattr(parameter, "main_param", parameter)
    optimizers = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    for one in optimizers:
        if any(main is p for group in one.optimizer.param_groups for p in group["params"]):
            return main, one.optimizer.state[main]
    return main, {}  # frozen


def _shards(trainer: Any) -> Iterator[tuple[str, Shard]]:
    def main(parameter: torch.nn.Parameter) -> torch.Tensor:
        return _moments(trainer, parameter)[0].detach()

    yield from (("model", shard) for shard in hf_shards(trainer.chunks, main))
    if not _step(trainer):
        return
    for key in MOMENTS:

        def moment(parameter: torch.nn.Parameter, key: str = key) -> torch.Tensor:
            state = _moments(trainer, parameter)[1]  # empty for a frozen parameter, which never moves
            return state.get(key, torch.zeros_like(parameter, dtype=torch.float32))

        yield from ((f"optimizer.{key}", shard) for shard in hf_shards(trainer.chunks, moment))


def _step(trainer: Any) -> float:
    """Steps taken, the same for every parameter that learns; 0 before the first."""
    states = [_moments(trainer, p)[1] for chunk in trainer.chunks for p in chunk.parameters() if p.requires_grad]
    steps = {float(state["step"]) if state else 0.0 for state in states}
    if len(steps) != 1:
        raise EngineError(
            f"trainer state: expected one number of optimizer steps for all parameters, found {sorted(steps)}"
        )
    return steps.pop()


def save_state(trainer: Any, folder: Path) -> None:
    """Write this process's part of the state: `trainer.safetensors`, or `trainer-00001-of-00002.safetensors` and so on."""
    tensors, places = {}, {}
    for kind, shard in _shards(trainer):
        name = f"{kind}.{shard.name}"
        tensors[name] = shard.tensor.contiguous().clone()
        places[name] = [shard.dim, shard.index, shard.count]
    tensors[STEP] = torch.tensor(_step(trainer))
    ranks = trainer.ranks
    file = "trainer.safetensors" if ranks.size == 1 else f"trainer-{ranks.rank + 1:05d}-of-{ranks.size:05d}.safetensors"
    save_file(tensors, folder / file, metadata={"engine": trainer.name, "places": json.dumps(places)})


class _State:
    """Whole tensors of a folder that `save_state` wrote, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("trainer*.safetensors"))
        counts = {f.stem.rpartition("-of-")[2] for f in files if "-of-" in f.stem}
        expected = {1} if not counts else {int(c) for c in counts}
        if len(expected) != 1 or len(files) not in expected:
            raise EngineError(
                f"{folder}: expected the {max(expected)} files of a trainer's state, found {[f.name for f in files]}"
            )
        self.folder = folder
        self._slices: dict[str, list[tuple[int | None, int, int, Any]]] = {}
        self.step = torch.tensor(0.0)
        for file in files:
            opened = safe_open(file, framework="pt")
            metadata = opened.metadata() or {}
            if metadata.get("engine") != "megatron" or "places" not in metadata:
                raise EngineError(
                    f"{file}: expected the state of a Megatron trainer with the places of its slices, found engine "
                    f"{metadata.get('engine')!r}{'' if 'places' in metadata else ' without them (an earlier version)'}"
                )
            for name, (dim, index, count) in json.loads(metadata["places"]).items():
                self._slices.setdefault(name, []).append((dim, index, count, opened))
            self.step = opened.get_tensor(STEP)

    def read(self, name: str) -> torch.Tensor | None:
        """A whole tensor; None if the state does not have it."""
        if name not in self._slices:
            return None
        found = sorted(self._slices[name], key=lambda piece: piece[1])
        dim, _, count, _ = found[0]
        if [index for _, index, _, _ in found] != list(range(count)):
            raise EngineError(
                f"{self.folder}: tensor {name} has {count} slices, found those numbered {[i for _, i, _, _ in found]}"
            )
        pieces = [opened.get_tensor(name) for _, _, _, opened in found]
        return pieces[0] if dim is None or count == 1 else torch.cat(pieces, dim)


def load_state(trainer: Any, folder: Path) -> None:
    """Continue from a folder that `save_state` wrote, under whatever layout.

    Raises:
        EngineError: if files, slices or tensors are missing.
    """
    state = _State(folder)

    def into(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        main = _moments(trainer, parameter)[0]
        main.copy_(value)
        parameter.copy_(main)

    load_weights(trainer.chunks, lambda name: state.read(f"model.{name}"), into)
    for parameter in (p for chunk in trainer.chunks for p in chunk.parameters()):
        _moments(trainer, parameter)[1].clear()  # a state saved before the first step has none
    if not state.step:
        return
    for key in MOMENTS:

        def moment(parameter: torch.nn.Parameter, value: torch.Tensor, key: str = key) -> None:
            if parameter.requires_grad:
                _moments(trainer, parameter)[1].update({"step": state.step.clone(), key: value.float().clone()})

        load_weights(trainer.chunks, lambda name, key=key: state.read(f"optimizer.{key}.{name}"), moment)  # type: ignore[misc]
