"""Every failure of the field has its verdict, and sound records have none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.errors import TraceError
from rar_lib.traces.compare import compare
from rar_lib.traces.doctor import examine
from rar_lib.traces.layers import ModelShape
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader
from rar_lib.traces.verdicts import KINDS, Report, Verdict, listed, verdict
from rar_lib.traces.wire import read_dump, read_trace
from rar_lib.traces.wire.convert import to_trace
from rar_lib.traces.wire.dump import Dump, Sample
from rar_lib.traces.wire.segments import join_segments
from tests.traces import writers
from tests.traces.writers import LAYOUTS, Batch, make_batch

E, K, LAYERS, MOE = 64, 4, 5, (1, 2, 3, 4)
MODEL = ModelShape(E, K, MOE, LAYERS, "tiny")
Change = Callable[[np.ndarray, int], np.ndarray]


def batch(n: int = 6, seed: int = 0, e: int = E, k: int = K) -> Batch:
    return make_batch(e, k, LAYERS, MOE, [(6 + i % 3, 8) for i in range(n)], seed)


def dump(made: Batch, change: Change | None = None, **more: Any) -> Dump:
    """A slime-like dump, all layers; `change(rows, sample number)` meddles with what was written."""
    samples = []
    for i, item in enumerate(made.items):
        rows = made.all_layers(item).astype(np.int32)
        rows = rows if change is None else change(rows, i)
        samples.append(
            Sample(f"samples[{i}]", len(item.ids), rows, token_ids=np.array(item.ids), prompt=len(item.prompt), **more)
        )
    return Dump("slime", "test", "file.pt", tuple(samples), "all")


def codes(source: Any, model: Any = MODEL, **more: Any) -> tuple[str, ...]:
    return examine(source, model=model, **more).codes


def of(report: Report, code: str) -> Verdict:
    return next(v for v in report.verdicts if v.code == code)


# ---------------------------------------------------------------- sound records


def test_a_sound_dump_is_clean_and_says_how_much_is_missing() -> None:
    report = examine(dump(batch()), model=MODEL)
    assert report.verdicts == ()
    assert report.exit_status == 0
    assert report.facts["missing"] == 0
    assert report.facts["samples without routes"] == 0
    assert "clean" in str(report)
    assert report._repr_html_() == report._repr_html_()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_clean(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    made = batch()
    report = examine(layout.write(made, tmp_path / layout.name), model=made.model, **layout.options)
    expected = {"PROMPT_MISSING"} if layout.first else set()
    assert set(report.codes) == expected
    assert report.facts["format"] == layout.format


FAMILIES = (
    "qwen3_moe",
    "olmoe",
    "mixtral",
    "qwen2_moe",
    "glm4_moe",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "minimax_m2",
    "ernie4_5_moe",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_traces_of_real_architectures_are_clean(name: str, tmp_path: Path) -> None:
    from rar_lib.replay.contexts import recording
    from tests.replay.families import FAMILIES as KNOWN
    from tests.replay.families import build

    model = build(KNOWN[name])
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 64, (8, 24), generator=rng)
    tokens[1::2, :8] = tokens[::2, :8]  # pairs that begin alike
    with torch.no_grad(), recording(model) as record:
        model(tokens)
    trace = record.trace()
    assert examine(trace, model=model.config.to_dict()).verdicts == ()
    path = trace.save(tmp_path / "t.safetensors")
    report = examine(path, model=model.config.to_dict())
    assert (report.verdicts, report.exit_status) == ((), 0)
    # the same routes as an engine would dump them, all layers
    shape = ModelShape.from_config(model.config)
    items = [
        writers.Item(
            row[:8].tolist(),
            row[8:].tolist(),
            trace.ids()[trace.offsets[i] : trace.offsets[i + 1] - 1],
            np.zeros(16, np.float32),
        )
        for i, row in enumerate(tokens)
    ]
    assert examine(writers.write_verl(Batch(shape, items), tmp_path / "tq_batch.pt"), model=shape).codes == ()


# ---------------------------------------------------------------- capture


def test_capture_dead() -> None:
    report = examine(dump(batch(), lambda rows, i: rows * 0), model=MODEL)
    assert report.codes == ("CAPTURE_DEAD",)
    assert report.exit_status == 2
    assert of(report, "CAPTURE_DEAD").layers == MOE


def test_capture_dead_at_top_1() -> None:
    made = batch(k=1)
    report = examine(dump(made, lambda rows, i: rows * 0), model=made.model)
    assert report.codes == ("CAPTURE_DEAD",)


def test_a_dead_capture_is_seen_without_the_model() -> None:
    assert "CAPTURE_DEAD" in examine(dump(batch(), lambda rows, i: rows * 0)).codes


def test_a_layer_dead_and_dense_layers_are_told_apart_by_the_model() -> None:
    def silence(rows: np.ndarray, i: int) -> np.ndarray:
        rows[:, 2] = 0
        return rows

    report = examine(dump(batch(), silence), model=MODEL)
    assert report.codes == ("LAYER_DEAD",)
    assert of(report, "LAYER_DEAD").layers == (2,)
    unknown = examine(dump(batch()))  # layer 0 is dense: without the model it may be dead
    assert unknown.codes == ("LAYER_EMPTY",)
    assert of(unknown, "LAYER_EMPTY").layers == (0,)
    assert unknown.exit_status == 1
    assert "MODEL_UNKNOWN" in [v.code for v in unknown.verdicts]


def test_capture_stuck() -> None:
    assert codes(dump(batch(), lambda rows, i: np.broadcast_to(np.arange(K)[::-1], rows.shape))) == ("CAPTURE_STUCK",)

    def one(rows: np.ndarray, i: int) -> np.ndarray:
        rows[:, 3] = [5, 6, 7, 8]
        return rows

    report = examine(dump(batch(), one), model=MODEL)
    assert report.codes == ("LAYER_STUCK",)
    assert of(report, "LAYER_STUCK").layers == (3,)


def test_prompt_missing_keeps_response_rows() -> None:
    made = batch()
    prompt = [len(item.prompt) for item in made.items]

    def cached(rows: np.ndarray, i: int) -> np.ndarray:
        rows[: prompt[i]] = 0
        return rows

    found = dump(made, cached)
    report = examine(found, model=MODEL)
    assert report.codes == ("PROMPT_MISSING",)
    assert report.exit_status == 1
    assert of(report, "PROMPT_MISSING").cells == sum(prompt)
    trace = to_trace(found, MODEL)
    assert int((trace.status == Status.MISSING).sum()) == sum(prompt)
    expected = made.trace()
    kept = trace.recorded
    assert np.array_equal(trace.ids()[kept], expected.ids()[kept])
    assert kept.sum() == expected.recorded.sum() - sum(prompt) * len(MOE)


@pytest.mark.parametrize("rows", [-3, -1, 2])
def test_a_wrong_row_count_names_sequence_tokens_and_rows(rows: int) -> None:
    def cut(found: np.ndarray, i: int) -> np.ndarray:
        return found if i != 2 else np.concatenate([found, found])[: len(found) + rows]

    found = dump(batch(), cut)
    report = examine(found, model=MODEL)
    assert report.codes == ("ROW_COUNT",)
    tokens = found.samples[2].tokens
    told = of(report, "ROW_COUNT")
    assert told.samples == (2,)
    assert told.seen == f"{tokens - 1 + rows} rows from token 0 for {tokens} tokens; expected {tokens - 1} or {tokens}"
    with pytest.raises(TraceError, match=rf"ROW_COUNT: samples\[2\]: {tokens - 1 + rows} rows"):
        to_trace(found, MODEL)


def test_a_block_without_routes_is_missing_and_nothing_moves() -> None:
    made = batch()

    def lose(rows: np.ndarray, i: int) -> np.ndarray:
        if i == 1:
            rows[9:12] = 0
        return rows

    report = examine(dump(made, lose), model=MODEL)
    assert report.codes == ("ROWS_MISSING",)
    assert (of(report, "ROWS_MISSING").samples, of(report, "ROWS_MISSING").cells) == ((1,), 3)
    assert "from token 9" in of(report, "ROWS_MISSING").seen
    assert report.facts["missing"] == 3 * len(MOE)
    trace, expected = to_trace(dump(made, lose), MODEL), made.trace()
    gone = expected.recorded & ~trace.recorded
    assert np.flatnonzero(gone.any(-1)).tolist() == (trace.offsets[1] + np.arange(9, 12)).tolist()
    assert np.array_equal(trace.ids()[~gone], expected.ids()[~gone])


def same_prompt(shift: int = 0, other: bool = False) -> Dump:
    """Four answers to one prompt; the last one's routes shifted by rows, or drawn anew."""
    rng = np.random.default_rng(1)
    prompt, routes = rng.integers(1, 50, 12), np.argsort(rng.random((40, LAYERS, E)), -1)[..., :K]
    samples = []
    for i in range(4):
        answer = rng.integers(1, 50, 8)
        rows = np.concatenate([routes[:12], np.argsort(rng.random((7, LAYERS, E)), -1)[..., :K]])
        if i == 3 and shift:
            rows = np.concatenate([rows[shift:], routes[20 : 20 + shift]])
        if i == 3 and other:
            rows = np.argsort(rng.random((19, LAYERS, E)), -1)[..., :K]
        rows[:, 0] = 0
        samples.append(Sample(f"samples[{i}]", 20, rows, token_ids=np.concatenate([prompt, answer]), prompt=12))
    return Dump("slime", "test", "file.pt", tuple(samples), "all")


