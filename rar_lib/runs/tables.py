"""From run folders to the tidy tables that figures show. No engine, no model: what a run wrote is enough.

Names are those of the figures. A run without what a figure needs (diagnostics off, traces not kept) raises ConfigError, which says
what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from rar_lib.engines.base import TokenBatch
from rar_lib.errors import ConfigError
from rar_lib.metrics.agreement import agreement, churn_matrix, flip_clustering, margin_auc, poisson_binomial
from rar_lib.metrics.load import load, route_counts
from rar_lib.runs.store import differing
from rar_lib.traces.trace import RouteTrace

if TYPE_CHECKING:
    from rar_lib.runs.result import RunResult

TAUS = np.round(np.geomspace(1.05, 10, 25), 4)


def traces(run: RunResult, step: int | None = None) -> tuple[int, RouteTrace, RouteTrace]:
    """A step whose traces were kept, by default the last, with the rollout's and the trainer's native routes.

    Raises:
        ConfigError: if that step's traces were not kept.
    """
    kept = sorted(int(p.name[5:11]) for p in (run.path / "traces").glob("step-*-rollout.safetensors"))
    if not kept or (step is not None and step not in kept):
        wanted = "any step" if step is None else f"step {step}"
        raise ConfigError(f"{run.path.name}: no traces of {wanted} were kept; those of steps {kept} were")
    step = kept[-1] if step is None else step
    folder = run.path / "traces"
    rollout, native = (
        RouteTrace.load(folder / f"step-{step:06d}-{side}.safetensors") for side in ("rollout", "native")
    )
    return step, rollout, native


def require_distinct(runs: Sequence[RunResult]) -> None:
    """Refuse runs that a figure would draw as one: the same label and seed.

    Raises:
        ConfigError: names both and what they differ in.
    """
    seen: dict[tuple[str, int], RunResult] = {}
    for run in runs:
        other = seen.setdefault((run.label, run.summary["seed"]), run)
        if other.path != run.path:
            theirs, mine = (json.loads((r.path / "config.json").read_text())["config"] for r in (other, run))
            told = "; ".join(differing(theirs, mine)) or "nothing that a label says"
            raise ConfigError(
                f"{other.path.name} and {run.path.name} would both be drawn as {run.label!r}, seed {run.summary['seed']}: {told}. Draw them apart"
            )


def reward_table(runs: Sequence[RunResult]) -> pd.DataFrame:
    """policy, seed, step, value: mean reward of the sampled batches.

    Raises:
        ConfigError: if two runs are of one name and seed, or none has a step.
    """
    return _column(runs, "reward/mean")


def held_out_table(runs: Sequence[RunResult]) -> pd.DataFrame:
    """policy, seed, step, value: reward served on held-out prompts after `step` steps, the start and the end among them.

    Raises:
        ConfigError: if no run has held-out prompts.
    """
    rows = []
    for run in runs:
        summary = run.summary
        seen = [(0, summary.get("evaluation_first")), (summary["steps"], summary.get("evaluation_last"))]
        if "evaluation/reward" in run.metrics:
            seen += [(int(s) + 1, v) for s, v in run.metrics[["step", "evaluation/reward"]].dropna().to_numpy()]
        rows += [
            {"policy": run.label, "seed": summary["seed"], "step": step, "value": value}
            for step, value in sorted(seen, key=lambda pair: pair[0])
            if value is not None
        ]
    if not rows:
        raise ConfigError("no held-out prompts were evaluated in these runs (evaluation.prompts=0)")
    return pd.DataFrame(rows)


def kl_table(runs: Sequence[RunResult]) -> pd.DataFrame:
    """policy, seed, value: k3 (rollout/old) of each run in nats, the mean over its tokens; where it is 0, as re-scored samples have it,
    left out."""
    require_distinct(runs)
    rows = [{"policy": r.label, "seed": r.summary["seed"], "value": r.summary["k3_rollout_old"]} for r in runs]
    return pd.DataFrame([row for row in rows if row["value"]], columns=["policy", "seed", "value"])


def token_table(runs: Sequence[RunResult]) -> pd.DataFrame:
    """policy, seed, step, prompt, logp_rollout, logp_train (nats), flipped (in some layer): single tokens of the kept steps.

    Of one run its tokens scored under none and under R3, and under its own policy if that is another; of several runs each under its
    own policy, in its old pass.

    Raises:
        ConfigError: if no run kept tokens, or two runs are of one name and seed.
    """
    require_distinct(runs)
    parts = []
    for run in runs:
        tokens = run.tokens()
        sides = {run.label: "old"}
        if len(tokens) and not {"prompt", "logp_old"} <= set(tokens):
            raise ConfigError(
                f"{run.path.name}: its tokens were written by an earlier version of the library: run it again"
            )
        if len(runs) == 1:
            arms = {arm: arm for arm in ("none", "R3") if f"logp_{arm}" in tokens}
            same = any((tokens["logp_old"] == tokens[f"logp_{arm}"]).all() for arm in arms)
            sides = arms | ({} if same else sides)
        for policy, side in sides.items():
            if len(tokens):
                part = tokens[["step", "prompt", "logp_rollout"]].assign(
                    policy=policy, seed=run.summary["seed"], logp_train=tokens[f"logp_{side}"], flipped=tokens["layers_flipped"] > 0
                )  # fmt: skip
                parts.append(part)
    if not parts:
        raise ConfigError(
            "no single tokens were kept in these runs (diagnostics.enabled=false, or none but runs without a mismatch)"
        )
    return pd.concat(parts, ignore_index=True)


def extreme_table(tokens: pd.DataFrame, *, seed: int = 0, resamples: int = 500) -> pd.DataFrame:
    """policy, tau, fraction, low, high: F(τ) (arXiv 2510.11370) of the token_table, with a 95 % bootstrap over prompts.

    A prompt of one seed and step is one cluster, whatever the run: its answers are alike, and runs of one seed begin with the same tokens.

    Args:
        tokens: as token_table gives them.
        seed, resamples: of the bootstrap.
    """
    rows = []
    for policy, part in tokens.groupby("policy", sort=False):
        gap = (part["logp_train"] - part["logp_rollout"]).abs().to_numpy()
        cluster = part.groupby(["seed", "step", "prompt"], sort=False).ngroup().to_numpy()
        sizes = np.bincount(cluster)
        weights = np.random.default_rng(seed).multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), resamples)
        for tau in np.unique(np.r_[TAUS, 2.0]):
            beyond = gap > np.log(tau)
            draws = (weights @ np.bincount(cluster, beyond, len(sizes))) / (weights @ sizes)
            low, high = np.percentile(draws, [2.5, 97.5])
            rows.append({"policy": policy, "tau": tau, "fraction": beyond.mean(), "low": low, "high": high})
    return pd.DataFrame(rows)


def margin_table(
    run: RunResult, step: int | None = None, *, groups: int = 12, seed: int = 0, resamples: int = 500
) -> tuple[pd.DataFrame, float | None]:
    """margin, flips, low, high, cells: share of flips in groups of equal size by the trainer's native margin; and the AUC.

    The interval is a 95 % bootstrap over prompts; the AUC is of small margins against flips, None if all or no cells flip.

    Args:
        run: that kept traces.
        step: whose traces, by default the last that were kept.
        groups: of cells.
        seed, resamples: of the bootstrap.

    Raises:
        ConfigError: if no traces of the step were kept, or they carry no margins.
    """
    _, rollout, native = traces(run, step)
    if native.margins is None:
        raise ConfigError(f"{run.path.name}: its native trace carries no margins")
    compared = agreement(rollout, native)
    use = compared.known & np.isfinite(native.margins)
    margins, flipped = native.margins[use], compared.flipped[use]
    prompt = np.broadcast_to(np.repeat(prompts_of(rollout), rollout.lengths)[:, None], use.shape)[use]
    count = int(prompt.max(initial=-1)) + 1
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / max(count, 1)), resamples)
    rows = []
    for members in np.array_split(np.argsort(margins, kind="stable"), groups):
        if len(members):
            flips, cells = (np.bincount(prompt[members], w, count) for w in (flipped[members], None))
            drawn = weights @ cells
            low, high = np.percentile((weights @ flips)[drawn > 0] / drawn[drawn > 0], [2.5, 97.5])
            rows.append({"margin": float(np.median(margins[members])), "flips": float(flips.sum() / cells.sum()), "low": low,
                         "high": high, "cells": len(members)})  # fmt: skip
    return pd.DataFrame(rows), margin_auc(native.margins, compared.flipped, use)


def prompts_of(rollout: RouteTrace) -> np.ndarray:
    """`[S]` int64: which prompt each answer of a rollout trace answers, by its tokens up to the first that was sampled."""
    batch = TokenBatch.of_trace(rollout)
    seen: dict[tuple[int, ...], int] = {}
    prompts = [tuple(row[:n].tolist()) for row, n in zip(batch.tokens, batch.prompt_lengths.tolist(), strict=True)]
    return np.array([seen.setdefault(prompt, len(seen)) for prompt in prompts], np.int64)


def load_pair(run: RunResult) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Load of each expert on the probe's tokens at the start of the run and at its end, each `[L, E]`, and the layer numbers.

    Raises:
        ConfigError: if the run kept no probe.
    """
    start, end = probe_traces(run)
    return load(route_counts(start)), load(route_counts(end)), start.header.moe_layers


