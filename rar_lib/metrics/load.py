"""How the load lies on the experts, and how routing shifts between two sources.

Load is a share: p[l, e] sums to 1 in each layer. Cells without a recorded route (padding, last tokens, what a producer lost)
are left out: in a zero-padded dump they would read as load on expert 0. Equal loads do not mean equal routes (JS = 0 while
every token flips is possible), and TV is at most the share of slots that flip.

Everything over routes walks over blocks of tokens, so a memory-mapped trace of any size will do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from rar_lib.errors import TraceError
from rar_lib.metrics.agreement import check_pair
from rar_lib.metrics.replay import router_probabilities
from rar_lib.traces.blocks import token_blocks
from rar_lib.traces.trace import RouteTrace


def route_counts(trace: RouteTrace) -> np.ndarray:
    """Recorded routes of each expert: `[L, E]` int64; a row sums to K times the recorded cells of its layer.

    Raises:
        TraceError: for an id of E or more.
    """
    layers, experts = trace.header.num_layers, trace.header.num_experts
    counts = np.zeros((layers, experts), np.int64)
    recorded = trace.recorded
    for rows in token_blocks(trace.num_tokens, layers):
        ids, known = trace.experts[rows], recorded[rows]
        complete = known.all()
        for layer in range(layers):
            chosen = ids[:, layer] if complete else ids[known[:, layer], layer]
            found = np.bincount(chosen.ravel(), minlength=experts)
            if len(found) > experts:
                raise TraceError(
                    f"experts: layer {trace.header.moe_layers[layer]}: expected ids below {experts}, found {len(found) - 1}"
                )
            counts[layer] += found
    return counts


def load(counts: np.ndarray) -> np.ndarray:
    """Shares of the routes of `[L, E]` counts: `[L, E]` float64, rows sum to 1; NaN in a layer without routes."""
    total = counts.sum(-1, keepdims=True)
    return np.divide(counts, total, out=np.full(counts.shape, np.nan), where=total > 0)


def entropy(p: np.ndarray) -> np.ndarray:
    """-Σ p log p in nats, `[..., E]` shares to `[...]`; 0 log 0 = 0, and NaN stays NaN."""
    return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), np.where(np.isnan(p), np.nan, 0)).sum(-1)


def js_divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Jensen-Shannon divergence in nats, `[..., E]` shares to `[...]`: symmetric, 0 (equal) to log 2 (disjoint)."""
    return np.clip(entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2, 0, np.log(2))


def total_variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """½ Σ |p - q|, `[..., E]` shares to `[...]`, 0..1; of two loads over the same cells at most slot_flip."""
    return np.abs(p - q).sum(-1) / 2


def load_table(trace: RouteTrace) -> pd.DataFrame:
    """One row a MoE layer: how evenly its experts are used.

    Columns: `layer` (transformer layer number), `routes` (recorded slots), `cv` (standard deviation over mean of the
    counts), `max_vio` (max n / mean n - 1, verl's rollout/moe/max_vio), `effective_experts` (exp of the entropy, 1..E),
    `entropy` (nats, 0..log E), `dead` (experts without a route), `max_load` (largest share). None where nobody recorded.
    """
    counts = route_counts(trace)
    rows = []
    for number, n in zip(trace.header.moe_layers, counts, strict=True):
        total = int(n.sum())
        row: dict[str, float | int | None] = {"layer": number, "routes": total}
        if total:
            nats = float(entropy(n / total))
            row |= {
                "cv": float(n.std() / n.mean()),
                "max_vio": float(n.max() / n.mean() - 1),
                "effective_experts": float(np.exp(nats)),
                "entropy": nats,
                "dead": int((n == 0).sum()),
                "max_load": float(n.max() / total),
            }
        rows.append(row)
    columns = ["layer", "routes", "cv", "max_vio", "effective_experts", "entropy", "dead", "max_load"]
    return pd.DataFrame(rows, columns=columns)


def load_shift(a: RouteTrace, b: RouteTrace) -> pd.DataFrame:
    """One row a MoE layer: how the load of B differs from that of A.

    Each side counts its own recorded cells. Columns: `layer`, `js` (nats, 0..log 2), `tv` (0..1), `dead_a`, `dead_b`;
    None where a side recorded nothing.

    Raises:
        TraceError: if MoE layers or experts differ.
    """
    if (a.header.moe_layers, a.header.num_experts) != (b.header.moe_layers, b.header.num_experts):
        raise TraceError(
            f"two traces must speak of the same routers; found {a.header.num_experts} experts in layers "
            f"{a.header.moe_layers} against {b.header.num_experts} in {b.header.moe_layers}"
        )
    counts_a, counts_b = route_counts(a), route_counts(b)
    p, q = load(counts_a), load(counts_b)
    known = (counts_a.sum(-1) > 0) & (counts_b.sum(-1) > 0)
    return pd.DataFrame(
        {
            "layer": a.header.moe_layers,
            "js": np.where(known, js_divergence(p, q), np.nan),
            "tv": np.where(known, total_variation(p, q), np.nan),
            "dead_a": (counts_a == 0).sum(-1),
            "dead_b": (counts_b == 0).sum(-1),
        }
    )


# ---------------------------------------------------------------- what needs router scores


def routing_entropy(p: np.ndarray) -> np.ndarray:
    """Entropy of one token's router distribution, in nats: `[..., E]` probabilities to `[...]`, 0..log E."""
    return entropy(np.asarray(p, np.float64))


