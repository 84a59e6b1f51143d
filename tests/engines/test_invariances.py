"""What may not change a number."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rar_lib.config import JobConfig
from rar_lib.engines.base import Replay, TokenBatch
from rar_lib.engines.trainers import TRAINERS
from rar_lib.metrics.agreement import agreement
from rar_lib.metrics.mismatch import mismatch
from rar_lib.replay.scores import ESTIMATORS, SignalRequest, score_sums
from rar_lib.rl.objectives import grpo_loss
from rar_lib.traces.trace import RouteTrace
from tests.conftest import Sampled

CONFIG = JobConfig.build({}, ["trainer.micro_batch_size=32"])


def build(engine: str, path: Path) -> Any:
    return TRAINERS[engine](path, CONFIG.trainer, CONFIG.algorithm)


@pytest.fixture(params=list(TRAINERS))
def engine(request: Any) -> str:
    return request.param


def scalars(trainer: Any, batch: TokenBatch, trace: RouteTrace, mu: torch.Tensor) -> dict[str, float]:
    """Every scalar of a batch: mismatch natively and under R3, agreement, replay counts, loss and gradient norm."""
    mask = batch.response_mask
    native = trainer.logprobs(batch, temperature=1.0, capture=True)
    replay = Replay.full(trace)
    forced = trainer.logprobs(batch, temperature=1.0, replay=replay)
    advantages = (batch.tokens.sum(1) % 5 - 2).float()  # by content, so that it follows the sequence
    update = trainer.update(
        batch, lambda logp, rows, scores=None: grpo_loss(logp, forced.logprobs[rows], advantages[rows], mask[rows], 0.2, 0.2),
        temperature=1.0, replay=replay,
    )  # fmt: skip
    values = {
        **mismatch(native.logprobs, mu, mask, prefix="native/"), **mismatch(forced.logprobs, mu, mask, prefix="R3/"),
        **agreement(trace, native.trace).scalars("routes/"), "forced": forced.counts.forced_units, "changed": forced.counts.changed_cells,
        "loss": update.loss, "grad_norm": update.grad_norm,
    }  # fmt: skip
    return {name: value for name, value in values.items() if value is not None}


def same(a: dict[str, float], b: dict[str, float]) -> None:
    """Equal up to float summation; the few routes that float summation itself flips are allowed to flip."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == pytest.approx(b[name], rel=2e-3, abs=2e-6), name


def relabelled(path: Path, out: Path, order: np.ndarray) -> Path:
    """The checkpoint with expert e of each layer moved to place `order[layer, e]`."""
    shutil.copytree(path, out)
    tensors = load_file(path / "model.safetensors")
    moved = dict(tensors)
    for layer, places in enumerate(order):
        base = f"model.layers.{layer}.mlp"
        moved[f"{base}.gate.weight"] = tensors[f"{base}.gate.weight"][torch.from_numpy(np.argsort(places))]
        for expert, place in enumerate(places):
            for part in ("gate_proj", "up_proj", "down_proj"):
                moved[f"{base}.experts.{place}.{part}.weight"] = tensors[f"{base}.experts.{expert}.{part}.weight"]
    save_file({n: t.contiguous() for n, t in moved.items()}, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_relabelling_experts_changes_no_scalar(engine: str, checkpoint: Path, sampled: Sampled, tmp_path: Path) -> None:
    trace = sampled.result.trace
    order = np.stack([np.random.default_rng(layer).permutation(16) for layer in range(4)])
    ids = np.where(trace.recorded[..., None], order[np.arange(4)[:, None], trace.experts.astype(np.int64)], -1)
    renamed = RouteTrace.from_packed(trace.header, ids, trace.lengths, trace.status, token_ids=trace.token_ids)
    before = scalars(build(engine, checkpoint), sampled.batch, trace, sampled.mu)
    path = relabelled(checkpoint, tmp_path / "renamed", order)
    same(before, scalars(build(engine, path), sampled.batch, renamed, sampled.mu))
    # and a record that was not renamed with them is another record
    wrong = scalars(build(engine, path), sampled.batch, trace, sampled.mu)
    assert wrong["R3/k3"] > 10 * before["R3/k3"]


def test_relabelling_experts_permutes_their_scores(
    engine: str, checkpoint: Path, sampled: Sampled, tmp_path: Path
) -> None:
    order = np.stack([np.random.default_rng(layer).permutation(16) for layer in range(4)])
    path = relabelled(checkpoint, tmp_path / "renamed", order)
    request = SignalRequest(frozenset(ESTIMATORS))
    a, b = (
        build(engine, p).logprobs(sampled.batch, temperature=1.0, capture=True, signals=request)
        for p in (checkpoint, path)
    )
    for estimator in ESTIMATORS:
        one, two = (score_sums(r.signals, r.trace, estimator).mass for r in (a, b))
        moved = np.take_along_axis(two, order, 1)
        np.testing.assert_allclose(moved, one, rtol=1e-2, atol=1e-4 * one.max())
        assert not np.allclose(two, one, rtol=1e-2, atol=1e-4 * one.max())


def test_slot_order_changes_nothing(engine: str, checkpoint: Path, sampled: Sampled) -> None:
    trace = sampled.result.trace
    swapped = replace(trace, experts=np.ascontiguousarray(trace.experts[..., ::-1]))
    a, b = (scalars(build(engine, checkpoint), sampled.batch, t, sampled.mu) for t in (trace, swapped))
    same(a, b)


def test_padding_changes_nothing(engine: str, checkpoint: Path, sampled: Sampled) -> None:
    batch, wide = sampled.batch, torch.nn.functional.pad(sampled.batch.tokens, (0, 5))
    longer = replace(batch, tokens=wide)
    a = scalars(build(engine, checkpoint), batch, sampled.result.trace, sampled.mu)
    b = scalars(build(engine, checkpoint), longer, sampled.result.trace, torch.nn.functional.pad(sampled.mu, (0, 5)))
    same(a, b)


def test_batch_order_and_micro_batches_change_nothing(engine: str, checkpoint: Path, sampled: Sampled) -> None:
    order = torch.randperm(len(sampled.batch), generator=torch.Generator().manual_seed(0))
    a = scalars(build(engine, checkpoint), sampled.batch, sampled.result.trace, sampled.mu)
    shuffled = sampled.batch.select(order), sampled.result.trace.select(order.tolist()), sampled.mu[order]
    same(a, scalars(build(engine, checkpoint), *shuffled))
    small = CONFIG.trainer.model_copy(update={"micro_batch_size": 5})
    same(a, scalars(TRAINERS[engine](checkpoint, small, CONFIG.algorithm), *shuffled))
