"""Every policy against one baseline: paired differences over seeds, a panel a quantity."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from rar_lib.figures.style import (
    OKABE_ITO,
    PAGE_WIDTH,
    POLICY_MARKER,
    colour_of,
    described,
    family,
    house_style,
    new_figure,
    policies,
)


def differences_by_policy(
    table: pd.DataFrame, labels: Mapping[str, str], *, baseline: str = "none", width: float = PAGE_WIDTH
) -> Figure:
    """Paired differences with 95 % t intervals; filled where they pass Holm's correction, open where no difference was shown.

    Args:
        table: quantity, policy, difference, low, high, verdict, log (differences of natural logs, drawn as ratios), n.
        labels: quantity -> axis label, in the order of the panels.
        baseline: what the differences are taken from.
        width: inches; narrow figures are stacked.
    """
    names, rows = policies(table), 1 if width > 5 else len(labels)
    columns = len(labels) if rows == 1 else 1
    with house_style():
        height = 0.9 + 0.22 * len(names)
        figure, axes = new_figure(width, height * rows, columns, rows, squeeze=False, sharey=True)
        for panel, (quantity, label) in zip(axes.ravel(), labels.items(), strict=True):
            here = table[table["quantity"] == quantity].set_index("policy")
            log = bool(here["log"].iloc[0])
            for place, name in enumerate(names):
                one = here.loc[name]
                values = one[["difference", "low", "high"]].to_numpy(float)
                centre, low, high = (float(v) for v in (np.exp(values) if log else values))
                panel.errorbar(
                    centre, place, xerr=[[centre - low], [high - centre]], color=colour_of(name), marker=POLICY_MARKER[family(name)],
                    capsize=2, fillstyle="none" if one["verdict"] == "does not differ" else "full",
                )  # fmt: skip
            panel.axvline(1.0 if log else 0.0, color=OKABE_ITO["grey"], linewidth=0.8, linestyle="--")
            panel.set(xlabel=f"{label}{' / ' if log else ' − '}{baseline}")
            if log:
                panel.set(xscale="log")
                panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
                panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
                panel.xaxis.set_minor_formatter(NullFormatter())
            else:
                panel.xaxis.set_major_locator(MaxNLocator(3))
                panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        for panel in axes[:, 0]:
            panel.set(yticks=range(len(names)), yticklabels=names)
            panel.set_ylim(len(names) - 0.4, -0.6)
        note = f"n={int(table['n'].min())} paired seeds, 95 % t; filled: differs after Holm"
        figure.suptitle(note, x=0.99, ha="right", fontsize=7, color=OKABE_ITO["grey"])
    told = [
        f"{labels[q]} of {p} {v}"
        for q, p, v in table[["quantity", "policy", "verdict"]].itertuples(index=False)
        if v != "does not differ" and q in labels
    ]
    return described(
        figure, f"Paired differences from {baseline}. " + ("; ".join(told) or "No difference was shown") + "."
    )