def test_one_prompt_twice_has_one_routing() -> None:
    assert codes(same_prompt()) == ()
    assert codes(same_prompt(shift=1)) == ("ROWS_SHIFTED",)
    assert codes(same_prompt(shift=2)) == ("ROWS_SHIFTED",)
    assert codes(same_prompt(other=True)) == ("PREFIX_DISAGREES",)
    trace = to_trace(same_prompt(shift=1), MODEL)
    assert examine(trace, model=MODEL).codes == ("ROWS_SHIFTED",)


def test_routes_of_another_request() -> None:
    made = batch()

    def reuse(rows: np.ndarray, i: int) -> np.ndarray:
        return made.all_layers(made.items[0]).astype(np.int32) if i == 3 else rows  # items 0 and 3 have equal lengths

    report = examine(dump(made, reuse), model=MODEL)
    assert report.codes == ("ROUTES_REPEATED",)
    assert of(report, "ROUTES_REPEATED").samples == (3,)


def test_aborted_and_preempted_requests_are_counted() -> None:
    found = dump(batch())
    samples = list(found.samples)
    samples[1] = replace(samples[1], experts=None)
    report = examine(replace(found, samples=tuple(samples)), model=MODEL)
    assert report.codes == ("SAMPLE_WITHOUT_ROUTES",)
    assert report.facts["samples without routes"] == 1
    trace = to_trace(replace(found, samples=tuple(samples)), MODEL)
    assert trace.coverage()["missing"] == pytest.approx((samples[1].tokens - 1) / sum(s.tokens - 1 for s in samples))
    assert trace[0].coverage()["missing"] == 0