def load_pair_table(before: np.ndarray, after: np.ndarray, layers: Sequence[int]) -> pd.DataFrame:
    """layer, expert, before, after: what the load maps show, from loads `[L, E]` and the L layer numbers."""
    experts = before.shape[1]
    return pd.DataFrame(
        {"layer": np.repeat(layers, experts), "expert": np.tile(np.arange(experts), len(layers)), "before": before.ravel(),
         "after": after.ravel()}
    )  # fmt: skip


def drift_tables(run: RunResult) -> tuple[pd.DataFrame, pd.DataFrame]:
    """step, layer, value (share of the probe's cells that moved since the start); and step, gamma_p50, gamma_p10, gamma_p1 (RSPO's γ of a
    step, see probe.py).

    Raises:
        ConfigError: if the run kept no probe.
    """
    prefix = "drift/start/router_flip/layer_"
    columns = [str(c) for c in run.metrics if str(c).startswith(prefix)]
    if not columns:
        raise ConfigError(f"{run.path.name}: no routing drift was measured (diagnostics.probe_sequences=0)")
    wide = run.metrics[["step", *columns]].rename(columns={c: int(c.removeprefix(prefix)) for c in columns})
    layers = wide.melt("step", var_name="layer", value_name="value").astype({"layer": int})
    names = {f"drift/step/{name}": name for name in ("gamma_p50", "gamma_p10", "gamma_p1")}
    return layers, run.metrics[["step", *names]].rename(columns=names)


