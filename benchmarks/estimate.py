"""Is the estimate before a run right? Estimated over actual time, disk and memory, for both pairs of engines.

Each case is a process of its own, several times: it estimates, then runs the same job; wall seconds. The peak of memory while measuring is held
against that of the run.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.alternate import Figure, figure

CASES: dict[str, dict[str, Any]] = {
    "hf R3": {"engine": "hf", "policy": "R3", "steps": 20, "prompts_per_step": 32},
    "hf margin 0.25": {"engine": "hf", "policy": "R3", "routes": "margin", "budget": "0.25", "steps": 20, "prompts_per_step": 32},
    "real R3": {"engine": "real", "policy": "R3", "steps": 10},
}  # fmt: skip


def one(parameters: dict[str, Any]) -> dict[str, float]:
    """Estimate and run one job in this process."""
    from rar_lib.config import JobConfig
    from rar_lib.engines.session import EngineSession
    from rar_lib.estimate import estimate
    from rar_lib.job import run_job

    config = JobConfig.from_flat(**parameters)
    with EngineSession() as session:
        found = estimate(config, session)
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            run = run_job(config, session, runs_dir=Path(folder), show="none")
            seconds = time.perf_counter() - started
            disk = sum(f.stat().st_size for f in run.path.rglob("*") if f.is_file())
    return {
        "estimated_seconds": float(found.seconds.query("part != 'opening the engines'")["in_all"].sum()),
        "actual_seconds": seconds,
        "estimated_disk": found.disk,
        "actual_disk": disk,
        "estimated_peak": float(found.peak or 0),
        "actual_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def measure(rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """Figures of every case; the estimate of a run stands beside what it took."""
    figures = []
    for name in CASES:
        command = [sys.executable, "-m", "benchmarks.estimate", name]
        done = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(max(3, rounds // 5))]
        rows = [json.loads(one.stdout.strip().splitlines()[-1]) for one in done]
        for what in ("seconds", "disk", "peak"):
            estimated, actual = ([row[f"{kind}_{what}"] for row in rows] for kind in ("estimated", "actual"))
            made = figure(f"estimated {what}, {name}", "actual", estimated, actual)
            figures.append(made if what == "seconds" else replace(made, seconds=None, base_seconds=None))
    return figures, {}


if __name__ == "__main__":
    print(json.dumps(one(CASES[sys.argv[1]])))
