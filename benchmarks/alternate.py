"""Ratios on a noisy machine: two things run in turn, in one process, and only their ratio is kept.

CPU seconds of the process, not wall time: neighbours on the machine then count for little. The order within a round
changes from round to round, so that whoever goes second gains nothing from warm caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def cpu_seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of this process that a call takes."""
    started = time.process_time()
    call()
    return time.process_time() - started


def summary(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Of (seconds of the thing, seconds of its base): the median ratio over rounds, its quartiles, and both medians."""
    ratios = sorted(a / b for a, b in pairs)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)], "rounds": len(pairs),
        "ratio_of_fastest": round(min(a for a, _ in pairs) / min(b for _, b in pairs), 4),
        "seconds": round(statistics.median(a for a, _ in pairs), 5),
        "base_seconds": round(statistics.median(b for _, b in pairs), 5),
    }  # fmt: skip


def compare(
    thing: Callable[[], Any],
    base: Callable[[], Any],
    rounds: int,
    measure: Callable[[Callable[[], Any]], float] = cpu_seconds,
) -> dict[str, Any]:
    """Run both in turn, `rounds` times after one warm-up each."""
    thing()
    base()
    pairs = []
    for number in range(rounds):
        if number % 2:
            second = measure(base)
            first = measure(thing)
        else:
            first = measure(thing)
            second = measure(base)
        pairs.append((first, second))
    return summary(pairs)
