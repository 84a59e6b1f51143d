"""A worker: TRL's GRPOTrainer on the work of a job of this library, a rollout batch a round.

    .venv-bench/bin/python -m benchmarks.trl_job FD '{"seed": 0}'

Equal work: the checkpoint, the very prompts of the job's first steps in their order, 64 prompts x 8 samples, at most 6 new tokens at
temperature 1, one old-log-prob pass and 4 optimizer steps a batch, each on 128 sequences in one forward; fp32, AdamW at 1e-4, ratios clipped
at 0.2, token mean, no KL term, no load-balancing loss, no activation recompute, no evaluation, no checkpoints; the same reward function.
What differs is each one's own. TRL: `generate`, padding on the left, the entropy of every token, logits of the answers only. Ours: a prompt is
read once for its eight samples, routes and log-probs of the sampling engine are kept.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import metadata
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.workers import Turn
from rar_lib.checkpoint import load_tokenizer, resolve_checkpoint, special_tokens
from rar_lib.config import JobConfig
from rar_lib.prompts import Prompts
from rar_lib.tasks import Task

VERSIONS = {name: metadata.version(name) for name in ("trl", "accelerate", "transformers", "torch")}
BATCHES = 400  # of prompts at hand; the other side ends the process before


class _Rounds(TrainerCallback):
    """A round is over when all optimizer steps of a batch are."""

    def __init__(self, turn: Turn, updates: int) -> None:
        self.turn, self.updates = turn, updates

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step % self.updates == 0:
            self.turn.done(step=state.global_step // self.updates, versions=VERSIONS)
            self.turn.wait()


def main() -> None:
    """Train until told to end."""
    turn, wanted = Turn(int(sys.argv[1])), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    config = JobConfig(seed=wanted["seed"])
    algorithm, sampling = config.algorithm, config.rollout.sampling
    path, task = resolve_checkpoint(config.model.path), Task(config.task)
    tokenizer = load_tokenizer(path)
    special = special_tokens(path, tokenizer)
    prompts = Prompts(config, task, tokenizer, special)
    problems = [p for step in range(BATCHES) for p in prompts.train(step)[:: algorithm.group_size]]
    data = Dataset.from_list([{"prompt": p.prompt, "index": i} for i, p in enumerate(problems)])

    def reward(completion_ids: list[list[int]], index: list[int], **more: Any) -> list[float]:
        answers = [tuple(ids) for ids in completion_ids]
        texts = {ids: prompts.text(ids) for ids in set(answers)}
        return [task.score(texts[ids], problems[i]) for ids, i in zip(answers, index, strict=True)]

    sequences = algorithm.prompts_per_step * algorithm.group_size
    with tempfile.TemporaryDirectory() as folder:
        options = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=sequences // algorithm.updates_per_batch,
            gradient_accumulation_steps=1,
            steps_per_generation=algorithm.updates_per_batch,
            num_iterations=1,
            num_generations=algorithm.group_size,
            max_completion_length=sampling.max_new_tokens,
            temperature=sampling.temperature,
            beta=0.0,
            epsilon=algorithm.clip_low,
            loss_type="dapo",
            learning_rate=algorithm.lr,
            lr_scheduler_type="constant",
            max_grad_norm=algorithm.max_grad_norm,
            max_steps=BATCHES * algorithm.updates_per_batch,
            router_aux_loss_coef=0.0,
            gradient_checkpointing=False,
            disable_dropout=True,
            shuffle_dataset=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            logging_steps=algorithm.updates_per_batch,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=str(path), reward_funcs=reward, args=options, train_dataset=data, processing_class=tokenizer,
            callbacks=[_Rounds(turn, algorithm.updates_per_batch)],
        )  # fmt: skip
        turn.wait()
        trainer.train()


if __name__ == "__main__":
    main()
