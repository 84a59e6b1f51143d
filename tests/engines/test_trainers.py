"""What replay must and must not change in a trainer, on hf and Megatron: no-ops, gradients, ratios, live routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from rar_lib.config import AlgorithmConfig, JobConfig, TrainerConfig
from rar_lib.engines.base import Replay, TokenBatch
from rar_lib.engines.hf_rollout import HFRollout
from rar_lib.engines.trainers import TRAINERS, build_trainer
from rar_lib.errors import EngineError
from rar_lib.metrics.agreement import agreement
from rar_lib.metrics.mismatch import k3
from rar_lib.replay.control import wrong_routes
from rar_lib.rl.objectives import grpo_loss
from tests.conftest import SPECIAL, Sampled, hf_config, sample


def build(engine: str, checkpoint: Path, *overrides: str) -> Any:
    config = JobConfig.build({}, ["trainer.micro_batch_size=32", "algorithm.lr=1e-3", *overrides])
    return TRAINERS[engine](checkpoint, config.trainer, config.algorithm)


@pytest.fixture(scope="module", params=list(TRAINERS))
def trainer(request: Any, checkpoint: Path) -> Any:
    return build(request.param, checkpoint)


def everything(trace: Any) -> Replay:
    return Replay.full(trace)


def objective(batch: TokenBatch, old: torch.Tensor) -> Any:
    advantages = torch.linspace(-1, 1, len(batch))
    return lambda logp, rows, scores=None: grpo_loss(
        logp, old[rows], advantages[rows], batch.response_mask[rows], 0.2, 0.2
    )


def gradients(trainer: Any) -> torch.Tensor:
    """All gradients of the last backward pass in one vector."""
    if trainer.name == "megatron":
        return torch.cat([p.main_grad.reshape(-1) for p in trainer.model.parameters()]).clone()
    return torch.cat([p.grad.reshape(-1) for p in trainer.model.parameters()]).clone()


def test_every_trainer_that_a_config_can_name_is_registered() -> None:
    names = get_args(TrainerConfig.model_fields["engine"].annotation)
    assert set(TRAINERS) | {"auto"} == set(names)
    with pytest.raises(EngineError, match=f"trainer.engine: expected one of {', '.join(TRAINERS)}, found 'auto'"):
        build_trainer(Path(), TrainerConfig(engine="auto"), AlgorithmConfig())


# ------------------------------------------------------------------ 1: the zero-mismatch setting


def test_zero_mismatch_none_r2_and_r3_are_bit_equal(checkpoint: Path, tokenizer: Any, task: Any) -> None:
    config = hf_config("rollout.zero_mismatch=true", "rollout.dtype=float32", "rollout.precision=native")
    trainer = build("hf", checkpoint)
    rollout = HFRollout(checkpoint, config.rollout, SPECIAL, trainer)
    rollout.load_weights(trainer.weights(), 0)
    drawn = sample(rollout, tokenizer, task)
    native = trainer.logprobs(drawn.batch, temperature=1.0, capture=True)
    assert torch.equal(native.logprobs, drawn.mu)
    assert native.trace is not None
    assert agreement(drawn.result.trace, native.trace).scalars()["router_flip"] == 0
    seen = []
    for replay in (None, everything(native.trace), everything(drawn.result.trace)):
        fresh = build("hf", checkpoint)
        old = fresh.logprobs(drawn.batch, temperature=1.0, replay=replay)
        update = fresh.update(drawn.batch, objective(drawn.batch, old.logprobs), temperature=1.0, replay=replay)
        seen.append((old.logprobs, update.logprobs, gradients(fresh), update.loss))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0][:3], other[:3], strict=True))
        assert other[3] == seen[0][3]


# ------------------------------------------------------------------ 2, 3, 9, 10


def test_own_replay_is_a_bit_exact_no_op(trainer: Any, sampled: Sampled) -> None:
    native = trainer.logprobs(sampled.batch, temperature=1.0, capture=True)
    again = trainer.logprobs(sampled.batch, temperature=1.0, replay=everything(native.trace), capture=True)
    assert torch.equal(native.logprobs, again.logprobs)
    assert again.trace.equals(native.trace)
    assert again.counts.forced_units == int(native.trace.recorded.sum())
    assert again.counts.changed_cells == 0


def test_own_replay_leaves_gradients_bit_equal(trainer: Any, checkpoint: Path, sampled: Sampled) -> None:
    vectors = []
    for replayed in (False, True):
        fresh = build(trainer.name, checkpoint)
        native = fresh.logprobs(sampled.batch, temperature=1.0, capture=True)
        replay = everything(native.trace) if replayed else None
        fresh.update(sampled.batch, objective(sampled.batch, native.logprobs), temperature=1.0, replay=replay)
        vectors.append(gradients(fresh))
    assert torch.equal(*vectors)


def test_foreign_routes_are_executed_and_lower_k3(trainer: Any, sampled: Sampled) -> None:
    native = trainer.logprobs(sampled.batch, temperature=1.0, capture=True)
    forced = trainer.logprobs(sampled.batch, temperature=1.0, replay=everything(sampled.result.trace), capture=True)
    assert agreement(sampled.result.trace, native.trace).scalars()["router_flip"] > 0
    assert agreement(sampled.result.trace, forced.trace).scalars()["router_flip"] == 0
    mask = sampled.batch.response_mask
    assert k3(forced.logprobs, sampled.mu, mask) < k3(native.logprobs, sampled.mu, mask)


def test_router_weights_get_gradient_on_drifted_ids(trainer: Any, checkpoint: Path, sampled: Sampled) -> None:
    fresh = build(trainer.name, checkpoint)
    wrong = everything(wrong_routes(sampled.result.trace))
    old = fresh.logprobs(sampled.batch, temperature=1.0, replay=wrong)
    fresh.update(sampled.batch, objective(sampled.batch, old.logprobs), temperature=1.0, replay=wrong)
    layers = fresh.model.model.layers if fresh.name == "hf" else fresh.model.decoder.layers
    for number, layer in enumerate(layers):
        weight = layer.mlp.gate.weight if fresh.name == "hf" else layer.mlp.router.weight
        gradient = weight.grad if fresh.name == "hf" else weight.main_grad
        used = np.unique(wrong.trace.experts[wrong.trace.recorded.any(-1)][:, number]).astype(np.int64)
        assert (gradient[used].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("routes", ["none", "own", "rollout"])
def test_with_one_plan_in_both_passes_the_first_ratio_is_exactly_one(
    trainer: Any, checkpoint: Path, sampled: Sampled, routes: str
) -> None:
    fresh = build(trainer.name, checkpoint)
    native = fresh.logprobs(sampled.batch, temperature=1.0, capture=True)
    replay = {"none": None, "own": everything(native.trace), "rollout": everything(sampled.result.trace)}[routes]
    old = fresh.logprobs(sampled.batch, temperature=1.0, replay=replay)
    update = fresh.update(sampled.batch, objective(sampled.batch, old.logprobs), temperature=1.0, replay=replay)
    assert torch.equal(update.logprobs, old.logprobs)


def test_a_plan_in_one_pass_only_shows_in_the_first_ratio(trainer: Any, checkpoint: Path, sampled: Sampled) -> None:
    fresh = build(trainer.name, checkpoint)
    old = fresh.logprobs(sampled.batch, temperature=1.0, replay=everything(sampled.result.trace))
    update = fresh.update(sampled.batch, objective(sampled.batch, old.logprobs), temperature=1.0)
    assert not torch.equal(update.logprobs, old.logprobs)


def test_wrong_ids_move_the_output(trainer: Any, sampled: Sampled) -> None:
    native = trainer.logprobs(sampled.batch, temperature=1.0)
    moved = trainer.logprobs(sampled.batch, temperature=1.0, replay=everything(wrong_routes(sampled.result.trace)))
    assert (moved.logprobs - native.logprobs).abs().max() > 0.1


# ------------------------------------------------------------------ what else a trainer promises


def test_recompute_changes_no_gradient(trainer: Any, checkpoint: Path, sampled: Sampled) -> None:
    vectors, forwards = [], []
    for recompute in ("false", "true"):
        fresh = build(trainer.name, checkpoint, f"trainer.recompute={recompute}")
        router = (
            fresh.model.model.layers[1].mlp.gate if fresh.name == "hf" else fresh.model.decoder.layers[1].mlp.router
        )
        forwards.append(0)
        router.register_forward_hook(lambda *_: forwards.__setitem__(-1, forwards[-1] + 1))
        replay = everything(sampled.result.trace)
        old = fresh.logprobs(sampled.batch, temperature=1.0, replay=replay)
        update = fresh.update(sampled.batch, objective(sampled.batch, old.logprobs), temperature=1.0, replay=replay)
        assert update.counts.forced_units == old.counts.forced_units
        vectors.append(gradients(fresh))
    assert torch.equal(*vectors)
    assert forwards == [8, 12]  # 4 micro-batches scored and 4 updated; with recompute each of the latter twice


def test_the_micro_batch_split_changes_only_float_summation(trainer: Any, sampled: Sampled) -> None:
    whole = trainer.logprobs(sampled.batch, temperature=1.0, replay=everything(sampled.result.trace))
    parts = trainer.logprobs(
        sampled.batch, temperature=1.0, replay=everything(sampled.result.trace), micro_batch_size=7
    )
    assert torch.allclose(whole.logprobs, parts.logprobs, atol=1e-4)
    assert parts.counts.changed_cells == whole.counts.changed_cells


def test_save_and_load_continue_exactly(trainer: Any, checkpoint: Path, sampled: Sampled, tmp_path: Path) -> None:
    batch = sampled.batch
    one = build(trainer.name, checkpoint)
    old = one.logprobs(batch, temperature=1.0)
    one.update(batch, objective(batch, old.logprobs), temperature=1.0)
    one.save(tmp_path)
    two = build(trainer.name, checkpoint)
    two.load(tmp_path)
    for _ in range(2):
        a = one.update(batch, objective(batch, old.logprobs), temperature=1.0)
        b = two.update(batch, objective(batch, old.logprobs), temperature=1.0)
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(one.weights(), two.weights(), strict=True))


def test_a_trainer_goes_back_to_a_state_before_its_first_step(
    trainer: Any, checkpoint: Path, sampled: Sampled, tmp_path: Path
) -> None:
    batch, fresh = sampled.batch, build(trainer.name, checkpoint)
    fresh.save(tmp_path)
    old = fresh.logprobs(batch, temperature=1.0)
    norms = []
    for _ in range(2):
        norms.append([fresh.update(batch, objective(batch, old.logprobs), temperature=1.0).grad_norm for _ in range(3)])
        fresh.load(tmp_path)
    assert norms[0] == norms[1]


def test_the_two_trainers_take_the_same_step(checkpoint: Path, sampled: Sampled) -> None:
    batch, results = sampled.batch, []
    for engine in ("hf", "megatron"):
        fresh = build(engine, checkpoint)
        old = fresh.logprobs(batch, temperature=1.0)
        update = fresh.update(batch, objective(batch, old.logprobs), temperature=1.0)
        results.append((update.loss, update.grad_norm, dict(fresh.weights())))
    (loss_a, norm_a, a), (loss_b, norm_b, b) = results
    assert loss_a == pytest.approx(loss_b, rel=1e-4)
    assert norm_a == pytest.approx(norm_b, rel=1e-4)
    assert max(float((a[n] - b[n]).abs().max()) for n in a) < 3e-4  # Adam's first step is lr * sign(gradient)


def test_bf16_trainers_run(trainer: Any, checkpoint: Path, sampled: Sampled) -> None:
    low = build(trainer.name, checkpoint, "trainer.dtype=bfloat16")
    old = low.logprobs(sampled.batch, temperature=1.0)
    update = low.update(sampled.batch, objective(sampled.batch, old.logprobs), temperature=1.0)
    assert torch.equal(update.logprobs, old.logprobs)
    exact = trainer.logprobs(sampled.batch, temperature=1.0)
    assert 0 < k3(old.logprobs, exact.logprobs, sampled.batch.response_mask) < 0.1


def test_a_backward_outside_of_megatrons_schedules_does_no_harm(checkpoint: Path, sampled: Sampled) -> None:
    """It leaves the process-wide scale of auxiliary losses as a scalar, which the schedules cannot write their one element into."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    trainer = build("megatron", checkpoint)
    before = trainer.logprobs(sampled.batch, temperature=1.0).logprobs
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    assert torch.equal(trainer.logprobs(sampled.batch, temperature=1.0).logprobs, before)
