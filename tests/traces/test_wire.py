"""Every producer's layout: written as the producer writes it, read back, equal."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rar_lib.errors import TraceError
from rar_lib.traces.trace import RouteTrace
from rar_lib.traces.wire import read_dump, read_trace
from tests.traces import writers
from tests.traces.writers import LAYOUTS, Batch, Layout, make_batch

DENSE_FIRST, ALTERNATING, EVERY = (4, (1, 2, 3)), (4, (1, 3)), (2, (0, 1))
SIZES = [(e, k) for e in (8, 64, 128, 256, 257, 300, 512) for k in (1, 2, 8)]


def read(layout: Layout, batch: Batch, folder: Path) -> RouteTrace:
    path = layout.write(batch, folder / layout.name)
    return read_trace(path, model=batch.model, **layout.options)


def check(layout: Layout, batch: Batch, trace: RouteTrace) -> None:
    """Same ids, states and tokens; rows that were dropped on purpose are missing, never something else."""
    expected = batch.trace()
    assert trace.header.producer == layout.format
    assert trace.header.moe_layers == batch.model.moe_layers
    assert trace.experts.dtype == expected.experts.dtype
    assert trace.lengths.tolist() == expected.lengths.tolist()
    if layout.ids:
        assert trace.token_digest == expected.token_digest
    got, want = trace.ids(), expected.ids()
    got, want = (got, want) if layout.ordered else (np.sort(got, -1), np.sort(want, -1))
    dropped = ~trace.recorded & expected.recorded
    for start, length in zip(expected.offsets[:-1], expected.lengths, strict=True):
        assert not dropped[start + min(layout.first, length) : start + length].any()
    assert np.array_equal(got[~dropped], want[~dropped])
    assert (trace.recorded <= expected.recorded).all()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("layers", "moe"), [DENSE_FIRST, ALTERNATING, EVERY], ids=["dense-first", "alternating", "every"]
)
def test_written_then_read_is_equal(name: str, layers: int, moe: tuple[int, ...], tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    for number, (e, k) in enumerate(SIZES):
        batch = make_batch(e, k, layers, moe, [(3, 4), (1, 1), (5, 2), (1, 6)], seed=number)
        check(layout, batch, read(layout, batch, tmp_path))


WITHOUT_LOGPROBS = {"verl_r2", "nemo_lists", "nemo_strings", "megatron", "tracer"}
VERSIONED = {"verl", "slime", "slime_030", "slime_020", "sglang", "sglang_typed", "xtuner"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_masks_and_versions_lie_on_their_tokens(name: str, tmp_path: Path) -> None:
    layout, batch = LAYOUTS[name], make_batch(64, 4, *DENSE_FIRST, [(3, 4), (6, 1), (1, 6), (4, 3)])
    path = layout.write(batch, tmp_path / layout.name)
    dump = read_dump(path, model=batch.model, **layout.options)
    assert len(dump.samples) == 4
    for sample, item in zip(dump.samples, batch.items, strict=True):
        p = len(item.prompt)
        if layout.ids:
            assert sample.token_ids is not None
            assert sample.token_ids.tolist() == item.ids
        if layout.ids and name != "megatron":
            assert sample.prompt == p
            assert sample.response_mask is not None
            assert np.flatnonzero(sample.response_mask).tolist() == list(range(p, len(item.ids)))
        assert ("rollout" in sample.logprobs) == (name not in WITHOUT_LOGPROBS)
        if name not in WITHOUT_LOGPROBS:
            assert sample.logprobs["rollout"][p:] == pytest.approx(item.logprobs, rel=1e-6)
            assert np.isnan(sample.logprobs["rollout"][:p]).all()
        assert (sample.versions is not None) == (name in VERSIONED)
        if sample.versions is not None:
            assert set(sample.versions.tolist()) == {3}


def test_versions_of_single_tokens(tmp_path: Path) -> None:
    """XTuner names the step of every sampled token, SGLang spans of them; the prompt has the first one's."""
    batch = make_batch(64, 4, *DENSE_FIRST, [(3, 4)])
    item = batch.items[0]
    state = writers.RolloutState(
        prompt_ids=item.prompt, response_ids=item.answer, response_model_steps=[5, 5, 6, 7], routed_experts=None
    )
    with writers.placed({"xtuner.v1.data_proto.rl_data": (writers.RolloutState,)}):
        torch.save([[state]], tmp_path / "x.pt")
    (sample,) = read_dump(tmp_path / "x.pt", allow_pickle=True).samples
    assert sample.versions is not None
    assert sample.versions.tolist() == [5, 5, 5, 5, 5, 6, 7]
    spans = [{"version": "5", "start": 0, "end": 2}, {"version": "6", "start": 2, "end": 4}]
    routes = writers.b64(batch.all_layers(item).astype("<i4"))
    answer = writers._sglang(item, routed_experts=routes, weight_versions=spans)
    (sample,) = read_dump(writers.jsonl(tmp_path / "s.jsonl", [answer]), model=batch.model).samples
    assert sample.versions is not None
    assert sample.versions.tolist() == [5, 5, 5, 5, 5, 6, 6]
    spans[1]["end"] = 9
    with pytest.raises(TraceError, match="lies outside 4 sampled tokens"):
        read_dump(writers.jsonl(tmp_path / "s.jsonl", [answer]), model=batch.model)


def test_masks_with_holes(tmp_path: Path) -> None:
    """Tool tokens in an answer: masked out where the producer says so, whatever side is padded."""
    batch = make_batch(64, 4, *DENSE_FIRST, [(3, 5), (5, 3)])
    holes = {0: [1, 2], 1: [0]}
    fields, _, _ = writers._padded(batch)
    entries = {}
    for i, gone in holes.items():
        fields["response_mask"][i, gone] = 0
    for key, value in fields.items():
        kind = str(torch.from_numpy(value).dtype).removeprefix("torch.")
        entries[key] = (kind, value.shape, np.frombuffer(value.tobytes(), np.uint8))
    with writers.placed({"verl.protocol": (writers.DataProto,)}):
        (tmp_path / "g.dp").write_bytes(pickle.dumps(writers.DataProto((((2,), None, entries), {}, {}))))
    found = read_dump(tmp_path / "g.dp", model=batch.model, allow_pickle=True).samples
    for sample, item, gone in zip(found, batch.items, holes.values(), strict=True):
        assert sample.response_mask is not None
        expected = [len(item.prompt) + t for t in range(len(item.answer)) if t not in gone]
        assert np.flatnonzero(sample.response_mask).tolist() == expected


lengths = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=4).filter(
    lambda pairs: any(p + r > 1 for p, r in pairs)
)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths, st.sampled_from(SIZES), st.sampled_from([DENSE_FIRST, ALTERNATING, EVERY]), st.integers(0, 99))
def test_round_trip_of_any_lengths(name: str, tmp_path: Path, lengths: Any, size: Any, axis: Any, seed: int) -> None:
    layout = LAYOUTS[name]
    batch = make_batch(*size, *axis, lengths, seed)
    check(layout, batch, read(layout, batch, tmp_path))
