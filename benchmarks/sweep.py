"""What a sweep costs beside its points: papermill and kernel of one point, and skipping what is finished.

    OMP_NUM_THREADS=1 python -m benchmarks.sweep [--out benchmarks/results/sweep.json]

`overhead`: wall seconds of a point (process, papermill, kernel, record) less those of the same code as a script in a fresh interpreter,
in turn, for a notebook that does nothing and for one that runs a small job. `skip`: run_sweep over 100 points that have records, and the
whole command with its imports. `memory`: peak of a point's kernel on both pairs of engines at the size of the quickstart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rar_lib.runs.executors import Options, pool
from rar_lib.runs.files import write_json
from rar_lib.runs.point import Record
from tests.runs.notebooks import JOB, PARAMETERS, write_grid, write_notebook

NOTHING = 'out_dir: str = ""\nruns_dir: str = ""\nseed: int = 0\n'


def wall(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def overhead(folder: Path, parameters: str, code: str, rounds: int) -> dict[str, Any]:
    """Point against script, in turn; every round is a new seed, so that nothing is reused."""
    from rar_lib.runs.grid import Grid, points_of  # not above: processes of the pool import this file
    from rar_lib.runs.sweep import task_of

    notebook = write_notebook(folder / "point.ipynb", parameters, code)
    tasks = [
        task_of(p, folder / "points") for p in points_of(Grid(notebook=str(notebook), seeds=list(range(rounds + 1))))
    ]
    scripts = folder / "scripts"
    scripts.mkdir()
    pairs = []
    for number, task in enumerate(tasks):
        script = scripts / f"{number}.py"
        own = f"seed = {number}\nruns_dir = {str(scripts)!r}\nout_dir = {str(scripts)!r}\n"
        script.write_text(f"{parameters}\n{own}{code}")
        as_point = wall(lambda task=task: list(pool([task], Options(workers=1))))
        as_script = wall(
            lambda script=script: subprocess.run([sys.executable, script], check=True, capture_output=True)
        )
        if number:  # the first warms the server and the caches
            pairs.append((as_point, as_script))
    more = sorted(a - b for a, b in pairs)
    return {
        "seconds_more_a_point": round(statistics.median(more), 3),
        "quartiles": [round(q, 3) for q in (statistics.quantiles(more, n=4)[0], statistics.quantiles(more, n=4)[2])],
        "point": round(statistics.median(a for a, _ in pairs), 3),
        "script": round(statistics.median(b for _, b in pairs), 3),
        "rounds": rounds,
    }


def skip(folder: Path, count: int) -> dict[str, Any]:
    """Finished points, looked up and left alone."""
    from rar_lib.runs.grid import Grid, points_of
    from rar_lib.runs.sweep import folder_of, run_sweep

    notebook = write_notebook(folder / "point.ipynb", PARAMETERS, JOB)
    values = {"notebook": str(notebook), "seeds": list(range(count))}
    grid = Grid(name="skip", **values)
    for point in points_of(grid):
        place = folder_of(point, folder)
        place.mkdir(parents=True)
        write_json(place / "record.json", asdict(Record(point.id, "done", seconds=1.0, finished=1.0)))
    times = []
    for _ in range(5):
        times.append(wall(lambda: run_sweep(grid, runs_dir=folder)))
    path = write_grid(folder / "skip.yaml", **values)
    command = [sys.executable, "-m", "rar_lib", "sweep", str(path), "--runs-dir", str(folder)]
    whole = [wall(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(3)]
    return {
        "points": count,
        "seconds": round(statistics.median(times), 3),
        "whole_command": round(statistics.median(whole), 3),
    }


def memory(folder: Path) -> dict[str, Any]:
    """Peak of the kernel of a point of 07_policies at the quickstart's size."""
    from rar_lib.runs.grid import Grid, points_of
    from rar_lib.runs.sweep import task_of

    found = {}
    for engine in ("hf", "real"):
        (point,) = points_of(Grid(base={"engine": engine, "steps": 3}))
        task = task_of(point, folder)
        ((_, record),) = pool([task], Options(workers=1))
        assert record.peak is not None, record
        found[engine] = {"peak_bytes": record.peak, "estimated_bytes": task.memory, "seconds": round(record.seconds, 1)}
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name, make in {
        "overhead, nothing to do": lambda f: overhead(f, NOTHING, "print(seed)", options.rounds),
        "overhead, a small job": lambda f: overhead(f, PARAMETERS, JOB, options.rounds),
        "skip": lambda f: skip(f, 100),
        "memory": memory,
    }.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = make(Path(folder))
        print(name, json.dumps(found[name]), flush=True)
    if options.out is not None:
        from rar_lib.runs.store import describe_environment

        write_json(options.out, {"environment": describe_environment(0), **found})


if __name__ == "__main__":
    main()
