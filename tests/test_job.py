"""The loop on the hf engines: what it writes, that it resumes bit for bit, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from rar_lib.config import JobConfig
from rar_lib.engines.base import Replay
from rar_lib.engines.hf_rollout import HFRollout
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.session import EngineSession
from rar_lib.errors import ConfigError, EngineError, ReplayError
from rar_lib.job import run_job
from rar_lib.replay import Replaying, modes
from rar_lib.replay.modes import Mode
from rar_lib.replay.plan_file import find_trace, load_plan
from rar_lib.runs.result import RunResult
from rar_lib.runs.store import RunStore
from rar_lib.traces.trace import RouteTrace
from tests.jobs import SMALL, interrupt, numbers, small


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    folder = tmp_path_factory.mktemp("runs")
    return {arm: run_job(small(arm), runs_dir=folder, show="none") for arm in ("none", "R2", "R3")}


def test_a_run_folder_holds_what_it_says(runs: dict[str, RunResult]) -> None:
    for arm, run in runs.items():
        names = {p.name for p in run.path.iterdir()}
        assert {"config.json", "environment.json", "metrics.parquet", "paired.parquet", "summary.json"} <= names
        assert {"tokens.parquet", "replay.jsonl"} <= names
        assert run.path.name.startswith(f"{arm}-seed0-")
        assert len(run.metrics) == 4
        assert len(run.paired) == 4 * 16
        assert (run.summary["rollout_engine"], run.summary["trainer_engine"]) == ("hf", "hf")
        traces = sorted(p.name for p in (run.path / "traces").iterdir())
        kept = ("native", *(() if arm == "none" else ("plan",)), "probe", "rollout")
        assert traces == [
            "probe-start.safetensors",
            *(f"step-{s:06d}-{side}.safetensors" for s in (0, 3) for side in kept),
        ]
        for name in traces:
            if not name.endswith("plan.safetensors"):
                RouteTrace.load(run.path / "traces" / name).verify()
                continue
            plan = load_plan(run.path / "traces" / name)
            plan.require(find_trace(plan, run.path / "traces" / name))  # its record lies beside it
            assert plan.planned.any()
        environment = json.loads((run.path / "environment.json").read_text())
        assert environment["versions"]["torch"]


def test_the_arms_start_from_the_same_tokens(runs: dict[str, RunResult]) -> None:
    first = [run.metrics.iloc[0] for run in runs.values()]
    for name in ("reward/mean", "paired/none/rollout_old/k3", "paired/R3/rollout_old/k3"):
        assert len({row[name] for row in first}) == 1
    traces = [RouteTrace.load(run.path / "traces" / "step-000000-rollout.safetensors") for run in runs.values()]
    assert traces[0].equals(traces[1])
    assert traces[0].equals(traces[2])


def test_each_mode_replays_where_it_should(runs: dict[str, RunResult]) -> None:
    none, r2, r3 = (runs[arm].metrics for arm in ("none", "R2", "R3"))
    assert (
        none[
            [
                "replay/old/nominal",
                "replay/update/nominal",
                "replay/old/forced_routers_native_local",
                "replay/update/forced_routers_native_local",
            ]
        ]
        == 0
    ).all(axis=None)
    assert (r2["replay/old/nominal"] == 0).all()
    assert (r2["replay/update/nominal"] == 1).all()
    assert (r3[["replay/old/nominal", "replay/update/nominal"]] == 1).all(axis=None)
    for table in (none, r2, r3):
        assert (table["replay/coverage"] == 1).all()
        assert (table["replay/missing"] == 0).all()  # logged at 0 too
    # in the old pass, what binds under R3 is the disagreement of the rollout with the live choice
    assert r3["replay/old/forced_routers_native_local"].between(1e-4, 0.1).all()


def test_the_runs_own_mismatch_is_its_side_of_the_pair(runs: dict[str, RunResult]) -> None:
    for arm, side in (("none", "none"), ("R2", "none"), ("R3", "R3")):
        table = runs[arm].metrics
        assert (table["mismatch/rollout_old/k3"] == table[f"paired/{side}/rollout_old/k3"]).all()
        pooled = runs[arm].paired.groupby("step")[[f"k3_sum/{side}", "tokens"]].sum()
        assert (pooled[f"k3_sum/{side}"] / pooled["tokens"]).to_numpy() == pytest.approx(
            table["mismatch/rollout_old/k3"].to_numpy()
        )


def test_noise_floor_is_measured_and_far_below_the_mismatch(runs: dict[str, RunResult]) -> None:
    first = runs["none"].metrics.iloc[0]
    # not a repeat: sequences one by one, a size at which the kernels sum in another order
    assert 0 < first["noise_floor/trainer/abs_max"] < 1e-4
    assert first["noise_floor/rollout/k3"] < first["mismatch/rollout_old/k3"]


def test_a_complete_run_is_loaded_and_not_repeated(runs: dict[str, RunResult], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSession, "open", lambda *_: pytest.fail("engines were opened"))
    again = run_job(small("R3"), runs_dir=runs["R3"].path.parent, show="none")
    assert again.path == runs["R3"].path
    assert again.summary == runs["R3"].summary


@pytest.mark.parametrize("arm", ["R2", "R3"])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(arm: str, tmp_path: Path) -> None:
    config = small(arm, "checkpoint_every=2")
    whole = run_job(config, runs_dir=tmp_path / "whole", show="none")
    fourth_step = 13  # its first update
    interrupt(config, tmp_path / "cut", HFTrainer, "update", lambda call, *_: call == fourth_step)
    (folder,) = (tmp_path / "cut").iterdir()
    assert not (folder / "summary.json").exists()
    assert len(pd.read_parquet(folder / "metrics.parquet")) == 3
    resumed = run_job(config, runs_dir=tmp_path / "cut", show="none")
    pd.testing.assert_frame_equal(numbers(resumed.metrics), numbers(whole.metrics), check_exact=True)
    pd.testing.assert_frame_equal(resumed.paired, whole.paired, check_exact=True)
    assert {k: v for k, v in resumed.summary.items() if k != "seconds_per_step"} == {
        k: v for k, v in whole.summary.items() if k != "seconds_per_step"
    }


def test_a_shared_session_computes_what_a_run_alone_computes(runs: dict[str, RunResult], tmp_path: Path) -> None:
    with EngineSession() as session:
        run_job(small("none"), session, runs_dir=tmp_path, show="none")
        shared = run_job(small("R3"), session, runs_dir=tmp_path, show="none")
    pd.testing.assert_frame_equal(numbers(shared.metrics), numbers(runs["R3"].metrics), check_exact=True)


def test_another_config_is_another_run(tmp_path: Path) -> None:
    ids = {run_job(small("none", "steps=1", f"seed={s}"), runs_dir=tmp_path, show="none").path.name for s in (0, 1)}
    assert len(ids) == 2


def test_a_plan_in_one_pass_only_fails_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = Mode("R3", in_old_pass="rollout", in_updates=None)
    monkeypatch.setitem(modes.MODES, "R3", half)
    with pytest.raises(ReplayError, match="did not replay the same routes"):  # noise, so that routes surely differ
        run_job(small("R3", "rollout.router_noise=0.05"), runs_dir=tmp_path, show="none")
    assert not list(tmp_path.glob("*/summary.json"))


def test_a_dead_replay_refuses_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs = HFTrainer.logprobs

    def deaf(self: Any, batch: Any, *, replay: Replay | None = None, **kwargs: Any) -> Any:
        return logprobs(self, batch, replay=None, **kwargs)

    monkeypatch.setattr(HFTrainer, "logprobs", deaf)
    with pytest.raises(ReplayError, match="replay is not live there"):
        run_job(small("R3"), runs_dir=tmp_path, show="none")


def test_unsynchronised_engines_refuse_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = HFTrainer.weights
    monkeypatch.setattr(HFTrainer, "weights", lambda self: ((n, torch.roll(w, 1)) for n, w in weights(self)))
    with pytest.raises(EngineError, match="differ from those of its checkpoint"):
        run_job(small("none"), runs_dir=tmp_path, show="none")


def test_evaluation_is_of_the_held_out_prompts_at_the_present_weights(runs: dict[str, RunResult]) -> None:
    assert len({run.summary["evaluation_first"] for run in runs.values()}) == 1
    assert {run.summary["evaluated_on"] for run in runs.values()} == {"held_out"}
    assert all(0 <= run.summary["evaluation_last"] <= 1 for run in runs.values())


def test_the_summary_weighs_steps_by_their_tokens(runs: dict[str, RunResult]) -> None:
    for run in runs.values():
        side = "R3" if run.arm == "R3" else "none"
        assert run.summary["k3_rollout_old"] == pytest.approx(
            run.paired[f"k3_sum/{side}"].sum() / run.paired["tokens"].sum()
        )
        assert run.summary["router_flip"] == pytest.approx(run.paired["flips"].sum() / run.paired["cells"].sum())
        floor = run.metrics["noise_floor/trainer/k3"].max()
        assert run.summary["noise_floor_trainer"] == floor


def test_the_command_line_prints_the_run_folder_last(tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text("rollout: {engine: hf}\ntrainer: {engine: hf}\nsteps: 9\nalgorithm: {prompts_per_step: 8}\n")
    command = [sys.executable, "-m", "rar_lib", "run", "--config", str(config), "--set", "steps=1", "--set",
               "evaluation.prompts=0", "--runs-dir", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.splitlines()[-1])
    assert (folder / "summary.json").exists()
    assert "step 1/1" in done.stderr
    bad = subprocess.run([*command, "--set", "stepz=1"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert bad.stderr.startswith("rar: stepz: no such field; allowed here:")
    assert "Traceback" not in bad.stderr


def test_a_kill_after_the_last_checkpoint_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("none", "steps=2", "checkpoint_every=1")
    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_job(config, runs_dir=tmp_path, show="none")
    (folder,) = tmp_path.iterdir()
    for name in ("metrics.parquet", "paired.parquet"):
        (folder / name).unlink()  # as if the tables of the last step had not been written
    run = run_job(config, runs_dir=tmp_path, show="none")
    assert (len(run.metrics), len(run.paired), run.summary["steps"]) == (2, 32, 2)


def test_a_rollout_that_keeps_other_weights_refuses_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small errors that a mean log-prob gap would let pass: q_norm and k_norm exchanged."""
    weights = HFTrainer.weights

    def exchanged(self: Any) -> Any:
        for name, tensor in weights(self):
            swapped = (
                name.replace("q_norm", "x").replace("k_norm", "q_norm").replace("x", "k_norm")
                if "_norm" in name
                else name
            )
            yield swapped, tensor

    monkeypatch.setattr(HFTrainer, "weights", exchanged)
    with pytest.raises(EngineError, match=r"differ from those of its checkpoint: .*k_norm"):
        run_job(small("none"), runs_dir=tmp_path, show="none")


