"""`recording(model)` and `replaying(model, trace)`: what happens inside the `with` is all that happens.

    with recording(model) as record:
        model(input_ids, attention_mask=mask)
    trace = record.trace()

    with replaying(model, trace):
        model(input_ids, attention_mask=mask)  # the same experts, at today's scores

Contexts nest: `replaying` outside and `recording` inside records what was executed. Rows follow the batch: sequence i of
the trace is sequence i of the forward, right-padded; with micro-batches, `focus` says which sequences come next. Rows
without a recorded route (the last token, padding, what a producer lost) stay native and are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch

from rar_lib.errors import ReplayError
from rar_lib.replay.force import Replaying
from rar_lib.replay.plan import ReplayPlan, full_plan
from rar_lib.replay.points import at_experts, gating, selecting, tapping, watching
from rar_lib.replay.record import Recording
from rar_lib.traces.trace import RouteTrace


@contextmanager
def recording(
    model: torch.nn.Module, *, margins: bool = False, scores: bool = False, at_the_experts: bool = False
) -> Iterator[Recording]:
    """Record which experts every router of a model uses. Numbers are unchanged, bit for bit.

    Args:
        model: a Transformers MoE, or a Megatron model built by this library.
        margins: keep the margins of the live scores too: in the trace, and after `take` in `last`.
        scores: keep the ranked scores themselves, `[.., L, E]`: E values a cell, so for small models or few tokens.
        at_the_experts: listen to what the experts of a Transformers model are called with instead of intercepting the pick:
            the same ids for a fraction of the cost, without margins or scores. For rollouts.

    Raises:
        ReplayError: for margins or scores at the experts, where there are none.
    """
    if at_the_experts and (margins or scores):
        raise ReplayError("recording at the experts sees no scores; margins and scores are recorded at the pick")
    record = Recording(model, margins=margins, scores=scores)
    handle = model.register_forward_pre_hook(record._saw_inputs, with_kwargs=True)
    listening = (
        at_experts(model, record._hear) if at_the_experts else selecting(model, [record._select] * len(record._points))
    )
    try:
        with listening:
            yield record
    finally:
        handle.remove()


@contextmanager
def replaying(
    model: torch.nn.Module,
    trace: RouteTrace,
    plan: ReplayPlan | None = None,
    *,
    measure: bool = False,
    gates: Literal["live", "recorded"] = "live",
) -> Iterator[Replaying]:
    """Force the recorded routes of a trace in every forward of a model.

    Args:
        model: a Transformers MoE, or a Megatron model built by this library.
        trace: routes of the sequences that will be forwarded.
        plan: which routes to force; by default all that are recorded.
        measure: count fidelity, regret and router gradients too (Replaying.counts). Numbers are unchanged, bit for bit.
        gates: `recorded` replays the recorded scores of planned sets too, so the router has no say and no gradient there: an upper
            bound for diagnosis. The recording model must rank the same kind of score (Transformers routers of one family).

    Raises:
        ReplayError: if gates are to be replayed that the trace does not carry, or under a plan of single experts; if
            experts, top-k or MoE layers of trace and model differ; from a forward: if its rows do not fit, or it
            holds other tokens than the trace (where the trace carries its tokens).
    """
    plan = full_plan(trace) if plan is None else plan
    if gates == "recorded" and plan.unit != "token_layer":
        raise ReplayError(f"recorded gates are replayed for whole sets; expected unit token_layer, found {plan.unit}")
    replay = Replaying(model, trace, plan, measure, gates == "recorded")
    handle = model.register_forward_pre_hook(replay._check_inputs, with_kwargs=True)
    try:
        with ExitStack() as stack:
            stack.enter_context(selecting(model, [replay._select] * len(replay._points)))
            stack.enter_context(watching(model))
            if gates == "recorded":
                stack.enter_context(gating(model, replay._recorded_gates))
            if measure:
                stack.enter_context(tapping(model, replay._listen))
            yield replay
    finally:
        handle.remove()
