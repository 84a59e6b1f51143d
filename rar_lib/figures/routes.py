"""Where two records of routes disagree, and how the load lies on the experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

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

REACH = 3.0  # of the colours of a load, in powers of two


def disagreement_by_layer(
    table: pd.DataFrame, *, seed: int = 0, resamples: int = 1000, width: float = COLUMN_WIDTH
) -> Figure:
    """Router flips by layer: the share of (token, layer) cells whose sets differ, with a 95 % bootstrap over sequences.

    Args:
        table: `sequence, layer, flips, cells` (metrics.agreement.flip_counts).
        seed, resamples: of the bootstrap.
        width: inches.
    """
    flips = table.pivot_table(index="sequence", columns="layer", values="flips")
    cells = table.pivot_table(index="sequence", columns="layer", values="cells")
    draws = np.random.default_rng(seed).multinomial(len(flips), np.full(len(flips), 1 / len(flips)), resamples)
    rates = (draws @ flips.to_numpy()) / np.maximum(draws @ cells.to_numpy(), 1)
    low, high = np.percentile(rates, [2.5, 97.5], axis=0)
    rate = flips.to_numpy().sum(0) / np.maximum(cells.to_numpy().sum(0), 1)
    layers = flips.columns.to_numpy()
    with house_style():
        figure, axes = new_figure(width)
        axes.errorbar(
            layers, rate, yerr=np.stack([np.maximum(rate - low, 0), np.maximum(high - rate, 0)]), color=OKABE_ITO["blue"], marker="o",
            linestyle="none", capsize=2,
        )  # fmt: skip
        axes.set(xlabel="MoE layer", ylabel="router flip (share of cells)")
        axes.margins(y=0.08)
        axes.set_ylim(bottom=0)
        if len(layers) <= 12:
            axes.set_xticks(layers)
        corner_note(axes, f"n={len(flips)} sequences, 95 % bootstrap", "right")
    return described(figure, f"Share of routers that differ, by MoE layer: {listed(layers, rate)}.")


def load_map(load: np.ndarray, layers: Sequence[int], *, width: float = COLUMN_WIDTH) -> Figure:
    """log2(load / uniform) of every expert in every layer, white at the uniform load; grey where an expert got no route.

    Colours end at a factor of eight either way; the bar's arrows say where values lie beyond.

    Args:
        load: `[L, E]` shares, rows sum to 1 (metrics.load.load).
        layers: transformer layer numbers of the rows.
        width: inches.
    """
    experts = load.shape[1]
    with np.errstate(divide="ignore"):
        values = np.where(load > 0, np.log2(load * experts), np.nan)
    reach = min(REACH, max(1.0, float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0))
    with house_style():
        figure, axes = new_figure(width, max(2.2, 0.9 + 0.16 * len(layers)))
        axes.set_facecolor(OKABE_ITO["grey"])
        norm = TwoSlopeNorm(0, -reach, reach)
        image = axes.imshow(values, aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
        axes.set(xlabel="expert", ylabel="MoE layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        shown = np.unique(np.linspace(0, len(layers) - 1, min(len(layers), 12)).astype(int))
        axes.set_yticks(shown, [str(layers[i]) for i in shown])
        beyond = bool((np.abs(values[np.isfinite(values)]) > reach).any())
        bar = figure.colorbar(image, ax=axes, label="log2(load / uniform)", extend="both" if beyond else "neither")
        bar.outline.set_visible(False)
    return described(
        figure,
        f"Load of each of {experts} experts in {len(layers)} MoE layers as log2(load / uniform): from {np.nanmin(values):.2f} to "
        f"{np.nanmax(values):.2f}; {int((load == 0).sum())} experts without a route.",
    )


def load_shift_map(
    before: np.ndarray, after: np.ndarray, layers: Sequence[int], *, width: float = PAGE_WIDTH
) -> Figure:
    """The expert load before, after, and the difference of the two, each log2: load / uniform twice, then after / before.

    White is the uniform load, or no change; grey is an expert without a route (on either side, in the difference).

    Args:
        before, after: `[L, E]` shares, rows sum to 1 (metrics.load.load).
        layers: transformer layer numbers of the rows.
        width: inches; narrow figures are stacked.
    """
    experts = before.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        maps = [np.where(p > 0, np.log2(p * experts), np.nan) for p in (before, after)]
    maps.append(maps[1] - maps[0])
    reaches = [min(REACH, max(1.0, float(np.nanmax(np.abs(np.r_[maps[0], maps[1]])))))] * 2
    reaches.append(min(REACH, max(0.1, float(np.nanmax(np.abs(maps[2]), initial=0)))))
    stacked = width < 5
    with house_style():
        height = 0.9 + max(1.0, 0.16 * len(layers))
        figure, axes = new_figure(
            width, height * (3 if stacked else 1) + 0.2, *((1, 3) if stacked else (3, 1)), sharey=not stacked
        )
        shown = np.unique(np.linspace(0, len(layers) - 1, min(len(layers), 12)).astype(int))
        for panel, values, reach, name in zip(axes, maps, reaches, ("before", "after", "after / before"), strict=True):
            panel.set_facecolor(OKABE_ITO["grey"])
            image = panel.imshow(
                values, aspect="auto", cmap="RdBu_r", norm=TwoSlopeNorm(0, -reach, reach), interpolation="nearest"
            )
            panel.set(title=name, xlabel="expert")
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.set_yticks(shown, [str(layers[i]) for i in shown])
            beyond = bool((np.abs(values[np.isfinite(values)]) > reach).any())
            bar = figure.colorbar(image, ax=panel, extend="both" if beyond else "neither")
            bar.set_label("log2(after / before)" if name == "after / before" else "log2(load / uniform)")
            bar.outline.set_visible(False)
        for panel in axes if stacked else axes[:1]:
            panel.set_ylabel("MoE layer")
    tv = np.abs(after - before).sum(-1) / 2
    return described(
        figure,
        f"Load of each expert before and after. Total variation between the two by MoE layer: {listed(layers, tv)}.",
    )