@pytest.mark.parametrize("arm", ["none", "R3"])
def test_where_every_router_uses_all_experts_no_route_is_wrong(arm: str, tmp_path: Path, tokenizer: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "mixtral", hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=100, pad_token_id=0, eos_token_id=1, num_local_experts=2, num_experts_per_tok=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "all")
    tokenizer.save_pretrained(tmp_path / "all")
    run = run_job(small(arm, "steps=1", f"model.path={tmp_path / 'all'}"), runs_dir=tmp_path / "runs", show="none")
    assert run.summary["negative_control"] is None
    assert run.summary["router_flip"] == 0


def test_zero_mismatch_is_exact_inside_a_run(tmp_path: Path) -> None:
    exact = ("rollout.zero_mismatch=true", "rollout.dtype=float32", "rollout.precision=native", "algorithm.prompts_per_step=4",
             "algorithm.group_size=2")  # fmt: skip
    for arm in ("none", "R2", "R3"):
        run = run_job(small(arm, *exact), runs_dir=tmp_path, show="none")
        assert (run.metrics["mismatch/rollout_old/abs_max"] == 0).all()
        assert (run.metrics["agreement/rollout_native/router_flip"] == 0).all()


def test_a_dead_layer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    select = Replaying._select

    def deaf(self: Replaying, point: Any, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return ids if point.layer == 2 else select(self, point, scores, ids)

    monkeypatch.setattr(Replaying, "_select", deaf)
    with pytest.raises(ReplayError, match=r"layers \[2\] executed other experts"):
        run_job(small("R3"), runs_dir=tmp_path, show="none")


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_any_local_moe_works_in_place_of_the_base(family: str, tmp_path: Path, tokenizer: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1}  # fmt: skip
    experts = {"mixtral": {"num_local_experts": 4}, "olmoe": {"num_experts": 8, "num_experts_per_tok": 2}}[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **experts))
    model.save_pretrained(tmp_path / family)
    tokenizer.save_pretrained(tmp_path / family)
    run = run_job(small("R3", "steps=1", f"model.path={tmp_path / family}"), runs_dir=tmp_path / "runs", show="none")
    trace = RouteTrace.load(next((run.path / "traces").glob("*-rollout.safetensors")))
    assert (trace.header.num_layers, trace.header.model_id) == (2, family)
    assert run.summary["negative_control"] > 0


