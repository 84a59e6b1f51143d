"""Where routers disagree, by layer and by margin: flips of the rollout against a native forward of the trainer."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rar_lib.figures.style import (
    COLUMN_WIDTH,
    OKABE_ITO,
    POLICY_COLOUR,
    POLICY_MARKER,
    corner_note,
    described,
    family,
    house_style,
    listed,
    mean_and_band,
    new_figure,
    policies,
)


def flips_by_layer(table: pd.DataFrame, *, width: float = COLUMN_WIDTH) -> Figure:
    """Share of (token, layer) cells whose set of experts differs, mean over steps with a bootstrap over steps.

    Args:
        table: policy, seed, step, layer, value.
        width: inches.
    """
    with house_style():
        figure, axes = new_figure(width)
        names = policies(table)
        for i, name in enumerate(names):
            wide = table[table["policy"] == name].pivot_table(index=["seed", "step"], columns="layer", values="value")
            mean, low, high = mean_and_band(wide)
            layers = wide.columns.to_numpy() + 0.12 * (i - (len(names) - 1) / 2)
            axes.errorbar(
                layers,
                mean,
                yerr=np.stack([mean - low, high - mean]),
                color=POLICY_COLOUR[family(name)],
                linestyle="none",
                marker=POLICY_MARKER[family(name)],
                capsize=2,
                label=name,
            )
        axes.set(xlabel="MoE layer", ylabel="router flip (share of cells)", xticks=sorted(set(table["layer"])))
        axes.margins(y=0.08)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, loc="best")
        units = table[["policy", "seed", "step"]].drop_duplicates().groupby("policy").size()
        corner_note(axes, f"n={units.min()} steps, 95 % bootstrap", "right")
    by_layer = table.groupby("layer")["value"].mean()
    return described(figure, f"Share of cells that flip, by MoE layer: {listed(by_layer.index, by_layer)}.")


def flips_by_margin(table: pd.DataFrame, *, auc: float | None = None, width: float = COLUMN_WIDTH) -> Figure:
    """Share of cells that flip, in groups of equal size by the margin of the native choice.

    Args:
        table: margin (median of the group, in units of the ranked score), flips (share), low, high, cells.
        auc: P(margin of a flipped cell < margin of another one).
        width: inches.
    """
    shown = table[table["margin"] > 0]
    with house_style():
        figure, axes = new_figure(width)
        bars = np.stack([shown["flips"] - shown["low"], shown["high"] - shown["flips"]]).clip(min=0)
        axes.errorbar(
            shown["margin"], shown["flips"], yerr=bars, color=OKABE_ITO["blue"], marker="o", linestyle="-", linewidth=0.8,
            capsize=2,
        )  # fmt: skip
        axes.set(xscale="log", xlabel="margin of the native choice", ylabel="router flip (share of cells)")
        axes.margins(y=0.08)
        axes.set_ylim(bottom=0)
        corner_note(axes, ("" if auc is None else f"AUC {auc:.3f}, ") + "95 %, clustered by prompt", "right")
    first, last = table.iloc[0], table.iloc[-1]
    return described(
        figure,
        f"Router flips against the margin: {first['flips']:.2%} of the cells flip at a margin of {first['margin']:.2g}, "
        f"{last['flips']:.2%} at {last['margin']:.2g}.",
    )