def test_mixed_versions_are_told_per_token() -> None:
    found = dump(batch())
    first = found.samples[0]
    mixed = np.where(np.arange(first.tokens) < 9, 3, 4)
    report = examine(replace(found, samples=(replace(first, versions=mixed), *found.samples[1:])), model=MODEL)
    assert report.codes == ("VERSION_MIXED",)
    assert "3-4" in of(report, "VERSION_MIXED").seen
    # recaptured after a retract: routes of version 4, log-probs of version 3
    split = replace(first, versions=np.full(first.tokens, 4), logprob_versions=np.full(first.tokens, 3))
    split = replace(split, response_mask=np.arange(first.tokens) >= 6)
    report = examine(replace(found, samples=(split, *found.samples[1:])), model=MODEL)
    assert report.codes == ("VERSION_SPLIT",)
    assert f"{first.tokens - 6} tokens" in of(report, "VERSION_SPLIT").seen
    trace = to_trace(replace(found, samples=(replace(first, versions=mixed),)), MODEL)
    assert trace.policy_version is not None
    assert trace.policy_version.tolist() == mixed.tolist()
    assert examine(trace, model=MODEL).codes == ("VERSION_MIXED",)


def test_a_layer_that_disagrees_alone_is_named() -> None:
    made = batch(20)
    a = made.trace()
    rng = np.random.default_rng(0)
    ids = a.ids()
    ids[:, 0] = np.argsort(rng.random((len(ids), E)), -1)[:, :K]
    b = RouteTrace.from_packed(
        a.header.model_copy(update={"producer": "other"}), ids, a.lengths, a.status, token_ids=a.token_ids
    )
    found = compare(a, b, asserting=("weights", "numbering"))
    assert [v.code for v in found.verdicts] == ["LAYER_OUTLIER"]
    assert found.verdicts[0].layers == (1,)
    assert compare(a, a, asserting=("weights",)).verdicts == ()


