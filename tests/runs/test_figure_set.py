"""Tables and figures from run folders, gate swap and estimate: each number against what the run wrote."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from rar_lib.config import JobConfig
from rar_lib.engines.hf_weights import hf_names, load_hf_weights, router_names
from rar_lib.errors import ConfigError, RunError
from rar_lib.estimate import estimate
from rar_lib.gate_swap import gate_swap, gate_swap_table
from rar_lib.job import run_job
from rar_lib.metrics.agreement import agreement
from rar_lib.runs import compare, tables
from rar_lib.runs.figure_set import draw_all, figure_set, read_sources
from rar_lib.runs.result import RunResult
from rar_lib.traces.trace import RouteTrace
from tests.jobs import small

ROOT = Path(__file__).resolve().parents[2]
FIGURES = {"rewards", "kl_by_policy", "logprobs", "extremes", "flips_by_layer", "flips_by_margin", "load_shift", "routing_drift",
           "layers_per_token", "expert_flow", "drift_flow", "route_strip"}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    folder = tmp_path_factory.mktemp("runs")
    exact = ("rollout.dtype=float32", "rollout.precision=native", "rollout.zero_mismatch=true")
    settings: dict[str, tuple[str, ...]] = {"none": (), "R3": ("evaluation.every=2",), "exact": exact}
    return {
        name: run_job(small("R3" if name == "R3" else "none", *more), runs_dir=folder, show="none")
        for name, more in settings.items()
    }


def test_a_run_is_read_back_as_it_was(runs: dict[str, RunResult]) -> None:
    again = RunResult.read(runs["R3"].path)
    assert again.summary == runs["R3"].summary
    assert again.replay == runs["R3"].replay
    pd.testing.assert_frame_equal(again.metrics, runs["R3"].metrics)


def test_what_is_no_complete_run_is_refused(runs: dict[str, RunResult], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="expected a complete run"):
        RunResult.read(tmp_path)
    cut = shutil.copytree(runs["none"].path, tmp_path / "cut")
    (cut / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"an interrupted run \(no summary.json\)"):
        read_sources([cut])
    with pytest.raises(ConfigError, match=r"cut: .* an interrupted run .*\n.*nothing: .*found none of them"):
        read_sources([cut, tmp_path / "nothing"])


def test_held_out_rewards_begin_and_end_with_the_run(runs: dict[str, RunResult]) -> None:
    table = tables.held_out_table([runs["R3"]])
    assert table["step"].tolist() == [0, 2, 4]
    summary = runs["R3"].summary
    assert table["value"].iloc[[0, 2]].tolist() == [summary["evaluation_first"], summary["evaluation_last"]]
    assert table["value"].iloc[1] == runs["R3"].metrics["evaluation/reward"].iloc[1]


def test_runs_without_mismatch_have_no_kl_to_draw(runs: dict[str, RunResult]) -> None:
    assert runs["exact"].summary["k3_rollout_old"] == 0
    table = tables.kl_table(list(runs.values()))
    assert table["policy"].tolist() == ["none", "R3"]
    assert table["value"].tolist() == [runs[name].summary["k3_rollout_old"] for name in ("none", "R3")]


def test_extreme_shares_fall_and_lie_in_their_intervals(runs: dict[str, RunResult]) -> None:
    tokens = tables.token_table([runs["none"]])
    table = tables.extreme_table(tokens)
    for policy, part in table.groupby("policy"):
        assert (part.sort_values("tau")["fraction"].diff().dropna() <= 0).all()
        assert ((part["low"] <= part["fraction"]) & (part["fraction"] <= part["high"])).all()
        some = tokens[tokens["policy"] == policy]
        at = part.loc[part["tau"] == 2.0, "fraction"].item()
        assert at == ((some["logp_train"] - some["logp_rollout"]).abs() > np.log(2)).mean()


def test_margin_groups_hold_every_cell_once(runs: dict[str, RunResult]) -> None:
    table, auc = tables.margin_table(runs["none"])
    step, rollout, native = tables.traces(runs["none"])
    compared = agreement(rollout, native)
    assert step == 3
    assert table["cells"].sum() == compared.known.sum()
    assert (table["flips"] * table["cells"]).sum() == pytest.approx(compared.flipped.sum())
    assert table["margin"].is_monotonic_increasing
    assert auc == runs["none"].metrics["margin/native/auc"].iloc[-1]


def test_depth_shares_sum_to_1_and_agree_in_the_mean(runs: dict[str, RunResult]) -> None:
    table, _ = tables.depth_table(runs["none"])
    means = [float((table["layers"] * table[c]).sum()) for c in ("observed", "independent", "permuted")]
    for column in ("observed", "independent", "permuted"):
        assert table[column].sum() == pytest.approx(1)
    assert means[1:] == pytest.approx([means[0]] * 2)  # the mean does not depend on how flips fall on tokens


def test_flow_is_the_busiest_layer_unless_one_is_named(runs: dict[str, RunResult]) -> None:
    _, rollout, native = tables.traces(runs["none"])
    layer, table = tables.flow_table(rollout, native)
    rates = [tables.flow_table(rollout, native, i)[1]["share"].sum() for i in range(4)]
    assert table["share"].sum() == max(rates)
    assert layer == int(np.argmax(rates))
    assert (table["source"] != table["target"]).all()


def test_loads_before_and_after_are_of_the_same_tokens(runs: dict[str, RunResult]) -> None:
    before, after, layers = tables.load_pair(runs["none"])
    assert layers == (0, 1, 2, 3)
    assert before.sum(1) == pytest.approx([1] * 4)
    table = tables.load_pair_table(before, after, layers)
    assert table.loc[(table["layer"] == 2) & (table["expert"] == 5), "after"].item() == after[2, 5]


def test_traces_that_were_not_kept_are_named(runs: dict[str, RunResult]) -> None:
    with pytest.raises(ConfigError, match=r"no traces of step 2 were kept; those of steps \[0, 3\] were"):
        tables.traces(runs["none"], 2)


@pytest.mark.parametrize("width", [None, 3.5])
def test_the_whole_set_is_drawn_and_saved(width: float | None, runs: dict[str, RunResult], tmp_path: Path) -> None:
    files, reasons = draw_all([run.path for run in runs.values()], tmp_path, width)
    assert reasons == {}
    assert {f.stem for f in files} == FIGURES
    for file in files:
        assert all(file.with_suffix(s).stat().st_size > 20 for s in (".png", ".svg", ".csv"))
    kl = pd.read_csv(tmp_path / "kl_by_policy.csv")
    assert kl["policy"].tolist() == ["none", "R3"]
    assert (kl["zero_mismatch"] == 0).all()


def test_what_cannot_be_drawn_says_why(tmp_path: Path) -> None:
    bare = run_job(small("none", "diagnostics.enabled=false", "steps=1"), runs_dir=tmp_path / "runs", show="none")
    drawn = dict(figure_set(read_sources([bare.path])))
    assert not isinstance(drawn["rewards"], str)
    assert "no traces of any step were kept" in drawn["layers_per_token"]
    assert "diagnostics.enabled=false" in drawn["logprobs"]
    assert "no routing probe" in drawn["load_shift"]
    assert set(drawn) == FIGURES


def test_the_command_line_draws_without_any_engine(runs: dict[str, RunResult], tmp_path: Path) -> None:
    """Engines and models are not even importable."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('vllm', 'megatron', 'transformers', 'reasoning_gym')));"
        "from rar_lib.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "figures", str(runs["R3"].path), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == len(FIGURES)
    assert (tmp_path / "expert_flow.png").exists()
    none = subprocess.run([sys.executable, "-m", "rar_lib", "figures"], capture_output=True, text=True, check=False)
    assert none.returncode == 2
    assert "expected at least one" in none.stderr


