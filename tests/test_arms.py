"""score_arms: the same tokens from the same weights, one row a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.arms import Arm, score_arms
from rar_lib.config import JobConfig
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.megatron_trainer import MegatronTrainer
from rar_lib.errors import ConfigError, ReplayError
from rar_lib.metrics.agreement import agreement
from rar_lib.metrics.mismatch import k3
from rar_lib.replay.flip_model import FlipModel
from rar_lib.rl.objectives import grpo_loss
from tests.conftest import Sampled

ARMS = [Arm(p, u, b) for p, u in (("random_route", "slot"), ("uniform", "token_layer"), ("disagree", "token_layer"),
                                  ("margin", "slot"), ("fisher", "slot"), ("permuted_fisher", "token_layer"),
                                  ("swap", "token_layer"), ("bias", "bias")) for b in ("0", "0.25", "1")]  # fmt: skip


@pytest.fixture(scope="module", params=["hf", "megatron"])
def trainer(request: Any, checkpoint: Path) -> Any:
    config = JobConfig.build({}, ["trainer.micro_batch_size=32", "algorithm.lr=1e-3"])
    made = {"hf": HFTrainer, "megatron": MegatronTrainer}[request.param]
    return made(checkpoint, config.trainer, config.algorithm)


def objectives(sampled: Sampled) -> Any:
    batch, advantages = sampled.batch, torch.linspace(-1, 1, len(sampled.batch))

    def make(old: torch.Tensor, share: torch.Tensor) -> Any:
        mask = batch.response_mask[share]
        return lambda logp, rows, scores=None: grpo_loss(
            logp, old[share][rows], advantages[share][rows], mask[rows], 0.2, 0.2
        )

    return make


def flips(trainer: Any, sampled: Sampled) -> FlipModel:
    """P(flip) of this very batch; a run takes that of earlier ones."""
    native = trainer.logprobs(sampled.batch, temperature=1.0, capture="margins").trace
    compared = agreement(sampled.result.trace, native)
    return FlipModel.empty().seen(native.margins, compared.flipped, compared.known)


def test_budgets_of_nothing_and_all_are_none_and_r3_in_both_passes(trainer: Any, sampled: Sampled) -> None:
    before = dict(trainer.weights())
    batch = replace(sampled.batch, shares=2)
    learned = flips(trainer, sampled)
    scores = score_arms(trainer, batch, sampled.result, ARMS, objectives=objectives(sampled), flips=learned)
    assert all(torch.equal(before[n], w) for n, w in trainer.weights())
    table = scores.table.set_index(["arm", "pass"])
    for arm in ARMS:
        for when in ("old", "new"):
            row = table.loc[(arm.name, when)]
            if (arm.policy, arm.budget) == (
                "bias",
                "1",
            ):  # λ was found at the planning pass's scores: nearly R3, not R3
                assert when == "new" or row["efficiency"] > 0.9
            elif arm.budget != "0.25":
                same = table.loc[("none" if arm.budget == "0" else "full", when)]
                assert (row["k3"], row["efficiency"]) == (same["k3"], same["efficiency"]), (arm, when)
    assert table.loc[("none", "old"), "efficiency"] == 0
    assert table.loc[("full", "old"), "efficiency"] == 1
    assert table.loc[("disagree 0.25 token_layer", "old"), "efficiency"] > 0.9
    quarter = scores.table[(scores.table["budget"] == "0.25") & (scores.table["unit"] == "token_layer")]
    assert quarter["planned"].nunique() == 1
    assert (table["executed_equals_resolved"].dropna() == 1).all()
    assert table.loc[("none", "old"), "target_shift"] == 0
    assert (table["binding"] <= table["nominal"] + 1e-12).all()
    full = table.loc[("full", "old")]
    assert full["fidelity"] == 1
    assert full["binding"] == pytest.approx(table.loc[("disagree 0.25 token_layer", "old"), "binding"])
    quarter_of_lambda = table.loc[("bias 0.25 bias", "old"), "binding"] / full["binding"]
    assert 0.24 < quarter_of_lambda < 0.35  # samples of one prompt have equal gaps: λ takes them all or none
    new = table.xs("new", level="pass")
    assert new.loc["uniform 0.25 token_layer", ["drift_planned", "drift_unplanned"]].astype(float).between(0, 1).all()
    assert new.loc["full", "router_gradient_forced"] > 0
    assert new.loc["full", "router_gradient_free"] is None or np.isnan(new.loc["full", "router_gradient_free"])
    assert new.loc["uniform 0.25 token_layer", "router_gradient_free"] > 0


def test_rows_are_what_the_trainer_says_and_prompts_add_up(trainer: Any, sampled: Sampled) -> None:
    scores = score_arms(trainer, sampled.batch, sampled.result, [])
    assert scores.table["arm"].tolist() == ["none", "full"]
    native = trainer.logprobs(sampled.batch, temperature=1.0)
    assert scores.table["k3"].iloc[0] == k3(native.logprobs, sampled.mu, sampled.batch.response_mask)
    for arm, part in scores.by_prompt.groupby("arm"):
        k3_of_arm = float(scores.table.set_index("arm").loc[str(arm), "k3"])  # type: ignore[arg-type]
        assert len(part) == 32
        assert part["k3_sum"].sum() / part["tokens"].sum() == pytest.approx(k3_of_arm)


def test_the_trainer_is_put_back_also_after_an_error(trainer: Any, sampled: Sampled) -> None:
    before, calls = {n: w.clone() for n, w in trainer.weights()}, 0

    def failing(old: torch.Tensor, share: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return objectives(sampled)(old, share)

    with pytest.raises(KeyboardInterrupt):
        score_arms(trainer, replace(sampled.batch, shares=2), sampled.result, [], objectives=failing)
    assert all(torch.equal(before[n], w) for n, w in trainer.weights())


def test_the_engines_agree_on_router_gradients(checkpoint: Path, sampled: Sampled) -> None:
    """Means of squares of d(loss)/d(logit), whatever the engine divides by and when."""
    rows = []
    for made in (HFTrainer, MegatronTrainer):
        config = JobConfig.build({}, ["trainer.micro_batch_size=32"])
        trainer = made(checkpoint, config.trainer, config.algorithm)
        scores = score_arms(trainer, replace(sampled.batch, shares=2), sampled.result, [Arm("uniform", "slot", "0.25")],
                            objectives=objectives(sampled))  # fmt: skip
        rows.append(scores.table.set_index(["arm", "pass"]).loc[("uniform 0.25 slot", "new")])
    for name in ("router_gradient_forced", "router_gradient_free", "regret"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=0.02), name


def test_arms_that_do_not_go_together_are_refused(trainer: Any, sampled: Sampled) -> None:
    with pytest.raises(ConfigError, match="needs a share"):
        score_arms(trainer, sampled.batch, sampled.result, [Arm("uniform")])
    with pytest.raises(ReplayError, match="policy swap needs `flips`"):
        score_arms(trainer, sampled.batch, sampled.result, [Arm("swap", "slot", "0.1")])
