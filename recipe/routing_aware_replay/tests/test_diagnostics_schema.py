"""What a plan does, by hand on three tokens, and the schema that says it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from routing_aware_replay.diagnostics import diagnose
from routing_aware_replay.schema import (
    SCHEMA_FILE,
    SCHEMA_VERSION,
    ReplayDiagnostics,
    ReplayPlan,
    RouteTrace,
    Status,
    TraceHeader,
    from_lines,
    schema,
    to_lines,
)

from rar_lib.errors import ReplayError

HEADER = TraceHeader(num_experts=4, top_k=2, moe_layers=(0,), source="rollout")
#                     flipped   same      not recorded  last
RECORD = RouteTrace.from_packed(HEADER, np.array([[[0, 3]], [[1, 2]], [[0, 0]], [[0, 0]]]), [4], np.array([1, 1, 0, 2]))
NATIVE = RouteTrace.from_packed(HEADER, np.array([[[0, 1]], [[1, 2]], [[0, 1]], [[0, 0]]]), [4], np.array([1, 1, 1, 2]))
SCORES = np.array([[[0.4, 0.3, 0.1, 0.2]], [[0.1, 0.4, 0.4, 0.1]], [[0.4, 0.3, 0.2, 0.1]], [[1, 0, 0, 0]]], np.float32)


def plan_of(planned: list[list[int]]) -> ReplayPlan:
    mask = np.array(planned, bool)[:, None]
    return ReplayPlan("slot", mask, RECORD.payload_sha256(), "uniform", 0, None, 4)


def test_by_hand() -> None:
    told = diagnose(plan_of([[0, 1], [1, 0], [0, 0], [0, 0]]), RECORD, NATIVE, SCORES, step=5)
    assert (told.step, told.valid, told.budget, told.nominal) == (5, 4, 2, 0.5)
    assert told.missing == 1
    assert told.binding == 0.25  # expert 3 of token 0 is not in the live set; expert 1 of token 1 is
    assert told.planned_by_layer == [2]
    assert told.update.forced_routers_native_local == 0.5  # token 0 executes {0, 3}
    assert told.update.fidelity == 1.0
    assert told.update.regret == pytest.approx((0.3 - 0.2) / 2)
    nothing = diagnose(plan_of([[0, 0]] * 4), RECORD, NATIVE, SCORES)
    assert (nothing.binding, nothing.update.forced_routers_native_local, nothing.update.regret) == (0, 0, 0)
    assert nothing.update.fidelity == 0.75


def test_none_replays_nothing() -> None:
    told = diagnose(None, RECORD, NATIVE, SCORES)
    assert (told.mode, told.policy, told.budget, told.missing) == ("none", None, 0, 1)


def test_lines_come_back_and_follow_the_committed_schema() -> None:
    told = [diagnose(plan_of([[1, 1], [1, 0], [0, 0], [0, 0]]), RECORD, NATIVE, SCORES, step=s) for s in range(2)]
    assert from_lines(to_lines(told)) == told
    assert SCHEMA_FILE.read_text() == schema()
    assert json.loads(schema())["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    assert set(told[0].model_dump()) == set(json.loads(schema())["properties"])


def test_what_contradicts_itself_is_refused() -> None:
    good = diagnose(plan_of([[0, 1], [1, 0], [0, 0], [0, 0]]), RECORD, NATIVE, SCORES)
    for change, message in (
        ({"budget": 3}, "nominal 0.5 is not budget over valid"),
        ({"binding": 0.75}, "binding 0.75 is above nominal"),
        ({"regrets": 1}, "regrets: Extra inputs are not permitted"),
    ):
        line = json.dumps({**good.model_dump(), **change})
        with pytest.raises(ReplayError, match=message):
            from_lines(line)
    assert isinstance(good, ReplayDiagnostics)


def test_a_plan_goes_with_its_own_record() -> None:
    other = RouteTrace.from_packed(HEADER, NATIVE.ids(), [4], NATIVE.status)
    with pytest.raises(ReplayError, match="plan for another trace"):
        diagnose(plan_of([[0, 1], [1, 0], [0, 0], [0, 0]]), other, NATIVE, SCORES)
    with pytest.raises(ReplayError, match="a planned unit whose route is not recorded"):
        diagnose(plan_of([[0, 0], [0, 0], [1, 0], [0, 0]]), RECORD, NATIVE, SCORES)
    assert RECORD.status[2] == Status.MISSING