# ------------------------------------------------------------------ tables of notebooks


def test_the_mismatch_table_is_of_the_kept_tokens(runs: dict[str, RunResult]) -> None:
    table = compare.mismatch_table({"pair": runs["none"], "alike": runs["exact"]}).set_index("number")
    assert list(table.columns) == [
        "pair, none",
        "pair, R3",
        "alike, none",
    ]  # R3 changes nothing where engines compute alike
    assert table.loc["k3", "pair, R3"] != table.loc["k3", "pair, none"]
    assert set(table["alike, none"].iloc[:3]) == {"0.00e+00"}


def test_the_tables_of_one_run(runs: dict[str, RunResult]) -> None:
    table = compare.depth_of_run_table(runs["R3"]).set_index("number")
    assert table.loc["nominal share", "mean"] == "1.0000"
    assert table.loc["executed = resolved", "last"] == "1.0000"
    assert "mean weight of a token" not in table.index
    served = compare.served_table({"a": runs["R3"], "b": runs["none"]})
    assert served["trainer, replayed (ESS)"].tolist()[1] == "undefined"
    assert served["collapsed"].tolist() == ["no", "no"]


# ------------------------------------------------------------------ gate swap


def test_gate_swap_crosses_bodies_and_routers(runs: dict[str, RunResult]) -> None:
    table = gate_swap(runs["none"]).set_index(["body", "routers"])
    assert table.loc[("start", "start"), ["k3_from_start", "flip_from_start"]].tolist() == [0, 0]
    assert table.loc[("end", "end"), "flip_from_end"] == 0
    assert table.loc[("end", "end"), "flip_from_start"] == table.loc[("start", "start"), "flip_from_end"] > 0
    assert 0 < table.loc[("start", "end"), "flip_from_start"] < 0.5
    assert gate_swap_table(table.reset_index()).shape == (4, 6)


