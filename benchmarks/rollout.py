"""Sampling: vLLM in process and the hf sampler against Transformers' `generate`, by batch and precision.

All sample the same prompts at temperature 1, at most 6 tokens, and return the log-prob of each; ours return routes too. `generate` pads on
the left and its log-probs come from its scores. Engines take turns, each in a process of its own. Ratios are `generate`'s seconds over ours: above
1, ours is faster. What a push of weights takes is among the figures of the job.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.alternate import Figure, figure
from benchmarks.workers import Worker, answers
from rar_lib.checkpoint import resolve_checkpoint
from rar_lib.config import JobConfig

SIZES = ("64", "512", "2048")
DTYPES = ("float32", "bfloat16")


def measure(rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """Figures, and samples a CPU second."""
    path, sizes = str(resolve_checkpoint(JobConfig().model.path)), ",".join(SIZES)
    figures, speed = [], {}
    for dtype in DTYPES:
        workers = {
            "vLLM": Worker("benchmarks.vllm_rollouts", path, dtype, "capture", sizes),
            **{
                name: Worker("benchmarks.hf_rollouts", path, dtype, kind, sizes)
                for name, kind in (
                    ("hf, fused kernels", "fused"),
                    ("hf, default kernels", "eager"),
                    ("generate", "generate"),
                )
            },
        }
        rows = answers(workers, rounds, warm=2)
        seconds = {
            name: {size: [row["seconds"][size] for row in found] for size in SIZES} for name, found in rows.items()
        }
        for size in SIZES:
            for name in ("vLLM", "hf, fused kernels", "hf, default kernels"):
                figures.append(
                    figure(f"generate, {size} samples, {dtype}", name, seconds["generate"][size], seconds[name][size])
                )
        speed[dtype] = {
            name: {size: round(int(size) / statistics.median(found[size])) for size in SIZES}
            for name, found in seconds.items()
        }
    return figures, {"samples a CPU second": speed}
