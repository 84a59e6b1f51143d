"""GRPO's clipped token objective (arXiv 2402.03300) with separate bounds below and above (DAPO, 2503.14476).

    -min(γ r A, clip(γ r, 1 - low, 1 + high) A),  r = exp(new - anchor) of each token

Departures from the paper: no KL term to a reference model, and the loss is averaged over all response tokens of the
batch (token mean) instead of within each response first, so long answers are not discounted. γ is RSPO's weight
(corrections/rspo.py), 1 without it.
"""

from __future__ import annotations

import torch

from rar_lib.rl.ratios import log_ratio


def grpo_loss(
    logp_new: torch.Tensor,
    logp_anchor: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    router_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of each token.

    Args:
        logp_new: `[n, T]` in nats, with gradient.
        logp_anchor: `[n, T]`, the log-probs that the ratio is taken against.
        advantages: `[n]`, one a sequence.
        mask: `[n, T]` bool, response tokens.
        clip_low, clip_high: widths of the trust region below and above 1.
        router_weight: `[n, T]` γ, multiplied into the ratio before it is clipped.

    Returns:
        The loss of each token `[n, T]`, 0 outside the mask, and sums over tokens: `clipped` (the clip was active).
    """
    ratio = log_ratio(logp_new, logp_anchor, mask).exp()
    if router_weight is not None:
        ratio = ratio * router_weight
    a = advantages[:, None]
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = torch.where(mask, -torch.minimum(ratio * a, bounded * a), 0)
    clipped = mask & (bounded * a < ratio * a)
    return terms, {"clipped": float(clipped.sum())}
