"""Replay at the selection on every supported family, against an independent dense reference of each rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rar_lib.errors import ReplayError
from rar_lib.replay import recording, replaying
from rar_lib.replay.control import wrong_routes
from rar_lib.replay.points import find_points
from rar_lib.traces.layers import moe_layer_numbers
from rar_lib.traces.trace import RouteTrace
from tests.replay.families import FAMILIES, build, router_logits

TOKENS = torch.randint(3, 60, (3, 6), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=list(FAMILIES))
def name(request: Any) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return build(FAMILIES[name])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def record(model: Any) -> RouteTrace:
    with recording(model) as seen:
        logits(model)
    return seen.trace()


def test_the_layers_come_from_the_config_and_are_those_that_fire(name: str, model: Any) -> None:
    trace = record(model)
    assert moe_layer_numbers(model.config) == FAMILIES[name].layers == trace.header.moe_layers
    assert moe_layer_numbers(model.config.to_dict()) == FAMILIES[name].layers
    assert trace.coverage()["recorded"] == 1


def test_recording_and_own_replay_change_no_bit(model: Any) -> None:
    native = logits(model)
    with recording(model):
        assert torch.equal(native, logits(model))
    with replaying(model, record(model), measure=True) as replay:
        assert torch.equal(native, logits(model))
    assert replay.changed_cells == 0
    counts = replay.counts()
    assert (counts.executed_equals_resolved, counts.regret) == (1, 0)
    assert counts.kept == counts.cells * find_points(model).points[0].top_k


def test_listening_at_the_experts_records_the_same(model: Any) -> None:
    native, trace = logits(model), record(model)
    with recording(model, at_the_experts=True) as seen:
        assert torch.equal(native, logits(model))
    assert seen.trace().equals(trace)
    with pytest.raises(ReplayError, match="sees no scores"), recording(model, margins=True, at_the_experts=True):
        pass
    assert not any(module._forward_pre_hooks for module in find_points(model).experts)


def test_experts_that_get_other_ids_than_were_resolved_are_counted(model: Any) -> None:
    """What lies between the router and its experts is watched: here it exchanges expert 0 with another on its way."""
    with recording(model) as seen:
        logits(model)
    used = seen.take(len(TOKENS))
    trace = record(model)

    def meddles(module: Any, args: Any) -> Any:
        return (args[0], torch.where(args[1] == 0, 1, torch.where(args[1] == 1, 0, args[1])), *args[2:])

    with replaying(model, trace) as replay:
        logits(model)
        assert replay.counts().executed_equals_resolved == 1
        handle = find_points(model).experts[-1].register_forward_pre_hook(meddles, prepend=True)
        logits(model)
        handle.remove()
    counts = replay.counts()
    touched = int((used[:, :, -1] <= 1).any(-1).sum())
    assert counts.differing == touched > 0
    assert counts.executed_equals_resolved == 1 - touched / counts.compared


def test_foreign_routes_get_the_weights_of_the_familys_rule(name: str, model: Any) -> None:
    native, trace = logits(model), record(model)
    wrong = wrong_routes(trace)
    seen: list[tuple[torch.Tensor, Any]] = []
    routers = find_points(model).routers
    handles = [r.register_forward_hook(lambda _, args, out: seen.append((args[0], out))) for r in routers]
    with replaying(model, wrong):
        moved = logits(model)
    for handle in handles:
        handle.remove()
    assert (native - moved)[:, :-1].abs().max() > 1e-3
    padded, _ = wrong.to_padded()
    for column, (router, (hidden, out)) in enumerate(zip(routers, seen, strict=True)):
        ids = next(o for o in out if o.dtype == torch.int64)
        weights = next(o for o in out if o.shape == ids.shape and o.is_floating_point())
        forced = torch.from_numpy(padded[:, :-1, column]).reshape(-1, ids.shape[-1])
        rows = torch.arange(18).reshape(3, 6)[:, :-1].reshape(-1)
        assert torch.equal(ids[rows], forced)
        expected = FAMILIES[name].rule(router_logits(router, hidden)[rows], forced, model.config)
        assert torch.allclose(weights[rows], expected, atol=1e-6)
        assert (weights[rows] > 0).all()


def test_recompute_and_gradients_under_foreign_routes(name: str, model: Any) -> None:
    wrong = wrong_routes(record(model))

    def gradient(recompute: bool) -> dict[str, torch.Tensor]:
        model.zero_grad()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        with replaying(model, wrong):
            model(input_ids=TOKENS, use_cache=False).logits[:, :-1].logsumexp(-1).sum().backward()
        model.gradient_checkpointing_disable()
        model.eval()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain, again = gradient(False), gradient(True)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[n], again[n]) for n in plain)
    for column, router in enumerate(find_points(model).routers):
        used = np.unique(wrong.experts[wrong.recorded.any(-1)][:, column]).astype(np.int64)
        assert (router.weight.grad[used].abs().sum(-1) > 0).all()
    model.zero_grad()


def test_a_family_that_selects_otherwise_is_refused_by_name() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "phimoe", hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ReplayError, match="PhimoeTopKRouter made 0 picks"), recording(model):
        logits(model)
    assert all("forward" not in vars(m) for m in model.modules())


def test_routers_of_another_kind_beside_the_known_ones_are_named() -> None:
    odd = build(FAMILIES["mixtral"], seed=3)

    class HashRouter(torch.nn.Module):
        pass

    odd.model.layers[1].mlp.gate = HashRouter()
    with pytest.raises(ReplayError, match=r"MoE layers at \(0, 1, 2\).*found at \(0, 2\).*HashRouter"):
        find_points(odd)


@settings(deadline=None, max_examples=40)
@given(
    family=st.sampled_from(["qwen3_moe", "olmoe", "mixtral"]), layers=st.integers(1, 3), k=st.integers(1, 4),
    extra=st.integers(1, 6), norm=st.booleans(), dense=st.booleans(), batch=st.integers(1, 4), length=st.integers(2, 6),
    parts=st.integers(1, 3), seed=st.integers(0, 1000),
)  # fmt: skip
def test_property_own_replay_wrong_ids_and_gradients(
    family: str,
    layers: int,
    k: int,
    extra: int,
    norm: bool,
    dense: bool,
    batch: int,
    length: int,
    parts: int,
    seed: int,
) -> None:
    experts = "num_local_experts" if family == "mixtral" else "num_experts"
    sizes: dict[str, Any] = {"num_hidden_layers": layers, experts: k + extra, "num_experts_per_tok": k}
    if family != "mixtral":
        sizes["norm_topk_prob"] = norm
    if family == "qwen3_moe":
        sizes["mlp_only_layers"] = [0] if dense and layers > 1 else []
    model = build(FAMILIES[family], seed, **sizes)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 60, (batch, length), generator=generator)
    lengths = torch.randint(1, length + 1, (batch,), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    tokens = tokens * mask

    def forward(rows: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens[rows], attention_mask=mask[rows], use_cache=False).logits

    every = torch.arange(batch)
    with torch.no_grad(), recording(model) as seen:
        native = forward(every)
    trace = seen.trace()
    assert trace.lengths.tolist() == lengths.tolist()
    with torch.no_grad(), replaying(model, trace):
        assert torch.equal(native, forward(every))
    wrong = wrong_routes(trace)
    model.zero_grad()
    with replaying(model, wrong) as replay:
        moved = torch.zeros_like(native)
        for rows in every.chunk(parts):
            replay.focus(rows)
            out = forward(rows)
            moved[rows] = out.detach()
            out[mask[rows].bool()].logsumexp(-1).sum().backward()
    cells = int(trace.recorded.sum())
    assert replay.forced_units == cells
    if cells:
        assert (moved - native).abs().max() > 0
        if k > 1 or not (norm or family == "mixtral"):  # a single renormalised weight is 1 whatever the score
            assert all(
                p.grad is not None and p.grad.abs().sum() > 0 for p in (r.weight for r in find_points(model).routers)
            )
