"""From runs to tables: what a person looks at, and the tidy tables that figures are drawn from.

The comparison that counts is paired: every batch of every run was scored natively and under full R3, on the same tokens
at the same weights. Its interval resamples prompts, not tokens, since the samples of a prompt are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from rar_lib.errors import ConfigError

if TYPE_CHECKING:
    from rar_lib.runs.result import RunResult

RESAMPLES = 2000
FEWEST_CLUSTERS = 10  # a percentile interval over fewer prompts is too narrow to be shown


def paired_ratio(paired: pd.DataFrame, *, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, float | None]:
    """k3 (rollout/old) under R3 over k3 under none, on the same tokens, with a 95 % interval clustered by prompt.

    Args:
        paired: rows a step and prompt with `prompt`, `k3_sum/none` and `k3_sum/R3`, as in a run folder's
            paired.parquet; several runs may be joined, since a prompt that they share is one cluster.
        seed: of the bootstrap.
        resamples: bootstrap draws; a percentile interval. In a simulation with heavy-tailed prompts (lognormal,
            σ = 1 to 3) it covered 90-93 % at 64 prompts and 92-95 % at 1280, better than BCa, the delta method on the
            log ratio and the bootstrap-t.

    Returns:
        ratio, low, high; all None if k3 under none is 0, or fewer than 10 prompts were paired.
    """
    if paired.empty or paired["prompt"].nunique() < FEWEST_CLUSTERS:
        return {"ratio": None, "low": None, "high": None}
    sums = paired.groupby("prompt")[["k3_sum/none", "k3_sum/R3"]].sum()
    none, full = (sums[f"k3_sum/{arm}"].to_numpy(float) for arm in ("none", "R3"))
    if none.sum() == 0:
        return {"ratio": None, "low": None, "high": None}
    draws = np.random.default_rng(seed).integers(0, len(none), (resamples, len(none)))
    below = none[draws].sum(1)
    ratios = full[draws].sum(1)[below > 0] / below[below > 0]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return {"ratio": float(full.sum() / none.sum()), "low": float(low), "high": float(high)}


def pooled(runs: Sequence[RunResult]) -> pd.DataFrame:
    """The paired rows of several runs; a prompt that they share is one cluster.

    Raises:
        ConfigError: if the runs paired nothing.
    """
    paired = pd.concat([run.paired for run in runs], ignore_index=True)
    if paired.empty:
        raise ConfigError("nothing was paired; these runs had diagnostics.enabled=false")
    return paired


def ratio_table(groups: Mapping[str, Sequence[RunResult]]) -> pd.DataFrame:
    """The paired ratio as numbers, a row a named group of runs: group, ratio, low, high; undefined ones are absent."""
    rows = [{"group": name, **paired_ratio(pooled(runs))} for name, runs in groups.items()]
    return (
        pd.DataFrame(rows, columns=["group", "ratio", "low", "high"])
        .dropna(ignore_index=True)
        .astype({"ratio": float, "low": float, "high": float})
    )


def paired_table(groups: Mapping[str, Sequence[RunResult]]) -> pd.DataFrame:
    """The paired comparison as text, a row a named group: flips and k3 natively and under R3 on the same tokens.

    Args:
        groups: name -> runs whose batches are pooled.
    """
    rows = []
    for name, runs in groups.items():
        paired = pooled(runs)
        tokens = paired["tokens"].sum()
        rows.append(
            {
                "rollout": name,
                "prompts": str(paired["prompt"].nunique()),
                "tokens": str(tokens),
                "router flip": _number(paired["flips"].sum() / paired["cells"].sum(), ".4f"),
                "k3 none": _number(paired["k3_sum/none"].sum() / tokens, ".2e"),
                "k3 R3": _number(paired["k3_sum/R3"].sum() / tokens, ".2e"),
                "R3 / none [95 %]": _interval(paired_ratio(paired)),
            }
        )
    return pd.DataFrame(rows)


def worst_noise_floor(runs: Sequence[RunResult]) -> float | None:
    """The largest k3 that an engine of these runs showed against itself; None if none was measured."""
    return _largest(*(run.summary[f"noise_floor_{part}"] for run in runs for part in ("rollout", "trainer")))


def policy_table(runs: Sequence[RunResult]) -> pd.DataFrame:
    """One row a run, as text of fixed precision; what is undefined says so."""
    rows = []
    for run in runs:
        summary, ratio = run.summary, paired_ratio(run.paired)
        rows.append(
            {
                "policy": run.label,
                "reward first": _number(summary["reward_first"], ".3f"),
                "reward last": _number(summary["reward_last"], ".3f"),
                "k3 rollout/old": _number(summary["k3_rollout_old"], ".2e"),
                "k3 old/new": _number(summary["k3_old_new"], ".2e"),
                "F(2)": _number(summary["extreme_fraction_tau2"], ".2e"),
                "router flip": _number(summary["router_flip"], ".4f"),
                "coverage": _number(summary["coverage"], ".4f"),
                "noise floor": _number(_largest(summary["noise_floor_rollout"], summary["noise_floor_trainer"]), ".1e"),
                "k3 R3/none, same tokens": _interval(ratio),
            }
        )
    return pd.DataFrame(rows)


def step_table(runs: Sequence[RunResult], columns: dict[str, str]) -> pd.DataFrame:
    """Tidy: a row a run, step and quantity.

    Args:
        runs: complete runs.
        columns: metric column -> name of the quantity.

    Returns:
        policy, seed, step, quantity, value; steps where it was not measured are absent.
    """
    parts = [
        pd.DataFrame(
            {
                "policy": run.label,
                "seed": run.summary["seed"],
                "step": run.metrics["step"],
                "quantity": name,
                "value": run.metrics[column],
            }
        )
        for run in runs
        for column, name in columns.items()
        if column in run.metrics
    ]
    return pd.concat(parts, ignore_index=True).dropna(subset=["value"])


def layer_flip_table(runs: Sequence[RunResult]) -> pd.DataFrame:
    """Tidy: router flips of the rollout against a native forward: policy, seed, step, layer, value."""
    prefix = "agreement/rollout_native/router_flip/layer_"
    parts = [
        pd.DataFrame(
            {
                "policy": run.label,
                "seed": run.summary["seed"],
                "step": run.metrics["step"],
                "layer": int(str(column).removeprefix(prefix)),
                "value": run.metrics[column],
            }
        )
        for run in runs
        for column in run.metrics
        if str(column).startswith(prefix)
    ]
    if not parts:
        raise ConfigError("no flips by layer were measured; these runs had diagnostics.enabled=false")
    return pd.concat(parts, ignore_index=True)


def _largest(*values: float | None) -> float | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None


def _number(value: float | None, form: str) -> str:
    return "undefined" if value is None else format(value, form)


def _interval(ratio: dict[str, float | None]) -> str:
    if ratio["ratio"] is None:
        return "undefined"
    return f"{ratio['ratio']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
