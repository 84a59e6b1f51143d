"""Runs aligned and compared: settings, missing seeds, best and final, differences by hand; as text, Markdown and HTML."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rar_lib.checkpoint import DATA_DIR
from rar_lib.config import JobConfig
from rar_lib.errors import ConfigError, RunError
from rar_lib.figures.style import alt_text
from rar_lib.runs import align, report
from rar_lib.runs.files import write_json, write_table
from rar_lib.runs.result import RunResult
from rar_lib.runs.store import RunStore
from rar_lib.runs.studies import Study
from rar_lib.summary import summarise

DIGESTS = {"checkpoint": "c" * 12, "task": "t"}


def make(folder: Path, rewards: list[float], k3: float, flat: dict[str, Any], complete: bool = True) -> Path:
    """A run folder as a run leaves it, with made-up numbers."""
    config = JobConfig.from_flat(engine="hf", steps=len(rewards), **flat)
    table = pd.DataFrame(
        {"step": range(len(rewards)), "reward/mean": rewards, "mismatch/rollout_old/k3": k3, "mismatch/rollout_old/tokens": 10,
         "mismatch/rollout_old/ratio_max": 2.0, "mismatch/rollout_old/extreme_fraction_tau2": 0.01, "update/grad_norm": 1.0},
    )  # fmt: skip
    store = RunStore(folder, config, DIGESTS)
    with store.held():
        store.write_tables(table.to_dict("records"), [], [])
        if complete:
            facts = {"evaluation_first": 0.4, "evaluation_last": 0.5}
            store.finish(json.loads(json.dumps(summarise(config, store.path.name, table, facts))))
    return store.path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """none and R3, three seeds each but for R3's seed 1, at two learning rates; one run is not complete."""
    for lr in (1e-4, 3e-4):
        for seed in (0, 1, 2):
            base = 0.5 + seed / 10
            make(tmp_path, [0.9, 0.2, base, base], 4e-3, {"policy": "none", "seed": seed, "lr": lr})
            if seed != 1:
                make(
                    tmp_path, [0.1, 0.2, 0.3, base + 0.02 + 0.02 * seed], 1e-3, {"policy": "R3", "seed": seed, "lr": lr}
                )
    make(tmp_path, [0.5], 1e-3, {"policy": "R2", "seed": 0}, complete=False)
    return tmp_path


def read(folder: Path, **options: Any) -> align.Comparison:
    return align.read_comparison(sorted(folder.iterdir()), folder, **options)


def test_runs_are_aligned_by_policy_seed_and_setting(folder: Path) -> None:
    found = read(folder)
    assert [s.name for s in found.settings] == ["lr=0.0001", "lr=0.0003"]
    assert all(s.baseline == "none" for s in found.settings)
    (left,) = found.left_out
    assert re.fullmatch(r"R2-seed0-[0-9a-f]{12}: interrupted", left)
    arms = report.arms_table(found.settings[0]).set_index("policy")
    assert arms.index.tolist() == ["none", "R3"]
    assert arms.loc["R3", "missing seeds"] == "seed 1"
    assert arms.loc["none", "missing seeds"] == "none"
    assert arms.loc["none", "seeds"] == "3"
    # final: the last quarter of four steps is the last one; best: the highest of all, at the start here
    assert arms.loc["none", "final reward, mean"] == "0.600"
    assert arms.loc["none", "best step (chosen afterwards)"] == "0.900"
    assert arms.loc["R3", "final reward, mean"] == "0.640"
    assert arms.loc["none", "held out, end"] == "0.500"


def test_differences_by_hand_over_the_shared_seeds(folder: Path) -> None:
    (setting, _) = read(folder).settings
    table = report.differences_table(setting).set_index(["quantity", "policy"])
    reward = table.loc[("reward, last quarter of the steps", "R3")]
    assert reward["pairs"] == "2"
    # 0.02 and 0.06: mean 0.04, standard error 0.02, t(1) at 97.5 % = 12.706
    assert reward["difference [95 %]"] == "+0.040 [-0.214, +0.294]"
    assert reward["verdict"] == "no difference shown"
    assert table.loc[("k3 rollout/old", "R3"), "difference [95 %]"].startswith("× 0.25")
    assert table.loc[("gradient norm", "R3"), "verdict"] == "no difference shown"


