"""Policies: which of the recorded routes are forced.

A policy gives every unit a priority, smaller first; budget, ties and nesting are the same for all (budget.py). A new one is
a small class and a line in POLICIES:

    class Early:
        units, needs, matched = ("token_layer", "slot"), (), True
        def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
            position = np.arange(seen.trace.num_tokens) - np.repeat(seen.trace.offsets[:-1], seen.trace.lengths)
            return spread(position[:, None] + 0.0 * seen.trace.recorded, seen, unit)

`needs` names what must be looked at before: `native`, the routes of one forward without any replay at θ_old (the planning
pass), and `margins`, the gap between the last chosen and the first rejected score there. The cost of that pass belongs to
the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from rar_lib.errors import ConfigError, ReplayError
from rar_lib.replay.budget import (
    as_fraction,
    hash_text,
    integer_budget,
    mix,
    rank_in_groups,
    take_smallest,
    uniform_from,
    unit_keys,
)
from rar_lib.replay.plan import ReplayPlan, Unit, full_plan
from rar_lib.traces.trace import RouteTrace


@dataclass(frozen=True)
class Candidates:
    """What a policy may look at.

    Attributes:
        trace: the record to choose from.
        uids: name of each sequence, for the keys.
        seed: of the keys.
        batch: number of the rollout batch; policies that are fixed for a run do not look at it.
        native: routes of the planning pass, if the policy needs them; same tokens as `trace`.
    """

    trace: RouteTrace
    uids: Sequence[str]
    seed: int
    batch: int = 0
    native: RouteTrace | None = None


class Policy(Protocol):
    """See the module's opening."""

    units: tuple[Unit, ...]
    needs: tuple[str, ...]
    matched: bool

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """Priority of each unit, `[N, L]` or `[N, L, K]` float64, smaller first; read only where a route is recorded."""


def spread(by_cell: np.ndarray, seen: Candidates, unit: Unit) -> np.ndarray:
    """`[N, L]` priorities as they are for token_layer, repeated over the K slots for slot."""
    return by_cell if unit == "token_layer" else np.repeat(by_cell[..., None], seen.trace.header.top_k, axis=-1)


class Full:
    """Every recorded route."""

    units: tuple[Unit, ...] = ("token_layer", "slot")
    needs: tuple[str, ...] = ()
    matched = False

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """All alike."""
        return spread(np.zeros(seen.trace.experts.shape[:2]), seen, unit)


class Uniform:
    """The same share of every cell, in nested order: (rank in cell by key + u_cell) / n_cell.

    A cell is a (layer, expert) for slots, a layer for whole sets. u_cell, a keyed number in (0, 1), decides which cells are
    rounded up.
    """

    units: tuple[Unit, ...] = ("token_layer", "slot")
    needs: tuple[str, ...] = ()
    matched = True

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """See the class."""
        trace = seen.trace
        keys = unit_keys(trace, seen.uids, seen.seed, "uniform/order", unit == "slot")
        valid, cells = _valid(trace, unit), _cells(trace, unit)
        where = np.flatnonzero(valid)
        groups = cells.reshape(-1)[where]
        rank, size = rank_in_groups(groups, keys.reshape(-1)[where])
        offset = uniform_from(mix(groups.astype(np.uint64) ^ hash_text(seen.seed, "uniform/cell", seen.batch)))
        out = np.full(valid.size, np.inf)
        out[where] = (rank + offset) / size
        return out.reshape(valid.shape)


class RandomRoute:
    """By key alone."""

    units: tuple[Unit, ...] = ("token_layer", "slot")
    needs: tuple[str, ...] = ()
    matched = True

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """See the class."""
        return uniform_from(unit_keys(seen.trace, seen.uids, seen.seed, f"random/{seen.batch}", unit == "slot"))


class RandomCell:
    """Whole (layer, expert) cells in keyed order, the last one cut at the budget.

    Args:
        resampled: another order for each batch; else one for the run.
    """

    units: tuple[Unit, ...] = ("slot",)
    needs: tuple[str, ...] = ()
    matched = True

    def __init__(self, *, resampled: bool) -> None:
        self.resampled = resampled

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """See the class."""
        start = hash_text(seen.seed, "random_cell", seen.batch if self.resampled else "fixed")
        return uniform_from(mix(_cells(seen.trace, unit).astype(np.uint64) ^ start))


class Margin:
    """Smallest margin of the live scores first: decisions that a small error would flip."""

    units: tuple[Unit, ...] = ("token_layer", "slot")
    needs: tuple[str, ...] = ("native", "margins")
    matched = True

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """See the class."""
        native = _native(seen)
        if native.margins is None:
            raise ReplayError("policy margin: the planning pass recorded no margins")
        return spread(native.margins.astype(np.float64), seen, unit)


