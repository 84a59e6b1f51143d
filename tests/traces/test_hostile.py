"""Files of strangers: altered bytes, truncation, false sizes, code. A named error or a verdict, and nothing else."""

from __future__ import annotations

import base64
import copy
import io
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.errors import RarError, TraceError, UndecidedError
from rar_lib.traces.doctor import examine
from rar_lib.traces.trace import RouteTrace
from rar_lib.traces.verdicts import KINDS
from rar_lib.traces.wire import read_dump, read_trace
from rar_lib.traces.wire.content import _check_msgpack
from rar_lib.traces.wire.files import parse_npy
from rar_lib.traces.wire.pickles import Inert, load_pickle, load_torch
from tests.traces import writers
from tests.traces.writers import LAYOUTS, make_batch

BATCH = make_batch(64, 4, 4, (1, 2, 3), [(6, 8), (7, 8), (6, 9)])
ROUNDS = 500
SLACK = 8 * 2**20  # what parsing a small file may take beyond twice its size


def corrupt(data: bytes, rng: np.random.Generator) -> bytes:
    """One of: altered bytes, a cut end, a doubled or removed stretch, zeros."""
    out = bytearray(data)
    kind = rng.integers(5)
    at = int(rng.integers(len(out)))
    n = int(rng.integers(1, 64))
    if kind == 0:
        for _ in range(int(rng.integers(1, 8))):
            out[int(rng.integers(len(out)))] = int(rng.integers(256))
    elif kind == 1:
        del out[at:]
    elif kind == 2:
        out[at:at] = out[at : at + n]
    elif kind == 3:
        del out[at : at + n]
    else:
        out[at : at + n] = bytes(len(out[at : at + n]))
    return bytes(out)


@pytest.mark.parametrize("name", LAYOUTS)
def test_corruption_ends_in_a_named_error_or_a_verdict(name: str, tmp_path: Path) -> None:
    """2 x ROUNDS corruptions over all layouts."""
    layout = LAYOUTS[name]
    good = layout.write(BATCH, tmp_path / layout.name).read_bytes()
    path = tmp_path / f"bad-{layout.name}"
    rng = np.random.default_rng(sum(map(ord, name)))
    for _ in range(2 * ROUNDS // len(LAYOUTS)):
        bad = corrupt(good, rng)
        path.write_bytes(bad)
        tracemalloc.start()
        try:
            trace = read_trace(path, model=BATCH.model, **layout.options)
            trace.verify()
        except RarError as error:
            told = str(error)
        else:
            told = str(path)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert str(path) in told
        assert peak < 2 * len(bad) + SLACK
        report = examine(path, model=BATCH.model, **layout.options)
        assert {v.code for v in report.verdicts} <= KINDS.keys()


def test_every_altered_byte_of_our_payload_is_found(tmp_path: Path) -> None:
    path = BATCH.trace().save(tmp_path / "t.safetensors")
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    rng = np.random.default_rng(0)
    places = rng.choice(np.arange(header, len(good)), ROUNDS, replace=False)
    for at in places:
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        with pytest.raises(TraceError):
            RouteTrace.load(path).verify()
        assert examine(path).exit_status == 2


def test_our_header_and_truncation(tmp_path: Path) -> None:
    path = BATCH.trace().save(tmp_path / "t.safetensors")
    good = path.read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(ROUNDS):
        path.write_bytes(corrupt(good, rng))
        report = examine(path)  # may be unharmed (a doubled byte of nothing), never a crash
        assert {v.code for v in report.verdicts} <= KINDS.keys()


# ---------------------------------------------------------------- code


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/rar-was-here",)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_nothing_is_executed(tmp_path: Path, allow_pickle: bool) -> None:
    mark = Path("/tmp/rar-was-here")
    assert not mark.exists()
    torch.save({"samples": [Evil()]}, tmp_path / "0.pt")
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"verl.": Evil()}))
    for name in ("0.pt", "x.pkl"):
        with pytest.raises(TraceError) as caught:
            read_dump(tmp_path / name, allow_pickle=allow_pickle)
        assert isinstance(caught.value, UndecidedError) != allow_pickle
    assert not mark.exists()
    found = load_pickle("x", (tmp_path / "x.pkl").read_bytes(), allow_pickle=True)
    assert isinstance(found["verl."], Inert)
    assert repr(found["verl."]) == "<posix.system, not loaded>"
    assert not mark.exists()


