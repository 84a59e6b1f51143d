"""The frontier: efficiency of every policy against how much it forces, over several checkpoints, on one pair of engines.

A job without replay is trained once; at its start and at its kept checkpoints fresh prompts are sampled, and every arm scores
the same tokens (score_arms), in the old pass and after the updates of a batch. P(flip) is learned at each checkpoint from
another batch. Results are a folder, found by what they compute: data/frontier/ holds those that are shipped, so that a
notebook shows them at once, and data/runs/ what was computed here.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from rar_lib.arms import Arm, score_arms
from rar_lib.checkpoint import DATA_DIR, digest_checkpoint, resolve_checkpoint
from rar_lib.config import JobConfig
from rar_lib.engines.session import EngineSession, resolve_engines
from rar_lib.errors import ConfigError, RunError
from rar_lib.metrics.contrasts import Efficiencies, at_equal_binding, efficiencies, slope
from rar_lib.metrics.replay import verdict
from rar_lib.progress import Style
from rar_lib.replay.budget import as_fraction
from rar_lib.replay.plan import Unit
from rar_lib.replay.policies import get_policy
from rar_lib.runs.files import read_table, write_json, write_table
from rar_lib.runs.store import RUNS_DIR, describe_environment, differing, identity
from rar_lib.stages import flip_calibration_table, stages
from rar_lib.tasks import Task

SHIPPED = DATA_DIR / "frontier"
RANDOM = "random_route"


logger = logging.getLogger("rar")


class FrontierConfig(BaseModel):
    """What to compare, where.

    Attributes:
        job: engines, task and batch; its replay settings are not used.
        policies: names of POLICIES.
        budgets: shares of the recorded units, as decimals or fractions.
        units: of the plans; a policy with a unit of its own takes that.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: JobConfig
    policies: tuple[str, ...]
    budgets: tuple[str, ...] = ("0.05", "0.1", "0.25", "0.5")
    units: tuple[Unit, ...] = ("token_layer",)
    control_seeds: int = Field(1, ge=1, description="draws, at each batch, of policies that choose by key")
    rollouts: int = Field(1, ge=1, description="batches at each checkpoint")
    updates: bool = Field(True, description="score once more after the updates of a batch")

    def arms(self, batch: int = 0) -> list[Arm]:
        """Every plan that exists among the policies, units and budgets; controls draw other seeds in each batch.

        Full replay is an arm of each unit: it is the same replay, counted in other units.
        """
        found = [Arm("full", unit) for unit in self.units if unit == "slot"]
        for name in self.policies:
            policy = get_policy(name)
            for unit in (u for u in policy.units if u in self.units or policy.units == (u,)):
                draws = range(1)
                if name.startswith(("uniform", "random", "permuted")):
                    draws = range(batch * self.control_seeds, (batch + 1) * self.control_seeds)
                if name == "threshold":
                    found += [Arm(name, unit, None, ratio=ratio) for ratio in (0.95, 0.8, 0.5)]
                elif policy.budget != "none":
                    found += [Arm(name, unit, b, seed) for b in self.budgets for seed in draws]
        return found


