"""What a tracker gets is what the run holds: read back from the files that were written."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from rar_lib.config import JobConfig
from rar_lib.errors import ConfigError, RunError
from rar_lib.export import export, scalars
from rar_lib.job import run_job
from rar_lib.runs.result import RunResult
from rar_lib.runs.store import RunStore
from tests.conftest import HF


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    small = ["steps=3", "algorithm.prompts_per_step=4", "algorithm.group_size=2", "evaluation.prompts=4"]
    return run_job(JobConfig.build(HF, small), runs_dir=tmp_path_factory.mktemp("run"), show="none")


def expected(run: RunResult) -> dict[str, dict[int, float]]:
    columns = run.metrics.select_dtypes("number").drop(columns="step")
    return {
        str(name): {int(s): float(v) for s, v in zip(run.metrics["step"], column, strict=True) if not math.isnan(v)}
        for name, column in columns.items()
        if column.notna().any()
    }


def test_tensorboard_holds_every_number(run: RunResult, tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (folder,) = export([run.path], "tensorboard", tmp_path)
    (folder,) = export([run.path], "tensorboard", tmp_path)  # again: replaced, not appended
    found = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    read = {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}
    for name, values in expected(run).items():
        assert read[name] == pytest.approx(values, rel=1e-6), name  # TensorBoard keeps single precision
    assert read["summary/reward_last"] == {2: pytest.approx(run.summary["reward_last"])}
    assert "config/text_summary" in found.Tags()["tensors"]


def records(path: Path) -> list[bytes]:
    """Records of W&B's file: LevelDB's log format behind a header of seven bytes."""
    data, position, out, part = path.read_bytes(), 7, [], b""
    while position < len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last
            out.append(part)
            part = b""
    return out


def test_wandb_holds_every_number_and_stays_offline(run: RunResult, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    # in a process of its own: wandb starts a service that outlives the call
    command = [sys.executable, "-m", "rar_lib", "export", str(run.path), "--to", "wandb", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "wandb" / run.path.name)]
    from wandb.proto import wandb_internal_pb2

    (file,) = (tmp_path / "wandb" / run.path.name).rglob("offline-run-*/*.wandb")
    history: dict[str, dict[int, float]] = {}
    config = {}
    for data in records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            for name, value in values.items():
                history.setdefault(name, {})[values["_step"]] = value
        if record.WhichOneof("record_type") == "run":
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    for name, values in expected(run).items():
        assert history[name] == values, name
    assert config["rollout"]["engine"] == "hf"


def test_absent_values_are_left_out_and_infinite_ones_are_not(run: RunResult) -> None:
    table = pd.DataFrame({"step": [0, 4], "a": [1.0, math.nan], "b": [math.inf, 2.0], "name": ["x", "y"]})
    assert list(scalars(table)) == [(0, {"a": 1.0, "b": math.inf}), (4, {"b": 2.0})]


def test_what_cannot_be_exported_is_refused(run: RunResult, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of tensorboard, wandb, found 'excel'"):
        export([run.path], "excel", tmp_path)
    with pytest.raises(RunError, match=r"expected each name once, found R3-seed0-.* twice"):
        export([run.path, run.path], "tensorboard", tmp_path)
    store = RunStore(tmp_path, JobConfig(), {"checkpoint": "c", "task": "t"})
    with store.held():
        pass
    with pytest.raises(RunError, match="expected at least one finished step, found none"):
        export([store.path], "tensorboard", tmp_path)
    (store.path / "config.json").write_text("{")
    with pytest.raises(RunError, match="broken"):
        export([run.path, store.path], "tensorboard", tmp_path / "out")
    assert not (tmp_path / "out").exists()
