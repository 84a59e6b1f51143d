"""Shared pieces: the shipped checkpoint, a batch of its own samples, and one engine session for the whole test process."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch

from rar_lib.checkpoint import SpecialTokens, load_tokenizer, resolve_checkpoint
from rar_lib.config import JobConfig, TaskConfig
from rar_lib.engines.base import RolloutResult, TokenBatch
from rar_lib.engines.hf_rollout import HFRollout
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.session import EngineSession
from rar_lib.measure import rollout_logprobs
from rar_lib.tasks import Task

SPECIAL = SpecialTokens(end=(1,), pad=0)  # of the shipped tokenizer
torch.set_num_threads(1)
mpl.use("agg")  # here and not by the environment, which kernels started by tests would inherit
HF = {"rollout": {"engine": "hf"}, "trainer": {"engine": "hf"}}


# Files that take long, the longest first: two test processes then end at about the same time.
LONG = (
    "test_notebooks.py",
    "test_sweep.py",
    "test_job.py",
    "test_layouts.py",
    "test_jupyterlab.py",
    "test_ranks.py",
    "test_hygiene.py",
    "test_real_pair.py",
    "test_vllm_server.py",
    "test_frontier.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; within a file nothing changes."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def hf_config(*overrides: str) -> JobConfig:
    """A job on the hf engines."""
    return JobConfig.build(HF, overrides)


@dataclass(frozen=True)
class Sampled:
    """A batch sampled from the shipped checkpoint by a bf16, fp8-rounded hf rollout, so that some routes differ."""

    batch: TokenBatch
    result: RolloutResult
    mu: torch.Tensor


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return resolve_checkpoint("tiny-moe")


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Any:
    return load_tokenizer(checkpoint)


@pytest.fixture(scope="session")
def task() -> Task:
    return Task(TaskConfig())


def sample(
    rollout: Any, tokenizer: Any, task: Task, n: int = 32, group: int = 4, seed: int = 3, start: int = 0
) -> Sampled:
    """n problems from the `start`-th, `group` samples each."""
    problems = [task.problem(start + i) for i in range(n) for _ in range(group)]
    prompts = [tokenizer(p.prompt)["input_ids"] for p in problems]
    uids = [f"{p.uid}/{i % group}" for i, p in enumerate(problems)]
    result = rollout.generate(prompts, JobConfig().rollout.sampling, uids, seed)
    groups = [i // group for i in range(len(problems))]
    batch = TokenBatch.pack(prompts, result.responses, uids, groups, tokenizer.pad_token_id)
    return Sampled(batch, result, rollout_logprobs(batch, result))


@pytest.fixture(scope="session")
def sampled(checkpoint: Path, tokenizer: Any, task: Task) -> Sampled:
    config = hf_config()
    trainer = HFTrainer(checkpoint, config.trainer, config.algorithm)
    rollout = HFRollout(checkpoint, config.rollout, SPECIAL)
    rollout.load_weights(trainer.weights(), 0)
    return sample(rollout, tokenizer, task)


@pytest.fixture(scope="session")
def engines() -> Iterator[EngineSession]:
    """One session: vLLM tolerates one engine a process."""
    with EngineSession() as session:
        yield session
