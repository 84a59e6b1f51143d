"""The main job on the real pair: vLLM in bf16 with fp8-rounded weights, Megatron-Core in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rar_lib.config import JobConfig
from rar_lib.engines.session import EngineSession
from rar_lib.engines.vllm_rollout import VLLMRollout
from rar_lib.job import run_job
from rar_lib.runs.compare import paired_ratio, policy_table
from rar_lib.runs.result import RunResult
from rar_lib.traces.trace import RouteTrace
from tests.jobs import interrupt, numbers


def config(arm: str, **more: Any) -> JobConfig:
    return JobConfig.from_flat(policy=arm, engine="real", steps=3, eval_prompts=16, **more)


@pytest.fixture(scope="module")
def runs(engines: EngineSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    folder = tmp_path_factory.mktemp("runs")
    return {arm: run_job(config(arm), engines, runs_dir=folder, show="none") for arm in ("none", "R2", "R3")}


def test_the_engines_are_the_real_ones(runs: dict[str, RunResult]) -> None:
    for run in runs.values():
        assert (run.summary["rollout_engine"], run.summary["trainer_engine"]) == ("vllm", "megatron")
        trace = RouteTrace.load(next((run.path / "traces").glob("*-rollout.safetensors")))
        assert trace.header.producer == "vllm"
        assert trace.header.producer_version
        assert trace.policy_version is not None


def test_r3_lowers_k3_on_the_same_tokens(runs: dict[str, RunResult]) -> None:
    pooled = pd.concat([run.paired for run in runs.values()], ignore_index=True)
    ratio = paired_ratio(pooled)
    assert ratio["high"] is not None
    assert ratio["high"] < 1
    flips = pooled["flips"].sum() / pooled["cells"].sum()
    assert 0.002 < flips < 0.2
    if flips >= 0.03:
        assert ratio["ratio"] is not None
        assert ratio["ratio"] <= 0.5


def test_the_mismatch_lies_above_the_noise_floor(runs: dict[str, RunResult]) -> None:
    for run in runs.values():
        for part in ("rollout", "trainer"):
            assert run.summary[f"noise_floor_{part}"] < 0.01 * run.summary["k3_rollout_old"]
        assert run.metrics["noise_floor/trainer/abs_max"].max() > 0  # a floor that was measured, not a repeat


def test_the_table_names_every_arm(runs: dict[str, RunResult]) -> None:
    table = policy_table(list(runs.values()))
    assert table["policy"].tolist() == ["none", "R2", "R3"]
    assert (table["coverage"] == "1.0000").all()
    assert not table.isin(["undefined", "nan"]).any(axis=None)


def test_in_fp32_the_pair_is_the_zero_mismatch_pair(engines: EngineSession, tmp_path: Path) -> None:
    exact = config("none", rollout_dtype="float32", precision="native", prompts_per_step=16)
    run = run_job(exact, engines, runs_dir=tmp_path, show="none")
    assert run.summary["k3_rollout_old"] < 1e-8
    assert run.summary["router_flip"] < 1e-3


def test_a_resumed_run_draws_the_same_tokens(engines: EngineSession, tmp_path: Path) -> None:
    job = config("R3", checkpoint_every=1, prompts_per_step=16)
    whole = run_job(job, engines, runs_dir=tmp_path / "whole", show="none")
    third_step = 5  # after control, evaluation and two steps
    interrupt(job, tmp_path / "cut", VLLMRollout, "generate", lambda call, *_: call == third_step, engines)
    resumed = run_job(job, engines, runs_dir=tmp_path / "cut", show="none")
    last = "step-000002-rollout.safetensors"
    assert RouteTrace.load(resumed.path / "traces" / last).equals(RouteTrace.load(whole.path / "traces" / last))
    pd.testing.assert_frame_equal(numbers(resumed.metrics), numbers(whole.metrics), rtol=1e-6)


@pytest.mark.parametrize(
    ("policy", "unit"), [("margin", "token_layer"), ("disagree", "slot"), ("fisher", "slot"), ("swap", "token_layer")]
)
def test_the_real_pair_trains_under_partial_plans(
    policy: str, unit: str, engines: EngineSession, tmp_path: Path
) -> None:
    values = config("R3", prompts_per_step=16).resolved()
    values["router_replay"] |= {"policy": policy, "unit": unit, "budget": "0.25"}
    run = run_job(JobConfig.build(values), engines, runs_dir=tmp_path, show="none")
    assert (run.summary["rollout_engine"], run.summary["trainer_engine"]) == ("vllm", "megatron")
    for record in run.replay:
        assert record.budget == int(record.valid / 4 + 0.5)
        assert record.old.executed_equals_resolved == record.update.executed_equals_resolved == 1
        assert record.old.nominal == record.update.nominal == record.nominal
        assert record.target_shift is not None
    if policy == "disagree":  # the oracle of the old pass is worth full R3
        ratio = run.metrics["mismatch/rollout_old/k3"] / run.metrics["paired/R3/rollout_old/k3"]
        assert (ratio < 1.25).all()
