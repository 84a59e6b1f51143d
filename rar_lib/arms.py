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

from rar_lib.config import RouterReplayConfig, ScoreConfig
from rar_lib.engines.base import LogprobResult, Objective, Replay, RolloutResult, TokenBatch, Trainer
from rar_lib.errors import ReplayError
from rar_lib.measure import TAU, plan_binding, rollout_logprobs
from rar_lib.metrics.mismatch import k3_terms, mismatch
from rar_lib.metrics.replay import drift, efficiency, target_shift
from rar_lib.planner import Planner
from rar_lib.replay.counts import PassCounts
from rar_lib.replay.flip_model import FlipModel
from rar_lib.replay.plan import Unit

DEFAULT_SCORE = ScoreConfig()
# (old log-probs of the arm [S, T], rows of an update [n]) -> the objective of that update
Objectives = Callable[[torch.Tensor, torch.Tensor], Objective]


@dataclass(frozen=True)
class Arm:
    """One plan to score: `policy` none replays nothing, any other chooses among the rollout's routes.

    Attributes:
        policy: `none` or a name of POLICIES.
        unit: what is counted and forced.
        budget: share of the recorded units; None for policies without one.
        seed: of the keys.
        score: for policies that rank experts.
        ratio: of policy threshold.
    """

    policy: str
    unit: Unit = "token_layer"
    budget: str | None = None
    seed: int = 0
    score: ScoreConfig = DEFAULT_SCORE
    ratio: float | None = None

    @property
    def name(self) -> str:
        """Policy, and what of budget, unit, score, ratio and seed is not the default."""
        parts = [self.policy, self.budget or "", self.unit if self.budget or self.unit != "token_layer" else ""]
        if self.score != ScoreConfig():
            parts.append(f"{self.score.estimator}/{self.score.aggregation}/{self.score.labels}")
        if self.ratio is not None:
            parts.append(f"ratio {self.ratio:g}")
        if self.seed:
            parts.append(f"seed {self.seed}")
        return " ".join(part for part in parts if part)

    def planner(self) -> Planner:
        """What makes its plans.

        Raises:
            ConfigError: for parts that do not go together.
        """
        return Planner(
            RouterReplayConfig(
                policy=self.policy,
                unit=self.unit,
                budget=self.budget,
                seed=self.seed,
                score=self.score,
                ratio=self.ratio,
            )
        )


@dataclass(frozen=True)
class ArmScores:
    """What score_arms returns.

    Attributes:
        table: a row an arm and pass (`old`, `new`): arm, policy, unit, budget, seed, pass, planned (units), nominal, binding
            (against native_free at θ_old), forced (share of recorded cells whose executed set is not native_local),
            fidelity, regret, executed_equals_resolved, target_shift (k3 in nats against the native pass at the same weights), k3
            (nats, rollout/old or rollout/new), extreme_fraction_tau2, ratio_max, efficiency (None where none and R3 differ by no more
            than `noise_floor`), and,
            after updates, drift_planned, drift_unplanned, router_gradient_forced, router_gradient_free.
        by_prompt: a row an arm, pass and prompt: tokens and the sum of k3 in nats, for intervals clustered by prompt.
        native: the native pass at θ_old, with its routes and margins.
    """

    table: pd.DataFrame
    by_prompt: pd.DataFrame
    native: LogprobResult


def score_arms(
    trainer: Trainer,
    batch: TokenBatch,
    sample: RolloutResult,
    arms: Sequence[Arm],
    *,
    temperature: float = 1.0,
    objectives: Objectives | None = None,
    flips: FlipModel | None = None,
    noise_floor: float = 0.0,
    batch_number: int = 0,
) -> ArmScores:
    """Score one rollout batch under several plans.

    Args:
        trainer: at the weights that sampled (θ_old); its state is put back afterwards.
        batch: the tokens; its `shares` are the updates.
        sample: log-probs and routes of the rollout on the same tokens.
        arms: plans to score; none and full R3 (policy `full`) are always among them, since efficiency is measured between.
        temperature: of the sampling.
        objectives: makes the objective of each update; without it only the old pass is scored.
        flips: P(flip) from earlier batches, for policy swap.
        noise_floor: k3 of an engine against itself, nats a token.
        batch_number: for policies that draw anew for each batch.

    Raises:
        ConfigError: for an arm whose parts do not go together.
        ReplayError: for policy swap without `flips`.
    """
    every = list(dict.fromkeys([Arm("none"), Arm("full"), *arms]))  # efficiency lies between the first two
    planners = {arm: arm.planner() for arm in every if arm.policy != "none"}
    for arm, planner in planners.items():
        if planner.learns_flips:
            if flips is None:
                raise ReplayError(f"arm {arm.name}: policy {arm.policy} needs `flips`, P(flip) of earlier batches")
            planner.flips = flips
    mu = rollout_logprobs(batch, sample)
    native = trainer.logprobs(batch, temperature=temperature, capture="margins")
    rows: list[dict[str, object]] = []
    prompts: list[pd.DataFrame] = []
    passes: dict[object, LogprobResult] = {}

    def looked(planner: Planner) -> LogprobResult:
        """The planning pass; arms that look at the same things share one, since all start from the same weights."""
        key = (planner.capture, planner.request(batch_number))
        if key not in passes:
            passes[key] = trainer.logprobs(batch, temperature=temperature, capture=key[0], signals=key[1])
        return passes[key]

    def note(
        arm: Arm, when: str, replay: Replay | None, result: LogprobResult, seen: LogprobResult, live: LogprobResult
    ) -> dict[str, object]:
        row = _row(arm, when, replay, result, mu, batch, seen, live)
        rows.append(row)
        prompts.append(_by_prompt(arm, when, result.logprobs, mu, batch))
        return row

    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder))
        for arm in every:
            replay, seen = None, native
            if arm.policy != "none":
                planner = planners[arm]
                if planner.looks:
                    seen = looked(planner)
                    planner.see(seen, batch, batch_number)
                replay = planner.plan(sample.trace, batch, batch_number, seen)
            old = (
                native
                if replay is None
                else trainer.logprobs(batch, temperature=temperature, replay=replay, measure=True)
            )
            note(arm, "old", replay, old, seen, native)
            if objectives is None:
                continue
            try:
                live, new, counts = _after_updates(trainer, batch, replay, old, objectives, temperature)
            finally:
                trainer.load(Path(folder))
            row = note(arm, "new", replay, new, seen, live)
            row |= {f"router_gradient_{kind}": counts.router_gradient(kind) for kind in ("forced", "free")}
    return ArmScores(_with_efficiency(pd.DataFrame(rows), noise_floor), pd.concat(prompts, ignore_index=True), native)


