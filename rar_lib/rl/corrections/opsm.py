"""Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): an answer with A < 0 from which the policy has moved further than δ is
dropped; learning from a mistake that one would no longer make is what does harm. Measured from the policy that sampled
to the one that is learning, mean over tokens of log(rollout/new). The normaliser stays the full length.
"""

from __future__ import annotations

import torch

from rar_lib.rl.ratios import log_ratio, sequence_mean


def opsm_keep(
    logp_new: torch.Tensor, logp_rollout: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, delta: float
) -> torch.Tensor:
    """Tokens that are kept: `[n, T]` bool, false outside the mask.

    Args:
        logp_new: `[n, T]` in nats; used without gradient.
        logp_rollout: `[n, T]` in nats.
        advantages: `[n]`.
        mask: `[n, T]` bool, response tokens.
        delta: nats a token.
    """
    moved = sequence_mean(log_ratio(logp_rollout, logp_new.detach(), mask), mask)
    return mask & ~((advantages[:, None] < 0) & (moved > delta))
