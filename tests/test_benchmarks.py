"""What the benchmarks' figures are made of; nothing is timed here."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.__main__ import PARTS, RESULTS, table
from benchmarks.alternate import Figure, figure, in_turn, totals
from benchmarks.workers import Worker, answers


def test_a_ratio_is_taken_round_by_round() -> None:
    made = figure("a", "b", [2.0, 4.0, 3.0, 8.0, 10.0], [1.0, 4.0, 1.0, 4.0, 2.5], goal=2.0)
    assert (made.ratio, made.low, made.high, made.rounds) == (2.0, 1.5, 3.5, 5)  # of 1, 2, 2, 3, 4
    assert (made.seconds, made.base_seconds) == (4.0, 2.5)
    assert made.met is True
    assert figure("a", "b", [3.0, 3.0], [1.0, 1.0], goal=2.0).met is False
    assert figure("a", "b", [3.0, 3.0], [1.0, 1.0], goal=2.0, sense="at least").met is True
    assert figure("a", "b", [3.0, 3.0], [1.0, 1.0]).met is None


def test_things_run_in_turn_and_nobody_is_always_first() -> None:
    ran: list[str] = []

    def measure(call: Callable[[], Any]) -> float:
        call()
        return float(len(ran))

    seconds = in_turn({name: lambda name=name: ran.append(name) for name in "abc"}, 40, measure)  # type: ignore[misc]
    rounds = ["".join(ran[i : i + 3]) for i in range(3, len(ran), 3)]
    assert all(sorted(one) == list("abc") for one in rounds)
    assert {one[0] for one in rounds} == {one[-1] for one in rounds} == set("abc")
    assert seconds["a"] == [4.0 + 3 * n + one.index("a") for n, one in enumerate(rounds)]


def test_sums_count_what_a_median_passes_over() -> None:
    ours = [1.0] * 9 + [11.0]
    made = totals("a", "b", [2.0] * 10, ours)
    assert made.ratio == 1.0
    assert figure("a", "b", [2.0] * 10, ours).ratio == 2.0
    assert made.low <= 1.0 < made.high <= 2.0


def test_workers_take_turns_and_a_dead_one_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counting.py").write_text(
        "import sys\n"
        "from benchmarks.workers import Turn\n"
        "turn, rounds = Turn(int(sys.argv[1])), 0\n"
        "while True:\n"
        "    turn.wait()\n"
        "    rounds += 1\n"
        "    assert rounds < int(sys.argv[2])\n"
        "    turn.done(rounds=rounds)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = answers({name: Worker("counting", "9") for name in "ab"}, rounds=2, warm=1)
    assert {name: [row["rounds"] for row in rows] for name, rows in found.items()} == {"a": [2, 3], "b": [2, 3]}
    assert all(row["cpu"] >= 0 and row["wall"] >= 0 for rows in found.values() for row in rows)
    with pytest.raises(RuntimeError, match=r"worker counting 3: ended with status 1"):
        answers({"a": Worker("counting", "3")}, rounds=4, warm=1)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_says_what_it_measures_and_can_be_asked(part: str) -> None:
    module = importlib.import_module(f"benchmarks.{part}")
    assert module.__doc__
    assert callable(module.measure)


def test_an_unknown_part_is_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks", "jobs"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected some of job, replay" in done.stderr
    assert "found jobs" in done.stderr


def test_the_committed_table_is_made_of_the_committed_figures() -> None:
    found = json.loads((RESULTS / "bench.json").read_text())
    assert tuple(found) == PARTS
    assert (RESULTS / "bench.md").read_text() == table(found)
    for one in found.values():
        for row in one["figures"]:
            again = Figure(**{name: value for name, value in row.items() if name != "met"})
            assert again.low <= again.ratio <= again.high
            assert again.met == row["met"]
