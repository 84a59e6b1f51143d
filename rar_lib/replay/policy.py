"""What a policy is: what it may look at, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from rar_lib.errors import ReplayError
from rar_lib.replay.flip_model import FlipModel
from rar_lib.replay.plan import ReplayPlan, Unit
from rar_lib.replay.scores import ExpertScore, RouteSignals
from rar_lib.traces.trace import RouteTrace


@dataclass(frozen=True)
class Candidates:
    """What a policy may look at.

    Attributes:
        trace: the record to choose from.
        uids: name of each sequence, for the keys.
        seed: of the keys.
        batch: number of the rollout batch; policies that are fixed for a run do not look at it.
        native: routes of the planning pass, with margins or scores if the policy needs them; same tokens as `trace`.
        score: score of each cell, at θ_old.
        signals: back-propagated signals of the planning pass, on `native`.
        flips: P(flip) from earlier batches.
        ratio: of the policy threshold.
    """

    trace: RouteTrace
    uids: Sequence[str]
    seed: int
    batch: int = 0
    native: RouteTrace | None = None
    score: ExpertScore | None = None
    signals: RouteSignals | None = None
    flips: FlipModel | None = None
    ratio: float | None = None


class Policy(Protocol):
    """What every policy says of itself.

    Attributes:
        units: what it can count and force.
        needs: what must be looked at before: `native` (the routes of a forward without replay at θ_old: the planning
            pass), `margins` or `scores` of that pass, `score` (of the cells), `signals`, `flips`.
        budget: how β is understood: `matched` (that share of the recorded units, the same integer for all), `binding` (that
            share of what full replay would change), or `none`.
        compares: it compares the record with the planning pass, so that it means nothing where they are the same pass (R2).
    """

    units: tuple[Unit, ...]
    needs: tuple[str, ...]
    budget: str
    compares: bool


class Matched(Policy, Protocol):
    """A policy with a priority; budget, ties and nesting are the same for all."""

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """Priority of each unit, `[N, L]` or `[N, L, K]` float64, smaller first; read only where a route is recorded."""


class Free(Policy, Protocol):
    """A policy that decides by itself how much it forces."""

    def plan(self, seen: Candidates, unit: Unit, share: Fraction | None) -> ReplayPlan:
        """Its plan; `share` is β, None where the policy has no budget."""


def spread(by_cell: np.ndarray, seen: Candidates, unit: Unit) -> np.ndarray:
    """`[N, L]` priorities as they are for token_layer, repeated over the K slots, `[N, L, K]`, for slot."""
    return by_cell if unit == "token_layer" else np.repeat(by_cell[..., None], seen.trace.header.top_k, axis=-1)


def valid_units(trace: RouteTrace, unit: Unit) -> np.ndarray:
    """Units with a recorded route, bool: `[N, L]` for token_layer, `[N, L, K]` for slot."""
    recorded = trace.recorded
    return recorded if unit == "token_layer" else np.repeat(recorded[..., None], trace.header.top_k, axis=-1)


def unit_cells(trace: RouteTrace, unit: Unit) -> np.ndarray:
    """Index of the cell of each unit, int64: layer * E + expert `[N, L, K]` for slots, the layer `[N, L]` for sets."""
    layers = np.arange(trace.header.num_layers, dtype=np.int64)[None, :]
    if unit == "token_layer":
        return np.broadcast_to(layers, trace.experts.shape[:2])
    return layers[..., None] * trace.header.num_experts + trace.experts.astype(np.int64)


def native_of(seen: Candidates) -> RouteTrace:
    """Routes of the planning pass.

    Raises:
        ReplayError: if there was none.
    """
    if seen.native is None:
        raise ReplayError("the policy looks at the live choice, and no planning pass was given")
    return seen.native
