"""Scores of experts: the values themselves, how far estimators agree, how stable they are, and whether P(flip) is calibrated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rar_lib.figures.style import (
    COLUMN_WIDTH,
    OKABE_ITO,
    PAGE_WIDTH,
    corner_note,
    described,
    house_style,
    listed,
    new_figure,
)


def score_map(values: np.ndarray, layers: list[int], name: str) -> Figure:
    """Score of every cell as its multiple of the layer's median, log2, diverging at 0; cells without routes are hatched.

    The colours end at the 90th percentile of the distance from 0, and an arrow on the bar says where values lie beyond.

    Args:
        values: `[L, E]`, -inf where unscored.
        layers: transformer layer numbers.
        name: of the score.
    """
    scored = np.isfinite(values) & (values > 0)
    median = np.array([np.median(row[ok]) if ok.any() else np.nan for row, ok in zip(values, scored, strict=True)])
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.where(scored, np.log2(values / median[:, None]), np.nan)
    distance = np.abs(shown[np.isfinite(shown)])
    limit = max(1.0, float(np.quantile(distance, 0.9))) if distance.size else 1.0
    beyond = "both" if distance.size and distance.max() > limit else "neither"
    with house_style():
        figure, axes = new_figure(PAGE_WIDTH, 0.9 + 0.28 * len(layers))
        image = axes.imshow(shown, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
        for layer, expert in np.argwhere(~scored):
            axes.add_patch(_hatched(expert, layer))
        axes.set(xlabel="expert", ylabel="MoE layer", yticks=range(len(layers)), yticklabels=layers)
        bar = figure.colorbar(image, ax=axes, pad=0.01, extend=beyond)
        bar.set_label("log2(score / layer median)")
        corner_note(axes, f"{name}; hatched: no route", "right")
    return described(
        figure,
        f"Score {name} of {values.shape[1]} experts in {len(layers)} MoE layers, as log2 of its multiple of the layer's median; "
        f"{int((~scored).sum())} cells without a route.",
    )


def _hatched(expert: int, layer: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (expert - 0.5, layer - 0.5), 1, 1, facecolor="none", edgecolor=OKABE_ITO["grey"], hatch="////", linewidth=0
    )


def estimator_agreement(table: pd.DataFrame) -> Figure:
    """Rank correlation of estimators within layers, as a matrix of numbers.

    Args:
        table: a, b, spearman: every ordered pair of names.
    """
    names = list(dict.fromkeys(table["a"]))
    wide = table.pivot_table(index="a", columns="b", values="spearman").loc[names, names]
    with house_style():
        figure, axes = new_figure(COLUMN_WIDTH + 1.2, 0.9 + 0.38 * len(names))
        axes.imshow(wide, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
        for i, row in enumerate(wide.to_numpy()):
            for j, value in enumerate(row):
                axes.annotate(f"{value:.2f}", (j, i), ha="center", va="center", fontsize=8,
                              color="white" if abs(value) > 0.65 else "black")  # fmt: skip
        axes.set(xticks=range(len(names)), yticks=range(len(names)), xticklabels=names, yticklabels=names)
        axes.tick_params(axis="x", rotation=30)
        corner_note(axes, "Spearman within layers", "right")
    first = wide.iloc[0]
    return described(
        figure,
        f"Rank correlation of score estimators within layers; of {wide.index[0]} with {listed(first.index, first, '.2f')}.",
    )


def score_stability(table: pd.DataFrame) -> Figure:
    """Split-half rank correlation of each score beside the range that permutation within layers gives.

    Args:
        table: name, spearman, null_low, null_high: a row a score and checkpoint.
    """
    names = list(dict.fromkeys(table["name"]))
    with house_style():
        figure, axes = new_figure(COLUMN_WIDTH + 1.2, 0.9 + 0.26 * len(names))
        for place, name in enumerate(names):
            rows = table[table["name"] == name]
            low, high = float(rows["null_low"].min()), float(rows["null_high"].max())
            axes.plot(
                [low, high], [place, place], color=OKABE_ITO["grey"], linewidth=4, alpha=0.4, solid_capstyle="butt"
            )
            axes.plot(rows["spearman"], [place] * len(rows), "o", color=OKABE_ITO["green"], alpha=0.8)
        axes.set(xlabel="Spearman between halves of the prompts", yticks=range(len(names)), yticklabels=names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(min(-0.6, float(table["null_low"].min())) - 0.05, 1.05)
        corner_note(axes, "grey: 95 % under permutation", "right")
    means = table.groupby("name", sort=False)["spearman"].mean()
    return described(
        figure, f"Split-half rank correlation of scores, mean over checkpoints: {listed(means.index, means, '.2f')}."
    )


def flip_calibration(table: pd.DataFrame) -> Figure:
    """Predicted against observed P(flip), by groups of cells, logarithmic; on the diagonal the model is calibrated.

    Args:
        table: predicted, observed, cells; groups in which nothing flipped are drawn at the lower edge.
    """
    with house_style():
        figure, axes = new_figure()
        known = table[table["observed"] > 0]
        floor = 0.5 / float(table["cells"].max())
        axes.plot([floor / 2, 1], [floor / 2, 1], color=OKABE_ITO["grey"], linestyle="--", linewidth=1)
        axes.plot(known["predicted"], known["observed"], "o", color=OKABE_ITO["purple"])
        none = table[table["observed"] == 0]
        axes.plot(none["predicted"], np.full(len(none), floor), "v", color=OKABE_ITO["grey"], fillstyle="none")
        axes.set(xscale="log", yscale="log", xlabel="predicted P(flip)", ylabel="observed share of flips")
        corner_note(axes, "open: none flipped", "right")
    pairs = ", ".join(f"{r.predicted:.2g} against {r.observed:.2g}" for r in known.itertuples())
    return described(figure, f"Predicted against observed P(flip) of groups of cells: {pairs}.")