def _after_updates(
    trainer: Trainer,
    batch: TokenBatch,
    replay: Replay | None,
    old: LogprobResult,
    objectives: Objectives,
    temperature: float,
) -> tuple[LogprobResult, LogprobResult, PassCounts]:
    """The updates of the batch under a replay; then the native pass, the replayed pass, and the counts of the updates."""
    counts = PassCounts()
    for share in batch.update_shares():
        done = trainer.update(
            batch.select(share), objectives(old.logprobs, share), temperature=temperature,
            replay=None if replay is None else replay.select(share), measure=True,
        )  # fmt: skip
        counts = counts + done.counts
    live = trainer.logprobs(batch, temperature=temperature, capture=True)
    if replay is None:
        return live, live, counts
    return live, trainer.logprobs(batch, temperature=temperature, replay=replay, measure=True), counts


def _row(
    arm: Arm,
    when: str,
    replay: Replay | None,
    result: LogprobResult,
    mu: torch.Tensor,
    batch: TokenBatch,
    native: LogprobResult,
    live: LogprobResult,
) -> dict[str, object]:
    values = mismatch(result.logprobs, mu, batch.response_mask, tau=TAU)
    row: dict[str, object] = {
        "arm": arm.name, "policy": arm.policy, "unit": arm.unit, "budget": arm.budget, "seed": arm.seed, "pass": when,
        "planned": 0, "nominal": 0.0, "binding": 0.0, "forced": 0.0, "fidelity": None, "regret": None,
        "executed_equals_resolved": None,
        "target_shift": target_shift(result.logprobs, live.logprobs, batch.response_mask),
        **{name: values[name] for name in ("k3", f"extreme_fraction_tau{TAU:g}", "ratio_max")},
    }  # fmt: skip
    if replay is None:
        return row
    plan, trace, counts = replay.plan, replay.trace, result.counts
    assert native.trace is not None
    known = trace.recorded & native.trace.recorded
    row |= {
        "planned": plan.budget, "nominal": plan.nominal,
        "binding": plan_binding(replay, native.trace),
        "forced": counts.changed_cells / max(1, int(trace.recorded.sum())),
        "fidelity": counts.kept / (counts.cells * trace.header.top_k) if counts.cells else None,
        "regret": counts.regret / counts.cells if counts.cells and counts.regret is not None else None,
        "executed_equals_resolved": counts.executed_equals_resolved,
    }  # fmt: skip
    if when == "new":
        assert live.trace is not None
        moved = drift(native.trace.experts, live.trace.experts, plan.planned, known)
        row |= {"drift_planned": moved[0], "drift_unplanned": moved[1]}
    return row


def _by_prompt(arm: Arm, when: str, logprobs: torch.Tensor, mu: torch.Tensor, batch: TokenBatch) -> pd.DataFrame:
    mask = batch.response_mask.numpy()
    terms = np.where(mask, k3_terms((logprobs - mu).double().numpy()), 0.0).sum(1)
    names = [uid.rpartition("/")[0] for uid in batch.uids]
    table = pd.DataFrame({"prompt": names, "tokens": mask.sum(1), "k3_sum": terms})
    return table.groupby("prompt", as_index=False, sort=False).sum().assign(arm=arm.name, **{"pass": when})


def _with_efficiency(table: pd.DataFrame, noise_floor: float) -> pd.DataFrame:
    """(k3_none - k3_arm) / (k3_none - k3_R3) within each pass: 0 at none, 1 at R3."""
    out = table.assign(efficiency=None)
    for when in table["pass"].unique():
        here = table["pass"] == when
        k3 = table[here].set_index("arm")["k3"].astype(float)
        out.loc[here, "efficiency"] = [efficiency(k3["none"], value, k3["full"], noise_floor) for value in k3]
    return out