def test_a_pickle_says_why_it_needs_the_flag(tmp_path: Path) -> None:
    path = writers.write_verl_v0(BATCH, tmp_path / "gen_batch.dp")
    with pytest.raises(UndecidedError, match=r"a format that can carry code; read it with allow_pickle=True"):
        read_dump(path, model=BATCH.model)
    assert examine(path).codes == ("UNDECIDED",)


def test_foreign_classes_in_a_torch_file_are_named(tmp_path: Path) -> None:
    path = writers.write_xtuner(BATCH, tmp_path / "x.pt")
    with pytest.raises(UndecidedError, match=r"it holds xtuner.v1.data_proto.rl_data.RolloutState"):
        read_dump(path)


# ---------------------------------------------------------------- false sizes


def answer(**choice: Any) -> dict[str, Any]:
    return writers.completion(BATCH.items[0], **choice)


def npy_claiming(shape: str, dtype: str = "<i4") -> str:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return base64.b64encode(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\x00" * 16).decode()


def claims() -> dict[str, Callable[[Path], None]]:
    """Small files that claim to be huge."""

    def text(value: Any) -> Callable[[Path], None]:
        return lambda path: path.write_text(json.dumps(value)) and None

    def torch_file(value: Any) -> Callable[[Path], None]:
        return lambda path: torch.save(value, path)

    def bomb(path: Path) -> None:
        stream = io.BytesIO()
        torch.save({"samples": [{"tokens": torch.zeros(20_000_000, dtype=torch.uint8), "response_length": 1}]}, stream)
        with zipfile.ZipFile(stream) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as squeezed:
            for entry in source.infolist():
                squeezed.writestr(entry.filename, source.read(entry))

    def huge_bytes(path: Path) -> None:
        path.write_bytes(b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b"DataProto verl. TrainingInputBatch roll.")

    def huge_memo(path: Path) -> None:
        path.write_bytes(b"\x80\x04Nr" + (2**31 - 1).to_bytes(4, "little") + b". verl. roll.")

    stretched = torch.zeros(1, dtype=torch.int32).expand(4_000_000_000, 4, 4)
    return {
        "npy": text(answer(routed_experts=npy_claiming("(4000000000, 4, 4)"))),
        "npy-negative": text(answer(routed_experts=npy_claiming("(-1, 4, 4)"))),
        "npy-object": text(answer(routed_experts=npy_claiming("(1, 1, 1)", "|O"))),
        "nemo": lambda path: path.write_text("nrlre1:int32:400000000x48x8:AAAA") and None,
        "packed": text(answer(routed_experts={"data": "AAAA", "shape": [4_000_000_000, 48, 8], "dtype": "uint8"})),
        "packed-start": text(answer(routed_experts={"data": "AAAA", "shape": [4_000_000_000, 48, 8], "start": 0, "dtype": "uint8"})),
        "start": text({"request": {"routed_experts_prompt_start": 10**12}, "response": answer(routed_experts=writers.npy(np.zeros((2, 4, 4), np.uint8)))}),
        "expanded": torch_file({"samples": [{"tokens": [1, 2, 3], "response_length": 1, "rollout_routed_experts": stretched}]}),
        "bomb": bomb,
        "pickle-bytes": huge_bytes,
        "pickle-memo": huge_memo,
        "msgpack": lambda path: path.write_bytes(b"\xdd\xff\xff\xff\xff\x01") and None,
        "deep-json": lambda path: path.write_text('{"choices": ' + "[" * 200_000) and None,
        "usage": text({"choices": [{"routed_experts": writers.npy(np.zeros((2, 4, 4), np.uint8))}], "usage": {"prompt_tokens": 10**13, "completion_tokens": 1}}),
        "tracer": text({"step": 1, "layer": 10**30, "num_tokens": 1, "top_indices": [[1]]}),
        "big-number": text({"token_ids": [10**400]}),
    }  # fmt: skip


LIMITED = """
import resource, sys, time
import torch, scipy.stats, scipy.optimize, msgspec
from rar_lib.traces.doctor import examine
from rar_lib.traces.layers import ModelShape
from rar_lib.errors import TraceError
from rar_lib.traces.wire import read_trace
with open("/proc/self/statm") as f:
    now = int(f.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 400 * 2**20, now + 400 * 2**20))
model = ModelShape(64, 4, (1, 2, 3), 4)
for path in sys.argv[1:]:
    start = time.monotonic()
    options = dict(model=model, allow_pickle=True, batch_size=1)
    report = examine(path, **options)
    assert report.exit_status == 2, (path, report.codes)
    try:
        read_trace(path, **options)
    except TraceError as error:
        print(path.rpartition("/")[2], report.codes, str(error)[:160])
    else:
        raise AssertionError(path)
    assert time.monotonic() - start < 20, path
"""


def test_no_size_is_believed(tmp_path: Path) -> None:
    """In a process that may grow by 400 MiB: each file claims far more, and each ends in a named error within seconds."""
    paths = []
    for name, make in claims().items():
        path = tmp_path / name
        make(path)
        paths.append(str(path))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *paths], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(paths)


