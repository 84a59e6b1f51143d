"""Group-relative advantages (GRPO, arXiv 2402.03300): a sample is compared with the other answers to its prompt.

A group whose rewards are all equal teaches nothing: its advantages are 0 and it is counted, because a run whose groups
are mostly like that has stopped learning while its loss looks calm.
"""

from __future__ import annotations

import torch


def group_advantages(rewards: torch.Tensor, groups: torch.Tensor, eps: float = 1e-6) -> tuple[torch.Tensor, int]:
    """(r - mean) / (std + eps) within each group; std is the sample deviation (n - 1).

    Args:
        rewards: `[S]` float.
        groups: `[S]` int64, index of the prompt.
        eps: keeps a nearly equal group finite.

    Returns:
        Advantages `[S]` float32 and the number of groups of zero variance.
    """
    rewards = rewards.double()
    _, index = groups.unique(return_inverse=True)
    count = torch.bincount(index).double()
    mean = torch.bincount(index, rewards) / count
    centred = rewards - mean[index]
    std = (torch.bincount(index, centred**2) / (count - 1).clamp_min(1)).sqrt()
    flat = std == 0
    return torch.where(flat[index], 0.0, centred / (std[index] + eps)).float(), int(flat.sum())
