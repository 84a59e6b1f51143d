"""What the updates learn from: anchors, weights, masks and means put together. By hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.config import AlgorithmConfig
from rar_lib.errors import ConfigError
from rar_lib.rl.learning import Lesson, needs_routers
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader

# two answers of 1 and 3 tokens; T = 4
MASK = torch.tensor([[False, True, False, False], [False, True, True, True]])
MU = torch.where(MASK, -1.0, 0.0)
OLD = torch.where(MASK, -1.0 + torch.tensor([[0, math.log(3), 0, 0], [0, 0, 0, math.log(1.5)]]), 0.0)
A = torch.tensor([1.0, -1.0])
BOTH = torch.arange(2)


def lesson(**settings: Any) -> Lesson:
    return Lesson(AlgorithmConfig(**settings), MU, OLD, A, MASK)


def total(given: Lesson, new: torch.Tensor, share: torch.Tensor = BOTH) -> tuple[float, dict[str, float]]:
    """What a trainer makes of it: the mean over response tokens of the update."""
    terms, sums = given.objective(share)(new[share], torch.arange(len(share)))
    return float(terms.sum() / MASK[share].sum()), sums


def test_the_token_mean_weighs_tokens_alike() -> None:
    loss, sums = total(lesson(), OLD)
    assert loss == pytest.approx((-1 + 3) / 4)
    assert sums == {"clipped": 0.0, "kept": 4.0}


def test_the_sequence_mean_weighs_answers_alike() -> None:
    for objective in ("gspo", "gmpo"):
        assert total(lesson(objective=objective), OLD)[0] == pytest.approx((-1 + 1) / 2, abs=1e-6)


def test_the_anchor_is_a_setting() -> None:
    """Against the rollout the first answer's ratio is 3 already, and clipped at 1.2."""
    loss, sums = total(lesson(anchor="rollout"), OLD)
    assert loss == pytest.approx((-1.2 + 1 + 1 + 1.5) / 4)
    assert sums["clipped"] == 1


def test_weights_multiply_after_the_clip() -> None:
    loss, sums = total(lesson(corrections="tis"), OLD)  # weights 2 | 1, 1, 1.5
    assert loss == pytest.approx((-2 + 1 + 1 + 1.5) / 4)
    assert sums["weight"] == pytest.approx(5.5)
    new = OLD + torch.where(MASK, math.log(1.4), 0.0)
    assert total(lesson(corrections="tis"), new)[0] == pytest.approx((-2 * 1.2 + 1.4 * 3.5) / 4)


def test_icepop_keeps_the_full_normaliser() -> None:
    loss, sums = total(lesson(corrections=[{"name": "icepop", "low": 0.5, "high": 2.0}]), OLD)
    assert loss == pytest.approx((0 + 1 + 1 + 1.5) / 4)
    assert sums["kept"] == 3


def test_geo_rs_averages_over_what_it_keeps() -> None:
    """The first answer (ratio 3) is rejected; the second's mean ratio is 1.5^(1/3) = 1.14."""
    rejected = [{"name": "geo_rs", "low": 0.8, "high": 1.2}]
    assert total(lesson(corrections=rejected), OLD)[0] == pytest.approx(3 / 3)
    assert total(lesson(corrections=rejected, objective="gspo"), OLD)[0] == pytest.approx(1 / 1)
    everything = [{"name": "geo_rs", "low": 0.999, "high": 1.001}]
    loss, sums = total(lesson(corrections=everything), OLD)
    assert (loss, sums["kept"]) == (0.0, 0.0)


def test_opsm_keeps_the_full_normaliser() -> None:
    new = OLD - torch.where(MASK, 0.5, 0.0)  # the answer with A < 0 has moved by 0.5 - log(1.5)/3 from μ
    clipped = torch.tensor(0.8).item()
    assert total(lesson(corrections=[{"name": "opsm", "delta": 0.4}]), new)[0] == pytest.approx(
        (-math.exp(-0.5) + 3 * clipped) / 4
    )
    assert total(lesson(corrections=[{"name": "opsm", "delta": 0.3}]), new)[0] == pytest.approx(-math.exp(-0.5) / 4)


def test_corrections_combine() -> None:
    loss, _ = total(lesson(corrections=["tis", {"name": "geo_rs", "low": 0.8, "high": 1.2}]), OLD)
    assert loss == pytest.approx((1 + 1 + 1.5) / 3)


