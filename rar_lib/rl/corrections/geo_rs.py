"""Geometric rejection (Liu et al. 2025, "When speed kills stability"; verl's rollout_rs=seq_mean_k1): an answer is kept if the geometric
mean of its tokens' ρ = old/rollout lies in [low, high], so long answers are judged like short ones. Rejected tokens leave
the normaliser too: what is kept is averaged over what is kept.
"""

from __future__ import annotations

import torch

from rar_lib.rl.ratios import log_ratio, sequence_mean


def geo_rs_keep(
    logp_old: torch.Tensor, logp_rollout: torch.Tensor, mask: torch.Tensor, low: float = 0.99, high: float = 1.01
) -> torch.Tensor:
    """Tokens of the answers that are kept: `[S, T]` bool, false outside the mask. Arguments as in tis_weights."""
    ratio = sequence_mean(log_ratio(logp_old, logp_rollout, mask), mask).exp()
    return mask & (ratio >= low) & (ratio <= high)
