"""The processes of one trainer: who this is, and how what each of them saw comes together at the first.

Objects travel over gloo, also where gradients travel over NCCL, so that routes and log-probs stay in host memory.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@functools.cache
def _gloo() -> Any:
    """One a process, for all trainers that it builds."""
    return torch.distributed.new_group(backend="gloo")


class Ranks:
    """This process among those of torch.distributed; one alone where that was not started.

    Args:
        alone: whatever torch.distributed holds, this process works by itself.

    Attributes:
        rank, size: of the whole group.
    """

    def __init__(self, alone: bool = False) -> None:
        here = torch.distributed.is_initialized() and not alone
        self.rank: int = torch.distributed.get_rank() if here else 0
        self.size: int = torch.distributed.get_world_size() if here else 1
        self._group: Any = _gloo() if self.size > 1 else None

    def gather(self, mine: T) -> list[T] | None:
        """What every process has, in the order of ranks, at the first; None at the others."""
        if self.size == 1:
            return [mine]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        torch.distributed.gather_object(mine, found, dst=0, group=self._group)
        return found


ALONE = Ranks(alone=True)