def test_the_baseline_is_chosen_or_said_to_be_absent(folder: Path) -> None:
    found = read(folder, baseline="R3")
    assert [s.baseline for s in found.settings] == ["R3", "R3"]
    table = report.differences_table(found.settings[0])
    assert set(table["policy"]) == {"none"}
    assert table.iloc[0]["difference [95 %]"] == "-0.040 [-0.294, +0.214]"
    with pytest.raises(ConfigError, match="baseline: expected one of R3, none; found 'tis'"):
        read(folder, baseline="tis")
    alone = align.Setting("", found.settings[0].study, None)
    assert report.differences_table(alone).empty
    assert report.title_of("differences", alone) == "Differences: none, since this setting has no baseline"


def test_names_are_as_short_as_they_may_be(tmp_path: Path) -> None:
    flats = [
        {"policy": "none", "seed": 0},
        {"policy": "none", "seed": 1},
        {"policy": "R3", "routes": "fisher", "budget": "0.25", "score": "gate", "seed": 0},
        {"policy": "R3", "routes": "fisher", "budget": "0.25", "score": "param", "seed": 0},
        {"policy": "none", "corrections": "tis", "seed": 0},
    ]
    runs = [RunResult.read(make(tmp_path, [0.5, 0.5], 1e-3, flat)) for flat in flats]
    assert align.arms_of(runs) == [
        ("none", ()), ("none", ()), ("fisher 0.25 estimator=gate", ()), ("fisher 0.25 estimator=param", ()), ("tis", ()),
    ]  # fmt: skip
    native = RunResult.read(make(tmp_path, [0.5, 0.5], 1e-3, {"policy": "none", "precision": "native", "seed": 0}))
    rounded = [setting for _, setting in align.arms_of([runs[0], native])]
    assert rounded == [(("precision", "fp8_weights"),), (("precision", "native"),)]
    assert align.arms_of([native]) == [("none unrounded", ())]
    both = [
        {"policy": "none", "rollout_dtype": d, "trainer_dtype": d, "seed": i}
        for i, d in enumerate(("float32", "bfloat16"))
    ]
    names = [
        setting for _, setting in align.arms_of([RunResult.read(make(tmp_path, [0.5], 1e-3, flat)) for flat in both])
    ]
    assert names[0] == (("rollout.dtype", "float32"), ("trainer.dtype", "float32"))


def test_what_is_computed_decides_and_not_how_it_is_spelled(tmp_path: Path) -> None:
    for seed in (0, 1):
        path = make(tmp_path, [0.5, 0.5], 1e-3, {"policy": "none", "seed": seed})
        if seed:  # switched off in another way, and written before a setting that came later
            stored = json.loads((path / "config.json").read_text())
            stored["config"]["router_replay"] |= {"enabled": True, "mode": "disabled"}
            del stored["config"]["algorithm"]["max_grad_norm"]
            write_json(path / "config.json", stored)
        make(tmp_path, [0.5, 0.5], 1e-3, {"policy": "R3", "seed": seed})
    (setting,) = read(tmp_path).settings
    assert report.arms_table(setting)["seeds"].tolist() == ["2", "2"]
    other = JobConfig.from_flat(engine="hf", steps=2, policy="R3", seed=0)
    assert other.seed == 0
    for name, digest in (("task", "other"), ("checkpoint", "4e5e1203")):
        moved = next(tmp_path.glob("R3-seed1-*"))
        stored = json.loads((moved / "config.json").read_text())
        write_json(moved / "config.json", stored | {"digests": {**stored["digests"], name: digest}})
        content = json.loads((moved / "config.json").read_text())
        digest = hashlib.sha256(
            json.dumps({k: content[k] for k in ("computed", "digests", "version")}, sort_keys=True).encode()
        )
        moved.rename(tmp_path / f"R3-seed1-{digest.hexdigest()[:12]}")
        assert len(read(tmp_path).settings) == 2