@dataclass(frozen=True)
class Frontier:
    """What `run_frontier` returns.

    Attributes:
        table: a row an arm, pass, checkpoint and rollout (ArmScores.table).
        by_prompt: a row an arm, pass, checkpoint and prompt.
        calibration: a row a checkpoint and group of cells: predicted and observed P(flip) on the batches that were scored.
        facts: engines, checkpoints and environment.
    """

    table: pd.DataFrame
    by_prompt: pd.DataFrame
    calibration: pd.DataFrame
    facts: dict[str, Any]

    def of(self, unit: str, when: str) -> tuple[pd.DataFrame, Efficiencies]:
        """Arms of a unit in a pass, draws of a control averaged: their shares, and efficiencies over all prompts.

        Args:
            unit: `token_layer` (plans of unit bias are shown with it) or `slot`.
            when: the pass, `old` or `new`.

        Returns:
            table with arm, policy, budget (float), nominal, binding, target_shift (nats), drift_planned, k3 (nats), efficiency, low,
            high; and the efficiencies behind it.
        """
        rows, prompts = (t[t["pass"] == when].copy() for t in (self.table, self.by_prompt))
        shown = {"token_layer": ("token_layer", "bias")}.get(unit, (unit,))  # λ changes sets, and counts them
        rows = rows[(rows["policy"] == "none") | rows["unit"].isin(shown)]
        rows["label"] = [_arm_label(*row) for row in rows[["arm", "policy", "budget"]].itertuples(index=False)]
        rows["budget"] = [None if pd.isna(b) else float(as_fraction(b)) for b in rows["budget"]]
        rows["budget"] = rows["budget"].astype(float)
        label = rows.drop_duplicates("arm").set_index("arm")["label"]
        prompts = prompts[prompts["arm"].isin(label.index)].assign(arm=lambda t: t["arm"].map(label))
        prompts = prompts.groupby(["checkpoint", "prompt", "arm"], as_index=False)[["tokens", "k3_sum"]].mean()
        found = efficiencies(prompts, noise_floor=self.facts["noise_floor"])
        columns = [c for c in ("nominal", "binding", "target_shift", "drift_planned", "k3") if c in rows]
        rows = rows.astype(dict.fromkeys(columns, float))
        mean = rows.groupby(["label", "policy", "budget"], as_index=False, dropna=False)[columns].mean()
        return mean.rename(columns={"label": "arm"}).merge(found.table(), on="arm"), found

    def without_gain(self) -> float:
        """Share of the draws of prompts in which R3 takes nothing off k3, in the old pass."""
        return self.of("token_layer", "old")[1].without_gain

    def contrasts(self, unit: str, when: str, budget: str, against: Sequence[str]) -> pd.DataFrame:
        """Contrasts of the matched policies at one nominal budget, as numbers: contrast, value, low, high.

        Replay at all, its budget, each policy's choice, what each leaves; then each of fisher and swap against the others.

        Args:
            unit, when: as for `of`.
            budget: nominal share, as it was asked for.
            against: policies that fisher and swap are compared with.

        Raises:
            ConfigError: if random routes were not among the policies, or not at this budget.
        """
        table, found = self.of(unit, when)
        arms = set(found.value)
        betas = {beta: _label(RANDOM, beta) for beta in sorted(set(table["budget"].dropna()))}
        betas = {beta: arm for beta, arm in betas.items() if arm in arms}
        _require_random("contrasts", budget, arms)
        rows = []

        def add(name: str, numbers: dict[str, float]) -> None:
            rows.append(dict(zip(("contrast", "value", "low", "high"), (name, *numbers.values()), strict=True)))

        smallest = min(betas)
        add(f"replay at all: random {smallest:g} - none", found.difference(betas[smallest], "none"))
        if len(betas) > 1:
            add("budget: slope of random", slope(found, betas))
        policies = [
            p for p in table["policy"].unique()
            if _label(p, budget) in arms and p != RANDOM and _budget_of(p) == "matched"
        ]  # fmt: skip
        for name in policies:
            add(f"choice: {name} - random", found.difference(_label(name, budget), _label(RANDOM, budget)))
        for name in policies:
            add(f"left: R3 - {name}", found.difference("full", _label(name, budget)))
        for name in ("fisher", "swap"):
            for other in against:
                if name in policies and other in policies:
                    add(f"{name} - {other}", found.difference(_label(name, budget), _label(other, budget)))
        return pd.DataFrame(rows)

    def at_equal_binding(self, unit: str, when: str, part: float, against: Sequence[str]) -> pd.DataFrame:
        """Fisher and swap against others at a binding share of `part` of what full replay binds, between budgets by straight lines.

        Returns:
            contrast, value, low, high (differences of efficiency).
        """
        table, found = self.of(unit, when)
        binding = dict(zip(table["arm"], table["binding"], strict=True))
        arms = table[table["budget"].notna()].sort_values("budget")
        groups = {str(p): list(rows["arm"]) for p, rows in arms.groupby("policy")}
        at = at_equal_binding(found, binding, groups, part * binding["full"])
        rows = []
        for name in ("fisher", "swap"):
            for other in against:
                if name in at and other in at:
                    difference = at[name] - at[other]
                    low, high = found.interval(difference[1:])
                    rows.append({"contrast": f"{name} - {other}", "value": difference[0], "low": low, "high": high})
        return pd.DataFrame(rows)

    def verdict_table(self, unit: str, budget: str) -> pd.DataFrame:
        """`verdicts` as text of fixed precision."""
        return self.verdicts(unit, budget).assign(
            **{
                name: lambda t, name=name, form=form: [("undefined" if v is None else format(v, form)) for v in t[name]]
                for name, form in (
                    ("efficiency", ".2f"),
                    ("left, low", ".2f"),
                    ("target shift", ".1e"),
                    ("drift planned", ".4f"),
                )
            }
        )

    def verdicts(self, unit: str, budget: str) -> pd.DataFrame:
        """The verdict of each policy at one budget, in the old pass.

        What is left is measured against full R3 and not against zero, since R3 leaves what is not routing: too weak where
        the interval of R3 - policy lies above 0.

        Returns:
            policy, efficiency, "left, low" (lower end of R3 - policy), "target shift" (nats), "drift planned" (None without updates),
            verdict (metrics.replay.verdict).

        Raises:
            ConfigError: if random routes, the control, were not among the policies, or not at this budget.
        """
        old, found = self.of(unit, "old")
        new = self.of(unit, "new")[0].set_index("arm") if (self.table["pass"] == "new").any() else None
        table = old.set_index("arm")
        _require_random("verdicts", budget, table.index)
        control, shifts = _label(RANDOM, budget), table["target_shift"].to_dict()
        rows = []
        matched = table["policy"].map(_budget_of) == "matched"
        for arm in table.index[matched & (table["budget"] == float(as_fraction(budget)))]:
            drifts = (None, None) if new is None else (new.loc[arm, "drift_planned"], new.loc[control, "drift_planned"])
            left = found.difference("full", arm)["low"]
            shift, shift_of_random = (float(shifts[name]) for name in (arm, control))
            rows.append(
                {
                    "policy": table.loc[arm, "policy"], "efficiency": table.loc[arm, "efficiency"],
                    "left, low": left, "target shift": shift, "drift planned": drifts[0],
                    "verdict": verdict(left, 0.0, shift, shift_of_random, *drifts),
                }
            )  # fmt: skip
        return pd.DataFrame(rows)


