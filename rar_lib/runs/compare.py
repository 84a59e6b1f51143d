"""From runs to tables: what a person looks at, and the tidy tables that figures are drawn from.

The comparison that counts is paired: every batch of every run was scored natively and under full R3, on the same tokens
at the same weights. Its interval resamples prompts, not tokens, since the samples of a prompt are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from rar_lib.errors import ConfigError
from rar_lib.metrics.mismatch import mismatch

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
    """The largest k3 (nats a token) that an engine of these runs showed against itself; None if none was measured."""
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

    Raises:
        ConfigError: if none of the columns was measured in any run.
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
    if not parts:
        raise ConfigError(
            f"steps: expected one of {', '.join(columns)} among the metrics of {len(runs)} runs, found none of them"
        )
    return pd.concat(parts, ignore_index=True).dropna(subset=["value"])


def layer_flip_table(runs: Sequence[RunResult]) -> pd.DataFrame:
    """Tidy: router flips of the rollout against a native forward: policy, seed, step, layer, value (share of the layer's cells).

    Raises:
        ConfigError: if no run measured them.
    """
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


MISMATCH_SHOWN = {
    "k1": ".2e", "k3": ".2e", "extreme_fraction_tau2": ".2e", "abs_p50": ".1e", "abs_p95": ".1e", "abs_p99": ".1e", "abs_max": ".2f",
    "probs_diff_mean": ".1e", "probs_diff_max": ".2f", "pearson": ".5f", "ess": ".4f", "ratio_max": ".2f", "tokens": ".0f",
}  # fmt: skip


def mismatch_table(runs: Mapping[str, RunResult]) -> pd.DataFrame:
    """The token statistics of rollout/old, from the single tokens that each run kept: a row a number, as text.

    Args:
        runs: name -> run. A column is a run's tokens scored natively, and one more scored under R3 if that differs.

    Raises:
        ConfigError: if a run kept no tokens.
    """
    columns = {}
    for name, run in runs.items():
        tokens = run.tokens()
        if tokens.empty:
            raise ConfigError(f"{run.path.name}: no single tokens were kept (diagnostics.enabled=false)")
        every = np.ones(len(tokens), bool)
        for arm in ("none", "R3"):
            if f"logp_{arm}" in tokens and not (arm == "R3" and (tokens["logp_R3"] == tokens["logp_none"]).all()):
                columns[f"{name}, {arm}"] = mismatch(tokens[f"logp_{arm}"], tokens["logp_rollout"], every)
    rows = [
        {"number": number, **{column: _number(values[number], form) for column, values in columns.items()}}
        for number, form in MISMATCH_SHOWN.items()
    ]
    return pd.DataFrame(rows)


REPLAY_SHOWN = {
    "replay/nominal": ("nominal share", ".4f"),
    "replay/binding": ("binding share (native_free)", ".5f"),
    "replay/old/forced_routers_native_local": ("forced routers, old pass (native_local)", ".5f"),
    "replay/old/fidelity": ("fidelity, old pass", ".5f"),
    "replay/old/regret": ("regret, old pass", ".1e"),
    "replay/target_shift": ("target shift (nats a token)", ".1e"),
    "replay/drift_planned": ("drift of planned cells", ".4f"),
    "replay/drift_unplanned": ("drift of other cells", ".4f"),
    "replay/missing": ("missing routes", ".0f"),
    "replay/update/executed_equals_resolved": ("executed = resolved", ".4f"),
    "update/clip_fraction": ("clipped tokens", ".4f"),
    "update/weight_mean": ("mean weight of a token", ".4f"),
    "update/kept_mean": ("tokens that are kept", ".4f"),
    "update/grad_norm": ("gradient norm", ".2f"),
    "mismatch/rollout_old/ratio_max": ("largest ratio old/rollout", ".2f"),
    "drift/step/gamma_mean": ("γ of a step, mean", ".4f"),
}


def depth_of_run_table(run: RunResult) -> pd.DataFrame:
    """What replay and updates did over a run: number, and its first, mean and last measured value, as text; what was never measured is
    absent."""
    rows = []
    for column, (name, form) in REPLAY_SHOWN.items():
        values = run.metrics[column].dropna() if column in run.metrics else pd.Series(dtype=float)
        if len(values):
            shown = (values.iloc[0], values.mean(), values.iloc[-1])
            rows.append(
                dict(zip(("number", "first", "mean", "last"), (name, *(format(v, form) for v in shown)), strict=True))
            )
    return pd.DataFrame(rows)


def served_table(runs: Mapping[str, RunResult]) -> pd.DataFrame:
    """Deployment: the reward served on held-out prompts, and what the trainer's own policy would score there, natively and replayed."""
    rows = []
    for name, run in runs.items():
        s = run.summary
        rows.append(
            {
                "run": name,
                "served at the start": _number(s.get("evaluation_first"), ".3f"),
                "served at the end": _number(s.get("evaluation_last"), ".3f"),
                "trainer, native (ESS)": _with_ess(s, "native"),
                "trainer, replayed (ESS)": _with_ess(s, "replayed"),
                "k3 native": _number(s.get("evaluation_last_k3_native"), ".2e"),
                "k3 replayed": _number(s.get("evaluation_last_k3_replayed"), ".2e"),
                "collapsed": "no" if s["collapsed_at"] is None else f"step {s['collapsed_at']}",
                "diverged": s["diverged"] or "no",
            }
        )
    return pd.DataFrame(rows)


def _with_ess(summary: dict[str, Any], side: str) -> str:
    reward, ess = summary.get(f"evaluation_last_reward_{side}"), summary.get(f"evaluation_last_ess_{side}")
    return "undefined" if reward is None or ess is None else f"{reward:.3f} ({ess:.3f})"
