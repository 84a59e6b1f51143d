"""One run, readable from top to bottom: sample, score at θ_old, learn, push, measure.

    rar run --config FILE

What is simplified: one reward function and no reward model, no reference model, GRPO with token mean, whole groups in
each update, each token in exactly one update of its batch. What is not: rollout and trainer are two engines, each with
its own router; all three log-prob sources are kept; and every batch is scored natively and under full replay, so
that each run measures the pair on its own tokens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from rar_lib import measure
from rar_lib.checkpoint import (
    SpecialTokens,
    digest_checkpoint,
    load_tokenizer,
    resolve_checkpoint,
    router_header,
    special_tokens,
)
from rar_lib.config import JobConfig
from rar_lib.engines.base import (
    Capture,
    LogprobResult,
    Objective,
    Replay,
    Rollout,
    RolloutResult,
    TokenBatch,
    Trainer,
    UpdateResult,
)
from rar_lib.engines.session import EngineSession, resolve_engines
from rar_lib.errors import EngineError, ReplayError
from rar_lib.metrics.mismatch import noise_floor
from rar_lib.progress import Style, progress
from rar_lib.replay.control import require_live, wrong_routes
from rar_lib.replay.modes import MODES
from rar_lib.replay.policies import Candidates, get_policy, make_plan, require_policy
from rar_lib.rl.advantages import group_advantages
from rar_lib.rl.objectives import grpo_loss
from rar_lib.runs.store import RUNS_DIR, RunStore, write_json
from rar_lib.seeding import derive_seed
from rar_lib.tasks import Problem, Task
from rar_lib.traces.trace import RouteTrace

logger = logging.getLogger("rar")
NOISE_SEQUENCES = 64  # scored one by one for the trainer's noise floor: CPU kernels sum alike at most larger sizes

LARGEST_SYNC_GAP = (
    0.1  # nats a token; an fp8-rounded bf16 rollout lies near 0.01. Rollout.check_sync is the exact check
)


@dataclass(frozen=True)
class RunResult:
    """A complete run, as its folder holds it."""

    path: Path
    summary: dict[str, Any]
    metrics: pd.DataFrame
    paired: pd.DataFrame

    @classmethod
    def load(cls, store: RunStore) -> RunResult:
        """Read a complete run folder."""
        return cls(store.path, store.summary(), store.metrics(), store.paired())

    @property
    def arm(self) -> str:
        """'none', 'R2' or 'R3'."""
        return self.summary["arm"]

    def __repr__(self) -> str:
        engines = f"{self.summary['rollout_engine']} + {self.summary['trainer_engine']}"
        return f"RunResult({self.path.name}: {self.summary['steps']} steps on {engines})"


def run_job(
    config: JobConfig,
    session: EngineSession | None = None,
    *,
    runs_dir: Path | None = None,
    show: Style = "auto",
    say: Callable[[str], None] = print,
) -> RunResult:
    """Run a job, continue it, or return it if it is complete.

    Args:
        config: what to run.
        session: engines to share with other runs; without one, the run's engines are shut down at its end.
        runs_dir: folder of all runs, by default data/runs.
        show: progress as a bar, log lines, or nothing.
        say: told in one line when `engine: auto` falls back.

    Raises:
        ConfigError, EngineError, ReplayError, RunError: see errors.py; nothing is left half-written.
    """
    config = resolve_engines(config, say)
    path, task = resolve_checkpoint(config.model.path), Task(config.task)
    require_policy(config.router_replay.policy, config.router_replay.unit, config.router_replay.budget)
    router_header(path)  # a model without replayable routers is refused before anything is started
    digests = {"checkpoint": digest_checkpoint(path), "task": task.digest()}
    store = RunStore(runs_dir or RUNS_DIR, config, digests)
    with store.held():
        if not store.complete:
            with contextlib.nullcontext(session) if session is not None else EngineSession() as engines:
                assert engines is not None
                _train(config, path, task, engines, store, show)
        return RunResult.load(store)


def _train(config: JobConfig, path: Path, task: Task, engines: EngineSession, store: RunStore, show: Style) -> None:
    """The loop."""
    diagnose = config.diagnostics.enabled
    mode, needs = MODES[config.router_replay.arm], get_policy(config.router_replay.policy).needs
    look: Capture = "margins" if "margins" in needs else True
    tokenizer = load_tokenizer(path)
    special = special_tokens(path, tokenizer)
    rollout, trainer = engines.open(config, path, special)
    temperature = config.rollout.sampling.temperature
    prompts = _Prompts(config, task, tokenizer, special)
    store.write_environment()
    start, rows, paired, facts = _resume(store, trainer)
    if start:
        rollout.load_weights(trainer.weights(), start)
    else:
        facts["negative_control"] = _negative_control(config, rollout, trainer, prompts)
        facts["evaluation_first"] = _evaluate(config, rollout, prompts)
    bar = progress(store.path.name, config.steps, start, show)

    for step in range(start, config.steps):
        # 1. Sample at θ_old, and reward.
        clock = _Clock()
        problems = prompts.train(step)
        sample, batch = prompts.sample(rollout, problems, derive_seed(config.seed, "rollout", step))
        rewards = torch.tensor(
            [task.score(prompts.text(r), p) for r, p in zip(sample.responses, problems, strict=True)]
        )
        advantages, flat_groups = group_advantages(rewards, batch.groups)
        mask, mu = batch.response_mask, measure.rollout_logprobs(batch, sample)
        clock.tick("rollout")

        # 2. Score at θ_old under the run's mode; before it, natively, if the policy chooses by the live choice.
        traces, native = {"rollout": sample.trace}, None
        if mode.in_old_pass is not None and "native" in needs:
            native = trainer.logprobs(batch, temperature=temperature, capture=look)
        clock.tick("planning")
        old_replay = _planned(config, mode.old_record(traces), batch, step, native)
        old = trainer.logprobs(
            batch, temperature=temperature, replay=old_replay, capture=look if old_replay is None else False
        )
        clock.tick("old")
        if old_replay is None:
            native = old
            assert old.trace is not None
            traces["old"] = old.trace

        # And once more, so that every run has its tokens scored both natively and under full R3.
        scored = {} if native is None else {"none": native}
        if old_replay is not None and old_replay.plan.policy == "full":
            scored["R3"] = old
        if diagnose and "none" not in scored:
            scored["none"] = trainer.logprobs(batch, temperature=temperature, capture=True)
        if diagnose and "R3" not in scored:
            scored["R3"] = trainer.logprobs(batch, temperature=temperature, replay=Replay.full(sample.trace))
        clock.tick("paired")
        if step == start:
            _require_sync(mu, scored.get("none") or trainer.logprobs(batch, temperature=temperature), batch)
        floor: measure.Row = {}
        if diagnose and _due(config, step, config.diagnostics.noise_floor_every):
            floor = _noise_floor(config, rollout, trainer, batch, mu, scored["none"])
        clock.tick("noise_floor")

        # 3. Learn: one optimizer step on each share of the prompts, replaying what the mode says.
        update_replay = (
            old_replay  # one plan in every pass of a batch
            if mode.in_updates == mode.in_old_pass
            else _planned(config, mode.update_record(traces), batch, step, native)
        )
        updates: list[tuple[torch.Tensor, UpdateResult]] = []
        for share in batch.update_shares():
            result = trainer.update(
                batch.select(share),
                _objective(config, old.logprobs[share], advantages[share], mask[share]),
                temperature=temperature,
                replay=None if update_replay is None else update_replay.select(share),
            )
            if not updates:
                _require_identity(result.logprobs, old.logprobs[share])
            updates.append((share, result))
        clock.tick("updates")

        # 4. Push the new weights.
        rollout.load_weights(trainer.weights(), step + 1)
        clock.tick("sync")

        # 5. Measure and store.
        row: measure.Row = {
            "step": step,
            **measure.sample_row(rewards, batch, sample, flat_groups),
            **measure.mismatch_row(mu, old.logprobs, updates, mask),
            **measure.replay_row(sample, old, old_replay, updates, update_replay),
            **measure.update_row(updates, int(mask.sum())),
        }
        if diagnose:
            row |= measure.paired_row(mu, scored, mask) | measure.agreement_row(sample, scored["none"]) | floor
            paired += measure.paired_by_prompt(step, mu, scored, batch, sample)
            if _due(config, step, config.diagnostics.save_traces_every):
                _save_traces(store, step, sample, scored["none"])
        last = step + 1 == config.steps
        if config.evaluation.every and not last and (step + 1) % config.evaluation.every == 0:
            row["evaluation/reward"] = _evaluate(config, rollout, prompts)
        rows.append(row | clock.row)
        store.write_tables(rows, paired)
        if last or (config.checkpoint_every and (step + 1) % config.checkpoint_every == 0):
            with store.new_checkpoint(step + 1) as folder:
                trainer.save(folder)
                write_json(folder / "state.json", {"rows": rows, "paired": paired, "facts": facts})
        bar.step(step + 1, f"reward {row['reward/mean']:.3f} k3 {row['mismatch/rollout_old/k3']:.2e}")
    bar.close()
    facts["evaluation_last"] = _evaluate(config, rollout, prompts)
    facts["evaluated_on"] = task.evaluated_on
    store.write_tables(rows, paired)  # a kill between the last checkpoint and its tables leaves them one step behind
    store.finish(_summarise(config, store.path.name, pd.DataFrame(rows), facts))


# ---------------------------------------------------------------- what the loop is made of


class _Prompts:
    """Problems by step, and what the engines need of them."""

    def __init__(self, config: JobConfig, task: Task, tokenizer: Any, special: SpecialTokens) -> None:
        self.config, self.task, self.tokenizer, self.special = config, task, tokenizer, special
        self._first = derive_seed(config.seed, "problems") % 2**28

    def train(self, step: int) -> list[Problem]:
        """`prompts_per_step` problems, each `group_size` times in a row."""
        n, g = self.config.algorithm.prompts_per_step, self.config.algorithm.group_size
        first = self._first + step * n
        return [p for i in range(n) for p in [self.task.problem(first + i)] * g]

    def sample(
        self, rollout: Rollout, problems: list[Problem], seed: int, group_size: int | None = None
    ) -> tuple[RolloutResult, TokenBatch]:
        """Responses and their batch."""
        g = group_size or self.config.algorithm.group_size
        prompts = [self.tokenizer(p.prompt)["input_ids"] for p in problems]
        uids = [f"{p.uid}/{i // g}.{i % g}" for i, p in enumerate(problems)]
        sample = rollout.generate(prompts, self.config.rollout.sampling, uids, seed)
        batch = TokenBatch.pack(
            prompts,
            sample.responses,
            uids,
            [i // g for i in range(len(problems))],
            self.special.pad,
            self.config.algorithm.updates_per_batch,
        )
        return sample, batch

    def text(self, response: tuple[int, ...]) -> str:
        """Decoded response without its end token."""
        return self.tokenizer.decode([t for t in response if t not in self.special.end])


class _Clock:
    """Seconds between ticks, as `time/` columns."""

    def __init__(self) -> None:
        self.row: measure.Row = {}
        self._last = time.perf_counter()

    def tick(self, name: str) -> None:
        """What took the time since the last tick."""
        now = time.perf_counter()
        self.row[f"time/{name}"], self._last = now - self._last, now


def _planned(
    config: JobConfig, record: RouteTrace | None, batch: TokenBatch, step: int, native: LogprobResult | None
) -> Replay | None:
    """The record with the plan of the run's policy; None where the mode replays nothing."""
    if record is None:
        return None
    wanted, seen = config.router_replay, None if native is None else native.trace
    candidates = Candidates(record, batch.uids, wanted.seed, step, seen)
    return Replay(record, make_plan(wanted.policy, candidates, wanted.unit, wanted.budget))


