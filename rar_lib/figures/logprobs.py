"""Rollout against training log-probs, token by token, and how many of them are extreme."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rar_lib.figures.style import (
    COLUMN_WIDTH,
    OKABE_ITO,
    PAGE_WIDTH,
    POLICY_STYLE,
    colour_of,
    corner_note,
    described,
    family,
    house_style,
    listed,
    new_figure,
    policies,
)

FACTOR = float(np.log(2.0))


def logprob_scatter(table: pd.DataFrame, *, width: float = PAGE_WIDTH) -> Figure:
    """One panel a policy: every response token's log-prob under rollout and trainer, with guides at a factor of 2.

    Tokens with a flip in some layer of their input are drawn above the others.

    Args:
        table: policy, logp_rollout, logp_train (nats), flipped (bool: routes of the rollout and a native forward differ).
        width: inches.
    """
    names = policies(table)
    columns = min(len(names), 3 if width > 5 else 2)
    rows = -(-len(names) // columns)
    low = float(min(table["logp_rollout"].min(), table["logp_train"].min())) - 0.2
    shares = []
    with house_style():
        side = width / columns
        height = 0.5 + rows * min(side + 0.3, 2.8)
        figure, axes = new_figure(width, height, columns, rows, squeeze=False, sharex=True, sharey=True)
        line = np.array([low, 0.0])
        for panel, name in zip(axes.ravel(), names, strict=False):
            part = table[table["policy"] == name]
            gap = (part["logp_train"] - part["logp_rollout"]).abs()
            shares.append(float((gap > FACTOR).mean()))
            for flipped, colour, label in (
                (False, OKABE_ITO["grey"], "no flip"),
                (True, OKABE_ITO["vermillion"], "any flip"),
            ):
                some = part[part["flipped"] == flipped]
                panel.scatter(
                    some["logp_rollout"], some["logp_train"], s=4, alpha=0.7 if flipped else 0.4, color=colour, linewidth=0,
                    label=label, rasterized=True,
                )  # fmt: skip
            panel.plot(line, line, color=OKABE_ITO["black"], linewidth=0.8)
            for guide in (-FACTOR, FACTOR):
                panel.plot(line, line + guide, color=OKABE_ITO["black"], linewidth=0.6, linestyle=":")
            panel.set(xlim=(low, 0.15), ylim=(low, 0.15), title=name)
            panel.text(0.97, 0.05, f"F(2) {shares[-1]:.1e}", transform=panel.transAxes, ha="right", fontsize=7)
        for spare in axes.ravel()[len(names) :]:
            spare.set_visible(False)
        for panel in axes[:, 0]:
            panel.set_ylabel("training log-prob (nats)")
        for column in range(columns):
            lowest = max(i for i in range(rows) if i * columns + column < len(names))
            axes[lowest, column].set_xlabel("rollout log-prob (nats)")
            axes[lowest, column].tick_params(labelbottom=True)
        handles, labels = axes[0][0].get_legend_handles_labels()
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, markerscale=2.5)
        for handle in legend.legend_handles:
            handle.set_alpha(1)  # type: ignore[union-attr]
    return described(
        figure,
        f"Rollout against training log-probs. Share of tokens beyond a factor of 2: {listed(names, shares, '.2e')}.",
    )


def extreme_curve(table: pd.DataFrame, *, width: float = COLUMN_WIDTH) -> Figure:
    """F(τ): the share of tokens whose probability ratio lies outside [1/τ, τ], by policy, on logarithmic axes.

    Shares of 0 are not drawn; the line ends at the last token.

    Args:
        table: policy, tau, fraction, and low and high where there are intervals.
        width: inches.
    """
    names = policies(table)
    positive = table.loc[table["fraction"] > 0, "fraction"]
    bottom = float(positive.min()) / 3 if len(positive) else 1e-6
    with house_style():
        figure, axes = new_figure(width)
        for name in names:
            part = table[(table["policy"] == name) & (table["fraction"] > 0)].sort_values("tau")
            _, marker, style = POLICY_STYLE[family(name)]
            axes.plot(
                part["tau"], part["fraction"], color=colour_of(name), marker=marker, linestyle=style, label=name,
                markevery=max(1, len(part) // 8),
            )  # fmt: skip
            if "low" in part:
                axes.fill_between(
                    part["tau"], np.maximum(part["low"], bottom), part["high"], color=colour_of(name), alpha=0.15,
                    linewidth=0,
                )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="τ", ylabel="F(τ), share of tokens")
        ticks = [t for t in (1.1, 1.5, 2, 3, 5, 10) if table["tau"].min() <= t <= table["tau"].max()]
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=bottom)
        axes.legend(frameon=False, loc="best")
        if "low" in table:
            corner_note(axes, "95 %, clustered by prompt", "right")
    at = table[np.isclose(table["tau"], 2)].drop_duplicates("policy").set_index("policy")["fraction"]
    return described(figure, f"Share of extreme tokens against the factor. F(2): {listed(at.index, at, '.2e')}.")
