"""What the scores of experts are worth, before any policy uses them: agreement of the estimators, stability, labels, P(flip).

At each stage of a run one batch is sampled and one native pass with a backward gives all four estimators. A ranking that
two halves of the prompts do not share ranks noise; one that differs from `param_exact` is a cheaper guess at something else.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rar_lib.config import JobConfig
from rar_lib.engines.session import EngineSession
from rar_lib.progress import Style
from rar_lib.replay.scores import (
    ESTIMATORS,
    Aggregation,
    Estimator,
    ExpertScore,
    SignalRequest,
    expert_score,
)
from rar_lib.replay.stability import rank_agreement
from rar_lib.stages import flip_calibration_table, stages

logger = logging.getLogger("rar")
SHOWN: tuple[tuple[Estimator, Aggregation], ...] = (
    ("gate", "per_route"), ("gate", "mass"), ("gate", "shrunk"), ("gate", "gate_free"), ("param", "per_route"),
    ("param_exact", "per_route"), ("swap", "per_route"),
)  # fmt: skip


@dataclass(frozen=True)
class ScoreStudy:
    """What `study_scores` returns.

    Attributes:
        agreement: stage, a, b, spearman (within layers, replay.scores.rank_agreement): every ordered pair of estimators (per_route).
        stability: stage, name, spearman, null_low, null_high; resampled labels are named so.
        labels: stage, estimator, spearman of the scores by sampled and by resampled labels.
        drift: from, to, estimator, spearman between the scores of consecutive stages.
        calibration: stage, predicted, observed, cells.
        scores: stage -> the gate score per route.
        layers: MoE layer numbers.
        facts: engines and run.
    """

    agreement: pd.DataFrame
    stability: pd.DataFrame
    labels: pd.DataFrame
    drift: pd.DataFrame
    calibration: pd.DataFrame
    scores: dict[str, ExpertScore]
    layers: tuple[int, ...]
    facts: dict[str, Any]


def study_scores(job: JobConfig, session: EngineSession, runs: Path, show: Style = "auto") -> ScoreStudy:
    """Score the experts at each stage of a job without replay.

    Args:
        job: engines resolved, without replay.
        session: of the engines.
        runs: folder of runs.
        show: progress of the job, if it was not run before.
    """
    tables: dict[str, list[dict[str, Any]]] = {"agreement": [], "stability": [], "labels": [], "drift": []}
    calibration, scores, every = [], {}, []
    layers: tuple[int, ...] = ()
    facts: dict[str, Any] = {"rollout_engine": job.rollout.engine, "trainer_engine": job.trainer.engine}
    request = SignalRequest(frozenset(ESTIMATORS))
    for stage in stages(job, session, runs, show):
        facts["run"] = stage.run
        flips = stage.flips()
        sample, batch, _ = stage.sample(1)
        passes = {}
        for labels in ("rollout", "resampled"):
            passes[labels] = stage.trainer.logprobs(
                batch, temperature=job.rollout.sampling.temperature, capture="margins",
                signals=replace(request, labels=labels, seed=job.seed),
            )  # fmt: skip
        calibration.append(flip_calibration_table(flips, sample, passes["rollout"]).assign(stage=stage.name))
        native = passes["rollout"].trace
        assert native is not None
        layers, groups = native.header.moe_layers, batch.groups.numpy()
        made = {
            (estimator, aggregation, labels): expert_score(
                result.signals, native, estimator, aggregation, groups=groups
            )
            for labels, result in passes.items()
            if result.signals is not None
            for estimator, aggregation in SHOWN
        }
        for (estimator, aggregation, labels), score in made.items():
            if labels == "rollout" or (estimator, aggregation) == ("gate", "per_route"):
                name = f"{estimator} {aggregation}" + ("" if labels == "rollout" else ", resampled")
                found = score.stability
                assert found is not None
                row = {"spearman": found.spearman, "null_low": found.null_low, "null_high": found.null_high}
                tables["stability"].append({"stage": stage.name, "name": name, **row})
        now = {e: made[e, "per_route", "rollout"] for e in ESTIMATORS}
        for a, b in product(ESTIMATORS, ESTIMATORS):
            value = rank_agreement(now[a].values, now[b].values)
            tables["agreement"].append({"stage": stage.name, "a": a, "b": b, "spearman": value})
        for estimator in ESTIMATORS:
            value = rank_agreement(now[estimator].values, made[estimator, "per_route", "resampled"].values)
            tables["labels"].append({"stage": stage.name, "estimator": estimator, "spearman": value})
        logger.info("scores: %s", stage.name)
        scores[stage.name] = now["gate"]
        every.append((stage.name, now))
    for (before, old), (after, new) in pairwise(every):
        for estimator in ESTIMATORS:
            value = rank_agreement(old[estimator].values, new[estimator].values)
            tables["drift"].append({"from": before, "to": after, "estimator": estimator, "spearman": value})
    frames = {name: pd.DataFrame(rows) for name, rows in tables.items()}
    return ScoreStudy(
        **frames, calibration=pd.concat(calibration, ignore_index=True), scores=scores, layers=layers, facts=facts
    )


def score_table(study: ScoreStudy) -> pd.DataFrame:
    """The numbers as text, a row an estimator: mean over stages, and the range."""
    rows = []
    for estimator in ESTIMATORS:
        exact = study.agreement[(study.agreement["a"] == estimator) & (study.agreement["b"] == "param_exact")]
        stable = study.stability[study.stability["name"] == f"{estimator} per_route"]
        rows.append(
            {
                "estimator": estimator,
                "with param_exact": _range(exact["spearman"]),
                "halves of the prompts": _range(stable["spearman"]),
                "permuted (95 %)": f"{stable['null_low'].min():.2f} to {stable['null_high'].max():.2f}",
                "sampled and resampled labels": _range(study.labels.query("estimator == @estimator")["spearman"]),
                "stage to stage": _range(study.drift.query("estimator == @estimator")["spearman"]),
            }
        )
    return pd.DataFrame(rows)


def _range(values: pd.Series) -> str:
    known = values.dropna().to_numpy(float)
    if not known.size:
        return "undefined"
    return f"{np.mean(known):.2f} [{known.min():.2f}, {known.max():.2f}]"
