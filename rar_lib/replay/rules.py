"""Policies without scores: whole records, shares of cells, keys, margins, use, and disagreement."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from rar_lib.errors import ReplayError
from rar_lib.replay.budget import hash_text, mix, rank_in_groups, uniform_from, unit_keys
from rar_lib.replay.plan import ReplayPlan, Unit, full_plan
from rar_lib.replay.policy import Candidates, native_of, spread, unit_cells, valid_units


class Full:
    """Every recorded route."""

    units: tuple[Unit, ...] = ("token_layer", "slot")
    needs: tuple[str, ...] = ()
    budget = "none"
    compares = False

    def plan(self, seen: Candidates, unit: Unit, share: Fraction | None) -> ReplayPlan:
        """All of it."""
        return full_plan(seen.trace, unit)


class Uniform:
    """The same share of every cell, in nested order: (rank in cell by key + u_cell) / n_cell.

    A cell is a (layer, expert) for slots, a layer for whole sets. u_cell, a keyed number in (0, 1), decides which cells are
    rounded up.
    """

    units: tuple[Unit, ...] = ("token_layer", "slot")
    needs: tuple[str, ...] = ()
    budget = "matched"
    compares = False

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """Priorities, `[N, L]` or `[N, L, K]` float64; see the class."""
        trace = seen.trace
        keys = unit_keys(trace, seen.uids, seen.seed, "uniform/order", unit == "slot")
        valid, cells = valid_units(trace, unit), unit_cells(trace, unit)
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
    budget = "matched"
    compares = False

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """Priorities, `[N, L]` or `[N, L, K]` float64; see the class."""
        return uniform_from(unit_keys(seen.trace, seen.uids, seen.seed, f"random/{seen.batch}", unit == "slot"))


class RandomCell:
    """Whole (layer, expert) cells in keyed order, the last one cut at the budget.

    Args:
        resampled: another order for each batch; else one for the run.
    """

    units: tuple[Unit, ...] = ("slot",)
    needs: tuple[str, ...] = ()
    budget = "matched"
    compares = False

    def __init__(self, *, resampled: bool) -> None:
        self.resampled = resampled

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """Priorities, `[N, L, K]` float64; see the class."""
        start = hash_text(seen.seed, "random_cell", seen.batch if self.resampled else "fixed")
        return uniform_from(mix(unit_cells(seen.trace, unit).astype(np.uint64) ^ start))


class Margin:
    """Smallest margin of the live scores first: decisions that a small error would flip."""

    units: tuple[Unit, ...] = ("token_layer", "slot")
    needs: tuple[str, ...] = ("native", "margins")
    budget = "matched"
    compares = False

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """Priorities, `[N, L]` or `[N, L, K]` float64; see the class.

        Raises:
            ReplayError: without a planning pass, or if it recorded no margins.
        """
        native = native_of(seen)
        if native.margins is None:
            raise ReplayError("policy margin: the planning pass recorded no margins")
        return spread(native.margins.astype(np.float64), seen, unit)


class Frequency:
    """Routes of the most used cells first; for whole sets, by the summed use of their experts."""

    units: tuple[Unit, ...] = ("token_layer", "slot")
    needs: tuple[str, ...] = ()
    budget = "matched"
    compares = False

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """Priorities, `[N, L]` or `[N, L, K]` float64; see the class."""
        cells, valid = unit_cells(seen.trace, "slot"), valid_units(seen.trace, "slot")
        count = np.bincount(cells[valid], minlength=seen.trace.header.num_layers * seen.trace.header.num_experts)
        use = count[cells].astype(np.float64)
        return -use if unit == "slot" else -use.sum(-1)


class Disagree:
    """Routes on which the record and the planning pass differ, before all others: the cheap oracle of the old pass.

    For slots: experts of the record that the live choice does not have.
    """

    units: tuple[Unit, ...] = ("token_layer", "slot")
    needs: tuple[str, ...] = ("native",)
    budget = "matched"
    compares = True

    def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
        """Priorities, `[N, L]` or `[N, L, K]` float64; see the class.

        Raises:
            ReplayError: without a planning pass.
        """
        native = native_of(seen)
        alone = ~(seen.trace.experts[..., :, None] == native.experts[..., None, :]).any(-1)
        alone &= (seen.trace.recorded & native.recorded)[..., None]
        differs = alone if unit == "slot" else alone.any(-1)
        return np.where(differs, 0.0, 1.0)
