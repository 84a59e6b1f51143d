"""What a plan does at fixed scores: by hand, and monotone along nested plans."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rar_lib.metrics import replay as m
from rar_lib.metrics.agreement import agreement
from rar_lib.replay.policies import make_plan
from rar_lib.replay.policy import Candidates
from rar_lib.replay.resolve import resolve
from rar_lib.traces.synthetic import synthetic

R = np.array([[[0, 1]], [[2, 3]]])
N = np.array([[[1, 0]], [[2, 0]]])
KNOWN = np.ones((2, 1), bool)


def test_by_hand() -> None:
    every, none = np.ones((2, 1), bool), np.zeros((2, 1), bool)
    assert m.binding_share(every, R, N, KNOWN) == 0.5  # only the second set is not native
    assert m.binding_share(none, R, N, KNOWN) == 0
    slots = np.ones((2, 1, 2), bool)
    assert m.binding_share(slots, R, N, KNOWN) == 0.25  # of four experts only expert 3 is foreign
    assert m.forced_routers(N, R, KNOWN) == 0.5
    assert m.forced_routers(N, N, KNOWN) == 0
    assert m.fidelity(R, N, KNOWN) == 0.75
    assert m.fidelity(R, R, KNOWN) == 1
    scores = np.log(np.array([[[0.4, 0.3, 0.2, 0.1]], [[0.3, 0.1, 0.5, 0.1]]]))
    assert m.regret(scores, N, R, KNOWN) == pytest.approx((0 + 0.8 - 0.6) / 2)
    assert m.regret(scores, N, N, KNOWN) == 0


def test_cells_that_nobody_recorded_are_left_out() -> None:
    first = np.array([[True], [False]])
    assert m.forced_routers(N, R, first) == 0
    nothing = np.zeros((2, 1), bool)
    scores = np.zeros((2, 1, 4))
    assert m.binding_share(nothing, R, N, nothing) is None
    assert (m.forced_routers(N, R, nothing), m.fidelity(R, N, nothing), m.regret(scores, N, R, nothing)) == (
        None,
        None,
        None,
    )


def test_regret_outside_the_groups_is_refused() -> None:
    scores = np.array([[[0.0, 0.0, -np.inf, -np.inf]]] * 2)
    with pytest.raises(ValueError, match="outside the groups"):
        m.regret(scores, N[:1].repeat(2, 0), R, KNOWN)


def test_efficiency() -> None:
    assert m.efficiency(4.0, 4.0, 2.0, 0.1) == 0
    assert m.efficiency(4.0, 2.0, 2.0, 0.1) == 1
    assert m.efficiency(4.0, 3.0, 2.0, 0.1) == 0.5
    assert m.efficiency(4.0, 3.0, 3.95, 0.1) is None


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(["token_layer", "slot"]),
    st.sampled_from(["random_route", "uniform", "margin", "disagree"]),
    st.integers(0, 99),
)
def test_along_nested_plans(unit: Any, policy: str, seed: int) -> None:
    made = synthetic([20, 30], experts=8, top_k=3, flip_rate=0.2, seed=seed)
    record, native = made.rollout, made.native
    known = record.recorded
    seen = Candidates(record, ["a", "b"], seed, 0, native)
    steps = []
    for share in ("0", "0.1", "0.3", "0.7", "1"):
        plan = make_plan(policy, seen, unit, share)
        k = record.header.top_k
        rows = (
            record.ids().reshape(-1, k),
            plan.planned.reshape(-1, *plan.planned.shape[2:]),
            made.scores.reshape(-1, 8),
        )
        used = resolve(
            *map(torch.from_numpy, (rows[0], rows[1], rows[2].copy())),
            torch.from_numpy(native.ids().reshape(-1, k).clip(0)),
        )
        executed = used.numpy().reshape(record.ids().shape)
        values = [
            m.fidelity(record.ids(), executed, known), m.regret(made.scores, native.ids().clip(0), executed, known),
            m.binding_share(plan.planned, record.ids(), native.ids(), known),
        ]  # fmt: skip
        assert None not in values
        steps.append(values)
        assert values[2] <= plan.nominal + 1e-12  # type: ignore[operator]
        assert values[1] >= -1e-7  # type: ignore[operator]
    for less, more in pairwise(steps):
        assert all(b >= a - 1e-7 for a, b in zip(less, more, strict=True))  # type: ignore[operator]
    assert steps[0][1:] == [pytest.approx(0, abs=1e-7), 0]
    assert steps[-1][0] == 1
    flips = agreement(record, native).scalars()["router_flip"]
    if unit == "token_layer":
        assert steps[-1][2] == flips


def test_probabilities_are_taken_as_they_are_and_logits_through_a_softmax() -> None:
    p = np.array([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]])
    assert np.array_equal(m.router_probabilities(p), p)
    assert m.router_probabilities(np.log(p) + 3) == pytest.approx(p)
    assert m.router_probabilities(np.array([[0.0, -np.inf, 0.0]])).tolist() == [[0.5, 0, 0.5]]
    ids = np.array([[[0]], [[2]]])
    used = np.array([[[1]], [[2]]])
    known = np.ones((2, 1), bool)
    for scores in (p[:, None], np.log(p)[:, None]):
        assert m.regret(scores, ids, used, known) == pytest.approx(0.25 / 2)


def test_target_shift_is_nothing_for_none_and_k3_otherwise() -> None:
    native = np.log(np.array([[0.5, 0.25], [0.5, 0.5]]))
    mask = np.array([[True, True], [True, False]])
    assert m.target_shift(native, native, mask) == 0
    replayed = native + np.array([[np.log(2), 0], [0, 5.0]])  # the last is masked
    assert m.target_shift(replayed, native, mask) == pytest.approx(
        (0.5 - 1 + np.log(2)) / 3
    )  # Δ = -log 2 at one of three


def test_drift_on_planned_cells_and_on_the_others() -> None:
    before = np.array([[[0, 1]], [[0, 1]], [[0, 1]], [[0, 1]]])
    after = np.array([[[1, 0]], [[0, 2]], [[0, 2]], [[3, 2]]])
    planned = np.array([[True], [True], [False], [False]])
    known = np.array([[True], [True], [True], [False]])
    assert m.drift(before, after, planned, known) == (0.5, 1.0)
    slots = np.zeros((4, 1, 2), bool)
    slots[1, 0, 1] = True
    assert m.drift(before, after, slots, known) == (1.0, 0.5)
    assert m.drift(before, after, ~planned & False, known) == (None, pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("numbers", "answer"),
    [
        ((1e-9, 1e-8, 1e-4, 1e-4), "neither"),
        ((1e-3, 1e-8, 1e-4, 1e-4), "too weak"),
        ((1e-9, 1e-8, 2e-4, 1e-4), "too restrictive"),
        ((1e-9, 1e-8, 1e-4, 1e-4, 0.01, 0.02), "too restrictive"),
        ((1e-9, 1e-8, 1e-4, 1e-4, 0.02, 0.01), "neither"),
        ((1e-3, 1e-8, 2e-4, 1e-4, 0.01, None), "too weak and too restrictive"),
    ],
)
def test_the_verdict_follows_its_rule(numbers: tuple[float, ...], answer: str) -> None:
    assert m.verdict(*numbers) == answer