def contrast_table(contrasts: pd.DataFrame) -> pd.DataFrame:
    """Contrasts as text of fixed precision, and whether their interval lies above or below 0."""
    sign = ["above 0" if low > 0 else "below 0" if high < 0 else "contains 0" for low, high in
            zip(contrasts["low"], contrasts["high"], strict=True)]  # fmt: skip
    text = [f"{v:.2f} [{low:.2f}, {high:.2f}]" for v, low, high in contrasts[["value", "low", "high"]].to_numpy()]
    return pd.DataFrame({"contrast": contrasts["contrast"], "difference [95 %]": text, "interval": sign})


def answer_table(nominal: pd.DataFrame, binding: pd.DataFrame) -> pd.DataFrame:
    """What fisher and swap beat, a row a pair: better, worse, or no difference shown (an interval that contains 0).

    Args:
        nominal, binding: contrasts at an equal nominal and at an equal binding share.
    """

    def word(rows: pd.DataFrame, name: str) -> str:
        (low,), (high,) = (rows.loc[rows["contrast"] == name, end].tolist() for end in ("low", "high"))
        return "better" if low > 0 else "worse" if high < 0 else "no difference shown"

    pairs = [name for name in binding["contrast"] if name in set(nominal["contrast"])]
    return pd.DataFrame(
        {
            "policy": [name.partition(" - ")[0] for name in pairs],
            "against": [name.partition(" - ")[2] for name in pairs],
            "at equal nominal share": [word(nominal, name) for name in pairs],
            "at equal binding share": [word(binding, name) for name in pairs],
        }
    )


def _arm_label(arm: str, policy: str, budget: str | None) -> str:
    """Draws of one control share a label; thresholds differ by their ratio."""
    return arm if policy == "threshold" else _label(policy, budget)


def _label(policy: str, budget: str | float | None) -> str:
    return policy if budget is None or pd.isna(budget) else f"{policy} {float(as_fraction(budget)):g}"


def _require_random(what: str, budget: str, arms: Iterable[str]) -> None:
    """Random routes at the same budget are the control of both."""
    if _label(RANDOM, budget) not in arms:
        raise ConfigError(f"{what}: expected {RANDOM} at budget {budget} among the arms, found {sorted(arms)}")


