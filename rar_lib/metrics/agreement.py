"""How far two sources disagree on the chosen experts, at the same tokens and layers.

The unit is the set of K experts of one router at one token: slot order means nothing. Cells that either side did not
record are left out and counted, never read as expert 0. Two kinds of disagreement are not one: drift between updates
in one engine (GSPO's "about 10 % of experts", arXiv 2507.18071) and mismatch between engines at the same weights
(R3's "about 10 % of routers", 2510.11370). The functions do not know which they are given; the caller's column names
say so.

Independent random K-subsets of E experts overlap in K/E of their slots on average: that is the floor to compare with.

Traces of real size are memory-mapped files, so everything here walks over blocks of tokens and keeps no more than a byte or
two a cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from rar_lib.errors import TraceError
from rar_lib.traces.blocks import by_slot, token_blocks
from rar_lib.traces.trace import RouteTrace


def overlap(ids_a: np.ndarray, ids_b: np.ndarray) -> np.ndarray:
    """|S_A ∩ S_B| for `[..., K]` distinct ids: `[...]` uint8 in 0..K (uint16 from K = 256)."""
    left, right = by_slot(ids_a), by_slot(ids_b)
    shared = np.zeros(left.shape[1], np.uint8 if len(left) < 256 else np.uint16)
    same = np.empty(left.shape[1], bool)
    for one in left:
        for other in right:
            np.equal(one, other, out=same)
            np.add(shared, same, out=shared)
    return shared.reshape(ids_a.shape[:-1])


def check_pair(a: RouteTrace, b: RouteTrace) -> None:
    """Refuse two traces that cannot be compared cell by cell.

    Raises:
        TraceError: if layers, experts, K, lengths or token digests differ.
    """
    for name, left, right in (
        ("MoE layers", a.header.moe_layers, b.header.moe_layers),
        ("experts", a.header.num_experts, b.header.num_experts),
        ("top-k", a.header.top_k, b.header.top_k),
        ("sequences", a.num_sequences, b.num_sequences),
    ):
        if left != right:
            raise TraceError(f"two traces must speak of the same tokens and routers; {name}: {left} against {right}")
    other = np.flatnonzero(a.lengths != b.lengths)
    if other.size:
        i = int(other[0])
        raise TraceError(
            f"two traces must speak of the same tokens and routers; sequence lengths: {a.lengths[i]} against "
            f"{b.lengths[i]} tokens in sequence {i}"
        )
    if a.token_digest and b.token_digest and a.token_digest != b.token_digest:
        raise TraceError(f"two traces of other tokens: digest {a.token_digest} against {b.token_digest}")


@dataclass(frozen=True)
class Agreement:
    """Cell by cell agreement of two traces over N tokens, L layers and top-K.

    Attributes:
        shared: `[N, L]` uint8 (uint16 from K = 256), |S_A ∩ S_B|; meaningless where `known` is false.
        known: `[N, L]` bool, recorded on both sides.
        top_k: K.
    """

    shared: np.ndarray
    known: np.ndarray
    top_k: int

    @property
    def flipped(self) -> np.ndarray:
        """`[N, L]` bool: the sets differ (false where unknown)."""
        return self.known & (self.shared < self.top_k)

    @property
    def full_rows(self) -> np.ndarray:
        """`[N]` bool: tokens recorded in every layer on both sides."""
        return np.asarray(self.known.all(-1))

    def overlap_counts(self) -> np.ndarray:
        """Known cells by their number of shared experts, 0..K: `[K + 1]` int64."""
        counts = np.zeros(self.top_k + 1, np.int64)
        for rows in token_blocks(*self.shared.shape):
            shared, known = self.shared[rows].ravel(), self.known[rows].ravel()
            counts += np.bincount(shared[known], minlength=self.top_k + 1)[: self.top_k + 1]
        return counts

    def layers_per_token(self) -> np.ndarray:
        """D_t, the number of layers whose sets differ, over fully recorded tokens: `[n]` int64."""
        return self.flipped[self.full_rows].sum(-1)

    def router_flip_by_layer(self) -> np.ndarray:
        """`[L]` float64, share of known cells that differ; NaN for a layer nobody recorded."""
        count = self.known.sum(0)
        return np.divide(self.flipped.sum(0), count, out=np.full(count.shape, np.nan), where=count > 0)

    def scalars(self, prefix: str = "") -> dict[str, float | None]:
        """overlap, jaccard, slot_flip, router_flip, token_any_flip (shares), layers_per_token (layers) and how many
        cells they rest on.

        With o = |S_A ∩ S_B| of a cell: overlap is the mean of o/K, jaccard of o/(2K - o), slot_flip 1 - overlap,
        router_flip the share of cells with o < K. None where no cell is known. slot_flip <= router_flip <= K *
        slot_flip; jaccard <= overlap; token_any_flip is over fully recorded tokens.
        """
        counts = self.overlap_counts()
        share = np.arange(self.top_k + 1) / self.top_k
        depth = self.layers_per_token()
        cells = int(counts.sum())
        overlapping = float(counts @ share) / cells if cells else None
        values: dict[str, float | None] = {
            "overlap": overlapping,
            "jaccard": float(counts @ (share / (2 - share))) / cells if cells else None,
            "slot_flip": None if overlapping is None else 1 - overlapping,
            "router_flip": float(counts[:-1].sum()) / cells if cells else None,
            "token_any_flip": float((depth > 0).mean()) if depth.size else None,
            "layers_per_token": float(depth.mean()) if depth.size else None,
            "cells": float(cells),
        }
        return {prefix + name: value for name, value in values.items()}


def agreement(a: RouteTrace, b: RouteTrace) -> Agreement:
    """Compare two traces of the same tokens.

    Raises:
        TraceError: if layers, experts, K, lengths or token digests differ.
    """
    check_pair(a, b)
    known = a.recorded & b.recorded
    shared = np.empty(known.shape, np.uint8 if a.header.top_k < 256 else np.uint16)
    for rows in token_blocks(*known.shape):
        shared[rows] = overlap(a.experts[rows], b.experts[rows])
    return Agreement(shared, known, a.header.top_k)


def flip_counts(result: Agreement, trace: RouteTrace) -> pd.DataFrame:
    """Flips and known cells of every sequence in every layer, for statistics over sequences.

    Args:
        result: of the pair.
        trace: either record, for the sequences and the layer numbers.

    Returns:
        `sequence, layer, flips, cells`, one row a sequence and layer; sequences without a known cell are left out.
    """
    starts = trace.offsets[:-1][trace.lengths > 0]
    flips = np.add.reduceat(result.flipped.astype(np.int64), starts, 0)
    cells = np.add.reduceat(result.known.astype(np.int64), starts, 0)
    sequences = np.flatnonzero(trace.lengths > 0)
    kept = cells.sum(-1) > 0
    count, layers = int(kept.sum()), trace.header.num_layers
    return pd.DataFrame(
        {"sequence": np.repeat(sequences[kept], layers), "layer": np.tile(trace.header.moe_layers, count), "flips": flips[kept].ravel(),
         "cells": cells[kept].ravel()}
    )  # fmt: skip


def poisson_binomial(rates: np.ndarray) -> np.ndarray:
    """P(D = 0..L) of a sum of independent Bernoulli(rates), `[L]`: `[L + 1]` float64."""
    pmf = np.ones(1)
    for rate in np.asarray(rates, dtype=np.float64):
        pmf = np.convolve(pmf, [1 - rate, rate])
    return pmf


def flip_clustering(result: Agreement, *, permutations: int = 200, seed: int = 0) -> dict[str, float | None]:
    """Do flips cluster on tokens? The variance of D_t against independence between layers, over fully recorded tokens.

    Args:
        result: of a pair.
        permutations, seed: of the shuffled check.

    Returns:
        variance: of D_t; independent: Σ p_l (1 - p_l) of the Poisson-binomial with the per-layer rates; dispersion:
        their ratio (> 1: flips cluster on tokens); permuted_p95: 95th percentile of the same ratio when each layer's
        flips are shuffled over tokens, a check that needs no formula; any: share of tokens with a flip in some layer
        (token_any_flip), and any_independent, its expectation if layers were independent. All None with fewer than
        two tokens, or where nothing could vary.
    """
    flips = result.flipped[result.full_rows]
    rates = flips.mean(0) if flips.size else np.zeros(0)
    expected = float((rates * (1 - rates)).sum())
    if len(flips) < 2 or expected == 0:
        return dict.fromkeys(("variance", "independent", "dispersion", "permuted_p95", "any", "any_independent"))
    rng = np.random.default_rng(seed)
    permuted = [rng.permuted(flips, axis=0).sum(-1).var() / expected for _ in range(permutations)]
    depth = flips.sum(-1)
    return {
        "variance": float(depth.var()),
        "independent": expected,
        "dispersion": float(depth.var() / expected),
        "permuted_p95": float(np.percentile(permuted, 95)),
        "any": float((depth > 0).mean()),
        "any_independent": float(1 - poisson_binomial(rates)[0]),
    }


def churn_matrix(a: RouteTrace, b: RouteTrace) -> np.ndarray:
    """Which expert replaced which, by layer: `[L, E, E]` float64, a share of the known cells of the layer.

    Only set differences count. A swap of m experts at once is split evenly: each of the m x m pairs gets 1/m, so a row
    sums to the rate at which its expert leaves (outflow) and a column to the rate at which it enters.

    Raises:
        TraceError: if layers, experts, K, lengths or token digests differ.
    """
    check_pair(a, b)
    known, flipped = a.recorded & b.recorded, agreement(a, b).flipped
    layers, experts = a.header.num_layers, a.header.num_experts
    out = np.zeros((layers, experts, experts))
    for rows in token_blocks(*known.shape):
        token, layer = np.nonzero(flipped[rows])
        ids_a, ids_b = a.experts[rows][token, layer].astype(np.int64), b.experts[rows][token, layer].astype(np.int64)
        same = ids_a[:, :, None] == ids_b[:, None, :]
        left, entered = ~same.any(-1), ~same.any(-2)
        cell, slot_a, slot_b = np.nonzero(left[:, :, None] & entered[:, None, :])
        share = 1 / left.sum(-1)[cell]
        np.add.at(out, (layer[cell], ids_a[cell, slot_a], ids_b[cell, slot_b]), share)
    return out / np.maximum(known.sum(0), 1)[:, None, None]


def margin_auc(margins: np.ndarray, flipped: np.ndarray, known: np.ndarray) -> float | None:
    """Do flips happen where the margin is small? P(margin of a flipped cell < margin of another one), ties count half.

    0.5: the margin says nothing; 1: every flip has a smaller margin than every cell that kept its set.

    Args:
        margins: `[N, L]` float, s_(K) - s_(K+1) of one side's scores; infinite where nothing could flip.
        flipped: `[N, L]` bool.
        known: `[N, L]` bool, the cells to look at.

    Returns:
        The area under the curve, or None where no cell flipped or every one did.

    Raises:
        TraceError: for NaN among the known margins.
    """
    values, labels = np.asarray(margins, np.float64)[known], flipped[known]
    if np.isnan(values).any():
        raise TraceError("margins: expected numbers where routes are known, found NaN")
    flips, rest = int(labels.sum()), int((~labels).sum())
    if not flips or not rest:
        return None
    order, counts = np.unique(values, return_inverse=True, return_counts=True)[1:]
    rank = (np.cumsum(counts) - (counts - 1) / 2)[order]  # of ties: their middle
    return float(1 - (rank[labels].sum() - flips * (flips + 1) / 2) / (flips * rest))


def top1_flip(
    ids_a: np.ndarray, gates_a: np.ndarray, ids_b: np.ndarray, gates_b: np.ndarray, known: np.ndarray
) -> float | None:
    """Share of known cells whose expert with the largest gate differs; None without any. ids, gates `[N, L, K]`;
    known `[N, L]` bool.
    """

    def first(ids: np.ndarray, gates: np.ndarray) -> np.ndarray:
        return np.take_along_axis(ids, gates.argmax(-1)[..., None], -1)[..., 0]

    differs = first(ids_a, gates_a) != first(ids_b, gates_b)
    return float(differs[known].mean()) if known.any() else None
