"""Weights and masks against the mismatch, by hand. Two answers of two tokens; the ratios old/rollout are 1.5, 4 and 0.4, 2."""

from __future__ import annotations

import math

import pytest
import torch

from rar_lib.rl.corrections import (
    geo_rs_keep,
    icepop_weights,
    opsm_keep,
    router_shift_weights,
    seq_mis_weights,
    tis_weights,
)

OLD = torch.tensor([[1.5, 4.0, 99.0], [0.4, 2.0, 99.0]]).log()
MU = torch.zeros(2, 3)
MASK = torch.tensor([[True, True, False], [True, True, False]])


def test_tis_truncates_above_only() -> None:
    assert tis_weights(OLD, MU, MASK, 2.0).tolist() == [pytest.approx(row) for row in [[1.5, 2, 0], [0.4, 2, 0]]]


def test_icepop_keeps_the_ratio_inside_and_nothing_outside() -> None:
    assert icepop_weights(OLD, MU, MASK, 0.5, 3.0).tolist() == [pytest.approx(row) for row in [[1.5, 0, 0], [0, 2, 0]]]


def test_seq_mis_weighs_whole_answers() -> None:
    """ρ(y) is 6 and 0.8."""
    assert seq_mis_weights(OLD, MU, MASK, 2.0).tolist() == [pytest.approx(row) for row in [[0, 0, 0], [0.8, 0.8, 0]]]
    assert seq_mis_weights(OLD, MU, MASK, 6.0001)[0].tolist() == pytest.approx([6, 6, 0])


def test_seq_mis_of_a_ratio_beyond_every_number_is_0() -> None:
    huge = torch.full((1, 2), 500.0)
    assert seq_mis_weights(huge, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)).tolist() == [[0, 0]]


def test_geo_rs_judges_the_mean_of_an_answer() -> None:
    """The geometric means are √6 and √0.8."""
    assert geo_rs_keep(OLD, MU, MASK, 0.8, 2.0).tolist() == [[False] * 3, [True, True, False]]
    assert geo_rs_keep(OLD, MU, MASK, 0.9, 2.5).tolist() == [[True, True, False], [False] * 3]


@pytest.mark.parametrize("weights", [tis_weights, seq_mis_weights])
def test_weights_of_equal_policies_are_1(weights) -> None:
    out = weights(OLD, OLD, MASK)
    assert out[MASK].tolist() == [1.0] * 4
    assert icepop_weights(OLD, OLD, MASK)[MASK].tolist() == [1.0] * 4
    assert torch.equal(geo_rs_keep(OLD, OLD, MASK), MASK)


def test_opsm_drops_what_moved_away_from_a_mistake() -> None:
    new = torch.tensor([[-1.0, -3.0, 0.0], [-1.0, -3.0, 0.0], [-1.0, -1.0, 0.0]])
    mu, mask = torch.full((3, 3), -1.0), MASK[[0, 0, 0]]
    keep = opsm_keep(new, mu, torch.tensor([-1.0, 1.0, -1.0]), mask, 0.5)  # mean log(μ/new): 1, 1, 0
    assert keep.tolist() == [[False] * 3, [True, True, False], [True, True, False]]
    assert opsm_keep(new, mu, torch.tensor([-1.0, 1.0, -1.0]), mask, 1.0)[0, 0]  # the bound itself is kept


def test_opsm_has_no_gradient() -> None:
    new = torch.zeros(1, 2, requires_grad=True)
    assert not opsm_keep(new, torch.zeros(1, 2), torch.tensor([-1.0]), MASK[:1, :2], 0.0).requires_grad


def test_router_shift_by_hand() -> None:
    """One answer of three tokens, two layers, K = 2 of 3. Token 0 keeps its routers; token 1 moves one of four by a factor of e^0.4."""
    old = torch.full((1, 3, 2, 3), 0.3)
    new = old.clone()
    new[0, 1, 0, 0] = 0.3 * math.exp(0.4)
    new[0, 1, 1, 2] = 77.0  # not activated by the old policy: does not count
    new[0, 2] = 0.3e-9  # the last token routes, but nothing is predicted from it
    ids = torch.tensor([0, 1]).expand(1, 3, 2, 2)
    known = torch.ones(1, 3, dtype=torch.bool)
    gamma = router_shift_weights(old, new, ids, known, floor=0.5)
    assert gamma[0].tolist() == pytest.approx([1, 1, math.exp(-0.1)])
    assert router_shift_weights(old, new, ids, known, floor=0.95)[0].tolist() == pytest.approx([1, 1, 0.95])


def test_router_shift_of_an_unrouted_input_is_1() -> None:
    old, new = torch.full((1, 2, 1, 2), 0.5), torch.full((1, 2, 1, 2), 0.01)
    ids = torch.tensor([-1, 0]).reshape(1, 2, 1, 1)
    gamma = router_shift_weights(old, new, ids, torch.tensor([[False, True]]))
    assert gamma.tolist() == [[1.0, 1.0]]


def test_router_shift_outside_a_routers_groups_is_no_shift() -> None:
    """An expert that both passes exclude has probability 0 on both sides: it did not move."""
    old, new = torch.tensor([0.0, 1.0]).expand(1, 2, 1, 2), torch.tensor([0.0, 0.5]).expand(1, 2, 1, 2)
    ids, known = torch.tensor([0, 1]).expand(1, 2, 1, 2), torch.ones(1, 2, dtype=torch.bool)
    assert router_shift_weights(old, old, ids, known).tolist() == [[1, 1]]
    assert router_shift_weights(old, new, ids, known, 0.1)[0].tolist() == pytest.approx([1, math.sqrt(0.5)])
