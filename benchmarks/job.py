"""A step of our jobs against a rollout batch of TRL's GRPOTrainer on equal work (trl_job.py spells it out), all in turn.

Ratios are TRL's CPU seconds over ours: above 1, ours is faster. The hf pair samples in fp32 with fused kernels, which are TRL's too, and
with the kernels that are this library's default. `metrics on` is what every run measures: margins and routes of every pass, a forward that
scores the batch under the other replay, the probe, tables; every tenth step the engines' noise floors. `metrics off` records routes and
little else, `nothing recorded` not even these. The real pair is vLLM in bf16 and Megatron-Core in fp32, with the parts of its step.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.alternate import Figure, figure
from benchmarks.workers import ROOT, Worker, answers

TRL = ROOT / ".venv-bench" / "bin" / "python"
WARM = 2  # the first step holds the controls of a run and everybody's first calls
HF = {"engine": "hf", "rollout_dtype": "float32", "precision": "native", "micro_batch_size": 128}
FUSED = HF | {"kernels": "fused"}
REAL = {"engine": "real", "precision": "native", "micro_batch_size": 128}
OFF = ["diagnostics.enabled=false"]
OURS: dict[str, dict[str, Any]] = {
    "hf pair, none, metrics on": {"flat": FUSED | {"policy": "none"}},
    "hf pair, R3, metrics on": {"flat": FUSED | {"policy": "R3"}},
    "hf pair, none, metrics off": {"flat": FUSED | {"policy": "none"}, "set": OFF},
    "hf pair, R3, metrics off": {"flat": FUSED | {"policy": "R3"}, "set": OFF},
    "hf pair, none, nothing recorded": {"flat": FUSED | {"policy": "none"}, "set": OFF, "blind": True},
    "hf pair with default kernels, none, metrics on": {"flat": HF | {"policy": "none"}},
    "vLLM + Megatron-Core, R3, metrics on": {"flat": REAL | {"policy": "R3"}},
    "vLLM + Megatron-Core, R3, metrics off": {"flat": REAL | {"policy": "R3"}, "set": OFF},
}
TRL_GOAL = 1.0  # parity with metrics on; what was hoped for is 1.5
NAME = "TRL's GRPOTrainer over {}"


def breakdown(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median share of each part of our steps, by their own clocks (wall)."""
    shares = [{k: v / sum(row["parts"].values()) for k, v in row["parts"].items()} for row in rows]
    return {part: round(statistics.median(one[part] for one in shares), 4) for part in shares[0]}


def measure(rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """Figures, and the parts of each step."""
    workers = {"TRL": Worker("benchmarks.trl_job", json.dumps({"seed": 0}), python=TRL)}
    workers |= {name: Worker("benchmarks.our_job", json.dumps(wanted)) for name, wanted in OURS.items()}
    found = answers(workers, rounds, WARM)
    cpu = {name: [row["cpu"] for row in rows] for name, rows in found.items()}
    figures = []
    for name in OURS:
        goal = {"goal": TRL_GOAL, "sense": "at least"} if name.startswith("hf pair,") and "metrics on" in name else {}
        figures.append(figure(NAME.format("ours"), name, cpu["TRL"], cpu[name], **goal))
    return figures, {name: breakdown(found[name]) for name in OURS}
