"""score_arms: the same tokens from the same weights, one row a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rar_lib.arms import Arm, score_arms
from rar_lib.config import JobConfig
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.megatron_trainer import MegatronTrainer
from rar_lib.errors import ConfigError
from rar_lib.metrics.mismatch import k3
from rar_lib.rl.objectives import grpo_loss
from tests.conftest import Sampled

ARMS = [Arm(p, u, b) for p, u in (("random_route", "slot"), ("uniform", "token_layer"), ("disagree", "token_layer"),
                                  ("margin", "slot")) for b in ("0", "0.25", "1")]  # fmt: skip


@pytest.fixture(scope="module", params=["hf", "megatron"])
def trainer(request: Any, checkpoint: Path) -> Any:
    config = JobConfig.build({}, ["trainer.micro_batch_size=32", "algorithm.lr=1e-3"])
    made = {"hf": HFTrainer, "megatron": MegatronTrainer}[request.param]
    return made(checkpoint, config.trainer, config.algorithm)


def objectives(sampled: Sampled) -> Any:
    batch, advantages = sampled.batch, torch.linspace(-1, 1, len(sampled.batch))

    def make(old: torch.Tensor, share: torch.Tensor) -> Any:
        mask = batch.response_mask[share]
        return lambda logp, rows: grpo_loss(logp, old[share][rows], advantages[share][rows], mask[rows], 0.2, 0.2)

    return make


def test_budgets_of_nothing_and_all_are_none_and_r3_in_both_passes(trainer: Any, sampled: Sampled) -> None:
    before = dict(trainer.weights())
    scores = score_arms(trainer, sampled.batch, sampled.result, ARMS, objectives=objectives(sampled))
    assert all(torch.equal(before[n], w) for n, w in trainer.weights())
    table = scores.table.set_index(["arm", "pass"])
    for arm in ARMS:
        for when in ("old", "new"):
            row = table.loc[(arm.name, when)]
            if arm.budget != "0.25":
                same = table.loc[("none" if arm.budget == "0" else "full", when)]
                assert (row["k3"], row["efficiency"]) == (same["k3"], same["efficiency"])
    assert table.loc[("none", "old"), "efficiency"] == 0
    assert table.loc[("full", "old"), "efficiency"] == 1
    assert table.loc[("disagree 0.25 token_layer", "old"), "efficiency"] > 0.9
    quarter = scores.table[(scores.table["budget"] == "0.25") & (scores.table["unit"] == "token_layer")]
    assert quarter["planned"].nunique() == 1


def test_rows_are_what_the_trainer_says_and_prompts_add_up(trainer: Any, sampled: Sampled) -> None:
    scores = score_arms(trainer, sampled.batch, sampled.result, [])
    assert scores.table["arm"].tolist() == ["none", "full"]
    native = trainer.logprobs(sampled.batch, temperature=1.0)
    assert scores.table["k3"].iloc[0] == k3(native.logprobs, sampled.mu, sampled.batch.response_mask)
    for arm, part in scores.by_prompt.groupby("arm"):
        k3_of_arm = float(scores.table.set_index("arm").loc[str(arm), "k3"])  # type: ignore[arg-type]
        assert len(part) == 32
        assert part["k3_sum"].sum() / part["tokens"].sum() == pytest.approx(k3_of_arm)


def test_arms_that_do_not_go_together_are_refused(trainer: Any, sampled: Sampled) -> None:
    with pytest.raises(ConfigError, match="needs a share"):
        score_arms(trainer, sampled.batch, sampled.result, [Arm("uniform")])
    twice = [Arm("margin", "slot", "0.1", seed=s) for s in (0, 1)]
    with pytest.raises(ConfigError, match=r"\['margin 0\.1 slot'\] twice"):
        score_arms(trainer, sampled.batch, sampled.result, twice)
