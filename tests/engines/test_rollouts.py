"""The hf rollout and its knobs, precision, micro-batches and sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rar_lib.config import JobConfig
from rar_lib.engines.base import TokenBatch
from rar_lib.engines.hf_rollout import HFRollout
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.hf_weights import hf_names, load_hf_weights
from rar_lib.engines.precision import at_precision, round_to_fp8
from rar_lib.engines.session import resolve_engines
from rar_lib.errors import EngineError
from rar_lib.metrics.agreement import agreement
from rar_lib.metrics.mismatch import k3
from tests.conftest import SPECIAL, Sampled, hf_config, sample
from tests.replay.families import FAMILIES
from tests.replay.families import build as build_family


def rollout(checkpoint: Path, tokenizer: Any, *overrides: str) -> HFRollout:
    made = HFRollout(checkpoint, hf_config(*overrides).rollout, SPECIAL)
    config = hf_config()
    made.load_weights(HFTrainer(checkpoint, config.trainer, config.algorithm).weights(), 0)
    return made


@pytest.fixture(scope="module")
def trainer(checkpoint: Path) -> HFTrainer:
    return HFTrainer(checkpoint, hf_config().trainer, hf_config().algorithm)


def test_the_same_prompt_draws_the_same_tokens_in_any_batch(checkpoint: Path, tokenizer: Any, task: Any) -> None:
    engine = rollout(checkpoint, tokenizer, "rollout.dtype=float32", "rollout.precision=native")
    sampling = JobConfig().rollout.sampling
    prompts = [tokenizer(task.problem(i).prompt)["input_ids"] for i in range(12)]
    uids = [str(i) for i in range(12)]
    together = engine.generate(prompts, sampling, uids, 0)
    backwards = engine.generate(prompts[::-1], sampling, uids[::-1], 0)
    assert together.responses == backwards.responses[::-1]
    assert together.responses != engine.generate(prompts, sampling, uids, 1).responses


def test_the_draw_follows_the_models_distribution(checkpoint: Path, tokenizer: Any) -> None:
    engine = rollout(checkpoint, tokenizer, "rollout.dtype=float32", "rollout.precision=native")
    prompt = tokenizer("12+34=")["input_ids"]
    one = JobConfig().rollout.sampling.model_copy(update={"max_new_tokens": 1, "temperature": 2.0})
    drawn = engine.generate([prompt] * 4000, one, [str(i) for i in range(4000)], 0)
    counts = torch.bincount(torch.tensor([r[0] for r in drawn.responses]), minlength=100) / 4000
    with torch.no_grad():
        expected = (engine.model(input_ids=torch.tensor([prompt])).logits[0, -1] / 2.0).softmax(-1)
    assert (counts - expected).abs().max() < 0.03
    logp = torch.tensor([p[0] for p in drawn.logprobs])
    assert torch.allclose(logp, expected.log()[torch.tensor([r[0] for r in drawn.responses])], atol=1e-4)


def test_each_knob_moves_routes_further_from_the_trainer(
    checkpoint: Path, tokenizer: Any, task: Any, trainer: HFTrainer
) -> None:
    def against_trainer(*overrides: str) -> tuple[float, float]:
        drawn = sample(rollout(checkpoint, tokenizer, *overrides), tokenizer, task)
        native = trainer.logprobs(drawn.batch, temperature=1.0, capture=True)
        assert native.trace is not None
        flips = agreement(drawn.result.trace, native.trace).scalars()["router_flip"]
        distance = k3(native.logprobs, drawn.mu, drawn.batch.response_mask)
        assert flips is not None
        assert distance is not None
        return flips, distance

    exact = against_trainer("rollout.dtype=float32", "rollout.precision=native")
    fp8 = against_trainer("rollout.dtype=float32")
    noise = against_trainer("rollout.dtype=float32", "rollout.precision=native", "rollout.router_noise=0.3")
    assert exact[0] < 1e-3
    assert fp8[0] > exact[0]
    assert fp8[1] > 100 * exact[1]
    assert noise[0] > 0.02


def test_router_noise_is_drawn_from_the_seed_and_leaves_the_model_alone(
    checkpoint: Path, tokenizer: Any, task: Any
) -> None:
    engine = rollout(checkpoint, tokenizer, "rollout.router_noise=0.3")
    one, two = (sample(engine, tokenizer, task) for _ in range(2))
    assert one.result.trace.equals(two.result.trace)
    assert all("forward" not in vars(m) for m in engine.model.modules())


def test_rescoring_is_the_engines_own_noise(sampled: Sampled, checkpoint: Path, tokenizer: Any) -> None:
    engine = rollout(checkpoint, tokenizer)
    again = engine.rescore(sampled.batch, JobConfig().rollout.sampling)
    distance = k3(again, sampled.mu, sampled.batch.response_mask)
    assert distance is not None
    assert distance < 1e-3
    assert (again[~sampled.batch.response_mask] == 0).all()


def test_fp8_rounding_by_hand_and_only_of_linear_layers(trainer: HFTrainer) -> None:
    # with amax 448 the scale is 1: e4m3 keeps 3 bits of mantissa, so 17 lies between 16 and 18
    assert round_to_fp8(torch.tensor([[448.0, 17.0, -1.0625, 0.0]])).tolist() == [[448.0, 16.0, -1.0, 0.0]]
    row = torch.randn(3, 32)
    assert torch.allclose(round_to_fp8(row), row, rtol=0.07, atol=1e-2)
    assert torch.equal(round_to_fp8(round_to_fp8(row)), round_to_fp8(row))
    before = dict(trainer.weights())
    after = dict(at_precision(before.items(), "fp8_weights"))
    changed = {n.rsplit(".", 2)[1] for n in before if not torch.equal(before[n], after[n])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(before.items(), at_precision(before.items(), "native"), strict=True)
    )


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2", "gpt_oss", "granitemoe", "deepseek_v3", "olmoe"])
def test_every_family_has_its_experts_rounded_and_its_router_left_alone(family: str) -> None:
    given = dict(hf_names(build_family(FAMILIES[family])))
    after = dict(at_precision(given.items(), "fp8_weights"))
    changed = {n for n in given if not torch.equal(given[n], after[n])}
    experts = {n for n in given if ("experts" in n or "_linear.weight" in n) and given[n].ndim >= 2 and "bias" not in n}
    assert experts
    assert experts <= changed
    kept = {n for n in given if any(part in n for part in ("gate.weight", "router", "norm", "embed", "lm_head"))}
    assert not {n for n in kept & changed if "_linear" not in n}


def test_a_rounding_that_finds_no_expert_is_refused() -> None:
    with pytest.raises(EngineError, match="no expert weight was found"):
        list(at_precision([("model.layers.0.mlp.up_proj.weight", torch.ones(2, 2))], "fp8_weights"))


def test_the_noise_floor_of_a_noisy_rollout_is_its_noise(
    checkpoint: Path, tokenizer: Any, task: Any, trainer: HFTrainer
) -> None:
    engine = rollout(
        checkpoint, tokenizer, "rollout.dtype=float32", "rollout.precision=native", "rollout.router_noise=0.3"
    )
    drawn = sample(engine, tokenizer, task)
    mask = drawn.batch.response_mask
    floor = k3(engine.rescore(drawn.batch, JobConfig().rollout.sampling), drawn.mu, mask)
    mismatch = k3(trainer.logprobs(drawn.batch, temperature=1.0).logprobs, drawn.mu, mask)
    assert floor is not None
    assert floor != mismatch
    assert floor > 1e-3


def test_weights_go_in_whole_or_not_at_all_by_name(trainer: HFTrainer) -> None:
    given = dict(hf_names(trainer.model))
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    less = {n: w for n, w in given.items() if n != name}
    with pytest.raises(EngineError, match=r"missing \[.model\.layers\.2\.mlp\.experts\.7\.up_proj"):
        load_hf_weights(trainer.model, less.items())
    with pytest.raises(EngineError, match="extra"):
        load_hf_weights(trainer.model, [*given.items(), ("extra", torch.zeros(1))])


def test_micro_batches_respect_the_shares_of_the_updates() -> None:
    batch = TokenBatch.pack([[1]] * 10, [[2]] * 10, [str(i) for i in range(10)], range(10), 0, shares=2)
    assert [r.tolist() for r in batch.micro_batches(3)] == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]
    assert [r.tolist() for r in batch.select(torch.arange(5)).micro_batches(3)] == [[0, 1, 2], [3, 4]]


def test_auto_falls_back_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = JobConfig.from_flat(engine="auto")
    said: list[str] = []
    real = resolve_engines(config, said.append)
    assert (real.rollout.engine, real.trainer.engine, said) == ("vllm", "megatron", [])
    monkeypatch.setattr("rar_lib.engines.session.available", lambda engine: engine == "hf")
    embedded = resolve_engines(config, said.append)
    assert (embedded.rollout.engine, embedded.trainer.engine) == ("hf", "hf")
    assert said == ["engine auto: vllm and megatron not installed, falling back to hf"]
    strict = JobConfig.from_flat(engine="real")
    assert resolve_engines(strict, said.append) is strict


def test_fused_kernels_sample_what_eager_ones_do_and_read_a_prompt_once(
    checkpoint: Path, tokenizer: Any, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = ("rollout.dtype=float32", "rollout.precision=native")
    eager = sample(rollout(checkpoint, tokenizer, *exact), tokenizer, task)
    engine = rollout(checkpoint, tokenizer, *exact, "rollout.kernels=fused")
    assert engine.model.config._attn_implementation == "sdpa"
    assert engine.model.config._experts_implementation == "grouped_mm"
    read: list[int] = []
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    fused = sample(engine, tokenizer, task)
    groups = {tuple(row[:n].tolist()) for row, n in zip(fused.batch.tokens, fused.batch.prompt_lengths, strict=True)}
    assert len(groups) < len(fused.batch)
    decoded = sum(n for n in read) - sum(map(len, groups))  # beside every prompt once: one token a forward and answer
    assert decoded <= len(fused.batch) * (JobConfig().rollout.sampling.max_new_tokens - 1)
    assert fused.result.responses == eager.result.responses
    assert (fused.mu - eager.mu).abs().max() < 1e-4
    assert agreement(fused.result.trace, eager.result.trace).scalars()["router_flip"] == 0.0


@pytest.mark.parametrize("scores", [False, True])
def test_a_fused_rollout_records_what_a_forward_over_its_answers_uses(
    scores: bool, checkpoint: Path, tokenizer: Any, task: Any
) -> None:
    options = hf_config("rollout.dtype=float32", "rollout.precision=native", "rollout.kernels=fused")
    config = hf_config("trainer.kernels=fused")
    trainer = HFTrainer(checkpoint, config.trainer, config.algorithm)
    engine = HFRollout(checkpoint, options.rollout, SPECIAL, scores=scores)
    engine.load_weights(trainer.weights(), 0)
    drawn = sample(engine, tokenizer, task)
    again = trainer.logprobs(drawn.batch, temperature=1.0, capture="scores")
    assert again.trace is not None
    assert agreement(drawn.result.trace, again.trace).scalars()["router_flip"] == 0.0
    assert (again.logprobs - drawn.mu).abs().max() < 1e-4
    assert (drawn.result.trace.scores is not None) == scores
    if drawn.result.trace.scores is not None and again.trace.scores is not None:
        known = drawn.result.trace.recorded
        assert abs(drawn.result.trace.scores[known] - again.trace.scores[known]).max() < 1e-4


def test_kernels_that_a_model_does_not_have_are_refused_by_name(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3MoeForCausalLM

    monkeypatch.setattr(Qwen3MoeForCausalLM, "_supports_sdpa", False)
    with pytest.raises(EngineError, match=r"kernels 'fused' \(sdpa, grouped_mm\)"):
        HFRollout(checkpoint, hf_config("rollout.kernels=fused").rollout, SPECIAL)
