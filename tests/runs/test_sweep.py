"""Sweeps: every ending of a point is a record, a kill at any moment loses nothing, and every executor computes the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from rar_lib.errors import ConfigError, RunError
from rar_lib.runs import sweep as sweeps
from rar_lib.runs.executors import Options, get_executor
from rar_lib.runs.files import locked
from rar_lib.runs.forecast import forecast
from rar_lib.runs.grid import Grid
from rar_lib.runs.point import Record, execute, read_record
from rar_lib.runs.registry import find
from rar_lib.runs.result import RunResult
from rar_lib.runs.sweep import clock, run_sweep, task_of
from tests.runs.holding import held_elsewhere
from tests.runs.notebooks import ENDINGS, JOB, PARAMETERS, write_grid, write_notebook

ENDING = 'ending: str = "fine"\nseed: int = 0\nout_dir: str = ""\n'
RAR = [sys.executable, "-m", "rar_lib"]


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_notebook(tmp_path_factory.mktemp("light") / "light.ipynb", PARAMETERS, JOB)


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_notebook(tmp_path_factory.mktemp("endings") / "endings.ipynb", ENDING, ENDINGS)


def rar(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RAR, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300, **options
    )


# ---------------------------------------------------------------- endings


@pytest.fixture(scope="module")
def ended(
    endings: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, subprocess.CompletedProcess[str]]:
    """A sweep of every ending on two workers; the folder of the last point is taken by a file."""
    folder = tmp_path_factory.mktemp("ended")
    grid = write_grid(
        folder / "night.yaml", notebook=str(endings), grid={"ending": ["raises", "dies", "hangs", "fine"]}, seeds=[0, 1]
    )
    points = [task_of(p, folder) for p in _points(grid)]
    Path(points[-1].folder).parent.mkdir(parents=True)
    Path(points[-1].folder).write_text("in the way")
    return folder, grid, rar("sweep", grid, "--runs-dir", folder, "--workers", 2, "--limit", 20)


def _points(grid: Path) -> list[Any]:
    from rar_lib.runs.grid import points_of

    return points_of(Grid.from_file(grid))


def test_each_ending_is_recorded_and_the_sweep_goes_on(ended: Any) -> None:
    folder, _, done = ended
    assert done.returncode == 1, done.stderr
    table = pd.read_csv(folder / "sweeps" / "night" / "table.csv")
    told = [
        [r["ending"], r["seed"], r["state"], "" if pd.isna(r["cause"]) else r["cause"]]
        for r in table.to_dict("records")
    ]
    assert [row[:3] for row in told] == [
        ["raises", 0, "failed"], ["raises", 1, "failed"], ["dies", 0, "failed"], ["dies", 1, "failed"],
        ["hangs", 0, "failed"], ["hangs", 1, "failed"], ["fine", 0, "done"], ["fine", 1, "failed"],
    ]  # fmt: skip
    for row, cause in zip(told, ["cell 3: ValueError: nothing to learn"] * 2 + ["the kernel died"] * 2
                          + ["exceeded its limit of 20 s, and was ended"] * 2 + ["", "FileExistsError"], strict=True):  # fmt: skip
        assert row[3].startswith(cause), row
    assert "1 done, 7 failed; 8 executed now" in done.stdout
    assert "nothing to learn" in done.stderr
    failed = next(p.parent for p in (folder / "points").glob("*/record.json") if "nothing to learn" in p.read_text())
    notebook = json.loads((failed / "notebook.ipynb").read_text())
    assert any(o["output_type"] == "error" for c in notebook["cells"] if c["cell_type"] == "code" for o in c["outputs"])


def test_what_ended_is_skipped_and_failures_are_retried_when_asked(ended: Any) -> None:
    folder, grid, _ = ended
    again = rar("sweep", grid, "--runs-dir", folder, "--limit", 20)
    assert again.returncode == 1
    assert "1 done, 7 failed; 1 executed now" in again.stdout  # the one whose folder could not be written has no record
    shrunk = write_grid(
        folder / "retried.yaml",
        notebook=Grid.from_file(grid).notebook,
        grid={"ending": ["raises", "fine"]},
        seeds=[0, 1],
    )
    (folder / "points" / task_of(_points(shrunk)[-1], folder).id).unlink()
    retried = rar("sweep", shrunk, "--runs-dir", folder, "--retry")
    assert retried.returncode == 1
    assert "2 done, 2 failed; 3 executed now" in retried.stdout


def test_a_read_only_folder_is_a_cause_like_any_other(endings: Path, tmp_path: Path) -> None:
    """As another user where this one may write anything; the next point is executed as this one again."""
    code = (
        "import json, os, sys; from rar_lib.runs.point import Task, execute; from dataclasses import asdict\n"
        "first, second = (Task(**t) for t in json.load(sys.stdin)); me = os.geteuid()\n"
        "if me == 0: os.seteuid(65534)\n"
        "records = [execute(first)]\n"
        "os.seteuid(me)\n"
        "print(json.dumps([asdict(r) for r in [*records, execute(second)]]))"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        tasks = [
            task_of(p, folder) for p in _points(write_grid(tmp_path / "g.yaml", notebook=str(endings), seeds=[0, 1]))
        ]
        Path(tasks[0].folder).mkdir(parents=True)
        Path(tasks[0].folder).chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps([vars(t) for t in tasks]),
            capture_output=True,
            text=True,
            check=True,
        )
        Path(tasks[0].folder).chmod(0o755)
    first, second = json.loads(done.stdout)
    assert (first["state"], first["cause"][:15]) == ("failed", "PermissionError")
    assert (second["state"], second["cause"]) == ("done", "")


def test_a_record_that_cannot_be_read_is_reported_and_replaced_on_retry(endings: Path, tmp_path: Path) -> None:
    grid = Grid(name="g", notebook=str(endings))
    (point,) = run_sweep(grid, runs_dir=tmp_path, executor="serial").points
    record = tmp_path / "points" / point.id / "record.json"
    record.write_text("{")
    broken = run_sweep(grid, runs_dir=tmp_path, executor="serial")
    assert broken.ran == set()
    assert "record.json cannot be read" in broken.records[point.id].cause
    mended = run_sweep(grid, runs_dir=tmp_path, executor="serial", retry=True)
    assert (mended.ran, mended.count("done")) == ({point.id}, 1)


def test_a_sweep_and_a_point_say_who_holds_them(endings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(name="g", notebook=str(endings))
    for folder, held in ((tmp_path / "sweeps" / "g", "sweep"), (None, "point")):
        (point,) = _points(write_grid(tmp_path / "g.yaml", notebook=str(endings)))
        folder = folder or tmp_path / "points" / point.id
        folder.mkdir(parents=True, exist_ok=True)
        with held_elsewhere(folder) as process:
            if held == "sweep":
                with pytest.raises(RunError, match=f"held by process {process} on"):
                    run_sweep(grid, runs_dir=tmp_path, executor="serial")
            else:
                monkeypatch.setattr("rar_lib.runs.point.PATIENCE", 0.1)
                record = run_sweep(grid, runs_dir=tmp_path, executor="serial").records[point.id]
                assert f"held by process {process} on" in record.cause
    assert run_sweep(grid, runs_dir=tmp_path, executor="serial").count("done") == 1


def one(folder: Path, *code: str, **values: Any) -> Record:
    """The record of one point of some code."""
    notebook = write_notebook(folder / "one.ipynb", 'out_dir: str = ""\nx: int = 0\n', *code)
    (point,) = run_sweep(
        Grid(name="one", notebook=str(notebook), base=values), runs_dir=folder, executor="serial", retry=True
    ).points
    record = read_record(folder / "points" / point.id)
    assert record is not None
    return record


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("open(out_dir + '/policies.csv', 'w').close()", "out/policies.csv cannot be read: No columns"),
        ("open(out_dir + '/policies.csv', 'wb').write(b'run\\n\\xff')", "out/policies.csv cannot be read: "),
        (
            "open(out_dir + '/policies.csv', 'w').write('run,a\\n,1\\n')",
            "out/policies.csv: expected the name of a run in every row",
        ),
        ("import sys; sys.exit(0)", "1 cells were not executed: the kernel was left early"),
    ],
)
def test_whatever_a_notebook_does_is_a_record(code: str, cause: str, tmp_path: Path) -> None:
    record = one(tmp_path, code, "1 + 1")
    assert (record.state, record.cause[: len(cause)]) == ("failed", cause)


def test_a_retry_starts_from_nothing(tmp_path: Path) -> None:
    notebook = write_notebook(
        tmp_path / "one.ipynb", 'out_dir: str = ""\n',
        "import pathlib\nout = pathlib.Path(out_dir)\nflag = out.parent.parent.parent / 'flag'\n"
        "print(sorted(p.name for p in out.parent.iterdir()))\n"
        "if not flag.exists():\n    flag.touch(); (out / 'policies.csv').write_text('run\\nOLD\\n'); raise ValueError('once')",
    )  # fmt: skip
    grid = Grid(name="one", notebook=str(notebook))
    assert run_sweep(grid, runs_dir=tmp_path, executor="serial").count("failed") == 1
    again = run_sweep(grid, runs_dir=tmp_path, executor="serial", retry=True)
    (record,) = again.records.values()
    assert (record.state, record.runs) == ("done", ())


def test_what_a_kernel_started_ends_with_the_point(tmp_path: Path) -> None:
    """Also when the kernel is killed for its time."""
    child = "import subprocess, time\np = subprocess.Popen(['sleep', '300'])\nopen(out_dir + '/pid', 'w').write(str(p.pid))\n"
    notebook = write_notebook(
        tmp_path / "child.ipynb", 'out_dir: str = ""\nwait: int = 0\n', child + "time.sleep(wait)"
    )
    grid = Grid(name="child", notebook=str(notebook), grid={"wait": [0, 300]})
    sweep = run_sweep(grid, runs_dir=tmp_path, executor="serial", limit=4)
    assert [r.state for r in sweep.records.values()] == ["done", "failed"]
    for file in tmp_path.glob("points/*/out/pid"):
        assert (
            not psutil.pid_exists(int(file.read_text()))
            or psutil.Process(int(file.read_text())).status() == psutil.STATUS_ZOMBIE
        )


def test_a_kernel_ends_with_the_process_that_executes_it(tmp_path: Path) -> None:
    """Also one that never lets its other threads run; the next sweep then takes the point up at once."""
    busy = write_notebook(tmp_path / "busy.ipynb", 'out_dir: str = ""\n', "print('go')", "sum(range(4 * 10**9))")
    grid = write_grid(tmp_path / "busy.yaml", notebook=str(busy))
    with subprocess.Popen(
        [*RAR, "sweep", grid, "--runs-dir", tmp_path, "--executor", "serial"], stderr=subprocess.DEVNULL
    ) as sweep:
        end = time.monotonic() + 60
        while not kernels(tmp_path) and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(3)
        (kernel,) = kernels(tmp_path)
        sweep.kill()
    gone, alive = psutil.wait_procs([kernel], timeout=5)
    assert (len(gone), alive) == (1, [])


def test_a_done_point_whose_run_is_gone_is_executed_again(light: Path, tmp_path: Path) -> None:
    import shutil

    grid = Grid(name="g", notebook=str(light), base={"policy": "none", "steps": 1})
    first = run_sweep(grid, runs_dir=tmp_path, executor="serial")
    (run,) = first.runs()
    assert run_sweep(grid, runs_dir=tmp_path, executor="serial").ran == set()
    shutil.rmtree(tmp_path / run)
    dry = forecast(grid, tmp_path, Options(workers=1), measure=False)
    assert "1 of 1 points to run" in str(dry)
    again = run_sweep(grid, runs_dir=tmp_path, executor="serial")
    assert (len(again.ran), again.count("done")) == (1, 1)
    assert (tmp_path / run / "summary.json").exists()
    assert "none of 1 points to run" in str(forecast(grid, tmp_path, Options(workers=1)))


def test_a_run_that_goes_while_the_sweep_runs_leaves_its_point(light: Path, tmp_path: Path) -> None:
    import shutil

    grid = Grid(name="g", notebook=str(light), base={"policy": "none", "steps": 1}, seeds=[0, 1])

    def removes(tasks: Any, options: Options) -> Any:
        for task in tasks:
            record = execute(task)
            if task is tasks[0]:
                shutil.rmtree(tmp_path / record.runs[0])
            yield task, record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, "get_executor", lambda name: removes)
        sweep = run_sweep(grid, runs_dir=tmp_path)
    assert (sweep.count("done"), len(sweep.records)) == (1, 1)
    assert pd.read_csv(tmp_path / "sweeps" / "g" / "table.csv")["state"].tolist() == ["left", "done"]


def test_a_dry_run_says_what_does_not_fit(endings: Path, tmp_path: Path) -> None:
    told = str(forecast(Grid(notebook=str(endings), seeds=[0, 1]), tmp_path, Options(memory=10**8)))
    assert "2 of them need more memory than may be taken (100.0 MB)" in told


def test_points_of_one_run_wait_for_each_other(tmp_path: Path) -> None:
    own = write_notebook(tmp_path / "own.ipynb", PARAMETERS + "mine: int = 0\n", JOB)
    grid = Grid(name="own", notebook=str(own), base={"policy": "none", "steps": 1}, grid={"mine": [1, 2]})
    sweep = run_sweep(grid, runs_dir=tmp_path, executor="pool", options=Options(workers=2))
    assert [r.cause for r in sweep.records.values()] == ["", ""]
    assert len(sweep.runs()) == 1


def test_a_table_that_cannot_be_written_does_not_end_the_sweep(
    endings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, real, calls = Grid(name="g", notebook=str(endings), seeds=[0, 1, 2]), sweeps.write_json, [0]

    def sometimes(path: Path, value: Any) -> None:
        calls[0] += path.name == "status.json"
        if path.name == "status.json" and calls[0] == 2:
            raise OSError(28, "No space left on device")
        real(path, value)

    monkeypatch.setattr(sweeps, "write_json", sometimes)
    assert run_sweep(grid, runs_dir=tmp_path, executor="serial").count("done") == 3
    assert [p["state"] for p in json.loads((tmp_path / "sweeps" / "g" / "status.json").read_text())["points"]] == [
        "done"
    ] * 3


def test_a_worker_that_is_killed_leaves_a_record(endings: Path, tmp_path: Path) -> None:
    (point,) = _points(write_grid(tmp_path / "g.yaml", notebook=str(endings), grid={"ending": ["hangs"]}))

    def kill(task: Any) -> None:
        def later() -> None:
            end = time.monotonic() + 60
            while not (found := kernels(tmp_path)) and time.monotonic() < end:
                time.sleep(0.1)
            os.kill(found[0].ppid(), signal.SIGKILL)

        threading.Thread(target=later, daemon=True).start()

    ((_, record),) = get_executor("pool")([task_of(point, tmp_path)], Options(workers=1, told=kill))
    assert record.cause.startswith("the process that executed it was killed")
    assert read_record(tmp_path / "points" / point.id) == record
    assert kernels(tmp_path) == []


def test_a_foreign_record_is_not_believed(endings: Path, tmp_path: Path) -> None:
    (point,) = _points(write_grid(tmp_path / "g.yaml", notebook=str(endings)))
    folder = Path(task_of(point, tmp_path).folder)
    folder.mkdir(parents=True)
    for values in ({"id": "other", "state": "done"}, {"id": point.id, "state": "running"}, {"id": point.id}):
        (folder / "record.json").write_text(json.dumps({"schema_version": 1, "cause": "", "runs": [], **values}))
        with pytest.raises(RunError, match=r"record.json cannot be read"):
            read_record(folder)


# ---------------------------------------------------------------- memory, interruption


def test_no_more_points_at_a_time_than_fit(endings: Path, tmp_path: Path) -> None:
    sizes = [4, 3, 3, 20, 5]
    tasks = [
        replace(task_of(p, tmp_path), memory=size * 10**9)
        for p, size in zip(
            _points(write_grid(tmp_path / "g.yaml", notebook=str(endings), seeds=list(range(5)))), sizes, strict=True
        )
    ]
    running, most, taken = set(), 0, 0

    def told(task: Any) -> None:
        nonlocal most, taken
        running.add(task.id)
        most = max(most, len(running))
        taken = max(taken, sum(t.memory for t in tasks if t.id in running))

    causes = {}
    for task, record in get_executor("pool")(tasks, Options(workers=4, memory=10 * 10**9, told=told)):
        running.discard(task.id)
        causes[task.memory // 10**9] = record.cause
    assert (most, taken) == (3, 10 * 10**9)
    assert causes[20] == "not started: it needs about 20.0 GB of memory, and 10.0 GB may be taken"
    assert [cause for size, cause in causes.items() if size != 20] == ["", "", ""]


def kernels(folder: Path) -> list[psutil.Process]:
    """Kernels that write into a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if "ipykernel_launcher" in " ".join(process.cmdline()) and str(folder) in " ".join(
                f.path for f in process.open_files()
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    ("executor", "by"), [("pool", signal.SIGINT), ("serial", signal.SIGINT), ("pool", signal.SIGTERM)]
)
def test_ctrl_c_ends_every_kernel_and_says_how_to_go_on(executor: str, by: int, endings: Path, tmp_path: Path) -> None:
    grid = write_grid(tmp_path / "g.yaml", notebook=str(endings), grid={"ending": ["hangs"]}, seeds=[0, 1, 2])
    with subprocess.Popen(
        [*RAR, "sweep", grid, "--runs-dir", tmp_path, "--workers", "2", "--executor", executor],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as sweep:  # fmt: skip
        end = time.monotonic() + 60
        while len(kernels(tmp_path)) < (2 if executor == "pool" else 1) and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(1)
        os.killpg(sweep.pid, by)  # as a terminal does: the whole group
        _, error = sweep.communicate(timeout=30)
    assert sweep.returncode == 130, error
    assert "start it again to continue" in error
    assert kernels(tmp_path) == []
    assert list((tmp_path / "points").glob("*/record.json")) == []


def test_a_sweep_that_is_killed_three_times_completes_without_repeating(light: Path, tmp_path: Path) -> None:
    """24 points of real runs on two workers; kill -9 of the sweep at random moments."""
    grid = write_grid(
        tmp_path / "night.yaml", notebook=str(light), arms={"none": {"policy": "none"}, "R3": {"policy": "R3"},
        "margin": {"policy": "R3", "routes": "margin", "budget": 0.25}}, grid={"lr": [1e-4, 3e-4]}, seeds=[0, 1, 2, 3],
    )  # fmt: skip
    command = [*RAR, "sweep", str(grid), "--runs-dir", str(tmp_path), "--workers", "2"]
    moments = random.Random(7)
    finished: dict[Path, tuple[int, int]] = {}
    for _ in range(3):
        before = len(list(tmp_path.glob("points/*/record.json")))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as sweep:
            while sweep.poll() is None and len(list(tmp_path.glob("points/*/record.json"))) < before + 2:
                time.sleep(0.05)
            time.sleep(moments.uniform(0, 8))
            assert sweep.poll() is None, "it ended before it was killed"
            sweep.kill()
        for summary in tmp_path.glob("*/summary.json"):
            stat = summary.stat()
            was = finished.setdefault(summary, (stat.st_ino, stat.st_mtime_ns))
            assert was == (stat.st_ino, stat.st_mtime_ns)
    assert 6 <= len(finished) < 24
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    for summary, was in finished.items():
        assert (summary.stat().st_ino, summary.stat().st_mtime_ns) == was, "a finished run ran again"
    entries = find(tmp_path)
    assert [(e.state, e.done) for e in entries] == [("complete", 2)] * 24
    records = [read_record(p) for p in (tmp_path / "points").iterdir()]
    assert [r.state for r in records if r is not None] == ["done"] * 24
    assert sorted(run for r in records if r is not None for run in r.runs) == sorted(e.name for e in entries)
    assert list(tmp_path.rglob("*.partial*")) == []
    assert [len(RunResult.read(e.path).metrics) for e in entries] == [2] * 24
    table = pd.read_csv(tmp_path / "sweeps" / "night" / "table.csv")
    assert table["reward_last"].notna().all()


# ---------------------------------------------------------------- executors


def outcome(runs_dir: Path) -> dict[str, pd.DataFrame]:
    """The metrics table of every run without its times."""
    tables = {}
    for entry in find(runs_dir):
        assert entry.state == "complete"
        metrics = entry.metrics()
        tables[entry.name] = metrics[[c for c in metrics if not str(c).startswith("time/")]]
    return tables


def test_one_by_one_pool_and_two_ray_nodes_compute_the_same(
    light: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    grid = Grid(name="g", notebook=str(light), arms={"none": {"policy": "none"}, "R3": {"policy": "R3"}}, seeds=[0, 1])
    tables = {}
    for executor in ("serial", "pool"):
        sweep = run_sweep(grid, runs_dir=tmp_path / executor, executor=executor, options=Options(workers=2))
        assert sweep.count("done") == 4, sweep.records
        tables[executor] = outcome(tmp_path / executor)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
        sweep = run_sweep(grid, runs_dir=tmp_path / "ray", executor="ray")
        assert sweep.count("done") == 4, sweep.records
    finally:
        ray.shutdown()
        cluster.shutdown()
    tables["ray"] = outcome(tmp_path / "ray")
    assert len(tables["serial"]) == 4
    for executor in ("pool", "ray"):
        assert tables[executor].keys() == tables["serial"].keys()
        for run, table in tables["serial"].items():
            pd.testing.assert_frame_equal(tables[executor][run], table, check_exact=True)


def test_an_unknown_executor_and_a_wrong_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of serial, pool, ray, found 'slurm'"):
        get_executor("slurm")
    done = rar("sweep", write_grid(tmp_path / "g.yaml", seeds=[0]), "--workers", 0)
    assert (done.returncode, done.stderr.strip()) == (2, "rar: workers: expected a number above 0, found 0")


def test_a_point_that_has_ended_is_not_executed_again(endings: Path, tmp_path: Path) -> None:
    (point,) = _points(write_grid(tmp_path / "g.yaml", notebook=str(endings)))
    task = task_of(point, tmp_path)
    first = execute(task)
    assert (first.state, first.runs) == ("done", ())
    assert first.peak is not None
    assert execute(task) == first
    assert read_record(Path(task.folder)) == first


def test_durations_are_said_as_a_person_says_them() -> None:
    assert [clock(s) for s in (5, 99, 130, 5399, 9000)] == ["5 s", "99 s", "2 min", "90 min", "2.5 h"]


def test_a_lock_is_free_again_when_its_holder_is_gone(tmp_path: Path) -> None:
    with locked(tmp_path, "x"):
        pass
    with locked(tmp_path, "x", 0):
        pass
    assert Record("x", "done").cause == ""
