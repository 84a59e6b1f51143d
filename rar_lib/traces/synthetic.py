"""Synthetic routes: what a rollout recorded, what a trainer would choose, and the scores behind both, without an engine.

The trainer's live scores are softmax probabilities of Gaussian logits with a skewed prior over experts. The rollout ranks the
same logits plus a small error, so decisions flip where margins are small, as they do between real engines. The size of the
error is found by bisection to give the flip rate that was asked for; it may vary from token to token, which makes flips
cluster on tokens. Everything follows from the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader


@dataclass(frozen=True)
class Synthetic:
    """Two traces of the same tokens and the scores that the trainer ranks.

    Attributes:
        rollout: the record; source `rollout`.
        native: the trainer's own choice, with margins of `scores`; source `old`.
        scores: `[N, L, E]` float32, the trainer's live scores; rows sum to 1.
        error: standard deviation of the rollout's error on the logits, before it varies by token.
    """

    rollout: RouteTrace
    native: RouteTrace
    scores: np.ndarray
    error: float


def synthetic(
    lengths: Sequence[int],
    *,
    layers: int = 4,
    experts: int = 16,
    top_k: int = 2,
    flip_rate: float = 0.03,
    load_skew: float = 0.5,
    clustering: float = 0.0,
    seed: int = 0,
) -> Synthetic:
    """Make a pair of traces.

    Args:
        lengths: tokens of each sequence; the last of each has no route.
        layers, experts, top_k: L, E and K.
        flip_rate: share of the (token, layer) cells whose sets shall differ; met to within one cell where possible.
        load_skew: standard deviation of the experts' prior on the logits; 0 is balanced.
        clustering: standard deviation of the log of a token's error; 0 spreads flips independently over tokens.
        seed: of everything.

    Raises:
        TraceError: for a flip rate that no error can give, or sizes that make no router.
    """
    if not 1 <= top_k <= experts or layers < 1:
        raise TraceError(
            f"synthetic: expected 1 <= top_k <= experts and a layer, found top-{top_k} of {experts}, {layers} layers"
        )
    if not 0 <= flip_rate < 1 or (flip_rate > 0 and top_k == experts):
        raise TraceError(f"synthetic: flip_rate {flip_rate} cannot be reached with top-{top_k} of {experts} experts")
    rng = np.random.default_rng(seed)
    n = int(sum(lengths))
    prior = rng.normal(size=(layers, experts)) * load_skew
    logits = rng.normal(size=(n, layers, experts)) + prior
    by_token = np.exp(clustering * rng.normal(size=(n, 1, 1)))
    direction = rng.normal(size=logits.shape) * by_token
    status = np.full(n, Status.RECORDED, dtype=np.uint8)
    ends = np.cumsum(lengths) - 1
    status[ends[np.asarray(lengths) > 0]] = Status.LAST
    inside = status == Status.RECORDED
    native = _top(logits, top_k)
    error = _calibrate(logits[inside], direction[inside], native[inside], flip_rate)
    header = TraceHeader(
        num_experts=experts, top_k=top_k, moe_layers=tuple(range(layers)), source="rollout", producer="synthetic"
    )
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores = (scores / scores.sum(-1, keepdims=True)).astype(np.float32)
    ranked = -np.sort(-scores, axis=-1)
    margins = (
        np.full(scores.shape[:2], np.inf, np.float32)
        if top_k == experts
        else ranked[..., top_k - 1] - ranked[..., top_k]
    )
    return Synthetic(
        RouteTrace.from_packed(header, _top(logits + error * direction, top_k), lengths, status),
        RouteTrace.from_packed(header.model_copy(update={"source": "old"}), native, lengths, status, margins=margins),
        scores,
        error,
    )


def _top(values: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest, largest first."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :k]


def _calibrate(logits: np.ndarray, direction: np.ndarray, native: np.ndarray, flip_rate: float) -> float:
    """Size of the error at which the share of flipped cells is `flip_rate`, by bisection."""
    if flip_rate == 0 or not len(logits):
        return 0.0
    k, chosen = native.shape[-1], np.sort(native, -1)

    def flips(size: float) -> float:
        return float((np.sort(_top(logits + size * direction, k), -1) != chosen).any(-1).mean())

    low, high = 0.0, 1.0
    while flips(high) < flip_rate:
        high *= 2
        if high > 1e6:
            raise TraceError(f"synthetic: flip_rate {flip_rate} is above what a random choice gives, {flips(high):.3f}")
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if flips(middle) < flip_rate else (low, middle)
    return high
