"""A step of our jobs against a rollout batch of TRL's GRPOTrainer on equal work (trl_job.py spells it out), all in turn.

Ratios are TRL's CPU seconds over ours: above 1, ours is faster. The hf pair samples in fp32 with fused kernels, which are TRL's too, and
with the kernels that are this library's default. `metrics on` is what every run measures: margins and routes of every pass, a forward that
scores the batch under the other replay, the probe, tables. Every tenth step the engines' noise floors come on top, which a median does not show:
`noise floors too` is the ratio of sums over whole tens of steps, its spread by resampling steps. `metrics off` records routes and little else,
`nothing recorded` not even these. The real pair is vLLM in bf16 and Megatron-Core in fp32. The push of weights is a share of wall time.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.alternate import Figure, figure, totals
from benchmarks.workers import ROOT, Worker, answers

TRL = ROOT / ".venv-bench" / "bin" / "python"
WARM = 2  # the first step holds the controls of a run and everybody's first calls
HF = {"engine": "hf", "rollout_dtype": "float32", "precision": "native", "micro_batch_size": 128}
FUSED = HF | {"kernels": "fused"}
REAL = {"engine": "real", "precision": "native", "micro_batch_size": 128}
PUSHED = "vLLM + Megatron-Core, R3, metrics off"
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
GOAL = 1.0  # parity, for the hf pair with everything recorded and measured; hoped for was 1.5
GOAL_OF = ("hf pair, none, metrics on", "hf pair, R3, metrics on")
DIAGNOSED = 1.05  # of a step without metrics
TENS = 10  # steps between two measurements of noise floors


def breakdown(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median share of each part in the wall time of our steps; what no clock of the job covers measures and stores."""
    shares = []
    for row in rows:
        parts = dict(row["parts"])
        parts["measure and store"] = row["wall"] - sum(parts.values())
        shares.append({name: seconds / row["wall"] for name, seconds in parts.items()})
    return {part: round(statistics.median(one[part] for one in shares), 4) for part in shares[0]}


def measure(rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """Figures, the parts of each step, and TRL's versions."""
    workers = {"TRL": Worker("benchmarks.trl_job", json.dumps({"seed": 0}), python=TRL)}
    workers |= {name: Worker("benchmarks.our_job", json.dumps(wanted)) for name, wanted in OURS.items()}
    found = answers(workers, TENS * max(1, round(rounds / TENS)), WARM)
    cpu = {name: [row["cpu"] for row in rows] for name, rows in found.items()}
    figures = []
    for name in OURS:
        goal: dict[str, Any] = {"goal": GOAL, "sense": "at least"} if name in GOAL_OF else {}
        figures.append(figure("TRL's GRPOTrainer", name, cpu["TRL"], cpu[name], **goal))
        if name in GOAL_OF:
            figures.append(totals("TRL's GRPOTrainer, all steps", f"{name}, noise floors too", cpu["TRL"], cpu[name]))
    for name in GOAL_OF:
        without = name.replace("metrics on", "metrics off")
        figures.append(figure(f"step of the {name}", "metrics off", cpu[name], cpu[without], goal=DIAGNOSED))
    pushes = [row["parts"]["sync"] for row in found[PUSHED]]
    figures.append(
        figure("push of weights into vLLM", f"a step of {PUSHED}", pushes, [row["wall"] for row in found[PUSHED]])
    )
    shares = {name: breakdown(found[name]) for name in OURS}
    return figures, {"shares of a step's wall time": shares, "versions": found["TRL"][0]["versions"]}
