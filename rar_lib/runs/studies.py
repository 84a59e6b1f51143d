"""Studies: tables of many runs, and what they say. A study is a folder of runs.parquet (a row a run) and steps.parquet (a row a step).

Two kinds of answer come out of it. Every policy against one baseline: paired by seed, Student's interval, Holm over the policies, and
"does not differ" where nothing was shown. And the shape that the papers report, claim by claim: each claim is a number with an interval
and a bound that was written down before, so that it holds, does not hold, or cannot be told from these runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from rar_lib.errors import ConfigError
from rar_lib.metrics.seeds import against, paired_t
from rar_lib.runs.files import read_table, write_table

if TYPE_CHECKING:
    from rar_lib.runs.result import RunResult


SUMMARY = (
    "run", "seed", "steps", "updates_per_batch", "rollout_engine", "trainer_engine", "precision", "reward_first", "reward_last",
    "evaluation_first", "evaluation_last", "evaluation_last_reward_native", "evaluation_last_reward_replayed",
    "evaluation_last_k3_native", "evaluation_last_k3_replayed", "k3_rollout_old", "k3_old_new", "extreme_fraction_tau2", "ratio_max",
    "grad_norm", "grad_norm_max", "router_flip", "target_shift", "nominal", "binding", "collapsed_at", "diverged",
    "noise_floor_rollout", "noise_floor_trainer",
)  # fmt: skip
STEPS = (
    "step", "reward/mean", "evaluation/reward", "mismatch/rollout_old/k3", "mismatch/rollout_old/extreme_fraction_tau2",
    "mismatch/rollout_old/ratio_max", "mismatch/rollout_old/tokens", "mismatch/old_new/k3", "mismatch/rollout_new/k3",
    "paired/none/rollout_old/k3", "paired/R3/rollout_old/k3", "paired/none/rollout_old/extreme_fraction_tau2",
    "paired/R3/rollout_old/extreme_fraction_tau2", "update/grad_norm", "update/grad_norm_max", "update/clip_fraction",
    "agreement/rollout_native/router_flip", "agreement/rollout_native/token_any_flip", "agreement/rollout_native/dispersion",
    "drift/start/router_flip", "drift/step/gamma_mean", "replay/target_shift", "noise_floor/rollout/k3", "noise_floor/trainer/k3",
)  # fmt: skip


@dataclass(frozen=True)
class Study:
    """A table of runs and one of their steps: policy, seed, lr, updates_per_batch, and what SUMMARY and STEPS name."""

    name: str
    runs: pd.DataFrame
    steps: pd.DataFrame

    @classmethod
    def read(cls, folder: Path) -> Study:
        """From its folder; `name` is that of the folder.

        Raises:
            ConfigError: if it is not one.
        """
        if not (folder / "runs.parquet").exists() or not (folder / "steps.parquet").exists():
            raise ConfigError(f"study {folder}: expected runs.parquet and steps.parquet")
        return cls(folder.name, read_table(folder / "runs.parquet"), read_table(folder / "steps.parquet"))

    @classmethod
    def of_runs(cls, name: str, runs: Sequence[RunResult], policies: Sequence[str]) -> Study:
        """Gathered from complete runs.

        Args:
            name: of the study.
            runs: complete runs.
            policies: what each run is called, in the same order.
        """
        rows, steps = [], []
        for run, policy in zip(runs, policies, strict=True):
            algorithm = run.config["algorithm"]
            setting = {"policy": policy, "lr": algorithm["lr"]}
            rows.append(
                setting | {"asked": run.config["steps"]} | {column: run.summary.get(column) for column in SUMMARY}
            )
            kept = [column for column in STEPS if column in run.metrics]
            part = run.metrics[kept] if kept else pd.DataFrame(columns=["step", "reward/mean"], dtype=float)
            more = {"seed": run.summary["seed"], "updates_per_batch": algorithm["updates_per_batch"], **setting}
            steps.append(part.assign(**more))
        return cls(name, pd.DataFrame(rows), pd.concat(steps, ignore_index=True))

    def write(self, folder: Path) -> None:
        """Into a folder, which is made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        write_table(folder / "runs.parquet", self.runs)
        write_table(folder / "steps.parquet", self.steps)

    def only(self, **settings: float) -> Study:
        """The runs of one setting, such as updates_per_batch=4."""
        runs, steps = self.runs, self.steps
        for name, value in settings.items():
            runs, steps = runs[runs[name] == value], steps[steps[name] == value]
        return Study(self.name, runs, steps)


