"""The doctor as a stranger meets it: wrong files, wrong models, pipes, and what is said then."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.cli import main
from rar_lib.diagnosis import decoder, diagnose, find_dump, find_model
from rar_lib.errors import ConfigError, TraceError
from rar_lib.traces.doctor import examine
from rar_lib.traces.layers import ModelShape
from tests.test_diagnosis import BATCH, TINY, other_side
from tests.traces import writers
from tests.traces.test_doctor import MODEL, batch, dump, of
from tests.traces.writers import make_batch

CONFIG = {"num_hidden_layers": 5, "num_experts": 64, "num_experts_per_tok": 4, "first_k_dense_replace": 1}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, Any]:
    """`rar doctor ... --json` in this process: exit status and what stands on standard output."""
    monkeypatch.setattr(sys, "argv", ["rar", "doctor", *map(str, arguments), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(str(ended.value.code)), json.loads(capsys.readouterr().out)


def test_json_whatever_happens(tmp_path: Path, config: Path, capsys: Any, monkeypatch: Any) -> None:
    good = writers.write_slime(BATCH, tmp_path / "0.pt")
    log = writers.write_nemo_log(BATCH, tmp_path / "train_data_step1.jsonl")
    picture, packed, empty = tmp_path / "a.png", tmp_path / "a.gz", tmp_path / "e.json"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n")
    packed.write_bytes(gzip.compress(good.read_bytes()))
    empty.write_text("[]")
    bad_model = tmp_path / "bad.json"
    bad_model.write_text("[1]")
    cases: list[tuple[int, str, tuple[object, ...]]] = [
        (0, "clean", (good, "--model", config)),
        (2, "not read", (tmp_path / "absent.pt",)),
        (2, "not read", (tmp_path,)),
        (2, "not read", (picture,)),
        (2, "not read", (packed,)),
        (2, "not read", (empty,)),
        (2, "not read", (good, "--format", "foo")),
        (2, "not read", (good, "--model", bad_model)),
        (2, "not read", (good, "--model", tmp_path / "absent.json")),
        (2, "must not be replayed", (good, "--model", config, "--against", tmp_path / "absent.pt")),
        (2, "must not be replayed", (good, "--model", config, "--against", log)),
        (0, "clean", (log,)),
    ]
    for status, summary, arguments in cases:
        found, told = doctor(capsys, monkeypatch, *arguments)
        assert (found, told["status"], told["summary"]) == (status, status, summary), (arguments, told)
    assert told["suggestion"]["reason"] == "this file holds log-probs and no routes; bring the dump that has them"
    for path, message in (
        (packed, "a gzip file: unpack it first"),
        (picture, "a PNG picture"),
        (tmp_path, "found a folder with 0.pt, a.gz"),
    ):
        assert message in examine(path).verdicts[0].seen


def test_numbers_of_coverage_are_numbers(tmp_path: Path) -> None:
    made = batch()
    found = dump(made)
    lost = [
        replace(s, experts=s.experts[:-3]) if i == 1 and s.experts is not None else s
        for i, s in enumerate(found.samples)
    ]
    lost[2] = replace(lost[2], experts=None)
    facts = examine(replace(found, samples=tuple(lost)), model=MODEL).facts
    cells = sum(s.tokens - 1 for s in found.samples) * 4
    gone = (found.samples[1].tokens + found.samples[2].tokens - 2) * 4
    assert (facts["cells"], facts["missing"], facts["recorded"]) == (cells, gone, cells - gone)
    assert facts["coverage"] == round(1 - gone / cells, 4)


@pytest.mark.parametrize("write", [writers.write_slime, writers.write_vllm_http, writers.write_sglang])
def test_no_sample_with_routes_is_the_worst(write: Any, tmp_path: Path) -> None:
    made = batch()
    path = write(made, tmp_path / "f.jsonl")
    if write is writers.write_slime:
        torch.save(writers._slime(made, lambda i: None), path)
    else:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines[1:] if write is writers.write_vllm_http else lines:
            line.get("meta_info", line.get("choices", [{}])[0])["routed_experts"] = None
        lines[0].get("meta_info", lines[0].get("choices", [{}])[0])["routed_experts"] = None
        writers.jsonl(path, lines)
    name = {writers.write_slime: "slime", writers.write_vllm_http: "vllm-http", writers.write_sglang: "sglang"}[write]
    report = examine(path, "auto" if name == "slime" else name, model=MODEL)
    assert report.exit_status == 2
    if name == "slime":
        assert report.codes == ("NO_ROUTES",)


def test_unsigned_ids_are_judged_like_signed_ones() -> None:
    made = make_batch(256, 4, 5, (1, 2, 3, 4), [(6, 60)] * 30)

    def local(rows: np.ndarray, i: int) -> np.ndarray:
        out = np.argsort(np.random.default_rng(i).random((len(rows), 5, 128)), -1)[..., :4]
        out[:, 0] = 0
        out[3, 1:] = 0  # one missing row
        return out

    for dtype in (np.int32, np.uint8, np.uint16):
        found = dump(made, lambda rows, i, dtype=dtype: local(rows, i).astype(dtype))
        assert "EXPERTS_LOCAL" in examine(found, model=made.model).codes


def test_routes_in_layers_that_should_have_none() -> None:
    made = batch()

    def everywhere(rows: np.ndarray, i: int) -> np.ndarray:
        rows[:, 0] = rows[:, 1]
        return rows

    report = examine(dump(made, everywhere), model=MODEL)
    assert report.codes == ("DENSE_LAYER_HAS_ROUTES",)
    assert of(report, "DENSE_LAYER_HAS_ROUTES").layers == (0,)
    rolled = examine(dump(made, lambda rows, i: np.roll(rows, 1, 1)), model=MODEL)
    assert set(rolled.codes) == {"LAYER_DEAD", "DENSE_LAYER_HAS_ROUTES"}


def test_an_axis_of_moe_layers_says_what_to_type() -> None:
    found = dump(batch(), lambda rows, i: rows[:, 1:])
    report = examine(found, model=MODEL)
    assert report.codes == ("LAYERS_MISMATCH",)
    assert (
        "4 is the number of its MoE layers: if these are meant, name them (--layers 1-4)"
        in of(report, "LAYERS_MISMATCH").seen
    )


def test_one_line_a_code(tmp_path: Path) -> None:
    made = batch(40)
    content = writers._slime(made, lambda i: torch.from_numpy(made.all_layers(i)))
    for sample in content["samples"]:
        sample["weight_versions"] = ["1", "2"]
    torch.save(content, tmp_path / "0.pt")
    report = examine(tmp_path / "0.pt", model=MODEL)
    assert report.codes == ("VERSION_MIXED",)
    assert of(report, "VERSION_MIXED").where == "samples[0], and 39 more"
    assert len(of(report, "VERSION_MIXED").samples) == 40


def test_an_answer_that_lost_rows_does_not_hide_the_others(tmp_path: Path) -> None:
    made = batch()
    lines = [json.loads(line) for line in writers.write_sglang(made, tmp_path / "a.jsonl").read_text().splitlines()]
    rows = made.all_layers(made.items[2]).astype("<i4")[:-2]
    lines[2]["meta_info"]["routed_experts"] = writers.b64(rows)
    report = examine(writers.jsonl(tmp_path / "a.jsonl", lines), model=MODEL)
    assert report.codes == ("ROW_COUNT",)
    assert of(report, "ROW_COUNT").where == "line 3"


def test_another_order_of_layers_or_sequences(tmp_path: Path) -> None:
    first = BATCH.trace()
    own = other_side(BATCH, 0.02)
    order = np.random.default_rng(0).permutation(8)
    path = first.save(tmp_path / "a.safetensors")
    found = diagnose(path, against=own.select(order), asserting=("weights",))
    assert found.exit_status == 0
    assert [v.code for v in found.report.verdicts] == ["REORDERED"]
    assert found.comparison is not None
    assert found.comparison.scalars() == diagnose(path, against=own, asserting=("weights",)).comparison.scalars()  # type: ignore[union-attr]
    turned = replace(own, experts=np.ascontiguousarray(own.experts[:, ::-1]))
    check = next(c for c in diagnose(path, against=turned).comparison.certificate.checks if c.name == "layers")  # type: ignore[union-attr]
    assert check.state == "failed"
    assert "the second record's layer 1 is 4, 2 is 3, 3 is 2, 4 is 1" in check.seen


def test_options_reach_the_reader(tmp_path: Path) -> None:
    made = make_batch(64, 4, 5, (1, 2, 3, 4), [(3, 4), (3, 4)])
    path = writers.write_tracer(made, tmp_path / "router_trace_rank0.jsonl")
    told = diagnose(path, model=made.model, batch_size=4).report.verdicts[0].seen
    assert "rows do not fit 4 sequences" in told
    assert diagnose(path, model=made.model, batch_size=1).exit_status == 0


def test_recording_refuses_before_it_computes(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    tokens = writers.jsonl(tmp_path / "t.jsonl", [{"token_ids": [5, 6]}])
    for out, model, message in (
        (tmp_path / "no" / "a.safetensors", TINY, "in a folder that is there"),
        (tmp_path / "a.txt", TINY, "expected a .safetensors file"),
        (tmp_path / "a.safetensors", TINY / "config.json", "expected the folder of a checkpoint"),
    ):
        monkeypatch.setattr(sys, "argv", ["rar", "record", str(tokens), "--model", str(model), "--out", str(out)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"t.jsonl"}


def test_a_pipe_that_closes_early() -> None:
    command = f"{sys.executable} -m rar_lib aliases | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_the_module_of_the_commands_is_the_command() -> None:
    for module in ("rar_lib", "rar_lib.cli"):
        command = [sys.executable, "-m", module, "aliases", "--framework", "nobody"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2, module
        assert done.stderr.startswith("rar: framework: expected one of")


def test_experts_per_token_in_a_list() -> None:
    assert ModelShape.from_config({**CONFIG, "num_experts_per_tok": [4] * 5}).top_k == 4
    with pytest.raises(TraceError, match="num_experts_per_tok: expected one integer for all layers, found"):
        ModelShape.from_config({**CONFIG, "num_experts_per_tok": [4, 2]})
    with pytest.raises(TraceError, match="num_experts: expected one integer for all layers, found 'many'"):
        ModelShape.from_config({**CONFIG, "num_experts": "many"})


def test_what_the_notebook_finds(tmp_path: Path, config: Path) -> None:
    assert find_dump("vllm_http/answers.jsonl").is_file()
    with pytest.raises(TraceError, match="expected a dump at nothing or"):
        find_dump("nothing")
    assert find_model(config) == config
    assert (find_model("tiny-moe") / "config.json").is_file()
    with pytest.raises(ConfigError):
        find_model("nothing")
    assert decoder(find_model("tiny-moe"))([12]) == "8"
    assert decoder(config)([12, 7]) == "12 7"
