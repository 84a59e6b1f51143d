"""Is a score of experts more than noise? Two halves of the prompts must rank the experts of a layer alike.

Ranks and not values, since budgets are spent in the order of ranks; within layers, since layers differ in scale whatever the signal. Beside the
number stands the same of a half whose experts were permuted within each layer: what chance gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Stability:
    """Spearman correlation of the within-layer rankings of two halves, mean over layers.

    Attributes:
        spearman: None where no layer has three cells scored in both halves.
        null_low, null_high: 2.5 and 97.5 % of the same number with one half permuted within each layer.
    """

    spearman: float | None
    null_low: float | None
    null_high: float | None


def rank_agreement(a: np.ndarray, b: np.ndarray) -> float | None:
    """Mean over layers of Spearman's correlation of two `[L, E]` scores, over cells scored in both (ties share ranks); None where no
    layer has three of them and a ranking on either side.

    Raises:
        ValueError: for scores of different shapes.
    """
    if a.shape != b.shape:
        raise ValueError(f"rank agreement: expected two scores of one shape, found {a.shape} and {b.shape}")
    (found,) = _rank_agreements(a[None], b[None])
    return None if np.isnan(found) else float(found)


def _rank_agreements(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`rank_agreement` of each pair of `[n, L, E]` scores, `[n]`; NaN where it is None."""
    both = np.isfinite(a) & np.isfinite(b)
    count = both.sum(-1)
    p, q = (_centred(_ranks(x, both), both, count) for x in (a, b))
    spread = np.sqrt((p * p).sum(-1)) * np.sqrt((q * q).sum(-1))
    known = (count >= 3) & (spread > 0)
    layers = np.where(known, (p * q).sum(-1) / np.where(known, spread, 1), 0)
    return np.where(known.any(-1), layers.sum(-1) / np.maximum(known.sum(-1), 1), np.nan)


def _centred(ranks: np.ndarray, where: np.ndarray, count: np.ndarray) -> np.ndarray:
    mean = np.where(where, ranks, 0).sum(-1) / np.maximum(count, 1)
    return np.where(where, ranks - mean[..., None], 0)


def _ranks(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Average ranks `[..., E]` among the values that count, along the last axis; what does not count is last."""
    counted = np.where(where, values, np.inf)
    order = counted.argsort(-1)
    ordered, place = np.take_along_axis(counted, order, -1), np.arange(values.shape[-1])
    begins = np.ones(ordered.shape, dtype=bool)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    ends = np.roll(begins, -1, -1)
    ends[..., -1] = True
    first = np.maximum.accumulate(np.where(begins, place, 0), -1)
    last = np.minimum.accumulate(np.where(ends, place, place[-1])[..., ::-1], -1)[..., ::-1]
    ranks = np.empty(ordered.shape)
    np.put_along_axis(ranks, order, (first + last) / 2, -1)
    return ranks


def stability(first: np.ndarray, second: np.ndarray, *, permutations: int = 200, seed: int = 0) -> Stability:
    """Split-half agreement beside its within-layer permutation null.

    Args:
        first, second: `[L, E]` scores of the halves, -inf where unscored.
        permutations, seed: of the null.
    """
    rng = np.random.default_rng(seed)
    permuted = np.empty((permutations, *second.shape))
    for one in permuted:
        rng.permuted(second, axis=1, out=one)
    null = _rank_agreements(np.broadcast_to(first, permuted.shape), permuted)
    drawn = null[~np.isnan(null)]
    if not len(drawn):
        return Stability(rank_agreement(first, second), None, None)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Stability(rank_agreement(first, second), float(low), float(high))


def half_of_prompts(groups: np.ndarray, seed: int = 0) -> np.ndarray:
    """bool `[S]`: a random half of the prompts, whole prompts only."""
    names = np.unique(groups)
    chosen = np.random.default_rng(seed).permutation(names)[: len(names) // 2]
    return np.isin(groups, chosen)
