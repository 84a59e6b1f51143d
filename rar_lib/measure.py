"""What one step of a run measures: plain rows, one name a number, the pair of sources in the name.

reward/, groups/, response/   what was sampled
mismatch/rollout_old/         the run's own old pass against the rollout (METRICS 1)
mismatch/old_new/             the updates against the old pass
mismatch/rollout_new/         the updates against the rollout
paired/{none,R3}/rollout_old/ the same tokens scored natively and under full R3, whatever the run's own mode
agreement/rollout_native/     routes of the rollout against a forward without any replay (native_free)
replay/                       planned, binding and missing routes of the old pass and the updates
noise_floor/                  each engine against itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rar_lib.engines.base import LogprobResult, Replay, RolloutResult, TokenBatch, UpdateResult
from rar_lib.metrics.agreement import agreement
from rar_lib.metrics.mismatch import k3_terms, mismatch

Row = dict[str, Any]
TAU = 2.0


def rollout_logprobs(batch: TokenBatch, sample: RolloutResult) -> torch.Tensor:
    """`[S, T]` float32: the log-probs that the rollout engine reported, at the tokens that they speak of."""
    out = torch.zeros(batch.tokens.shape)
    out[batch.response_mask] = torch.tensor([value for row in sample.logprobs for value in row], dtype=torch.float32)
    return out


def sample_row(rewards: torch.Tensor, batch: TokenBatch, sample: RolloutResult, flat_groups: int) -> Row:
    """What was sampled."""
    lengths = (batch.lengths - batch.prompt_lengths).double()
    return {
        "reward/mean": float(rewards.double().mean()),
        "reward/std": float(rewards.double().std()),
        "groups/zero_variance": flat_groups,
        "groups/count": int(batch.groups.unique().numel()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "routes/bytes": int(sample.trace.experts.nbytes),
        "routes/bytes_per_token": sample.trace.experts.nbytes / max(1, sample.trace.num_tokens),
    }


def mismatch_row(
    mu: torch.Tensor, old: torch.Tensor, updates: Sequence[tuple[torch.Tensor, UpdateResult]], mask: torch.Tensor
) -> Row:
    """The three pairs of log-prob sources; `new` is each token's log-prob in the update that it took part in."""
    new = torch.zeros_like(old)
    for rows, update in updates:
        new[rows] = update.logprobs
    return {
        **mismatch(old, mu, mask, prefix="mismatch/rollout_old/", tau=TAU),
        **mismatch(new, old, mask, prefix="mismatch/old_new/", tau=TAU),
        **mismatch(new, mu, mask, prefix="mismatch/rollout_new/", tau=TAU),
    }


def paired_row(mu: torch.Tensor, scored: Mapping[str, LogprobResult], mask: torch.Tensor) -> Row:
    """The same tokens under `none` and under `R3`: k3, extreme tokens and the largest ratio."""
    names = ("k3", f"extreme_fraction_tau{TAU:g}", "ratio_max", "abs_mean")
    row: Row = {}
    for arm, result in scored.items():
        values = mismatch(result.logprobs, mu, mask, tau=TAU)
        row |= {f"paired/{arm}/rollout_old/{name}": values[name] for name in names}
    return row


def paired_by_prompt(
    step: int, mu: torch.Tensor, scored: Mapping[str, LogprobResult], batch: TokenBatch, sample: RolloutResult
) -> list[Row]:
    """A row a prompt: tokens, flipped cells and the sum of k3 under each arm, for intervals clustered by prompt."""
    mask = batch.response_mask.numpy()
    terms = {
        arm: np.where(mask, k3_terms((result.logprobs - mu).double().numpy()), 0.0).sum(1)
        for arm, result in scored.items()
    }
    native = scored["none"].trace
    assert native is not None
    compared = agreement(sample.trace, native)
    starts = sample.trace.offsets[:-1]
    flips = np.add.reduceat(compared.flipped.sum(1), starts)
    cells = np.add.reduceat(compared.known.sum(1), starts)
    rows = []
    for group in batch.groups.unique().tolist():
        members = (batch.groups == group).numpy()
        uid = batch.uids[int(members.argmax())].rpartition("/")[0]
        rows.append(
            {
                "step": step,
                "prompt": uid,
                "tokens": int(mask[members].sum()),
                "cells": int(cells[members].sum()),
                "flips": int(flips[members].sum()),
                **{f"k3_sum/{arm}": float(v[members].sum()) for arm, v in terms.items()},
            }
        )
    return rows


def agreement_row(sample: RolloutResult, native: LogprobResult) -> Row:
    """Routes of the rollout against a forward without any replay, in all and by layer."""
    assert native.trace is not None
    compared = agreement(sample.trace, native.trace)
    prefix = "agreement/rollout_native/"
    layers = zip(sample.trace.header.moe_layers, compared.router_flip_by_layer(), strict=True)
    by_layer = {f"{prefix}router_flip/layer_{layer}": None if np.isnan(rate) else float(rate) for layer, rate in layers}
    return {**compared.scalars(prefix), **by_layer}


def replay_row(
    sample: RolloutResult,
    old: LogprobResult,
    old_replay: Replay | None,
    updates: Sequence[tuple[torch.Tensor, UpdateResult]],
    update_replay: Replay | None,
) -> Row:
    """Coverage of the rollout's record, and how much of it was planned and bound in each pass; zeros without replay.

    nominal: planned over valid units. forced_routers: share of the recorded cells whose executed set differs from
    `native_local`, the live choice inside the replayed forward.
    """
    coverage = sample.trace.coverage()
    forced, changed = (sum(getattr(u.counts, name) for _, u in updates) for name in ("forced_units", "changed_cells"))
    return {
        "replay/coverage": coverage["recorded"],
        "replay/missing": coverage["missing"],
        "replay/old/nominal": _nominal(old.counts.forced_units, old_replay),
        "replay/old/forced_routers_native_local": _share(old.counts.changed_cells, old_replay),
        "replay/update/nominal": _nominal(forced, update_replay),
        "replay/update/forced_routers_native_local": _share(changed, update_replay),
    }


def _share(cells: int, replay: Replay | None) -> float:
    return cells / max(1, int(replay.trace.recorded.sum())) if replay is not None else 0.0


def _nominal(units: int, replay: Replay | None) -> float:
    return units / max(1, replay.plan.valid) if replay is not None else 0.0


def update_row(updates: Sequence[tuple[torch.Tensor, UpdateResult]], tokens: int) -> Row:
    """Loss, gradient norm and clipping of the updates of one batch."""
    return {
        "update/loss": float(np.mean([u.loss for _, u in updates])),
        "update/grad_norm": float(np.mean([u.grad_norm for _, u in updates])),
        "update/grad_norm_max": float(np.max([u.grad_norm for _, u in updates])),
        "update/clip_fraction": sum(u.statistics.get("clipped", 0.0) for _, u in updates) / max(1, tokens),
        "update/count": len(updates),
    }
