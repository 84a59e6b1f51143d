"""k3 between rollout and trainer: by step above the noise floor, and R3 against none on the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rar_lib.figures.style import (
    OKABE_ITO,
    PAGE_WIDTH,
    POLICY_COLOUR,
    POLICY_MARKER,
    corner_note,
    described,
    family,
    house_style,
    lines_by_policy,
    new_figure,
    seeds_note,
)


def mismatch_by_step(table: pd.DataFrame, noise_floor: float | None, ratios: pd.DataFrame) -> Figure:
    """Left: k3 (rollout/old) of each run in nats a token, logarithmic. Right: k3 under R3 over k3 under none, paired.

    Single steps jump, since a few tokens carry most of k3; the paired ratio compares the same tokens at the same weights.

    Args:
        table: policy, seed, step, value.
        noise_floor: the larger of the two engines' k3 against themselves; None if it could not be measured.
        ratios: group, ratio, low, high: a row a group of batches, top to bottom; a group named like a policy gets its
            colour.
    """
    with house_style():
        figure, (left, right) = new_figure(PAGE_WIDTH, 2.6, columns=2)
        seeds_note(left, lines_by_policy(left, table))
        left.set(xlabel="step", ylabel="k3 rollout/old (nats a token)", yscale="log")
        left.legend(frameon=False, loc="best")
        _draw_floor(left, noise_floor, float(table["value"].min()))
        _draw_ratios(right, ratios)
    told = ", ".join(f"{r.group} {r.ratio:.2f} [{r.low:.2f}, {r.high:.2f}]" for r in ratios.itertuples())
    return described(
        figure, f"k3 between rollout and trainer by step. k3 under R3 over k3 under none on the same tokens: {told}."
    )


def _draw_floor(axes: Any, noise_floor: float | None, smallest: float) -> None:
    if noise_floor is None:
        corner_note(axes, "noise floor not measured", "left")
    elif noise_floor == 0:
        corner_note(axes, "noise floor 0 (bit-equal)", "left")
    elif noise_floor < smallest / 100:  # drawing it would flatten everything else
        corner_note(axes, f"noise floor {noise_floor:.0e}, far below", "left")
    else:
        axes.axhline(noise_floor, color=OKABE_ITO["grey"], linestyle="--", linewidth=1)
        axes.annotate(
            "noise floor",
            (0.01, noise_floor),
            xycoords=("axes fraction", "data"),
            fontsize=7,
            color=OKABE_ITO["grey"],
            va="bottom",
        )


def _draw_ratios(axes: Any, ratios: pd.DataFrame) -> None:
    for place, name in enumerate(ratios["group"].astype(str)):
        ratio, low, high = ratios.loc[ratios.index[place], ["ratio", "low", "high"]].to_numpy(float)
        axes.errorbar(
            ratio,
            place,
            xerr=np.array([[ratio - low], [high - ratio]]),
            color=POLICY_COLOUR.get(family(name), OKABE_ITO["black"]),
            marker=POLICY_MARKER.get(family(name), "D"),
            capsize=2,
        )
    axes.axvline(1, color=OKABE_ITO["grey"], linestyle="--", linewidth=1)
    axes.set(
        xlabel="k3 under R3 / k3 under none, same tokens", yticks=range(len(ratios)), yticklabels=list(ratios["group"])
    )
    axes.set_xlim(0, max(1.15, float(ratios["high"].max()) * 1.05))
    axes.set_ylim(len(ratios) - 0.5, -0.5)
    corner_note(axes, "95 %, clustered by prompt", "right")