def test_gate_swap_of_routers_alone(runs: dict[str, RunResult], tmp_path: Path) -> None:
    """A run that could not move its routers: the start with the end's routers is the start."""
    frozen = run_job(small("none", "algorithm.freeze_router=true"), runs_dir=tmp_path, show="none")
    table = gate_swap(frozen).set_index(["body", "routers"])
    assert table.loc[("start", "end"), ["k3_from_start", "flip_from_start"]].tolist() == [0, 0]
    assert table.loc[("end", "start"), "flip_from_end"] == 0
    assert table.loc[("end", "end"), "flip_from_start"] > 0  # states move where routers do not


def test_router_names_are_those_that_move_routes(checkpoint: Path) -> None:
    from rar_lib.checkpoint import load_model

    model = load_model(checkpoint)
    names = router_names(model)
    assert names == {f"model.layers.{i}.mlp.gate.weight" for i in range(4)}
    doubled = [(n, t * 2 if n in names else t) for n, t in hf_names(model)]
    load_hf_weights(model, doubled)
    assert torch.equal(
        dict(model.named_parameters())["model.layers.0.mlp.gate.weight"],
        dict(doubled)["model.layers.0.mlp.gate.weight"],
    )


# ------------------------------------------------------------------ estimate


def parts(found: Any) -> dict[str, int]:
    return dict(zip(found.memory["part"], found.memory["bytes"], strict=True))


def test_sizes_are_those_of_the_run(runs: dict[str, RunResult]) -> None:
    config = small("R3", "evaluation.every=2")
    found = estimate(config)
    trace = RouteTrace.load(runs["R3"].path / "traces" / "step-000000-rollout.safetensors")
    seen = parts(found)
    assert seen["trainer weights"] == seen["gradients"] == seen["AdamW moments"] // 2 == 4 * 509_248
    assert seen["rollout weights"] == 2 * 509_248
    routes = trace.experts.nbytes * 2 + trace.num_tokens * 4 * 4
    assert seen["routes of a step"] == pytest.approx(routes, rel=0.1)
    folder = sum(f.stat().st_size for f in runs["R3"].path.rglob("*") if f.is_file())
    assert 0.3 < found.disk / folder < 3
    assert seen["activations"] > seen["trainer weights"]
    assert set(found.seconds["part"]) >= {"rollout", "old pass", "updates", "evaluation"}
    assert (found.seconds["in_all"] >= 0).all()
    assert "time in all" in str(found)


