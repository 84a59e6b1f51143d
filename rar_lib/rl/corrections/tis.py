"""Truncated importance sampling: each token weighs min(ρ, C), ρ = old/rollout (Yao et al. 2025, "Your efficient RL framework
secretly brings you off-policy RL training"; verl's rollout_is=token). The weight multiplies the loss after its own clipping and has
no gradient.
"""

from __future__ import annotations

import torch

from rar_lib.rl.ratios import log_ratio


def tis_weights(
    logp_old: torch.Tensor, logp_rollout: torch.Tensor, mask: torch.Tensor, cap: float = 2.0
) -> torch.Tensor:
    """min(exp(old - rollout), cap) of each token: `[S, T]`, 0 outside the mask.

    Args:
        logp_old, logp_rollout: `[S, T]` in nats.
        mask: `[S, T]` bool, response tokens.
        cap: C > 0.
    """
    return torch.where(mask, log_ratio(logp_old, logp_rollout, mask).exp().clamp_max(cap), 0.0)
