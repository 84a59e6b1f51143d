"""GSPO: one ratio a sequence, the geometric mean of its tokens' (arXiv 2507.18071).

    -min(s A, clip(s, 1 - low, 1 + high) A),  s = exp(mean over tokens of (new - anchor))

Every token of a sequence carries the sequence's loss, and sequences are averaged with equal weight (sequence mean), so the
gradient of a token is A s / length. It flows through that token's own log-prob only (the paper's GSPO-token), so that what weighs or
drops a token weighs or drops its gradient. The paper clips at 3e-4 below and 4e-4 above. RSPO's γ multiplies the tokens'
ratios, so its geometric mean multiplies s.
"""

from __future__ import annotations

import torch

from rar_lib.rl.ratios import log_ratio, sequence_mean


def gspo_loss(
    logp_new: torch.Tensor,
    logp_anchor: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    router_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of each sequence, on each of its tokens, `[n, T]`.

    Arguments and result as in grpo_loss; the clip is of s.
    """
    moved = log_ratio(logp_new, logp_anchor, mask)
    if router_weight is not None:
        moved = moved + torch.where(mask, router_weight, 1.0).log()
    ratio = (
        sequence_mean(moved, mask).exp().detach() * (moved - moved.detach()).exp()
    )  # the value of s, the token's gradient
    a = advantages[:, None]
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = torch.where(mask, -torch.minimum(ratio * a, bounded * a), 0)
    clipped = mask & (bounded * a < ratio * a)
    return terms, {"clipped": float(clipped.sum())}