def test_what_diverged_has_reward_0_for_what_it_lost_and_no_end(tmp_path: Path) -> None:
    for policy, seen in (("none", 3), ("R3", 5)):
        for seed in (0, 1):
            path = make(tmp_path, [0.6] * 20, 1e-3, {"policy": policy, "seed": seed})
            table = pd.read_parquet(path / "metrics.parquet").iloc[:seen]
            write_table(path / "metrics.parquet", table)
            summary = json.loads((path / "summary.json").read_text())
            write_json(path / "summary.json", summary | {"diverged": f"step {seen}, update 0: gone", "steps": seen})
    (setting,) = read(tmp_path).settings
    arms = report.arms_table(setting).set_index("policy")
    assert arms["final reward, mean"].tolist() == ["0.000", "0.000"]
    assert arms["held out, end"].tolist() == ["unknown", "unknown"]
    table = report.differences_table(setting).set_index("quantity")
    assert table.loc["reward, last quarter of the steps", "difference [95 %]"] == "+0.000 [+0.000, +0.000]"
    assert table.loc["k3 rollout/old", "pairs"] == "0"


def test_a_run_that_diverged_at_once_is_shown(tmp_path: Path) -> None:
    for policy in ("none", "R3"):
        path = make(tmp_path, [0.6] * 4, 1e-3, {"policy": policy, "seed": 0})
        if policy == "R3":
            write_table(path / "metrics.parquet", pd.DataFrame())
            summary = json.loads((path / "summary.json").read_text())
            write_json(path / "summary.json", summary | {"diverged": "step 0, update 0: gone", "steps": 0})
    (setting,) = read(tmp_path).settings
    rows = report.runs_table(setting).set_index("policy")
    assert rows.loc["R3", ["final reward", "best step (chosen afterwards)"]].tolist() == ["0.000", "unknown at unknown"]
    report.write_comparison(read(tmp_path), tmp_path / "out")
    alone = align.read_comparison([path], tmp_path)
    assert report.runs_table(alone.settings[0])["diverged"].tolist() == ["step 0, update 0: gone"]


def test_a_name_that_means_two_things_is_refused_and_a_source_counts_once(folder: Path) -> None:
    (folder / "sweeps" / "real").mkdir(parents=True)
    write_json(folder / "sweeps" / "real" / "status.json", {"points": []})
    with pytest.raises(ConfigError, match="found a study and a sweep; give the folder"):
        align.read_comparison(["real"], folder)
    once = align.read_comparison(["remedies", DATA_DIR / "studies" / "remedies"], folder)
    assert len(once.settings) == 1
    study = once.settings[0].study
    twice = Study("s", pd.concat([study.runs, study.runs]), study.steps)
    with pytest.raises(ConfigError, match="expected every policy and seed once, found none, seed 0 twice"):
        align.Comparison([align.Setting("", twice, "none")])
    run = next(folder.glob("none-*"))
    assert len(align.read_comparison([run, run.name, f"{run}/"], folder).settings[0].study.runs) == 1


def test_a_name_that_nobody_knows_is_told_what_there_is(folder: Path) -> None:
    (folder / "sweeps" / "night").mkdir(parents=True)
    write_json(folder / "sweeps" / "night" / "status.json", {"points": []})
    with pytest.raises(
        RunError, match=r"run 'nope': .*no sweep or study \(sweeps: night; studies: rates, real, remedies, staleness\)"
    ):
        align.read_comparison(["nope"], folder)


def test_figures_say_of_which_setting_they_are(folder: Path) -> None:
    drawn = dict(report.figures_of(read(folder)))
    figure = drawn["setting1_rewards"][0]
    assert figure.get_suptitle() == "lr=0.0003"
    assert alt_text(figure).startswith("lr=0.0003: ")
    alone = align.read_comparison(list(folder.glob("none-*")), folder)
    reasons = {name: told for name, told in report.figures_of(alone) if isinstance(told, str)}
    assert all("setting" not in told and "study" not in told for told in reasons.values()), reasons


