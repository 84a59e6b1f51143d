"""The resolver: (recorded routes, plan, live scores) -> K distinct experts that are executed.

One pure function a unit, the same for Transformers and Megatron-Core, in old, update and recompute passes. Only indices are
decided here. The weights are always gathered from the live scores by the model's own rule, so a forced route still gets
its gate, and the router its gradient, from the policy that is being trained.
"""

from __future__ import annotations

import torch


def resolve(recorded: torch.Tensor, planned: torch.Tensor, scores: torch.Tensor, native: torch.Tensor) -> torch.Tensor:
    """Ids to execute.

    Args:
        recorded: `[rows, K]` int64 ids, -1 in every slot of a row without a record.
        planned: bool, `[rows]` for unit token_layer or `[rows, K]` for unit slot.
        scores: `[rows, E]`, the scores that the router ranks, group limits and biases applied.
        native: `[rows, K]` int64 ids that the router chose by itself.

    Returns:
        `[rows, K]` int64. Rows without a planned unit are `native` itself, rows that are planned whole are `recorded`
        itself, slot order included. Ids are distinct if those of both inputs are.
    """
    if planned.ndim == 1:
        return torch.where((planned & (recorded[:, 0] >= 0))[:, None], recorded, native)
    keep = planned & (recorded >= 0)
    whole, some = keep.all(-1, keepdim=True), keep.any(-1, keepdim=True)
    partial = (some & ~whole)[:, 0]
    ids = torch.where(whole, recorded, native)
    if partial.any():
        ids[partial] = _fill(recorded[partial], keep[partial], scores[partial], native[partial])
    return ids


def _fill(recorded: torch.Tensor, keep: torch.Tensor, scores: torch.Tensor, native: torch.Tensor) -> torch.Tensor:
    """Recorded experts where kept; the other slots get the best live ones beside them, `[rows, K]`.

    The best K - |P| experts outside P are all among the router's own K, so nothing else is looked at: group limits hold,
    and a tie falls as the router let it fall.
    """
    by_score = scores.detach().gather(1, native).argsort(dim=-1, descending=True, stable=True)
    ordered = native.gather(1, by_score)
    held = torch.where(keep, recorded, -1)
    free = ~(ordered[:, :, None] == held[:, None, :]).any(-1)
    fills = ordered.gather(1, (~free).to(torch.int8).argsort(dim=-1, stable=True))  # free ones first, best first
    slot = ((~keep).cumsum(-1) - 1).clamp_min(0)  # the how-manieth open slot this is
    return torch.where(keep, recorded, fills.gather(1, slot))
