"""What one pass under replay did, counted where it happened: sums, so that micro-batches and updates add up."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import sqrt


@dataclass(frozen=True)
class PassCounts:
    """Sums over the forwards of a pass (and, for executed rows and gradients, its backward).

    Attributes:
        forced_units: units of the plan that were given to routers.
        changed_cells: (token, layer) cells whose executed set differs from `native_local`, the live choice in that forward.
        compared, differing: rows of expert calls that were compared with the pick, and those that got other ids; recompute
            and padding included.
        cells: recorded cells that were measured; 0 if measuring was off, and then all below is 0 too.
        kept: sum of |S ∩ R| over these cells, S the executed and R the recorded set.
        regret: sum over these cells of Σ_N p - Σ_S p, p the ranked scores as probabilities
            (metrics.replay.router_probabilities); None for a router whose record
            leaves its groups, where it is undefined.
        forced_gradient, forced_slots: sum of (∂loss/∂ router logit)² over executed experts that the plan forced, and
            their number; `free_` the same for all other executed experts.
    """

    forced_units: int = 0
    changed_cells: int = 0
    compared: int = 0
    differing: int = 0
    cells: int = 0
    kept: int = 0
    regret: float | None = 0.0
    forced_gradient: float = 0.0
    forced_slots: int = 0
    free_gradient: float = 0.0
    free_slots: int = 0

    def __add__(self, other: PassCounts) -> PassCounts:
        pairs = [(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return PassCounts(*(None if None in pair else sum(pair) for pair in pairs))  # type: ignore[arg-type]

    @property
    def executed_equals_resolved(self) -> float | None:
        """Share of compared rows whose experts are those that were resolved; None if none was compared."""
        return 1.0 - self.differing / self.compared if self.compared else None

    def router_gradient(self, kind: str) -> float | None:
        """Root mean square of ∂loss/∂ router logit over `forced` or `free` executed experts; None where there is none."""
        slots = getattr(self, f"{kind}_slots")
        return sqrt(getattr(self, f"{kind}_gradient") / slots) if slots else None
