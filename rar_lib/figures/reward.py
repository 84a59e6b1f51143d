"""Reward by step and policy."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from rar_lib.figures.style import house_style, lines_by_policy, new_figure, seeds_note


def reward_by_step(table: pd.DataFrame) -> Figure:
    """Mean reward of the sampled batch.

    Args:
        table: policy, seed, step, value (reward in 0..1).
    """
    with house_style():
        figure, axes = new_figure()
        seeds_note(axes, lines_by_policy(axes, table))
        axes.set(xlabel="step", ylabel="reward (sampled batch)")
        axes.legend(frameon=False, loc="best")
    return figure
