"""Advantages and the GRPO objective, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rar_lib.rl.advantages import group_advantages
from rar_lib.rl.objectives import grpo_loss


def test_advantages_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([7, 7, 9, 9])
    advantages, flat = group_advantages(rewards, groups, eps=0)
    assert advantages.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0, 0])
    assert flat == 1


def test_advantages_do_not_depend_on_order() -> None:
    rewards, groups = torch.rand(12), torch.arange(12) % 3
    order = torch.randperm(12)
    direct, _ = group_advantages(rewards, groups)
    shuffled, _ = group_advantages(rewards[order], groups[order])
    assert torch.equal(direct[order], shuffled)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0),
        (1.5, 1.0, -1.3, 1),  # above 1 + high: no further reward
        (1.5, -1.0, 1.5, 0),  # above, with a negative advantage: the gradient pulls back
        (0.5, 1.0, -0.5, 0),
        (0.5, -1.0, 0.8, 1),  # below 1 - low
    ],
)
def test_grpo_by_hand(ratio: float, advantage: float, loss: float, clipped: int) -> None:
    new = torch.full((1, 2), math.log(ratio), requires_grad=True)
    mask = torch.tensor([[True, False]])
    terms, sums = grpo_loss(new, torch.zeros(1, 2), torch.tensor([advantage]), mask, 0.2, 0.3)
    assert terms.tolist()[0] == pytest.approx([loss, 0])
    assert sums["clipped"] == clipped
    terms.sum().backward()
    assert new.grad is not None
    assert (new.grad[0, 0] == 0) == bool(clipped)
    assert new.grad[0, 1] == 0


def test_at_the_anchor_the_gradient_is_the_policy_gradient() -> None:
    new = torch.randn(3, 4, requires_grad=True)
    advantages, mask = torch.tensor([1.0, -2.0, 0.5]), torch.ones(3, 4, dtype=torch.bool)
    terms, _ = grpo_loss(new, new.detach(), advantages, mask, 0.2, 0.2)
    terms.sum().backward()
    assert new.grad is not None
    assert torch.allclose(new.grad, -advantages[:, None].expand(3, 4))
