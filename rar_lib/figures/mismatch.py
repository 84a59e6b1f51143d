"""k3 between rollout and trainer by step and policy, above the noise floor of the engines."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from rar_lib.figures.style import OKABE_ITO, house_style, lines_by_policy, new_figure, seeds_note


def mismatch_by_step(table: pd.DataFrame, noise_floor: float | None) -> Figure:
    """k3 (rollout/old) in nats a token, logarithmic.

    Args:
        table: policy, seed, step, value.
        noise_floor: the larger of the two engines' k3 against themselves; None if it could not be measured.
    """
    with house_style():
        figure, axes = new_figure()
        seeds_note(axes, lines_by_policy(axes, table))
        axes.set(xlabel="step", ylabel="k3 rollout/old (nats a token)", yscale="log")
        axes.legend(frameon=False, loc="best")
        smallest = float(table["value"].min())
        if noise_floor is None:
            _note(axes, "noise floor not measured")
        elif noise_floor == 0:
            _note(axes, "noise floor 0 (bit-equal)")
        elif noise_floor < smallest / 100:  # drawing it would flatten everything else
            _note(axes, f"noise floor {noise_floor:.0e}, far below")
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
    return figure


def _note(axes: object, text: str) -> None:
    axes.annotate(  # type: ignore[attr-defined]
        text, (0, 1), xycoords="axes fraction", ha="left", va="bottom", fontsize=7, color=OKABE_ITO["grey"]
    )
