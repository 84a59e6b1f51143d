"""Reward by step and policy: of the sampled batches, and on held-out prompts."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from rar_lib.figures.style import (
    BANDS,
    COLUMN_WIDTH,
    described,
    house_style,
    lines_by_policy,
    listed,
    new_figure,
    seeds_note,
)


def reward_by_step(table: pd.DataFrame, held_out: pd.DataFrame | None = None, *, width: float | None = None) -> Figure:
    """Mean reward of the sampled batch; and, in a second panel, the reward served on held-out prompts.

    Args:
        table: policy, seed, step, value (reward in 0..1).
        held_out: the same on held-out prompts, at the steps at which it was measured.
        width: inches, by default a column for one panel and a page for two.
    """
    parts = [("reward (sampled batch)", table)] + ([] if held_out is None else [("reward (held out)", held_out)])
    size = width or COLUMN_WIDTH * len(parts)
    stacked = len(parts) > 1 and size < 5
    rows, columns = (len(parts), 1) if stacked else (1, len(parts))
    with house_style():
        figure, axes = new_figure(size, 2.6 * rows, columns, rows, squeeze=False)
        for panel, (name, values) in zip(axes.ravel(), parts, strict=True):
            seeds_note(panel, lines_by_policy(panel, values), values["policy"].nunique() <= BANDS)
            panel.set(xlabel="step", ylabel=name)
        few = table["policy"].nunique() <= 4
        if few:
            axes[0][0].legend(frameon=False, loc="best")
        else:
            handles, labels = axes[0][0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=2 if size < 5 else 5, frameon=False)
    last = table[table["step"] == table["step"].max()].groupby("policy", sort=False)["value"].mean()
    return described(figure, f"Reward by step. At the last step: {listed(last.index, last)}.")
