"""A stored ReplayPlan: a safetensors file of `planned` (and λ, for unit bias) that names the record that it was made for.

A plan says nothing without its record: the file carries the SHA-256 of the record's payload, and the trace with that payload is
looked for in the folder of the plan.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from rar_lib.errors import ReplayError
from rar_lib.replay.plan import ReplayPlan
from rar_lib.replay.stored import read_stored, write_stored
from rar_lib.traces.trace import RouteTrace

_KEY = "rar_plan"
_FACTS = {"unit", "trace_digest", "policy", "seed", "requested", "valid", "score_id"}


def save_plan(plan: ReplayPlan, path: str | Path) -> Path:
    """Write a plan to a .safetensors file; one that is there is replaced."""
    path = Path(path)
    facts = {name: getattr(plan, name) for name in _FACTS}
    facts["requested"] = None if plan.requested is None else str(plan.requested)
    arrays = {"planned": np.ascontiguousarray(plan.planned)}
    if plan.bias is not None:
        arrays["bias"] = np.ascontiguousarray(plan.bias)
    return write_stored(path, _KEY, facts, arrays)


def load_plan(path: str | Path) -> ReplayPlan:
    """Read a plan. `ReplayPlan.require` holds it against its record.

    Raises:
        ReplayError: for a file that is not there, or holds something else.
    """
    path = Path(path)
    facts, arrays = read_stored(path, _KEY, "a stored plan", ReplayError)
    if not isinstance(facts, dict) or set(facts) != _FACTS or not {"planned"} <= set(arrays) <= {"planned", "bias"}:
        raise ReplayError(f"{path}: expected a stored plan (planned, and bias at most), found {sorted(arrays)}")
    requested = None if facts["requested"] is None else Fraction(facts["requested"])
    return ReplayPlan(**{**facts, "requested": requested}, planned=arrays["planned"], bias=arrays.get("bias"))


def find_trace(plan: ReplayPlan, path: str | Path) -> RouteTrace:
    """The record of a plan: the trace file in the plan's folder whose payload has the plan's SHA-256.

    Args:
        plan: as it was loaded.
        path: of the plan.

    Raises:
        ReplayError: if no file of the folder is that trace.
    """
    files = sorted(Path(path).absolute().parent.glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                stored = (opened.metadata() or {}).get("payload_sha256")
        except (SafetensorError, OSError):  # a file that cannot be read is not the record; it is counted below
            continue
        if stored == plan.trace_digest:
            return RouteTrace.load(file)
    raise ReplayError(
        f"{path}: expected its record beside it, a trace with payload {plan.trace_digest[:12]}…; found none among "
        f"{len(files)} safetensors files"
    )
