"""Reward of a policy on another's samples, by hand and against the exact answer."""

from __future__ import annotations

import numpy as np
import pytest

from rar_lib.metrics.reweighted import reweighted_reward


def test_by_hand() -> None:
    """Weights 1 and 3: (1·0 + 3·1)/4, and (4²)/(2·10)."""
    mask = np.array([[True, True], [True, False]])
    policy = np.array([[0.0, 0.0], [np.log(3), 99.0]])
    assert reweighted_reward([0, 1], policy, np.zeros((2, 2)), mask) == pytest.approx((0.75, 0.8))


def test_equal_policies_give_the_mean() -> None:
    logp, mask = np.full((4, 3), -1.0), np.ones((4, 3), bool)
    assert reweighted_reward([0, 1, 1, 1], logp, logp, mask) == pytest.approx((0.75, 1.0))
    assert reweighted_reward([], np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3), bool)) == (None, None)


def test_it_finds_the_reward_of_the_other_policy() -> None:
    """Answers of two binary tokens; reward 1 for (1, 1). μ draws each 1 with 0.5, π with 0.7: 0.49 against 0.25."""
    rng = np.random.default_rng(0)
    drawn = rng.random((40_000, 2)) < 0.5
    policy, mu = np.where(drawn, np.log(0.7), np.log(0.3)), np.full(drawn.shape, np.log(0.5))
    estimate, ess = reweighted_reward(drawn.all(1), policy, mu, np.ones(drawn.shape, bool))
    assert estimate == pytest.approx(0.49, abs=0.01)
    assert ess == pytest.approx((1 / (0.49 + 0.09) / 2) ** 2, abs=0.01)  # 1 / (E w²) of two tokens
