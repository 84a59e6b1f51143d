"""Sound but odd records stay clean, and damage that looks sound is found."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.diagnosis import diagnose
from rar_lib.errors import TraceError
from rar_lib.traces.doctor import examine
from rar_lib.traces.layers import ModelShape, moe_layer_numbers
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader
from rar_lib.traces.wire import read_dump, read_trace
from rar_lib.traces.wire.dump import Dump, Sample
from tests.traces import writers
from tests.traces.test_doctor import MODEL, batch, dump, of
from tests.traces.writers import Batch, make_batch


def own(ids: np.ndarray, e: int, length: int = 50, **more: Any) -> RouteTrace:
    """A trace of `[N, L, K]` ids in sequences of one length, random tokens."""
    n, layers, k = ids.shape
    header = TraceHeader(num_experts=e, top_k=k, moe_layers=tuple(range(layers)), source="rollout")
    status = np.full(n, Status.RECORDED, np.uint8)
    status[length - 1 :: length] = Status.LAST
    tokens = np.random.default_rng(0).integers(0, 1000, n)
    return RouteTrace.from_packed(header, ids, [length] * (n // length), status, token_ids=tokens, **more)


def skewed(e: int, k: int, layers: int, n: int = 20_000, strength: float = 1.5, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    prior = rng.normal(size=(layers, e)) * strength
    return np.argsort(-(prior + rng.gumbel(size=(n, layers, e))), -1)[..., :k]


# ---------------------------------------------------------------- sound but odd


@pytest.mark.parametrize(("e", "k", "layers"), [(8, 2, 5), (8, 4, 4), (64, 4, 4), (4, 1, 3)])
def test_skewed_routers_with_sorted_rows_are_clean(e: int, k: int, layers: int) -> None:
    assert examine(own(np.sort(skewed(e, k, layers), -1), e)).codes == ()


def test_routers_that_like_the_first_experts_are_not_filler() -> None:
    rng = np.random.default_rng(0)
    prior = np.where(np.arange(8) < 2, 3.0, 0.0)
    ids = np.sort(np.argsort(-(prior + rng.gumbel(size=(20_000, 10, 8))), -1)[..., :2], -1)
    assert (ids == [0, 1]).all((-1, -2)).sum() > 20  # whole rows of 0, 1 by choice
    assert examine(own(ids, 8)).codes == ()


def test_every_expert_every_time_is_clean() -> None:
    assert examine(own(np.tile(np.arange(8), (3000, 4, 1)), 8)).codes == ()


def test_tokens_and_batches_of_one() -> None:
    header = TraceHeader(num_experts=8, top_k=2, moe_layers=(0, 1), source="rollout")
    one = RouteTrace.from_packed(header, [[[0, 0], [0, 0]]] * 3, [1, 1, 1], [2, 2, 2], token_ids=np.arange(3))
    assert examine(one).verdicts == ()
    rows = skewed(8, 2, 2, 50)
    status = np.r_[np.full(19, 1), 2, np.full(29, 1), 2]
    empty = RouteTrace.from_packed(header, rows, [20, 0, 30, 0], status, token_ids=np.arange(50))
    assert examine(empty).verdicts == ()
    two = RouteTrace.from_packed(header, [[[1, 0], [2, 3]], [[0, 0], [0, 0]]], [2], [1, 2], token_ids=np.arange(2))
    assert examine(two).verdicts == ()


def test_a_group_with_real_noise_is_clean() -> None:
    """A long shared prompt, and one router in eight that flips: above published rates, and no accident."""
    rng = np.random.default_rng(0)
    prompt, routes = rng.integers(0, 99, 200), skewed(64, 4, 12, 200)
    samples = []
    for i in range(8):
        rows = np.where((rng.random((200, 12)) < 0.125)[..., None], skewed(64, 4, 12, 200, seed=i + 9), routes)
        rows = np.concatenate([rows, skewed(64, 4, 12, 19, seed=90 + i)])
        ids = np.concatenate([prompt, rng.integers(0, 99, 20)])
        samples.append(Sample(f"samples[{i}]", 220, rows, token_ids=ids, prompt=200))
    made = Dump("slime", "test", "f", tuple(samples), "all")
    assert examine(made, model=ModelShape(64, 4, tuple(range(12)), 12)).codes == ()


def test_one_collapsed_layer_is_a_warning_however_it_orders_its_slots() -> None:
    ids = skewed(16, 2, 3)
    ids[:, 1] = np.where(np.random.default_rng(0).random((len(ids), 1)) < 0.5, [3, 7], [7, 3])
    report = examine(own(ids, 16))
    assert (report.codes, report.exit_status) == (("LAYER_STUCK",), 1)
    lone = examine(own(np.tile([3, 7], (200, 1, 1)), 16))
    assert (lone.codes, lone.exit_status) == (("LAYER_STUCK",), 1)
    single = examine(own(np.zeros((200, 1, 1), int), 4))
    assert single.exit_status == 1
    assert examine(own(np.zeros((200, 1, 1), int), 1)).exit_status == 0


# ---------------------------------------------------------------- damage that looks sound


def test_a_gap_over_the_end_of_the_prompt_is_both() -> None:
    made = batch()

    def lose(rows: np.ndarray, i: int) -> np.ndarray:
        if i == 1:
            rows[: len(made.items[1].prompt) + 3] = 0
        return rows

    report = examine(dump(made, lose), model=MODEL)
    assert report.codes == ("PROMPT_MISSING", "ROWS_MISSING")
    assert of(report, "PROMPT_MISSING").cells == len(made.items[1].prompt)
    assert of(report, "ROWS_MISSING").cells == 3


def test_zero_rows_that_a_trace_calls_recorded() -> None:
    ids = skewed(16, 2, 3, 200)
    trace = own(ids, 16)
    experts = trace.experts.copy()
    experts[:40] = 0
    bad = replace(trace, experts=experts, _stored_sha256="opened")
    bad = replace(bad, _stored_sha256=bad.payload_sha256())
    report = examine(bad)
    assert report.codes == ("DUPLICATE_EXPERTS",)
    assert report.exit_status == 2


def test_a_model_of_other_size() -> None:
    trace = own(skewed(16, 2, 3, 200), 16)
    for e in (8, 32):
        assert "LAYERS_MISMATCH" in examine(trace, model=ModelShape(e, 2, (0, 1, 2), 3)).codes
    wild = own(skewed(16, 2, 3, 200), 16, logprobs=np.full(200, 0.7, np.float32))
    assert examine(wild).codes == ("LOGPROBS_IMPOSSIBLE",)


def grouped(groups: int, bad: int) -> Dump:
    """Pairs of answers to one prompt each; in one group the second answer's rows are shifted."""
    rng = np.random.default_rng(0)
    samples = []
    for g in range(groups):
        prompt = np.full(12, g) + np.arange(12) * 100
        routes = skewed(64, 4, 4, 12, seed=g)
        for i in range(2):
            rows = np.concatenate([routes, skewed(64, 4, 4, 7, seed=1000 + 2 * g + i)])
            rows = np.roll(rows, 1, 0) if g == bad and i else rows
            ids = np.concatenate([prompt, rng.integers(5000, 6000, 8)])
            samples.append(Sample(f"samples[{2 * g + i}]", 20, rows, token_ids=ids, prompt=12))
    return Dump("slime", "test", "f", tuple(samples), "all")


