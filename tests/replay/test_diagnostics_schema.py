"""The record of a step: its schema is the committed one, and what contradicts itself is refused on write and read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from rar_lib.errors import ReplayError
from rar_lib.replay.diagnostics import SCHEMA_FILE, SCHEMA_VERSION, ReplayDiagnostics, from_lines, schema, to_lines

GOOD: dict[str, Any] = {
    "step": 3, "mode": "R3", "policy": "fisher", "unit": "slot", "seed": 0, "requested": "1/4", "valid": 40, "budget": 10,
    "nominal": 0.25, "binding": 0.1, "missing": 2, "trace_digest": "ab", "planned_by_layer": [4, 6],
    "binding_by_layer": [0.1, None], "score": {"id": "gate/per_route/rollout", "unscored": 1, "tokens": 100},
    "old": {"nominal": 0.25, "executed_equals_resolved": 1.0}, "update": {"nominal": 0.25, "regret": 1e-3},
    "target_shift": 1e-5,
}  # fmt: skip


def test_the_committed_schema_is_that_of_the_code() -> None:
    assert SCHEMA_FILE.read_text() == schema(), "run python -m rar_lib.replay.diagnostics"
    assert SCHEMA_FILE.name == f"replay_diagnostics.v{SCHEMA_VERSION}.json"
    fields = json.loads(schema())["properties"]
    assert all("description" in f for name, f in fields.items() if name in ("valid", "budget", "binding", "missing"))


def test_lines_come_back_as_they_were() -> None:
    nothing = ReplayDiagnostics(
        step=0, mode="none", policy=None, unit=None, seed=0, valid=0, budget=0, nominal=0, missing=0, old={}, update={}
    )  # type: ignore[arg-type]
    records = [nothing, ReplayDiagnostics(**GOOD)]
    assert from_lines(to_lines(records)) == records
    row = records[1].columns()
    assert row["replay/budget"] == 10
    assert row["replay/old/executed_equals_resolved"] == 1.0
    assert row["replay/score/unscored"] == 1
    assert row["replay/drift_planned"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"budget": 41, "nominal": 41 / 40, "planned_by_layer": None},
            "nominal: Input should be less than or equal to 1",
        ),
        ({"budget": 11, "planned_by_layer": None}, r"nominal 0\.25 is not budget over valid"),
        ({"binding": 0.3}, r"binding 0\.3 is above nominal 0\.25"),
        ({"policy": None}, "mode R3 goes with policy None"),
        ({"mode": "none"}, "mode none goes with policy fisher"),
        ({"planned_by_layer": [4, 5]}, "planned_by_layer sums to 9, budget is 10"),
        ({"regrets": 1}, "regrets: Extra inputs are not permitted"),
        ({"schema_version": 2}, "schema_version: Input should be 1"),
        ({"old": {"nominal": 0.1, "fidelity": 1.5}}, r"old\.fidelity: Input should be less than or equal to 1"),
        ({"target_shift": float("nan")}, "target_shift: Input should be"),
        ({"requested": "a quarter"}, "Invalid literal for Fraction"),
    ],
)
def test_contradictions_are_refused_on_write_and_read(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError):
        ReplayDiagnostics(**GOOD | change)
    text = to_lines([ReplayDiagnostics(**GOOD)]) + json.dumps(GOOD | change) + "\n"
    with pytest.raises(ReplayError, match=f"run x, line 2: .*{message}"):
        from_lines(text, "run x")
