"""One answer token by token: what each router chose on both sides, where they differ, and what that did to the log-prob.

The static form of the explorer (figures/explorer.py), for batch runs and print.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from rar_lib.figures.style import OKABE_ITO, PAGE_WIDTH, corner_note, described, house_style, new_figure

COLOURS = {
    "same": "#FFFFFF",
    "differs": OKABE_ITO["vermillion"],
    "replayed": OKABE_ITO["blue"],
    "missing": OKABE_ITO["grey"],
}


LEGEND = {"differs": "differs (number: margin)", "missing": "no route recorded"}


def route_strip(table: pd.DataFrame, *, width: float = PAGE_WIDTH, first: int = 0, tokens: int = 24) -> Figure:
    """A column a token, a row a MoE layer: white where both sides chose the same experts, red where they differ, blue where the
    difference was replayed away, grey where a side has no record; below, the move of each token's log-prob.

    A token's log-prob is computed from the routes of the token before it, one column to the left; the last token is never fed, so it
    has no route. A dotted line divides prompt and answer.

    Args:
        table: position, text, layer, state (same, differs, replayed, missing), margin (of the trainer's choice, or NaN), delta (nats,
            training minus rollout log-prob of the token, or NaN); a row a token and layer (metrics.extremes.strip_table).
        width: inches.
        first: position of the first token shown.
        tokens: columns at most.
    """
    every = sorted(table["position"].unique())
    positions = [p for p in every if p >= first][:tokens]
    shown = table[table["position"].isin(positions)]
    layers = sorted(shown["layer"].unique())
    column = {p: i for i, p in enumerate(positions)}
    row = {layer: i for i, layer in enumerate(layers)}
    with house_style():
        figure, axes = new_figure(
            width, 1.5 + 0.22 * len(layers), rows=2, sharex=True, height_ratios=[max(1.2, 0.22 * len(layers)), 1.0]
        )
        top, bottom = axes
        for cell in shown.to_dict("records"):
            x, y, state = column[cell["position"]], row[cell["layer"]], cell["state"]
            top.add_patch(
                Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=COLOURS[state], edgecolor="#DDDDDD", linewidth=0.4)
            )
            if state in ("differs", "replayed") and np.isfinite(cell["margin"]) and len(positions) <= 24:
                margin = f"{cell['margin']:.0e}".replace("e-0", "e-")
                top.text(x, y, margin, fontsize=5, ha="center", va="center", color="white")
        ticks = list(range(len(layers)))[:: max(1, len(layers) // 12)]
        top.set(ylabel="MoE layer", yticks=ticks, yticklabels=[layers[i] for i in ticks])
        top.set_ylim(len(layers) - 0.5, -0.5)
        token = shown.drop_duplicates("position").set_index("position")
        delta = token["delta"].reindex(positions).to_numpy(float)
        bottom.bar(range(len(positions)), np.nan_to_num(delta), color=OKABE_ITO["black"], width=0.6)
        scored = np.flatnonzero(np.isfinite(delta))
        if len(scored) and scored[0]:  # the prompt ends here
            for panel in axes:
                panel.axvline(scored[0] - 0.5, color=OKABE_ITO["black"], linewidth=0.8, linestyle=":")
        bottom.axhline(0, color=OKABE_ITO["grey"], linewidth=0.8)
        texts = [_visible(t) for t in token["text"].reindex(positions)]
        bottom.set(ylabel="Δ log-prob\n(nats)", xticks=range(len(positions)), xticklabels=texts)
        bottom.set_xlim(-0.6, len(positions) - 0.4)
        _legend(figure, set(shown["state"]))
        if positions and len(positions) < len(every):
            corner_note(top, f"tokens {positions[0]} to {positions[-1]} of {len(every)}", "right")
    differing = shown[shown["state"].isin(["differs", "replayed"])]
    biggest = int(np.nanargmax(np.abs(delta))) if np.isfinite(delta).any() else None
    text = f"Routes of one answer over {len(positions)} tokens and {len(layers)} MoE layers: {len(differing)} cells differ."
    if biggest is not None:
        text += f" The largest move of a log-prob is {delta[biggest]:.2g} nats at token {texts[biggest]!r}."
    return described(figure, text)


def _legend(figure: Figure, states: set[str]) -> None:
    handles: list[Any] = [
        Rectangle((0, 0), 1, 1, facecolor=COLOURS[s], edgecolor="#BBBBBB", label=LEGEND.get(s, s))
        for s in COLOURS
        if s in states
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)


def _visible(text: object) -> str:
    """A token as a tick label: blanks and line ends shown, `$` kept from mathtext."""
    return str(text).replace(" ", "␣").replace("\n", "⏎").replace("$", r"\$")