def test_filler_that_reads_like_routes() -> None:
    """SkyRL's cells without a route hold 0..K-1; read without its mask they look valid."""

    def fill(rows: np.ndarray, i: int) -> np.ndarray:
        rows[-2:, 1:] = np.arange(K)
        return rows

    report = examine(dump(batch(), fill), model=MODEL)
    assert report.codes == ("FILLER_ROWS",)
    assert of(report, "FILLER_ROWS").cells == 12


# ---------------------------------------------------------------- the wire


def test_300_experts_do_not_fit_eight_bits() -> None:
    made = batch(e=300)
    found = dump(made, lambda rows, i: rows.astype(np.uint8))
    report = examine(found, model=made.model)
    assert "ID_WRAPPED" in report.codes
    assert "uint8 ids, which end at 255, for 300 experts" in of(report, "ID_WRAPPED").seen
    with pytest.raises(TraceError, match="ID_WRAPPED"):
        to_trace(found, made.model)


def test_ids_from_128_do_not_turn_negative(tmp_path: Path) -> None:
    made = batch(e=256)
    report = examine(dump(made, lambda rows, i: rows.astype(np.int8)), model=made.model)
    assert {"ID_WRAPPED", "ID_NEGATIVE"} <= set(report.codes)
    narrow = dump(made, lambda rows, i: rows.astype(np.uint8).astype(np.int8).astype(np.int16))
    assert examine(narrow, model=made.model).codes[0] == "ID_NEGATIVE"
    with pytest.raises(TraceError, match="ID_NEGATIVE"):
        to_trace(narrow, made.model)
    for write in (
        writers.write_verl,
        writers.write_nemo,
        writers.write_slime,
    ):  # int16, int16, int32 on the wire: they stay positive
        trace = read_trace(
            write(made, tmp_path / "tq_batch.pt" if write is writers.write_verl else tmp_path / "f"), model=made.model
        )
        assert trace.experts.max() == 255
        assert trace.experts.dtype == np.uint8


def test_an_id_beyond_the_claimed_experts() -> None:
    made = batch(e=256)
    report = examine(dump(made), model=replace(made.model, num_experts=128))
    assert report.codes == ("ID_OUT_OF_RANGE",)
    assert "of 128 experts" in of(report, "ID_OUT_OF_RANGE").seen
    with pytest.raises(TraceError, match=r"ID_OUT_OF_RANGE: samples\[0\], token 0, layer 1"):
        to_trace(dump(made), replace(made.model, num_experts=128))


