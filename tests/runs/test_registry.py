"""Which runs there are: every state with its reason, found by name, removed with care."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rar_lib.config import JobConfig
from rar_lib.errors import RunError
from rar_lib.job import run_job
from rar_lib.runs import registry
from rar_lib.runs.files import commit, holder, human, locked, size_of, write_text
from rar_lib.runs.result import RunResult
from rar_lib.runs.store import SCHEMA_VERSION, RunStore, run_id
from tests.conftest import HF
from tests.runs.holding import held_elsewhere

DIGESTS = {"checkpoint": "c", "task": "t"}
SMALL = [
    "steps=2",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=2",
    "evaluation.prompts=4",
    "checkpoint_every=1",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One complete run, and one of each other state."""
    folder = tmp_path_factory.mktemp("runs")
    run_job(JobConfig.build(HF, SMALL), runs_dir=folder, show="none")
    for seed in (1, 2, 3, 4, 5):
        store = RunStore(folder, JobConfig(seed=seed), DIGESTS)
        with store.held():
            store.write_tables([{"step": 0, "reward/mean": 0.5, "mismatch/rollout_old/k3": 1e-3}], [], [])
    paths = {
        int(p.name.partition("seed")[2].partition("-")[0]): p for p in folder.iterdir() if p.name.startswith("R3-")
    }
    (paths[2] / "metrics.parquet").write_text("not a table")
    (paths[3] / "config.json").write_text("{")
    (paths[4] / "config.json").write_text((paths[1] / "config.json").read_text())
    (folder / "none-seed9-0123456789ab").symlink_to(paths[1])
    (folder / "R2-seed8-0123456789ab").mkdir()
    (folder / "figures").mkdir()
    (folder / "notes.txt").write_text("mine")
    return folder


def entry(folder: Path, seed: int) -> registry.RunEntry:
    return next(e for e in registry.find(folder) if f"-seed{seed}-" in e.name)


def test_every_state_with_its_reason(runs: Path) -> None:
    states = {int(e.name.partition("seed")[2].partition("-")[0]): (e.state, e.note) for e in registry.find(runs)}
    assert states[0] == ("complete", "")
    assert states[1] == ("interrupted", "")
    assert states[2][0] == "broken"
    assert "Parquet" in states[2][1]
    assert states[3][0] == "broken"
    assert "JSONDecodeError" in states[3][1]
    assert states[4][0] == "foreign"
    assert "which its name does not say" in states[4][1]
    assert states[5] == ("interrupted", "")
    assert states[8] == ("interrupted", "before its first step")
    assert states[9][0] == "foreign"
    assert "which is not followed" in states[9][1]
    assert len(states) == 8  # the other folder and the file are left alone


def test_an_entry_says_how_far_a_run_is(runs: Path) -> None:
    done, cut = entry(runs, 0), entry(runs, 1)
    assert (done.done, done.steps, done.label, done.seed) == (2, 2, "R3", 0)
    assert done.reward == RunResult.read(done.path).summary["reward_last"]
    assert (cut.done, cut.steps, cut.reward, cut.k3) == (1, 20, 0.5, 1e-3)
    assert done.size == size_of(done.path) > 10_000
    assert list(cut.metrics()["step"]) == [0]
    assert list(registry.run_table([cut])["steps"]) == ["1/20"]


def test_a_running_run_is_seen_and_its_numbers_can_be_read(runs: Path) -> None:
    path = entry(runs, 5).path
    with held_elsewhere(path) as process:
        found = registry.inspect(path)
        assert (found.state, found.done) == ("running", 1)
        assert f"held by process {process} on" in found.note
        with pytest.raises(RunError, match=f"held by process {process} on .*nothing was removed"):
            registry.remove([path])
    assert registry.inspect(path).state == "interrupted"


def test_a_run_is_found_by_any_part_that_is_its_own(runs: Path) -> None:
    name = entry(runs, 1).name
    for given in (name, name[:9], name[-12:], str(runs / name)):
        assert registry.resolve(given, runs).name == name
    with pytest.raises(RunError, match=r"found R3-seed0-.*, R3-seed1-.*, R3-seed2-.*, R3-seed3-.*, R3-seed4-.*, ..."):
        registry.resolve("R3", runs)
    with pytest.raises(RunError, match=r"run 'nothing': expected one run in .*, found none"):
        registry.resolve("nothing", runs)
    with pytest.raises(RunError, match="not there"):
        registry.find(runs / "nowhere")


