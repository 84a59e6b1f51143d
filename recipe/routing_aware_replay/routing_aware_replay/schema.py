"""The records on disk: routes, plans, scores, and the diagnostics of a step with their JSON schema."""

from __future__ import annotations

from rar_lib.replay.diagnostics import (
    SCHEMA_FILE,
    SCHEMA_VERSION,
    PassDiagnostics,
    ReplayDiagnostics,
    ScoreDiagnostics,
    from_lines,
    schema,
    to_lines,
)
from rar_lib.replay.plan import ReplayPlan
from rar_lib.replay.plan_file import find_trace, load_plan, save_plan
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader

__all__ = [
    "SCHEMA_FILE", "SCHEMA_VERSION", "PassDiagnostics", "ReplayDiagnostics", "ReplayPlan", "RouteTrace", "ScoreDiagnostics",
    "Status", "TraceHeader", "find_trace", "from_lines", "load_plan", "save_plan", "schema", "to_lines",
]  # fmt: skip
