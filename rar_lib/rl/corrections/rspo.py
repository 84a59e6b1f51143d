"""RSPO's router-shift weight (arXiv 2510.23027): a token whose router has moved since the old pass counts for less.

    γ_t = exp(-(1/L) Σ_l (1/K) Σ_k |log r_new(e_k) - log r_old(e_k)|), at least `floor`, without gradient

over the K experts that the old pass activated. γ multiplies the token's ratio before clipping and aggregation; the paper's RSPO is GMPO
with it, and here any objective takes it. A log-prob at position t was computed from the input at t - 1, so γ_t is that of
the router at t - 1.
"""

from __future__ import annotations

import torch


def router_shift_weights(
    r_old: torch.Tensor, r_new: torch.Tensor, ids_old: torch.Tensor, known: torch.Tensor, floor: float = 0.8
) -> torch.Tensor:
    """max(γ, floor) at the tokens whose log-probs it speaks of.

    Args:
        r_old, r_new: `[n, T, L, E]` router probabilities of the inputs, in the old pass and now.
        ids_old: `[n, T, L, K]` int64, experts that the old pass executed; anything where not known.
        known: `[n, T]` bool, inputs that were routed in both passes.
        floor: smallest weight.

    Returns:
        `[n, T]` float32; 1 where the input before was not routed.
    """
    ids = torch.where(known[..., None, None], ids_old, 0)
    old, new = (r.detach().double().gather(-1, ids) for r in (r_old, r_new))
    moved = torch.where(
        old == new, 0.0, (new.log() - old.log()).abs()
    )  # also where both are 0, outside a router's groups
    shift = moved.mean((-1, -2))
    gamma = torch.where(known, (-shift).exp().clamp_min(floor), 1.0).float()
    return torch.cat([torch.ones_like(gamma[:, :1]), gamma[:, :-1]], 1)