def _budget_of(name: str) -> str:
    """How a policy understands its budget; `none` for none itself."""
    return "none" if name == "none" else get_policy(name).budget


def run_frontier(
    config: FrontierConfig,
    session: EngineSession | None = None,
    *,
    runs_dir: Path | None = None,
    show: Style = "auto",
) -> Frontier:
    """Compute a frontier, or load it if it is shipped or was computed before.

    Args:
        config: what to compare.
        session: engines to share; without one they are started for this and shut down at the end.
        runs_dir: folder of runs, by default data/runs.
        show: progress.

    Raises:
        ConfigError, EngineError, ReplayError: see errors.py.
        RunError: if a stored result was made when a default was another.
    """
    job = resolve_engines(config.job, print)
    runs = runs_dir or RUNS_DIR
    path, task = resolve_checkpoint(job.model.path), Task(job.task)
    digests = {"checkpoint": digest_checkpoint(path), "task": task.digest()}
    bare = JobConfig.build(job.resolved() | {"router_replay": {"enabled": False}})
    content = {"job": identity(bare, digests), "arms": config.model_dump(mode="json", exclude={"job"})}
    name = "frontier-" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    for folder in (SHIPPED / name, runs / name):
        if (folder / "facts.json").exists():
            _require_today(folder, bare)
            return load_frontier(folder)
    if session is not None:
        found = _compute(config, bare, session, runs, show)
    else:
        with EngineSession() as own:
            found = _compute(config, bare, own, runs, show)
    folder = runs / name
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {"config": bare.resolved(), **content})
    for part in ("table", "by_prompt", "calibration"):
        write_table(folder / f"{part}.parquet", getattr(found, part))
    write_json(folder / "facts.json", found.facts)  # last: its presence means that all is there
    return found


def _require_today(folder: Path, job: JobConfig) -> None:
    """A stored result names what it set apart from the defaults; the defaults must be those of then.

    Raises:
        RunError: if one has changed since.
    """
    stored = json.loads((folder / "config.json").read_text())["config"]
    moved = differing(stored, job.resolved())
    if moved:
        raise RunError(f"{folder.name}: made when a default was another; {', '.join(moved)}: set the value to use it")


def load_frontier(folder: Path) -> Frontier:
    """A frontier from its folder, as `run_frontier` writes it."""
    table, by_prompt, calibration = (
        read_table(folder / f"{part}.parquet") for part in ("table", "by_prompt", "calibration")
    )
    return Frontier(table, by_prompt, calibration, json.loads((folder / "facts.json").read_text()))


def _compute(config: FrontierConfig, job: JobConfig, session: EngineSession, runs: Path, show: Style) -> Frontier:
    parts, batches = [], 0
    temperature = job.rollout.sampling.temperature
    facts: dict[str, Any] = {
        "rollout_engine": job.rollout.engine, "trainer_engine": job.trainer.engine, "stages": [], "noise_floor": 0.0,
        "environment": describe_environment(job.seed),
    }  # fmt: skip
    for stage in stages(job, session, runs, show):
        facts["run"], facts["stages"] = stage.run, [*facts["stages"], stage.name]
        flips = stage.flips()
        for i in range(config.rollouts):
            sample, batch, objectives = stage.sample(1 + i)
            facts["noise_floor"] = floor = max(facts["noise_floor"], stage.noise_floor(sample, batch))
            scores = score_arms(
                stage.trainer, batch, sample, config.arms(batches), temperature=temperature,
                objectives=objectives if config.updates else None, flips=flips, noise_floor=floor, batch_number=batches,
            )  # fmt: skip
            batches += 1
            where: dict[str, Any] = {"checkpoint": stage.name, "rollout": i}
            seen = flip_calibration_table(flips, sample, scores.native)
            parts.append([t.assign(**where) for t in (scores.table, scores.by_prompt, seen)])
            logger.info("frontier: %s, rollout %d of %d", stage.name, i + 1, config.rollouts)
    table, by_prompt, calibration = (pd.concat(tables, ignore_index=True) for tables in zip(*parts, strict=True))
    return Frontier(table, by_prompt, calibration, facts)
