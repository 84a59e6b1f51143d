"""Partial plans on hf and Megatron: nothing is none, all is R3, and what lies between is executed as resolved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.config import JobConfig
from rar_lib.engines.base import Replay
from rar_lib.engines.trainers import TRAINERS
from rar_lib.errors import ReplayError
from rar_lib.metrics.mismatch import k3
from rar_lib.replay import replaying
from rar_lib.replay.plan import full_plan
from rar_lib.replay.policies import make_plan
from rar_lib.replay.policy import Candidates
from rar_lib.rl.objectives import grpo_loss
from tests.conftest import Sampled
from tests.replay.families import FAMILIES
from tests.replay.families import build as build_family

UNITS = ("token_layer", "slot")


def build(engine: str, checkpoint: Path, recompute: bool = False) -> Any:
    config = JobConfig.build({}, ["trainer.micro_batch_size=32", f"trainer.recompute={str(recompute).lower()}"])
    return TRAINERS[engine](checkpoint, config.trainer, config.algorithm)


def gradients(trainer: Any) -> torch.Tensor:
    name = "main_grad" if trainer.name == "megatron" else "grad"
    return torch.cat([getattr(p, name).reshape(-1) for p in trainer.model.parameters()]).clone()


def both_passes(trainer: Any, sampled: Sampled, replay: Replay | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Old log-probs and gradient of an update that replays the same plan."""
    batch = sampled.batch
    old = trainer.logprobs(batch, temperature=1.0, replay=replay).logprobs
    advantages, mask = torch.linspace(-1, 1, len(batch)), batch.response_mask

    def objective(logp: torch.Tensor, rows: torch.Tensor, scores: Any = None) -> Any:
        return grpo_loss(logp, old[rows], advantages[rows], mask[rows], 0.2, 0.2)

    update = trainer.update(batch, objective, temperature=1.0, replay=replay)
    assert torch.equal(update.logprobs, old)
    return old, gradients(trainer)


def planned(sampled: Sampled, policy: str, unit: Any, share: str, native: Any = None) -> Replay:
    trace = sampled.result.trace
    return Replay(trace, make_plan(policy, Candidates(trace, sampled.batch.uids, 0, 0, native), unit, share))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("engine", list(TRAINERS))
