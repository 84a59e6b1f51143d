"""Signals of expert scores on real models against closed forms, finite differences, autograd, and between engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.config import JobConfig
from rar_lib.engines.base import Replay, TokenBatch
from rar_lib.engines.capture import RouteCollector
from rar_lib.engines.hf_experts import HFBlock
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.logits import response_logprobs
from rar_lib.engines.megatron_trainer import MegatronTrainer
from rar_lib.engines.taps import draw_labels, open_taps
from rar_lib.engines.trainers import TRAINERS
from rar_lib.errors import ConfigError, EngineError
from rar_lib.replay import recording
from rar_lib.replay.points import find_points
from rar_lib.replay.scores import (
    RouteSignals,
    SignalRequest,
    aggregate,
    route_scores,
    score_sums,
)
from rar_lib.replay.stability import rank_agreement
from rar_lib.rl.objectives import grpo_loss
from rar_lib.traces.trace import RouteTrace
from tests.conftest import Sampled
from tests.replay.families import FAMILIES, build

ALL = SignalRequest(frozenset({"gate", "param", "param_exact", "swap"}))
GENERATOR = torch.Generator().manual_seed(5)
TOKENS = torch.randint(3, 60, (3, 6), generator=GENERATOR)
BATCH = TokenBatch(
    TOKENS, torch.tensor([6, 6, 5]), torch.tensor([2, 3, 2]), ("a/0", "a/1", "b/0"), torch.tensor([0, 0, 1])
)
CONFIG = JobConfig.build({}, ["trainer.micro_batch_size=32"])


def signals_of(model: Any, batch: TokenBatch = BATCH, request: SignalRequest = ALL) -> tuple[RouteSignals, RouteTrace]:
    found = find_points(model)
    blocks = [HFBlock(experts) for experts in found.experts]  # type: ignore[union-attr]
    with recording(model, scores=True) as record, open_taps(model, found.points, blocks, batch, request, 1.0) as taps:
        assert taps is not None
        collector, rows = RouteCollector(record), torch.arange(len(batch))
        logits = model(input_ids=batch.tokens, use_cache=False).logits
        taps.take(rows, logits, response_logprobs(logits, batch.tokens, batch.response_mask, 1.0))
        collector.take(rows)
    return taps.signals(), collector.trace(batch, "old", "test", "tiny")


def likelihood(model: Any, batch: TokenBatch = BATCH) -> torch.Tensor:
    """ℓ of each sequence, `[S]`."""
    logits = model(input_ids=batch.tokens, use_cache=False).logits
    return response_logprobs(logits, batch.tokens, batch.response_mask, 1.0).sum(1)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: Any) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return build(FAMILIES[family])


@pytest.fixture(scope="module")
def seen(model: Any) -> tuple[RouteSignals, RouteTrace]:
    return signals_of(model)


# ---------------------------------------------------------------- each family


def test_gate_gradients_have_the_closed_form_of_the_family(family: str, model: Any, seen: Any) -> None:
    signals, trace = seen
    g, a = (x.astype(np.float64) for x in (signals.gates, signals.gate_grad))
    scale = getattr(model.config, "routed_scaling_factor", None) or 1.0
    p = g / scale
    mean = (p * a).sum(-1, keepdims=True)
    expected = g * (a - mean)
    if family in ("glm4_moe", "deepseek_v3", "minimax_m2"):  # normalised sigmoid; the ranked scores carry a bias
        sigmoid = _sigmoid_of_active(model, trace)
        expected = expected * (1 - sigmoid)
    else:
        normalised = np.isclose(p.sum(-1), 1, atol=1e-5)[trace.recorded]
        assert normalised.all() == (family not in ("olmoe", "qwen2_moe"))
        if normalised.all():
            total = signals.logit_grad.sum(-1)[trace.recorded]
            assert np.abs(total).max() < 1e-4 * np.abs(signals.logit_grad).max()
    np.testing.assert_allclose(
        signals.logit_grad[trace.recorded], expected[trace.recorded], atol=2e-5 * np.abs(expected).max()
    )
    np.testing.assert_array_equal(route_scores(signals, "gate"), signals.logit_grad.astype(np.float64) ** 2)


def _sigmoid_of_active(model: Any, trace: RouteTrace) -> np.ndarray:
    """Unbiased sigmoid scores of the active experts: ranked scores less the router's correction."""
    ids = trace.experts.astype(np.int64)
    out = []
    for column, layer in enumerate(trace.header.moe_layers):
        block = model.model.layers[layer].mlp
        bias = getattr(block, "e_score_correction_bias", None)
        bias = block.gate.e_score_correction_bias if bias is None else bias
        assert trace.scores is not None
        scores = np.take_along_axis(trace.scores[:, column], ids[:, column], -1)
        out.append(np.where(trace.recorded[:, column, None], scores - bias.numpy()[ids[:, column]], 0))
    return np.stack(out, 1).astype(np.float64)


