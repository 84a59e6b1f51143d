"""How a step grows: experts 8 to 128, layers 2 to 16, prompts 16 to 256, on both pairs, against the smallest of each.

Random Qwen3-MoE of the tiny checkpoint's widths, top-2; a step of a job under R3 with its diagnostics. All
sizes take turns. `parts` has the wall seconds of each part of the step, so that one sees what departs from linear; `exponent` is that of
the time between neighbours: log of the ratio of times over log of the ratio of sizes.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.alternate import Figure, figure
from benchmarks.workers import Worker, answers
from rar_lib.checkpoint import TINY_MOE, build_model, load_tokenizer, resolve_checkpoint, save_checkpoint

AXES: dict[str, tuple[int, ...]] = {
    "experts": (8, 16, 32, 64, 128),
    "layers": (2, 4, 8, 16),
    "prompts": (16, 64, 256),
}
FIELDS = {"experts": "num_experts", "layers": "num_hidden_layers"}
PAIRS = ("hf", "real")
WARM = 2


def checkpoint(folder: Path, axis: str, size: int) -> Path:
    """A random model whose experts or layers are so many; the tiny one for prompts."""
    tokenizer = load_tokenizer(resolve_checkpoint("tiny-moe"))
    path = folder / f"{axis}-{size}"
    if not path.exists():
        with mock.patch.dict(TINY_MOE, {FIELDS[axis]: size} if axis in FIELDS else {}):
            save_checkpoint(build_model(tokenizer, 0), tokenizer, path)
    return path


def worker(folder: Path, pair: str, axis: str, size: int) -> Worker:
    """A job of that size."""
    flat = {
        "engine": pair,
        "policy": "R3",
        "precision": "native",
        **({"prompts_per_step": size} if axis == "prompts" else {}),
    }
    return Worker("benchmarks.our_job", json.dumps({"flat": flat, "model": str(checkpoint(folder, axis, size))}))


def measure(rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """Figures, and for each size its exponent and the seconds of its parts."""
    figures: list[Figure] = []
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for axis, sizes in AXES.items():
            for pair in PAIRS:
                workers = {str(size): worker(folder, pair, axis, size) for size in sizes}
                rows = answers(workers, max(4, rounds // 3), WARM)
                cpu = {size: [row["cpu"] for row in found] for size, found in rows.items()}
                smallest, before = str(sizes[0]), 1.0
                told[f"{sizes[0]} {axis}, {pair}"] = {"parts": parts(rows[smallest])}
                for less, size in itertools.pairwise(sizes):
                    made = figure(f"step, {size} {axis}, {pair}", f"{sizes[0]} {axis}", cpu[str(size)], cpu[smallest])
                    figures.append(made)
                    exponent = math.log(made.ratio / before) / math.log(size / less)
                    told[f"{size} {axis}, {pair}"] = {"exponent": round(exponent, 3), "parts": parts(rows[str(size)])}
                    before = made.ratio
    return figures, told


def parts(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median wall seconds of the parts of a step."""
    for row in rows:
        row["parts"]["measure and store"] = row["wall"] - sum(row["parts"].values())
    return {name: round(statistics.median(row["parts"][name] for row in rows), 4) for name in rows[0]["parts"]}