def test_activations_grow_with_the_micro_batch_and_shrink_with_recompute() -> None:
    one, two, less = (
        parts(estimate(small("none", *more)))["activations"]
        for more in (("trainer.micro_batch_size=8",), (), ("trainer.recompute=true",))
    )
    assert two == pytest.approx(2 * one, rel=0.1)
    assert less < 0.6 * two


def test_an_estimate_without_engines_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rar_lib.engines.session.EngineSession.open", lambda *_: pytest.fail("an engine was opened"))
    found = estimate(small("none"), measure=False)
    assert found.seconds.empty
    assert "activations" not in parts(found)
    assert "time" not in str(found)


def test_scores_of_routers_count_where_they_are_kept() -> None:
    plain, shown = (parts(estimate(small("R3", *m), measure=False)) for m in ((), ("algorithm.corrections=rspo",)))
    cells = plain["routes of a step"] / (2 * 2 + 4)
    assert shown["routes of a step"] - plain["routes of a step"] == pytest.approx(cells * 4 * 16)


def test_prompts_are_told_apart_by_their_tokens(runs: dict[str, RunResult]) -> None:
    _, rollout, _ = tables.traces(runs["none"], 0)
    tokens = runs["none"].tokens().query("step == 0")
    expected = tokens.drop_duplicates("sequence").set_index("sequence")["prompt"]
    found = tables.prompts_of(rollout)
    assert len(found) == rollout.num_sequences == 64
    assert all((found == found[i]).sum() >= 4 for i in range(64))  # four answers each; two prompts may be the same sum
    assert all(found[a] == found[b] for _, part in expected.groupby(expected) for a in part.index for b in part.index)


def test_runs_of_one_name_are_not_drawn_as_one(runs: dict[str, RunResult], tmp_path: Path) -> None:
    other = run_job(small("none", "algorithm.lr=0.0003", "steps=1"), runs_dir=tmp_path, show="none")
    for draw in (tables.reward_table, tables.kl_table):
        with pytest.raises(
            ConfigError, match=r"both be drawn as 'none', seed 0: algorithm.lr was 0.0001, is 0.0003; steps was 4, is 1"
        ):
            draw([runs["none"], other])
    tables.reward_table([runs["none"], runs["none"]])  # the same run twice is no contradiction


def test_a_summary_of_an_earlier_version_is_refused(runs: dict[str, RunResult], tmp_path: Path) -> None:
    old = shutil.copytree(runs["none"].path, tmp_path / "old")
    text = (old / "summary.json").read_text()
    (old / "summary.json").write_text(text.replace('"computes_alike"', '"computed_otherwise"'))
    with pytest.raises(RunError, match=r"written by an earlier version of the library \(no computes_alike\)"):
        RunResult.read(old)


def test_a_run_without_held_out_prompts_has_one_panel(tmp_path: Path) -> None:
    bare = run_job(small("none", "evaluation.prompts=0", "steps=1"), runs_dir=tmp_path, show="none")
    drawn = dict(figure_set(read_sources([bare.path])))["rewards"]
    assert not isinstance(drawn, str)
    assert len(drawn[0].axes) == 1


def test_a_run_that_diverged_keeps_what_it_saw_last(tmp_path: Path) -> None:
    broken = run_job(small("R3", "algorithm.lr=1e30"), runs_dir=tmp_path / "runs", show="none")
    assert len(broken.tokens()) > 0
    assert tables.traces(broken)[0] == 0
    files, reasons = draw_all([broken.path], tmp_path / "out")
    assert "diverged at their first step" in reasons["rewards"]
    assert "logprobs" in {f.stem for f in files}