class Frequency:
    """Routes of the most used cells first; for whole sets, by the summed use of their experts."""

    units: tuple[Unit, ...] = ("token_layer", "slot")
    needs: tuple[str, ...] = ()
    matched = True

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """See the class."""
        cells, valid = _cells(seen.trace, "slot"), _valid(seen.trace, "slot")
        count = np.bincount(cells[valid], minlength=seen.trace.header.num_layers * seen.trace.header.num_experts)
        use = count[cells].astype(np.float64)
        return -use if unit == "slot" else -use.sum(-1)


class Disagree:
    """Routes on which the record and the planning pass differ, before all others: the cheap oracle of the old pass.

    For slots: experts of the record that the live choice does not have.
    """

    units: tuple[Unit, ...] = ("token_layer", "slot")
    needs: tuple[str, ...] = ("native",)
    matched = True

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """See the class."""
        native = _native(seen)
        alone = ~(seen.trace.experts[..., :, None] == native.experts[..., None, :]).any(-1)
        alone &= (seen.trace.recorded & native.recorded)[..., None]
        differs = alone if unit == "slot" else alone.any(-1)
        return np.where(differs, 0.0, 1.0)


POLICIES: dict[str, Callable[[], Policy]] = {
    "full": Full,
    "uniform": Uniform,
    "random_route": RandomRoute,
    "random_cell": lambda: RandomCell(resampled=False),
    "random_cell_resampled": lambda: RandomCell(resampled=True),
    "margin": Margin,
    "frequency": Frequency,
    "disagree": Disagree,
}


def get_policy(name: str) -> Policy:
    """A policy by name.

    Raises:
        ConfigError: names the policies that there are.
    """
    if name not in POLICIES:
        raise ConfigError(f"router_replay.policy: expected one of {', '.join(POLICIES)}, found {name!r}")
    return POLICIES[name]()


def require_policy(name: str, unit: str, budget: float | str | Fraction | None) -> None:
    """Refuse what does not go together.

    Raises:
        ConfigError: for an unknown policy, a unit that it does not have, or a budget that is missing, needless or no share.
    """
    policy = get_policy(name)
    if unit not in policy.units:
        raise ConfigError(f"router_replay.unit: policy {name} exists in {' and '.join(policy.units)}, found {unit!r}")
    if policy.matched and budget is None:
        raise ConfigError(f"router_replay.budget: policy {name} needs a share from 0 to 1, found none")
    if not policy.matched and budget is not None:
        raise ConfigError(f"router_replay.budget: policy {name} has no budget, found {budget!r}")
    if budget is not None:
        as_fraction(budget)


def make_plan(name: str, seen: Candidates, unit: Unit, budget: float | str | Fraction | None = None) -> ReplayPlan:
    """The plan of a policy for one record.

    Args:
        name: of the policy.
        seen: what it looks at.
        unit: what is counted and forced.
        budget: β, a share of the valid units; None for a policy without one.

    Returns:
        A plan with exactly floor(β M + 1/2) units.

    Raises:
        ConfigError: see require_policy.
        ReplayError: if something that the policy needs is missing.
    """
    require_policy(name, unit, budget)
    trace = seen.trace
    if budget is None:
        return full_plan(trace, unit)
    share, valid = as_fraction(budget), _valid(trace, unit)
    total = int(valid.sum())
    keys = unit_keys(trace, seen.uids, seen.seed, f"tie/{name}", unit == "slot")
    planned = take_smallest(get_policy(name).priority(seen, unit), keys, valid, integer_budget(share, total))
    return ReplayPlan(unit, planned, trace.payload_sha256(), name, seen.seed, share, total)


def _valid(trace: RouteTrace, unit: Unit) -> np.ndarray:
    recorded = trace.recorded
    return recorded if unit == "token_layer" else np.repeat(recorded[..., None], trace.header.top_k, axis=-1)


def _cells(trace: RouteTrace, unit: Unit) -> np.ndarray:
    """Index of the cell of each unit: layer * E + expert for slots, the layer for whole sets."""
    layers = np.arange(trace.header.num_layers, dtype=np.int64)[None, :]
    if unit == "token_layer":
        return np.broadcast_to(layers, trace.experts.shape[:2])
    return layers[..., None] * trace.header.num_experts + trace.experts.astype(np.int64)


def _native(seen: Candidates) -> RouteTrace:
    if seen.native is None:
        raise ReplayError("the policy looks at the live choice, and no planning pass was given")
    return seen.native