def test_no_budget_is_none_and_the_whole_budget_is_r3(
    engine: str, unit: str, recompute: bool, checkpoint: Path, sampled: Sampled
) -> None:
    pairs = (
        (None, planned(sampled, "random_route", unit, "0")),
        (Replay.full(sampled.result.trace), planned(sampled, "random_route", unit, "1")),
    )
    for reference, partial in pairs:
        a = both_passes(build(engine, checkpoint, recompute), sampled, reference)
        b = both_passes(build(engine, checkpoint, recompute), sampled, partial)
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("engine", list(TRAINERS))
def test_no_bonus_is_none_and_an_infinite_one_is_r3(
    engine: str, recompute: bool, checkpoint: Path, sampled: Sampled
) -> None:
    trace = sampled.result.trace
    cells = (trace.header.num_layers, trace.header.num_experts)
    for reference, size in ((None, 0.0), (Replay.full(trace), np.inf)):
        plan = replace(full_plan(trace), unit="bias", bias=np.full(cells, size, np.float32))
        a = both_passes(build(engine, checkpoint, recompute), sampled, reference)
        b = both_passes(build(engine, checkpoint, recompute), sampled, Replay(trace, plan))
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("engine", list(TRAINERS))
def test_measuring_changes_no_bit_and_counts_what_happened(
    engine: str, recompute: bool, checkpoint: Path, sampled: Sampled
) -> None:
    """Router gradients of forced and free slots add up to those of a pass that forces nothing by name."""
    batch, mask = sampled.batch, sampled.batch.response_mask
    advantages, results = torch.linspace(-1, 1, len(batch)), []
    replay = planned(sampled, "uniform", "slot", "1/4")
    for measure in (False, True):
        trainer = build(engine, checkpoint, recompute)
        old = trainer.logprobs(batch, temperature=1.0, replay=replay, measure=measure)
        objective = lambda logp, rows, scores=None, old=old: grpo_loss(  # noqa: E731
            logp, old.logprobs[rows], advantages[rows], mask[rows], 0.2, 0.2
        )
        update = trainer.update(batch, objective, temperature=1.0, replay=replay, measure=measure)
        results.append((old.logprobs, gradients(trainer), update))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    counts, bare = results[1][2].counts, results[0][2].counts
    assert (bare.cells, bare.forced_slots) == (0, 0)
    assert bare.executed_equals_resolved == counts.executed_equals_resolved == 1
    assert counts.compared == bare.compared == (2 if recompute else 1) * 4 * batch.tokens.numel()
    cells = int(replay.trace.recorded.sum())
    assert counts.cells == cells
    assert counts.forced_slots + counts.free_slots == 2 * cells
    assert counts.forced_slots >= replay.plan.budget
    assert counts.kept / (2 * cells) > 0.9
    assert counts.regret is not None
    assert counts.regret >= 0
    assert counts.router_gradient("forced") is not None
    assert counts.router_gradient("free") is not None


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("engine", list(TRAINERS))
def test_planned_experts_are_executed_and_unplanned_cells_are_native_local(
    engine: str, unit: str, checkpoint: Path, sampled: Sampled
) -> None:
    trainer = build(engine, checkpoint)
    replay = planned(sampled, "uniform", unit, "1/4")
    scored = trainer.logprobs(sampled.batch, temperature=1.0, replay=replay, capture=True)
    assert scored.counts.forced_units == replay.plan.budget
    executed, record = scored.trace.experts.astype(int), replay.trace.experts.astype(int)
    there = (record[..., :, None] == executed[..., None, :]).any(-1)
    keep = replay.plan.planned if unit == "slot" else np.repeat(replay.plan.planned[..., None], 2, -1)
    assert there[keep].all()
    # layer 0 sees the native hidden states, so what is not planned there is the router's own choice
    native = trainer.logprobs(sampled.batch, temperature=1.0, capture=True).trace.experts[:, 0]
    free = replay.trace.recorded[:, 0] & ~keep[:, 0].any(-1)
    assert (np.sort(scored.trace.experts[free, 0], -1) == np.sort(native[free], -1)).all()


@pytest.mark.parametrize("engine", list(TRAINERS))
def test_disagree_reaches_most_of_r3_with_a_small_budget(engine: str, checkpoint: Path, sampled: Sampled) -> None:
    """The oracle of the old pass: replaying the few routes that differ is worth most of replaying all of them."""
    trainer, mask = build(engine, checkpoint), sampled.batch.response_mask
    native = trainer.logprobs(sampled.batch, temperature=1.0, capture="margins")
    assert native.trace.margins is not None
    assert (native.trace.margins >= 0).all()

    def distance(replay: Replay | None) -> float:
        value = k3(trainer.logprobs(sampled.batch, temperature=1.0, replay=replay).logprobs, sampled.mu, mask)
        assert value is not None
        return value

    none, r3 = distance(None), distance(Replay.full(sampled.result.trace))
    oracle = distance(planned(sampled, "disagree", "token_layer", "0.1", native.trace))
    assert r3 < none
    assert (none - oracle) / (none - r3) > 0.8


def test_single_slots_of_a_group_limited_router_are_refused() -> None:
    from rar_lib.replay import recording

    model = build_family(FAMILIES["deepseek_v3"])
    tokens = torch.randint(3, 60, (2, 5))
    with torch.no_grad(), recording(model) as seen:
        model(input_ids=tokens, use_cache=False)
    trace = seen.trace()
    with (
        pytest.raises(ReplayError, match=r"layers \[1, 2\] choose within groups of experts"),
        replaying(model, trace, full_plan(trace, "slot")),
    ):
        pass
    with replaying(model, trace, full_plan(trace)), torch.no_grad():
        model(input_ids=tokens, use_cache=False)