def depth_table(run: RunResult, step: int | None = None, *, seed: int = 0) -> tuple[pd.DataFrame, float | None]:
    """layers, observed, independent, permuted: shares of tokens by number of flipped layers; and the dispersion.

    `independent` is the Poisson-binomial of the layers' own rates, `permuted` the mean of 50 permutations of the tokens within each layer;
    only tokens that are recorded in every layer count.

    Raises:
        ConfigError: if there is no such token, or no traces of the step were kept.
    """
    _, rollout, native = traces(run, step)
    compared = agreement(rollout, native)
    flips = compared.flipped[compared.full_rows]
    if not len(flips):
        raise ConfigError(f"{run.path.name}: no token is recorded in every layer")
    count = flips.shape[1] + 1
    rng = np.random.default_rng(seed)
    permuted = np.mean(
        [np.bincount(rng.permuted(flips, axis=0).sum(1), minlength=count) / len(flips) for _ in range(50)], axis=0
    )
    table = pd.DataFrame(
        {"layers": np.arange(count), "observed": np.bincount(flips.sum(1), minlength=count) / len(flips),
         "independent": poisson_binomial(flips.mean(0)), "permuted": permuted}
    )  # fmt: skip
    return table, flip_clustering(compared, seed=seed)["dispersion"]


def flow_table(a: RouteTrace, b: RouteTrace, layer: int | None = None) -> tuple[int, pd.DataFrame]:
    """The layer's number, and source, target, share of every exchange of an expert from A to B in it (metrics.agreement.churn_matrix).

    Args:
        a, b: records of the same tokens.
        layer: transformer layer number, by default that with the most exchanges.
    """
    churn = churn_matrix(a, b)
    numbers = a.header.moe_layers
    place = int(churn.sum((1, 2)).argmax()) if layer is None else numbers.index(layer)
    source, target = np.nonzero(churn[place])
    table = pd.DataFrame({"source": source, "target": target, "share": churn[place][source, target]})
    return numbers[place], table


def drift_flow(run: RunResult, layer: int | None = None) -> tuple[int, pd.DataFrame]:
    """flow_table from the start of the run to its end, on the probe's tokens."""
    return flow_table(*probe_traces(run), layer)


def probe_traces(run: RunResult) -> tuple[RouteTrace, RouteTrace]:
    """The probe's native routes at the start of the run and after its last step.

    Raises:
        ConfigError: if the run kept no probe.
    """
    folder = run.path / "traces"
    start, later = folder / "probe-start.safetensors", sorted(folder.glob("step-*-probe.safetensors"))
    if not start.exists() or not later:
        raise ConfigError(f"{run.path.name}: no routing probe was kept (diagnostics.probe_sequences=0)")
    return RouteTrace.load(start), RouteTrace.load(Path(later[-1]))


def _column(runs: Sequence[RunResult], column: str) -> pd.DataFrame:
    require_distinct(runs)
    parts = [
        pd.DataFrame(
            {"policy": r.label, "seed": r.summary["seed"], "step": r.metrics["step"], "value": r.metrics[column]}
        )
        for r in runs
        if column in r.metrics
    ]
    if not parts:
        raise ConfigError(
            f"no step of these runs has {column}; they diverged at their first step, or it was not measured"
        )
    return pd.concat(parts, ignore_index=True).dropna(subset=["value"])
