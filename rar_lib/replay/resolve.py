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
        # detached first: an index into a graph would save tensors that recompute, which is told its ids, does not
        ids[partial] = _fill(recorded[partial], keep[partial], scores.detach()[partial], native[partial])
    return ids


def _fill(recorded: torch.Tensor, keep: torch.Tensor, scores: torch.Tensor, native: torch.Tensor) -> torch.Tensor:
    """Recorded experts where kept; the other slots get the best live ones beside them, `[rows, K]`.

    The best K - |P| experts outside P are all among the router's own K, so nothing else is looked at: group limits hold,
    and a tie falls as the router let it fall.
    """
    by_score = scores.gather(1, native).argsort(dim=-1, descending=True, stable=True)
    ordered = native.gather(1, by_score)
    held = torch.where(keep, recorded, -1)
    free = ~(ordered[:, :, None] == held[:, None, :]).any(-1)
    fills = ordered.gather(1, (~free).to(torch.int8).argsort(dim=-1, stable=True))  # free ones first, best first
    slot = ((~keep).cumsum(-1) - 1).clamp_min(0)  # the how-manieth open slot this is
    return torch.where(keep, recorded, fills.gather(1, slot))


def resolve_biased(
    recorded: torch.Tensor, planned: torch.Tensor, scores: torch.Tensor, native: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Ids to execute in unit bias: the top-K of scores + λ_e 1[e in R].

    Args:
        recorded, planned, scores, native: as for `resolve`, unit token_layer: rows that are not planned stay native.
        bias: `[E]` λ >= 0 of this layer, in units of the ranked scores; 0 is native, infinity is R3.

    Returns:
        `[rows, K]` int64. Where λ is 0 for all recorded experts of a row, `native` itself; else where the set is the
        recorded one, `recorded` itself, slot order included, and where it is only the native one, `native`. Ties go to the
        native expert, so that a pair is swapped only if its score gap is below λ.
    """
    wide = scores.detach()
    held = recorded.clamp_min(0)
    offered = (planned & (recorded[:, 0] >= 0) & (bias[held] > 0).any(-1))[:, None]
    mine = (native[:, :, None] == held[:, None, :]) & offered[..., None]  # [rows, native slot, recorded slot]
    kept, foreign = mine.any(-1), offered & ~mine.any(1)
    own = wide.gather(1, native) + torch.where(kept, bias[native], 0)
    theirs = torch.where(foreign, wide.gather(1, held) + bias[held], -torch.inf)
    candidates = torch.cat([native, held], 1)
    best = torch.cat([own, theirs], 1).argsort(dim=-1, descending=True, stable=True)[:, : native.shape[1]]
    swapped = (best >= native.shape[1]).any(-1, keepdim=True)
    ids = torch.where(swapped, candidates.gather(1, best), native)
    whole = offered & (ids[:, :, None] == held[:, None, :]).any(1).all(-1, keepdim=True)
    return torch.where(whole, recorded, ids)
