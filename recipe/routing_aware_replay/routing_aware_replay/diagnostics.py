"""What a plan does where nothing moves: its record in the schema of a training step, at fixed live scores.

In training the forced routes move the hidden states too, and the trainer's own counts say what happened (actor/rar/old/* and
actor/rar/update/* in verl's log). Here everything is known, so the numbers can be checked by hand. `nominal` is planned_share
in verl's log: verl reduces a name that contains "min" by the minimum, so hand it no record of this schema as it is.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from rar_lib.metrics.agreement import agreement
from rar_lib.metrics.replay import binding_share, fidelity, forced_routers, regret
from rar_lib.replay.diagnostics import PassDiagnostics, ReplayDiagnostics
from rar_lib.replay.fixed import executed
from rar_lib.replay.plan import ReplayPlan
from rar_lib.traces.trace import RouteTrace, Status

__all__ = ["agreement", "diagnose"]


def diagnose(
    plan: ReplayPlan | None,
    trace: RouteTrace,
    native: RouteTrace,
    scores: np.ndarray,
    step: int = 0,
    mode: Literal["none", "R2", "R3"] = "R3",
) -> ReplayDiagnostics:
    """The diagnostics of a step.

    Args:
        plan: of `trace`, or None for mode none.
        trace: the record.
        native: the live choice at the same tokens.
        scores: `[N, L, E]` live scores behind it.
        step, mode: of the record.

    Raises:
        ReplayError: for a plan of another trace.
    """
    missing = int(
        (np.broadcast_to(trace.status.reshape(trace.num_tokens, -1), trace.experts.shape[:2]) == Status.MISSING).sum()
    )
    if plan is None:
        nothing = PassDiagnostics(forced_routers_native_local=0.0)
        return ReplayDiagnostics(
            step=step, mode="none", policy=None, unit=None, seed=0, valid=0, budget=0, nominal=0.0, missing=missing,
            old=nothing, update=nothing,
        )  # fmt: skip
    plan.require(trace)
    known = trace.recorded & native.recorded
    used = executed(plan, trace, native, scores)
    done = PassDiagnostics(
        nominal=plan.nominal,
        forced_routers_native_local=forced_routers(native.experts, used, known),
        fidelity=fidelity(trace.experts, used, known),
        regret=regret(scores, native.experts.astype(np.int64), used, known),
        executed_equals_resolved=1.0,
    )
    axes = tuple(i for i in range(plan.planned.ndim) if i != 1)
    return ReplayDiagnostics(
        step=step, mode=mode, policy=plan.policy, unit=plan.unit, seed=plan.seed,
        requested=None if plan.requested is None else str(plan.requested), valid=plan.valid, budget=plan.budget,
        nominal=plan.nominal, missing=missing, trace_digest=plan.trace_digest,
        binding=None if plan.unit == "bias" else binding_share(plan.planned, trace.experts, native.experts, known),
        planned_by_layer=plan.planned.sum(axes).tolist(), old=done, update=done,
    )  # fmt: skip
