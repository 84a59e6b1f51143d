"""Has a run collapsed? One written rule, so that the word means the same in every table.

    r̄_t    mean reward of the last `window` steps up to t
    best_t  the largest r̄ up to t
    a run has collapsed at t if r̄_u <= share * best_u at t and at every later step u

A dip that is made good is no collapse; a run that ends before it recovers is one. A run whose gradient is not finite has
diverged, which is said beside it (summary `diverged`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def collapsed_at(rewards: Sequence[float], *, window: int = 5, share: float = 0.5) -> int | None:
    """The first step of the collapse; None if the run has not collapsed.

    Args:
        rewards: mean reward of every step, >= 0.
        window: steps of the running mean; the first steps average what there is.
        share: of the best running mean, at or below which a run counts as collapsed.

    Raises:
        ValueError: for a reward that is negative or not finite, where shares of the best mean nothing.
    """
    values = np.asarray(rewards, np.float64)
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if bad.size:
        raise ValueError(f"collapse: expected finite rewards of 0 or more, found {values[bad[0]]} at step {bad[0]}")
    sums = np.cumsum(np.r_[0.0, values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    running = (sums[ends] - sums[starts]) / (ends - starts)
    best = np.maximum.accumulate(running) if len(running) else running
    low = (running <= share * best) & (best > 0)
    step = len(low)
    while step and low[step - 1]:
        step -= 1
    return step if step < len(low) else None
