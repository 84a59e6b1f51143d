"""Which layers disagree: router flips of the rollout against a native forward of the trainer."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rar_lib.figures.style import (
    POLICY_COLOUR,
    POLICY_MARKER,
    corner_note,
    family,
    house_style,
    mean_and_band,
    new_figure,
    policies,
)


def flips_by_layer(table: pd.DataFrame) -> Figure:
    """Share of (token, layer) cells whose set of experts differs, mean over steps with a bootstrap over steps.

    Args:
        table: policy, seed, step, layer, value.
    """
    with house_style():
        figure, axes = new_figure()
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
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, loc="best")
        units = table[["policy", "seed", "step"]].drop_duplicates().groupby("policy").size()
        corner_note(axes, f"n={units.min()} steps, 95 % bootstrap", "right")
    return figure