# quantity -> (label, compared by its logarithm?)
QUANTITIES: dict[str, tuple[str, bool]] = {
    "reward": ("reward, last quarter of the steps", False),
    "evaluation_last": ("reward served on held-out prompts", False),
    "k3_rollout_old": ("k3 rollout/old", True),
    "extreme_fraction_tau2": ("F(2)", False),
    "ratio_max": ("largest ratio old/rollout", True),
    "grad_norm": ("gradient norm", True),
}
FORMS = {"reward": ".3f", "evaluation_last": ".3f", "k3_rollout_old": ".2e", "extreme_fraction_tau2": ".1e", "ratio_max": ".1f",
         "grad_norm": ".2f"}  # fmt: skip


def values_of(study: Study) -> pd.DataFrame:
    """policy, seed and the QUANTITIES of every run; `reward` is the mean over the last quarter of the steps that its config asks for.

    A step that a run no longer took, since it diverged, counts as reward 0: leaving it out would favour what diverges early. Where rewards
    lie below 0 that would be a reward like any other, and where a run that did not diverge lacks a step, nobody knows: there it is absent.
    """
    key = ["policy", "seed"]
    runs = study.runs.assign(asked=study.runs["asked"] if "asked" in study.runs else int(study.steps["step"].max()) + 1)
    first = np.minimum(np.ceil(0.75 * runs["asked"]), runs["asked"] - 1).astype(int)
    steps = study.steps.merge(runs[key].assign(first=first), on=key, how="left")
    last = steps[steps["step"] >= steps["first"]].groupby(key, sort=False)["reward/mean"]
    found = runs[[*key, "diverged"]].assign(wanted=runs["asked"] - first)
    found = found.merge(last.agg(total="sum", seen="count").reset_index(), on=key, how="left").fillna(
        {"total": 0.0, "seen": 0}
    )
    lowest = study.steps["reward/mean"].min()
    known = (found["seen"] == found["wanted"]) | (found["diverged"].notna() & (lowest >= 0))
    table = runs[[*key, *(q for q in QUANTITIES if q != "reward")]]
    table.insert(2, "reward", (found["total"] / found["wanted"]).where(known).to_numpy())
    return table


def comparison(study: Study, baseline: str = "none", *, missing: Literal["refuse", "drop"] = "refuse") -> pd.DataFrame:
    """Every policy against a baseline in every quantity: paired by seed, Student's 95 % interval, Holm over the policies.

    Args:
        study: its runs.
        baseline: name of a policy.
        missing: seeds that a policy or the baseline lacks are refused, or dropped with their pair.

    Returns:
        quantity, policy, n, mean, baseline_mean, difference, low, high (of natural logs where the quantity is compared by factors),
        p, p_holm, verdict, log (whether it is): a row a quantity and policy.

    Raises:
        ConfigError: for a baseline that is not there, or seeds that have no pair; names study and quantity.
    """
    table, parts = values_of(study), []
    for quantity, (_, log) in QUANTITIES.items():
        try:
            found = against(table, quantity, baseline, log=log, missing=missing)
        except ValueError as error:
            raise ConfigError(f"study {study.name}: {quantity}: {error}") from None
        base = float(table.loc[table["policy"] == baseline, quantity].mean())
        parts.append(found.assign(quantity=quantity, baseline_mean=base, log=log))
    return pd.concat(parts, ignore_index=True)


def comparison_table(study: Study, baseline: str = "none") -> pd.DataFrame:
    """The comparison as text: a row a policy, a column a quantity: its mean, and whether it differs from the baseline.

    ↑ and ↓ mark what is higher or lower at 5 % after Holm's correction over the policies; nothing means that no difference was shown.
    """
    found, table = comparison(study, baseline), values_of(study)
    sign = {"higher": " ↑", "lower": " ↓", "does not differ": "", "cannot be told": " ?"}
    rows = []
    for policy in table["policy"].drop_duplicates():
        row = {"policy": policy}
        for quantity, (label, _) in QUANTITIES.items():
            mean = table.loc[table["policy"] == policy, quantity].mean()
            here = found[(found["policy"] == policy) & (found["quantity"] == quantity)]
            mark = sign[here["verdict"].iloc[0]] if len(here) else ""
            row[label] = f"{mean:{FORMS[quantity]}}{mark}"
        rows.append(row)
    return pd.DataFrame(rows)


