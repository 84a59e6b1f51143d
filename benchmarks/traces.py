"""Traces of real size: agreement against a copy, the doctor against a plain read, opening a large file, and growth with tokens.

Two traces of 262,144 tokens x 48 layers x top-8 of 128 (uint8, 101 MB each), memory-mapped files of which 3 % of the cells differ and every
row of the second lists its experts in another order. Agreement is the overlap of every cell and all its scalars; the doctor hashes its file. What
has a limit of its own instead of a peer is shown as a share of it: memory that agreement takes above the mapped files (sampled while it runs,
limit 300 MB), and opening a 1 GB file (header, shapes and states, limit 0.1 s). Growth is over 1e5, 1e6 and 1e7 tokens of 4 layers, top-2.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.alternate import Figure, compare, figure, in_turn
from rar_lib.metrics.agreement import agreement
from rar_lib.metrics.load import load_table
from rar_lib.traces.doctor import examine
from rar_lib.traces.layers import ModelShape
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader

TOKENS, LAYERS, TOP_K, EXPERTS, SEQUENCE = 262_144, 48, 8, 128, 4096
LIMITS = {"agreement": 8.0, "megabytes": 300.0, "doctor": 5.0, "open_seconds": 0.1}
SIZES = (100_000, 1_000_000, 10_000_000)


def make(tokens: int, seed: int, layers: int = LAYERS, top_k: int = TOP_K) -> RouteTrace:
    """A sound trace: distinct ids, sequences of SEQUENCE tokens, token ids, one weight version."""
    rng = np.random.default_rng(seed)
    table = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (8192, 1)), axis=1)[:, :top_k]
    experts = table[rng.integers(0, len(table), tokens * layers)].reshape(tokens, layers, top_k)
    offsets = np.append(np.arange(0, tokens, SEQUENCE, dtype=np.int64), tokens)
    status = np.full(tokens, Status.RECORDED, np.uint8)
    status[offsets[1:] - 1] = Status.LAST
    experts[offsets[1:] - 1] = 0
    header = TraceHeader(
        num_experts=EXPERTS, top_k=top_k, moe_layers=tuple(range(layers)), source="rollout", producer="made"
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
    flat = experts.reshape(-1, trace.header.top_k)
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


def of_pair(rounds: int, folder: Path) -> list[Figure]:
    """Agreement and the doctor on the two traces."""
    made = make(TOKENS, 0)
    first, second = made.save(folder / "a.safetensors"), perturbed(made, 0.03, 1).save(folder / "b.safetensors")
    del made
    a, b = RouteTrace.load(first), RouteTrace.load(second)
    memory = [peak_above(lambda: agreement(a, b).scalars()) / LIMITS["megabytes"] for _ in range(3)]
    model = ModelShape(EXPERTS, TOP_K, tuple(range(LAYERS)), LAYERS)
    report = examine(first, model=model)
    assert report.verdicts == (), report
    return [
        compare(
            "agreement of two traces", "copy of their ids", lambda: agreement(a, b).scalars(),
            lambda: (a.experts.copy(), b.experts.copy()), rounds, goal=LIMITS["agreement"],
        ),
        shares("memory of agreement", "300 MB", memory),
        compare("doctor", "read of its file", lambda: examine(first, model=model), first.read_bytes, rounds, goal=LIMITS["doctor"]),
    ]  # fmt: skip


def of_opening(rounds: int, folder: Path) -> Figure:
    """Opening a trace file of 1 GB and knowing its sizes."""
    big = make(10 * TOKENS, 3).save(folder / "big.safetensors")
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        trace = RouteTrace.load(big)
        sizes = (trace.num_tokens, trace.num_sequences, trace.header.num_layers)
        times.append((time.perf_counter() - started) / LIMITS["open_seconds"])
        assert sizes == (10 * TOKENS, 10 * TOKENS // SEQUENCE, LAYERS)
    big.unlink()
    return shares("opening a 1 GB trace", "0.1 s", times)


def shares(name: str, limit: str, values: list[float]) -> Figure:
    """Shares of a limit."""
    low, middle, high = statistics.quantiles(values, n=4)
    return Figure(name, f"limit of {limit}", round(middle, 5), round(low, 5), round(high, 5), len(values), goal=1.0)


def of_growth(rounds: int, folder: Path) -> list[Figure]:
    """What is done with a trace, at three sizes in turn: ten times the tokens against the size before."""
    traces = {n: (make(n, 0, 4, 2), perturbed(make(n, 0, 4, 2), 0.03, 1)) for n in SIZES}
    files = {n: pair[0].save(folder / f"{n}.safetensors") for n, pair in traces.items()}
    model = ModelShape(EXPERTS, 2, tuple(range(4)), 4)
    works: dict[str, Callable[[int], Any]] = {
        "agreement": lambda n: agreement(*traces[n]).scalars(),
        "doctor": lambda n: examine(files[n], model=model),
        "load table": lambda n: load_table(traces[n][0]),
        "save": lambda n: traces[n][0].save(folder / "again.safetensors"),
    }
    found = []
    for name, work in works.items():
        seconds = in_turn({str(n): functools.partial(work, n) for n in SIZES}, max(4, rounds // 3))
        for small, large in itertools.pairwise(SIZES):
            found.append(
                figure(f"{name}, {large:.0e} tokens", f"{small:.0e} tokens", seconds[str(large)], seconds[str(small)])
            )
    return found


def measure(rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """All figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = [*of_pair(rounds, folder), of_opening(rounds, folder), *of_growth(rounds, folder)]
    sizes = {"tokens": TOKENS, "layers": LAYERS, "top_k": TOP_K, "experts": EXPERTS, "sequence": SEQUENCE}
    return figures, {"sizes": sizes, "limits": LIMITS}
