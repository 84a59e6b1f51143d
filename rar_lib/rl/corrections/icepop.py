"""IcePop: double-sided masking (Ring-1T report, arXiv 2510.18855): a token whose ratio ρ = old/rollout lies in [low, high] weighs ρ, any
other weighs 0 and drops out of the gradient. The normaliser stays the full length, so masking tokens does not make the others
louder.
"""

from __future__ import annotations

import torch

from rar_lib.rl.ratios import log_ratio


def icepop_weights(
    logp_old: torch.Tensor, logp_rollout: torch.Tensor, mask: torch.Tensor, low: float = 0.5, high: float = 5.0
) -> torch.Tensor:
    """ρ of each token inside [low, high], else 0: `[S, T]`, 0 outside the mask. Arguments as in tis_weights."""
    ratio = log_ratio(logp_old, logp_rollout, mask).exp()
    return torch.where(mask & (ratio >= low) & (ratio <= high), ratio, 0.0)
