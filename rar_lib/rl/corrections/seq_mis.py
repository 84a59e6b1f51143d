"""Masked importance sampling of sequences (Liu et al. 2025, "When speed kills stability"): every token of an answer weighs ρ(y), the
product of its tokens' ρ = old/rollout, if that is at most C, else the answer weighs 0. Unlike truncation it does not keep
what it distrusts; unlike token weights it is unbiased below C, at the price of variance that grows with length.
"""

from __future__ import annotations

import torch

from rar_lib.rl.ratios import log_ratio, sequence_sum


def seq_mis_weights(
    logp_old: torch.Tensor, logp_rollout: torch.Tensor, mask: torch.Tensor, cap: float = 2.0
) -> torch.Tensor:
    """1[ρ(y) <= cap] ρ(y) on each token of the answer: `[S, T]`, 0 outside the mask. Arguments as in tis_weights."""
    ratio = sequence_sum(log_ratio(logp_old, logp_rollout, mask), mask).exp()
    return torch.where(mask & (ratio <= cap), ratio, 0.0)
