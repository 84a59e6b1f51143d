"""The prompts of every benchmark: sums of the default task, each eight times, as a job's groups are."""

from __future__ import annotations

from typing import Any

from rar_lib.config import JobConfig
from rar_lib.tasks import Task

GROUP = 8


def answers_of(tokenizer: Any, samples: int) -> tuple[list[list[int]], list[str]]:
    """Token ids and uids of so many samples, in groups of eight."""
    task = Task(JobConfig().task)
    problems = [task.problem(i // GROUP) for i in range(samples)]
    ids = {p.prompt: tokenizer(p.prompt)["input_ids"] for p in problems}
    return [ids[p.prompt] for p in problems], [f"{p.uid}/{i % GROUP}" for i, p in enumerate(problems)]
