"""Runs under every objective and correction on the hf engines, what a diverged run says, and the routing probe."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rar_lib.checkpoint import load_tokenizer, resolve_checkpoint, special_tokens
from rar_lib.engines.hf_rollout import HFRollout
from rar_lib.engines.session import EngineSession
from rar_lib.evaluate import evaluate
from rar_lib.job import run_job
from rar_lib.metrics.agreement import agreement
from rar_lib.metrics.mismatch import extreme_token_fraction, k3
from rar_lib.planner import Planner
from rar_lib.probe import _predicts_response
from rar_lib.prompts import Prompts
from rar_lib.runs.result import RunResult, label_of
from rar_lib.tasks import Task
from rar_lib.traces.trace import RouteTrace
from tests.jobs import interrupt, numbers, small

REMEDIES = {
    "gspo": ("none", "algorithm.objective=gspo", "algorithm.clip_low=0.2", "algorithm.clip_high=0.2"),
    "gmpo": ("none", "algorithm.objective=gmpo"),
    "tis": ("none", "algorithm.corrections=tis"),
    "R3+tis": ("R3", "algorithm.corrections=tis"),
    "icepop": ("none", "algorithm.corrections=icepop"),
    "seq_mis+geo_rs": ("none", "algorithm.corrections=seq_mis+geo_rs"),
    "opsm": ("R2", "algorithm.corrections=opsm"),
    "rspo": ("none", "algorithm.objective=gmpo", "algorithm.corrections=rspo"),
    "rspo under R3": ("R3", "algorithm.corrections=rspo", "trainer.recompute=true"),
    "anchor": ("R3", "algorithm.anchor=rollout"),
    "frozen": ("none", "algorithm.freeze_router=true"),
    "gates": ("R3", "router_replay.gates=recorded"),
}


@pytest.mark.parametrize("name", list(REMEDIES))
def test_every_remedy_trains_and_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    arm, *settings = REMEDIES[name]
    config = small(arm, *settings, "steps=3", "checkpoint_every=1", "evaluation.every=1")
    whole = run_job(config, runs_dir=tmp_path / "whole", show="none")
    interrupt(config, tmp_path / "cut", HFRollout, "load_weights", lambda call, weights, version: version == 2)
    resumed = run_job(config, runs_dir=tmp_path / "cut", show="none")
    pd.testing.assert_frame_equal(numbers(resumed.metrics), numbers(whole.metrics), check_exact=True)
    times = {"seconds_per_step"}
    assert {k: v for k, v in resumed.summary.items() if k not in times} == {
        k: v for k, v in whole.summary.items() if k not in times
    }
    table = whole.metrics
    assert (table["update/grad_norm"] > 0).all()
    assert (table["factorisation/error_max"] < 1e-6).all()
    parts = table["factorisation/old_rollout"] + table["factorisation/new_old"]
    assert np.allclose(table["factorisation/new_rollout"], parts, atol=1e-9)
    old = table[[f"mismatch/rollout_old/{n}" for n in ("geo_ratio_min", "geo_ratio_max", "seq_ratio_max")]]
    assert ((old.iloc[:, 0] < 1) & (old.iloc[:, 1] > 1) & (old.iloc[:, 2] >= old.iloc[:, 1])).all()
    assert table["mismatch/rollout_new/bad_update_delta0.1"].between(0, 0.5).all()
    if "tis" in name or name == "icepop":
        assert np.allclose(table["update/weight_mean"], 1, atol=0.1)
    if "rspo" in name:
        assert (table["update/gamma_mean"] < 1).all()
        assert (table["update/gamma_mean"] > 0.9).all()
    if "geo_rs" in name or name == "opsm":
        assert (table["update/kept_mean"] < 1).all()
    assert whole.summary["diverged"] is None


LABELS = {"seq_mis+geo_rs": "geo_rs+seq_mis", "gspo": "none gspo", "gmpo": "none gmpo", "opsm": "R2+opsm", "rspo": "rspo gmpo", "rspo under R3": "R3+rspo",
          "anchor": "R3 anchor rollout", "frozen": "none frozen router", "gates": "R3 recorded gates"}  # fmt: skip


@pytest.mark.parametrize("name", list(REMEDIES))
def test_labels_say_what_a_run_did(name: str) -> None:
    from rar_lib.summary import summarise

    config = small(REMEDIES[name][0], *REMEDIES[name][1:])
    summary = summarise(config, "", pd.DataFrame({"reward/mean": [0.0]}), {})
    assert label_of(summary) == LABELS.get(name, name)


def test_a_run_that_diverges_says_so_and_ends(tmp_path: Path) -> None:
    run = run_job(small("R3", "algorithm.lr=1e30"), runs_dir=tmp_path, show="none")
    assert run.summary["diverged"].startswith("step 0, update 1: gradient norm is nan")
    assert run.summary["steps"] == 0
    assert run.summary["reward_last"] is None
    assert run.summary["evaluation_last"] == run.summary["evaluation_first"]  # the weights before are still served
    again = run_job(small("R3", "algorithm.lr=1e30"), runs_dir=tmp_path, show="none")
    assert again.summary == run.summary


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("probe")
    return run_job(small("R3", "algorithm.lr=1e-3", "diagnostics.probe_sequences=16"), runs_dir=folder, show="none")


def test_the_probe_follows_the_same_tokens(run: RunResult) -> None:
    traces = run.path / "traces"
    start = RouteTrace.load(traces / "probe-start.safetensors")
    end = RouteTrace.load(traces / "step-000003-probe.safetensors")
    assert start.num_sequences == 16
    assert np.array_equal(start.token_ids, end.token_ids)
    last = run.metrics.iloc[-1]
    assert last["drift/start/router_flip"] == agreement(start, end).scalars()["router_flip"] > 0
    by_layer = agreement(start, end).router_flip_by_layer()
    assert [last[f"drift/start/router_flip/layer_{i}"] for i in range(4)] == pytest.approx(by_layer.tolist())
    assert last["drift/step/router_flip"] <= last["drift/start/router_flip"] + run.metrics["drift/start/router_flip"][2]
    for row in run.metrics.to_dict("records"):
        assert 0 < row["drift/step/gamma_p1"] <= row["drift/step/gamma_p10"] <= row["drift/step/gamma_p50"] <= 1
        assert 0 <= row["drift/step/gamma_below_0.8"] <= 1
        assert 0 <= row["drift/start/gate_tv"] <= 1


def test_the_first_step_drifts_alike_since_the_start_and_in_itself(run: RunResult) -> None:
    first = run.metrics.iloc[0]
    for name in ("router_flip", "gate_tv"):
        assert first[f"drift/start/{name}"] == first[f"drift/step/{name}"]


def test_no_probe_if_none_is_asked_for(tmp_path: Path) -> None:
    quiet = run_job(small("none", "diagnostics.probe_sequences=0", "steps=1"), runs_dir=tmp_path, show="none")
    assert not [c for c in quiet.metrics if c.startswith("drift/")]
    assert not list((quiet.path / "traces").glob("*probe*"))


def test_single_tokens_add_up_to_the_tables(run: RunResult) -> None:
    tokens = pd.read_parquet(run.path / "tokens.parquet")
    assert sorted(tokens["step"].unique()) == [0, 3]
    for step, part in tokens.groupby("step"):
        row = run.metrics.iloc[step]
        every = np.ones(len(part), bool)
        assert len(part) == row["mismatch/rollout_old/tokens"]
        for arm in ("none", "R3"):
            assert k3(part[f"logp_{arm}"], part["logp_rollout"], every) == pytest.approx(
                row[f"paired/{arm}/rollout_old/k3"]
            )
            assert extreme_token_fraction(part[f"logp_{arm}"], part["logp_rollout"], every) == pytest.approx(
                row[f"paired/{arm}/rollout_old/extreme_fraction_tau2"]
            )
        trace = RouteTrace.load(run.path / "traces" / f"step-{step:06d}-rollout.safetensors")
        native = RouteTrace.load(run.path / "traces" / f"step-{step:06d}-native.safetensors")
        flipped = agreement(trace, native).flipped
        for token in part.sample(20, random_state=0).to_dict("records"):
            place = int(trace.offsets[token["sequence"]]) + token["position"]
            assert trace.token_ids[place] == token["token"]
            assert trace.logprobs[place] == np.float32(token["logp_rollout"])
            assert token["layers_flipped"] == flipped[place - 1].sum()
            assert token["smallest_margin"] == native.margins[place - 1].min()


def test_load_and_margins_are_logged(run: RunResult) -> None:
    for row in run.metrics.to_dict("records"):
        assert row["load/rollout/max_vio"] > 0
        assert 1 <= row["load/rollout/effective_experts"] <= 16
        assert row["margin/native/p10"] <= row["margin/native/p50"] <= row["margin/native/p90"]
        assert row["margin/native/auc"] > 0.7  # flips concentrate where the margin is small


def test_evaluation_says_what_is_served_and_what_the_trainer_believes(run: RunResult) -> None:
    summary = run.summary
    for when in ("first", "last"):
        assert 0 <= summary[f"evaluation_{when}"] <= 1
        for side in ("native", "replayed"):
            assert abs(summary[f"evaluation_{when}_reward_{side}"] - summary[f"evaluation_{when}"]) < 0.1
            assert 0.9 < summary[f"evaluation_{when}_ess_{side}"] <= 1
        assert summary[f"evaluation_{when}_k3_replayed"] != summary[f"evaluation_{when}_k3_native"]


def test_evaluation_in_zero_mismatch_is_what_is_served(tmp_path: Path) -> None:
    exact = small("R3", "rollout.dtype=float32", "rollout.precision=native", "rollout.zero_mismatch=true", "steps=1")
    summary = run_job(exact, runs_dir=tmp_path, show="none").summary
    for side in ("native", "replayed"):
        assert summary[f"evaluation_last_reward_{side}"] == pytest.approx(summary["evaluation_last"])
        assert summary[f"evaluation_last_ess_{side}"] == pytest.approx(1)
        assert summary[f"evaluation_last_k3_{side}"] == 0


def test_no_held_out_prompts_no_evaluation() -> None:
    assert evaluate(small("none", "evaluation.prompts=0"), None, None) == {}  # type: ignore[arg-type]


def test_a_reward_below_0_ends_a_run_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def below(answer, entry):\n    return -1.0 + 0.1 * len(answer)\n")
    run = run_job(small("none", "steps=1", f"task.reward={tmp_path}/reward.py:below"), runs_dir=tmp_path, show="none")
    assert run.summary["reward_last"] < 0
    assert run.summary["collapsed_at"] is None  # the rule is of rewards from 0 up


def test_a_resumed_run_is_not_refused_for_a_heavy_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single answer may carry the mean gap of a later batch: only the first step is judged by it."""
    config = small("none", "steps=2", "checkpoint_every=1")
    whole = run_job(config, runs_dir=tmp_path, show="none")
    (whole.path / "summary.json").unlink()
    shutil.rmtree(whole.path / "checkpoints" / "step-000002")
    monkeypatch.setattr("rar_lib.engines.same_weights.LARGEST_GAP", 0.0)
    monkeypatch.setattr("rar_lib.engines.same_weights.LARGEST_SHARE", 0.0)
    again = run_job(config, runs_dir=tmp_path, show="none")
    pd.testing.assert_frame_equal(numbers(again.metrics), numbers(whole.metrics), check_exact=True)