# ---------------------------------------------------------------- the papers' shape, claim by claim


@dataclass(frozen=True)
class Claim:
    """One claim and what these runs say of it.

    Attributes:
        text: the claim.
        source: where it comes from.
        value, low, high: the number that decides, with a 95 % interval; None where there is none.
        rule: what the number must be for the claim to hold.
        verdict: `holds`, `does not hold` or `cannot be told`.
    """

    text: str
    source: str
    value: float | None
    low: float | None
    high: float | None
    rule: str
    verdict: str


def decide(value: dict[str, float | int | None], bound: float, side: str) -> str:
    """`holds` if the whole interval lies on the claimed side of the bound, `does not hold` if it lies on the other.

    Args:
        value: with `low` and `high`; None cannot be told.
        bound: that the number must not pass.
        side: `below` or `above`.
    """
    low, high = value["low"], value["high"]
    if low is None or high is None:
        return "cannot be told"
    if side == "below":
        return "holds" if high <= bound else "does not hold" if low > bound else "cannot be told"
    return "holds" if low >= bound else "does not hold" if high < bound else "cannot be told"


def _ratio(study: Study, column: str) -> dict[str, float | int | None]:
    """Geometric mean over seeds of column(R3 run) / column(none run), with an interval."""
    wide = study.runs.pivot(index="seed", columns="policy", values=column)[["none", "R3"]]
    if (wide <= 0).any().any():
        return {"difference": None, "low": None, "high": None}
    found = paired_t(np.log(wide["R3"]).tolist(), np.log(wide["none"]).tolist())
    return {k: None if found[k] is None else float(np.exp(found[k])) for k in ("difference", "low", "high")}  # type: ignore[arg-type]


FEWEST = 10


def _paired_ratio(study: Study, column: str, half: float = 0.0) -> dict[str, float | int | None]:
    """R3 over none on the very same tokens, of the runs without replay: one ratio of token-weighted means a seed, geometric mean over seeds.

    `half` is added to both sums of a seed, so that a count of 0 has a ratio too (half a token, for shares of tokens); below FEWEST counted
    tokens a seed it would decide by itself, and nothing is said.
    """
    steps = study.steps[study.steps["policy"] == "none"]
    tokens = steps["mismatch/rollout_old/tokens"]
    sums = pd.DataFrame(
        {"seed": steps["seed"], **{a: steps[f"paired/{a}/rollout_old/{column}"] * tokens for a in ("none", "R3")}}
    )
    counts = sums.groupby("seed").sum()
    by_seed = counts + half
    if (by_seed <= 0).any().any() or (half and counts["none"].mean() < FEWEST):
        return {"difference": None, "low": None, "high": None}
    found = paired_t(np.log(by_seed["R3"]).tolist(), np.log(by_seed["none"]).tolist())
    return {k: None if found[k] is None else float(np.exp(found[k])) for k in ("difference", "low", "high")}  # type: ignore[arg-type]


