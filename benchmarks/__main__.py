"""All benchmarks: one JSON file and one Markdown table, under benchmarks/results.

    python -m benchmarks [PART ...] [--rounds N] [--out FOLDER]

Each part runs in a process of its own, one after another; a part that is not asked for keeps what the files say of it. Run it on a machine that
does nothing else, although ratios forgive a neighbour.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PARTS = ("job", "replay", "rollout", "traces", "growth", "sweep", "estimate")
RESULTS = Path(__file__).resolve().parent / "results"


def run_part(part: str, rounds: int) -> dict[str, Any]:
    """Measure one part in a fresh interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        command = [sys.executable, "-m", "benchmarks", "--one", part, "--rounds", str(rounds), "--out", str(out)]
        started = time.perf_counter()
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=RESULTS.parent.parent)
        return json.loads(out.read_text()) | {"minutes": round((time.perf_counter() - started) / 60, 1)}


def measure(part: str, rounds: int) -> dict[str, Any]:
    """What one part finds, with what it ran on."""
    import torch

    from rar_lib.runs.store import describe_environment

    torch.set_num_threads(1)
    module = importlib.import_module(f"benchmarks.{part}")
    figures, more = module.measure(rounds)
    machine = {"processor": processor(), "cpus": os.cpu_count()}
    about = (module.__doc__ or "").strip()
    return {
        "about": about,
        "figures": [f.row() for f in figures],
        "more": more,
        "environment": describe_environment(0) | machine,
    }


def processor() -> str:
    """Name of the processor, as far as the machine tells."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.machine()


def table(found: dict[str, Any]) -> str:
    """The Markdown page."""
    first = next(iter(found.values()))["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    lines = [
        "# Benchmarks", "",
        "Made by `make bench`; every figure is a ratio of two things that ran in turn in one run: median over rounds, quartiles in brackets. Seconds are CPU "
        "seconds of one thread unless a part says otherwise, and only their ratio is meant to hold elsewhere. What departs from its goal, and why, is in "
        "[README.md](README.md).", "",
        f"Machine: {first['processor']}, {first['cpus']} CPUs, Python {first['python']}; {versions}.",
    ]  # fmt: skip
    for part, one in found.items():
        about = one["about"].split("\n\n")[0].replace("\n", " ")
        lines += [
            "",
            f"## {part}",
            "",
            f"{about} Revision {(one['environment']['git_revision'] or 'unknown')[:7]}.",
            "",
        ]
        lines += [
            "| figure | against | ratio | rounds | seconds | against | goal | met |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for f in one["figures"]:
            goal = "" if f["goal"] is None else f"{f['sense']} {f['goal']:g}"
            seconds = ["" if f[key] is None else f"{f[key]:.3g}" for key in ("seconds", "base_seconds")]
            met = {None: "", True: "yes", False: "**no**"}[f["met"]]
            cells = [
                f["name"],
                f["base"],
                f"{f['ratio']:.3g} [{f['low']:.3g}, {f['high']:.3g}]",
                str(f["rounds"]),
                *seconds,
                goal,
                met,
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"parts: expected some of {', '.join(PARTS)}, found {', '.join(unknown)}")
    if options.one is not None:
        options.out.write_text(json.dumps(measure(options.one, options.rounds)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "bench.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for part in options.parts or PARTS:
        print(f"{part} ...", flush=True)
        found[part] = run_part(part, options.rounds)
        found = {name: found[name] for name in PARTS if name in found}
        path.write_text(json.dumps(found, indent=1) + "\n")
        (options.out / "bench.md").write_text(table(found))
        print(f"{part}: {len(found[part]['figures'])} figures in {found[part]['minutes']} min", flush=True)
    missed = [f["name"] for one in found.values() for f in one["figures"] if f["met"] is False]
    print(
        f"{path}\n{options.out / 'bench.md'}\n" + (f"goals missed: {'; '.join(missed)}" if missed else "every goal met")
    )


if __name__ == "__main__":
    main()
