"""What a sweep costs beside its points: process, papermill and kernel of one point, and skipping what is finished.

Wall seconds. A point (process, papermill, kernel, record) against the same code as a script in a fresh interpreter, in turn, every round a new
seed, for a notebook that does nothing and for one that runs a small job; `seconds` and `against` give the difference. A whole `rar sweep` over
100 finished points against `rar --help`. `more` has the peak of a point's kernel on both pairs of engines at the size of the quickstart.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.alternate import Figure, figure, in_turn
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


def overhead(name: str, folder: Path, parameters: str, code: str, rounds: int) -> Figure:
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
    return figure(name, "the same as a script", [a for a, _ in pairs], [b for _, b in pairs])


def skip(folder: Path, count: int, rounds: int) -> Figure:
    """Finished points, looked up and left alone."""
    from rar_lib.runs.grid import Grid, points_of
    from rar_lib.runs.sweep import folder_of

    notebook = write_notebook(folder / "point.ipynb", PARAMETERS, JOB)
    values = {"notebook": str(notebook), "seeds": list(range(count))}
    grid = Grid(name="skip", **values)
    for point in points_of(grid):
        place = folder_of(point, folder)
        place.mkdir(parents=True)
        write_json(place / "record.json", asdict(Record(point.id, "done", seconds=1.0, finished=1.0)))
    path = write_grid(folder / "skip.yaml", **values)
    command = [sys.executable, "-m", "rar_lib", "sweep", str(path), "--runs-dir", str(folder)]
    nothing = [sys.executable, "-m", "rar_lib", "sweep", "--help"]
    things = {
        "sweep": lambda: subprocess.run(command, check=True, capture_output=True),
        "help": lambda: subprocess.run(nothing, check=True, capture_output=True),
    }
    seconds = in_turn(things, rounds, wall)
    return figure(f"sweep of {count} finished points", "its help", seconds["sweep"], seconds["help"])


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


def measure(rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """All figures, and the memory of kernels."""
    found = []
    for name, parameters, code in (
        ("point of a sweep that does nothing", NOTHING, "print(seed)"), ("point of a sweep that runs a small job", PARAMETERS, JOB),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            found.append(overhead(name, Path(folder), parameters, code, max(4, rounds // 2)))
    with tempfile.TemporaryDirectory() as folder:
        found.append(skip(Path(folder), 100, max(4, rounds // 3)))
    with tempfile.TemporaryDirectory() as folder:
        return found, {"memory of a kernel": memory(Path(folder))}
