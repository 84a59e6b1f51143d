"""Policies that weigh: Fisher scores of cells and their controls, the price of an exchange, and two soft rules.

Within a layer a Fisher score says how much the likelihood of a sequence moves with an expert's gate (or its weights). Its
controls rank the same numbers in another order: permuted within the layer, and lowest first. A result of `fisher` counts
against these, and against margin and frequency, which cost no backward.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch

from rar_lib.errors import ReplayError
from rar_lib.replay.budget import U64, hash_text, integer_budget, mix
from rar_lib.replay.plan import ReplayPlan, Unit
from rar_lib.replay.policy import Candidates, native_of, spread, unit_cells
from rar_lib.replay.resolve import resolve_biased
from rar_lib.replay.scores import ExpertScore, route_scores


class Fisher:
    """Highest score first: for slots whole cells in the order of their score, the last one cut at the budget by key.

    Cells of equal score follow each other in keyed order. For whole sets, by the sum over the experts of a set. Cells
    without a score come last.

    Args:
        order: `score`, `permuted` (scores exchanged within each layer, by key, anew for each batch) or `inverse`.
    """

    units: tuple[Unit, ...] = ("token_layer", "slot")
    needs: tuple[str, ...] = ("score",)
    budget = "matched"
    compares = False

    def __init__(self, order: str = "score") -> None:
        self.order = order

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """Priorities, `[N, L]` or `[N, L, K]` float64; see the class.

        Raises:
            ReplayError: without a score, or for one of another shape, or with NaN or negative values.
        """
        score = _score_of(seen)
        values = score.values
        if self.order == "permuted":
            values = permuted_within_layers(values, seen.seed, seen.batch)
        if self.order == "inverse":
            values = np.where(np.isneginf(values), -np.inf, -values)
        cells = unit_cells(seen.trace, "slot")
        if unit == "token_layer":
            # sorted, so that the order of the slots does not touch the last bit of the sum
            return -np.sort(values.reshape(-1)[cells], -1).sum(-1)
        keys = mix(np.arange(values.size, dtype=U64) ^ hash_text(seen.seed, "fisher/cell"))
        rank = np.empty(values.size)
        rank[np.lexsort((keys, -values.reshape(-1)))] = np.arange(values.size)
        return rank[cells]


def permuted_within_layers(values: np.ndarray, seed: int, batch: int = 0) -> np.ndarray:
    """`[L, E]` with the finite values of each layer exchanged by a key of seed and batch; unscored cells stay so."""
    out = values.copy()
    for layer, row in enumerate(values):
        scored = np.flatnonzero(np.isfinite(row))
        keys = mix(scored.astype(U64) ^ hash_text(seed, "permuted_fisher", batch, layer))
        out[layer, scored] = row[scored[np.argsort(keys)]]
    return out


def _score_of(seen: Candidates) -> ExpertScore:
    if seen.score is None:
        raise ReplayError("the policy ranks scores of experts, and none were given")
    seen.score.require(seen.trace)
    return seen.score


class Swap:
    """Largest P(flip) · swap first: how likely a decision differs, times what the exchange would do to ℓ.

    An expert of the live set has the gap of its own score to the runner-up; a whole set has that of its weakest expert, and
    so has a recorded expert that the live set lacks. P(flip) is that of rollout against trainer, also in mode R2, where
    it stands in for the chance that an update moves the decision.
    """

    units: tuple[Unit, ...] = ("token_layer", "slot")
    needs: tuple[str, ...] = ("native", "signals", "flips")
    budget = "matched"
    compares = False

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """Priorities, `[N, L]` or `[N, L, K]` float64; see the class.

        Raises:
            ReplayError: without a planning pass, its signals of swap, or P(flip).
        """
        native = native_of(seen)
        if seen.signals is None or seen.flips is None or seen.signals.gaps is None:
            raise ReplayError(
                "policy swap: the planning pass gave no signals of swap, or no P(flip) of earlier batches"
            )
        value = seen.flips.probability(seen.signals.gaps) * route_scores(seen.signals, "swap")
        weakest = np.take_along_axis(value, seen.signals.gaps.argmin(-1)[..., None], -1)[..., 0]
        if unit == "token_layer":
            return -weakest
        same = seen.trace.experts[..., :, None] == native.experts[..., None, :]
        own = np.where(same, value[..., None, :], 0).sum(-1)
        return -np.where(same.any(-1), own, spread(weakest, seen, unit))


class Threshold:
    """Keep a replayed expert only if its live score is at least `ratio` times the weakest live top-K score.

    The one partial rule found in public. Scores are taken as the router ranks them, where these are never negative
    (softmax, sigmoid); a router that ranks logits is compared after a softmax over its experts, which keeps the order: that is
    decided by any negative score in the batch, so with expert biases below 0 it can differ from batch to batch. What share
    is kept follows from the ratio.
    """

    units: tuple[Unit, ...] = ("slot",)
    needs: tuple[str, ...] = ("native", "scores")
    budget = "none"
    compares = True

    def plan(self, seen: Candidates, unit: Unit, share: Fraction | None) -> ReplayPlan:
        """A plan of unit slot; see the class.

        Raises:
            ReplayError: without a ratio, a planning pass, or its scores.
        """
        native, scores = native_of(seen), _scores_of(seen)
        trace, known = seen.trace, seen.trace.recorded & native.recorded
        if seen.ratio is None:
            raise ReplayError("policy threshold: expected a ratio, found none")
        if (scores[known] < 0).any():
            shifted = np.exp(scores - scores.max(-1, keepdims=True))
            scores = shifted / shifted.sum(-1, keepdims=True)
        weakest = np.take_along_axis(scores, native.experts.astype(np.int64), -1).min(-1, keepdims=True)
        kept = np.take_along_axis(scores, trace.experts.astype(np.int64), -1) >= seen.ratio * weakest
        planned = kept & known[..., None]
        valid = int(trace.recorded.sum()) * trace.header.top_k
        return ReplayPlan(unit, planned, trace.payload_sha256(), "threshold", seen.seed, None, valid)


class Bias:
    """One λ on top of the live score of every recorded expert, so that close decisions follow the record.

    β is the share of the cells on which record and planning pass differ that λ shall change there; λ is the smallest that
    does, found by bisection. It is what a soft mask can mean: any exchange costs a score gap below λ.
    """

    units: tuple[Unit, ...] = ("bias",)
    needs: tuple[str, ...] = ("native", "scores")
    budget = "binding"
    compares = True

    def plan(self, seen: Candidates, unit: Unit, share: Fraction | None) -> ReplayPlan:
        """A plan of unit bias, one λ for all cells; see the class.

        Raises:
            ReplayError: without a planning pass or its scores, or where no λ does it.
        """
        native, scores = native_of(seen), _scores_of(seen)
        trace, known = seen.trace, seen.trace.recorded & native.recorded
        assert share is not None
        recorded, own = (torch.from_numpy(ids[known].astype(np.int64)) for ids in (trace.experts, native.experts))
        size = calibrate_bias(recorded, own, torch.from_numpy(scores[known]), share)
        cells = (trace.header.num_layers, trace.header.num_experts)
        return ReplayPlan(
            unit, trace.recorded.copy(), trace.payload_sha256(), "bias", seen.seed, share, int(trace.recorded.sum()),
            bias=np.full(cells, size, np.float32),
        )  # fmt: skip


def calibrate_bias(recorded: torch.Tensor, native: torch.Tensor, scores: torch.Tensor, share: Fraction) -> float:
    """Smallest λ, to float32, that changes at least floor(β D + 1/2) of the D rows whose sets differ.

    Args:
        recorded, native: `[rows, K]` int64 ids.
        scores: `[rows, E]` float32, as ranked.
        share: β.

    Raises:
        ReplayError: if no finite λ changes so many.
    """
    differ = ~(recorded[:, :, None] == native[:, None, :]).any(-1).all(-1)
    recorded, native, scores = recorded[differ], native[differ], scores[differ]
    wanted = integer_budget(share, len(recorded))
    if wanted == 0:
        return 0.0
    everywhere = torch.ones(len(recorded), dtype=torch.bool)

    def changed(size: float) -> int:
        bias = torch.full((scores.shape[1],), size, dtype=torch.float32)
        used = resolve_biased(recorded, everywhere, scores, native, bias)
        return int((~(used[:, :, None] == native[:, None, :]).any(-1).all(-1)).sum())

    low, high = np.float32(0), np.float32(1)
    while changed(float(high)) < wanted:
        if high > np.finfo(np.float32).max / 4:
            raise ReplayError(f"policy bias: no λ changes {wanted} of the {len(recorded)} rows whose sets differ")
        low, high = high, high * np.float32(2)
    while True:
        middle = low + (high - low) / np.float32(2)
        if middle in (low, high):
            return float(high)
        low, high = (middle, high) if changed(float(middle)) < wanted else (low, middle)


def _scores_of(seen: Candidates) -> np.ndarray:
    scores = native_of(seen).scores
    if scores is None:
        raise ReplayError("the policy looks at live scores, and the planning pass recorded none")
    return scores
