"""What recording, replay, scores and diagnostics cost, each against the same pass without them.

On 128 sequences of the tiny checkpoint, by both trainers: an update under R3 and under a uniform plan of slots at a quarter against one under
none; the same update with replay's diagnostics against without; the passes that policies look at, and the making of their plan, against a
forward and backward; a scoring pass that records against one that does not. Recording in a rollout: the hf rollout in turn with itself and a
recorder that sees nothing, two vLLM engines in processes of their own, at three sizes. Planning four million slots against sorting as
many numbers, which every choice by priority needs.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.alternate import Figure, compare, figure, in_turn
from benchmarks.prompts import GROUP, answers_of
from benchmarks.workers import Worker, answers
from rar_lib.checkpoint import (
    TINY_MOE,
    build_model,
    load_tokenizer,
    resolve_checkpoint,
    save_checkpoint,
    special_tokens,
)
from rar_lib.config import JobConfig, RouterReplayConfig
from rar_lib.engines.base import Replay, TokenBatch
from rar_lib.engines.logits import response_logprobs
from rar_lib.engines.session import EngineSession
from rar_lib.planner import Planner
from rar_lib.replay.policies import make_plan
from rar_lib.replay.policy import Candidates
from rar_lib.replay.scores import ExpertScore
from rar_lib.rl.objectives import grpo_loss
from rar_lib.traces.synthetic import synthetic

REAL = JobConfig()
HF = JobConfig.from_flat(engine="hf")
LARGER = {
    "13 M": {"hidden_size": 256, "moe_intermediate_size": 192, "num_hidden_layers": 5},
    "61 M": {"hidden_size": 512, "moe_intermediate_size": 384, "num_hidden_layers": 6},
}


def of_trainer(config: JobConfig, rounds: int) -> list[Figure]:
    """Figures of one trainer."""
    path = resolve_checkpoint(config.model.path)
    tokenizer = load_tokenizer(path)
    prompts, uids = answers_of(tokenizer, 128)
    with EngineSession() as session:
        rollout, _ = session.open(HF, path, special_tokens(path, tokenizer))
        sample = rollout.generate(prompts, config.rollout.sampling, uids, 0)
        groups = [i // GROUP for i in range(len(prompts))]
        batch = TokenBatch.pack(prompts, sample.responses, uids, groups, tokenizer.pad_token_id)
        trainer = session.trainer(config, path)
        found = [*updates(trainer, batch, sample, rounds), *looks(trainer, batch, sample, config, rounds)]
    return found


def updates(trainer: Any, batch: TokenBatch, sample: Any, rounds: int) -> list[Figure]:
    """One optimizer step on the batch, under replay and diagnosed, all in turn."""
    full = Replay.full(sample.trace)
    slots = Replay(sample.trace, make_plan("uniform", Candidates(sample.trace, batch.uids, 0), "slot", "0.25"))

    def step(forced: Replay | None, measure: bool = False) -> Callable[[], Any]:
        advantages, mask = torch.linspace(-1, 1, len(batch)), batch.response_mask
        old = trainer.logprobs(batch, temperature=1.0, replay=forced).logprobs

        def objective(logp: torch.Tensor, rows: torch.Tensor, scores: Any = None) -> Any:
            return grpo_loss(logp, old[rows], advantages[rows], mask[rows], 0.2, 0.2)

        return lambda: trainer.update(batch, objective, temperature=1.0, replay=forced, measure=measure)

    seconds = in_turn(
        {"none": step(None), "R3": step(full), "slots": step(slots), "measured": step(full, measure=True)}, rounds
    )
    none, r3, name = seconds["none"], seconds["R3"], trainer.name
    return [
        figure(f"update under R3, {name}", "update under none", r3, none, goal=1.05),
        figure(f"update under a plan of slots, {name}", "update under none", seconds["slots"], none, goal=1.10),
        figure(f"update under R3 with diagnostics, {name}", "without", seconds["measured"], r3, goal=1.05),
    ]


def looks(trainer: Any, batch: TokenBatch, sample: Any, config: JobConfig, rounds: int) -> list[Figure]:
    """Passes that policies look at; the planning pass is the forward, its record, its scores and the plan that is made of them."""
    mask, name = batch.response_mask, trainer.name

    def objective(logp: torch.Tensor, rows: torch.Tensor, scores: Any = None) -> Any:
        return -logp, {}

    def forward_backward() -> None:
        if name == "hf":
            trainer.optimizer.zero_grad()
            for rows in batch.micro_batches(config.trainer.micro_batch_size):
                logits = trainer._logits(batch.tokens[rows])
                (-response_logprobs(logits, batch.tokens[rows], mask[rows], 1.0).sum()).backward()
        else:
            trainer.gradients(batch, objective, temperature=1.0)

    def scoring(capture: bool) -> Callable[[], Any]:
        return lambda: trainer.logprobs(batch, temperature=1.0, capture=capture)

    def planned(routes: str, estimator: str = "gate") -> Callable[[], Any]:
        wanted = {"mode": "R3", "policy": routes, "unit": "slot", "budget": "0.25", "score": {"estimator": estimator}}
        planner = Planner(RouterReplayConfig.model_validate(wanted))

        def both() -> None:
            planner.plan(sample.trace, batch, 0, planner.look(trainer, batch, 0, 1.0))

        return both

    things = {
        "forward and backward": forward_backward, "scoring": scoring(False), "recording": scoring(True),
        "margin": planned("margin"), **{kind: planned("fisher", kind) for kind in ("gate", "swap", "param")},
    }  # fmt: skip
    seconds = in_turn(things, rounds)
    base, goals = seconds["forward and backward"], {"gate": 1.35, "param": 2.0}
    found = [
        figure(
            f"planning with {kind} scores, {name}" if kind != "margin" else f"planning by margin, {name}",
            "forward and backward", seconds[kind], base, goal=goals.get(kind),
        ) for kind in ("margin", "gate", "swap", "param")
    ]  # fmt: skip
    return [*found, figure(f"scoring pass that records, {name}", "without", seconds["recording"], seconds["scoring"])]


def planning(rounds: int, tokens: int = 125_000) -> list[Figure]:
    """Plans of 4 million slots (8 layers, top-4 of 32) at a quarter, from a synthetic trace."""
    made = synthetic([500] * (tokens // 500), layers=8, experts=32, top_k=4)
    score = ExpertScore(np.random.default_rng(0).random((8, 32)), np.ones((8, 32)), "gate", "per_route", "rollout", 1.0)
    seen = Candidates(made.rollout, [str(i) for i in range(tokens // 500)], 0, 0, made.native, score)
    numbers = np.random.default_rng(0).random(tokens * 32)
    names = ("uniform", "random_route", "margin", "disagree", "fisher")
    things: dict[str, Callable[[], Any]] = {
        name: lambda name=name: make_plan(name, seen, "slot", "0.25") for name in names
    }  # type: ignore[misc]
    seconds = in_turn(things | {"sort": lambda: np.sort(numbers)}, max(5, rounds // 3))
    return [
        figure(f"plan of 4 M slots, {name}", "sort of 4 M numbers", seconds[name], seconds["sort"]) for name in names
    ]


def hf_recording(rounds: int) -> Figure:
    """Generation by the hf rollout with recording against without and packing (the recorder is swapped for one that sees nothing)."""
    path = resolve_checkpoint(HF.model.path)
    tokenizer = load_tokenizer(path)
    prompts, uids = answers_of(tokenizer, 512)
    with EngineSession() as session:
        rollout, _ = session.open(HF, path, special_tokens(path, tokenizer))
        blind = mock.MagicMock(last={})
        blind.take.side_effect = lambda n: torch.zeros(n, 1, 4, 2, dtype=torch.int64)
        blind.header = rollout.generate(prompts[:1], HF.rollout.sampling, uids[:1], 0).trace.header

        def without() -> None:
            with (
                mock.patch("rar_lib.engines.hf_rollout.recording", return_value=contextlib.nullcontext(blind)),
                mock.patch("rar_lib.engines.hf_rollout.pack_rollout"),
            ):
                rollout.generate(prompts, HF.rollout.sampling, uids, 0)

        def recorded() -> None:
            rollout.generate(prompts, HF.rollout.sampling, uids, 0)

        return compare("rollout that records, hf", "rollout that does not", recorded, without, 3 * rounds)


def larger_checkpoint(folder: Path, sizes: dict[str, int]) -> Path:
    """A random Qwen3-MoE beside the shipped one of half a million parameters: what does not grow with it fades."""
    tokenizer = load_tokenizer(resolve_checkpoint(REAL.model.path))
    with mock.patch.dict(TINY_MOE, sizes):
        save_checkpoint(build_model(tokenizer, 0), tokenizer, folder)
    return folder


def vllm_recording(folder: Path, rounds: int) -> list[Figure]:
    """Generation of 512 samples by vLLM with capture of routes against without, one engine a process."""
    found = []
    for size in ("0.5 M", *LARGER):
        path = resolve_checkpoint(REAL.model.path)
        if size in LARGER:
            path = larger_checkpoint(folder / size.replace(" ", ""), LARGER[size])
        pair = {
            kind: Worker("benchmarks.vllm_rollouts", str(path), "bfloat16", kind, "512") for kind in ("capture", "bare")
        }
        rows = answers(pair, 2 * rounds if size == "0.5 M" else rounds, warm=2)
        captured, bare = ([row["seconds"]["512"] for row in rows[kind]] for kind in ("capture", "bare"))
        found.append(figure(f"rollout that records, vLLM, {size} parameters", "rollout that does not", captured, bare))
    return found


def measure(rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """All figures."""
    with tempfile.TemporaryDirectory() as folder:
        figures = [
            *of_trainer(HF, rounds), *of_trainer(REAL, rounds), *planning(rounds), hf_recording(rounds),
            *vllm_recording(Path(folder), rounds),
        ]  # fmt: skip
    return figures, {}
