"""One run, readable from top to bottom: sample, score at θ_old, learn, push, measure.

    rar run --config FILE

What is simplified: one reward function and no reward model, no reference model, whole groups in each update, each token in
exactly one update of its batch. Objectives and corrections are in rl/. What is not: rollout and trainer are two engines, each with
its own router; all three log-prob sources are kept; and every batch is scored natively and under full replay, so
that each run measures the pair on its own tokens.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from rar_lib import measure
from rar_lib.checkpoint import (
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
    Replay,
    Rollout,
    RolloutResult,
    TokenBatch,
    Trainer,
    UpdateResult,
)
from rar_lib.engines.same_weights import checkpoint_logprobs, require_same_weights
from rar_lib.engines.session import EngineSession, require_fit, resolve_engines
from rar_lib.errors import DivergedError, ReplayError
from rar_lib.evaluate import evaluate
from rar_lib.metrics.mismatch import noise_floor
from rar_lib.planner import Planner
from rar_lib.probe import Probe
from rar_lib.progress import Style, progress
from rar_lib.prompts import Prompts
from rar_lib.replay.control import require_gates, require_live, wrong_gates, wrong_routes
from rar_lib.replay.diagnostics import ReplayDiagnostics
from rar_lib.replay.modes import MODES
from rar_lib.replay.plan_file import save_plan
from rar_lib.rl.advantages import group_advantages
from rar_lib.rl.learning import Lesson, needs_routers
from rar_lib.runs.files import write_json
from rar_lib.runs.result import RunResult
from rar_lib.runs.store import RUNS_DIR, RunStore
from rar_lib.seeding import derive_seed
from rar_lib.summary import summarise
from rar_lib.tasks import Task

logger = logging.getLogger("rar")
NOISE_SEQUENCES = 64  # scored one by one for the trainer's noise floor: CPU kernels sum alike at most larger sizes


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
    planner = Planner(config.router_replay)  # what does not go together is refused before anything is started
    router_header(path)  # a model without replayable routers is refused before anything is started
    require_fit(config, path, planner.request(0))
    digests = {"checkpoint": digest_checkpoint(path), "task": task.digest()}
    store = RunStore(runs_dir or RUNS_DIR, config, digests)
    with store.held():
        if not store.complete:
            with contextlib.nullcontext(session) if session is not None else EngineSession() as engines:
                assert engines is not None
                _train(config, path, task, engines, store, show)
        return RunResult.read(store.path)


def _train(config: JobConfig, path: Path, task: Task, engines: EngineSession, store: RunStore, show: Style) -> None:
    """The loop."""
    diagnose = config.diagnostics.enabled
    routers = needs_routers(config.algorithm)
    seen: Capture = "scores" if routers else "margins" if diagnose else True
    mode, planner = MODES[config.router_replay.arm], Planner(config.router_replay, seen)
    tokenizer = load_tokenizer(path)
    special = special_tokens(path, tokenizer)
    logger.info("%s starts %s and %s", store.path.name, config.rollout.engine, config.trainer.engine)
    rollout, trainer = engines.open(config, path, special)
    temperature = config.rollout.sampling.temperature
    prompts = Prompts(config, task, tokenizer, special)
    store.write_environment()
    start, rows, paired, records, facts = _resume(store, trainer, planner)
    probe = Probe.resume(trainer, temperature, store.path / "traces") if start else None
    if start:
        rollout.load_weights(trainer.weights(), start)
    else:
        facts["negative_control"] = _negative_control(config, rollout, trainer, prompts)
        if mode.in_updates is not None and planner.learns_flips:
            _learn_flips(config, planner, rollout, trainer, prompts)
        judged = evaluate(config, rollout, prompts, *((trainer, planner) if diagnose else ()))
        facts |= {f"evaluation_first{'' if k == 'reward' else '_' + k}": v for k, v in judged.items()}
    bar = progress(store.path.name, config.steps, start, show)

    for step in range(start, config.steps):
        # 1. Sample at θ_old, and reward.
        clock = _Clock()
        problems = prompts.train(step)
        sample, batch = prompts.sample(rollout, problems, derive_seed(config.seed, "rollout", step))
        rewards = prompts.rewards(sample, problems)
        advantages, flat_groups = group_advantages(rewards, batch.groups)
        mask, mu = batch.response_mask, measure.rollout_logprobs(batch, sample)
        clock.tick("rollout")

        # 2. Score at θ_old under the run's mode; before it, natively, if the policy chooses by what it sees there.
        traces, native = {"rollout": sample.trace}, None
        if mode.in_updates is not None and planner.looks:
            native = planner.look(trainer, batch, step, temperature)
        old_replay = update_replay = None
        if mode.in_old_pass is not None:
            old_replay = planner.plan(traces[mode.in_old_pass], batch, step, native)
        clock.tick("planning")
        if old_replay is None:  # native, so it is the planning pass if there was one
            native = old = native or trainer.logprobs(batch, temperature=temperature, capture=seen)
            assert old.trace is not None
            traces["old"] = old.trace
        else:
            old = trainer.logprobs(
                batch,
                temperature=temperature,
                replay=old_replay,
                measure=diagnose,
                capture="scores" if routers else False,
            )
        clock.tick("old")
        if mode.in_updates == mode.in_old_pass:  # one plan in every pass of a batch
            update_replay = old_replay
        elif mode.in_updates is not None:
            update_replay = planner.plan(traces[mode.in_updates], batch, step, native)
        if native is not None and native.trace is not None:
            planner.learn_flips(sample.trace, native.trace)

        # And once more, so that every run has its tokens scored both natively and under full R3.
        scored = {} if native is None else {"none": native}
        if old_replay is not None and old_replay.plan.policy == "full" and old_replay.gates == "live":
            scored["R3"] = old
        if diagnose and "none" not in scored:
            scored["none"] = trainer.logprobs(batch, temperature=temperature, capture=seen)
        if diagnose and "R3" not in scored:
            scored["R3"] = trainer.logprobs(batch, temperature=temperature, replay=Replay.full(sample.trace))
        clock.tick("paired")
        if step == 0:  # later one answer may carry the mean; that pushes arrive is proved whenever engines are opened
            judged_by = scored.get("none") or trainer.logprobs(batch, temperature=temperature)
            ask = functools.partial(checkpoint_logprobs, path, batch, temperature=temperature)
            require_same_weights(mu, judged_by.logprobs, mask, ask)
        floor: measure.Row = {}
        if diagnose and _due(config, step, config.diagnostics.noise_floor_every):
            floor = noise_floor_row(config, rollout, trainer, batch, mu, scored["none"])
        clock.tick("noise_floor")
        if diagnose and config.diagnostics.probe_sequences and step == 0:
            probe = Probe.begin(trainer, batch, config.diagnostics.probe_sequences, temperature, store.path / "traces")

        # 3. Learn: one optimizer step on each share of the prompts, replaying what the mode says.
        lesson = Lesson(config.algorithm, mu, old.logprobs, advantages, mask, old.trace if routers else None)
        updates: list[tuple[torch.Tensor, UpdateResult]] = []
        try:
            for share in batch.update_shares():
                result = trainer.update(
                    batch.select(share),
                    lesson.objective(share),
                    temperature=temperature,
                    replay=None if update_replay is None else update_replay.select(share),
                    measure=diagnose,
                    routers=routers,
                )
                if not updates:
                    _require_identity(result.logprobs, old.logprobs[share])
                updates.append((share, result))
        except DivergedError as error:
            facts["diverged"] = f"step {step}, update {len(updates)}: {error}"
            logger.warning("%s diverged at %s", store.path.name, facts["diverged"])
            if diagnose:  # the last batch that was sampled, for whoever wants to know why
                _save_traces(store, step, batch, sample, scored["none"], probe, update_replay)
                store.write_tokens(step, measure.token_table(step, batch, sample, mu, old.logprobs, scored))
            break
        clock.tick("updates")

        # 4. Push the new weights.
        rollout.load_weights(trainer.weights(), step + 1)
        clock.tick("sync")

        # 5. Measure and store.
        after = None
        if diagnose and update_replay is not None and _due(config, step, config.diagnostics.noise_floor_every):
            after = trainer.logprobs(batch, temperature=temperature, capture=True)
        records.append(
            measure.replay_diagnostics(
                config, step, sample, (old, old_replay), ([u for _, u in updates], update_replay), mask,
                native=scored.get("none"), native_after=after, score=planner.score,
            )
        )  # fmt: skip
        row: measure.Row = {
            "step": step,
            **measure.sample_row(rewards, batch, sample, flat_groups),
            **measure.mismatch_row(mu, old.logprobs, updates, mask, advantages),
            "replay/coverage": sample.trace.coverage()["recorded"],
            **records[-1].columns(),
            **measure.update_row(updates, int(mask.sum())),
        }
        if diagnose:
            row |= measure.paired_row(mu, scored, mask) | measure.agreement_row(sample, scored["none"]) | floor
            row |= measure.load_row(sample) | ({} if probe is None else probe.step(trainer))
            paired += measure.paired_by_prompt(step, mu, scored, batch, sample)
            if _due(config, step, config.diagnostics.save_traces_every):
                _save_traces(store, step, batch, sample, scored["none"], probe, update_replay)
                store.write_tokens(step, measure.token_table(step, batch, sample, mu, old.logprobs, scored))
        last = step + 1 == config.steps
        if config.evaluation.every and not last and (step + 1) % config.evaluation.every == 0:
            judged = evaluate(config, rollout, prompts, *((trainer, planner) if diagnose else ()))
            row |= {f"evaluation/{name}": value for name, value in judged.items()}
        rows.append(row | clock.row)
        store.write_tables(rows, paired, records)
        if last or (config.checkpoint_every and (step + 1) % config.checkpoint_every == 0):
            with store.new_checkpoint(step + 1) as folder:
                trainer.save(folder)
                state = {"rows": rows, "paired": paired, "facts": facts, "planner": planner.state()}
                write_json(folder / "state.json", state | {"replay": [r.model_dump(mode="json") for r in records]})
        bar.step(step + 1, f"reward {row['reward/mean']:.3f} k3 {row['mismatch/rollout_old/k3']:.2e}")
    bar.close()
    judge = diagnose and "diverged" not in facts  # a trainer that diverged may hold anything
    judged = evaluate(config, rollout, prompts, *((trainer, planner) if judge else ()))
    facts |= {f"evaluation_last{'' if k == 'reward' else '_' + k}": v for k, v in judged.items()}
    facts["evaluated_on"] = task.evaluated_on
    store.write_tables(rows, paired, records)  # also where the last step was resumed and none followed
    store.finish(summarise(config, store.path.name, pd.DataFrame(rows), facts))


# ---------------------------------------------------------------- what the loop is made of


class _Clock:
    """Seconds between ticks, as `time/` columns."""

    def __init__(self) -> None:
        self.row: measure.Row = {}
        self._last = time.perf_counter()

    def tick(self, name: str) -> None:
        """What took the time since the last tick."""
        now = time.perf_counter()
        self.row[f"time/{name}"], self._last = now - self._last, now


def _negative_control(config: JobConfig, rollout: Rollout, trainer: Trainer, prompts: Prompts) -> float | None:
    """Mean |Δ log-prob| under deliberately wrong routes, on a few prompts of the first step. Refuses a dead replay.

    None where every router uses all its experts: no route is wrong there, and replay has no effect.
    """
    problems = prompts.train(0)[: 2 * config.algorithm.group_size]
    _, batch = prompts.sample(rollout, problems, derive_seed(config.seed, "control"))
    temperature = config.rollout.sampling.temperature
    gates, mask = config.router_replay.gates == "recorded", batch.response_mask
    native = trainer.logprobs(batch, temperature=temperature, capture="scores" if gates else True)
    assert native.trace is not None
    header = native.trace.header
    if gates:
        other = replace(Replay.full(wrong_gates(native.trace)), gates="recorded")
        moved = trainer.logprobs(batch, temperature=temperature, replay=other)
        require_gates(native.logprobs[mask].numpy(), moved.logprobs[mask].numpy(), header)
    if header.top_k == header.num_experts:
        return None
    wrong = wrong_routes(native.trace)
    moved = trainer.logprobs(batch, temperature=temperature, replay=Replay.full(wrong), capture=True)
    assert moved.trace is not None
    return require_live(native.logprobs[mask].numpy(), moved.logprobs[mask].numpy(), wrong, moved.trace)


def _learn_flips(config: JobConfig, planner: Planner, rollout: Rollout, trainer: Trainer, prompts: Prompts) -> None:
    """One batch of problems that the run does not train on, so that P(flip) is known before the first plan."""
    sample, batch = prompts.sample(rollout, prompts.train(config.steps), derive_seed(config.seed, "flips"))
    native = trainer.logprobs(batch, temperature=config.rollout.sampling.temperature, capture="margins")
    assert native.trace is not None
    planner.learn_flips(sample.trace, native.trace)


def noise_floor_row(
    config: JobConfig, rollout: Rollout, trainer: Trainer, batch: TokenBatch, mu: torch.Tensor, native: LogprobResult
) -> measure.Row:
    """Each engine against itself at θ_old, in nats; absent where it cannot be measured. `mu` are the rollout's log-probs, `[S, T]`.

    vLLM and SGLang cannot score given tokens at another temperature than 1, and one sequence at a time has no other split.
    """
    mask, sampling = batch.response_mask, config.rollout.sampling
    row: measure.Row = {}
    if config.rollout.engine == "hf" or sampling.temperature == 1.0:
        row |= noise_floor(mu, rollout.rescore(batch, sampling), mask, prefix="noise_floor/rollout/")
    if config.trainer.micro_batch_size == 1:
        return row
    some = torch.arange(min(len(batch), NOISE_SEQUENCES))
    alone = trainer.logprobs(batch.select(some), temperature=sampling.temperature, micro_batch_size=1)
    return row | noise_floor(native.logprobs[some], alone.logprobs, mask[some], prefix="noise_floor/trainer/")


def _require_identity(new: torch.Tensor, old: torch.Tensor) -> None:
    """At θ = θ_old, with one plan in both passes, the ratio new/old is exactly 1 (on a GPU: up to its own noise)."""
    gap = float((new - old).abs().max())
    if not gap <= (1e-2 if torch.cuda.is_available() else 0.0):
        raise ReplayError(
            f"before the first update of a batch, new and old log-probs differ by up to {gap:.3g} nats (expected 0): "
            "the passes did not replay the same routes, or something else in the model changes between two passes"
        )


def _resume(
    store: RunStore, trainer: Trainer, planner: Planner
) -> tuple[int, list[measure.Row], list[measure.Row], list[ReplayDiagnostics], measure.Row]:
    """Load the newest checkpoint: finished steps, the tables up to there, and the facts of the summary so far."""
    found = store.latest_checkpoint()
    if found is None:
        return 0, [], [], [], {}
    step, folder = found
    trainer.load(folder)
    state = json.loads((folder / "state.json").read_text())
    logger.info("%s continues after step %d", store.path.name, step)
    planner.restore(state["planner"])
    records = [ReplayDiagnostics.model_validate(record) for record in state["replay"]]
    return step, state["rows"], state["paired"], records, state["facts"]


def _due(config: JobConfig, step: int, every: int) -> bool:
    """First step, last step, and every n-th between (0: none between)."""
    return step in (0, config.steps - 1) or (every > 0 and step % every == 0)


def _save_traces(
    store: RunStore,
    step: int,
    batch: TokenBatch,
    sample: RolloutResult,
    native: LogprobResult,
    probe: Probe | None,
    replay: Replay | None,
) -> None:
    """Both sides of a step, and the plan of its updates beside its record, from where `rar export --for` takes it."""
    assert native.trace is not None
    if probe is not None:
        probe.latest.save(store.path / "traces" / f"step-{step:06d}-probe.safetensors")
    sample.trace.save(store.path / "traces" / f"step-{step:06d}-rollout.safetensors")
    inside, response = batch.token_mask, batch.response_mask
    logp = np.where(response[inside], native.logprobs[inside], np.nan).astype(np.float32)
    native_trace = replace(native.trace, logprobs=logp)
    native_trace.save(store.path / "traces" / f"step-{step:06d}-native.safetensors")
    if replay is not None:
        plan = replay.plan
        if replay.trace is not sample.trace:  # R2's record is stored with its log-probs, and known by them too
            plan = replace(plan, trace_digest=native_trace.payload_sha256())
        save_plan(plan, store.path / "traces" / f"step-{step:06d}-plan.safetensors")