def test_evaluation_plans_with_what_training_knows(tmp_path: Path) -> None:
    """Scores are averaged over batches there too, so the evaluated plan is the run's own."""
    config = small(
        "R3", "router_replay.policy=fisher", "router_replay.budget=0.25", "router_replay.score.ema=0.9", "steps=2"
    )
    session = EngineSession()
    path = resolve_checkpoint("tiny-moe")
    tokenizer = load_tokenizer(path)
    special = special_tokens(path, tokenizer)
    rollout, trainer = session.open(config, path, special)
    prompts = Prompts(config, Task(config.task), tokenizer, special)
    planner = Planner(config.router_replay)
    fresh = evaluate(config, rollout, prompts, trainer, planner)
    _, batch = prompts.sample(rollout, prompts.train(0), 0)
    planner.look(trainer, batch, 0, 1.0)
    state = planner.state()
    knows = evaluate(config, rollout, prompts, trainer, planner)
    assert planner.state() == state
    assert knows["k3_native"] == fresh["k3_native"]
    assert planner.state()["sums"] is not None


def test_gamma_is_of_the_inputs_that_a_sampled_token_is_predicted_from(run: RunResult) -> None:
    start = RouteTrace.load(run.path / "traces" / "probe-start.safetensors")
    end = RouteTrace.load(run.path / "traces" / "step-000003-probe.safetensors")
    chosen = _predicts_response(start)
    assert start.logprobs is not None
    assert chosen.sum() == np.isfinite(start.logprobs).sum()  # one input a sampled token
    assert not chosen[start.offsets[1:] - 1].any()  # the last token of a sequence predicts nothing
    assert np.isfinite(start.logprobs[np.flatnonzero(chosen) + 1]).all()
    assert end.num_tokens == start.num_tokens


@pytest.mark.parametrize(
    ("dtypes", "alike"),
    [(("float32", "float32"), True), (("bfloat16", "bfloat16"), False), (("bfloat16", "float32"), False)],
)
def test_only_float32_on_both_sides_computes_alike(dtypes: tuple[str, str], alike: bool) -> None:
    """A bf16 trainer computes in another way than a bf16 rollout."""
    from rar_lib.summary import summarise

    config = small("none", f"rollout.dtype={dtypes[0]}", f"trainer.dtype={dtypes[1]}", "rollout.precision=native")
    assert summarise(config, "", pd.DataFrame({"reward/mean": [0.0]}), {})["computes_alike"] is alike
