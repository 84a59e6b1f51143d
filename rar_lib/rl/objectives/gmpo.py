"""GMPO: the geometric mean of clipped token ratios (arXiv 2507.20673).

    -A exp(mean over tokens of s min(s log(γ r), s clip(log(γ r), -low, high))),  s the sign of A

The clip acts on each token, in the log, and the mean makes one ratio a sequence: a single extreme token moves it by 1/length only.
The paper clips at ±0.4. Sequences are averaged with equal weight, and a token's gradient flows through its own log-prob only, as in
GSPO. RSPO is this objective with γ (corrections/rspo.py, 2510.23027).
"""

from __future__ import annotations

import torch

from rar_lib.rl.ratios import log_ratio, sequence_mean


def gmpo_loss(
    logp_new: torch.Tensor,
    logp_anchor: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    router_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of each sequence, on each of its tokens, `[n, T]`.

    Arguments and result as in grpo_loss; the clip widths are of the log ratio.
    """
    moved = log_ratio(logp_new, logp_anchor, mask)
    if router_weight is not None:
        moved = moved + torch.where(mask, router_weight, 1.0).log()
    a = advantages[:, None]
    sign = torch.where(a < 0, -1.0, 1.0)
    bounded = moved.clamp(-clip_low, clip_high)
    kept = sign * torch.minimum(sign * moved, sign * bounded)
    ratio = sequence_mean(kept, mask).exp().detach() * (kept - kept.detach()).exp()
    terms = torch.where(mask, -a * ratio, 0)
    clipped = mask & (sign * bounded < sign * moved) & (a != 0)
    return terms, {"clipped": float(clipped.sum())}