def test_gate_gradients_are_finite_differences(model: Any, seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    signals, trace = seen
    routers = find_points(model).routers  # type: ignore[union-attr]
    original = torch.nn.functional.linear
    column, router = 0, routers[0]
    target = getattr(router, "layer", router).weight
    size = 2e-3
    token = int(np.abs(signals.logit_grad[:, column]).max(-1).argmax())
    sequence = int(np.searchsorted(trace.offsets, token, side="right") - 1)
    row = sequence * TOKENS.shape[1] + token - int(trace.offsets[sequence])
    for slot in range(trace.header.top_k):
        expert, values = int(trace.experts[token, column, slot]), []
        for sign in (1, -1):

            def nudged(x: Any, weight: Any, bias: Any = None, sign: int = sign, expert: int = expert) -> Any:
                out = original(x, weight, bias)
                if weight.shape == target.shape and torch.equal(weight.float(), target.float()):
                    out = out.clone()
                    out.view(-1, out.shape[-1])[row, expert] += sign * size
                return out

            monkeypatch.setattr(torch.nn.functional, "linear", nudged)
            with torch.no_grad():
                values.append(likelihood(model).double().sum())
            monkeypatch.setattr(torch.nn.functional, "linear", original)
        slope = float(values[0] - values[1]) / (2 * size)
        assert slope == pytest.approx(float(signals.logit_grad[token, column, slot]), rel=2e-2, abs=3e-3)


def test_gates_gradients_and_runners_up_are_those_of_the_experts(model: Any, seen: Any) -> None:
    """a_e from the gate's gradient equals <u, o_e> with o_e computed again; the exchange has the first-order size it says."""
    signals, trace = seen
    swap = route_scores(signals, "swap")
    assert swap.shape == trace.experts.shape
    assert (swap >= 0).all()
    if not np.isnan(signals.runner_up).any():
        expected = (signals.gates * (signals.runner_up[..., None] - signals.gate_grad)) ** 2
        np.testing.assert_allclose(swap, expected, rtol=1e-4, atol=1e-9)
    block = HFBlock(find_points(model).experts[0])  # type: ignore[union-attr]
    x = torch.randn(4, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for expert in range(trace.header.num_experts):
            alone = block.experts(x, torch.full((4, 1), expert), torch.ones(4, 1))
            torch.testing.assert_close(block.expert(expert).output(x), alone)


def test_param_is_autograds_norm_where_an_expert_sees_one_token(family: str, model: Any) -> None:
    """One prompt token and one response token: one row with a gradient, so routes and sequences have the same norm."""
    batch = TokenBatch(TOKENS[:1, :2], torch.tensor([2]), torch.tensor([1]), ("a/0",), torch.tensor([0]))
    signals, trace = signals_of(model, batch)
    assert signals.exact is not None
    model.zero_grad()
    likelihood(model, batch).sum().backward()
    q = route_scores(signals, "param")
    for column, experts in enumerate(find_points(model).experts):  # type: ignore[union-attr]
        norms = sum(p.grad.reshape(p.shape[0], -1).square().sum(1) for p in experts.parameters())
        for slot in range(trace.header.top_k):
            expert = int(trace.experts[0, column, slot])
            assert q[0, column, slot] == pytest.approx(float(norms[expert]), rel=1e-4)
            assert signals.exact[0, column, expert] == pytest.approx(float(norms[expert]), rel=1e-4)
    model.zero_grad()


def test_param_exact_is_autograds_norm_of_each_sequence(model: Any, seen: Any) -> None:
    signals, _ = seen
    for i in range(len(BATCH)):
        model.zero_grad()
        likelihood(model)[i].backward()
        for column, experts in enumerate(find_points(model).experts):  # type: ignore[union-attr]
            norms = sum(p.grad.reshape(p.shape[0], -1).square().sum(1) for p in experts.parameters()).numpy()
            np.testing.assert_allclose(signals.exact[i, column], norms, rtol=1e-3, atol=1e-6 * norms.max())
    model.zero_grad()


# ---------------------------------------------------------------- both trainers


@pytest.fixture(scope="module", params=list(TRAINERS))
def trainer(request: Any, checkpoint: Path) -> Any:
    return TRAINERS[request.param](checkpoint, CONFIG.trainer, CONFIG.algorithm)


@pytest.fixture(scope="module")
def hf_pass(checkpoint: Path, sampled: Sampled) -> Any:
    hf = HFTrainer(checkpoint, CONFIG.trainer, CONFIG.algorithm)
    return hf.logprobs(sampled.batch, temperature=1.0, capture="margins", signals=ALL)


def test_the_engines_hand_over_the_same_signals(trainer: Any, hf_pass: Any, sampled: Sampled) -> None:
    result = trainer.logprobs(sampled.batch, temperature=1.0, capture="margins", signals=ALL)
    same = (np.sort(result.trace.experts, -1) == np.sort(hf_pass.trace.experts, -1)).all(-1) & result.trace.recorded
    assert same.mean() > 0.9
    for estimator in ("gate", "param", "swap"):
        mine, theirs = (np.sort(route_scores(r.signals, estimator), -1)[same] for r in (result, hf_pass))
        np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=1e-4 * theirs.max())
    exact = [r.signals.exact.sum(0) for r in (result, hf_pass)]
    np.testing.assert_allclose(exact[0], exact[1], rtol=1e-2, atol=1e-4 * exact[1].max())


def test_where_every_expert_is_chosen_gates_stay_with_their_experts(tmp_path: Path) -> None:
    """At K = E Megatron's gates come by expert and the ids by rank: a square that looks like a match."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=2, vocab_size=64, num_experts=4, num_experts_per_tok=4,
        norm_topk_prob=True, pad_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    tiny = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in tiny.named_parameters():
            if tensor.dim() >= 2:
                tensor.copy_(torch.randn_like(tensor) * (0.7 if "gate.weight" in name else 0.15))
    tiny.save_pretrained(tmp_path)
    one, two = (
        made(tmp_path, CONFIG.trainer, CONFIG.algorithm).logprobs(BATCH, temperature=1.0, capture=True, signals=ALL)
        for made in (HFTrainer, MegatronTrainer)
    )
    for estimator in ("gate", "param"):
        by_expert = [
            np.take_along_axis(route_scores(r.signals, estimator), np.argsort(r.trace.experts, -1), -1)
            for r in (one, two)
        ]
        np.testing.assert_allclose(*by_expert, rtol=1e-2, atol=1e-4 * by_expert[0].max())
    np.testing.assert_allclose(one.signals.exact, two.signals.exact, rtol=1e-2, atol=1e-4 * one.signals.exact.max())


def test_signals_change_no_bit_of_the_pass_and_leave_nothing_behind(
    trainer: Any, sampled: Sampled, tmp_path: Path
) -> None:
    batch = sampled.batch
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    plain = trainer.logprobs(batch, temperature=1.0, capture=True)
    result = trainer.logprobs(batch, temperature=1.0, capture=True, signals=ALL)
    assert torch.equal(plain.logprobs, result.logprobs)
    assert np.array_equal(plain.trace.experts, result.trace.experts)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.weights())
    trainer.save(tmp_path)

    def step() -> Any:
        advantages = torch.linspace(-1, 1, len(batch))
        return trainer.update(
            batch, lambda logp, rows, scores=None: grpo_loss(
                logp, plain.logprobs[rows], advantages[rows], batch.response_mask[rows], 0.2, 0.2
            ), temperature=1.0,
        )  # fmt: skip

    first = step()
    trainer.load(tmp_path)
    trainer.logprobs(batch, temperature=1.0, capture=True, signals=ALL)
    again = step()
    trainer.load(tmp_path)
    assert (first.loss, first.grad_norm) == (again.loss, again.grad_norm)


def test_doubling_the_batch_leaves_the_scores_per_route(trainer: Any, sampled: Sampled) -> None:
    batch = sampled.batch
    once = trainer.logprobs(batch, temperature=1.0, capture=True, signals=ALL)
    rows = torch.arange(len(batch)).repeat(2)
    double = replace(batch.select(rows), uids=tuple(f"{u}+{i}" for i, u in enumerate(batch.select(rows).uids)))
    twice = trainer.logprobs(double, temperature=1.0, capture=True, signals=ALL)
    for estimator in ("gate", "param", "param_exact", "swap"):
        one, two = (score_sums(r.signals, r.trace, estimator) for r in (once, twice))
        np.testing.assert_allclose(two.mass, 2 * one.mass, rtol=1e-3, atol=1e-6 * one.mass.max())
        np.testing.assert_array_equal(two.count, 2 * one.count)
        np.testing.assert_allclose(
            aggregate(two, "per_route"), aggregate(one, "per_route"), rtol=1e-3, atol=1e-6 * one.mass.max()
        )


@pytest.mark.parametrize("engine", list(TRAINERS))
def test_recompute_changes_no_score(engine: str, checkpoint: Path, sampled: Sampled) -> None:
    scores = []
    for recompute in (False, True):
        config = JobConfig.build({}, ["trainer.micro_batch_size=32", f"trainer.recompute={str(recompute).lower()}"])
        trainer = TRAINERS[engine](checkpoint, config.trainer, config.algorithm)
        result = trainer.logprobs(sampled.batch, temperature=1.0, capture=True, signals=ALL)
        assert result.signals is not None
        scores.append(route_scores(result.signals, "gate"))
        full = trainer.logprobs(sampled.batch, temperature=1.0, replay=Replay.full(sampled.result.trace))
        assert full.counts.executed_equals_resolved == 1
    np.testing.assert_array_equal(*scores)


def test_resampled_labels_are_draws_of_the_trainer_whatever_the_split(trainer: Any, sampled: Sampled) -> None:
    request = replace(ALL, labels="resampled", seed=4)
    wide, narrow = (
        trainer.logprobs(sampled.batch, temperature=1.0, capture=True, signals=request, micro_batch_size=size)
        for size in (64, 32)
    )
    rollout = trainer.logprobs(sampled.batch, temperature=1.0, capture=True, signals=ALL)
    assert torch.equal(narrow.logprobs, rollout.logprobs)  # the pass still scores the sampled tokens
    a, b, c = (aggregate(score_sums(r.signals, r.trace, "gate"), "per_route") for r in (wide, narrow, rollout))
    np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-4 * b[np.isfinite(b)].max())
    assert not np.allclose(a, c)
    agreement = rank_agreement(a, c)
    assert agreement is not None
    assert agreement > 0.5  # two draws of labels estimate one matrix
    assert (wide.signals.labels, rollout.signals.labels) == ("resampled", "rollout")
    cool = trainer.logprobs(sampled.batch, temperature=0.5, capture=True, signals=ALL)
    assert cool.signals.labels == "rollout, temperature 0.5"  # not the Fisher information of π: it says so


def test_labels_are_drawn_from_the_distribution_and_apart_at_each_position() -> None:
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    logits = p.log().clamp_min(-100).expand(100, 51, 4)
    tokens = torch.zeros(100, 51, dtype=torch.int64)
    names = [f"s{i}" for i in range(100)]
    labels = draw_labels(logits, tokens, names, 0, 1.0)[:, 1:]
    share = torch.bincount(labels.reshape(-1), minlength=4) / labels.numel()
    assert torch.allclose(share, p, atol=0.03)
    expected = float((p**2).sum())  # of two independent draws being alike
    for one, two in ((labels[:, 1:], labels[:, :-1]), (labels[1:], labels[:-1])):
        assert float((one == two).double().mean()) == pytest.approx(expected, abs=0.03)
    cold = draw_labels(logits, tokens, names, 0, 0.05)[:, 1:]
    assert (cold == 0).double().mean() > 0.99
    assert torch.equal(draw_labels(logits[:3], tokens[:3], names[:3], 0, 1.0)[:, 1:], labels[:3])
    assert not torch.equal(draw_labels(logits, tokens, names, 1, 1.0)[:, 1:], labels)


def test_requests_that_make_no_sense_are_refused(trainer: Any, sampled: Sampled) -> None:
    with pytest.raises(ConfigError, match="score estimator: expected some of gate, param, param_exact, swap, found"):
        SignalRequest(frozenset({"fisher"}))
    with pytest.raises(EngineError, match="signals need capture"):
        trainer.logprobs(sampled.batch, temperature=1.0, signals=ALL)
