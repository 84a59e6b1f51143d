"""Stages: a job without replay at its start and at its kept checkpoints, ready to sample and to score.

A claim about scores or policies needs more than one checkpoint. At each stage the trainer holds the weights and moments
of that moment, the rollout has the same weights, and prompts are fresh: far from those that the run trained on, and others at
each stage.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from rar_lib.arms import Objectives
from rar_lib.checkpoint import load_tokenizer, resolve_checkpoint, special_tokens
from rar_lib.config import JobConfig
from rar_lib.engines.base import LogprobResult, Objective, Rollout, RolloutResult, TokenBatch, Trainer
from rar_lib.engines.session import EngineSession
from rar_lib.errors import ReplayError
from rar_lib.job import noise_floor_row, run_job
from rar_lib.measure import rollout_logprobs
from rar_lib.metrics.agreement import agreement
from rar_lib.progress import Style
from rar_lib.prompts import Prompts
from rar_lib.replay.flip_model import FlipModel
from rar_lib.rl.advantages import group_advantages
from rar_lib.rl.learning import Lesson
from rar_lib.seeding import derive_seed
from rar_lib.tasks import Task

FIRST_BATCH = 10_000  # of prompts


@dataclass(frozen=True)
class Stage:
    """One moment of a run.

    Attributes:
        name: `step N`.
        number: of its first batch of prompts.
        run: name of the run folder.
        job: the job without replay.
        trainer: at the weights and moments of that moment, until the next stage is asked for.
        rollout: at the same weights.
        prompts: of the job.
    """

    name: str
    number: int
    run: str
    job: JobConfig
    trainer: Trainer
    rollout: Rollout
    prompts: Prompts

    def sample(self, which: int) -> tuple[RolloutResult, TokenBatch, Objectives]:
        """Batch number `which` of the stage, and what makes the objective of its updates from an arm's old log-probs."""
        number = self.number + which
        problems = self.prompts.train(number)
        sample, batch = self.prompts.sample(self.rollout, problems, derive_seed(self.job.seed, "stage", number))
        advantages, _ = group_advantages(self.prompts.rewards(sample, problems), batch.groups)
        mask = batch.response_mask

        mu = rollout_logprobs(batch, sample)

        def objectives(old: torch.Tensor, share: torch.Tensor) -> Objective:
            return Lesson(self.job.algorithm, mu, old, advantages, mask).objective(share)

        return sample, batch, objectives

    def noise_floor(self, sample: RolloutResult, batch: TokenBatch) -> float:
        """The larger k3 (nats a token) of the two engines against themselves; what cannot be measured is left out (job.noise_floor_row)."""
        temperature, mu = self.job.rollout.sampling.temperature, rollout_logprobs(batch, sample)
        native = self.trainer.logprobs(batch, temperature=temperature)
        row = noise_floor_row(self.job, self.rollout, self.trainer, batch, mu, native)
        return max((float(value) for name, value in row.items() if name.endswith("/k3")), default=0.0)

    def flips(self) -> FlipModel:
        """P(flip) from batch 0 of the stage."""
        sample, batch, _ = self.sample(0)
        native = self.trainer.logprobs(batch, temperature=self.job.rollout.sampling.temperature, capture="margins")
        return FlipModel.empty().seen(*_flipped(sample, native))


def stages(job: JobConfig, session: EngineSession, runs: Path, show: Style = "auto") -> Iterator[Stage]:
    """The stages of a job, in order; the job is run first if it was not.

    Args:
        job: without replay.
        session: of the engines.
        runs: folder of runs.
        show: progress of the job.

    Raises:
        ReplayError: for a job with replay.
    """
    if job.router_replay.arm != "none":
        raise ReplayError(f"stages: expected a job without replay, found {job.router_replay.arm}")
    base = run_job(job, session, runs_dir=runs, show=show)
    path = resolve_checkpoint(job.model.path)
    tokenizer = load_tokenizer(path)
    special = special_tokens(path, tokenizer)
    prompts = Prompts(job, Task(job.task), tokenizer, special)
    rollout, trainer = session.open(job, path, special)
    with tempfile.TemporaryDirectory() as start:
        trainer.save(Path(start))
        for folder in (Path(start), *sorted((base.path / "checkpoints").glob("step-*"))):
            step = 0 if folder == Path(start) else int(folder.name.removeprefix("step-"))
            trainer.load(folder)
            rollout.load_weights(trainer.weights(), step)
            yield Stage(f"step {step}", FIRST_BATCH + 100 * step, base.path.name, job, trainer, rollout, prompts)


def flip_calibration_table(flips: FlipModel, sample: RolloutResult, native: LogprobResult) -> pd.DataFrame:
    """Predicted P(flip) of earlier batches against the flips of this one, in ten groups of cells: predicted, observed, cells."""
    margins, flipped, known = _flipped(sample, native)
    use = known & np.isfinite(margins)
    predicted, happened = flips.probability(margins[use]), flipped[use]
    groups = np.array_split(np.argsort(predicted, kind="stable"), 10)
    return pd.DataFrame(
        [{"predicted": predicted[g].mean(), "observed": happened[g].mean(), "cells": len(g)} for g in groups if len(g)]
    )


def _flipped(sample: RolloutResult, native: LogprobResult) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Margins, flips and known cells of a batch, each `[N, L]`."""
    assert native.trace is not None
    assert native.trace.margins is not None
    compared = agreement(sample.trace, native.trace)
    return native.trace.margins, compared.flipped, compared.known
