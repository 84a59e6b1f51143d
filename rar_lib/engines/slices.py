"""Tensors that several processes hold in slices: written by each, read whole by any number.

A trainer's state on disk is `trainer.safetensors`, or `trainer-00001-of-00002.safetensors` and so on. Each file says where in
the whole its slices lie, so that another layout, or one process alone, continues exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rar_lib.engines.ranks import Ranks
from rar_lib.errors import EngineError

KEY = "rar_state"
MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "optimizer.step"


@dataclass(frozen=True)
class Shard:
    """A slice of a tensor of any shape: the `index`-th of `count` along `dim`; `dim` None is the whole."""

    name: str
    tensor: torch.Tensor
    dim: int | None = None
    index: int = 0
    count: int = 1


def join_slices(name: str, pieces: dict[int, torch.Tensor], dim: int | None, count: int) -> torch.Tensor:
    """The whole of a tensor of any shape, from its slices by index.

    Raises:
        EngineError: if a slice is missing.
    """
    if sorted(pieces) != list(range(count)):
        raise EngineError(f"tensor {name}: expected {count} slices, found those numbered {sorted(pieces)}")
    return pieces[0] if dim is None or count == 1 else torch.cat([pieces[i] for i in range(count)], dim)


def require_one_step(steps: Iterable[float]) -> float:
    """The number of optimizer steps, which all parameters that learn have in common; 0 before the first.

    Raises:
        EngineError: if they differ.
    """
    found = set(steps)
    if len(found) != 1:
        raise EngineError(
            f"trainer state: expected one number of optimizer steps for all parameters, found {sorted(found)}"
        )
    return found.pop()


def save_slices(folder: Path, engine: str, ranks: Ranks, step: float, shards: Iterable[Shard]) -> None:
    """Write this process's slices of weights (`model.*`) and moments (`optimizer.*`).

    Args:
        folder: of a checkpoint.
        engine: name of the trainer, which `Slices` asks for.
        ranks: which file this process writes.
        step: optimizer steps taken.
        shards: the slices.
    """
    tensors, places = {STEP: torch.tensor(step)}, {}
    for shard in shards:
        tensors[shard.name] = shard.tensor.detach().contiguous().clone()
        places[shard.name] = [shard.dim, shard.index, shard.count]
    file = "trainer.safetensors" if ranks.size == 1 else f"trainer-{ranks.rank + 1:05d}-of-{ranks.size:05d}.safetensors"
    # One entry of metadata: safetensors writes several in any order, and the same state would not be the same file.
    save_file(tensors, folder / file, metadata={KEY: json.dumps({"engine": engine, "places": places})})


class Slices:
    """Whole tensors of a folder that `save_slices` wrote, read when they are asked for.

    Attributes:
        step: optimizer steps taken, a float32 scalar.

    Raises:
        EngineError: if files are missing, or another engine wrote them.
    """

    def __init__(self, folder: Path, engine: str) -> None:
        files = sorted(folder.glob("trainer*.safetensors"))
        counts = {int(f.stem.rpartition("-of-")[2]) if "-of-" in f.stem else 1 for f in files} or {1}
        if len(counts) != 1 or len(files) not in counts:
            raise EngineError(
                f"{folder}: expected the {max(counts)} files of a trainer's state, found {[f.name for f in files]}"
            )
        self.folder, self.step = folder, torch.tensor(0.0)
        self._slices: dict[str, list[tuple[int | None, int, int, Any]]] = {}
        for file in files:
            opened = safe_open(file, framework="pt")
            metadata = opened.metadata() or {}
            told = json.loads(metadata.get(KEY, "{}"))
            found = told.get("engine", metadata.get("engine"))
            if found != engine:
                raise EngineError(f"{file}: expected the state of the {engine} trainer, found engine {found!r}")
            if not told:
                raise EngineError(
                    f"{file}: an earlier version wrote this state, without the places of its slices; the run cannot be continued: "
                    "remove it (rar runs rm) and run it again"
                )
            for name, (dim, index, count) in told["places"].items():
                self._slices.setdefault(name, []).append((dim, index, count, opened))
            self.step = opened.get_tensor(STEP)

    def read(self, name: str) -> torch.Tensor | None:
        """A whole tensor of any shape; None if the state does not have it. Raises as `join_slices`."""
        if name not in self._slices:
            return None
        dim, _, count, _ = self._slices[name][0]
        return join_slices(name, {i: opened.get_tensor(name) for _, i, _, opened in self._slices[name]}, dim, count)

    def require(self, name: str) -> torch.Tensor:
        """A whole tensor of any shape.

        Raises:
            EngineError: if the state does not have it.
        """
        found = self.read(name)
        if found is None:
            raise EngineError(f"{self.folder}: expected the tensor {name}, not found")
        return found
