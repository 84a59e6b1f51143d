"""Expert flow: which expert's work went to which, between two records of the same tokens in one layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve

from rar_lib.figures.style import COLUMN_WIDTH, OKABE_ITO, corner_note, described, house_style, new_figure

COLOURS = [OKABE_ITO[name] for name in ("blue", "orange", "green", "vermillion", "purple", "sky", "yellow", "black")]


def expert_flow(
    table: pd.DataFrame, *, before: str = "rollout", after: str = "trainer", top: int = 8, width: float = COLUMN_WIDTH
) -> Figure:
    """Bands from an expert on the left to the one that took its place on the right; heights are shares of all routes that moved.

    Only what changed is drawn: routes that stayed are no flow. The experts with the largest flow are named, the rest is one node.

    Args:
        table: source, target (expert ids), share (of the known cells of the layer; metrics.agreement.churn_matrix).
        before, after: what the two sides are.
        top: experts that are named, by their flow in and out.
        width: inches.
    """
    total = float(table["share"].sum())
    flow = table.groupby("source")["share"].sum().add(table.groupby("target")["share"].sum(), fill_value=0)
    named = [int(e) for e in flow[flow > 0].sort_values(ascending=False, kind="stable").index[:top]]
    places: dict[int, int] = {e: i for i, e in enumerate(sorted(named))}
    count = len(places) + (1 if (flow > 0).sum() > len(places) else 0)
    matrix = np.zeros((count, count))
    for source, target, share in table[["source", "target", "share"]].itertuples(index=False):
        matrix[places.get(int(source), count - 1), places.get(int(target), count - 1)] += share
    names = [str(e) for e in places] + (["others"] if count > len(places) else [])
    with house_style():
        figure, axes = new_figure(width, 3.2)
        axes.set_axis_off()
        axes.set(xlim=(-0.16, 1.16), ylim=(-0.02, 1.08))
        if total > 0:
            _bands(axes, matrix, names, total)
        else:
            axes.text(0.5, 0.5, "no route changed", ha="center", va="center")
        axes.text(0.0, 1.04, before, ha="center", fontsize=8)
        axes.text(1.0, 1.04, after, ha="center", fontsize=8)
        corner_note(axes, f"{total:.2g} routes a cell changed; others not drawn", "right")
    largest = table.sort_values("share", ascending=False).head(3)
    described_flow = "; ".join(
        f"{s} to {t} {v:.2e}" for s, t, v in largest[["source", "target", "share"]].to_numpy(object)
    )
    return described(
        figure, f"Expert flow from {before} to {after}: {total:.2g} routes a cell changed. Largest: {described_flow}."
    )


def _bands(axes: Any, matrix: np.ndarray, names: list[str], total: float) -> None:
    """Nodes as bars, flows as Bézier bands; heights are shares of all that changed."""
    gap = 0.02
    scale = (1 - gap * (len(names) - 1)) / total
    out, into = matrix.sum(1) * scale, matrix.sum(0) * scale
    start = [np.r_[0, np.cumsum(side + gap)[:-1]] for side in (out, into)]
    used = [start[0].copy(), start[1].copy()]
    for i, j in ((i, j) for i in range(len(names)) for j in range(len(names)) if matrix[i, j] > 0):
        height = matrix[i, j] * scale
        a, b = used[0][i], used[1][j]
        used[0][i], used[1][j] = a + height, b + height
        points = [(0.03, a), (0.5, a), (0.5, b), (0.97, b), (0.97, b + height), (0.5, b + height), (0.5, a + height), (0.03, a + height),
                  (0.03, a)]  # fmt: skip
        codes = [Curve.MOVETO, *[Curve.CURVE4] * 3, Curve.LINETO, *[Curve.CURVE4] * 3, Curve.CLOSEPOLY]
        colour = OKABE_ITO["grey"] if names[i] == "others" else COLOURS[i % len(COLOURS)]
        axes.add_patch(PathPatch(Curve(points, codes), facecolor=colour, alpha=0.5, linewidth=0))
    for x, sides, first in ((0.0, out, start[0]), (1.0, into, start[1])):
        for i, height in enumerate(sides):
            if height <= 0:
                continue
            axes.bar(x, height, 0.05, first[i], color=OKABE_ITO["black"])
            if height > 0.012 or len(names) <= 6:
                axes.text(x + (-0.05 if x == 0 else 0.05), first[i] + height / 2, names[i], ha="right" if x == 0 else "left", va="center",
                          fontsize=7)  # fmt: skip
