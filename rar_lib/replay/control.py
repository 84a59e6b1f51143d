"""The negative control: deliberately wrong routes must move the output, or replay is not live.

A fused router, a renamed class or a hook on the wrong tensor turns replay into a no-op without a word, and the run then
reports how well "R3" does. So every run begins by replaying, on one batch, sets that share no expert with the record
(as far as E allows), and looks whether any log-prob changes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rar_lib.errors import ReplayError
from rar_lib.metrics.agreement import agreement
from rar_lib.traces.trace import RouteTrace, TraceHeader


def wrong_routes(trace: RouteTrace) -> RouteTrace:
    """The same cells with other experts: K of those that were not chosen, then chosen ones if too few are left.

    Raises:
        ReplayError: at K = E, where no other set exists and replay has no effect.
    """
    experts, k = trace.header.num_experts, trace.header.top_k
    if k == experts:
        raise ReplayError(
            f"every router uses all {experts} experts: there are no wrong routes, and replay has no effect"
        )
    chosen = np.zeros((*trace.experts.shape[:2], experts), dtype=bool)
    np.put_along_axis(chosen, trace.experts.astype(np.int64), True, axis=-1)
    others = np.argsort(chosen, axis=-1, kind="stable")[..., :k]  # False sorts first
    wrong = np.where(trace.recorded[..., None], others, 0).astype(trace.experts.dtype)
    return replace(trace, experts=wrong)


def require_live(native: np.ndarray, moved: np.ndarray, resolved: RouteTrace, executed: RouteTrace) -> float:
    """Mean |Δ log-prob| between a native pass and one under wrong routes, if replay is live in every layer.

    Args:
        native, moved: log-probs of the two passes, in nats; any shape that both have.
        resolved: the wrong routes that were to be executed.
        executed: what the routers executed in the second pass.

    Raises:
        ReplayError: if the log-probs did not change, or a layer executed other routes than it was given; names the layers.
    """
    by_layer = agreement(resolved, executed).router_flip_by_layer()
    deaf = [
        layer for layer, rate in zip(resolved.header.moe_layers, by_layer, strict=True) if rate != 0
    ]  # NaN differs too
    if deaf:
        raise ReplayError(
            f"negative control: layers {deaf} executed other experts than they were given; replay is not live there"
        )
    gap = float(np.abs(np.asarray(moved, np.float64) - np.asarray(native, np.float64)).mean())
    if not gap > 0:  # NaN included
        raise ReplayError(
            f"negative control: deliberately wrong experts moved the log-probs by {gap}; replay is not live"
        )
    return gap


def wrong_gates(trace: RouteTrace) -> RouteTrace:
    """The same routes with other scores: those of each expert times its own factor, from a half to one and a half.

    Raises:
        ReplayError: if the trace carries no scores.
    """
    if trace.scores is None:
        raise ReplayError("recorded gates: the trace carries no router scores")
    factors = np.linspace(0.5, 1.5, trace.header.num_experts, dtype=np.float32)
    return replace(trace, scores=np.asarray(trace.scores) * factors)


def require_gates(native: np.ndarray, moved: np.ndarray, header: TraceHeader) -> None:
    """Replayed gate weights must reach the experts: some routers take only the ids of their pick and weigh in another way.

    Args:
        native, moved: log-probs of a native pass and of one under its own routes with wrong_gates, in nats; any shape
            that both have.
        header: of the routers. With one expert a token, whose weight a router may renormalise to 1, nothing need move.

    Raises:
        ReplayError: if the log-probs did not change.
    """
    if (
        header.top_k > 1
        and not np.abs(np.asarray(moved, np.float64) - np.asarray(native, np.float64)).max(initial=0) > 0
    ):
        raise ReplayError(
            "negative control: other gate weights did not move the log-probs; routers of this family weigh their experts by something "
            "else than the scores that they rank, so router_replay.gates 'recorded' has no effect there"
        )