@pytest.mark.parametrize("arm", ["none", "R2", "R3"])
def test_diagnostics_off_leaves_losses_and_tokens_as_they_are(
    arm: str, runs: dict[str, RunResult], tmp_path: Path
) -> None:
    bare = run_job(small(arm, "diagnostics.enabled=false"), runs_dir=tmp_path, show="none")
    columns = list(numbers(bare.metrics).dropna(axis=1, how="all").columns)
    assert "update/loss" in columns
    assert not [c for c in columns if c.startswith(("paired/", "agreement/", "noise_floor/"))]
    pd.testing.assert_frame_equal(bare.metrics[columns], runs[arm].metrics[columns], check_exact=True)
    assert bare.paired.empty
    assert not list((bare.path / "traces").iterdir())


@pytest.mark.parametrize(("engines", "kills", "steps"), [("hf hf", 3, 16), ("vllm megatron", 1, 8)])
def test_kill_9_at_any_point_and_start_again(engines: str, kills: int, steps: int, tmp_path: Path) -> None:
    """The process dies without a chance to tidy up; the end is that of a run that was left alone.

    hf engines: bit-equal. The real pair: the same tokens, metrics within 1e-6.
    """
    rollout, trainer = engines.split()
    overrides = [*SMALL, f"steps={steps}", "checkpoint_every=1", "router_replay.mode=R2"]
    overrides += [f"rollout.engine={rollout}", f"trainer.engine={trainer}"]
    command = [sys.executable, "-m", "rar_lib", "run", *(p for override in overrides for p in ("--set", override))]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    whole = subprocess.run(
        [*command, "--runs-dir", str(tmp_path / "whole")], capture_output=True, text=True, check=True
    )
    rng, alive = np.random.default_rng(0), 0

    def newest() -> int:
        done = [int(p.name.removeprefix("step-")) for p in tmp_path.glob("cut/*/checkpoints/step-*") if not p.suffix]
        return max(done, default=0)

    for kill in range(kills):
        process = subprocess.Popen([*command, "--runs-dir", str(tmp_path / "cut")], **silent)  # type: ignore[call-overload]
        while process.poll() is None and newest() < 2 * kill + 1:  # until the loop runs; then anywhere in it
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        alive += process.wait() == -9
    subprocess.run([*command, "--runs-dir", str(tmp_path / "cut")], capture_output=True, text=True, check=True)
    (cut,) = (tmp_path / "cut").iterdir()
    assert alive == kills
    left_alone, exact = Path(whole.stdout.splitlines()[-1]), engines == "hf hf"
    for name in ("metrics.parquet", "paired.parquet"):
        a, b = (numbers(pd.read_parquet(folder / name)) for folder in (left_alone, cut))
        pd.testing.assert_frame_equal(a, b, check_exact=exact, **({} if exact else {"rtol": 1e-6}))
    last = f"traces/step-{steps - 1:06d}-rollout.safetensors"
    assert RouteTrace.load(left_alone / last).token_digest == RouteTrace.load(cut / last).token_digest
    if exact:
        state = f"checkpoints/step-{steps:06d}/trainer.safetensors"
        assert (left_alone / state).read_bytes() == (cut / state).read_bytes()
    assert not list(cut.rglob("*.partial"))


