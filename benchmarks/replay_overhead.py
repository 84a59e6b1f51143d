"""What replay costs: updates under replay against none, recording in a rollout, the share of a step that pushes weights, what
a planning pass and its scores cost, and the planning of four million units.

    OMP_NUM_THREADS=1 python -m benchmarks.replay_overhead [--rounds N] [--out FILE]

Prints one JSON object; each figure is a ratio of two things run in turn (alternate.py). The two vLLM engines, with and
without capture of routes, live in a process each, since one process holds one engine; they too take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.alternate import compare
from rar_lib.checkpoint import (
    TINY_MOE,
    build_model,
    load_tokenizer,
    resolve_checkpoint,
    save_checkpoint,
    special_tokens,
)
from rar_lib.config import JobConfig
from rar_lib.engines.base import Replay, TokenBatch
from rar_lib.engines.logits import response_logprobs
from rar_lib.engines.session import EngineSession
from rar_lib.job import run_job
from rar_lib.replay.policies import make_plan
from rar_lib.replay.policy import Candidates
from rar_lib.replay.scores import ExpertScore, SignalRequest
from rar_lib.rl.objectives import grpo_loss
from rar_lib.runs.store import describe_environment
from rar_lib.tasks import Task
from rar_lib.traces.synthetic import synthetic

REAL = JobConfig()
HF = JobConfig.build({"rollout": {"engine": "hf"}, "trainer": {"engine": "hf"}})


def prompts_of(tokenizer: Any, n: int = 64, group: int = 8) -> tuple[list[list[int]], list[str], list[int]]:
    """n problems, `group` times each: token ids, uids and groups."""
    task = Task(REAL.task)
    problems = [task.problem(i) for i in range(n) for _ in range(group)]
    uids = [f"{p.uid}/{i % group}" for i, p in enumerate(problems)]
    return [tokenizer(p.prompt)["input_ids"] for p in problems], uids, [i // group for i in range(len(problems))]


def with_batch(config: JobConfig, work: Callable[[EngineSession, Path, Any, TokenBatch], Any]) -> Any:
    """Call `work` with a session, the checkpoint, a rollout result and its batch of 128 sequences."""
    path = resolve_checkpoint(config.model.path)
    tokenizer = load_tokenizer(path)
    prompts, uids, groups = prompts_of(tokenizer, n=16)
    with EngineSession() as session:
        rollout, _ = session.open(HF, path, special_tokens(path, tokenizer))
        sample = rollout.generate(prompts, config.rollout.sampling, uids, 0)
        batch = TokenBatch.pack(prompts, sample.responses, uids, groups, tokenizer.pad_token_id)
        return work(session, path, sample, batch)


def stepper(trainer: Any, batch: TokenBatch, forced: Replay | None) -> Any:
    """An optimizer step under a replay."""
    advantages, mask = torch.linspace(-1, 1, len(batch)), batch.response_mask
    old = trainer.logprobs(batch, temperature=1.0, replay=forced).logprobs

    def objective(logp: torch.Tensor, rows: torch.Tensor, scores: Any = None) -> Any:
        return grpo_loss(logp, old[rows], advantages[rows], mask[rows], 0.2, 0.2)

    return lambda: trainer.update(batch, objective, temperature=1.0, replay=forced)


def update_overhead(config: JobConfig, unit: str | None, rounds: int) -> dict[str, Any]:
    """One optimizer step on 128 sequences under R3 (no unit), or under uniform plans of a unit at budget 1/4, against none."""

    def work(session: EngineSession, path: Path, sample: Any, batch: TokenBatch) -> Any:
        replay = Replay.full(sample.trace)
        if unit is not None:
            seen = Candidates(sample.trace, batch.uids, 0)
            replay = Replay(sample.trace, make_plan("uniform", seen, unit, "0.25"))  # type: ignore[arg-type]
        return compare(*(stepper(session.trainer(config, path), batch, r) for r in (replay, None)), rounds)

    return with_batch(config, work)


def planning_overhead(config: JobConfig, rounds: int) -> dict[str, Any]:
    """Passes that policies look at, each against one forward and backward without an optimizer step on the same sequences.

    native: the forward of margin and disagree; gate: with the signals of Fisher scores; swap and param: theirs. `plan` is
    what making the plan from a native pass takes (margin, slots), against the same.
    """

    def work(session: EngineSession, path: Path, sample: Any, batch: TokenBatch) -> Any:
        trainer = session.trainer(config, path)
        hf = trainer.name == "hf"
        mask = batch.response_mask

        def objective(logp: torch.Tensor, rows: torch.Tensor, scores: Any = None) -> Any:
            return -logp, {}

        def forward_backward() -> None:
            if hf:
                trainer.optimizer.zero_grad()
                for rows in batch.micro_batches(config.trainer.micro_batch_size):
                    logits = trainer._logits(batch.tokens[rows])
                    (-response_logprobs(logits, batch.tokens[rows], mask[rows], 1.0).sum()).backward()
            else:
                trainer.gradients(batch, objective, temperature=1.0)

        def look(*estimators: str) -> Any:
            request = SignalRequest(frozenset(estimators)) if estimators else None
            return lambda: trainer.logprobs(batch, temperature=1.0, capture="margins", signals=request)

        native = look()().trace

        def plan() -> None:
            make_plan("margin", Candidates(sample.trace, batch.uids, 0, 0, native), "slot", "0.25")

        passes = {"native": look(), "gate": look("gate"), "swap": look("swap"), "param": look("param"), "plan": plan}
        return {name: compare(call, forward_backward, rounds) for name, call in passes.items()}

    return with_batch(config, work)


def planning_seconds(tokens: int = 125_000) -> dict[str, Any]:
    """Wall time to plan 4 million slots (8 layers, top-4 of 32), budget 1/4, from a synthetic trace."""
    made = synthetic([500] * (tokens // 500), layers=8, experts=32, top_k=4)
    score = ExpertScore(np.random.default_rng(0).random((8, 32)), np.ones((8, 32)), "gate", "per_route", "rollout", 1.0)
    seen = Candidates(made.rollout, [str(i) for i in range(tokens // 500)], 0, 0, made.native, score)
    seconds = {}
    for policy in ("uniform", "random_route", "random_cell", "margin", "frequency", "disagree", "fisher"):
        started = time.perf_counter()
        units = make_plan(policy, seen, "slot", "0.25").valid
        seconds[policy] = round(time.perf_counter() - started, 3)
    return {"units": units, "seconds": seconds}


def hf_recording_overhead(rounds: int) -> dict[str, Any]:
    """Generation by the hf rollout with recording against without (the recorder is swapped for one that sees nothing)."""
    path = resolve_checkpoint(HF.model.path)
    tokenizer = load_tokenizer(path)
    prompts, uids, _ = prompts_of(tokenizer)
    with EngineSession() as session:
        rollout, _ = session.open(HF, path, special_tokens(path, tokenizer))
        blind = mock.MagicMock()
        blind.take.side_effect = lambda n: torch.zeros(n, 64, 4, 2, dtype=torch.int64)
        # packing is the same work on both sides, so that the difference is what recording adds to the forwards
        blind.header = rollout.generate(prompts[:1], HF.rollout.sampling, uids[:1], 0).trace.header

        def without() -> None:
            with (
                mock.patch("rar_lib.engines.hf_rollout.recording", return_value=contextlib.nullcontext(blind)),
                mock.patch("rar_lib.engines.hf_rollout.pack_rollout"),
            ):
                rollout.generate(prompts, HF.rollout.sampling, uids, 0)

        def with_recording() -> None:
            with mock.patch("rar_lib.engines.hf_rollout.pack_rollout"):
                rollout.generate(prompts, HF.rollout.sampling, uids, 0)

        return compare(with_recording, without, rounds)


def vllm_worker(connection: Any, path: Path, capture: bool) -> None:
    """A process with one vLLM engine: answers each message with the CPU seconds of a generation."""
    from rar_lib.engines.vllm_rollout import VLLMRollout, starting_vllm

    with starting_vllm():
        import vllm
    create = vllm.LLM
    tokenizer = load_tokenizer(path)

    def configured(**kwargs: Any) -> Any:
        return create(**(kwargs | {"enable_return_routed_experts": capture}))

    with mock.patch.object(vllm, "LLM", configured):
        rollout = VLLMRollout(path, REAL.rollout, special_tokens(path, tokenizer))
    prompts, _, _ = prompts_of(tokenizer)
    params = vllm.SamplingParams(temperature=1.0, max_tokens=6, logprobs=0, stop_token_ids=[1], detokenize=False)
    while connection.recv():
        torch.manual_seed(0)
        started = time.process_time()
        outputs = rollout._run(prompts, params)
        seconds = time.process_time() - started
        assert (outputs[0].outputs[0].routed_experts is not None) == capture
        connection.send(seconds)
    rollout.shutdown()


LARGER = {
    "13 M": {"hidden_size": 256, "moe_intermediate_size": 192, "num_hidden_layers": 5},
    "61 M": {"hidden_size": 512, "moe_intermediate_size": 384, "num_hidden_layers": 6},
}


def larger_checkpoint(folder: Path, size: str) -> Path:
    """A random Qwen3-MoE beside the shipped one of half a million parameters: what does not grow with it fades."""
    tokenizer = load_tokenizer(resolve_checkpoint(REAL.model.path))
    with mock.patch.dict(TINY_MOE, LARGER[size]):
        save_checkpoint(build_model(tokenizer, 0), tokenizer, folder)
    return folder


def vllm_recording_overhead(path: Path, rounds: int) -> dict[str, Any]:
    """Generation of 512 samples by vLLM with capture of routes against without."""
    context = mp.get_context("spawn")
    ends, workers = [], []
    for capture in (True, False):
        ours, theirs = context.Pipe()
        worker = context.Process(target=vllm_worker, args=(theirs, path, capture))
        worker.start()
        ends.append(ours)
        workers.append(worker)

    def ask(end: Any) -> float:
        end.send(True)
        return end.recv()

    result = compare(lambda: ask(ends[0]), lambda: ask(ends[1]), rounds, measure=lambda call: call())
    for end, worker in zip(ends, workers, strict=True):
        end.send(False)
        worker.join()
    return result


def sync_share(folder: Path) -> dict[str, Any]:
    """Share of the wall time of a step on the real pair, diagnostics off, that pushes weights into vLLM."""
    config = JobConfig.build({}, ["steps=8", "diagnostics.enabled=false", "evaluation.prompts=0", "checkpoint_every=0"])
    table = run_job(config, runs_dir=folder, show="none").metrics
    columns = [c for c in table if str(c).startswith("time/")]
    shares = (table["time/sync"] / table[columns].sum(axis=1)).tolist()[1:]
    return {"share": round(statistics.median(shares), 4), "range": [round(min(shares), 4), round(max(shares), 4)],
            "seconds": {str(c).removeprefix("time/"): round(float(table[c].median()), 4) for c in columns}}  # fmt: skip


def main() -> None:
    """Measure everything and print one JSON object."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = {
            **{
                f"update_{name}_over_none": {
                    engine: update_overhead(config, unit, options.rounds) for engine, config in (("hf", HF), ("megatron", REAL))
                } for name, unit in (("R3", None), ("uniform_sets", "token_layer"), ("uniform_slots", "slot"))
            },
            "planning_pass_over_forward_backward": {
                "hf": planning_overhead(HF, options.rounds), "megatron": planning_overhead(REAL, options.rounds),
            },
            "planning": planning_seconds(),
            "recording_over_none": {
                "hf": hf_recording_overhead(5 * options.rounds), "vllm": vllm_recording_overhead(resolve_checkpoint(REAL.model.path), 3 * options.rounds),
                **{
                    f"vllm, a model of {size} parameters": vllm_recording_overhead(
                        larger_checkpoint(Path(folder) / size.replace(" ", ""), size), max(8, options.rounds // 2)
                    )
                    for size in LARGER
                },
            },
            "weight_sync_share_of_a_step": sync_share(Path(folder)),
            "environment": describe_environment(0) | {"processor": platform.processor() or platform.machine()},
        }  # fmt: skip
    text = json.dumps(result, indent=2)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