def test_nothing_is_removed_if_one_of_them_may_not(runs: Path) -> None:
    link, folder, good = runs / "none-seed9-0123456789ab", runs / "figures", entry(runs, 5).path
    with pytest.raises(RunError, match=r"a link to .*nothing was removed"):
        registry.remove([good, link])
    with pytest.raises(RunError, match=r"expected a run folder, found another folder"):
        registry.remove([good, folder])
    with pytest.raises(RunError, match="an incomplete run, which needs its checkpoints"):
        registry.remove([good], checkpoints_only=True)
    assert good.exists()
    assert registry.remove([good], dry=True) == size_of(good)
    assert good.exists()


def test_checkpoints_and_whole_runs_are_removed(tmp_path: Path) -> None:
    done = run_job(JobConfig.build(HF, SMALL), runs_dir=tmp_path, show="none")
    before = size_of(done.path)
    freed = registry.remove([done.path], checkpoints_only=True)
    assert freed > 0
    assert size_of(done.path) == before - freed
    again = run_job(JobConfig.build(HF, SMALL), runs_dir=tmp_path, show="none")  # complete: read, not run
    assert again.summary == done.summary
    assert registry.remove([done.path]) == size_of(done.path) or not done.path.exists()
    assert registry.find(tmp_path) == []


def test_a_folder_of_a_later_schema_is_not_read(tmp_path: Path) -> None:
    store = RunStore(tmp_path, JobConfig(), DIGESTS)
    with store.held():
        pass
    stored = json.loads((store.path / "config.json").read_text())
    assert stored["schema_version"] == SCHEMA_VERSION
    del stored["schema_version"]  # as folders of before have it
    (store.path / "config.json").write_text(json.dumps(stored))
    with store.held():
        pass
    for later in (SCHEMA_VERSION + 1, "2", None):
        (store.path / "config.json").write_text(json.dumps(stored | {"schema_version": later}))
        with pytest.raises(RunError, match=f"expected schema version 1 to {SCHEMA_VERSION}, found"), store.held():
            pass
        assert registry.inspect(store.path).state == "broken"
        (store.path / "summary.json").write_text("{}")
        with pytest.raises(RunError, match="expected schema version"):
            RunResult.read(store.path)
        (store.path / "summary.json").unlink()


def test_a_name_is_checked_against_what_the_folder_computes(tmp_path: Path) -> None:
    store = RunStore(tmp_path, JobConfig(), DIGESTS)
    with store.held():
        pass
    assert registry.inspect(store.path).state == "interrupted"
    assert store.path.name == run_id(JobConfig(), DIGESTS)
    moved = store.path.rename(tmp_path / "R3-seed0-aaaaaaaaaaaa")
    assert registry.inspect(moved).state == "foreign"


def test_what_is_written_is_whole_or_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a", "one")

    def fails(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="no space"):
        write_text(tmp_path / "a", "two")
    assert (tmp_path / "a").read_text() == "one"
    monkeypatch.undo()
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "x").write_text("x")
    commit(tmp_path / "new.partial", tmp_path / "new")
    assert len(synced) == 3  # the file, the folder, and the folder that has its name
    assert (tmp_path / "new" / "x").read_text() == "x"


def test_looking_does_not_disturb_a_start(tmp_path: Path) -> None:
    """Whoever looks holds the lock for a moment; a start waits for that."""
    code = (
        "import sys, pathlib, time; from rar_lib.runs.files import holder\n"
        "end = time.monotonic() + 4\n"
        "print('looking', flush=True)\n"
        "while time.monotonic() < end: holder(pathlib.Path(sys.argv[1]))"
    )
    with locked(tmp_path, "x"):
        assert holder(tmp_path) is not None
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "looking\n"
        for _ in range(300):
            with locked(tmp_path, "x"):
                pass
        other.kill()
    assert holder(tmp_path) is None


def test_sizes_are_said_as_a_person_says_them() -> None:
    assert [human(n) for n in (0, 999, 1000, 1_234_567, 5e9)] == ["0 B", "999 B", "1.0 KB", "1.2 MB", "5.0 GB"]


def test_on_the_command_line(runs: Path) -> None:
    def rar(*arguments: object) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "rar_lib", "runs", *map(str, arguments), "--runs-dir", str(runs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    status, out, _ = rar("list", "--json")
    listed = json.loads(out)
    assert (status, len(listed)) == (0, len(registry.find(runs)))
    name = next(e["name"] for e in listed if e["state"] == "complete")
    _, out, _ = rar("list", "--state", "complete")
    assert name in out
    assert "1 runs, " in out
    _, out, _ = rar("show", name[:8], "--metrics")
    assert pd.read_csv(pd.io.common.StringIO(out))["step"].tolist() == [0, 1]
    _, out, _ = rar("show", name)
    assert f"{name}: complete" in out
    assert "rollout.engine: hf" in out
    _, out, _ = rar("rm", name)
    assert "nothing was removed; --yes removes these" in out
    assert (runs / name).exists()
    status, _, error = rar("rm")
    assert (status, error) == (2, "rar: runs rm: expected at least one run\n")
