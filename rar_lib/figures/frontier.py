"""Efficiency against how much is forced: nominal and binding share, one line a policy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rar_lib.figures.style import (
    OKABE_ITO,
    PAGE_WIDTH,
    POLICY_STYLE,
    corner_note,
    described,
    house_style,
    listed,
    new_figure,
    policies,
)


def frontier(
    passes: Mapping[str, pd.DataFrame], *, note: str = "95 %, clustered by prompt", width: float = PAGE_WIDTH
) -> Figure:
    """A row of two panels a pass: efficiency against the nominal share, and against the binding share.

    0 is none and 1 is full replay. A policy that forces what would have happened anyway lies far left in the right panel.

    Args:
        passes: title -> policy, nominal, binding, efficiency, and low and high where there are intervals; rows of `none` and
            `full` are the ends of every line.
        note: what the bars are.
        width: inches.
    """
    with house_style():
        figure, axes = new_figure(width, 0.5 + 2.5 * len(passes), columns=2, rows=len(passes), squeeze=False)
        for row, (title, table) in zip(axes, passes.items(), strict=True):
            lines = table[~table["policy"].isin(["none", "full"])]
            full = table[table["policy"] == "full"]
            for panel, x in zip(row, ("nominal", "binding"), strict=True):
                for name in policies(lines):
                    if x == "nominal" and name == "bias":
                        continue  # λ is offered to every route: it has no nominal share to compare
                    _line(panel, lines[lines["policy"] == name].sort_values(x), full, x, name)
                for level in (0, 1):
                    panel.axhline(level, color=OKABE_ITO["grey"], linewidth=0.8, linestyle=(0, (1, 2)))
                panel.set(xlabel=f"{x} share of routes", ylabel=f"efficiency, {title}")
            top = float(np.nanmax(np.r_[1.0, lines["efficiency"]]))
            bottom = float(np.nanmin(np.r_[0.0, lines["efficiency"]]))
            for panel in row:
                panel.set_ylim(max(bottom, -1.0) - 0.1, min(top, 2.0) + 0.1)
            corner_note(row[1], note, "right")
        handles, labels = axes[0][1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5 if width > 5 else 3, frameon=False)
    title, table = next(iter(passes.items()))
    least = table[table["policy"] != "none"].sort_values("nominal").drop_duplicates("policy").sort_values("policy")
    told = listed([f"{r.policy} at {r.nominal:.2g}" for r in least.itertuples()], least["efficiency"], ".2f")
    return described(figure, f"Efficiency against nominal and binding share of routes, {title}: {told}.")


def _line(axes: object, rows: pd.DataFrame, full: pd.DataFrame, x: str, name: str) -> None:
    colour, marker, style = POLICY_STYLE[name]
    ends_x, ends_y = np.r_[0.0, rows[x], full[x]], np.r_[0.0, rows["efficiency"], np.ones(len(full))]
    axes.plot(ends_x, ends_y, color=colour, linestyle=style, linewidth=1)  # type: ignore[attr-defined]
    bars = None
    if "low" in rows:
        bars = np.stack([rows["efficiency"] - rows["low"], rows["high"] - rows["efficiency"]]).clip(min=0)
    axes.errorbar(  # type: ignore[attr-defined]
        rows[x],
        rows["efficiency"],
        yerr=bars,
        color=colour,
        marker=marker,
        linestyle="none",
        elinewidth=0.6,
        label=name,
    )
