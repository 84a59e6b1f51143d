"""What routes weigh, in each place where they lie or travel."""

from __future__ import annotations

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from rar_lib.figures.style import OKABE_ITO, PAGE_WIDTH, corner_note, described, house_style, new_figure


def route_costs(table: pd.DataFrame, batch: str, width: float = PAGE_WIDTH) -> Figure:
    """Bytes of the routes of a batch by place and model: a point each, since a logarithmic axis has no 0 for bars. Computed, and it says so.

    Args:
        table: of scale_out.cost_table.
        batch: what the batch is, for the axis.
        width: inches.
    """
    models = list(table["model"].unique())
    with house_style():
        figure, axes = new_figure(width, 0.8 + 0.34 * table["place"].nunique())
        colours = dict(zip(models, (OKABE_ITO["blue"], OKABE_ITO["orange"]), strict=False))
        sns.stripplot(table, x="GB", y="place", hue="model", palette=colours, size=7, dodge=True, jitter=False, ax=axes)
        axes.set(xscale="log", xlabel=f"GB of routes, {batch} (log scale)", ylabel="")
        axes.grid(axis="x", linewidth=0.4)
        for points in axes.collections:
            for x, y in points.get_offsets():
                axes.annotate(f"{x:.3g}", (x, y), (7, 0), textcoords="offset points", va="center", fontsize="small")
        axes.margins(x=0.12)
        sns.move_legend(axes, "lower left", bbox_to_anchor=(0, 1), ncols=len(models), frameon=False, title=None)
        corner_note(axes, "computed", "right")
    largest = table.sort_values("GB").iloc[-1]
    return described(
        figure,
        f"Points: the bytes that the routes of {batch} take in {table['place'].nunique()} places for {' and '.join(models)}, computed "
        f"from formulas; the largest is {largest['GB']:.3g} GB, {largest['place']}, {largest['model']}.",
    )
