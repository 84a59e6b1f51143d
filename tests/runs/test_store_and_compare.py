"""Run folders: identity, atomic writes, locks; and the tables made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import rar_lib.runs.store
from rar_lib.config import JobConfig
from rar_lib.errors import RunError
from rar_lib.runs.compare import paired_ratio
from rar_lib.runs.files import write_json
from rar_lib.runs.store import RunStore, differing, run_id
from tests.runs.holding import held_elsewhere

CONFIG, DIGESTS = JobConfig(), {"checkpoint": "c", "task": "t"}


def test_the_id_depends_on_config_checkpoint_and_task() -> None:
    ids = {
        run_id(CONFIG, DIGESTS),
        run_id(JobConfig(steps=21), DIGESTS),
        run_id(CONFIG, DIGESTS | {"checkpoint": "d"}),
        run_id(CONFIG, DIGESTS | {"task": "u"}),
    }
    assert len(ids) == 4
    assert run_id(CONFIG, DIGESTS) == run_id(JobConfig.build(CONFIG.resolved()), DIGESTS)


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    store = RunStore(tmp_path, CONFIG, DIGESTS)
    for step in (2, 4, 6):
        with store.new_checkpoint(step) as folder:
            (folder / "x").write_text(str(step))
    assert store.checkpoints() == [4, 6]
    with pytest.raises(RunError, match="disk full"), store.new_checkpoint(8):
        raise OSError("disk full")
    assert store.latest_checkpoint() == (6, store.path / "checkpoints" / "step-000006")


def test_complete_means_summary(tmp_path: Path) -> None:
    store = RunStore(tmp_path, CONFIG, DIGESTS)
    store.write_tables([{"step": 0, "x": None}], [], [])
    assert not store.complete
    store.finish({"reward": 1.0})
    assert store.complete
    assert RunStore(tmp_path, CONFIG, DIGESTS).summary() == {"reward": 1.0}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"a": float("nan")})


def test_tables_take_a_small_part_of_a_run_and_wait_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("rar_lib.runs.store.time.monotonic", lambda: now[0])
    write = rar_lib.runs.store.write_table

    def slow(path: Path, table: pd.DataFrame) -> None:
        now[0] += 1.0
        write(path, table)

    monkeypatch.setattr("rar_lib.runs.store.write_table", slow)
    store = RunStore(tmp_path, CONFIG, DIGESTS)
    rows: list[dict[str, Any]] = []
    seen = []
    for step in range(120):
        now[0] += 1.0
        rows.append({"step": step})
        store.write_tables(rows, [], [])
        seen.append(len(store.metrics()))
    assert seen[:3] == [1, 1, 1]
    assert sorted(set(seen)) == [1, 61]  # two tables of a second each would wait for 98; a minute is the longest wait
    with pytest.raises(KeyboardInterrupt), store.held():
        raise KeyboardInterrupt
    assert len(store.metrics()) == 120
    rows.append({"step": 120})
    store.write_tables(rows, [], [])
    monkeypatch.setattr("rar_lib.runs.store.write_table", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="the reason"), store.held():
        raise RuntimeError("the reason")  # is told, not that the tables could not be written
    monkeypatch.setattr("rar_lib.runs.store.write_table", write)
    assert len(store.metrics()) == 120
    with store.new_checkpoint(121):
        assert len(store.metrics()) == 121


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    store = RunStore(tmp_path, CONFIG, DIGESTS)
    (store.path / "config.json").write_text(json.dumps({"other": 1}))
    with pytest.raises(RunError, match="of another run"), RunStore(tmp_path, CONFIG, DIGESTS).held():
        pass
    (store.path / "config.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"), store.held():
        pass


def test_the_spelling_of_a_config_does_not_matter() -> None:
    off = [JobConfig.from_flat(policy="none"), JobConfig.build({"router_replay": {"enabled": False, "mode": "R3"}})]
    assert len({run_id(config, DIGESTS) for config in off}) == 1
    elsewhere = JobConfig.from_flat(model="/some/copy/of/tiny-moe")
    assert run_id(elsewhere, DIGESTS) == run_id(CONFIG, DIGESTS)


def test_many_starts_of_one_run_do_not_trip_over_each_other(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from rar_lib.config import JobConfig; from rar_lib.errors import RunError\n"
        "from rar_lib.runs.store import RunStore\n"
        "for i in range(100):\n"
        "    config = JobConfig(seed=i)\n"
        "    try:\n"
        f"        with RunStore(pathlib.Path({str(tmp_path)!r}), config, {DIGESTS!r}).held(): pass\n"
        "    except RunError as error:\n"
        "        assert 'held by process' in str(error), error\n"
    )
    racers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [racer.wait() for racer in racers] == [0, 0]


def test_a_folder_held_by_another_process_says_by_which(tmp_path: Path) -> None:
    store = RunStore(tmp_path, CONFIG, DIGESTS)
    with (
        held_elsewhere(store.path) as process,
        pytest.raises(RunError, match=f"held by process {process}"),
        store.held(),
    ):
        pass
    with store.held():
        pass


def test_paired_ratio_by_hand_and_clustered_by_prompt() -> None:
    names = [f"p{i}" for i in range(10)]
    table = pd.DataFrame({"prompt": names * 2, "k3_sum/none": [1.0, 3.0] * 10, "k3_sum/R3": [0.5, 1.0] * 10})
    ratio = paired_ratio(table)
    assert ratio["ratio"] == (0.5 + 1.0) / (1.0 + 3.0)
    assert ratio["low"] < ratio["ratio"] < ratio["high"]  # type: ignore[operator]
    assert set(paired_ratio(table[table["prompt"] != "p3"]).values()) == {None}  # nine prompts are too few
    nothing = pd.DataFrame({"prompt": names, "k3_sum/none": [0.0] * 10, "k3_sum/R3": [0.0] * 10})
    assert set(paired_ratio(nothing).values()) == {None}


def test_the_interval_widens_when_samples_of_a_prompt_are_alike() -> None:
    rng = np.random.default_rng(0)
    prompts = np.repeat(np.arange(50), 8)
    none, ratio = np.ones(400), np.repeat(rng.uniform(0, 1, 50), 8)
    table = pd.DataFrame({"prompt": prompts, "k3_sum/none": none, "k3_sum/R3": none * ratio})
    clustered = paired_ratio(table)
    as_if_independent = paired_ratio(table.assign(prompt=np.arange(400)))
    width = [r["high"] - r["low"] for r in (clustered, as_if_independent)]  # type: ignore[operator]
    assert width[0] > 2 * width[1]
    # the textbook interval of a mean of 50: ± 1.96 * sd / sqrt(50)
    assert width[0] == pytest.approx(2 * 1.96 * ratio[::8].std() / np.sqrt(50), rel=0.15)


def test_a_changed_default_is_noticed_and_a_new_setting_is_not(tmp_path: Path) -> None:
    """config.json holds every value; the name of the folder only those that are not the defaults."""
    stored = JobConfig.build(
        {"algorithm": {"corrections": "tis"}, "router_replay": {"policy": "fisher", "budget": "0.5"}}
    ).resolved()
    today = json.loads(json.dumps(stored))
    today["algorithm"]["corrections"][0]["later"] = 1  # a setting that came later
    today["algorithm"]["newer"] = 2
    assert differing(stored, today, ("model",)) == []
    today["router_replay"]["score"]["shrinkage"] = 8.0
    assert differing(stored, today, ("model",)) == ["router_replay.score.shrinkage was 32.0, is 8.0"]
    assert differing(stored, today) == []  # with replay switched off it would not matter
    today["algorithm"]["corrections"][0]["cap"] = 3.0
    assert "algorithm.corrections.0.cap was 2.0, is 3.0" in differing(stored, today)
