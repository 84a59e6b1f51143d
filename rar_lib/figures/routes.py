"""Where two records of routes disagree, and how the load lies on the experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rar_lib.figures.style import OKABE_ITO, corner_note, house_style, new_figure

REACH = 3.0  # of the colours of a load, in powers of two


def disagreement_by_layer(table: pd.DataFrame, *, seed: int = 0, resamples: int = 1000) -> Figure:
    """Router flips by layer: the share of (token, layer) cells whose sets differ, with a 95 % bootstrap over sequences.

    Args:
        table: `sequence, layer, flips, cells` (metrics.agreement.flip_counts).
        seed, resamples: of the bootstrap.
    """
    flips = table.pivot_table(index="sequence", columns="layer", values="flips")
    cells = table.pivot_table(index="sequence", columns="layer", values="cells")
    draws = np.random.default_rng(seed).multinomial(len(flips), np.full(len(flips), 1 / len(flips)), resamples)
    rates = (draws @ flips.to_numpy()) / np.maximum(draws @ cells.to_numpy(), 1)
    low, high = np.percentile(rates, [2.5, 97.5], axis=0)
    rate = flips.to_numpy().sum(0) / np.maximum(cells.to_numpy().sum(0), 1)
    layers = flips.columns.to_numpy()
    with house_style():
        figure, axes = new_figure()
        axes.errorbar(
            layers, rate, yerr=np.stack([np.maximum(rate - low, 0), np.maximum(high - rate, 0)]), color=OKABE_ITO["blue"], marker="o",
            linestyle="none", capsize=2,
        )  # fmt: skip
        axes.set(xlabel="MoE layer", ylabel="router flip (share of cells)")
        axes.set_ylim(bottom=0)
        if len(layers) <= 12:
            axes.set_xticks(layers)
        corner_note(axes, f"n={len(flips)} sequences, 95 % bootstrap", "right")
    return figure


def load_map(load: np.ndarray, layers: Sequence[int]) -> Figure:
    """log2(load / uniform) of every expert in every layer, white at the uniform load; grey where an expert got no route.

    Colours end at a factor of eight either way; the bar's arrows say where values lie beyond.

    Args:
        load: `[L, E]` shares, rows sum to 1 (metrics.load.load).
        layers: transformer layer numbers of the rows.
    """
    experts = load.shape[1]
    with np.errstate(divide="ignore"):
        values = np.where(load > 0, np.log2(load * experts), np.nan)
    reach = min(REACH, max(1.0, float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0))
    with house_style():
        figure, axes = new_figure(height=max(2.2, 0.9 + 0.16 * len(layers)))
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
    return figure