PARTIAL = [("uniform", "token_layer"), ("random_route", "slot"), ("random_cell", "slot"), ("margin", "token_layer"),
           ("frequency", "slot"), ("disagree", "slot")]  # fmt: skip


@pytest.mark.parametrize(
    ("arm", "policy", "unit"), [(a, p, u) for a in ("R2", "R3") for p, u in PARTIAL if (a, p) != ("R2", "disagree")]
)
def test_runs_train_under_partial_policies(
    arm: str, policy: str, unit: str, runs: dict[str, RunResult], tmp_path: Path
) -> None:
    wanted = (f"router_replay.policy={policy}", f"router_replay.unit={unit}", "router_replay.budget=0.25")
    run = run_job(small(arm, "steps=2", *wanted), runs_dir=tmp_path, show="none")
    assert (run.summary["policy"], run.summary["unit"], run.summary["budget"]) == (policy, unit, "0.25")
    assert run.metrics["replay/update/nominal"].tolist() == pytest.approx([0.25] * 2, abs=1e-3)
    assert run.metrics["replay/old/nominal"].tolist() == pytest.approx([0.25 if arm == "R3" else 0.0] * 2, abs=1e-3)
    # the paired columns are of none and of full R3, whatever the run's own policy is
    first, reference = run.metrics.iloc[0], runs["none"].metrics.iloc[0]
    for side in ("none", "R3"):
        assert first[f"paired/{side}/rollout_old/k3"] == reference[f"paired/{side}/rollout_old/k3"]
    # a budget may be spent where nothing would have moved, but what moves was forced
    forces = first["replay/old/forced_routers_native_local"] > 0
    if first["mismatch/rollout_old/k3"] != first["paired/none/rollout_old/k3"]:
        assert forces
    if policy == "disagree" and arm == "R3":
        assert forces


