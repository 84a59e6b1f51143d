"""Traces of real size, as ratios: agreement against a copy, the doctor against a plain read, opening a large file.

    OMP_NUM_THREADS=1 python -m benchmarks.traces [--out FILE] [--rounds N]

Two traces of 262,144 tokens x 48 layers x top-8 of 128 (uint8, 101 MB each), memory-mapped files of which 3 % of the cells differ and every
row of the second lists its experts in another order. Everything runs in one process, in turn:
- agreement (overlap of every cell and all its scalars) against a copy of both id arrays; limit 8. Memory that it takes above the mapped
  files, sampled while it runs; limit 300 MB.
- the doctor on one file, hash included, against reading that file into memory; limit 5.
- opening a 1 GB file: header, shapes and states, seconds; limit 0.1.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.alternate import compare
from rar_lib.metrics.agreement import agreement
from rar_lib.runs.store import describe_environment
from rar_lib.traces.doctor import examine
from rar_lib.traces.layers import ModelShape
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader

TOKENS, LAYERS, TOP_K, EXPERTS, SEQUENCE = 262_144, 48, 8, 128, 4096
LIMITS = {"agreement": 8.0, "agreement_megabytes": 300.0, "doctor": 5.0, "open_seconds": 0.1}


def make(tokens: int, seed: int) -> RouteTrace:
    """A sound trace: distinct ids, sequences of SEQUENCE tokens, token ids, one weight version."""
    rng = np.random.default_rng(seed)
    table = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (8192, 1)), axis=1)[:, :TOP_K]
    experts = table[rng.integers(0, len(table), tokens * LAYERS)].reshape(tokens, LAYERS, TOP_K)
    offsets = np.arange(0, tokens + 1, SEQUENCE, dtype=np.int64)
    status = np.full(tokens, Status.RECORDED, np.uint8)
    status[offsets[1:] - 1] = Status.LAST
    experts[offsets[1:] - 1] = 0
    header = TraceHeader(
        num_experts=EXPERTS, top_k=TOP_K, moe_layers=tuple(range(LAYERS)), source="rollout", producer="made"
    )
    return RouteTrace(
        header,
        experts,
        offsets,
        status,
        token_ids=rng.integers(0, 150_000, tokens),
        policy_version=np.zeros(tokens, np.int64),
    )


def perturbed(trace: RouteTrace, share: float, seed: int) -> RouteTrace:
    """Another set in a share of the cells, and another slot order everywhere."""
    rng = np.random.default_rng(seed)
    experts = np.ascontiguousarray(trace.experts[..., ::-1])
    flat = experts.reshape(-1, TOP_K)
    flips = np.flatnonzero(rng.random(len(flat)) < share)
    flat[flips] = (flat[flips] + rng.integers(1, EXPERTS, (len(flips), 1))) % EXPERTS
    experts[trace.status == Status.LAST] = 0
    return replace(
        trace, experts=experts, header=trace.header.model_copy(update={"source": "old", "producer": "other"})
    )


def anonymous() -> float:
    """MB of memory of this process that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def peak_above(call: Callable[[], Any]) -> float:
    """MB of file-less memory that a call takes at its highest, sampled every two milliseconds."""
    seen, running = [anonymous()], True

    def watch() -> None:
        while running:
            seen.append(anonymous())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        kept = call()  # what it returns counts too
        seen.append(anonymous())
        del kept
    finally:
        running = False
        thread.join()
    return max(seen) - seen[0]


def measure_pair(rounds: int, folder: Path) -> dict[str, Any]:
    """Agreement and the doctor on the two traces."""
    made = make(TOKENS, 0)
    first, second = made.save(folder / "a.safetensors"), perturbed(made, 0.03, 1).save(folder / "b.safetensors")
    del made
    a, b = RouteTrace.load(first), RouteTrace.load(second)
    memory = peak_above(lambda: agreement(a, b).scalars())  # before anything else has grown the heap
    model = ModelShape(EXPERTS, TOP_K, tuple(range(LAYERS)), LAYERS)
    report = examine(first, model=model)
    assert report.verdicts == (), report
    flips = agreement(a, b).scalars()["router_flip"]
    return {
        "sizes": {"tokens": TOKENS, "layers": LAYERS, "top_k": TOP_K, "experts": EXPERTS, "bytes": a.experts.nbytes, "router_flip": flips},
        "limits": LIMITS,
        "agreement": compare(lambda: agreement(a, b).scalars(), lambda: (a.experts.copy(), b.experts.copy()), rounds),
        "agreement_megabytes": round(memory, 1),
        "doctor": compare(lambda: examine(first, model=model), first.read_bytes, rounds),
    }  # fmt: skip


def measure_open(rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds to open a trace file of 1 GB and know its sizes."""
    big = make(10 * TOKENS, 3).save(folder / "big.safetensors")
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        trace = RouteTrace.load(big)
        sizes = (trace.num_tokens, trace.num_sequences, trace.header.num_layers)
        times.append(time.perf_counter() - started)
        assert sizes == (10 * TOKENS, 10 * TOKENS // SEQUENCE, LAYERS)
    return {"bytes": big.stat().st_size, "seconds": round(float(np.median(times)), 5), "slowest": round(max(times), 5)}


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {
            **measure_pair(options.rounds, Path(folder)),
            "open": measure_open(options.rounds, Path(folder)),
            "environment": describe_environment(0),
        }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
