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
from collections.abc import Iterator, Sequence
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


HEAD = """# Benchmarks

Made by `make bench`. Every figure is a ratio of two things that ran in turn in one run: median over rounds, quartiles in brackets. Seconds
are medians, CPU seconds of one thread where the part does not say otherwise; only ratios are meant to hold elsewhere. What misses its goal, and
what departs from linear, is explained in [the README of the benchmarks](../README.md)."""
COLUMNS = ("figure", "against", "ratio", "rounds", "seconds", "against", "goal", "met")
MET = {None: "", True: "yes", False: "**no**"}


def table(found: dict[str, Any]) -> str:
    """The Markdown page."""
    blocks = [HEAD]
    for part, one in found.items():
        blocks += [
            f"## {part}",
            one["about"],
            machine_of(one),
            "\n".join(map(line, (COLUMNS, ["---"] * len(COLUMNS), *rows(one)))),
        ]
    return "\n\n".join(blocks) + "\n"


def machine_of(one: dict[str, Any]) -> str:
    """What a part ran on, in a sentence."""
    where = one["environment"]
    versions = {**where["versions"], **one["more"].get("versions", {})}
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    revision = (where["git_revision"] or "unknown")[:7]
    return f"{where['processor']}, {where['cpus']} CPUs, Python {where['python']}; {told}; revision {revision}."


def rows(one: dict[str, Any]) -> Iterator[list[str]]:
    """The cells of each figure of a part."""
    for f in one["figures"]:
        yield [
            f["name"] + (f" ({f['note']})" if f["note"] else ""),
            f["base"],
            f"{f['ratio']:.3g} [{f['low']:.3g}, {f['high']:.3g}]",
            str(f["rounds"]),
            *("" if f[key] is None else f"{f[key]:.3g}" for key in ("seconds", "base_seconds")),
            "" if f["goal"] is None else f"{f['sense']} {f['goal']:g}",
            MET[f["met"]],
        ]


def line(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    missed = [f"{f['name']} against {f['base']}" for one in found.values() for f in one["figures"] if f["met"] is False]
    print(
        f"{path}\n{options.out / 'bench.md'}\n" + (f"goals missed: {'; '.join(missed)}" if missed else "every goal met")
    )


if __name__ == "__main__":
    main()
