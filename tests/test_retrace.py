"""The training side of a comparison: one's own model over tokens that are already there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rar_lib.checkpoint import load_model, resolve_checkpoint
from rar_lib.config import AlgorithmConfig, TrainerConfig
from rar_lib.engines.base import TokenBatch
from rar_lib.errors import EngineError, TraceError
from rar_lib.metrics.agreement import agreement
from rar_lib.retrace import record_file, record_tokens, token_sequences
from rar_lib.traces.doctor import examine
from rar_lib.traces.trace import RouteTrace, Status
from rar_lib.traces.wire import read_trace
from tests.replay.families import FAMILIES, build
from tests.test_diagnosis import DATA, TINY, run
from tests.traces import writers
from tests.traces.writers import make_batch

ANSWERS = DATA / "traces" / "vllm" / "outputs.pt"


@pytest.mark.parametrize("name", FAMILIES)
def test_any_family_over_ragged_sequences(name: str) -> None:
    model = build(FAMILIES[name])
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 60, n).tolist() for n in (5, 1, 9, 7)]
    trace = record_tokens(model, rows, batch_size=2, scores=True, version=4)
    assert trace.lengths.tolist() == [5, 1, 9, 7]
    assert trace.header.moe_layers == FAMILIES[name].layers
    assert (trace.header.producer, trace.header.source) == ("hf", "old")
    ends = trace.offsets[1:] - 1
    assert (trace.status[ends] == Status.LAST).all()
    assert int((trace.status == Status.RECORDED).sum()) == 22 - 4
    assert trace.policy_version is not None
    assert set(trace.policy_version) == {4}
    assert trace.margins is not None
    assert (trace.margins >= 0).all()
    assert trace.scores is not None
    assert trace.logprobs is not None
    assert np.isnan(trace.logprobs[trace.offsets[:-1]]).all()  # nothing predicts a first token
    whole = record_tokens(model, rows, batch_size=4, margins=False)
    assert np.array_equal(whole.ids(), trace.ids())  # padding reaches no token
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([rows[2]])).logits[0].log_softmax(-1)
    expected = [float(logits[t, rows[2][t + 1]]) for t in range(8)]
    assert trace.logprobs[7:15] == pytest.approx(expected, abs=1e-5)
    assert examine(trace, model=model.config.to_dict()).codes == ()


def test_it_is_what_the_trainers_record() -> None:
    from rar_lib.engines.hf_trainer import HFTrainer

    rows = [row.tolist() for row in token_sequences(ANSWERS, model=TINY)]
    trainer = HFTrainer(resolve_checkpoint("tiny-moe"), TrainerConfig(engine="hf"), AlgorithmConfig())
    batch = TokenBatch.pack(
        [r[:3] for r in rows], [r[3:] for r in rows], [str(i) for i in range(len(rows))], range(len(rows)), 0
    )
    theirs = trainer.logprobs(batch, temperature=1.0, capture="margins")
    mine = record_tokens(trainer.model, rows)
    assert theirs.trace is not None
    assert agreement(theirs.trace, mine).scalars()["router_flip"] == 0
    assert mine.logprobs is not None
    assert theirs.logprobs[batch.response_mask].numpy() == pytest.approx(
        mine.logprobs[batch.response_mask[batch.token_mask].numpy()], abs=1e-5
    )


def test_both_engines_over_a_file() -> None:
    hf = record_file(ANSWERS, TINY, engine="hf")
    megatron = record_file(ANSWERS, TINY, engine="megatron")
    assert (hf.header.producer, megatron.header.producer) == ("hf", "megatron")
    assert hf.header.producer_version.endswith("float32")
    assert agreement(hf, megatron).scalars()["router_flip"] == 0  # fp32 on both sides
    assert hf.logprobs is not None
    assert megatron.logprobs is not None
    known = np.isfinite(hf.logprobs)
    assert megatron.logprobs[known] == pytest.approx(hf.logprobs[known], abs=1e-4)
    recorded = read_trace(DATA / "traces" / "megatron" / "recorded.pt", model=TINY).ids()
    assert np.array_equal(
        np.sort(recorded, -1), np.sort(megatron.ids(), -1)
    )  # Megatron's own RouterReplay saw the same


def test_on_the_command_line(tmp_path: Path) -> None:
    import subprocess
    import sys

    tokens = writers.jsonl(tmp_path / "tokens.jsonl", [{"token_ids": [5, 6, 7, 8], "prompt": 2}, {"token_ids": [9]}])
    out = tmp_path / "own.safetensors"
    done = subprocess.run(
        [sys.executable, "-m", "rar_lib", "record", str(tokens), "--model", str(TINY), "--out", str(out), "--version", "7"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out)
    trace = RouteTrace.load(out)
    trace.verify()
    assert trace.lengths.tolist() == [4, 1]
    assert trace.token_ids is not None
    assert trace.token_ids.tolist() == [5, 6, 7, 8, 9]
    without = run("record", str(tokens), "--model", str(TINY), "--out", str(out))
    assert without.returncode == 2
    assert "rar: recording needs Transformers" in without.stderr
    assert "install the extra rar-lib[hf]" in without.stderr


def test_what_cannot_be_routed(tmp_path: Path) -> None:
    made = make_batch(16, 2, 4, (0, 1, 2, 3), [(3, 3)], vocab=5000)
    path = writers.write_slime(made, tmp_path / "0.pt")
    with pytest.raises(EngineError, match=r"token id \d+ is outside the 100 of .*another model's tokens"):
        record_file(path, TINY)
    strings = writers.write_nemo_strings(made, tmp_path / "routes.txt")
    with pytest.raises(TraceError, match="line 1 carries no token ids"):
        record_file(strings, TINY)
    with pytest.raises(TraceError, match="found an empty one"):
        record_tokens(load_model(TINY), [[1], []])
    with pytest.raises(EngineError, match="expected hf, or megatron in float32"):
        record_file(ANSWERS, TINY, engine="megatron", dtype="bfloat16")