def test_a_share_is_normalised_by_itself() -> None:
    given, second = lesson(objective="gspo"), torch.tensor([1])
    assert total(given, OLD, second)[0] == pytest.approx(1.0)
    assert total(lesson(), OLD, second)[0] == pytest.approx(1.0)


def test_micro_batches_add_up_to_the_update() -> None:
    new = OLD + torch.randn(2, 4) * 0.1
    for objective in ("grpo", "gspo", "gmpo"):
        given = lesson(objective=objective, corrections="tis+opsm").objective(BOTH)
        whole, _ = given(new, BOTH)
        parts = [given(new[[i]], torch.tensor([i]))[0] for i in range(2)]
        assert torch.equal(whole, torch.cat(parts))


def routed(probabilities: np.ndarray) -> RouteTrace:
    """Routes of both answers (2 and 4 tokens with the prompt), one layer, top-1 of 2: always expert 0."""
    header = TraceHeader(num_experts=2, top_k=1, moe_layers=(0,), source="old")
    status = np.array([Status.RECORDED, Status.LAST, *[Status.RECORDED] * 3, Status.LAST], np.uint8)
    return RouteTrace.from_packed(
        header, np.zeros((6, 1, 1), np.int64), np.array([2, 4]), status, scores=probabilities.astype(np.float32)
    )


def test_rspo_weighs_by_the_routers_of_the_input() -> None:
    before = np.tile([0.5, 0.5], (6, 1, 1))
    given = Lesson(AlgorithmConfig(corrections="rspo"), MU, OLD, A, MASK, routed(before))
    scores = torch.full((2, 4, 1, 2), 0.5)
    scores[1, 1] = torch.tensor([0.45, 0.55])  # the input of the second response token of the second answer
    terms, sums = given.objective(BOTH)(OLD, BOTH, scores)
    assert terms[1].tolist() == pytest.approx([0, 1, 0.9, 1], rel=1e-5)  # 0.45 / 0.5, not clipped
    assert sums["gamma"] == pytest.approx(3.9, rel=1e-5)


def test_rspo_needs_the_old_pass_to_keep_scores() -> None:
    assert needs_routers(AlgorithmConfig(corrections="rspo"))
    assert not needs_routers(AlgorithmConfig(corrections="tis"))
    with pytest.raises(ConfigError, match="rspo: the old pass kept no router scores"):
        lesson(corrections="rspo").objective(BOTH)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corrections": "tis+tis"}, "each once"),
        ({"corrections": "tis+icepop"}, "both weights old/rollout"),
        ({"corrections": "seq_mis", "anchor": "rollout"}, "the ratio already contains"),
        ({"corrections": "tsi"}, "tsi"),
        ({"corrections": [{"name": "tis", "cap": 0}]}, "greater than 0"),
        ({"objective": "ppo"}, "grpo"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig(**settings)


def test_clips_follow_the_objective_unless_given() -> None:
    assert (AlgorithmConfig(objective="gspo").clip_low, AlgorithmConfig(objective="gspo").clip_high) == (3e-4, 4e-4)
    assert AlgorithmConfig(objective="gmpo", clip_low=0.1).clip_low == 0.1
    assert AlgorithmConfig(objective="gmpo", clip_low=0.1).clip_high == 0.4


def test_the_order_of_corrections_means_nothing() -> None:
    assert AlgorithmConfig(corrections="tis+opsm") == AlgorithmConfig(corrections="opsm+tis")


def test_clipped_tokens_are_counted_among_those_that_stay() -> None:
    everything = [{"name": "geo_rs", "low": 0.999, "high": 1.001}]
    _, sums = total(lesson(corrections=everything), OLD + torch.where(MASK, 1.0, 0.0))
    assert (sums["kept"], sums["clipped"]) == (0, 0)


def test_what_one_correction_rejects_no_other_brings_back() -> None:
    """Geo-RS rejects the first answer, OPSM would keep it."""
    both = ["opsm", {"name": "geo_rs", "low": 0.8, "high": 1.2}]
    loss, sums = total(lesson(corrections=both), OLD)
    assert (loss, sums["kept"]) == (pytest.approx(3 / 3), 3.0)


def test_clips_are_counted_on_what_stays_alone() -> None:
    """The first answer is rejected and clipped, the second stays and is not."""
    new = OLD + torch.where(MASK & torch.tensor([[True], [False]]), 1.0, 0.0)
    rejected = [{"name": "geo_rs", "low": 0.8, "high": 1.2}]
    assert total(lesson(corrections=rejected), new)[1]["clipped"] == 0
    assert total(lesson(), new)[1]["clipped"] == 1
