"""Do flips cluster on tokens? How many layers of a token flip, against what independent layers would give."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rar_lib.figures.style import COLUMN_WIDTH, OKABE_ITO, corner_note, described, house_style, new_figure


def layers_per_token(table: pd.DataFrame, *, dispersion: float | None = None, width: float = COLUMN_WIDTH) -> Figure:
    """Share of tokens with D flipped layers: observed, Poisson-binomial of the per-layer rates, and flips shuffled within layers.

    Args:
        table: layers, observed, independent, permuted (shares of tokens; each sums to 1).
        dispersion: variance of D over that of independent layers.
        width: inches.
    """
    shown = table[table[["observed", "independent", "permuted"]].max(axis=1) > 0]
    with house_style():
        figure, axes = new_figure(width)
        axes.bar(shown["layers"], shown["observed"], color=OKABE_ITO["sky"], width=0.7, label="observed")
        axes.plot(
            shown["layers"], shown["independent"].where(shown["independent"] > 0), color=OKABE_ITO["black"], marker="o",
            linestyle="--", label="independent layers",
        )  # fmt: skip
        axes.plot(
            shown["layers"], shown["permuted"].where(shown["permuted"] > 0), color=OKABE_ITO["vermillion"], marker="x",
            linestyle="none", label="shuffled within layers",
        )  # fmt: skip
        smallest = float(shown[["observed", "independent"]].where(lambda t: t > 0).min().min())
        axes.set(yscale="log", xlabel="flipped layers of a token, D", ylabel="share of tokens")
        axes.set_ylim(bottom=max(smallest / 3, 1e-8))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, loc="best")
        if dispersion is not None:
            corner_note(axes, f"dispersion {dispersion:.2f}", "right")
    any_flip = 1 - float(table.loc[table["layers"] == 0, "observed"].iloc[0])
    independent = 1 - float(table.loc[table["layers"] == 0, "independent"].iloc[0])
    return described(
        figure,
        f"Flipped layers a token. Tokens with any flip: {any_flip:.3g}; independent layers would give {independent:.3g}.",
    )
