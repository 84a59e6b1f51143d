"""Stages, the frontier and the study of scores on the hf engines, small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import rar_lib.frontier as module
from rar_lib.config import JobConfig
from rar_lib.engines.session import EngineSession
from rar_lib.errors import ConfigError, ReplayError
from rar_lib.frontier import Frontier, FrontierConfig, answer_table, contrast_table, run_frontier
from rar_lib.score_study import score_table, study_scores
from rar_lib.stages import stages

JOB = JobConfig.from_flat(
    policy="none", engine="hf", steps=2, checkpoint_every=1, prompts_per_step=16, group_size=4, eval_prompts=0,
    micro_batch_size=32, updates_per_batch=2,
)  # fmt: skip
CONFIG = FrontierConfig(
    job=JOB, policies=("random_route", "margin", "disagree", "fisher", "swap", "threshold", "bias"),
    budgets=("1/10", "0.5"), units=("token_layer", "slot"), control_seeds=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def frontier(runs: Path) -> Frontier:
    return run_frontier(CONFIG, runs_dir=runs, show="none")


def test_every_plan_that_exists_is_an_arm_and_controls_are_drawn_twice() -> None:
    names = [arm.name for arm in CONFIG.arms()]
    assert len(names) == len(set(names))
    assert names[0] == "full slot"
    assert [n for n in names if n.startswith("random_route 1/10")] == [
        "random_route 1/10 token_layer", "random_route 1/10 token_layer seed 1",
        "random_route 1/10 slot", "random_route 1/10 slot seed 1",
    ]  # fmt: skip
    later = [arm.name for arm in CONFIG.arms(batch=3)]
    assert "random_route 1/10 slot seed 6" in later  # another batch, other draws
    assert "margin 1/10 slot" in later
    assert [n for n in names if n.startswith(("threshold", "bias"))] == [
        "threshold slot ratio 0.95", "threshold slot ratio 0.8", "threshold slot ratio 0.5", "bias 1/10 bias", "bias 0.5 bias",
    ]  # fmt: skip


def test_each_stage_scored_every_arm_on_its_own_prompts(frontier: Frontier) -> None:
    assert frontier.facts["stages"] == ["step 0", "step 1", "step 2"]
    assert (frontier.facts["rollout_engine"], frontier.facts["trainer_engine"]) == ("hf", "hf")
    counts = frontier.table.groupby(["checkpoint", "pass"]).size()
    assert (counts == len(CONFIG.arms()) + 2).all()
    prompts = frontier.by_prompt.groupby("checkpoint")["prompt"].unique()
    assert all(len(names) == 16 for names in prompts)
    assert len(set().union(*prompts)) == 48
    assert (frontier.table["executed_equals_resolved"].dropna() == 1).all()


@pytest.mark.parametrize("unit", ["token_layer", "slot"])
@pytest.mark.parametrize("when", ["old", "new"])
def test_the_ends_are_0_and_1_and_budgets_are_matched(frontier: Frontier, unit: str, when: str) -> None:
    table, _ = frontier.of(unit, when)
    rows = table.set_index("arm")
    assert rows.loc["none", "efficiency"] == 0
    assert rows.loc["full", "efficiency"] == 1
    for budget in (0.1, 0.5):
        shares = table[(table["budget"] == budget) & (table["policy"] != "bias")]["nominal"]
        assert shares.tolist() == pytest.approx([budget] * len(shares), abs=2e-3)
    labels = [name for name in rows.index if " " in name]
    assert len(labels) == (12 if unit == "token_layer" else 13)  # with two of bias, or three of threshold
    assert (table["binding"] <= table["nominal"] + 1e-9).all()
    oracle = rows.loc["disagree 0.5", "binding"]
    assert rows.loc["full", "binding"] == pytest.approx(oracle)  # counted in the unit of the view
    assert rows.loc["margin 0.5", "binding"] <= oracle + 1e-9


def test_contrasts_are_differences_of_the_table(frontier: Frontier) -> None:
    table, _ = frontier.of("token_layer", "old")
    value = table.set_index("arm")["efficiency"]
    rows = frontier.contrasts("token_layer", "old", "1/2", ("margin", "disagree")).set_index("contrast")
    assert not [name for name in rows.index if "bias" in name]  # its β is another share
    expected = {
        "replay at all: random 0.1 - none": value["random_route 0.1"],
        "budget: slope of random": (value["random_route 0.5"] - value["random_route 0.1"]) / 0.4,
        "choice: margin - random": value["margin 0.5"] - value["random_route 0.5"],
        "left: R3 - swap": 1 - value["swap 0.5"],
        "fisher - margin": value["fisher 0.5"] - value["margin 0.5"],
        "swap - disagree": value["swap 0.5"] - value["disagree 0.5"],
    }
    for name, number in expected.items():
        assert rows.loc[name, "value"] == pytest.approx(number)
    assert (rows["low"] <= rows["high"]).all()
    equal = frontier.at_equal_binding("token_layer", "old", 0.5, ("margin", "disagree"))
    assert equal["contrast"].tolist() == ["fisher - margin", "fisher - disagree", "swap - margin", "swap - disagree"]
    verdicts = frontier.verdict_table("token_layer", "0.5").set_index("policy")
    assert verdicts.loc["random_route", "verdict"] in ("neither", "too weak")  # never above itself
    with pytest.raises(ValueError, match=r"expected random_route at budget 0\.25"):
        frontier.contrasts("token_layer", "old", "0.25", ())
    with pytest.raises(
        ConfigError, match=r"verdicts: expected random_route at budget 0\.25 among the arms, found \['bias"
    ):
        frontier.verdicts("token_layer", "0.25")
    assert 0 <= frontier.without_gain() <= 1
    assert 0 <= frontier.facts["noise_floor"] < 1e-6
    assert set(verdicts.index) == {"random_route", "margin", "disagree", "fisher", "swap"}


def test_a_table_says_on_which_side_of_0_an_interval_lies() -> None:
    rows = pd.DataFrame(
        {"contrast": ["a", "b", "c"], "value": [0.2, -0.2, 0.0], "low": [0.1, -0.3, -0.1], "high": [0.3, -0.1, 0.1]}
    )
    table = contrast_table(rows)
    assert table["interval"].tolist() == ["above 0", "below 0", "contains 0"]
    assert table["difference [95 %]"].iloc[1] == "-0.20 [-0.30, -0.10]"


def test_the_answer_reads_both_tables() -> None:
    nominal = pd.DataFrame(
        {
            "contrast": ["choice: x", "fisher - margin", "swap - margin"],
            "value": 0.0,
            "low": [0, 0.1, -2],
            "high": [1, 0.2, -1],
        }
    )
    binding = pd.DataFrame(
        {"contrast": ["fisher - margin", "swap - margin"], "value": 0.0, "low": [-1, 0.5], "high": [1, 0.6]}
    )
    assert answer_table(nominal, binding).to_numpy().tolist() == [
        ["fisher", "margin", "better", "no difference shown"], ["swap", "margin", "worse", "better"],
    ]  # fmt: skip


def test_what_was_computed_is_loaded(frontier: Frontier, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("computed again")

    monkeypatch.setattr(module, "_compute", never)
    again = run_frontier(CONFIG, runs_dir=runs, show="none")
    pd.testing.assert_frame_equal(again.by_prompt, frontier.by_prompt)
    assert again.facts == frontier.facts
    with pytest.raises(AssertionError, match="computed again"):
        run_frontier(CONFIG.model_copy(update={"rollouts": 2}), runs_dir=runs, show="none")


def test_stages_need_a_job_without_replay(runs: Path) -> None:
    job = JobConfig.build(JOB.resolved() | {"router_replay": {"enabled": True, "mode": "R3"}})
    with EngineSession() as session, pytest.raises(ReplayError, match="expected a job without replay, found R3"):
        next(stages(job, session, runs))


def test_the_study_of_scores_has_every_estimator_at_every_stage(runs: Path) -> None:
    with EngineSession() as session:
        study = study_scores(JOB, session, runs, show="none")
    assert list(study.scores) == ["step 0", "step 1", "step 2"]
    assert len(study.agreement) == 3 * 16
    own = study.agreement[study.agreement["a"] == study.agreement["b"]]["spearman"]
    assert own.to_numpy(float) == pytest.approx(np.ones(12))
    assert (study.stability["null_low"] < study.stability["null_high"]).all()
    assert study.calibration.groupby("stage")["cells"].sum().nunique() >= 1
    assert study.drift["estimator"].tolist() == ["gate", "param", "param_exact", "swap"] * 2
    table = score_table(study)
    assert table["estimator"].tolist() == ["gate", "param", "param_exact", "swap"]
    assert table["with param_exact"].iloc[2] == "1.00 [1.00, 1.00]"
