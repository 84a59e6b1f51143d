"""What one step of a run measures: plain rows, one name a number, the pair of sources in the name.

reward/, groups/, response/   what was sampled
mismatch/rollout_old/         the run's own old pass against the rollout (metrics/mismatch.py)
mismatch/old_new/             the updates against the old pass
mismatch/rollout_new/         the updates against the rollout
factorisation/                log(new/rollout) = log(old/rollout) + log(new/old), means in nats
paired/{none,R3}/rollout_old/ the same tokens scored natively and under full R3, whatever the run's own mode
agreement/rollout_native/     routes of the rollout against a forward without any replay (native_free)
margin/native/                s_(K) - s_(K+1) of that forward
load/rollout/                 how evenly the rollout used the experts: the worst layer of each number
drift/                        routing of the same tokens since the start and in this step (probe.py)
evaluation/                   held-out prompts (evaluate.py)
replay/                       what replay did: the columns of a ReplayDiagnostics record
noise_floor/                  each engine against itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from rar_lib.config import JobConfig
from rar_lib.engines.base import NOTHING_FORCED, LogprobResult, Replay, RolloutResult, TokenBatch, UpdateResult
from rar_lib.metrics.agreement import agreement, flip_clustering, margin_auc
from rar_lib.metrics.load import load_table
from rar_lib.metrics.mismatch import bad_update_fraction, factorisation, k3_terms, mismatch, sequence_log_ratios
from rar_lib.metrics.replay import binding_share, drift, forced_routers, target_shift
from rar_lib.replay.counts import PassCounts
from rar_lib.replay.diagnostics import PassDiagnostics, ReplayDiagnostics, ScoreDiagnostics
from rar_lib.replay.resolve import resolve_biased
from rar_lib.replay.scores import ExpertScore
from rar_lib.replay.stability import Stability
from rar_lib.traces.trace import RouteTrace, Status

Row = dict[str, Any]
TAU = 2.0
BAD_DELTA = 0.1  # of the probability of a token


def rollout_logprobs(batch: TokenBatch, sample: RolloutResult) -> torch.Tensor:
    """`[S, T]` float32: the log-probs that the rollout engine reported, at the tokens that they speak of."""
    out = torch.zeros(batch.tokens.shape)
    out[batch.response_mask] = torch.tensor([value for row in sample.logprobs for value in row], dtype=torch.float32)
    return out


def sample_row(rewards: torch.Tensor, batch: TokenBatch, sample: RolloutResult, flat_groups: int) -> Row:
    """What was sampled.

    Args:
        rewards: `[S]` float32.
        batch, sample: the tokens, and how they were sampled.
        flat_groups: groups whose answers all have the same reward.
    """
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
    mu: torch.Tensor,
    old: torch.Tensor,
    updates: Sequence[tuple[torch.Tensor, UpdateResult]],
    mask: torch.Tensor,
    advantages: torch.Tensor,
) -> Row:
    """The three pairs of log-prob sources; `new` is each token's log-prob in the update that it took part in.

    Beside the token statistics: the extremes of seq_ratio and geo_ratio of the answers (old/rollout; GSPO, arXiv 2507.18071), the share of
    bad updates (arXiv 2602.04879), and the means of the factorisation.

    Args:
        mu, old: `[S, T]` log-probs in nats.
        updates: of each update, its rows `[n]` int64 of the batch and what came out.
        mask: `[S, T]` bool, response tokens.
        advantages: `[S]`.
    """
    new = torch.zeros_like(old)
    for rows, update in updates:
        new[rows] = update.logprobs
    return {
        **mismatch(old, mu, mask, prefix="mismatch/rollout_old/", tau=TAU),
        **mismatch(new, old, mask, prefix="mismatch/old_new/", tau=TAU),
        **mismatch(new, mu, mask, prefix="mismatch/rollout_new/", tau=TAU),
        **_of_sequences(old, mu, mask),
        f"mismatch/rollout_new/bad_update_delta{BAD_DELTA:g}": bad_update_fraction(
            new, mu, advantages[:, None].expand(new.shape), mask, BAD_DELTA
        ),
        **_factorised(mu, old, new, mask),
    }


def _of_sequences(old: torch.Tensor, mu: torch.Tensor, mask: torch.Tensor) -> Row:
    """Largest exp(ΣΔ), smallest and largest exp(mean Δ) of an answer; None without answers."""
    total, mean = sequence_log_ratios(old, mu, mask)
    some = np.isfinite(mean)
    extremes = (total[some].max(), mean[some].min(), mean[some].max()) if some.any() else (None, None, None)
    names = ("seq_ratio_max", "geo_ratio_min", "geo_ratio_max")
    return {
        f"mismatch/rollout_old/{name}": None if v is None else float(np.exp(v))
        for name, v in zip(names, extremes, strict=True)
    }


def _factorised(mu: torch.Tensor, old: torch.Tensor, new: torch.Tensor, mask: torch.Tensor) -> Row:
    """Means in nats of total, engines and drift, and the largest error of their sum."""
    if not mask.any():
        return {}
    total, engines, drifted = factorisation(mu, old, new, mask)
    return {
        "factorisation/new_rollout": float(total.mean()),
        "factorisation/old_rollout": float(engines.mean()),
        "factorisation/new_old": float(drifted.mean()),
        "factorisation/error_max": float(np.abs(total - engines - drifted).max()),
    }


def paired_row(mu: torch.Tensor, scored: Mapping[str, LogprobResult], mask: torch.Tensor) -> Row:
    """The same tokens under `none` and under `R3`: k3 and mean |Δ| in nats, share of extreme tokens, largest ratio.

    Args:
        mu: `[S, T]` log-probs of the rollout in nats.
        scored: arm -> the pass that scored it.
        mask: `[S, T]` bool, response tokens.
    """
    names = ("k3", f"extreme_fraction_tau{TAU:g}", "ratio_max", "abs_mean")
    row: Row = {}
    for arm, result in scored.items():
        values = mismatch(result.logprobs, mu, mask, tau=TAU)
        row |= {f"paired/{arm}/rollout_old/{name}": values[name] for name in names}
    return row


def paired_by_prompt(
    step: int, mu: torch.Tensor, scored: Mapping[str, LogprobResult], batch: TokenBatch, sample: RolloutResult
) -> list[Row]:
    """A row a prompt: tokens, cells, flipped ones and the sum of k3 (nats) under each arm, for intervals clustered by prompt.

    Args:
        step: number of the step.
        mu: `[S, T]` log-probs of the rollout in nats.
        scored: arm -> the pass that scored it; `none` with its routes.
        batch, sample: the tokens, and how they were sampled.
    """
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
    """Routes of the rollout against a forward without any replay, in all and by layer, and the margins of that forward.

    Args:
        sample: what was sampled.
        native: the pass without replay, with its routes and, for margin/ columns, their margins.
    """
    assert native.trace is not None
    compared = agreement(sample.trace, native.trace)
    prefix = "agreement/rollout_native/"
    layers = zip(sample.trace.header.moe_layers, compared.router_flip_by_layer(), strict=True)
    by_layer = {f"{prefix}router_flip/layer_{layer}": None if np.isnan(rate) else float(rate) for layer, rate in layers}
    clustering = flip_clustering(compared, permutations=20, seed=0)
    row: Row = {**compared.scalars(prefix), **by_layer, f"{prefix}dispersion": clustering["dispersion"]}
    if native.trace.margins is not None:
        finite = native.trace.margins[compared.known & np.isfinite(native.trace.margins)]
        if finite.size:
            row |= {f"margin/native/p{100 * q:g}": float(np.quantile(finite, q)) for q in (0.1, 0.5, 0.9)}
        row["margin/native/auc"] = margin_auc(native.trace.margins, compared.flipped, compared.known)
    return row


def load_row(sample: RolloutResult) -> Row:
    """How evenly the rollout used the experts: of each number the worst layer."""
    table = load_table(sample.trace)
    return {
        "load/rollout/max_vio": float(table["max_vio"].max()),
        "load/rollout/cv": float(table["cv"].max()),
        "load/rollout/effective_experts": float(table["effective_experts"].min()),
        "load/rollout/dead": int(table["dead"].max()),
    }


def token_table(
    step: int,
    batch: TokenBatch,
    sample: RolloutResult,
    mu: torch.Tensor,
    old: torch.Tensor,
    scored: Mapping[str, LogprobResult],
) -> pd.DataFrame:
    """A row a response token: what the figures of single tokens are drawn from.

    Args:
        step: number of the step.
        batch, sample: the tokens, and how they were sampled.
        mu, old: `[S, T]` log-probs of the rollout and of the run's own old pass, in nats.
        scored: arm -> the pass that scored it; `none` with its routes.

    Returns:
        step, prompt (its number in the batch), sequence, position, token, logp_rollout, logp_old (the run's own old pass), logp_{arm} for every arm that was scored (nats), layers_flipped and
        smallest_margin of the router calls that it was computed from, those at the token before it.
    """
    native = scored["none"].trace
    assert native is not None
    flips = agreement(sample.trace, native).flipped.sum(1)
    inside, response = batch.token_mask, batch.response_mask
    row, column = (part.numpy() for part in response.nonzero(as_tuple=True))
    place = np.cumsum(inside.numpy().ravel()).reshape(inside.shape) - 1  # of each token in the packed order
    before = place[row, column] - 1  # a response has a prompt, so the token before it is of the same sequence
    table = {
        "step": step, "prompt": batch.groups.numpy()[row], "sequence": row, "position": column, "token": batch.tokens[response].numpy(),
        "logp_rollout": mu[response].numpy(), "logp_old": old[response].numpy(),
        **{f"logp_{arm}": result.logprobs[response].numpy() for arm, result in scored.items()},
        "layers_flipped": flips[before],
    }  # fmt: skip
    if native.margins is not None:
        table["smallest_margin"] = native.margins[before].min(1)
    return pd.DataFrame(table)


def replay_diagnostics(
    config: JobConfig,
    step: int,
    sample: RolloutResult,
    old: tuple[LogprobResult, Replay | None],
    updates: tuple[Sequence[UpdateResult], Replay | None],
    mask: torch.Tensor,
    *,
    native: LogprobResult | None = None,
    native_after: LogprobResult | None = None,
    score: ExpertScore | None = None,
) -> ReplayDiagnostics:
    """What replay did in a step.

    Args:
        config: of the run.
        step: number of the step.
        sample: the rollout.
        old: the old pass and what it replayed.
        updates: the updates of the batch and what they replayed.
        mask: `[S, T]`, response tokens.
        native: a forward without replay at the weights that sampled; without it, what compares with it is null.
        native_after: the same after the updates.
        score: of the plan.
    """
    replay = updates[1]
    free = None if native is None else native.trace
    record: dict[str, Any] = {
        "policy": None,
        "unit": None,
        "seed": config.router_replay.seed,
        "valid": 0,
        "budget": 0,
        "nominal": 0.0,
    }
    if replay is not None:
        plan = replay.plan
        record |= {
            "policy": plan.policy, "unit": plan.unit, "requested": None if plan.requested is None else str(plan.requested),
            "valid": plan.valid, "budget": plan.budget, "nominal": plan.nominal, "trace_digest": plan.trace_digest,
            "bias": None if plan.bias is None else float(plan.bias.max()), "planned_by_layer": _by_layer(plan.planned),
        }  # fmt: skip
        if free is not None:
            record |= _binding(replay, free)
            if native_after is not None and native_after.trace is not None:
                moved = drift(free.experts, native_after.trace.experts, plan.planned, free.recorded)
                record |= {"drift_planned": moved[0], "drift_unplanned": moved[1]}
    if score is not None:
        stable = score.stability or Stability(None, None, None)
        record["score"] = ScoreDiagnostics(
            id=score.id, unscored=score.unscored, tokens=score.tokens, spearman=stable.spearman,
            null_low=stable.null_low, null_high=stable.null_high,
        )  # fmt: skip
    counts = NOTHING_FORCED
    for update in updates[0]:
        counts = counts + update.counts
    return ReplayDiagnostics(
        step=step,
        mode=config.router_replay.arm,
        missing=int((sample.trace.status == Status.MISSING).sum()) if sample.trace.status.ndim == 2 else
        int((sample.trace.status == Status.MISSING).sum()) * sample.trace.header.num_layers,
        target_shift=None if native is None else target_shift(old[0].logprobs, native.logprobs, mask),
        old=_pass(old[0].counts, old[1]),
        update=_pass(counts, replay),
        **record,
    )  # fmt: skip


def _pass(counts: PassCounts, replay: Replay | None) -> PassDiagnostics:
    if replay is None:
        return PassDiagnostics(forced_routers_native_local=0.0)
    cells, recorded = counts.cells, int(replay.trace.recorded.sum())
    return PassDiagnostics(
        nominal=counts.forced_units / max(1, replay.plan.valid),
        forced_routers_native_local=counts.changed_cells / max(1, recorded),
        fidelity=counts.kept / (cells * replay.trace.header.top_k) if cells else None,
        regret=counts.regret / cells if cells and counts.regret is not None else None,
        executed_equals_resolved=counts.executed_equals_resolved,
        router_gradient_forced=counts.router_gradient("forced"),
        router_gradient_free=counts.router_gradient("free"),
    )


def _by_layer(planned: np.ndarray) -> list[int]:
    return planned.sum(tuple(axis for axis in range(planned.ndim) if axis != 1)).tolist()


def _binding(replay: Replay, free: RouteTrace) -> Row:
    """Binding share against native_free, in all and by layer."""
    trace = replay.trace
    layers = range(trace.header.num_layers)
    return {
        "binding": plan_binding(replay, free),
        "binding_by_layer": [plan_binding(replay, free, slice(i, i + 1)) for i in layers],
    }


def plan_binding(replay: Replay, free: RouteTrace, layers: slice = slice(None)) -> float | None:
    """Planned units whose route is not native anyway, over the valid units; for unit bias, cells that λ would change.

    Args:
        replay: record and plan.
        free: routes of a forward without replay; for unit bias with its scores, else the answer is None.
        layers: columns to look at.
    """
    plan, recorded, native = replay.plan, replay.trace.experts[:, layers], free.experts[:, layers]
    known = (replay.trace.recorded & free.recorded)[:, layers]
    if plan.bias is None:
        return binding_share(plan.planned[:, layers], recorded, native, known)
    if free.scores is None:
        return None
    used = native.astype(np.int64)
    for column, bias in enumerate(plan.bias[layers]):
        rows = [torch.from_numpy(ids[:, column].astype(np.int64)) for ids in (recorded, native)]
        planned, scores = torch.from_numpy(known[:, column]), torch.from_numpy(free.scores[:, layers][:, column])
        used[:, column] = resolve_biased(rows[0], planned, scores, rows[1], torch.from_numpy(bias)).numpy()
    return forced_routers(native, used, known)


def update_row(updates: Sequence[tuple[torch.Tensor, UpdateResult]], tokens: int) -> Row:
    """Loss, gradient norm, clipping and the means of what else the objective reported, of the updates of one batch.

    Args:
        updates: of each, its rows `[n]` int64 of the batch and what came out.
        tokens: response tokens of the batch.
    """
    return {
        "update/loss": float(np.mean([u.loss for _, u in updates])),
        "update/grad_norm": float(np.mean([u.grad_norm for _, u in updates])),
        "update/grad_norm_max": float(np.max([u.grad_norm for _, u in updates])),
        "update/clip_fraction": sum(u.statistics.get("clipped", 0.0) for _, u in updates) / max(1, tokens),
        "update/count": len(updates),
        **{
            f"update/{name}_mean": sum(u.statistics[name] for _, u in updates) / max(1, tokens)
            for name in ("weight", "kept", "gamma")
            if all(name in u.statistics for _, u in updates)
        },
    }
