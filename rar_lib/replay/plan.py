"""ReplayPlan: which of the recorded routes are forced, over the same tokens, layers and slots as the record.

A plan belongs to one trace and says so: it carries the digest of its record and is refused with any other. It is made
once for a rollout batch and used unchanged in the old pass, in every update and in recompute, because only then is the
ratio new/old exactly 1 at θ_old. What it asks for and what it realises are both integers of its unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np

from rar_lib.errors import ReplayError
from rar_lib.traces.trace import RouteTrace

Unit = Literal["token_layer", "slot", "bias"]


@dataclass(frozen=True, eq=False)
class ReplayPlan:
    """Which units of a record are forced.

    Attributes:
        unit: `token_layer`: whole sets of a router at a token; `slot`: single experts of such a set; `bias`: recorded
            experts get λ on top of their live score, and win where that is enough.
        planned: bool, `[N, L]` for token_layer and bias, `[N, L, K]` for slot, over the tokens of the trace. False wherever
            no route is recorded.
        trace_digest: SHA-256 of the record (RouteTrace.payload_sha256).
        policy: name of the policy that chose.
        seed: seed of its keys.
        requested: share of the valid units that was asked for; None where the policy has no budget.
        valid: M, the recorded units that could be planned.
        score_id: name of the scores that it ranked, if any.
        bias: `[L, E]` float32 λ >= 0 in units of the ranked scores, for unit bias only.
    """

    unit: Unit
    planned: np.ndarray
    trace_digest: str
    policy: str
    seed: int
    requested: Fraction | None
    valid: int
    score_id: str | None = None
    bias: np.ndarray | None = None

    @property
    def budget(self) -> int:
        """Planned units."""
        return int(self.planned.sum())

    @property
    def nominal(self) -> float:
        """Planned over valid units; 0 where none is valid."""
        return self.budget / self.valid if self.valid else 0.0

    def require(self, trace: RouteTrace) -> None:
        """Refuse any record but the plan's own.

        Raises:
            ReplayError: for another trace, another shape, or a planned unit without a recorded route.
        """
        shape = trace.experts.shape[: 3 if self.unit == "slot" else 2]
        if self.planned.dtype != bool or self.planned.shape != shape:
            raise ReplayError(
                f"plan of unit {self.unit}: expected bool {shape} for this trace, found {self.planned.dtype} "
                f"{self.planned.shape}"
            )
        digest = trace.payload_sha256()
        if digest != self.trace_digest:
            raise ReplayError(f"plan for another trace: made for {self.trace_digest[:12]}…, used with {digest[:12]}…")
        recorded = trace.recorded[..., None] if self.unit == "slot" else trace.recorded
        if (self.planned & ~recorded).any():
            raise ReplayError("plan: expected recorded routes only, found a planned unit whose route is not recorded")
        cells = (trace.header.num_layers, trace.header.num_experts)
        if (self.bias is None) == (self.unit == "bias") or (self.bias is not None and self.bias.shape != cells):
            found = None if self.bias is None else self.bias.shape
            raise ReplayError(
                f"plan of unit {self.unit}: expected λ of shape {cells} for unit bias only, found {found}"
            )
        if self.bias is not None and not (self.bias >= 0).all():
            raise ReplayError("plan of unit bias: expected λ of 0 or more, found a negative or NaN")

    def select(self, trace: RouteTrace, sequences: Iterable[int]) -> tuple[RouteTrace, ReplayPlan]:
        """Record and plan of some of the sequences, in the order given."""
        chosen = list(sequences)
        part = trace.select(chosen)
        rows = [np.arange(trace.offsets[i], trace.offsets[i + 1]) for i in chosen]
        planned = self.planned[np.concatenate(rows)] if rows else self.planned[:0]
        valid = int(part.recorded.sum()) * (trace.header.top_k if self.unit == "slot" else 1)
        return part, replace(self, planned=planned, trace_digest=part.payload_sha256(), valid=valid)


def full_plan(trace: RouteTrace, unit: Unit = "token_layer") -> ReplayPlan:
    """Every recorded route: what R2 and R3 mean in the literature."""
    planned = trace.recorded.copy()
    if unit == "slot":
        planned = np.repeat(planned[..., None], trace.header.top_k, axis=-1)
    return ReplayPlan(unit, planned, trace.payload_sha256(), "full", 0, None, int(planned.sum()))
