"""Scores and masks by hand: two gradients that a person can square, and the routes that their ranking takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from routing_aware_replay.fisher_mask import (
    ExpertScore,
    RouteSignals,
    expert_score,
    fisher_mask,
    load_score,
    save_score,
)
from routing_aware_replay.schema import RouteTrace, TraceHeader

from rar_lib.errors import ConfigError, ReplayError

HEADER = TraceHeader(num_experts=4, top_k=2, moe_layers=(3,), source="old")
#               token 0   token 1   token 2 (the last one, no route)
IDS = np.array([[[0, 1]], [[1, 2]], [[0, 0]]])
TRACE = RouteTrace.from_packed(HEADER, IDS, [3], np.array([1, 1, 2]))


def signals() -> RouteSignals:
    nothing = np.zeros((1, 2), np.float32)
    grad = np.array([[[1.0, -1.0]], [[3.0, -3.0]], nothing], np.float32)
    gates = np.array([[[0.5, 0.5]], [[0.75, 0.25]], nothing], np.float32)
    return RouteSignals("rollout", gates, grad, np.zeros_like(grad))


def score_of(values: list[float]) -> ExpertScore:
    array = np.array([values])
    return ExpertScore(array, np.ones_like(array), "gate", "per_route", "rollout", 2.0)


def test_the_score_is_the_mean_squared_gradient_of_a_cell() -> None:
    score = expert_score(signals(), TRACE)
    assert score.values.tolist() == [[1.0, (1.0 + 9.0) / 2, 9.0, -np.inf]]  # expert 3 has no route
    assert score.count.tolist() == [[1.0, 2.0, 1.0, 0.0]]
    assert score.id == "gate/per_route/rollout"


@pytest.mark.parametrize(
    ("order", "budget", "kept"),
    [
        ("fisher", "1/4", [[0, 0], [0, 1]]),  # expert 2, the highest
        ("fisher", "3/4", [[0, 1], [1, 1]]),  # then both routes of expert 1
        ("inverse_fisher", "1/4", [[1, 0], [0, 0]]),
        ("inverse_fisher", "3/4", [[1, 1], [1, 0]]),
        ("fisher", 0, [[0, 0], [0, 0]]),
        ("fisher", 1, [[1, 1], [1, 1]]),
    ],
)
def test_slots_go_by_their_experts(order: str, budget: str, kept: list[list[int]]) -> None:
    plan = fisher_mask(TRACE, expert_score(signals(), TRACE), ["a"], budget, order=order)  # type: ignore[arg-type]
    assert plan.planned[:2, 0].astype(int).tolist() == kept
    assert not plan.planned[2].any()
    assert plan.valid == 4


def test_sets_go_by_the_sum_over_their_experts() -> None:
    plan = fisher_mask(TRACE, expert_score(signals(), TRACE), ["a"], "1/2", unit="token_layer")
    assert plan.planned[:, 0].tolist() == [False, True, False]  # 1 + 5 against 5 + 9


def test_the_permuted_control_takes_as_many_routes_and_others() -> None:
    rng = np.random.default_rng(0)
    header = TraceHeader(num_experts=16, top_k=2, moe_layers=(0, 1), source="rollout")
    ids = np.argsort(rng.random((200, 2, 16)), -1)[..., :2]
    trace = RouteTrace.from_packed(header, ids, [100, 100], np.where(np.arange(200) % 100 == 99, 2, 1))
    values = rng.random((2, 16))
    score = ExpertScore(values, np.ones_like(values), "gate", "per_route", "rollout", 198.0)
    names = ["a", "b"]
    true, false = (fisher_mask(trace, score, names, "1/4", order=o) for o in ("fisher", "permuted_fisher"))
    assert true.budget == false.budget == 198
    assert (true.planned != false.planned).any()
    again = fisher_mask(trace, score, names, "1/4", order="permuted_fisher")
    assert np.array_equal(again.planned, false.planned)


def test_a_score_comes_back_from_its_file(tmp_path: Path) -> None:
    score = expert_score(signals(), TRACE)
    stored = load_score(save_score(score, HEADER.moe_layers, tmp_path / "scores.safetensors"))
    assert np.array_equal(stored.score.values, score.values)
    assert stored.moe_layers == (3,)


def test_what_is_no_score_or_no_share_is_refused() -> None:
    with pytest.raises(ReplayError, match=r"expected shape \(1, 4\) \(layers, experts\), found \(1, 3\)"):
        fisher_mask(TRACE, score_of([1.0, 2.0, 3.0]), ["a"], "1/4")
    with pytest.raises(ReplayError, match="found nan at layer 3, expert 1"):
        fisher_mask(TRACE, score_of([1.0, np.nan, 3.0, 4.0]), ["a"], "1/4")
    with pytest.raises(ConfigError, match="expected a share from 0 to 1, found '5/4'"):
        fisher_mask(TRACE, score_of([1.0, 2.0, 3.0, 4.0]), ["a"], "5/4")
