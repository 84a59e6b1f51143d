"""What a pass under replay reports to a trainer: meanings as in replay/diagnostics.py.

Names too, but for planned_share (`nominal` there): verl takes the smallest value over ranks and mini-batches of any metric whose
name contains "min", the largest for "max", and the mean of all others.
"""

from __future__ import annotations

from collections.abc import Sequence

from rar_lib.integrations.sequences import PlanCounts
from rar_lib.replay.counts import PassCounts


def pass_metrics(plan: PlanCounts, local: Sequence[int], counts: PassCounts) -> dict[str, float]:
    """Numbers of one pass on one rank.

    Args:
        plan: what was planned, for all MoE layers.
        local: those of them that this rank holds.
        counts: what its routers did.

    Returns:
        valid: M, units of recorded routes; planned: units to force; planned_share = planned / valid.
        missing: cells (token, layer) to replay without a route; coverage: share of them that have one.
        forced_units: units that the routers were given and forced: planned, but fewer under threshold, and a shard's part
            where tensor parallel ranks share the rows.
        changed_cells: cells whose executed set is not the router's own live choice; forced_routers_native_local: their
            share of the recorded cells.
        executed_equals_resolved: share of rows, recompute included, whose experts are those that were resolved.
        A share of nothing is left out.
    """
    layers = list(local)
    expected, recorded, valid, planned = (
        int(values[layers].sum()) for values in (plan.expected, plan.recorded, plan.valid, plan.planned)
    )
    found: dict[str, float] = {
        "valid": valid,
        "planned": planned,
        "missing": expected - recorded,
        "forced_units": counts.forced_units,
        "changed_cells": counts.changed_cells,
    }
    shares = {
        "planned_share": (planned, valid),
        "coverage": (recorded, expected),
        "forced_routers_native_local": (counts.changed_cells, counts.cells),
        "executed_equals_resolved": (counts.compared - counts.differing, counts.compared),
    }
    return {name: float(v) for name, v in found.items()} | {n: a / b for n, (a, b) in shares.items() if b}
