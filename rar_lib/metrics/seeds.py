"""Runs against runs, where the seed is the unit: paired t intervals on differences, and Holm over the arms.

Two arms of one seed share problems, draws and start, so their difference varies less than either. A percentile bootstrap over five seeds
covers 84 % where it says 95, so the interval is Student's. Several arms against one baseline are several tests: Holm's adjusted p is
what counts, and what does not pass it is said not to differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd


def paired_t(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> dict[str, float | int | None]:
    """Mean of a - b over paired seeds with Student's interval and two-sided p.

    Args:
        a, b: one value a seed, in the same order.
        level: of the interval.

    Returns:
        n, difference, low, high, p; interval and p are None with fewer than two pairs, and where all differences are equal, up to
        rounding, and so have no spread to judge by (an exact 0 gives the interval [0, 0] and p 1).

    Raises:
        ValueError: if the two have other lengths, or a value is not finite.
    """
    from scipy import stats

    left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
    for values, other in ((left, right), (right, left)):
        bad = values[~np.isfinite(values)]
        if values.shape != other.shape or bad.size:
            found = f"{bad[0]}" if bad.size else f"{len(left)} and {len(right)}"
            raise ValueError(f"paired t: expected as many finite values on both sides, found {found}")
    d = left - right
    n, mean = len(d), float(d.mean()) if len(d) else float("nan")
    if n < 2:
        return {"n": n, "difference": mean if n else None, "low": None, "high": None, "p": None}
    error = float(d.std(ddof=1) / np.sqrt(n))
    if error <= 1e-12 * np.abs(np.r_[left, right]).max():
        same = bool((d == 0).all())
        return {
            "n": n,
            "difference": mean,
            "low": 0.0 if same else None,
            "high": 0.0 if same else None,
            "p": 1.0 if same else None,
        }
    reach = float(stats.t.ppf((1 + level) / 2, n - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, n - 1))
    return {"n": n, "difference": mean, "low": mean - reach, "high": mean + reach, "p": p}


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given: max over smaller ones of (m - rank) p, at most 1."""
    p = np.asarray(p_values, np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.minimum(np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p)))), 1.0)
    out = np.empty(len(p))
    out[order] = adjusted
    return out.tolist()


def iqm(values: Sequence[float]) -> float | None:
    """Interquartile mean (2108.13264): the mean of what is left when the lowest and the highest quarter are dropped, each rounded down
    to whole runs; below four runs that is the mean. None of nothing.

    Raises:
        ValueError: if a value is not finite.
    """
    from scipy import stats

    found = np.asarray(values, np.float64)
    bad = found[~np.isfinite(found)]
    if bad.size:
        raise ValueError(f"interquartile mean: expected finite values, found {bad[0]}")
    return float(stats.trim_mean(found, 0.25)) if found.size else None


def against(
    table: pd.DataFrame, value: str, baseline: str, *, log: bool = False, missing: Literal["refuse", "drop"] = "refuse"
) -> pd.DataFrame:
    """Every arm against a baseline, paired by seed.

    Args:
        table: a row a run: policy, seed and the value; every arm has every seed of the baseline once.
        value: column to compare.
        baseline: policy to compare with.
        log: compare logarithms, for positive quantities that differ by factors; differences are then of natural logs.
        missing: drop: compare on the seeds that an arm shares with the baseline (`n` says how many), where both have a value, and a
            positive one with `log`.

    Returns:
        policy, n, mean, difference, low, high, p, p_holm, verdict ('higher', 'lower', 'does not differ', or 'cannot be told' where
        there is no p), in the order of the table.

    Raises:
        ValueError: if an arm lacks a seed of the baseline (unless dropped) or has one twice, or there is no arm but the baseline.
    """
    twice = table.loc[table.duplicated(["policy", "seed"]), ["policy", "seed"]]
    if len(twice):
        policy, seed = twice.iloc[0]
        raise ValueError(f"against: expected every policy and seed once, found {policy!r} at seed {seed} twice")
    wide = table.pivot(index="seed", columns="policy", values=value)
    absent = [(p, s) for p in wide for s in wide.index[wide[p].isna()]]
    if baseline not in wide or (missing == "refuse" and absent):
        names = ", ".join(map(str, wide.columns)) or "none"
        told = f"none of {absent[0][0]!r} at seed {absent[0][1]}" if baseline in wide else f"policies {names}"
        raise ValueError(
            f"against: expected {baseline!r} among the policies and {value} of every policy at every seed, found {told}"
        )
    if missing == "drop" and log:
        wide = wide.where(wide > 0)
    shown = wide.apply(np.log) if log else wide
    both = wide.notna().where(wide[baseline].notna(), False) if missing == "drop" else wide.notna()
    rows = []
    for policy in table["policy"].drop_duplicates():
        if policy != baseline:
            rows.append(
                {
                    "policy": policy,
                    "mean": table.loc[table["policy"] == policy, value].mean(),
                    **paired_t(*(shown.loc[both[policy], p].tolist() for p in (policy, baseline))),
                }
            )
    if not rows:
        raise ValueError(f"against: expected policies beside {baseline!r}, found none")
    found = pd.DataFrame(rows).astype({"p": float})
    known = found["p"].notna()
    found.loc[known, "p_holm"] = holm(found.loc[known, "p"].tolist())
    found["p_holm"] = found.get("p_holm", np.nan)
    found["verdict"] = [
        "cannot be told" if pd.isna(p) else "does not differ" if p >= 0.05 else "higher" if d > 0 else "lower"
        for p, d in zip(found["p_holm"], found["difference"], strict=True)
    ]
    columns = ["policy", "n", "mean", "difference", "low", "high", "p", "p_holm", "verdict"]
    return found[columns]
