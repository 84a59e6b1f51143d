"""What the cells of a record hold, without believing any of it: routes, zeros, -1, ids that cannot be.

A cell is K ids of one token in one layer. At K >= 2 a zero row cannot be a route (it would name expert 0 twice), so it says that
nothing was written; at K = 1 it can be one, and is taken as one. A row of -1 says that there is no route. Everything else must be
K distinct ids from 0 to E - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rar_lib.traces.blocks import by_slot


@dataclass(frozen=True)
class Cells:
    """What each of the cells of `[..., K]` ids holds: bool `[...]`, and `top`.

    Attributes:
        zero: every slot is 0, and K >= 2.
        empty: every slot is -1.
        negative: some slot is below 0, but not every one is -1.
        beyond: some slot is E or more (never, where E is unknown).
        twice: an expert is named twice (zero and empty rows aside).
        ramp: the slots are 0, 1, ... K - 1 in this order (K >= 2): what filler looks like.
        top: the largest id, in the type of the ids.
    """

    zero: np.ndarray
    empty: np.ndarray
    negative: np.ndarray
    beyond: np.ndarray
    twice: np.ndarray
    ramp: np.ndarray
    top: np.ndarray

    @property
    def nothing(self) -> np.ndarray:
        """Bool `[...]`: cells in which nothing was written."""
        return self.empty | self.zero


def scan(ids: np.ndarray, num_experts: int | None) -> Cells:
    """Look at `[..., K]` ids of any integer type.

    Args:
        ids: as they were written.
        num_experts: E, or None where it is unknown.
    """
    shape, k = ids.shape[:-1], ids.shape[-1]
    slots = by_slot(ids)
    top = slots.max(0) if k else np.zeros(slots.shape[1:], ids.dtype)
    signed = ids.dtype.kind == "i"
    low = slots.min(0) if signed else None
    none = np.zeros(top.shape, bool)
    zero = (top == 0) & (low == 0) if low is not None else top == 0
    empty = (top == -1) & (low == -1) if low is not None else none
    negative = (low < 0) & ~empty if low is not None else none
    beyond = none if num_experts is None or num_experts > np.iinfo(ids.dtype).max else top >= num_experts
    twice, same = np.zeros(top.shape, bool), np.empty(top.shape, bool)
    for i in range(k):
        for j in range(i):
            np.equal(slots[i], slots[j], out=same)
            np.logical_or(twice, same, out=twice)
    if k > 1:
        twice &= ~(zero | empty)
    ramp = slots[0] == 0 if k > 1 else none
    for i in range(1, k):
        if not ramp.any():
            break
        ramp &= slots[i] == i
    cells = (zero if k > 1 else none, empty, negative, beyond, twice, ramp, top)
    return Cells(*(part.reshape(shape) for part in cells))


def are_probabilities(rows: np.ndarray, tolerance: float = 1e-2) -> bool:
    """True if rows `[..., E]` are all non-negative and sum to 1 (to what bfloat16 leaves of it): a softmax was taken."""
    wide = np.asarray(rows, np.float64)
    return bool(wide.size and (wide >= 0).all() and (np.abs(wide.sum(-1) - 1) <= tolerance).all())
