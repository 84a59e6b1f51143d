"""KL by policy: how far the trainer is from the rollout under each, beside the engines' own noise and a run without any mismatch."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from rar_lib.figures.style import (
    COLUMN_WIDTH,
    OKABE_ITO,
    POLICY_MARKER,
    colour_of,
    corner_note,
    described,
    family,
    house_style,
    listed,
    new_figure,
    policies,
)


def kl_by_policy(
    table: pd.DataFrame,
    *,
    noise_floor: float | None = None,
    zero_mismatch: float | None = None,
    width: float = COLUMN_WIDTH,
) -> Figure:
    """k3 (rollout/old) of every run as a point, and the geometric mean of a policy's runs with a 95 % t interval of the log.

    Args:
        table: policy, seed, value (k3 in nats a token, the mean over a run).
        noise_floor: the larger of the engines' k3 against themselves.
        zero_mismatch: k3 of the reference pair that computes alike (fp32 on both sides).
        width: inches.
    """
    from scipy import stats

    names = policies(table)
    means, drawn = list[float](), list[float]()
    with house_style():
        figure, axes = new_figure(width, 1.05 + 0.24 * len(names))
        for place, name in enumerate(names):
            values = table.loc[table["policy"] == name, "value"].to_numpy(float)
            logs = np.log(values)
            centre = float(np.exp(logs.mean()))
            means.append(centre)
            reach = 0.0
            if len(values) > 1:
                reach = float(stats.t.ppf(0.975, len(values) - 1) * logs.std(ddof=1) / np.sqrt(len(values)))
            drawn += [*values, centre / np.exp(reach), centre * np.exp(reach)]
            axes.plot(values, np.full(len(values), place), ".", color=colour_of(name), alpha=0.35, markersize=3)
            bar = np.array([[centre - centre / np.exp(reach)], [centre * np.exp(reach) - centre]])
            axes.errorbar(centre, place, xerr=bar, color=colour_of(name), marker=POLICY_MARKER[family(name)], capsize=2)
        smallest, far = float(table["value"].min()), []
        for level, text, style in ((noise_floor, "noise floor", "--"), (zero_mismatch, "zero mismatch", ":")):
            if level is not None and level < smallest / 100:  # drawing it would flatten everything else
                far.append(f"{text} {level:.0e}")
            elif level is not None:
                drawn.append(level)
                axes.axvline(level, color=OKABE_ITO["grey"], linewidth=1, linestyle=style, label=f"{text} {level:.0e}")
        room = max(1.3, (10 * min(drawn) / max(drawn)) ** 0.5)  # a decade at least: few ticks, and differences to scale
        axes.set_xlim(min(drawn) / room, max(drawn) * room)
        label = "k3 rollout/old (nats a token)" + (f"\nfar below: {', '.join(far)}" if far else "")
        axes.set(xscale="log", xlabel=label, yticks=range(len(names)), yticklabels=names)
        wide = max(drawn) * room > 300 * min(drawn) / room  # labels at every third would print over each other
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 3), numticks=8))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0e}".replace("e-0", "e-"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(len(names) - 0.4, -0.6)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, loc="best")
        seeds = table.groupby("policy")["seed"].nunique().min()
        corner_note(axes, "n=1 seed" if seeds == 1 else f"n={seeds} seeds, 95 % t", "right")
    text = f"k3 between rollout and trainer by policy, geometric means over seeds: {listed(names, means, '.2e')}."
    if noise_floor is not None:
        text += f" Noise floor {noise_floor:.1e}."
    if zero_mismatch is not None:
        text += f" The pair that computes alike: {zero_mismatch:.1e}."
    return described(figure, text)