def test_uint16_tensors_are_read(tmp_path: Path) -> None:
    made = batch(e=300)
    torch.save(
        writers._slime(made, lambda i: torch.from_numpy(made.all_layers(i).astype(np.uint16))), tmp_path / "0.pt"
    )
    trace = read_trace(tmp_path / "0.pt", model=made.model)
    assert trace.experts.dtype == np.uint16
    assert np.array_equal(trace.ids(), made.trace().ids())


@pytest.mark.parametrize("rule", [
    {"first_k_dense_replace": 1}, {"mlp_only_layers": [0], "decoder_sparse_step": 1}, {"decoder_sparse_step": 2},
    {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]},
], ids=lambda rule: next(iter(rule)))  # fmt: skip
def test_all_layers_are_mapped_by_number(rule: dict[str, Any], tmp_path: Path) -> None:
    config = {"num_hidden_layers": 5, "num_experts": 16, "num_experts_per_tok": 2, **rule}
    shape = ModelShape.from_config(config)
    made = make_batch(16, 2, 5, shape.moe_layers, [(3, 4), (2, 2)])
    (tmp_path / "config.json").write_text(json.dumps(config))
    trace = read_trace(writers.write_slime(made, tmp_path / "0.pt"), model=tmp_path / "config.json")
    assert trace.header.moe_layers == shape.moe_layers
    assert np.array_equal(trace.ids(), made.trace().ids())


def test_payload_layers_that_fit_nothing_need_numbers() -> None:
    made = make_batch(16, 2, 6, (1, 2, 3), [(3, 4), (2, 2)])
    four = dump(made, lambda rows, i: rows[:, [0, 1, 2, 3]])
    model = made.model
    report = examine(four, model=model)
    assert report.codes == ("LAYERS_MISMATCH",)
    assert "4 payload layers" in of(report, "LAYERS_MISMATCH").seen
    with pytest.raises(TraceError, match="name them by number"):
        to_trace(four, model)
    trace = to_trace(four, model, (0, 1, 2, 3))
    assert np.array_equal(trace.ids(), made.trace().ids())
    assert examine(four, model=model, payload_layers=(0, 1, 2, 3)).codes == ()
    with pytest.raises(TraceError, match=r"MoE layers \[3\] are not on the axis"):
        to_trace(four, model, (0, 1, 2, 5))


def test_padding_on_both_sides_follows_the_tokens(tmp_path: Path) -> None:
    made = batch()
    expected = made.trace()
    for name in ("verl_v0", "roll", "skyrl"):
        layout = LAYOUTS[name]
        trace = read_trace(layout.write(made, tmp_path / layout.name), model=made.model, **layout.options)
        assert trace.token_digest == expected.token_digest
        assert np.array_equal(trace.ids(), expected.ids())


def test_one_sample_without_routes_does_not_stop_the_batch(tmp_path: Path) -> None:
    made = batch()
    torch.save(
        writers._slime(made, lambda i: None if i is made.items[2] else torch.from_numpy(made.all_layers(i))),
        tmp_path / "0.pt",
    )
    report = examine(tmp_path / "0.pt", model=made.model)
    assert report.codes == ("SAMPLE_WITHOUT_ROUTES",)
    trace = read_trace(tmp_path / "0.pt", model=made.model)
    assert [trace[i].coverage()["missing"] for i in range(6)] == [0, 0, 1, 0, 0, 0]


