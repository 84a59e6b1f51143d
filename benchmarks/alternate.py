"""Ratios on a noisy machine: things run in turn, in one run, and only their ratios are kept.

CPU seconds of the process, not wall time: neighbours on the machine then count for little. The order of a round
is drawn anew, from a fixed seed, so that nobody gains from who went before. A ratio is taken round by round; its median and quartiles
over the rounds are the figure and its spread.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal


def cpu_seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of this process that a call takes."""
    started = time.process_time()
    call()
    return time.process_time() - started


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        name: what was measured.
        base: what it is divided by.
        ratio: median over rounds, or ratio of sums (`totals`).
        low, high: quartiles.
        rounds: how many.
        seconds, base_seconds: medians, CPU seconds unless `note` says otherwise; None where no time was measured.
        goal: limit of the ratio, None where there is none.
        sense: whether the goal is an upper or a lower limit.
        note: what the reader must know.
    """

    name: str
    base: str
    ratio: float
    low: float
    high: float
    rounds: int
    seconds: float | None = None
    base_seconds: float | None = None
    goal: float | None = None
    sense: Literal["at most", "at least"] = "at most"
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the median is within the goal."""
        if self.goal is None:
            return None
        return self.ratio <= self.goal if self.sense == "at most" else self.ratio >= self.goal

    def row(self) -> dict[str, Any]:
        """Plain JSON, `met` included."""
        return asdict(self) | {"met": self.met}


def in_turn(
    things: Mapping[str, Callable[[], Any]],
    rounds: int,
    measure: Callable[[Callable[[], Any]], float] = cpu_seconds,
    warm: int = 1,
) -> dict[str, list[float]]:
    """Seconds of every thing in every round.

    Args:
        things: name to call.
        rounds: counted ones, at least 2.
        measure: seconds of a call.
        warm: uncounted calls of each before.
    """
    names = list(things)
    for name in names:
        for _ in range(warm):
            things[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for order in orders(names, rounds):
        for name in order:
            seconds[name].append(measure(things[name]))
    return seconds


def orders(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Who comes when in each round."""
    drawn = random.Random(0)
    for _ in range(rounds):
        yield drawn.sample(names, len(names))


def figure(name: str, base: str, thing: Sequence[float], of: Sequence[float], **more: Any) -> Figure:
    """The ratio of two lists of seconds, round by round.

    Args:
        name, base: see Figure.
        thing, of: seconds of each round.
        more: other fields of the Figure.
    """
    ratios = [a / b for a, b in zip(thing, of, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Figure(
        name, base, round(middle, 4), round(low, 4), round(high, 4), len(ratios),
        round(statistics.median(thing), 5), round(statistics.median(of), 5), **more,
    )  # fmt: skip


def totals(name: str, base: str, thing: Sequence[float], of: Sequence[float], **more: Any) -> Figure:
    """The ratio of two sums over rounds, where rounds differ by design; quartiles by resampling rounds, in pairs.

    Args:
        name, base: see Figure.
        thing, of: seconds of each round.
        more: other fields of the Figure.
    """
    drawn, places = random.Random(0), range(len(thing))
    ratios = []
    for _ in range(1000):
        some = drawn.choices(places, k=len(thing))
        ratios.append(sum(thing[i] for i in some) / sum(of[i] for i in some))
    low, _, high = statistics.quantiles(ratios, n=4)
    return Figure(
        name, base, round(sum(thing) / sum(of), 4), round(low, 4), round(high, 4), len(thing),
        round(statistics.mean(thing), 5), round(statistics.mean(of), 5), **more,
    )  # fmt: skip


def compare(name: str, base: str, thing: Callable[[], Any], of: Callable[[], Any], rounds: int, **more: Any) -> Figure:
    """Run two things in turn; see `figure`."""
    seconds = in_turn({"thing": thing, "base": of}, rounds)
    return figure(name, base, seconds["thing"], seconds["base"], **more)
