"""P(flip): how likely the decision of a router differs between two engines, from its margin.

A small error flips a decision where the margin is small. A logistic curve in the log of the margin is fitted to the batches
seen so far and used on the next one, so that no plan looks at the flips of the batch that it plans. Only a histogram is kept,
whatever the number of cells, and a run that resumes goes on from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from rar_lib.errors import ReplayError

EDGES = np.linspace(-24.0, 6.0, 121)  # of log margin, in nats; outliers fall into the outer bins
CENTRES = np.r_[EDGES[0], (EDGES[:-1] + EDGES[1:]) / 2, EDGES[-1]]
RIDGE = 1e-3  # keeps the curve finite when a histogram separates; in units of one cell


@dataclass(frozen=True, eq=False)
class FlipModel:
    """Cells and flips by log margin, and the curve through them.

    Attributes:
        cells, flips: `[122]` int64 counts by bin of log margin.
    """

    cells: np.ndarray
    flips: np.ndarray

    @classmethod
    def empty(cls) -> FlipModel:
        """Nothing seen yet."""
        return cls(np.zeros(len(CENTRES), np.int64), np.zeros(len(CENTRES), np.int64))

    def seen(self, margins: np.ndarray, flipped: np.ndarray, known: np.ndarray) -> FlipModel:
        """With another batch.

        Args:
            margins: `[N, L]` >= 0 of the live scores; cells of infinite margin, where nothing could flip, are left out.
            flipped: bool `[N, L]`, sets that differ.
            known: bool `[N, L]`, cells recorded on both sides.

        Raises:
            ReplayError: for a known margin that is negative or NaN.
        """
        use = known & np.isfinite(margins)
        bins = _bins(margins[use])
        cells = np.bincount(bins, minlength=len(CENTRES))
        flips = np.bincount(bins[flipped[use]], minlength=len(CENTRES))
        return FlipModel(self.cells + cells, self.flips + flips)

    def coefficients(self) -> tuple[float, float]:
        """(intercept, slope) of logit P = intercept + slope · log margin, by Newton's method with a small ridge.

        With no flip at all, or nothing but flips, there is no slope to see: it is 0 and P is (flips + 1/2)/(cells + 1).

        Raises:
            ReplayError: if nothing was seen.
        """
        n, k = int(self.cells.sum()), int(self.flips.sum())
        if n == 0:
            raise ReplayError("flip model: expected cells of earlier batches, found none")
        if not 0 < k < n:
            return float(np.log((k + 0.5) / (n - k + 0.5))), 0.0
        x = np.stack([np.ones(len(CENTRES)), (CENTRES - CENTRES.mean()) / 10], 1)
        beta = np.array([np.log(k / (n - k)), 0.0])

        def loss(b: np.ndarray) -> float:
            z = x @ b
            return float((self.cells * np.logaddexp(0, z) - self.flips * z).sum() + RIDGE * b[1] ** 2 / 2)

        for _ in range(100):
            p = 1 / (1 + np.exp(-(x @ beta)))
            gradient = x.T @ (self.cells * p - self.flips) + RIDGE * np.array([0, beta[1]])
            hessian = (x * (self.cells * p * (1 - p))[:, None]).T @ x + RIDGE * np.diag([0.0, 1.0])
            step = np.linalg.solve(hessian + 1e-12 * np.eye(2), gradient)
            size = 1.0
            while loss(beta - size * step) > loss(beta) and size > 1e-8:
                size /= 2
            beta = beta - size * step
            if np.abs(size * step).max() < 1e-10:
                break
        slope = beta[1] / 10
        return float(beta[0] - slope * CENTRES.mean()), float(slope)

    def probability(self, margins: np.ndarray) -> np.ndarray:
        """P(flip) of margins of any shape, float64; 0 where the margin is infinite.

        Raises:
            ReplayError: if nothing was seen, or for a margin that is negative.
        """
        out = np.zeros(np.shape(margins))
        finite = np.isfinite(margins)
        if not finite.any():
            return out
        intercept, slope = self.coefficients()
        z = intercept + slope * CENTRES[_bins(np.asarray(margins)[finite])]
        out[finite] = 1 / (1 + np.exp(-z))
        return out

    def calibration(self, groups: int = 10) -> pd.DataFrame:
        """Predicted against observed flips in groups of about equally many cells, by predicted probability.

        Returns:
            A row a group: `cells`, `flips`, `expected` (flips), `predicted` and `observed` (shares of the cells).

        Raises:
            ReplayError: if nothing was seen.
        """
        intercept, slope = self.coefficients()
        p = 1 / (1 + np.exp(-(intercept + slope * CENTRES)))
        table = pd.DataFrame({"predicted": p, "cells": self.cells, "flips": self.flips}).sort_values("predicted")
        table = table[table.cells > 0]
        table["group"] = np.minimum((table.cells.cumsum() - 1) * groups // table.cells.sum(), groups - 1)
        table["expected"] = table.predicted * table.cells
        out = table.groupby("group")[["cells", "flips", "expected"]].sum()
        return out.assign(predicted=out.expected / out.cells, observed=out.flips / out.cells).reset_index(drop=True)


def _bins(margins: np.ndarray) -> np.ndarray:
    if (margins < 0).any() or np.isnan(margins).any():
        raise ReplayError("margins: expected 0 or more, found a negative or NaN")
    with np.errstate(divide="ignore"):
        return np.searchsorted(EDGES, np.log(margins.astype(np.float64)), side="right")