def test_a_resumed_generation_is_joined() -> None:
    made = make_batch(E, K, LAYERS, MOE, [(5, 7)])
    item = made.items[0]
    ids, rows = np.array(item.ids), made.all_layers(item)
    first = Sample(
        "first",
        8,
        rows[:7],
        token_ids=ids[:8],
        prompt=5,
        response_mask=np.arange(8) >= 6,
        versions=np.full(8, 3),
        logprobs={"rollout": np.r_[np.full(5, np.nan), -np.ones(3)]},
    )
    whole = Sample(
        "second",
        12,
        rows[6:],
        6,
        token_ids=ids,
        prompt=8,
        response_mask=np.arange(12) >= 8,
        versions=np.full(12, 4),
        logprobs={"rollout": np.r_[np.full(8, np.nan), -2 * np.ones(4)]},
    )
    joined, notes = join_segments([first, whole], "one")
    assert notes == ()
    trace = to_trace(Dump("vllm", "joined", "x", (joined,), "all"), MODEL)
    assert np.array_equal(trace.ids(), made.trace().ids())  # one row of overlap: T - 1 rows
    assert trace.policy_version is not None
    assert trace.policy_version[:11].tolist() == [3] * 7 + [4] * 4
    assert joined.logprobs["rollout"][5:].tolist() == [-1] * 3 + [-2] * 4
    assert joined.prompt == 5
    assert joined.response_mask is not None
    assert np.flatnonzero(joined.response_mask).tolist() == [6, 7, 8, 9, 10, 11]  # token 5 was a tool's
    late = replace(whole, experts=rows[9:], first=9)  # rows 7 and 8 were never recorded
    gap, _ = join_segments([first, late], "one")
    trace = to_trace(Dump("vllm", "joined", "x", (gap,), "all"), MODEL)
    assert np.flatnonzero(trace.status == Status.MISSING).tolist() == [7, 8]
    assert trace.policy_version is not None
    assert trace.policy_version.tolist() == [3] * 7 + [4] * 5
    known = trace.recorded
    assert np.array_equal(trace.ids()[known], made.trace().ids()[known])
    other = replace(whole, versions=np.full(12, 3), experts=np.roll(rows, 1, 0)[6:])
    kept, notes = join_segments([first, other], "one")
    assert [n.code for n in notes] == ["SEGMENTS_DISAGREE"]
    assert kept.experts is not None
    assert np.array_equal(kept.experts[6], rows[6])  # the first chose the token that follows
    with pytest.raises(TraceError, match="expected the first 8 tokens of second"):
        join_segments([replace(first, token_ids=ids[:8] + 1), whole])


def test_logits_that_are_probabilities() -> None:
    found = dump(batch(1))
    logits = np.random.default_rng(0).normal(size=(13, LAYERS, E))
    with_logits = replace(found, samples=(replace(found.samples[0], router_logits=logits),))
    assert codes(with_logits) == ()
    soft = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    report = examine(replace(found, samples=(replace(found.samples[0], router_logits=soft),)), model=MODEL)
    assert report.codes == ("SCORES_ARE_PROBABILITIES",)


def test_an_expert_named_twice() -> None:
    def half(rows: np.ndarray, i: int) -> np.ndarray:
        rows[3, 2, 2:] = 0  # a row half written
        return rows

    report = examine(dump(batch(), half), model=MODEL)
    assert report.codes == ("DUPLICATE_EXPERTS",)
    assert of(report, "DUPLICATE_EXPERTS").layers == (2,)
    with pytest.raises(TraceError, match=r"DUPLICATE_EXPERTS: samples\[0\], token 3, layer 2"):
        to_trace(dump(batch(), half), MODEL)


def test_ids_local_to_a_rank() -> None:
    def local(rows: np.ndarray, i: int) -> np.ndarray:
        return np.concatenate(
            [rows[:, :1], np.argsort(np.random.default_rng(i).random((len(rows), 4, 16)), -1)[..., :K]], 1
        )

    report = examine(dump(batch(40), local), model=MODEL)
    assert report.codes == ("EXPERTS_LOCAL",)
    assert "from 16 to 63" in of(report, "EXPERTS_LOCAL").seen


def test_shared_experts_counted_in() -> None:
    report = examine(dump(batch(k=5)), model=MODEL)
    assert set(report.codes) == {"TOPK_MISMATCH"}
    with pytest.raises(TraceError, match="TOPK_MISMATCH"):
        to_trace(dump(batch(k=5)), MODEL)


# ---------------------------------------------------------------- our own files, and files that cannot be read


