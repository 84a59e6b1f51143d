"""Recording and replaying at the selection: what they change, and that nothing else does."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.checkpoint import load_model
from rar_lib.errors import ReplayError
from rar_lib.replay import recording, replaying
from rar_lib.replay.control import require_live, wrong_routes
from rar_lib.replay.plan import ReplayPlan, Unit, full_plan
from rar_lib.replay.points import find_points
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return load_model(checkpoint)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(4, 60, (3, 7), generator=torch.Generator().manual_seed(0))


def logits(model: Any, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False, **kwargs).logits


def plan_of(trace: RouteTrace, planned: np.ndarray) -> ReplayPlan:
    unit: Unit = "token_layer" if planned.ndim == 2 else "slot"
    return ReplayPlan(unit, planned, trace.payload_sha256(), "by hand", 0, None, int(trace.recorded.sum()))


def record(model: Any, tokens: torch.Tensor) -> RouteTrace:
    with recording(model) as seen:
        logits(model, tokens)
    return seen.trace()


def test_recording_changes_no_bit(model: Any, tokens: torch.Tensor) -> None:
    native = logits(model, tokens)
    with recording(model) as seen:
        watched = logits(model, tokens)
    assert torch.equal(native, watched)
    trace = seen.trace()
    assert trace.lengths.tolist() == [7, 7, 7]
    assert trace.header.moe_layers == (0, 1, 2, 3)
    assert (trace.token_ids == tokens.reshape(-1).numpy()).all()
    assert (trace.status[[6, 13, 20]] == Status.LAST).all()
    assert trace.coverage() == {"recorded": 1.0, "missing": 0.0}


def test_margins_are_kept_in_the_trace(model: Any, tokens: torch.Tensor) -> None:
    native, plain = logits(model, tokens), record(model, tokens)
    with recording(model, margins=True) as seen:
        assert torch.equal(native, logits(model, tokens))
    trace = seen.trace()
    assert trace.equals(replace(plain, margins=trace.margins))
    assert trace.margins is not None
    assert trace.margins.shape == (21, 4)
    seen_scores: list[torch.Tensor] = []
    handle = model.model.layers[0].mlp.gate.register_forward_hook(lambda _, args, out: seen_scores.append(out[0]))
    logits(model, tokens)
    handle.remove()
    top = seen_scores[0].softmax(-1).topk(3).values
    assert np.allclose(trace.margins[:, 0], (top[:, 1] - top[:, 2]).numpy(), atol=1e-7)


def test_own_replay_changes_no_bit(model: Any, tokens: torch.Tensor) -> None:
    trace, native = record(model, tokens), logits(model, tokens)
    with replaying(model, trace) as replay:
        again = logits(model, tokens)
    assert torch.equal(native, again)
    assert (replay.forced_units, replay.changed_cells) == (3 * 6 * 4, 0)


def test_wrong_routes_move_the_output_and_are_executed(model: Any, tokens: torch.Tensor) -> None:
    trace, native = record(model, tokens), logits(model, tokens)
    wrong = wrong_routes(trace)
    with replaying(model, wrong) as replay, recording(model) as executed:
        moved = logits(model, tokens)
    assert (native[:, :-1] - moved[:, :-1]).abs().max() > 0.1
    assert replay.changed_cells == replay.forced_units
    seen = executed.trace()
    assert (np.sort(seen.experts[seen.recorded], -1) == np.sort(wrong.experts[wrong.recorded], -1)).all()


def test_the_order_of_contexts_says_what_is_recorded(model: Any, tokens: torch.Tensor) -> None:
    trace = record(model, tokens)
    with recording(model) as native_local, replaying(model, wrong_routes(trace)):
        logits(model, tokens)
    first = native_local.trace()  # the live choice; only layer 0 sees the native hidden states
    assert (np.sort(first.experts[:, 0], -1) == np.sort(trace.experts[:, 0], -1)).all()


def test_weights_are_gathered_from_the_live_scores_by_the_models_rule(model: Any, tokens: torch.Tensor) -> None:
    router = model.model.layers[0].mlp.gate
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    forced = torch.tensor([[3, 9]] * 4)
    header = TraceHeader(num_experts=16, top_k=2, moe_layers=(0, 1, 2, 3), source="old")
    trace = RouteTrace.from_packed(header, forced[:, None].expand(4, 4, 2).numpy(), [4], [Status.RECORDED] * 4)
    with replaying(model, trace):
        scores, weights, ids = router(hidden)
    probs = scores.softmax(-1).gather(-1, forced)
    assert torch.equal(ids, forced)
    assert torch.allclose(weights, probs / probs.sum(-1, keepdim=True))


def test_router_gets_gradient_on_drifted_routes(model: Any, tokens: torch.Tensor) -> None:
    trace = wrong_routes(record(model, tokens))
    model.zero_grad()
    with replaying(model, trace):
        model(input_ids=tokens, use_cache=False).logits[:, :-1].logsumexp(-1).sum().backward()
    for layer in model.model.layers:
        gradient = layer.mlp.gate.weight.grad
        forced = np.unique(trace.experts[trace.recorded.any(-1)][:, layer.self_attn.layer_idx]).astype(np.int64)
        assert (gradient[forced].abs().sum(-1) > 0).all()
    model.zero_grad()


def test_afterwards_everything_is_as_before(model: Any, tokens: torch.Tensor) -> None:
    native, trace = logits(model, tokens), record(model, tokens)
    forwards = [m.forward for m in find_points(model).routers]
    with contextlib.suppress(KeyboardInterrupt), replaying(model, wrong_routes(trace)):
        logits(model, tokens)
        raise KeyboardInterrupt
    assert torch.equal(native, logits(model, tokens))
    assert [m.forward for m in find_points(model).routers] == forwards
    assert all("forward" not in vars(m) for m in find_points(model).routers)
    assert all(not p.selectors and p._used is None for p in find_points(model).points)


def test_two_models_do_not_see_each_other(checkpoint: Path, model: Any, tokens: torch.Tensor) -> None:
    other, native = load_model(checkpoint), logits(model, tokens)
    with replaying(other, wrong_routes(record(other, tokens))):
        assert torch.equal(native, logits(model, tokens))
        assert not torch.equal(native, logits(other, tokens))


def test_missing_and_unplanned_rows_stay_native(model: Any, tokens: torch.Tensor) -> None:
    trace, native = record(model, tokens), logits(model, tokens)
    wrong = wrong_routes(trace)
    with replaying(model, wrong, plan_of(wrong, np.zeros((21, 4), bool))) as replay:
        assert torch.equal(native, logits(model, tokens))
    assert replay.forced_units == 0
    only = np.zeros((21, 4), bool)
    only[2, 3] = True
    with replaying(model, wrong, plan_of(wrong, only)) as replay:
        moved = logits(model, tokens)
    assert (replay.forced_units, replay.changed_cells) == (1, 1)
    # forcing one row changes how many rows its experts multiply at once, so other rows may move by an ulp
    changed = ((moved - native).abs() > 1e-4).any(-1)
    assert changed[0, 2]
    assert not changed[0, :2].any()
    assert not changed[1:].any()


def test_padding_after_a_sequence_stays_native(model: Any, tokens: torch.Tensor) -> None:
    trace = record(model, tokens)
    longer = torch.cat([tokens, torch.zeros(3, 4, dtype=torch.int64)], 1)
    with replaying(model, trace) as replay:
        out = logits(model, longer)
    assert torch.allclose(out[:, :7], logits(model, tokens), atol=1e-5)
    assert replay.forced_units == 3 * 6 * 4


def test_micro_batches_are_named_by_focus(model: Any, tokens: torch.Tensor) -> None:
    trace = wrong_routes(record(model, tokens))
    with replaying(model, trace):
        whole = logits(model, tokens)
    with replaying(model, trace) as replay:
        replay.focus([2, 0])
        part = logits(model, tokens[[2, 0]])
    assert torch.allclose(part, whole[[2, 0]], atol=1e-5)


def test_left_padding_is_read_from_the_mask(model: Any, tokens: torch.Tensor) -> None:
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    with recording(model) as seen:
        logits(model, tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))
    trace = seen.trace()
    assert trace.lengths.tolist() == [5, 7, 7]
    assert (trace.token_ids[:5] == tokens[0, 2:].numpy()).all()


def test_forwards_without_a_cache_are_sequences_of_their_own(model: Any, tokens: torch.Tensor) -> None:
    with recording(model) as seen:
        logits(model, tokens[:1])
        logits(model, tokens[1:, :5])
    trace = seen.trace()
    assert trace.lengths.tolist() == [7, 5, 5]
    assert trace[0].equals(record(model, tokens[:1]))
    assert trace.select([1, 2]).equals(record(model, tokens[1:, :5]))


def test_a_forward_of_another_size_or_padded_on_the_left_is_refused(model: Any, tokens: torch.Tensor) -> None:
    trace = replace(record(model, tokens), token_ids=None)
    with replaying(model, trace), pytest.raises(ReplayError, match="holds 6 sequences, the replay is focused on 3"):
        logits(model, torch.cat([tokens, tokens]))
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    with replaying(model, trace), pytest.raises(ReplayError, match="pads on the left"):
        logits(model, tokens, attention_mask=mask)
    with (
        replaying(model, trace) as replay,
        pytest.raises(ReplayError, match="has 3 sequences; asked to focus on 1 to 3"),
    ):
        replay.focus([1, 3])


def test_decoding_with_a_cache_is_one_trace(model: Any, tokens: torch.Tensor) -> None:
    with recording(model) as seen, torch.no_grad():
        out = model(input_ids=tokens[:, :4], use_cache=True)
        for t in range(4, 7):
            out = model(input_ids=tokens[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
    assert seen.trace().equals(record(model, tokens))


def test_recompute_gets_the_ids_of_the_forward(model: Any, tokens: torch.Tensor) -> None:
    trace = wrong_routes(record(model, tokens))

    def gradient(recompute: bool) -> torch.Tensor:
        model.zero_grad()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        with replaying(model, trace) as replay:
            model(input_ids=tokens, use_cache=False).logits[:, :-1].logsumexp(-1).sum().backward()
        model.gradient_checkpointing_disable()
        model.eval()
        assert replay.forced_units == 3 * 6 * 4  # the second forward asks for the same ids, it does not resolve again
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    assert torch.equal(gradient(False), gradient(True))
    model.zero_grad()


def test_two_forwards_before_a_recompute_are_refused(model: Any, tokens: torch.Tensor) -> None:
    trace = record(model, tokens)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    try:
        with replaying(model, trace):
            losses = [model(input_ids=tokens, use_cache=False).logits.sum() for _ in range(2)]
            with pytest.raises(ReplayError, match="exactly one forward"):
                losses[0].backward()
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
        model.zero_grad()


def test_a_trace_that_does_not_fit_is_refused(model: Any, tokens: torch.Tensor) -> None:
    trace = record(model, tokens)
    with replaying(model, trace), pytest.raises(ReplayError, match="15 rows for 3 sequences of up to 7"):
        logits(model, tokens[:, :5])
    other = trace.header.model_copy(update={"moe_layers": (0, 1, 2, 4)})
    moved = RouteTrace.from_packed(other, trace.ids(), trace.lengths, trace.status)
    with (
        pytest.raises(ReplayError, match=r"MoE layers: expected \(0, 1, 2, 3\) \(model\), found \(0, 1, 2, 4\)"),
        replaying(model, moved),
    ):
        pass
    for plan, message in (
        (plan_of(trace, np.ones((3, 4), bool)), r"expected bool \(21, 4\) for this trace, found bool \(3, 4\)"),
        (full_plan(wrong_routes(trace)), "plan for another trace"),
        (plan_of(trace, np.ones((21, 4), bool)), "a planned unit whose route is not recorded"),
    ):
        with pytest.raises(ReplayError, match=message), replaying(model, trace, plan):
            pass


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(ReplayError, match="no router found"):
        find_points(torch.nn.Linear(2, 2))


def test_negative_control() -> None:
    header = TraceHeader(num_experts=4, top_k=2, moe_layers=(0,), source="old")
    trace = RouteTrace.from_packed(header, [[[0, 3]], [[-1, -1]]], [2], [1, 2])
    assert wrong_routes(trace).ids().tolist() == [[[1, 2]], [[-1, -1]]]
    wrong = wrong_routes(trace)
    for moved in (np.zeros(2), np.array([0.0, np.nan])):
        with pytest.raises(ReplayError, match=r"moved the log-probs by .*; replay is not live"):
            require_live(np.zeros(2), moved, wrong, wrong)
    assert require_live(np.zeros(2), np.array([0.0, 2.0]), wrong, wrong) == 1
    with pytest.raises(ReplayError, match=r"layers \[0\] executed other experts"):
        require_live(np.zeros(2), np.ones(2), wrong, trace)
    every = RouteTrace.from_packed(header.model_copy(update={"top_k": 4}), [[[0, 1, 2, 3]]], [1], [1])
    with pytest.raises(ReplayError, match="no wrong routes"):
        wrong_routes(every)
