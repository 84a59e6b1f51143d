"""Contrasts between replay policies, paired on the same tokens, with intervals that resample prompts.

Every arm scored the same tokens, so a draw of prompts gives one efficiency for each arm and their difference at once:

    replay at all   E(random at the smallest β)                       what any replay does
    budget          slope of E(random) in β                           what more of it does
    choice          E(policy, β) - E(random, β)                       what choosing does
    what is left    1 - E(policy, β)                                  R3 less the policy

E = (k3_none - k3_arm) / (k3_none - k3_R3): 0 at none, 1 at R3. A prompt of one checkpoint and one rollout is one cluster; the
draws are stratified by checkpoint, so that each keeps its number of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

NONE, FULL = "none", "full"


@dataclass(frozen=True, eq=False)
class Efficiencies:
    """Efficiency of every arm and its bootstrap draws.

    Attributes:
        value: arm -> E on all prompts; NaN where none and R3 do not differ.
        draws: arm -> `[B]` float64, E in each draw; NaN where none and R3 do not differ in it.
        without_gain: share of draws in which full replay takes nothing off k3 (beyond the noise floor): there E says little.
    """

    value: dict[str, float]
    draws: dict[str, np.ndarray]
    without_gain: float = 0.0

    def interval(self, values: np.ndarray) -> tuple[float, float]:
        """95 % percentile interval of draws `[B]`; undefined ones are left out. Both ends are NaN where all are."""
        known = values[np.isfinite(values)]
        low, high = np.percentile(known, [2.5, 97.5]) if known.size else (np.nan, np.nan)
        return float(low), float(high)

    def difference(self, a: str, b: str) -> dict[str, float]:
        """E(a) - E(b) with its interval: difference, low, high."""
        low, high = self.interval(self.draws[a] - self.draws[b])
        return {"difference": self.value[a] - self.value[b], "low": low, "high": high}

    def table(self) -> pd.DataFrame:
        """arm, efficiency, low, high."""
        rows = []
        for arm, value in self.value.items():
            low, high = self.interval(self.draws[arm])
            rows.append({"arm": arm, "efficiency": value, "low": low, "high": high})
        return pd.DataFrame(rows)


def efficiencies(
    by_prompt: pd.DataFrame, *, noise_floor: float = 0.0, resamples: int = 2000, seed: int = 0
) -> Efficiencies:
    """Efficiencies from sums of k3 by prompt.

    Args:
        by_prompt: a row an arm and prompt: `arm`, `prompt`, `k3_sum` (over the prompt's tokens, in nats), and
            `checkpoint` if there are several. Arms `none` and `full` are among them, and every arm has every prompt
            once. With a noise floor, `tokens` too.
        noise_floor: k3 of an engine against itself, in nats a token; where none and full differ by no more,
            efficiency is undefined (NaN).
        resamples: draws. They are of prompts only: a control that draws whole cells should be drawn anew for each batch.
        seed: of the draws.

    Raises:
        ValueError: if an arm lacks a prompt that another has or has it twice, a sum is not finite, or none and full are
            missing.
    """
    table = by_prompt if "checkpoint" in by_prompt else by_prompt.assign(checkpoint="")
    if not np.isfinite(table["k3_sum"].to_numpy(float)).all():
        raise ValueError("contrasts: expected finite sums of k3, found NaN or infinity")
    twice = table.loc[table.duplicated(["checkpoint", "prompt", "arm"])]
    if len(twice):
        prompt, arm = twice.iloc[0][["prompt", "arm"]]
        raise ValueError(
            f"contrasts: expected every prompt once in every arm, found one twice: {prompt} in {arm!r} (two passes at once?)"
        )
    wide = table.pivot(index=["checkpoint", "prompt"], columns="arm", values="k3_sum")
    short = [repr(arm) for arm in wide.columns if wide[arm].isna().any()]
    if short or not {NONE, FULL} <= set(wide.columns):
        found = f"prompts missing in {', '.join(short)}" if short else f"arms {', '.join(map(str, wide.columns))}"
        raise ValueError(f"contrasts: expected arms none and full, and every prompt in every arm; found {found}")
    strata = wide.index.get_level_values("checkpoint")
    rng = np.random.default_rng(seed)
    weights = np.zeros((resamples, len(wide)))
    for name in strata.unique():
        places = np.flatnonzero(strata == name)
        weights[:, places] = rng.multinomial(len(places), np.full(len(places), 1 / len(places)), resamples)
    sums = {arm: (weights @ wide[arm].to_numpy(float)) for arm in wide.columns}
    totals = {arm: float(wide[arm].sum()) for arm in wide.columns}
    span, spans = totals[NONE] - totals[FULL], sums[NONE] - sums[FULL]
    floor, floors = 0.0, np.zeros(resamples)
    if noise_floor:
        tokens = table[table["arm"] == NONE].set_index(["checkpoint", "prompt"])["tokens"].reindex(wide.index)
        floor, floors = noise_floor * float(tokens.sum()), noise_floor * (weights @ tokens.to_numpy(float))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = {arm: (totals[NONE] - totals[arm]) / span if abs(span) > floor else np.nan for arm in totals}
        draws = {arm: np.where(np.abs(spans) > floors, (sums[NONE] - sums[arm]) / spans, np.nan) for arm in sums}
    return Efficiencies(value, draws, float((spans <= floors).mean()))


def slope(found: Efficiencies, arms: Mapping[float, str]) -> dict[str, float]:
    """Least-squares slope of E in β over several arms of one policy: slope, low, high.

    Args:
        found: efficiencies of all arms.
        arms: β -> arm.
    """
    beta = np.array(list(arms))
    centred = beta - beta.mean()
    weights = centred / (centred**2).sum()
    low, high = found.interval(sum(w * found.draws[arm] for w, arm in zip(weights, arms.values(), strict=True)))
    value = sum(w * found.value[arm] for w, arm in zip(weights, arms.values(), strict=True))
    return {"slope": float(value), "low": low, "high": high}


def at_equal_binding(
    found: Efficiencies, binding: Mapping[str, float], arms: Mapping[str, Sequence[str]], share: float
) -> dict[str, np.ndarray]:
    """E of each policy at one binding share, linearly between its arms, from (0, 0) to full replay: `[1 + B]`.

    Args:
        found: efficiencies of all arms.
        binding: arm -> binding share; `full` among them.
        arms: policy -> its arms.
        share: binding share at which to compare, at most that of full replay.

    Returns:
        policy -> the value, then its draws.
    """
    out = {}
    for policy, names in arms.items():
        known = sorted([*(n for n in names if n != FULL), FULL], key=lambda arm: binding[arm])  # full last among equals
        x = np.array([0.0, *(binding[arm] for arm in known)])
        y = np.stack([np.r_[found.value[arm], found.draws[arm]] for arm in known])
        y = np.concatenate([np.zeros((1, y.shape[1])), y])
        right = int(np.clip(np.searchsorted(x, share), 1, len(x) - 1))
        width = x[right] - x[right - 1]
        part = (share - x[right - 1]) / width if width > 0 else 1.0
        out[policy] = y[right - 1] + part * (y[right] - y[right - 1])
    return out
