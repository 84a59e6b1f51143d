"""Do two records of routes number the experts alike? Told from the routes alone.

Co-assignment: C[e, f] counts the cells in which record A chose e and record B chose f. If both speak of the same experts, the assignment
of A's to B's experts with the largest total is the identity (Hungarian matching). Where experts are never used, or swapping two of them
would cost nothing, the matching is ambiguous there, and that is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.trace import RouteTrace

SUPPORT = 8  # cells in which an expert must be seen elsewhere, beyond those in which it is itself


@dataclass(frozen=True)
class Numbering:
    """The best assignment of B's experts to A's in one layer.

    Attributes:
        layer: transformer layer number.
        mapping: `[E]` int64, the expert of B that stands where A has expert e.
        ambiguous: experts whose place the record cannot tell (never used, or a swap would cost nothing).
        overlap: mean share of common experts as numbered.
        matched: the same under `mapping`.
        told: share of the matched routes that go to experts which can be told apart.
        moved: experts that the matching puts elsewhere on good evidence: seen there in at least `SUPPORT` cells more than in place, and
            twice as often.
        cells: number of cells looked at.
    """

    layer: int
    mapping: np.ndarray
    ambiguous: tuple[int, ...]
    overlap: float
    matched: float
    told: float
    moved: tuple[int, ...]
    cells: int


def co_assignment(ids_a: np.ndarray, ids_b: np.ndarray, num_experts: int) -> np.ndarray:
    """C[e, f] = number of cells in which A chose e and B chose f: `[n, K]` twice to `[E, E]` int64; sums to n·K².

    Raises:
        TraceError: on an id of E or more.
    """
    top = max(int(ids_a.max(initial=0)), int(ids_b.max(initial=0)))
    if top >= num_experts:
        raise TraceError(f"experts: expected ids below {num_experts}, found {top}; examine the records first")
    pairs = ids_a.astype(np.int64)[:, :, None] * num_experts + ids_b.astype(np.int64)[:, None, :]
    return np.bincount(pairs.ravel(), minlength=num_experts**2).reshape(num_experts, num_experts)


def infer_numbering(a: RouteTrace, b: RouteTrace, tokens: int = 8192) -> tuple[Numbering, ...]:
    """Match the experts of B to those of A, layer by layer, on evenly spread tokens recorded on both sides."""
    from scipy.optimize import linear_sum_assignment

    rows = np.unique(np.linspace(0, max(a.num_tokens - 1, 0), min(tokens, a.num_tokens)).astype(np.int64))
    ids_a, ids_b, known = a.experts[rows], b.experts[rows], a.recorded[rows] & b.recorded[rows]
    experts, k = a.header.num_experts, a.header.top_k
    out = []
    for position, layer in enumerate(a.header.moe_layers):
        here = known[:, position]
        cells = int(here.sum())
        both = co_assignment(ids_a[here, position], ids_b[here, position], experts)
        _, mapping = linear_sum_assignment(both, maximize=True)
        if both[np.arange(experts), mapping].sum() == np.trace(both):
            mapping = np.arange(experts)  # of equally good ones, the identity
        own = both[np.arange(experts), mapping]
        swap = own[:, None] + own[None, :] - both[:, mapping] - both[:, mapping].T
        np.fill_diagonal(swap, 1)
        unsure = (swap <= 0).any(1) | (own == 0)
        seen = np.diag(both)
        elsewhere = ~unsure & (mapping != np.arange(experts)) & (own - seen >= SUPPORT) & (own >= 2 * seen)
        total = max(1, cells * k)
        out.append(
            Numbering(
                layer, mapping, tuple(np.flatnonzero(unsure).tolist()), float(seen.sum() / total), float(own.sum() / total),
                float(own[~unsure].sum() / max(1, own.sum())), tuple(np.flatnonzero(elsewhere).tolist()), cells,
            )
        )  # fmt: skip
    return tuple(out)
