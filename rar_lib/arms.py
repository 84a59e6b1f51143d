"""score_arms: one rollout scored under many plans. The cheap paired experiment.

Two runs differ in everything that happened since their start. Here every arm scores the same tokens, from the same
weights, against the same rollout: once in the old pass, and, if asked, once more after the same updates, each arm replaying
its own plan in every pass. What differs between two rows is the plan. The trainer is left as it was found.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from rar_lib.engines.base import LogprobResult, Objective, Replay, RolloutResult, TokenBatch, Trainer
from rar_lib.errors import ConfigError
from rar_lib.measure import TAU, rollout_logprobs
from rar_lib.metrics.mismatch import k3_terms, mismatch
from rar_lib.replay.plan import Unit
from rar_lib.replay.policies import Candidates, get_policy, make_plan, require_policy

# (old log-probs of the arm [S, T], rows of an update) -> the objective of that update
Objectives = Callable[[torch.Tensor, torch.Tensor], Objective]


@dataclass(frozen=True)
class Arm:
    """One plan to score: `policy` none replays nothing, any other chooses among the rollout's routes.

    Attributes:
        policy: `none` or a name of POLICIES.
        unit: what is counted and forced.
        budget: share of the recorded units; None for policies without one.
        seed: of the keys.
    """

    policy: str
    unit: Unit = "token_layer"
    budget: str | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """Policy, and budget and unit where there are any."""
        return self.policy if self.budget is None else f"{self.policy} {self.budget} {self.unit}"


@dataclass(frozen=True)
class ArmScores:
    """What score_arms returns.

    Attributes:
        table: a row an arm and pass (`old`, `new`): arm, policy, unit, budget, seed, pass, planned (units), nominal, forced
            (share of recorded cells whose executed set is not native_local), k3, extreme_fraction_tau2, ratio_max,
            efficiency (None where none and R3 do not differ).
        by_prompt: a row an arm, pass and prompt: tokens and the sum of k3, for intervals clustered by prompt.
    """

    table: pd.DataFrame
    by_prompt: pd.DataFrame


def score_arms(
    trainer: Trainer,
    batch: TokenBatch,
    sample: RolloutResult,
    arms: Sequence[Arm],
    *,
    temperature: float = 1.0,
    objectives: Objectives | None = None,
) -> ArmScores:
    """Score one rollout batch under several plans.

    Args:
        trainer: at the weights that sampled (θ_old); its state is put back afterwards.
        batch: the tokens; its `shares` are the updates.
        sample: log-probs and routes of the rollout on the same tokens.
        arms: plans to score; none and full R3 (policy `full`) are always among them, since efficiency is measured between.
        temperature: of the sampling.
        objectives: makes the objective of each update; without it only the old pass is scored.

    Raises:
        ConfigError: for two arms of one name, or an arm that does not go together.
    """
    every = list(dict.fromkeys([Arm("none"), Arm("full"), *arms]))
    names = [arm.name for arm in every]
    if len(set(names)) != len(names):
        raise ConfigError(
            f"arms: expected different names, found {sorted({n for n in names if names.count(n) > 1})} twice"
        )
    for arm in every:
        if arm.policy != "none":
            require_policy(arm.policy, arm.unit, arm.budget)
    mu = rollout_logprobs(batch, sample)
    native = trainer.logprobs(batch, temperature=temperature, capture="margins")
    rows: list[dict[str, object]] = []
    prompts: list[pd.DataFrame] = []

    def note(arm: Arm, when: str, replay: Replay | None, result: LogprobResult) -> None:
        rows.append(_row(arm, when, replay, result, mu, batch))
        prompts.append(_by_prompt(arm, when, result.logprobs, mu, batch))

    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder))
        for arm in every:
            replay = _replay(arm, batch, sample, native)
            old = native if replay is None else trainer.logprobs(batch, temperature=temperature, replay=replay)
            note(arm, "old", replay, old)
            if objectives is not None:
                for share in batch.update_shares():
                    trainer.update(
                        batch.select(share), objectives(old.logprobs, share), temperature=temperature,
                        replay=None if replay is None else replay.select(share),
                    )  # fmt: skip
                note(arm, "new", replay, trainer.logprobs(batch, temperature=temperature, replay=replay))
                trainer.load(Path(folder))
    return ArmScores(_with_efficiency(pd.DataFrame(rows)), pd.concat(prompts, ignore_index=True))


def _replay(arm: Arm, batch: TokenBatch, sample: RolloutResult, native: LogprobResult) -> Replay | None:
    if arm.policy == "none":
        return None
    needs = get_policy(arm.policy).needs
    seen = Candidates(sample.trace, batch.uids, arm.seed, 0, native.trace if "native" in needs else None)
    return Replay(sample.trace, make_plan(arm.policy, seen, arm.unit, arm.budget))


def _row(
    arm: Arm, when: str, replay: Replay | None, result: LogprobResult, mu: torch.Tensor, batch: TokenBatch
) -> dict[str, object]:
    values = mismatch(result.logprobs, mu, batch.response_mask, tau=TAU)
    plan = None if replay is None else replay.plan
    cells = 0 if replay is None else int(replay.trace.recorded.sum())
    return {
        "arm": arm.name, "policy": arm.policy, "unit": arm.unit, "budget": arm.budget, "seed": arm.seed, "pass": when,
        "planned": 0 if plan is None else plan.budget, "nominal": 0.0 if plan is None else plan.nominal,
        "forced": result.counts.changed_cells / cells if cells else 0.0,
        **{name: values[name] for name in ("k3", f"extreme_fraction_tau{TAU:g}", "ratio_max")},
    }  # fmt: skip


def _by_prompt(arm: Arm, when: str, logprobs: torch.Tensor, mu: torch.Tensor, batch: TokenBatch) -> pd.DataFrame:
    mask = batch.response_mask.numpy()
    terms = np.where(mask, k3_terms((logprobs - mu).double().numpy()), 0.0).sum(1)
    names = [uid.rpartition("/")[0] for uid in batch.uids]
    table = pd.DataFrame({"prompt": names, "tokens": mask.sum(1), "k3_sum": terms})
    return table.groupby("prompt", as_index=False, sort=False).sum().assign(arm=arm.name, **{"pass": when})


def _with_efficiency(table: pd.DataFrame) -> pd.DataFrame:
    """(k3_none - k3_arm) / (k3_none - k3_R3) within each pass: 0 at none, 1 at R3."""
    out = table.copy()
    out["efficiency"] = np.nan
    for when in table["pass"].unique():
        here = table["pass"] == when
        k3 = table[here].set_index("arm")["k3"].astype(float)
        span = k3["none"] - k3["full"]
        if span != 0:
            out.loc[here, "efficiency"] = ((k3["none"] - k3) / span).to_numpy()
    return out.astype({"efficiency": object}).where(out["efficiency"].notna(), None)
