"""The resolver at fixed scores, by hand and on 20,000 random rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rar_lib.replay.resolve import resolve

SCORES = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
NATIVE = torch.tensor([[0, 1]])


def one(recorded: list[int], planned: list[bool] | bool) -> list[int]:
    mask = torch.tensor([planned])
    return resolve(torch.tensor([recorded]), mask, SCORES, NATIVE)[0].tolist()


def test_by_hand() -> None:
    assert one([3, 2], True) == [3, 2]
    assert one([3, 2], False) == [0, 1]
    assert one([-1, -1], True) == [0, 1]  # nothing recorded: native
    assert one([3, 2], [True, True]) == [3, 2]
    assert one([3, 2], [False, False]) == [0, 1]
    assert sorted(one([3, 2], [True, False])) == [0, 3]  # the kept expert and the best live one beside it
    assert sorted(one([1, 2], [True, False])) == [0, 1]  # kept and native at once
    assert sorted(one([0, 3], [True, False])) == [0, 1]
    assert one([-1, -1], [True, True]) == [0, 1]


def test_one_expert_a_token_and_all_experts() -> None:
    native = torch.tensor([[0]])
    assert resolve(torch.tensor([[2]]), torch.tensor([[True]]), SCORES, native).tolist() == [[2]]
    assert resolve(torch.tensor([[2]]), torch.tensor([[False]]), SCORES, native).tolist() == [[0]]
    every = torch.tensor([[3, 1, 0, 2]])
    kept = resolve(every, torch.tensor([[True, False, True, False]]), SCORES, torch.tensor([[0, 1, 2, 3]]))
    assert sorted(kept[0].tolist()) == [0, 1, 2, 3]


def test_equal_scores_still_give_distinct_experts() -> None:
    flat = torch.zeros(6, 5)
    recorded = torch.tensor([[4, 3, 0]] * 6)
    planned = torch.tensor([[i & 1 > 0, i & 2 > 0, i & 4 > 0] for i in range(6)])
    used = resolve(recorded, planned, flat, flat.topk(3).indices)
    assert all(len(set(row)) == 3 for row in used.tolist())
    for row, keep, ids in zip(recorded, planned, used, strict=True):
        assert set(row[keep].tolist()) <= set(ids.tolist())


def test_open_slots_are_filled_best_first_whatever_the_routers_slot_order() -> None:
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2, 0.0]])
    used = resolve(torch.tensor([[4, 0, 2]]), torch.tensor([[True, False, False]]), scores, torch.tensor([[3, 2, 1]]))
    assert used[0].tolist() == [4, 1, 2]  # 1 and 2 are the best two of 3, 2, 1
    used = resolve(torch.tensor([[4, 0, 2]]), torch.tensor([[True, False, True]]), scores, torch.tensor([[3, 2, 1]]))
    assert used[0].tolist() == [4, 1, 2]  # 2 is kept, 1 fills


def random_rows(seed: int, k: int, extra: int, rows: int = 500) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    experts = k + extra
    scores = torch.randint(0, 2 * experts, (rows, experts), generator=generator).float()  # many ties
    recorded = torch.rand(rows, experts, generator=generator).topk(k).indices
    recorded[torch.rand(rows, generator=generator) < 0.1] = -1
    priority = torch.rand(rows, k, generator=generator)
    return scores, recorded, priority, scores.topk(k).indices


def overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a[:, :, None] == b[:, None, :]).sum((1, 2))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(0, 8))
def test_invariants_at_fixed_scores(seed: int, k: int, extra: int) -> None:
    scores, recorded, priority, native = random_rows(seed, k, extra)
    known = recorded[:, 0] >= 0
    fidelity, mass = [], []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        planned = priority < share
        used = resolve(recorded, planned, scores, native)
        assert ((used >= 0) & (used < k + extra)).all()
        assert (used.sort(-1).values.diff(dim=-1) > 0).all()  # K distinct
        kept = torch.where(planned & known[:, None], recorded, -1)
        assert (overlap(kept.masked_fill(kept < 0, -2), used) == (kept >= 0).sum(-1)).all()  # P is executed
        assert torch.equal(used[~known], native[~known])
        fidelity.append(overlap(recorded, used)[known])
        mass.append(scores.gather(1, used).sum(-1))
        if share == 0:
            assert torch.equal(used, native)
        if share == 1:
            assert torch.equal(used[known], recorded[known])
    for nearer, further in zip(fidelity[1:], fidelity, strict=False):
        assert (nearer >= further).all()  # fidelity grows along nested plans
    for less, more in zip(mass[1:], mass, strict=False):
        assert (less <= more).all()  # and so does what is given up of the live scores


@pytest.mark.parametrize("ndim", [1, 2])
def test_inputs_are_left_alone(ndim: int) -> None:
    scores, recorded, priority, native = random_rows(0, 3, 4)
    planned = priority[:, 0] < 0.5 if ndim == 1 else priority < 0.5
    before = [t.clone() for t in (scores, recorded, planned, native)]
    resolve(recorded, planned, scores, native)
    assert all(torch.equal(a, b) for a, b in zip(before, (scores, recorded, planned, native), strict=True))