def claims(remedies: Study, staleness: Study, rates: Study) -> list[Claim]:
    """The papers' shape at this scale.

    Args:
        remedies: none and R3 among its policies, at one setting.
        staleness: none, R2 and R3 at several updates_per_batch, 1 among them.
        rates: none and R3 at several learning rates.

    Raises:
        ConfigError: if none or R3 is missing at a seed and number of updates of `staleness`.
    """
    found = []

    def add(text: str, source: str, value: dict[str, float | int | None], rule: str, verdict: str) -> None:
        found.append(Claim(text, source, value["difference"], value["low"], value["high"], rule, verdict))

    k3 = _paired_ratio(remedies, "k3")
    add("R3 halves k3 on the same tokens", "2510.11370", k3, "ratio R3/none at most 0.5", decide(k3, 0.5, "below"))
    runs = _ratio(remedies, "k3_rollout_old")
    add("R3 halves k3 of a run", "2510.11370", runs, "ratio R3/none at most 0.5", decide(runs, 0.5, "below"))
    extreme = _paired_ratio(remedies, "extreme_fraction_tau2", half=0.5)
    add(
        "F(2) falls tenfold on the same tokens",
        "2510.11370",
        extreme,
        "ratio R3/none at most 0.1",
        decide(extreme, 0.1, "below"),
    )
    none = remedies.steps[remedies.steps["policy"] == "none"]
    dispersion = none.groupby("seed")["agreement/rollout_native/dispersion"].mean()
    spread = paired_t(dispersion.tolist(), [0.0] * len(dispersion))
    add("flips cluster on tokens", "2510.11370", spread, "dispersion above 1", decide(spread, 1.0, "above"))

    first = staleness.only(updates_per_batch=1)
    columns = ["policy", "seed", "step", "reward/mean", "mismatch/rollout_old/k3", "update/grad_norm"]
    wide = first.steps[columns].pivot(index=["seed", "step"], columns="policy")
    gaps = [float((wide[c]["R2"] - wide[c]["none"]).abs().max()) for c in columns[3:]]
    largest = max(gaps)
    add("R2 does nothing on-policy", "2512.01374", {"difference": largest, "low": None, "high": None},
        "reward, k3 and gradient norm equal to the last bit", "holds" if largest == 0 else "does not hold")  # fmt: skip
    slope = _slope_in_updates(staleness)
    add("R3's gain over none grows with the updates a batch", "2512.01374", slope, "slope of the reward difference in log2 N above 0",
        decide(slope, 0.0, "above"))  # fmt: skip
    found += [_rescue(rates)]
    return found


def _slope_in_updates(study: Study) -> dict[str, float | int | None]:
    """Slope, a seed, of reward(R3) - reward(none) in log2 of the updates a batch; mean over seeds with an interval."""
    rows = []
    for updates in sorted(study.runs["updates_per_batch"].unique()):
        values = values_of(study.only(updates_per_batch=updates)).pivot(index="seed", columns="policy", values="reward")
        rows.append((values["R3"] - values["none"]).rename(np.log2(updates)))
    wide = pd.concat(rows, axis=1)
    if wide.isna().any().any():
        raise ConfigError(f"study {study.name}: expected none and R3 at every seed and number of updates")
    x = wide.columns.to_numpy(float)
    centred = x - x.mean()
    slopes = (wide.to_numpy() @ centred) / (centred**2).sum()
    return paired_t(slopes.tolist(), [0.0] * len(slopes))


def _rescue(study: Study) -> Claim:
    """Is there a learning rate at which every run without replay collapses or diverges, and none under R3?"""
    runs = study.runs.assign(broken=study.runs["collapsed_at"].notna() | study.runs["diverged"].notna())
    table = runs.pivot_table(index="lr", columns="policy", values="broken", aggfunc="mean")
    rescued = table[(table["none"] == 1) & (table["R3"] == 0)]
    told = ", ".join(f"{lr:g}: {r.none:.0%} and {r.R3:.0%}" for lr, r in table.iterrows())
    verdict = "holds" if len(rescued) else "does not hold"
    seen = table["none"].max() == 1 and table["none"].min() == 0
    return Claim(
        f"at some learning rate none collapses and R3 does not (broken runs of none and R3: {told})", "2510.11370",
        float(rescued.index[0]) if len(rescued) else None, None, None, "a rate with every run of none broken and no run of R3",
        verdict if seen or len(rescued) else "cannot be told",
    )  # fmt: skip


def claims_table(found: list[Claim]) -> pd.DataFrame:
    """The claims as text."""

    def number(claim: Claim) -> str:
        if claim.value is None:
            return "none"
        if claim.low is None:
            return f"{claim.value:.3g}"
        return f"{claim.value:.3g} [{claim.low:.3g}, {claim.high:.3g}]"

    return pd.DataFrame(
        [{"claim": c.text, "source": c.source, "found": number(c), "rule": c.rule, "verdict": c.verdict} for c in found]
    )
