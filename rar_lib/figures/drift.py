"""What training does to routing: drift of the same tokens since the start, by layer, and how far one step moves the router."""

from __future__ import annotations

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rar_lib.figures.style import OKABE_ITO, PAGE_WIDTH, corner_note, described, house_style, listed, new_figure

GAMMA = (("γ median", "gamma_p50", "-"), ("10th percentile", "gamma_p10", "--"), ("1st percentile", "gamma_p1", ":"))


def routing_drift(layers: pd.DataFrame, gamma: pd.DataFrame, *, width: float = PAGE_WIDTH) -> Figure:
    """Left: share of cells of the probe that are routed otherwise than at the start, a line a layer. Right: γ of each step (RSPO).

    Args:
        layers: step, layer, value (share of cells).
        gamma: step, gamma_p50, gamma_p10, gamma_p1 (0..1).
        width: inches; narrow figures are stacked.
    """
    stacked = width < 5
    numbers = sorted(layers["layer"].unique())
    with house_style():
        colours = sns.color_palette("viridis", len(numbers))
        figure, axes = new_figure(width, 4.8 if stacked else 2.6, 1 if stacked else 2, 2 if stacked else 1)
        left, right = axes
        for colour, number in zip(colours, numbers, strict=True):
            part = layers[layers["layer"] == number].sort_values("step")
            left.plot(part["step"], part["value"], color=colour, label=f"layer {number}")
        left.set(xlabel="step", ylabel="drift since the start (share of cells)")
        left.set_ylim(bottom=0)
        left.legend(frameon=False, loc="best", ncols=1 if len(numbers) <= 6 else 2)
        for name, column, style in GAMMA:
            right.plot(gamma["step"], gamma[column], color=OKABE_ITO["black"], linestyle=style, label=name)
        right.axhline(0.8, color=OKABE_ITO["vermillion"], linewidth=0.8, label="RSPO's floor")
        right.set(xlabel="step", ylabel="γ of one step")
        right.set_ylim(min(0.78, float(gamma["gamma_p1"].min()) - 0.02), 1.005)
        right.legend(frameon=False, loc="best")
        corner_note(left, "same tokens, native forward", "right")
        for panel in axes:
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    last = layers[layers["step"] == layers["step"].max()].sort_values("layer")
    return described(
        figure,
        f"Routing drift of the same tokens since the start, by layer: {listed(last['layer'], last['value'])} at the last step. "
        f"Smallest 1st percentile of γ in a step: {gamma['gamma_p1'].min():.3f}.",
    )