def test_extreme_intervals_are_of_prompts_and_not_of_runs(runs: dict[str, RunResult]) -> None:
    """Ten copies of one batch know no more than the batch."""
    tokens = tables.token_table([runs["none"]])
    once, ten = tables.extreme_table(tokens), tables.extreme_table(pd.concat([tokens] * 10))
    width = []
    for table in (once, ten):
        row = table[(table["policy"] == "none") & (table["tau"] == table["tau"].min())]
        width.append(float((row["high"] - row["low"]).iloc[0]))
    assert width[1] == pytest.approx(width[0], rel=0.05)


def test_one_run_is_paired_and_several_are_each_their_own(runs: dict[str, RunResult], tmp_path: Path) -> None:
    partial = run_job(
        small("R3", "router_replay.policy=uniform", "router_replay.budget=0.5", "steps=1"),
        runs_dir=tmp_path,
        show="none",
    )
    assert tables.token_table([runs["none"]])["policy"].unique().tolist() == ["none", "R3"]
    assert tables.token_table([partial])["policy"].unique().tolist() == ["none", "R3", "uniform 0.5"]
    several = tables.token_table([runs["none"], runs["R3"], partial])
    assert several["policy"].unique().tolist() == ["none", "R3", "uniform 0.5"]
    own = several[several["policy"] == "uniform 0.5"]
    k3_own = partial.metrics["mismatch/rollout_old/k3"].iloc[0]
    assert np.mean(
        np.expm1(own["logp_train"] - own["logp_rollout"]) - (own["logp_train"] - own["logp_rollout"])
    ) == pytest.approx(k3_own)


def test_figures_of_one_of_several_runs_say_which(runs: dict[str, RunResult]) -> None:
    sources = read_sources([runs["none"].path, runs["R3"].path, runs["exact"].path])
    several = {name: drawn[0] for name, drawn in figure_set(sources) if not isinstance(drawn, str)}
    told = {name for name, figure in several.items() if figure.get_suptitle() == "R3, seed 0"}
    assert told == {
        "flips_by_margin",
        "load_shift",
        "routing_drift",
        "layers_per_token",
        "expert_flow",
        "drift_flow",
        "route_strip",
    }
    assert [line.get_label() for line in several["rewards"].axes[0].lines] == ["none", "R3"]  # the reference is no arm
    alone = dict(figure_set(read_sources([runs["R3"].path])))["expert_flow"]
    assert not isinstance(alone, str)
    assert alone[0].get_suptitle() == ""


def test_weights_of_a_layout_are_counted_once_a_copy() -> None:
    """393,216 of the 509,248 parameters are experts: EP 2 has one copy of them and two of the rest, FSDP2 one of all."""
    weights = {
        layout: estimate(JobConfig.build({}, [f"trainer.{one}" for one in layout.split(",")]), measure=False).memory["bytes"][0]
        for layout in ("processes=1", "processes=2", "processes=2,expert_parallel=2", "processes=2,pipeline_parallel=2",
                       "processes=2,engine=hf", "processes=4,tensor_parallel=2,expert_parallel=2")
    }  # fmt: skip
    dense, experts = 4 * 116032, 4 * 393216
    assert list(weights.values()) == [
        dense + experts, 2 * (dense + experts), 2 * dense + experts, dense + experts, dense + experts, 2 * dense + 2 * experts
    ]  # fmt: skip


def test_an_estimate_refuses_what_a_run_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rar_lib.engines.session.EngineSession.open", lambda *_: pytest.fail("an engine was opened"))
    with pytest.raises(ConfigError, match="budget"):
        estimate(small("R3", "router_replay.policy=margin", "router_replay.budget=2"))