@pytest.mark.parametrize("bad", [0, 150, 299])
def test_one_bad_group_among_many_is_found(bad: int) -> None:
    model = ModelShape(64, 4, (0, 1, 2, 3), 4)
    report = examine(grouped(300, bad), model=model)
    assert report.codes == ("ROWS_SHIFTED",)
    assert f"samples[{2 * bad}]" in of(report, "ROWS_SHIFTED").where
    assert examine(grouped(300, -1), model=model).codes == ()


def test_a_group_sampled_at_two_versions_is_no_disagreement() -> None:
    made = grouped(4, 1)
    samples = [replace(s, versions=np.full(20, i % 2)) for i, s in enumerate(made.samples)]
    model = ModelShape(64, 4, (0, 1, 2, 3), 4)
    assert examine(replace(made, samples=tuple(samples)), model=model).codes == ()


@pytest.mark.parametrize("how", ["prefix", "order", "start missing"])
def test_a_buffer_handed_out_twice(how: str) -> None:
    made = make_batch(64, 4, 5, (1, 2, 3, 4), [(6, 30), (6, 20), (6, 25)])

    def reuse(rows: np.ndarray, i: int) -> np.ndarray:
        if i != 1:
            return rows
        other = made.all_layers(made.items[0]).astype(np.int32)[: len(rows)]
        if how == "order":
            return other[..., ::-1]
        if how == "start missing":
            other[:6] = 0
        return other

    assert "ROUTES_REPEATED" in examine(dump(made, reuse), model=made.model).codes


def test_ids_cut_to_eight_bits_before_they_were_widened() -> None:
    made = make_batch(300, 1, 3, (0, 1, 2), [(6, 400)] * 30)
    cut = dump(made, lambda rows, i: rows % 256)
    report = examine(cut, model=made.model)
    assert report.codes == ("ID_WRAPPED",)
    assert "they end where 8 bits do" in of(report, "ID_WRAPPED").seen
    assert examine(dump(made), model=made.model).codes == ()


