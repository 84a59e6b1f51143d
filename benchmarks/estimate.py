"""Is the estimate before a run right? Estimated over actual time, memory and disk, for both pairs of engines.

    OMP_NUM_THREADS=1 python -m benchmarks.estimate [--out benchmarks/results/estimate.json]

Each case is a process of its own: it estimates, then runs the same job. `peak_ratio` is the peak while measuring over the peak of the run.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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
    estimated = float(found.seconds.query("part != 'opening the engines'")["in_all"].sum())
    return {
        "estimated_seconds": estimated,
        "actual_seconds": seconds,
        "time_ratio": estimated / seconds,
        "bytes_beside_libraries": float(found.memory["bytes"].sum()),
        "peak_while_measuring": float(found.peak or 0),
        "peak_ratio": float(found.peak or 0) / (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        "disk_ratio": found.disk / disk,
    }


def main() -> None:
    """Run every case in a fresh process, or one in this."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--case", default=None, help="run this one here and print its row")
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(one(CASES[options.case])))
        return
    rows = {}
    for name in CASES:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.estimate", "--case", name], capture_output=True, text=True, check=True
        )
        rows[name] = json.loads(done.stdout.strip().splitlines()[-1])
    text = json.dumps(rows, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
