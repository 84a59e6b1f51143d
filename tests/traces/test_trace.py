"""RouteTrace: exact round trips, and every contradiction refused with its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rar_lib.errors import TraceError
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader, digest_tokens, id_dtype


def make_trace(lengths: list[int], experts: int, k: int, layers: int = 3, seed: int = 0, **header: Any) -> RouteTrace:
    """Random distinct ids; the last token of each sequence has none, and some cells are missing."""
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    ids = np.argsort(rng.random((n, layers, experts)), axis=-1)[..., :k]
    status = np.where(rng.random((n, layers)) < 0.2, Status.MISSING, Status.RECORDED).astype(np.uint8)
    ends = np.cumsum(lengths) - 1
    status[ends[np.array(lengths) > 0]] = Status.LAST
    head = TraceHeader(num_experts=experts, top_k=k, moe_layers=tuple(range(1, layers + 1)), source="rollout", **header)
    return RouteTrace.from_packed(
        head, ids, lengths, status, token_ids=rng.integers(0, 99, n), logprobs=rng.normal(size=n).astype(np.float32),
        margins=rng.random((n, layers)), policy_version=np.full(n, 4),
    )  # fmt: skip


sizes = st.tuples(
    st.lists(st.integers(0, 5), min_size=1, max_size=5), st.sampled_from([2, 8, 64, 256, 257, 300]), st.sampled_from([1, 2, 8]),
    st.integers(0, 99),
).filter(lambda s: s[2] <= s[1])  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(sizes, st.integers(0, 4))
def test_padding_and_back_is_exact(size: Any, extra: int) -> None:
    lengths, experts, k, seed = size
    trace = make_trace(lengths, experts, k, seed=seed)
    padded, status = trace.to_padded(max(lengths) + extra)
    again = RouteTrace.from_padded(trace.header, padded, lengths, status)
    assert again.equals(replace(trace, token_ids=None, logprobs=None, margins=None, policy_version=None))


@settings(deadline=None, max_examples=60)
@given(sizes)
def test_slicing_and_joining_are_inverse(size: Any) -> None:
    lengths, experts, k, seed = size
    trace = make_trace(lengths, experts, k, seed=seed)
    assert RouteTrace.concatenate([trace[i] for i in range(len(lengths))]).equals(trace)
    order = np.random.default_rng(seed).permutation(len(lengths))
    back = trace.select(order).select(np.argsort(order))
    assert back.equals(trace)


@settings(deadline=None, max_examples=30)
@given(sizes)
def test_files_round_trip(tmp_path_factory: pytest.TempPathFactory, size: Any) -> None:
    lengths, experts, k, seed = size
    trace = make_trace(lengths, experts, k, seed=seed, model_id="m", sampling={"temperature": 1.0})
    path = trace.save(tmp_path_factory.mktemp("trace") / "t.safetensors")
    loaded = RouteTrace.load(path)
    loaded.verify()
    assert loaded.equals(trace)
    assert loaded.token_digest == trace.token_digest


@pytest.mark.parametrize(("experts", "dtype"), [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65537, "uint32")])
def test_ids_keep_the_smallest_type_that_holds_them(experts: int, dtype: str) -> None:
    assert id_dtype(experts) == dtype
    header = TraceHeader(num_experts=experts, top_k=1, moe_layers=(0,), source="old")
    trace = RouteTrace.from_packed(header, [[[experts - 1]]], [1], [Status.RECORDED])
    assert trace.ids()[0, 0, 0] == experts - 1


def test_a_hand_made_trace_says_what_is_there() -> None:
    header = TraceHeader(num_experts=4, top_k=2, moe_layers=(1, 3), source="rollout")
    experts = [[[0, 1], [2, 3]], [[1, 0], [-1, -1]], [[-1, -1], [-1, -1]]]
    status = [[1, 1], [1, 0], [2, 2]]
    trace = RouteTrace.from_packed(header, experts, [3], status, token_ids=np.array([7, 8, 9]))
    assert trace.coverage() == {"recorded": 0.75, "missing": 0.25}
    assert trace.ids().tolist() == experts
    assert trace.token_digest == digest_tokens(np.array([7, 8, 9], dtype=np.int16), np.array([0, 3]))
    assert "recorded=0.7500" in repr(trace)
    assert trace._repr_html_() == trace._repr_html_()
    assert "<td>2 ([1, 3])</td>" in trace._repr_html_()


def packed(experts: Any, lengths: Any = (2,), status: Any = (1, 2), e: int = 4, k: int = 2) -> RouteTrace:
    header = TraceHeader(num_experts=e, top_k=k, moe_layers=(5,), source="rollout")
    return RouteTrace.from_packed(header, experts, lengths, status)


@pytest.mark.parametrize(
    ("experts", "lengths", "status", "message"),
    [
        ([[[0, 4]], [[0, 0]]], [2], [1, 2], "sequence 0, token 0, layer 5: expected ids from 0 to 3, found \\[0, 4\\]"),
        ([[[0, -1]], [[0, 0]]], [2], [1, 2], "found \\[0, -1\\]"),
        ([[[1, 1]], [[0, 0]]], [2], [1, 2], "expected 2 distinct experts, found \\[1, 1\\]"),
        ([[[0, 1]], [[0, 1]], [[2, 2]]], [2, 1], [1, 2, 1], "sequence 1, token 0"),
        ([[[0, 1]]], [2], [1, 2], "experts: expected shape"),
        ([[[0, 1, 2]], [[0, 1, 2]]], [2], [1, 2], "top-2, found \\(2, 1, 3\\)"),
        ([[[0, 1]], [[0, 0]]], [2], [1, 7], "status: expected one of"),
        ([[[0, 1]], [[0, 0]]], [2], [1], "status: expected shape"),
    ],
)
def test_contradictions_are_refused_with_their_place(experts: Any, lengths: Any, status: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        packed(experts, lengths, status)


def test_ids_are_never_wrapped_into_a_small_type() -> None:
    header = TraceHeader(num_experts=300, top_k=1, moe_layers=(0,), source="rollout")
    with pytest.raises(TraceError, match="expected dtype uint16"):
        RouteTrace(header, np.zeros((1, 1, 1), np.uint8), np.array([0, 1]), np.array([1], np.uint8))


@pytest.mark.parametrize("layers", [(), (1, 1), (2, 1), (-1, 0)])
def test_layer_numbers_must_rise(layers: Any) -> None:
    with pytest.raises(ValueError, match="moe_layers"):
        TraceHeader(num_experts=4, top_k=2, moe_layers=layers, source="old")


def test_only_integers_are_routes_states_and_tokens() -> None:
    for experts, status, message in (
        ([[[0.9, 1.7]], [[0, 0]]], [1, 2], "experts: expected integers, found float64"),
        ([[[0, 1]], [[0, 0]]], [257, 2], "status: expected one of .*, found 257"),
        ([[[0, 1]], [[0, 0]]], [1.0, 2.0], "status: expected integers"),
    ):
        with pytest.raises(TraceError, match=message):
            packed(experts, [2], status)
    header = TraceHeader(num_experts=4, top_k=2, moe_layers=(0,), source="old")
    with pytest.raises(TraceError, match="token_ids: expected integers"):
        RouteTrace.from_packed(header, [[[0, 1]]], [1], [1], token_ids=np.array([1.5]))


def test_padded_routes_have_no_route_at_the_last_token_by_default() -> None:
    header = TraceHeader(num_experts=4, top_k=1, moe_layers=(0,), source="old")
    experts = np.array([[[[1]], [[2]], [[3]]], [[[-1]], [[1]], [[0]]]])
    trace = RouteTrace.from_padded(header, experts, [3, 2])
    assert trace.status[:, 0].tolist() == [1, 1, 2, 0, 2]
    assert trace.ids()[:, 0, 0].tolist() == [1, 2, -1, -1, -1]


def test_coverage_of_no_cell_is_undefined() -> None:
    trace = packed([[[-1, -1]]], [1], [2])
    assert trace.coverage() == {"recorded": None, "missing": None}
    assert "recorded=no cell" in repr(trace)


def test_a_changed_header_is_found(tmp_path: Path) -> None:
    path = make_trace([4, 3], 8, 2).save(tmp_path / "t.safetensors")
    raw = path.read_bytes()
    assert raw.count(b'num_experts\\":8') == 1
    path.write_bytes(raw.replace(b'num_experts\\":8', b'num_experts\\":9'))
    with pytest.raises(TraceError, match="payload: expected SHA-256"):
        RouteTrace.load(path).verify()


def test_joining_unlike_traces_is_refused() -> None:
    a, b = make_trace([2], 8, 2), make_trace([2], 16, 2)
    with pytest.raises(TraceError, match="header of trace 1 differs"):
        RouteTrace.concatenate([a, b])


def test_a_changed_byte_of_the_payload_is_found(tmp_path: Path) -> None:
    trace = make_trace([4, 3], 8, 2)
    path = trace.save(tmp_path / "t.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(TraceError, match="payload: expected SHA-256"):
        RouteTrace.load(path).verify()


def test_foreign_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nothing there"):
        RouteTrace.load(tmp_path / "none.safetensors")
    (tmp_path / "short.safetensors").write_bytes(b"\x08")
    with pytest.raises(TraceError, match="expected a safetensors file"):
        RouteTrace.load(tmp_path / "short.safetensors")
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(TraceError, match="metadata of a route trace"):
        RouteTrace.load(tmp_path / "other.safetensors")


def test_arrays_of_other_types_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    trace = make_trace([3, 2], 8, 2)
    path = trace.save(tmp_path / "t.safetensors")
    with pytest.raises(TraceError, match="status: expected integers, found float32"):
        replace(trace, status=trace.status.astype(np.float32))
    with pytest.raises(TraceError, match="logprobs: expected floats, found int64"):
        replace(trace, logprobs=np.zeros(5, np.int64))
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    save_file({**arrays, "logprobs": torch.zeros(5, dtype=torch.bfloat16)}, path, metadata=metadata)
    with pytest.raises(TraceError, match="bfloat16"):
        RouteTrace.load(path)
