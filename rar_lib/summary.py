"""What a table of runs shows, from the table of steps of one run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from rar_lib.config import JobConfig
from rar_lib.measure import Row
from rar_lib.metrics.collapse import collapsed_at
from rar_lib.planner import Planner


def settings(config: JobConfig) -> dict[str, Any]:
    """What a summary repeats of the config, so that a table of runs needs nothing else."""
    replay, algorithm, rollout = config.router_replay, config.algorithm, config.rollout
    return {
        "arm": replay.arm,
        "policy": replay.policy,
        "unit": replay.unit,
        "budget": replay.budget,
        "score": replay.score.estimator if "score" in Planner(replay).needs else None,
        "objective": algorithm.objective,
        "anchor": algorithm.anchor,
        "corrections": "+".join(one.name for one in algorithm.corrections) or None,
        "router": "frozen" if algorithm.freeze_router else "learns",
        "gates": replay.gates,
        "updates_per_batch": algorithm.updates_per_batch,
        "precision": rollout.precision,
        "computes_alike": (rollout.dtype, config.trainer.dtype, rollout.precision, rollout.router_noise)
        == ("float32", "float32", "native", 0.0),
        "rollout_engine": rollout.engine,
        "trainer_engine": config.trainer.engine,
        "seed": config.seed,
    }


def summarise(config: JobConfig, run: str, table: pd.DataFrame, facts: Row) -> dict[str, Any]:
    """One flat record; what was not measured is None. k3, target_shift and noise floors are nats a token, seconds_per_step is by part.

    Args:
        config: of the run.
        run: name of its folder.
        table: a row a step, as metrics.parquet has them.
        facts: what the steps do not hold: evaluations, negative control, divergence.
    """

    def values(column: str) -> pd.Series:
        return table[column].dropna() if column in table else pd.Series(dtype=float)

    def mean(column: str, weight: str | None = None) -> float | None:
        """Mean over steps; of a mean over tokens or cells, weighted by their number."""
        column_values = values(column)
        if column_values.empty:
            return None
        weights = None if weight is None else table.loc[column_values.index, weight]
        return float(np.average(column_values, weights=weights))

    def largest(column: str) -> float | None:
        return None if values(column).empty else float(values(column).max())

    def smallest(*columns: str) -> float | None:
        seen = [float(values(c).min()) for c in columns if not values(c).empty]
        return min(seen) if seen else None

    tokens, rewards = "mismatch/rollout_old/tokens", table["reward/mean"].tolist() if len(table) else []
    times = [c for c in table if str(c).startswith("time/")]
    return {
        "run": run,
        **settings(config),
        "nominal": mean("replay/nominal"),
        "binding": mean("replay/binding"),
        "target_shift": mean("replay/target_shift", tokens),
        "executed_equals_resolved": smallest(
            "replay/old/executed_equals_resolved", "replay/update/executed_equals_resolved"
        ),
        "steps": len(table),
        "diverged": None,
        "collapsed_at": collapsed_at(rewards)
        if min(rewards, default=0) >= 0
        else None,  # the rule is of rewards from 0 up
        "reward_first": float(table["reward/mean"].iloc[0]) if len(table) else None,
        "reward_last": float(table["reward/mean"].iloc[-1]) if len(table) else None,
        **facts,
        "k3_rollout_old": mean("mismatch/rollout_old/k3", tokens),
        "k3_old_new": mean("mismatch/old_new/k3", tokens),
        "extreme_fraction_tau2": mean("mismatch/rollout_old/extreme_fraction_tau2", tokens),
        "ratio_max": largest("mismatch/rollout_old/ratio_max"),
        "grad_norm": mean("update/grad_norm"),
        "grad_norm_max": largest("update/grad_norm_max"),
        "router_flip": mean("agreement/rollout_native/router_flip", "agreement/rollout_native/cells"),
        "token_any_flip": mean("agreement/rollout_native/token_any_flip"),
        "coverage": mean("replay/coverage"),
        "missing": mean("replay/missing"),
        "noise_floor_rollout": largest("noise_floor/rollout/k3"),
        "noise_floor_trainer": largest("noise_floor/trainer/k3"),
        "route_bytes_per_token": mean("routes/bytes_per_token"),
        "seconds_per_step": {str(c).removeprefix("time/"): mean(str(c)) for c in times},
    }