def test_a_changed_file_is_not_replayed(tmp_path: Path) -> None:
    path = batch().trace().save(tmp_path / "t.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert "PAYLOAD_CHANGED" in examine(path).codes


def test_a_trace_that_contradicts_itself(tmp_path: Path) -> None:
    trace = batch().trace()
    bad = replace(trace, status=np.full(trace.num_tokens, 7, np.uint8), _stored_sha256="opened")
    assert {"PAYLOAD_CHANGED", "TRACE_CONTRADICTS_ITSELF"} <= set(examine(bad).codes)
    other = examine(trace, model=replace(MODEL, moe_layers=(0, 1, 2, 3)))
    assert other.codes == ("LAYERS_MISMATCH",)


def test_a_file_that_cannot_be_read_is_a_verdict(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(b"PK\x03\x04 nothing")
    report = examine(path)
    assert report.codes == ("UNREADABLE",)
    assert str(path) in report.verdicts[0].seen
    assert examine(tmp_path / "absent").codes == ("UNREADABLE",)


def test_a_trace_in_which_nothing_was_recorded() -> None:
    header = TraceHeader(num_experts=4, top_k=2, moe_layers=(0,), source="rollout")
    empty = RouteTrace.from_packed(header, np.zeros((3, 1, 2)).astype(int), [3], [0, 0, 2])
    assert examine(empty).codes == ("CAPTURE_DEAD",)
    single = RouteTrace.from_packed(header, [[[0, 0]]], [1], [2], token_ids=np.array([5]))
    assert examine(single).verdicts == ()


def test_the_catalogue_holds_together() -> None:
    made = verdict("ROW_COUNT", "a", "b")
    assert (made.severity, made.as_dict()["cause"]) == ("error", KINDS["ROW_COUNT"].cause)
    report = Report("f", {}, (verdict("MODEL_UNKNOWN", "a", "b"), verdict("ROWS_MISSING", "c", "d"), made))
    assert [v.severity for v in report.verdicts] == ["error", "warning", "note"]
    assert json.loads(json.dumps(report.as_dict()))["status"] == 2
    assert listed([1, 2, 3, 7, 9]) == "1-3, 7, 9"
    assert listed(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10 and 14 more"
    assert Report("f", {}, (verdict("MODEL_UNKNOWN", "a", "b"),)).exit_status == 0


def test_the_reader_names_what_it_found(tmp_path: Path) -> None:
    found = read_dump(writers.write_verl(batch(), tmp_path / "tq_batch.pt"), model=MODEL)
    assert (found.format, found.samples[0].prompt) == ("verl", 6)
    assert found.samples[0].logprobs["rollout"].shape == (14,)


def test_probabilities_in_place_of_log_probs() -> None:
    found = dump(batch(), logprobs={})
    first = found.samples[0]
    wild = replace(first, logprobs={"rollout": np.full(first.tokens, 0.5)})
    report = examine(replace(found, samples=(wild, *found.samples[1:])), model=MODEL)
    assert report.codes == ("LOGPROBS_IMPOSSIBLE",)
    assert of(report, "LOGPROBS_IMPOSSIBLE").where == "samples[0], token 0"
    with pytest.raises(TraceError, match=r"LOGPROBS_IMPOSSIBLE: samples\[0\]: a log-prob of 0.5"):
        to_trace(replace(found, samples=(wild,)), MODEL)


def test_notes_change_nothing_but_are_told() -> None:
    made = batch(k=1)
    report = examine(dump(made), model=made.model)
    assert [v.code for v in report.verdicts] == ["ZERO_AMBIGUOUS"]
    found = dump(batch())
    bare = replace(found, samples=tuple(replace(s, token_ids=None) for s in found.samples))
    report = examine(bare, model=MODEL)
    assert ([v.code for v in report.verdicts], report.exit_status) == (["TOKENS_MISSING"], 0)


def test_every_verdict_is_tested() -> None:
    texts = "".join(path.read_text() for path in Path(__file__).resolve().parents[1].rglob("*.py"))
    assert [code for code in KINDS if f'"{code}"' not in texts] == []