def test_unsigned_minus_one_is_out_of_range() -> None:
    def unwritten(rows: np.ndarray, i: int) -> np.ndarray:
        rows = rows.astype(np.uint16)
        rows[2, 1:] = 65535
        return rows

    report = examine(dump(batch(), unwritten), model=MODEL)
    assert report.codes == ("ID_OUT_OF_RANGE",)
    assert "-1 read as unsigned" in of(report, "ID_OUT_OF_RANGE").kind.cause


# ---------------------------------------------------------------- files


def test_errors_among_answers_are_counted(tmp_path: Path) -> None:
    path = writers.write_vllm_http(batch(), tmp_path / "a.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], '{"error": {"message": "busy"}}', "null", *lines[1:]]) + "\n")
    report = examine(path, model=MODEL)
    assert report.codes == ("RECORDS_WITHOUT_ANSWER",)
    assert of(report, "RECORDS_WITHOUT_ANSWER").where == "line 2, line 3"
    assert report.facts["samples"] == 6


def test_a_sample_left_out_of_the_loss_counts_for_nothing(tmp_path: Path) -> None:
    made = batch(2)
    path = writers.write_nemo_log(made, tmp_path / "train_data_step1.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1]["sample_loss_mask"] = [0.0]
    records[1]["prev_logprobs"] = [[-9.0] * len(records[1]["prev_logprobs"][0])]
    writers.jsonl(path, records)
    found = diagnose(path)
    assert found.mismatch["mismatch/rollout_old/tokens"] == 8
    assert found.mismatch["mismatch/rollout_old/abs_max"] == pytest.approx(0.01, rel=1e-4)


def test_log_probs_that_are_not_there_are_a_verdict_and_no_number(tmp_path: Path) -> None:
    path = writers.write_nemo_log(batch(2), tmp_path / "train_data_step1.jsonl")
    good = path.read_text()
    for value, code in (
        ("NaN", "LOGPROBS_MISSING"),
        ("-Infinity", "LOGPROBS_IMPOSSIBLE"),
        ("0.5", "LOGPROBS_IMPOSSIBLE"),
    ):
        record = json.loads(good.splitlines()[0])
        record["generation_logprobs"][0][8] = float(value)
        path.write_text(json.dumps(record) + "\n" + "\n".join(good.splitlines()[1:]) + "\n")
        found = diagnose(path)
        assert found.report.codes == (code,)
        assert "token 8" in str(found.report.verdicts[0])
        assert found.mismatch == {}


def test_tool_tokens_are_scored_by_nobody(tmp_path: Path) -> None:
    made = batch(1)
    content = writers._slime(made, lambda i: torch.from_numpy(made.all_layers(i)))
    (sample,) = content["samples"]
    sample["loss_mask"][2:5] = [0, 0, 0]
    sample["rollout_log_probs"][2:5] = [0.0, 0.0, 0.0]
    torch.save(content, tmp_path / "0.pt")
    trace = read_trace(tmp_path / "0.pt", model=made.model)
    assert trace.logprobs is not None
    assert np.flatnonzero(np.isnan(trace.logprobs)).tolist() == [*range(6), 8, 9, 10]


def test_a_resumed_answer_is_joined_with_what_it_resumes(tmp_path: Path) -> None:
    made = make_batch(64, 4, 5, (1, 2, 3, 4), [(5, 7), (4, 4)])
    item = made.items[0]
    rows = made.all_layers(item).astype(np.uint8)
    first = replace(item, answer=item.answer[:3], logprobs=item.logprobs[:3])
    second = replace(item, prompt=item.ids[:8], answer=item.ids[8:], logprobs=item.logprobs[3:])
    records = [
        writers.completion(first, routed_experts=writers.npy(rows[:7]), finish_reason="abort"),
        writers.completion(made.items[1], routed_experts=writers.npy(made.all_layers(made.items[1]).astype(np.uint8))),
        {"request": {"routed_experts_prompt_start": 7},
         "response": writers.completion(second, routed_experts=writers.npy(rows[7:]))},
    ]  # fmt: skip
    trace = read_trace(writers.jsonl(tmp_path / "a.jsonl", records), model=made.model)
    expected = Batch(made.model, [made.items[1], item]).trace()
    assert np.array_equal(trace.ids(), expected.ids())
    assert trace.token_digest == expected.token_digest
    assert trace.logprobs is not None
    assert trace.logprobs[-7:] == pytest.approx(item.logprobs)
    lost = read_dump(writers.jsonl(tmp_path / "b.jsonl", records[:2]), model=made.model)  # never resumed: kept as it is
    assert [s.tokens for s in lost.samples] == [8, 8]


def test_the_tracers_logits_beside_it(tmp_path: Path) -> None:
    made = make_batch(8, 2, 3, (0, 1, 2), [(3, 3)])
    path = writers.write_tracer(made, tmp_path / "router_trace_rank0.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(6, 8)).astype(np.float32) for _ in range(3)]
    for soft in (False, True):
        raw = b""
        for record, logits in zip([r for r in records if r["block"] == "decoder"], values, strict=True):
            told = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) if soft else logits
            part = (told.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
            record |= {"logit_offset": len(raw), "logit_bytes": len(part), "logit_shape": [6, 8]}
            raw += part
        (tmp_path / "logits_rank0.bin").write_bytes(raw)
        writers.jsonl(path, records)
        found = read_dump(path, model=made.model, batch_size=1)
        assert found.samples[0].router_logits is not None
        if not soft:
            assert found.samples[0].router_logits[:, 1] == pytest.approx(values[1], rel=0.01)
        report = examine(path, model=made.model, batch_size=1)
        assert ("SCORES_ARE_PROBABILITIES" in report.codes) == soft
    (tmp_path / "logits_rank0.bin").write_bytes(raw[:-3])
    with pytest.raises(
        TraceError, match=r"line 3: logits: \[6, 8\] at byte 192 for 6 tokens do not fit logits_rank0.bin"
    ):
        read_dump(path, model=made.model, batch_size=1)
    with pytest.raises(TraceError, match="batch_size: expected 1 or more, found 0"):
        read_dump(path, model=made.model, batch_size=0)


@pytest.mark.parametrize(("config", "layers"), [
    ({"num_dense_layers": 2}, (2, 3, 4, 5)),
    ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
    ({"first_k_dense_replace": 1, "moe_layer_freq": 1}, (1, 2, 3, 4, 5)),
    ({"interleave_moe_layer_step": 2}, (1, 3, 5)),
    ({"moe_layers": [1, 3]}, (1, 3)),
    ({"expert_layer_period": 2, "expert_layer_offset": 1}, (1, 3, 5)),
    ({}, (0, 1, 2, 3, 4, 5)),
])  # fmt: skip
def test_rules_of_more_families(config: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert moe_layer_numbers({"num_hidden_layers": 6, **config}) == layers


@pytest.mark.parametrize(("config", "message"), [
    ({"mlp_layer_types": ["hash_moe"] * 6}, r"expected 6 of dense, sparse or moe, found 6 with \['hash_moe'\]"),
    ({"hybrid_override_pattern": "ME*"}, "lies in hybrid_override_pattern, which is not read"),
    ({"moe_layer_freq": [1, 1]}, "moe_layer_freq: expected 6 values, found 2"),
    ({"num_hidden_layers": "6"}, "num_hidden_layers: expected an integer, found '6'"),
])  # fmt: skip
def test_rules_that_are_not_read_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        moe_layer_numbers({"num_hidden_layers": 6, **config})


def test_the_second_record_is_examined_too(tmp_path: Path) -> None:
    made = make_batch(16, 2, 4, (0, 1, 2, 3), [(20, 30)] * 10)
    first = made.trace().save(tmp_path / "a.safetensors")
    second = made.trace("old").save(tmp_path / "b.safetensors")
    assert diagnose(first, against=second, asserting=("weights",)).exit_status == 0
    data = bytearray(second.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start = 8 + size + json.loads(data[8 : 8 + size])["experts"]["data_offsets"][0]
    for at in range(start, start + 12):
        data[at] = 250
    second.write_bytes(data)
    found = diagnose(first, against=second, asserting=("weights",))
    assert found.exit_status == 2
    assert found.comparison is None
    assert {"PAYLOAD_CHANGED", "ID_OUT_OF_RANGE"} <= set(found.report.codes)
    assert all(v.where.startswith("second record") for v in found.report.verdicts)


class ForgedType:
    """Pickles as an object type whose flags say that it holds none: numpy would then make pointers of the file's bytes."""

    def __reduce__(self) -> Any:
        return np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0)


class ForgedArray:
    def __reduce__(self) -> Any:
        from numpy._core.multiarray import _reconstruct

        return _reconstruct, (np.ndarray, (0,), b"b"), (1, (3,), ForgedType(), False, b"\x41" * 24)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_forged_type_makes_no_pointers(tmp_path: Path, allow_pickle: bool) -> None:
    sample = {"tokens": [1, 2, 3, 4], "response_length": 3, "rollout_log_probs": ForgedArray()}
    torch.save({"samples": [sample]}, tmp_path / "0.pt", pickle_module=pickle)
    assert examine(tmp_path / "0.pt", allow_pickle=allow_pickle).codes == ("UNREADABLE",)