def gate_tv(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Total variation of two router distributions of one token, `[..., E]` to `[...]`, 0..1."""
    return total_variation(np.asarray(p, np.float64), np.asarray(q, np.float64))


def router_kl(logits_a: np.ndarray, logits_b: np.ndarray) -> np.ndarray:
    """KL(softmax A ‖ softmax B) of the router logits of one token, `[..., E]` to `[...]`, in nats, >= 0.

    Adding a constant to all logits of a token changes nothing.
    """

    def log_softmax(x: np.ndarray) -> np.ndarray:
        wide = np.asarray(x, np.float64)
        shifted = wide - wide.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    a, b = log_softmax(logits_a), log_softmax(logits_b)
    return np.maximum((np.exp(a) * (a - b)).sum(-1), 0)


def router_shift_ratio(r_old: np.ndarray, r_new: np.ndarray, ids_old: np.ndarray) -> np.ndarray:
    """γ_t = exp(-(1/L) Σ_l (1/K) Σ_k |log r_new(e_k) - log r_old(e_k)|) (RSPO, arXiv 2510.23027).

    Args:
        r_old, r_new: `[N, L, E]` router probabilities before and after.
        ids_old: `[N, L, K]` the experts that the old policy activated.

    Returns:
        `[N]` float64 in (0, 1], 1 only where every activated expert kept its probability.

    Raises:
        TraceError: where an activated expert has no probability (its logarithm is not a number), or a cell holds no route.
    """
    ids = np.asarray(ids_old, np.int64)
    if (ids < 0).any():
        token, layer = np.argwhere((ids < 0).any(-1))[0]
        raise TraceError(
            f"ids: token {token}, layer axis {layer}: expected recorded experts, found {ids[token, layer].tolist()}"
        )
    old, new = (np.take_along_axis(np.asarray(r, np.float64), ids, -1) for r in (r_old, r_new))
    if not ((old > 0) & (new > 0)).all():
        token, layer = np.argwhere(~((old > 0) & (new > 0)).all(-1))[0]
        raise TraceError(
            f"router probabilities: token {token}, layer axis {layer}: an activated expert has probability 0"
        )
    return np.exp(-np.abs(np.log(new) - np.log(old)).mean((-1, -2)))


def shift_summary(
    gamma: np.ndarray, floor: float = 0.8, quantiles: Sequence[float] = (0.9, 0.99)
) -> dict[str, float | None]:
    """Mean of γ, the share of tokens below a floor, and high quantiles of the shift -log γ.

    Args:
        gamma: `[N]`, see `router_shift_ratio`.
        floor: by default the smallest weight that RSPO gives (arXiv 2510.23027).
        quantiles: of the shift.

    Returns:
        `mean`, `below_floor`, and `shift_p90`, `shift_p99` in nats; None without tokens.
    """
    if not len(gamma):
        return {"mean": None, "below_floor": None, **{f"shift_p{100 * q:g}": None for q in quantiles}}
    shift = -np.log(gamma)
    return {
        "mean": float(gamma.mean()),
        "below_floor": float((gamma < floor).mean()),
        **{f"shift_p{100 * q:g}": float(np.quantile(shift, q)) for q in quantiles},
    }


def routing_shift(a: RouteTrace, b: RouteTrace) -> tuple[pd.DataFrame, np.ndarray]:
    """How router distributions moved from A to B, for two traces that carry the ranked scores; block by block.

    Scores that are probabilities already are taken as they are, others through a softmax (metrics.replay.router_probabilities).

    Returns:
        One row a layer over the cells recorded on both sides: `layer`, `cells`, `entropy_a`, `entropy_b` (nats), `gate_tv` (0..1), `router_kl`
        (KL(A ‖ B), nats; infinite where B excludes an expert that A gives weight), each a mean, NaN without cells; and γ_t of the tokens
        recorded in every layer on both sides (`router_shift_ratio` on the experts that A activated), `[n]`.

    Raises:
        TraceError: if a side carries no scores, or the two do not speak of the same tokens and routers.
    """
    check_pair(a, b)
    if a.scores is None or b.scores is None:
        raise TraceError("routing shift: both traces need the ranked scores (recording with scores=True)")
    layers, experts = a.header.num_layers, a.header.num_experts
    recorded = a.recorded & b.recorded
    sums, cells, gammas = np.zeros((4, layers)), np.zeros(layers, np.int64), []
    for rows in token_blocks(a.num_tokens, layers * experts):
        p, q, known = router_probabilities(a.scores[rows]), router_probabilities(b.scores[rows]), recorded[rows]
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = np.where(p > 0, p * (np.log(p) - np.log(q)), 0).sum(-1)
        for i, values in enumerate((entropy(p), entropy(q), total_variation(p, q), np.maximum(gap, 0))):
            sums[i] += np.where(known, values, 0).sum(0)
        cells += known.sum(0)
        full = known.all(-1)
        gammas.append(router_shift_ratio(p[full], q[full], a.experts[rows][full]))
    means = np.divide(sums, cells, out=np.full(sums.shape, np.nan), where=cells > 0)
    columns = dict(zip(("entropy_a", "entropy_b", "gate_tv", "router_kl"), means, strict=True))
    return pd.DataFrame({"layer": a.header.moe_layers, "cells": cells, **columns}), np.concatenate(
        gammas or [np.zeros(0)]
    )