def test_files_of_an_earlier_comparison_go_and_others_stay(folder: Path, tmp_path: Path) -> None:
    whole, out = read(folder), tmp_path / "out"
    out.mkdir()
    (out / "mine.csv").write_text("mine")
    report.write_comparison(whole, out)
    assert (out / "arms1.csv").exists()
    report.write_comparison(align.read_comparison([next(folder.glob("none-*"))], folder), out)
    assert not (out / "arms1.csv").exists()
    assert (out / "arms.csv").exists()
    assert (out / "mine.csv").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"comparison .*file: File exists"):
        report.write_comparison(whole, tmp_path / "file")


def test_one_arm_and_seed_twice_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    twice = make(other, [0.5, 0.5, 0.5, 0.5], 1e-3, {"policy": "none", "seed": 0, "lr": 1e-4, "checkpoint_every": 3})
    with pytest.raises(ConfigError, match="are both none, seed 0: compare one of them"):
        align.read_comparison([*sorted(folder.iterdir()), twice], folder)
    with pytest.raises(ConfigError, match="expected at least one complete run"):
        align.read_comparison([next(folder.glob("R2-*"))], folder)


def test_a_sweep_is_read_with_what_it_lacks(folder: Path) -> None:
    runs = [p.name for p in sorted(folder.iterdir()) if not p.name.startswith("R2")]
    points = [{"id": f"p{i}", "state": "done", "runs": [run], "cause": ""} for i, run in enumerate(runs)]
    points += [
        {"id": "p98", "state": "failed", "runs": [], "cause": "the kernel died"},
        {"id": "p99", "state": "left", "runs": []},
    ]
    (folder / "sweeps" / "night").mkdir(parents=True)
    write_json(folder / "sweeps" / "night" / "status.json", {"points": points})
    for source in ("night", folder / "sweeps" / "night"):
        found = align.read_comparison([source], folder)
        assert sum(len(s.study.runs) for s in found.settings) == len(runs)
        assert found.left_out == ("p98: failed: the kernel died", "p99: left")
    (folder / "sweeps" / "night" / "status.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"status.json cannot be read"):
        align.read_comparison(["night"], folder)


def test_collapse_and_divergence_are_said_with_their_seed(tmp_path: Path) -> None:
    make(tmp_path, [0.5, 0.5, 0.5, 0.5], 1e-3, {"policy": "none", "seed": 0})
    gone = make(tmp_path, [0.5, 0.5, 0.5, 0.5], 1e-3, {"policy": "none", "seed": 1})
    summary = json.loads((gone / "summary.json").read_text())
    write_json(gone / "summary.json", summary | {"collapsed_at": 3})
    lost = make(tmp_path, [0.5, 0.5, 0.5, 0.5], 1e-3, {"policy": "none", "seed": 2})
    summary = json.loads((lost / "summary.json").read_text())
    write_json(lost / "summary.json", summary | {"diverged": "step 2, update 0: gone"})
    (setting,) = read(tmp_path).settings
    (row,) = report.arms_table(setting).to_dict("records")
    assert row["collapsed"] == "seed 1 at step 3; seed 2 diverged (step 2, update 0: gone)"
    assert report.runs_table(setting)["collapse step"].tolist() == ["none", "3", "none"]


def test_committed_studies_are_split_by_what_they_vary() -> None:
    found = align.read_comparison(["staleness", DATA_DIR / "studies" / "rates"], Path("nowhere"))
    names = [s.name for s in found.settings]
    assert names[:4] == [f"staleness, updates_per_batch={n}" for n in (1, 2, 4, 8)]
    assert names[4:] == [f"rates, lr={lr:g}" for lr in (3e-4, 5e-4, 7e-4, 1e-3)]
    (remedies,) = align.read_comparison(["remedies"], Path("nowhere")).settings
    k3 = report.differences_table(remedies).set_index(["quantity", "policy"]).loc[("k3 rollout/old", "R3")]
    assert (k3["difference [95 %]"], k3["verdict"]) == ("× 0.44 [0.27, 0.71]", "lower")


def test_absent_values_are_unknown_and_not_zero(tmp_path: Path) -> None:
    for seed in (0, 1):
        for policy in ("none", "R3"):
            path = make(tmp_path, [0.5, 0.5], 1e-3 * (seed + 1), {"policy": policy, "seed": seed})
            summary = json.loads((path / "summary.json").read_text())
            write_json(path / "summary.json", summary | {"evaluation_last": None, "k3_rollout_old": 0.0})
    (setting,) = read(tmp_path).settings
    assert report.arms_table(setting)["held out, end"].tolist() == ["unknown"] * 2
    table = report.differences_table(setting).set_index("quantity")
    for quantity in ("reward served on held-out prompts", "k3 rollout/old"):
        assert table.loc[quantity, ["pairs", "difference [95 %]", "verdict"]].tolist() == [
            "0",
            "unknown",
            "cannot be told",
        ]


def test_pages_hold_the_tables_and_need_no_other_file(folder: Path, tmp_path: Path) -> None:
    found = read(folder)
    markdown, page = report.write_comparison(found, tmp_path / "out")
    text, html = markdown.read_text(), page.read_text()
    for setting in found.settings:
        for name, make_table in report.TABLES.items():
            for row in make_table(setting).astype(str).to_numpy().tolist():
                assert "| " + " | ".join(row) + " |" in text, name
                assert all(f"<td>{cell}</td>" in html for cell in row), name
    assert f"- {found.left_out[0]}" in text
    assert f"<li>{found.left_out[0]}</li>" in html
    assert len(re.findall(r'<img alt="[^"]{20,}" src="data:image/png;base64,', html)) == 6
    assert not re.findall(r'(src|href)="(?!data:)', html)
    for file in re.findall(r"\]\(([^)]+)\)", text):
        assert (tmp_path / "out" / file).exists()
    assert pd.read_csv(tmp_path / "out" / "arms0.csv", dtype=str, keep_default_na=False)["policy"].tolist() == [
        "none",
        "R3",
    ]


def test_markup_in_names_stays_text() -> None:
    table = pd.DataFrame({"a|b": ["<b>x</b>|y"]})
    assert report.markdown(table) == "| a\\|b |\n| --- |\n| <b>x</b>\\|y |"
    runs = pd.DataFrame({"policy": ["<script>"], "seed": [0], "run": ["r"], "steps": [1], "collapsed_at": [None], "diverged": [None],
                         "evaluation_first": [0.1], **{q: [0.5] for q in report.FORMS if q != "reward"},
                         "noise_floor_rollout": [np.nan], "noise_floor_trainer": [np.nan]})  # fmt: skip
    steps = pd.DataFrame(
        {"policy": ["<script>"], "seed": [0], "step": [0], "reward/mean": [0.5], "lr": [1.0], "updates_per_batch": [1]}
    )
    found = align.Comparison([align.Setting("<i>", Study("s", runs, steps), None)])
    html = report.as_html(found, {})
    assert "<script>" not in html
    assert "&lt;i&gt;" in html


def test_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    names = [p.name for p in sorted(folder.iterdir())]
    command = [
        sys.executable,
        "-m",
        "rar_lib",
        "compare",
        *names,
        "--runs-dir",
        str(folder),
        "--out",
        str(tmp_path / "o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "# lr=0.0001" in done.stdout
    assert "Differences from none" in done.stdout
    assert "left out: R2-seed0-" in done.stdout
    assert done.stdout.splitlines()[-1] == str(tmp_path / "o" / "compare.html")


def test_a_study_is_gathered_and_read_back(folder: Path, tmp_path: Path) -> None:
    (first, _) = read(folder).settings
    first.study.write(tmp_path / "s")
    pd.testing.assert_frame_equal(
        Study.read(tmp_path / "s").runs.dropna(axis=1, how="all"), first.study.runs.dropna(axis=1, how="all")
    )
    write_table(tmp_path / "s" / "runs.parquet", first.study.runs)
    assert Study.read(tmp_path / "s").name == "s"
