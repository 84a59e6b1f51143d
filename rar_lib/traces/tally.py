"""What the doctor counts while it walks over the cells of a record, block by block, and what the counts say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rar_lib.traces.scan import Cells
from rar_lib.traces.verdicts import Severity, Verdict, listed, verdict

ENOUGH_ROWS = 16  # of one layer, before "always the same" means anything
SURE_BITS = 24.0  # a row this surprising is not chance in a few thousand tokens


class Tally:
    """Counts by layer over the recorded cells.

    Attributes:
        possible: `[L]` int64, cells that could hold a route.
        recorded: `[L]` int64, cells that do.
        largest: `[L]` int64, the largest id of the recorded cells, -1 without any.
        unplaced: cells of samples that came without routes, or whose rows could not be placed.

    Args:
        layers: transformer layer number of each position, to name them.
        top_k: K.
        num_experts: E, or None where unknown.
        guessed: the layer axis may hold dense layers, which are zeros and not dead.
    """

    def __init__(self, layers: tuple[int, ...], top_k: int, num_experts: int | None, guessed: bool = False) -> None:
        self.layers, self.top_k, self.num_experts, self.guessed = layers, top_k, num_experts, guessed
        n = len(layers)
        self.possible, self.recorded = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.largest = np.full(n, -1, np.int64)
        self._counts = {code: np.zeros(n, np.int64) for code in ("ID_NEGATIVE", "ID_OUT_OF_RANGE", "DUPLICATE_EXPERTS")}
        self._first: dict[str, str] = {}
        self._zeros = np.zeros(n, np.int64)  # at K = 1
        self._row: list[np.ndarray | None] = [None] * n
        self._same = np.ones(n, bool)
        self.unplaced = 0
        self._filler, self._filler_place = 0, ""
        self._ramps = np.zeros(n, np.int64)  # cells that hold 0..K-1

    def add(self, ids: np.ndarray, known: np.ndarray, cells: Cells, start: int, place: Callable[[int], str]) -> None:
        """Count a block.

        Args:
            ids: `[n, L, K]`.
            known: `[n, L]` bool, recorded.
            cells: `scan(ids, num_experts)`.
            start: token of row 0 for `place`.
            place: names a token.
        """
        every = bool(known.all())
        self.recorded += len(known) if every else known.sum(0)
        top = cells.top if every else np.where(known, cells.top.astype(np.int64), -1)
        if len(top):
            self.largest = np.maximum(self.largest, top.max(0))
        flags = {
            "ID_NEGATIVE": cells.negative,
            "ID_OUT_OF_RANGE": cells.beyond,
            # a recorded cell of zeros names expert 0 K times; a dump's zeros are not recorded cells
            "DUPLICATE_EXPERTS": (cells.twice | cells.zero) & ~cells.beyond & ~cells.negative,
        }
        for code, flag in flags.items():
            bad = flag if every else flag & known
            if bad.any():
                self._counts[code] += bad.sum(0)
                if code not in self._first:
                    token, layer = (int(i) for i in np.argwhere(bad)[0])
                    self._first[code] = (
                        f"{place(start + token)}, layer {self.layers[layer]}: {ids[token, layer].tolist()}"
                    )
        if self.top_k == 1:
            self._zeros += ((ids[..., 0] == 0) & known).sum(0)
        self._follow(ids, known, every)
        self._look_for_filler(cells.ramp if every else cells.ramp & known, start, place)

    def _follow(self, ids: np.ndarray, known: np.ndarray, every: bool) -> None:
        """Is a layer always the same?"""
        for layer in np.flatnonzero(self._same):
            rows = ids[:, layer] if every else ids[known[:, layer], layer]
            if not len(rows):
                continue
            if self._row[layer] is None:
                self._row[layer] = np.sort(rows[0])
            for part in (rows[:64], rows[64:]):
                if (np.sort(part, -1) != self._row[layer]).any():
                    self._same[layer] = False
                    break

    def _look_for_filler(self, ramps: np.ndarray, start: int, place: Callable[[int], str]) -> None:
        """Rows that hold 0..K-1 in every layer are filler, not routes. Routers of their own choice hit it in one layer now and then."""
        if not ramps.any():
            return
        self._ramps += ramps.sum(0)
        rows = np.flatnonzero(ramps.all(-1))
        if len(rows) and not self._filler:
            self._filler_place = place(start + int(rows[0]))
        self._filler += len(rows)

    def _filler_verdict(self) -> list[Verdict]:
        experts = self.num_experts or int(self.largest.max(initial=0)) + 1
        if not self._filler or experts <= self.top_k:
            return []
        bits = len(self.layers) * math.log2(math.comb(experts, self.top_k))
        if bits < SURE_BITS or self._filler < 0.5 * int(self._ramps.min()):
            return []
        seen = f"{self._filler} tokens hold 0..{self.top_k - 1} in every layer, first {self._filler_place}"
        return [verdict("FILLER_ROWS", f"layers {listed(self.layers)}", seen, cells=self._filler)]

    # ---------------------------------------------------------------- conclusions

    @property
    def dead(self) -> bool:
        """Nothing was captured anywhere, or the same row in every layer."""
        stuck = self._stuck()
        return bool(self.possible.sum()) and (not self._alive().any() or (len(stuck) > 1 and bool(stuck.all())))

    def _alive(self) -> np.ndarray:
        written = self.recorded - self._zeros if self.top_k == 1 else self.recorded
        few = (self.top_k == 1) & (self.recorded < ENOUGH_ROWS)
        return (written > 0) | (self.possible == 0) | few | ((self.num_experts == 1) & (self.recorded > 0))

    def _stuck(self) -> np.ndarray:
        choice = self.num_experts is None or self.num_experts > self.top_k
        return self._same & (self.recorded >= ENOUGH_ROWS) & choice

    def dead_layers(self) -> tuple[int, ...]:
        """Positions of layers in which nothing was captured."""
        return tuple(int(i) for i in np.flatnonzero(~self._alive()))

    def _numbers(self, where: Any) -> tuple[int, ...]:
        return tuple(self.layers[int(i)] for i in where)

    def verdicts(self) -> list[Verdict]:
        """What the counts say."""
        if not self.possible.sum():
            return []
        out = []
        silent, stuck = self.dead_layers(), np.flatnonzero(self._stuck() & self._alive())
        if len(silent) == len(self.layers):
            seen = f"all {int(self.possible.sum())} cells are empty or zero"
            lone = (
                self.top_k == 1 and len(self.layers) == 1
            )  # a single router that always takes expert 0 looks the same
            severity: Severity | None = "warning" if lone else None
            out.append(
                verdict("CAPTURE_DEAD", f"layers {listed(self.layers)}", seen, layers=self.layers, severity=severity)
            )
        elif silent:
            code = "LAYER_EMPTY" if self.guessed else "LAYER_DEAD"
            numbers = self._numbers(silent)
            seen = f"no route in {int(self.possible[list(silent)].sum())} cells, while other layers have them"
            severity = "warning" if self.top_k == 1 else None
            out.append(verdict(code, f"layers {listed(numbers)}", seen, layers=numbers, severity=severity))
        if len(stuck) > 1 and len(stuck) == len(self.layers) - len(silent):
            row = self._row[int(stuck[0])]
            seen = f"every recorded row of a layer is the same, in layer {self.layers[int(stuck[0])]}: {[] if row is None else row.tolist()}"
            out.append(
                verdict("CAPTURE_STUCK", f"layers {listed(self._numbers(stuck))}", seen, layers=self._numbers(stuck))
            )
        elif len(stuck):
            seen = f"all {int(self.recorded[stuck].sum())} recorded rows are the same"
            out.append(
                verdict("LAYER_STUCK", f"layers {listed(self._numbers(stuck))}", seen, layers=self._numbers(stuck))
            )
        for code, counts in self._counts.items():
            if counts.any():
                numbers = self._numbers(np.flatnonzero(counts))
                against = f" of {self.num_experts} experts" if self.num_experts is not None else ""
                seen = f"{int(counts.sum())} cells{against}, first {self._first[code]}"
                out.append(verdict(code, f"layers {listed(numbers)}", seen, layers=numbers, cells=int(counts.sum())))
        if not len(stuck):
            out += self._filler_verdict()
        out += self._local()
        return out

    def _local(self) -> list[Verdict]:
        """Does every layer use the first half of the ids only? Ids local to a rank do."""
        experts = self.num_experts
        alive = self.recorded > 0
        if experts is None or experts < 4 or not alive.any():
            return []
        top = int(self.largest[alive].max())
        where = f"layers {listed(self._numbers(np.flatnonzero(alive)))}"
        seen = f"no id from {top + 1} to {experts - 1} in {int(self.recorded.sum())} cells"
        if not self.recorded[alive].min() * self.top_k >= 20 * experts or not alive.sum() > 1:
            return []
        for held in (256, 65536):
            if top < held < experts and top >= held - 1 - held // 16:
                return [verdict("ID_WRAPPED", where, f"{seen}: they end where {held.bit_length() - 1} bits do")]
        part = experts
        while part % 2 == 0 and part // 2 > max(top, self.top_k - 1):
            part //= 2
        return [] if part == experts else [verdict("EXPERTS_LOCAL", where, seen)]

    def facts(self) -> dict[str, Any]:
        """Coverage over all cells that could hold a route, samples that could not be placed included; missing is told also at 0."""
        possible, recorded = int(self.possible.sum()) + self.unplaced, int(self.recorded.sum())
        share = round(recorded / possible, 4) if possible else None
        return {"cells": possible, "recorded": recorded, "missing": possible - recorded, "coverage": share}
