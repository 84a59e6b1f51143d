"""State: after replay nothing replays, and every number is what a process without the library computes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rar_lib.checkpoint import load_model
from rar_lib.config import JobConfig
from rar_lib.engines.base import Replay
from rar_lib.engines.session import EngineSession
from rar_lib.engines.trainers import TRAINERS
from rar_lib.errors import ReplayError
from rar_lib.job import run_job
from rar_lib.replay import recording, replaying
from rar_lib.replay.control import wrong_routes
from rar_lib.replay.points import find_points
from tests.conftest import Sampled

CONFIG = JobConfig.build({}, ["trainer.micro_batch_size=32"])
PLAIN = """
import hashlib, sys, torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="eager",
                                             experts_implementation="eager").eval()
tokens = torch.arange(3 * 7).reshape(3, 7) % 90 + 4
logits = model(input_ids=tokens, use_cache=False).logits
logits.logsumexp(-1).sum().backward()
gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
for part in (logits.detach(), gradient):
    print(hashlib.sha256(part.numpy().tobytes()).hexdigest())
print("rar_lib" in sys.modules)
"""


@pytest.fixture(params=list(TRAINERS))
def engine(request: Any) -> str:
    return request.param


def build(engine: str, path: Path) -> Any:
    return TRAINERS[engine](path, CONFIG.trainer, CONFIG.algorithm)


def score(trainer: Any, sampled: Sampled, replay: Replay | None = None) -> torch.Tensor:
    return trainer.logprobs(sampled.batch, temperature=1.0, replay=replay).logprobs


def wrong(sampled: Sampled) -> Replay:
    trace = wrong_routes(sampled.result.trace)
    return Replay.full(trace)


def untouched(model: Any) -> None:
    for point in find_points(model).points:
        assert point.selectors == []
        assert point._used is None
        assert point.awaited == 0
    assert all("forward" not in vars(m) for m in model.modules())
    assert not model._forward_pre_hooks


def test_numbers_are_those_of_a_process_without_the_library(checkpoint: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PLAIN, str(checkpoint)], capture_output=True, text=True, check=True)
    *expected, imported = done.stdout.split()
    assert imported == "False"
    model = load_model(checkpoint)
    tokens = torch.arange(3 * 7).reshape(3, 7) % 90 + 4

    def digests() -> list[str]:
        model.zero_grad()
        logits = model(input_ids=tokens, use_cache=False).logits
        logits.logsumexp(-1).sum().backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        return [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in (logits.detach(), gradient)]

    assert digests() == expected
    with recording(model) as seen:
        model(input_ids=tokens, use_cache=False)
    with replaying(model, wrong_routes(seen.trace())):
        assert digests() != expected
    assert digests() == expected


def test_a_reference_model_beside_the_policy_never_replays(engine: str, checkpoint: Path, sampled: Sampled) -> None:
    policy, reference = build(engine, checkpoint), build(engine, checkpoint)
    native = score(reference, sampled)
    replay = wrong(sampled)
    with replaying(policy.model, replay.trace):
        assert torch.equal(score(reference, sampled), native)
    assert not torch.equal(score(policy, sampled, replay), native)
    assert torch.equal(score(policy, sampled), native)


def test_a_rebuilt_model_starts_clean(engine: str, checkpoint: Path, sampled: Sampled) -> None:
    first = build(engine, checkpoint)
    native = score(first, sampled)
    score(first, sampled, wrong(sampled))
    del first
    second = build(engine, checkpoint)
    untouched(second.model)
    assert len(find_points(second.model).points) == 4
    assert torch.equal(score(second, sampled), native)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, ValueError])
def test_an_interrupted_pass_leaves_nothing_behind(
    engine: str, checkpoint: Path, sampled: Sampled, interrupt: type[BaseException]
) -> None:
    trainer = build(engine, checkpoint)
    native = score(trainer, sampled)
    calls = 0

    def breaks(logp: torch.Tensor, rows: torch.Tensor, scores: Any = None) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise interrupt
        return -logp, {}

    with contextlib.suppress(interrupt):
        trainer.update(sampled.batch, breaks, temperature=1.0, replay=wrong(sampled))
    assert calls == 2
    untouched(trainer.model)
    assert torch.equal(score(trainer, sampled), native)
    whole = trainer.update(sampled.batch, lambda logp, rows, scores=None: (-logp, {}), temperature=1.0)
    alone = build(engine, checkpoint).update(
        sampled.batch, lambda logp, rows, scores=None: (-logp, {}), temperature=1.0
    )
    assert (whole.loss, whole.grad_norm) == (alone.loss, alone.grad_norm)


def test_a_forward_only_pass_leaves_no_routes_for_the_next(engine: str, checkpoint: Path, sampled: Sampled) -> None:
    recompute = CONFIG.trainer.model_copy(update={"recompute": True})
    trainer = TRAINERS[engine](checkpoint, recompute, CONFIG.algorithm)
    score(trainer, sampled, wrong(sampled))
    untouched(trainer.model)
    own = trainer.logprobs(sampled.batch, temperature=1.0, capture=True)
    assert own.trace is not None
    update = trainer.update(sampled.batch, lambda logp, rows, scores=None: (-logp, {}), temperature=1.0)
    plain = build(engine, checkpoint).update(
        sampled.batch, lambda logp, rows, scores=None: (-logp, {}), temperature=1.0
    )
    assert update.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    untouched(trainer.model)


def test_a_replay_that_does_not_fit_leaves_nothing_behind(engine: str, checkpoint: Path, sampled: Sampled) -> None:
    trainer = build(engine, checkpoint)
    short = sampled.result.trace.select(range(3))
    with pytest.raises(ReplayError):
        score(trainer, sampled, Replay.full(short))
    untouched(trainer.model)


def test_runs_in_one_session_equal_runs_alone(engines: EngineSession, tmp_path: Path) -> None:
    """Another arm, precision and learning rate before it in the same session change nothing, on the real pair."""

    def config(arm: str, **more: Any) -> JobConfig:
        return JobConfig.from_flat(policy=arm, engine="real", steps=2, prompts_per_step=16, eval_prompts=8, **more)

    alone = run_job(config("R3"), engines, runs_dir=tmp_path / "alone", show="none")
    run_job(config("none", precision="native", lr=1e-2), engines, runs_dir=tmp_path / "other", show="none")
    after = run_job(config("R3"), engines, runs_dir=tmp_path / "after", show="none")
    columns = [c for c in alone.metrics if not str(c).startswith("time/")]
    assert alone.metrics[columns].equals(after.metrics[columns])


RECREATE = """
import gc, json, os, sys
os.environ["OMP_NUM_THREADS"] = "1"
import psutil
from rar_lib.checkpoint import SpecialTokens, resolve_checkpoint
from rar_lib.config import JobConfig
from rar_lib.engines.session import EngineSession
config, path, sizes = JobConfig(), resolve_checkpoint("tiny-moe"), []
for _ in range(10):
    with EngineSession() as session:
        rollout, trainer = session.open(config, path, SpecialTokens((1,), 0))
        rollout.generate([[5, 6]], config.rollout.sampling, ["a"], 0)
    del rollout, trainer
    gc.collect()
    sizes.append(psutil.Process().memory_info().rss / 2**20)
print(json.dumps(sizes))
"""


def test_ten_sessions_in_one_process_do_not_grow() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", RECREATE], capture_output=True, text=True, check=True)
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert len(sizes) == 10
    growth = (sizes[-1] - sizes[3]) / 6  # MiB a session, once caches are warm
    assert growth < 8, sizes


def test_packed_sequences_are_refused(checkpoint: Path, sampled: Sampled) -> None:
    """A row a sequence is what replay needs; Megatron's packed forward is named before anything is computed."""
    trainer = build("megatron", checkpoint)
    tokens = sampled.batch.tokens
    with replaying(trainer.model, sampled.result.trace), pytest.raises(ReplayError, match="packed sequences"):
        trainer.model(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=object())