def test_no_budget_trains_like_none_and_the_whole_like_r3(runs: dict[str, RunResult], tmp_path: Path) -> None:
    for share, arm in (("0", "none"), ("1", "R3")):
        wanted = ("router_replay.policy=random_route", "router_replay.unit=slot", f"router_replay.budget={share}")
        run = run_job(small("R3", *wanted), runs_dir=tmp_path, show="none")
        columns = [c for c in numbers(run.metrics) if not str(c).startswith("replay/")]
        pd.testing.assert_frame_equal(run.metrics[columns], runs[arm].metrics[columns], check_exact=True)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("router_replay.policy=uniform", "needs a share"),
        ("router_replay.budget=0.5", "policy full has no budget"),
        ("router_replay.policy=fisherman", "expected one of full, uniform"),
    ],
)
def test_policies_and_budgets_that_do_not_go_together_are_refused_before_anything_starts(
    wanted: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_job(small("R3", wanted), runs_dir=tmp_path / "runs", show="none")
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------- policies of routes


def partial(policy: str, unit: str, budget: str | None, *more: str) -> JobConfig:
    share = [] if budget is None else [f"router_replay.budget='{budget}'"]
    return small("R3", f"router_replay.policy={policy}", f"router_replay.unit={unit}", *share, *more)


POLICY_RUNS = [
    partial("fisher", "slot", "0.25", "router_replay.score.ema=0.5", "router_replay.score.labels=resampled"),
    partial("swap", "token_layer", "0.25"),
    partial("bias", "bias", "0.5"),
    partial("threshold", "slot", None, "router_replay.ratio=0.8"),
    partial("inverse_fisher", "token_layer", "0.25", "router_replay.mode=R2", "router_replay.score=param"),
]


@pytest.mark.parametrize("config", POLICY_RUNS, ids=lambda c: c.router_replay.policy)
def test_a_run_trains_and_resumes_under_any_policy(config: JobConfig, tmp_path: Path) -> None:
    """What a planner keeps from batch to batch (moving averages, P(flip)) survives an interruption to the last bit."""
    config = JobConfig.build(config.resolved(), ["steps=3", "checkpoint_every=1"])
    whole = run_job(config, runs_dir=tmp_path / "whole", show="none")
    interrupt(config, tmp_path / "cut", HFRollout, "load_weights", lambda call, weights, version: version == 2)
    resumed = run_job(config, runs_dir=tmp_path / "cut", show="none")
    pd.testing.assert_frame_equal(numbers(resumed.metrics), numbers(whole.metrics), check_exact=True)
    assert resumed.replay == whole.replay
    wanted = config.router_replay
    assert whole.path.name.startswith(f"{wanted.mode}-{wanted.policy}-seed0-")
    for record in whole.replay:
        assert (record.policy, record.unit, record.mode) == (wanted.policy, wanted.unit, wanted.mode)
        assert record.update.executed_equals_resolved == 1
        assert record.binding is not None
        if wanted.budget is not None and wanted.unit != "bias":
            assert record.budget == int(record.valid * float(wanted.budget) + 0.5)
        if "fisher" in wanted.policy:
            assert record.score is not None
            assert record.score.spearman is not None
    if wanted.mode == "R3":
        assert whole.summary["evaluation_last_k3_replayed"] is not None
        assert whole.summary["target_shift"] > 0
    assert whole.summary["evaluation_last_k3_native"] > 0


def test_lines_of_another_schema_are_refused_when_a_run_is_read(runs: dict[str, RunResult], tmp_path: Path) -> None:
    folder = shutil.copytree(runs["R3"].path, tmp_path / runs["R3"].path.name)
    lines = folder / "replay.jsonl"
    lines.write_text(lines.read_text().replace('"schema_version":1', '"schema_version":9'))
    with pytest.raises(ReplayError, match=r"replay\.jsonl, line 1: schema_version: Input should be 1"):
        run_job(small("R3"), runs_dir=tmp_path, show="none")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["router_replay.policy=fisher"], "policy fisher needs a share from 0 to 1, found none"),
        (
            ["router_replay.policy=fisher", "router_replay.unit=bias", "router_replay.budget=0.1"],
            "exists in token_layer and slot",
        ),
        (["router_replay.policy=threshold", "router_replay.unit=slot"], "ratio: goes with policy threshold"),
        (["router_replay.policy=bias", "router_replay.budget=0.1"], "policy bias exists in bias, found 'token_layer'"),
        (["router_replay.policy=swap", "router_replay.budget=1.1"], "expected a share from 0 to 1"),
        (
            ["router_replay.policy=disagree", "router_replay.budget=0.1", "router_replay.mode=R2"],
            "disagree compares the record",
        ),
        (["router_replay.score=gates"], r"score\.estimator: Input should be 'gate', 'param', 'param_exact' or 'swap'"),
        (["router_replay.score.ema=1"], r"score\.ema: Input should be less than 1"),
    ],
)
def test_parts_of_a_policy_that_do_not_go_together(more: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run_job(small("R3", *more), runs_dir=tmp_path, show="none")
    assert not list(tmp_path.iterdir())
