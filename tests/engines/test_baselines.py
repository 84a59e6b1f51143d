"""Baselines without replay and the diagnostic upper bound: frozen routers, recorded gates, and routers shown to an objective."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.config import JobConfig
from rar_lib.engines.base import Replay
from rar_lib.engines.hf_rollout import HFRollout
from rar_lib.engines.trainers import TRAINERS
from rar_lib.errors import ReplayError
from rar_lib.metrics.mismatch import k3
from rar_lib.replay.contexts import recording, replaying
from rar_lib.replay.control import require_gates, wrong_gates
from rar_lib.replay.plan import full_plan
from tests.conftest import SPECIAL, Sampled, hf_config, sample
from tests.replay.families import FAMILIES
from tests.replay.families import build as build_family

WEIGH_OTHERWISE = {"glm4_moe", "deepseek_v3", "minimax_m2", "ernie4_5_moe"}  # a bias ranks, unbiased scores weigh


def build(engine: str, checkpoint: Path, *overrides: str) -> Any:
    config = JobConfig.build({}, ["trainer.micro_batch_size=32", "algorithm.lr=1e-2", *overrides])
    return TRAINERS[engine](checkpoint, config.trainer, config.algorithm)


def pull(logp: torch.Tensor, rows: torch.Tensor, scores: Any = None) -> Any:
    return -logp, {}


# ------------------------------------------------------------------ frozen router


@pytest.mark.parametrize("engine", list(TRAINERS))
def test_a_frozen_router_keeps_its_weights_while_the_rest_learns(
    engine: str, checkpoint: Path, sampled: Sampled, tmp_path: Path
) -> None:
    trainer = build(engine, checkpoint, "algorithm.freeze_router=true", "algorithm.weight_decay=0.1")
    before = {name: value.clone() for name, value in trainer.weights()}
    trainer.update(sampled.batch, pull, temperature=1.0)
    after = dict(trainer.weights())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    assert len(routers) == 4
    assert not moved & routers
    assert any("experts" in name for name in moved)
    trainer.save(tmp_path)
    again = build(engine, checkpoint, "algorithm.freeze_router=true", "algorithm.weight_decay=0.1")
    again.load(tmp_path)
    for other in (trainer, again):
        other.update(sampled.batch, pull, temperature=1.0)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(trainer.weights(), again.weights(), strict=True))


# ------------------------------------------------------------------ recorded gates


@pytest.fixture(scope="module")
def scored(checkpoint: Path, tokenizer: Any, task: Any) -> Sampled:
    """A bf16, fp8-rounded rollout that keeps its router scores."""
    config = hf_config()
    rollout = HFRollout(checkpoint, config.rollout, SPECIAL, scores=True)
    rollout.load_weights(build("hf", checkpoint).weights(), 0)
    return sample(rollout, tokenizer, task)


def test_the_rollout_routes_alike_whether_it_keeps_scores_or_not(scored: Sampled, sampled: Sampled) -> None:
    assert scored.result.responses == sampled.result.responses
    assert scored.result.logprobs == sampled.result.logprobs
    assert np.array_equal(scored.result.trace.experts, sampled.result.trace.experts)
    assert scored.result.trace.scores is not None
    scores, recorded = scored.result.trace.scores, scored.result.trace.recorded
    chosen = np.take_along_axis(scores, scored.result.trace.experts.astype(np.int64), -1)
    best = np.sort(scores, -1)[..., -2:]
    assert np.array_equal(np.sort(chosen, -1)[recorded], best[recorded])  # values, since bf16 scores tie


def test_recorded_gates_bring_the_trainer_closer_and_give_the_router_no_gradient(
    checkpoint: Path, scored: Sampled
) -> None:
    trainer, mask = build("hf", checkpoint), scored.batch.response_mask
    live = Replay.full(scored.result.trace)
    recorded = replace(live, gates="recorded")
    passes = {
        name: trainer.logprobs(scored.batch, temperature=1.0, replay=replay).logprobs
        for name, replay in (("none", None), ("live", live), ("recorded", recorded))
    }
    off = {name: k3(logp, scored.mu, mask) for name, logp in passes.items()}
    assert off["recorded"] < off["live"] < off["none"]
    update = trainer.update(scored.batch, pull, temperature=1.0, replay=recorded)
    assert torch.equal(update.logprobs, passes["recorded"])
    gates = [p for name, p in trainer.model.named_parameters() if name.endswith("mlp.gate.weight")]
    inside = [float(p.grad.abs().max()) for p in gates]
    last_token_routes_live = sum(inside)  # no loss reaches the last token of a sequence
    assert last_token_routes_live == 0
    trainer.update(scored.batch, pull, temperature=1.0, replay=live)
    assert min(float(p.grad.abs().max()) for p in gates) > 0


def test_ones_own_gates_are_a_bit_exact_no_op(checkpoint: Path, sampled: Sampled) -> None:
    trainer = build("hf", checkpoint)
    native = trainer.logprobs(sampled.batch, temperature=1.0, capture="scores")
    replay = replace(Replay.full(native.trace), gates="recorded")
    again = trainer.logprobs(sampled.batch, temperature=1.0, replay=replay)
    assert torch.equal(again.logprobs, native.logprobs)


def test_gates_follow_the_plan(checkpoint: Path, scored: Sampled) -> None:
    trainer = build("hf", checkpoint)
    native = trainer.logprobs(scored.batch, temperature=1.0)
    plan = full_plan(scored.result.trace)
    nothing = replace(plan, planned=np.zeros_like(plan.planned))
    passed = trainer.logprobs(scored.batch, temperature=1.0, replay=Replay(scored.result.trace, nothing, "recorded"))
    assert torch.equal(passed.logprobs, native.logprobs)


def test_gates_that_are_not_there_are_refused(checkpoint: Path, sampled: Sampled, scored: Sampled) -> None:
    model = build("hf", checkpoint).model
    with (
        pytest.raises(ReplayError, match="carries no router scores"),
        replaying(model, sampled.result.trace, gates="recorded"),
    ):
        pass
    slots = full_plan(scored.result.trace, "slot")
    with (
        pytest.raises(ReplayError, match="expected unit token_layer, found slot"),
        replaying(model, scored.result.trace, slots, gates="recorded"),
    ):
        pass
    with pytest.raises(ValueError, match="vLLM records no gate weights; found R3 with vllm and megatron"):
        JobConfig.build({"router_replay": {"gates": "recorded"}})


# ------------------------------------------------------------------ routers shown to the objective


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("engine", list(TRAINERS))
@pytest.mark.parametrize("forced", [False, True])
def test_the_objective_sees_the_scores_of_its_own_forward(
    engine: str, recompute: bool, forced: bool, checkpoint: Path, sampled: Sampled
) -> None:
    settings = [f"trainer.recompute={str(recompute).lower()}"]
    replay = Replay.full(sampled.result.trace) if forced else None
    trainer = build(engine, checkpoint, *settings)
    old = trainer.logprobs(sampled.batch, temperature=1.0, replay=replay, capture="scores")
    width = sampled.batch.tokens.shape[1]
    inside = sampled.batch.token_mask
    expected = torch.zeros(len(sampled.batch), width, *old.trace.scores.shape[1:])
    expected[inside] = torch.from_numpy(np.asarray(old.trace.scores))
    calls = []

    def objective(logp: torch.Tensor, rows: torch.Tensor, scores: Any = None) -> Any:
        here = inside[rows]
        calls.append(len(rows))
        assert scores.shape == (len(rows), width, 4, 16)
        assert torch.equal(scores[here].float(), expected[rows][here])
        return -logp, {}

    shown = trainer.update(sampled.batch, objective, temperature=1.0, replay=replay, routers=True)
    assert sum(calls) == len(sampled.batch)
    assert len(calls) == 4
    plain = build(engine, checkpoint, *settings).update(sampled.batch, pull, temperature=1.0, replay=replay)
    assert (shown.loss, shown.grad_norm) == (plain.loss, plain.grad_norm)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_gates_that_do_not_reach_the_experts_are_refused(family: str) -> None:
    """Some routers take the ids of their pick and weigh by something else."""
    model = build_family(FAMILIES[family])
    tokens = torch.arange(24).reshape(2, 12) % 50
    with torch.no_grad(), recording(model, scores=True) as record:
        native = model(input_ids=tokens).logits
    trace = record.trace()
    with torch.no_grad(), replaying(model, wrong_gates(trace), gates="recorded"):
        moved = model(input_ids=tokens).logits
    if family in WEIGH_OTHERWISE:
        with pytest.raises(ReplayError, match="has no effect there"):
            require_gates(native.numpy(), moved.numpy(), trace.header)
    else:
        require_gates(native.numpy(), moved.numpy(), trace.header)
