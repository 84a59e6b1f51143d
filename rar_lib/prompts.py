"""Problems by step, and what the engines need of them: token ids, names, batches."""

from __future__ import annotations

from typing import Any

import torch

from rar_lib.checkpoint import SpecialTokens
from rar_lib.config import JobConfig
from rar_lib.engines.base import Rollout, RolloutResult, TokenBatch
from rar_lib.seeding import derive_seed
from rar_lib.tasks import Problem, Task


class Prompts:
    """The prompts of a job.

    Args:
        config: of the job.
        task: where problems and rewards come from.
        tokenizer: of the model.
        special: tokens that end and pad a response.
    """

    def __init__(self, config: JobConfig, task: Task, tokenizer: Any, special: SpecialTokens) -> None:
        self.config, self.task, self.tokenizer, self.special = config, task, tokenizer, special
        self._first = derive_seed(config.seed, "problems") % 2**28

    def train(self, step: int) -> list[Problem]:
        """`prompts_per_step` problems, each `group_size` times in a row."""
        n, g = self.config.algorithm.prompts_per_step, self.config.algorithm.group_size
        first = self._first + step * n
        return [p for i in range(n) for p in [self.task.problem(first + i)] * g]

    def held_out(self) -> list[Problem]:
        """The problems of every evaluation."""
        return [self.task.problem(i, self.task.evaluated_on) for i in range(self.config.evaluation.prompts)]

    def sample(
        self, rollout: Rollout, problems: list[Problem], seed: int, group_size: int | None = None
    ) -> tuple[RolloutResult, TokenBatch]:
        """Responses, and their batch with prompts and padding.

        Args:
            rollout: samples, at its present weights.
            problems: groups of the same problem, one after another.
            seed: of the draws.
            group_size: problems of a group, by default the algorithm's.
        """
        g = group_size or self.config.algorithm.group_size
        ids = {text: self.tokenizer(text)["input_ids"] for text in dict.fromkeys(p.prompt for p in problems)}
        prompts = [ids[p.prompt] for p in problems]
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

    def rewards(self, sample: RolloutResult, problems: list[Problem]) -> torch.Tensor:
        """`[S]` float32, the reward of each response."""
        texts = {response: self.text(response) for response in set(sample.responses)}
        return torch.tensor([self.task.score(texts[r], p) for r, p in zip(sample.responses, problems, strict=True)])
