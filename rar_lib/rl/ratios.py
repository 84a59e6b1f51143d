"""Ratios of two log-prob sources, by token and by sequence, with a mask applied before anything is reduced."""

from __future__ import annotations

import torch


def log_ratio(logp_a: torch.Tensor, logp_b: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log π_A - log π_B in nats: `[n, T]`, 0 outside the mask. Gradients flow through both."""
    return torch.where(mask, logp_a - logp_b, 0.0)


def sequence_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over the masked tokens of each sequence: `[n, 1]`."""
    return torch.where(mask, values, 0.0).sum(-1, keepdim=True)


def sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the masked tokens of each sequence: `[n, 1]`; 0 for a sequence without any."""
    return sequence_sum(values, mask) / mask.sum(-1, keepdim=True).clamp_min(1)
