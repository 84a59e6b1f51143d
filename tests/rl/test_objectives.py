"""The objectives, by hand and by what ties them to each other."""

from __future__ import annotations

import math

import pytest
import torch

from rar_lib.rl.objectives import OBJECTIVES, gmpo_loss, gspo_loss

ONE = torch.tensor([[True, True, False]])


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor([[math.log(r) for r in ratios]], requires_grad=True)


def test_gspo_by_hand() -> None:
    new = logs(1.2, 1.5, 7.0)  # the third lies outside the mask
    terms, sums = gspo_loss(new, torch.zeros(1, 3), torch.tensor([2.0]), ONE, 0.5, 0.5)
    s = math.sqrt(1.2 * 1.5)
    assert terms.tolist()[0] == pytest.approx([-2 * s, -2 * s, 0])
    assert sums["clipped"] == 0
    terms.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist()[0] == pytest.approx([-2 * s, -2 * s, 0])  # two tokens, each A s / 2


@pytest.mark.parametrize(
    ("ratios", "advantage", "loss", "clipped"),
    [
        ((1.2, 1.5), 1.0, -1.0004, 2),  # the sequence is clipped as one
        ((1.2, 1.5), -1.0, math.sqrt(1.8), 0),
        ((0.5, 0.5), 1.0, -0.5, 0),
        ((0.5, 0.5), -1.0, 0.9997, 2),
    ],
)
def test_gspo_clips_sequences(ratios: tuple[float, ...], advantage: float, loss: float, clipped: int) -> None:
    new = logs(*ratios)
    mask = torch.ones(1, 2, dtype=torch.bool)
    terms, sums = gspo_loss(new, torch.zeros(1, 2), torch.tensor([advantage]), mask, 3e-4, 4e-4)
    assert terms.tolist()[0] == pytest.approx([loss, loss])
    assert sums["clipped"] == clipped
    terms.sum().backward()
    assert new.grad is not None
    assert bool((new.grad == 0).all()) == bool(clipped)


@pytest.mark.parametrize(
    ("ratios", "advantage", "kept"),
    [
        ((1.2, 4.0), 1.0, (1.2, math.exp(0.4))),  # above, with A > 0: this token stops at e^0.4
        ((1.2, 4.0), -1.0, (1.2, 4.0)),  # above, with A < 0: it keeps its ratio and is pulled back
        ((1.2, 0.1), 1.0, (1.2, 0.1)),
        ((1.2, 0.1), -1.0, (1.2, math.exp(-0.4))),
    ],
)
def test_gmpo_clips_tokens_and_averages_logs(
    ratios: tuple[float, ...], advantage: float, kept: tuple[float, ...]
) -> None:
    new = logs(*ratios)
    mask = torch.ones(1, 2, dtype=torch.bool)
    terms, sums = gmpo_loss(new, torch.zeros(1, 2), torch.tensor([advantage]), mask, 0.4, 0.4)
    mean = math.sqrt(kept[0] * kept[1])
    assert terms.tolist()[0] == pytest.approx([-advantage * mean] * 2)
    assert sums["clipped"] == (ratios != kept)
    terms.mean(-1).sum().backward()
    assert new.grad is not None
    expected = [-advantage * mean / 2 if r == k else 0.0 for r, k in zip(ratios, kept, strict=True)]
    assert new.grad.tolist()[0] == pytest.approx(expected)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_at_the_anchor_every_objective_is_the_policy_gradient(name: str) -> None:
    loss, mean = OBJECTIVES[name]
    new = torch.randn(3, 4, requires_grad=True)
    a, mask = torch.tensor([1.0, -2.0, 0.5]), torch.ones(3, 4, dtype=torch.bool)
    terms, _ = loss(new, new.detach(), a, mask, 0.2, 0.2)
    (terms.sum() if mean == "token" else terms.mean(-1).sum() * 4).backward()
    assert new.grad is not None
    assert torch.allclose(new.grad, -a[:, None].expand(3, 4), atol=1e-6)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_one_token_answers_make_sequence_and_token_ratios_the_same(name: str) -> None:
    """log seq = T log geo, at T = 1."""
    loss, _ = OBJECTIVES[name]
    mask = torch.ones(5, 1, dtype=torch.bool)
    new, anchor = torch.randn(5, 1) * 0.1, torch.randn(5, 1) * 0.1
    a = torch.tensor([1.0, -1.0, 2.0, -0.5, 0.0])
    terms, _ = loss(new, anchor, a, mask, 0.9, 9.0)
    assert torch.allclose(terms, -a[:, None] * (new - anchor).exp(), atol=1e-6)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_a_router_weight_scales_the_ratio_before_the_clip(name: str) -> None:
    loss, _ = OBJECTIVES[name]
    mask = torch.ones(2, 3, dtype=torch.bool)
    new, anchor, a = torch.randn(2, 3) * 0.3, torch.randn(2, 3) * 0.3, torch.tensor([1.0, -1.0])
    gamma = torch.tensor([[0.8, 0.9, 1.0], [1.0, 0.85, 0.95]])
    weighted, _ = loss(new, anchor, a, mask, 0.2, 0.2, gamma)
    moved, _ = loss(new + gamma.log(), anchor, a, mask, 0.2, 0.2)
    assert torch.allclose(weighted, moved, atol=1e-6)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_nothing_outside_the_mask_reaches_a_loss_or_a_gradient(name: str) -> None:
    loss, _ = OBJECTIVES[name]
    new = torch.tensor([[0.1, float("inf")], [float("nan"), 0.2]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, True]])
    terms, _ = loss(new, torch.zeros(2, 2), torch.tensor([1.0, -1.0]), mask, 0.2, 0.2)
    assert torch.isfinite(terms).all()
    assert (terms[~mask] == 0).all()
    terms.sum().backward()
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()


@pytest.mark.parametrize("loss", [gspo_loss, gmpo_loss])
def test_a_token_that_is_dropped_has_no_gradient(loss) -> None:
    """Sequence ratios share their value over the tokens, but each token's gradient is its own."""
    new = logs(1.1, 1.2, 0.9)
    mask = torch.ones(1, 3, dtype=torch.bool)
    terms, _ = loss(new, torch.zeros(1, 3), torch.tensor([1.0]), mask, 0.5, 0.5)
    (terms * torch.tensor([[1.0, 0.0, 2.0]])).sum().backward()
    s = (1.1 * 1.2 * 0.9) ** (1 / 3)
    assert new.grad is not None
    assert new.grad.tolist()[0] == pytest.approx([-s, 0, -2 * s])


def test_an_advantage_of_0_clips_nothing() -> None:
    for loss, _ in OBJECTIVES.values():
        _, sums = loss(
            logs(9.0, 0.1), torch.zeros(1, 2), torch.tensor([0.0]), torch.ones(1, 2, dtype=torch.bool), 0.2, 0.2
        )
        assert sums["clipped"] == 0