def _objective(config: JobConfig, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> Objective:
    """GRPO against the old log-probs, for the rows of one update."""
    algorithm = config.algorithm

    def objective(logp: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        return grpo_loss(logp, old[rows], advantages[rows], mask[rows], algorithm.clip_low, algorithm.clip_high)

    return objective


def _negative_control(config: JobConfig, rollout: Rollout, trainer: Trainer, prompts: _Prompts) -> float | None:
    """Mean |Δ log-prob| under deliberately wrong routes, on a few prompts of the first step. Refuses a dead replay.

    None where every router uses all its experts: no route is wrong there, and replay has no effect.
    """
    problems = prompts.train(0)[: 2 * config.algorithm.group_size]
    _, batch = prompts.sample(rollout, problems, derive_seed(config.seed, "control"))
    temperature = config.rollout.sampling.temperature
    native = trainer.logprobs(batch, temperature=temperature, capture=True)
    assert native.trace is not None
    header = native.trace.header
    if header.top_k == header.num_experts:
        return None
    wrong = wrong_routes(native.trace)
    moved = trainer.logprobs(batch, temperature=temperature, replay=Replay.full(wrong), capture=True)
    assert moved.trace is not None
    mask = batch.response_mask
    return require_live(native.logprobs[mask].numpy(), moved.logprobs[mask].numpy(), wrong, moved.trace)


def _evaluate(config: JobConfig, rollout: Rollout, prompts: _Prompts) -> float | None:
    """Mean reward of one sample a held-out prompt, with the same draws each time; never under replay."""
    if not config.evaluation.prompts:
        return None
    task = prompts.task
    problems = [task.problem(i, task.evaluated_on) for i in range(config.evaluation.prompts)]
    sample, _ = prompts.sample(rollout, problems, derive_seed(config.seed, "evaluation"), group_size=1)
    scores = [prompts.task.score(prompts.text(r), p) for r, p in zip(sample.responses, problems, strict=True)]
    return sum(scores) / len(scores)


def _noise_floor(
    config: JobConfig, rollout: Rollout, trainer: Trainer, batch: TokenBatch, mu: torch.Tensor, native: LogprobResult
) -> measure.Row:
    """Each engine against itself at θ_old; absent where it cannot be measured.

    vLLM cannot score given tokens at another temperature than 1, and one sequence at a time has no other split.
    """
    mask, sampling = batch.response_mask, config.rollout.sampling
    row: measure.Row = {}
    if config.rollout.engine != "vllm" or sampling.temperature == 1.0:
        row |= noise_floor(mu, rollout.rescore(batch, sampling), mask, prefix="noise_floor/rollout/")
    if config.trainer.micro_batch_size == 1:
        return row
    some = torch.arange(min(len(batch), NOISE_SEQUENCES))
    alone = trainer.logprobs(batch.select(some), temperature=sampling.temperature, micro_batch_size=1)
    return row | noise_floor(native.logprobs[some], alone.logprobs, mask[some], prefix="noise_floor/trainer/")


def _require_sync(mu: torch.Tensor, native: LogprobResult, batch: TokenBatch) -> None:
    """Rollout and trainer hold the same weights: their log-probs must be close before anything is learned from them."""
    gap = float((native.logprobs - mu)[batch.response_mask].abs().mean())
    if not gap <= LARGEST_SYNC_GAP:
        raise EngineError(
            f"rollout and trainer should hold the same weights, but their log-probs differ by {gap:.3f} nats a token "
            f"(expected below {LARGEST_SYNC_GAP}): the weights were not pushed, or under wrong names"
        )


def _require_identity(new: torch.Tensor, old: torch.Tensor) -> None:
    """At θ = θ_old, with one plan in both passes, the ratio new/old is exactly 1 (on a GPU: up to its own noise)."""
    gap = float((new - old).abs().max())
    if not gap <= (1e-2 if torch.cuda.is_available() else 0.0):
        raise ReplayError(
            f"before the first update of a batch, new and old log-probs differ by up to {gap:.3g} nats (expected 0): "
            "the passes did not replay the same routes, or something else in the model changes between two passes"
        )


def _resume(store: RunStore, trainer: Trainer) -> tuple[int, list[measure.Row], list[measure.Row], measure.Row]:
    """Load the newest checkpoint: finished steps, both tables up to there, and the facts of the summary so far."""
    found = store.latest_checkpoint()
    if found is None:
        return 0, [], [], {}
    step, folder = found
    trainer.load(folder)
    state = json.loads((folder / "state.json").read_text())
    logger.info("%s continues after step %d", store.path.name, step)
    return step, state["rows"], state["paired"], state["facts"]


def _due(config: JobConfig, step: int, every: int) -> bool:
    """First step, last step, and every n-th between (0: none between)."""
    return step in (0, config.steps - 1) or (every > 0 and step % every == 0)


def _save_traces(store: RunStore, step: int, sample: RolloutResult, native: LogprobResult) -> None:
    assert native.trace is not None
    sample.trace.save(store.path / "traces" / f"step-{step:06d}-rollout.safetensors")
    native.trace.save(store.path / "traces" / f"step-{step:06d}-native.safetensors")


def _summarise(config: JobConfig, run: str, table: pd.DataFrame, facts: measure.Row) -> dict[str, Any]:
    """What a table of runs shows, from the table of steps."""

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

    tokens = "mismatch/rollout_old/tokens"
    times = [c for c in table if str(c).startswith("time/")]
    return {
        "run": run,
        "arm": config.router_replay.arm,
        "policy": config.router_replay.policy,
        "unit": config.router_replay.unit,
        "budget": config.router_replay.budget,
        "nominal": mean("replay/update/nominal"),
        "rollout_engine": config.rollout.engine,
        "trainer_engine": config.trainer.engine,
        "seed": config.seed,
        "steps": len(table),
        "reward_first": float(table["reward/mean"].iloc[0]),
        "reward_last": float(table["reward/mean"].iloc[-1]),
        **facts,
        "k3_rollout_old": mean("mismatch/rollout_old/k3", tokens),
        "k3_old_new": mean("mismatch/old_new/k3", tokens),
        "extreme_fraction_tau2": mean("mismatch/rollout_old/extreme_fraction_tau2", tokens),
        "router_flip": mean("agreement/rollout_native/router_flip", "agreement/rollout_native/cells"),
        "token_any_flip": mean("agreement/rollout_native/token_any_flip"),
        "coverage": mean("replay/coverage"),
        "missing": mean("replay/missing"),
        "noise_floor_rollout": largest("noise_floor/rollout/k3"),
        "noise_floor_trainer": largest("noise_floor/trainer/k3"),
        "route_bytes_per_token": mean("routes/bytes_per_token"),
        "seconds_per_step": {str(c).removeprefix("time/"): mean(str(c)) for c in times},
    }