def test_messages_carry_line_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    good = json.dumps(answer(routed_experts=writers.npy(np.zeros((2, 4, 4), np.uint8))))
    path.write_text(good + "\n" + "?" + good[:50] + "\n")
    with pytest.raises(TraceError, match=rf"answers.jsonl, line 2: expected JSON, offset {len(good) + 1}"):
        read_dump(path)
    with pytest.raises(TraceError, match="msgpack claims more at offset"):
        _check_msgpack("x", b"\x93\x01")
    with pytest.raises(TraceError, match="bytes follow the msgpack value at offset 1"):
        _check_msgpack("x", b"\x01\x02")
    with pytest.raises(TraceError, match=r"shape \[4, 4\] of int32 needs 64 bytes, found 16"):
        parse_npy("x", base64.b64decode(npy_claiming("(4, 4)")))
    with pytest.raises(TraceError, match="expected a torch file"):
        load_torch("x", b"PK\x03\x04")


@pytest.mark.parametrize(("leaf", "message"), [
    (("torch.int64", [2, 3], 0, 24, 0), r"shape \[2, 3\] of torch.int64 does not fit bytes 0 to 24"),
    (("torch.int64", [2, 3], 0, 4096, 0), "bytes 0 to 4096 of torch.int64 lie outside the 64 stored"),
    (("torch.os", [1], 0, 8, 0), "bytes 0 to 8 of torch.os lie outside"),
    (("torch.uint8", [-1], 0, 8, 0), "lie outside"),
])  # fmt: skip
def test_ranges_of_a_consolidated_batch_are_checked(tmp_path: Path, leaf: Any, message: str) -> None:
    class FalseRanges(writers.Consolidated):
        def __reduce__(self) -> Any:
            call, (metadata, storage) = super().__reduce__()
            return call, ({**metadata, "leaves": {"attention_mask": leaf}}, storage)

    with writers.tensordict_there(), writers.placed({"verl.protocol": (writers.DataProto,)}):
        stream = io.BytesIO()
        torch.save(FalseRanges({"a": torch.zeros(8, dtype=torch.int64)}, 2), stream)
        (tmp_path / "g.dp").write_bytes(pickle.dumps(writers.DataProto((stream.getvalue(), {}, {}))))
    with pytest.raises(TraceError, match=message):
        read_dump(tmp_path / "g.dp", allow_pickle=True)


def test_two_readings_are_refused_and_named(tmp_path: Path) -> None:
    np.save(tmp_path / "routes.npy", np.zeros((3, 4, 4), np.uint8))
    with pytest.raises(TraceError, match="a npy file that no reader recognises; known are rar, verl"):
        read_dump(tmp_path / "routes.npy")
    both = answer(routed_experts=[[[1, 2, 3, 4]] * 4] * 13)
    both["sglext"] = {"routed_experts": writers.b64(np.zeros((13, 4, 4), "<i4"))}
    (tmp_path / "two.json").write_text(json.dumps(both))
    with pytest.raises(
        UndecidedError, match=r"2 readings are possible: sglang \(.*\); lmdeploy \(.*\); say which with format="
    ):
        read_dump(tmp_path / "two.json", model=BATCH.model)
    assert read_dump(tmp_path / "two.json", "lmdeploy", model=BATCH.model).format == "lmdeploy"
    with pytest.raises(TraceError, match="expected auto or one of rar, verl"):
        read_dump(tmp_path / "two.json", "vllm-htttp")
    with pytest.raises(TraceError, match="expected answers of a vLLM server"):
        read_dump(tmp_path / "two.json", "vllm-http")


def test_archives_that_unpack_to_more_than_the_file() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"0" * 10_000)
    with pytest.raises(TraceError, match=r"entry a/data.pkl is compressed; torch stores its entries as they are"):
        load_torch("x", stream.getvalue())
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("a/data.pkl", b"0" * 10_000)
        for i in range(9):  # nine more names for the same bytes
            again = copy.copy(archive.filelist[0])
            again.filename = f"a/data/{i}"
            archive.filelist.append(again)
    with pytest.raises(TraceError, match=r"entries claim 100000 bytes, the file has"):
        load_torch("x", stream.getvalue())
