"""A run, run again: nothing differs on the hf engines, and what does differ is said."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

from rar_lib.config import JobConfig
from rar_lib.errors import RunError
from rar_lib.job import run_job
from rar_lib.reproduce import compare, reproduce
from rar_lib.runs.files import read_table, write_table
from tests.conftest import HF

SMALL = ["steps=2", "algorithm.prompts_per_step=8", "algorithm.group_size=2", "evaluation.prompts=8", "checkpoint_every=1",
         "diagnostics.noise_floor_every=1"]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = JobConfig.build(HF, [*SMALL, "router_replay.policy=margin", "router_replay.budget=0.25"])
    return run_job(config, runs_dir=tmp_path_factory.mktemp("run"), show="none").path


def test_nothing_differs_on_the_hf_engines(run: Path, tmp_path: Path) -> None:
    found = reproduce(run, tmp_path, show="none")
    assert found.equal, str(found)
    assert found.compared > 1_000_000  # the trainer state is among it
    assert found.environment == ()
    assert "none differs" in str(found)
    again = reproduce(run, tmp_path, show="none")  # the repetition of before is no run to be continued
    assert again.compared == found.compared


def test_every_difference_is_reported(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / run.name
    shutil.copytree(run, copy)
    assert compare(run, copy).equal
    metrics = read_table(copy / "metrics.parquet")
    metrics.loc[1, "reward/mean"] += 0.25
    metrics["time/rollout"] += 1.0
    write_table(copy / "metrics.parquet", metrics.drop(columns="routes/bytes_per_token"))
    write_table(copy / "paired.parquet", read_table(copy / "paired.parquet").iloc[:-1])
    summary = json.loads((copy / "summary.json").read_text())
    summary["k3_rollout_old"] += 1e-9
    summary["seconds_per_step"]["rollout"] += 1
    (copy / "summary.json").write_text(json.dumps(summary))
    lines = (copy / "replay.jsonl").read_text().splitlines()
    record = json.loads(lines[1])
    name = "target_shift"
    record[name] = record[name] * 2 + 1
    (copy / "replay.jsonl").write_text("\n".join([lines[0], json.dumps(record)]) + "\n")
    state = next(copy.glob("checkpoints/step-000002/*.safetensors"))
    tensors = load_file(state)
    first = next(k for k in tensors if k.startswith("model."))
    tensors[first].view(-1)[0] += 0.5
    wider = next(k for k in tensors if k.startswith("optimizer.exp_avg."))
    tensors[wider] = tensors[wider].double()  # the same values in another type
    save_file(tensors, state)
    (copy / "checkpoints" / "step-000009.partial").mkdir()  # as a kill leaves it; it is no checkpoint
    planner = next(copy.glob("checkpoints/step-000002/state.json"))
    kept = json.loads(planner.read_text())
    planner.write_text(json.dumps(kept | {"planner": {**kept["planner"], "touched": True}}))
    next(copy.glob("traces/*-rollout.safetensors")).unlink()
    environment = json.loads((copy / "environment.json").read_text())
    environment["versions"]["torch"] = "1.0"
    (copy / "environment.json").write_text(json.dumps(environment))

    found = compare(run, copy)
    told = {(d.where.partition("/")[0], d.what): d for d in found.differences}
    reward = told["metrics.parquet", "reward/mean"]
    assert (reward.step, reward.largest) == (1, 0.25)
    assert told["metrics.parquet", "routes/bytes_per_token"].second == "absent"
    assert told["paired.parquet", "number of rows"].largest == 1
    assert told["summary.json", "k3_rollout_old"].largest == pytest.approx(1e-9, rel=1e-3)
    assert told["replay.jsonl", f"1.{name}"].second == str(record[name])
    assert told["checkpoints", first].largest == 0.5
    assert told["checkpoints", wider].second.startswith("torch.float64")
    assert told["traces", "file"].second == "absent"
    assert told["checkpoints", "planner.touched"].second == "True"
    assert len(told) == 9
    assert [name for name, _, _ in found.environment] == ["versions.torch"]
    assert "9 columns or fields differ" in str(found)


def test_what_cannot_be_run_again_says_why(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="run again in its own place"):
        reproduce(run, run.parent)
    copy = tmp_path / run.name
    shutil.copytree(run, copy)
    (copy / "summary.json").unlink()
    with pytest.raises(RunError, match="expected a complete run, found interrupted"):
        reproduce(copy, tmp_path / "again")
    shutil.copytree(run, tmp_path / "other" / run.name)
    other = tmp_path / "other" / run.name
    with pytest.raises(RunError, match="foreign"):
        reproduce(other.rename(other.with_name("R3-margin-seed0-000000000000")), tmp_path / "again")


def test_on_the_command_line(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rar_lib", "reproduce", str(run), "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["equal"]
    assert pd.read_parquet(tmp_path / run.name / "metrics.parquet").shape[0] == 2
