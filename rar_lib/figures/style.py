"""House style: Okabe-Ito colours, one colour and marker a policy, seeded bootstrap bands, and saving.

Functions here return artists or paths and change no global state: the style is applied around each figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

OKABE_ITO = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
    "grey": "#7F7F7F",
}
# (colour, marker, line style): controls share a colour with what they control, and are dashed or dotted
POLICY_STYLE: dict[str, tuple[str, str, str]] = {
    "none": (OKABE_ITO["vermillion"], "o", "-"),
    "R2": (OKABE_ITO["orange"], "s", "-"),
    "R3": (OKABE_ITO["blue"], "^", "-"),
    "fisher": (OKABE_ITO["green"], "D", "-"),
    "permuted_fisher": (OKABE_ITO["green"], "d", "--"),
    "inverse_fisher": (OKABE_ITO["green"], "x", ":"),
    "swap": (OKABE_ITO["purple"], "P", "-"),
    "margin": (OKABE_ITO["sky"], "v", "-"),
    "disagree": (OKABE_ITO["black"], "*", "-"),
    "frequency": (OKABE_ITO["yellow"], "<", "-"),
    "threshold": (OKABE_ITO["orange"], "X", "--"),
    "bias": (OKABE_ITO["blue"], "h", "--"),
    "uniform": (OKABE_ITO["grey"], "s", "-"),
    "random_route": (OKABE_ITO["grey"], "o", "--"),
    "random_cell": (OKABE_ITO["grey"], ">", ":"),
    "random_cell_resampled": (OKABE_ITO["grey"], "1", ":"),
    "tis": (OKABE_ITO["purple"], "p", "--"),
    "icepop": (OKABE_ITO["sky"], "H", "--"),
    "seq_mis": (OKABE_ITO["purple"], "8", ":"),
    "geo_rs": (OKABE_ITO["sky"], "2", ":"),
    "opsm": (OKABE_ITO["yellow"], "3", "--"),
    "rspo": (OKABE_ITO["orange"], "4", ":"),
    "R3+tis": (OKABE_ITO["blue"], "<", "--"),
}
POLICY_COLOUR = {name: style[0] for name, style in POLICY_STYLE.items()}
POLICY_MARKER = {name: style[1] for name, style in POLICY_STYLE.items()}
BANDS = 5  # bands of more policies than this hide each other
COLUMN_WIDTH = 3.5  # inches
PAGE_WIDTH = 7.0
RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.dpi": 110,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "rar",
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Seaborn's ticks style with the house's sizes, undone on exit."""
    with sns.axes_style("ticks"), mpl.rc_context(RC):
        yield


def new_figure(
    width: float = COLUMN_WIDTH, height: float = 2.6, columns: int = 1, rows: int = 1, **more: Any
) -> tuple[Figure, Any]:
    """A figure of `width` x `height` inches with one axes, or an array of them: `[rows]` or `[columns]`, or both.

    It is closed for pyplot, so that a notebook shows it only where it is asked to.
    """
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **more)
    plt.close(figure)
    for one in np.ravel(axes):
        sns.despine(ax=one)
    return figure, axes


def family(label: str) -> str:
    """The policy in a label such as `margin 0.25` or `tis+geo_rs`, as POLICY_STYLE names it."""
    head = label.partition(" ")[0]
    return head if head in POLICY_STYLE else head.partition("+")[0]


def policies(table: pd.DataFrame) -> list[str]:
    """The labels of a table's column `policy` in the house's order; a label begins with the policy's name.

    Raises:
        ValueError: for a policy without a colour.
    """
    found, order = set(table["policy"]), list(POLICY_STYLE)
    unknown = {name for name in found if family(name) not in order}
    if unknown:
        raise ValueError(f"policy: expected one of {', '.join(order)}, found {', '.join(sorted(unknown))}")
    return sorted(found, key=lambda name: (order.index(family(name)), name))


def mean_and_band(values: pd.DataFrame, *, seed: int = 0, resamples: int = 1000) -> tuple[np.ndarray, ...]:
    """Mean over the rows of `[units, x]` and a 95 % percentile bootstrap over the units (seeds, sequences, steps).

    Args:
        values: a row a unit, a column a place x.
        seed, resamples: of the bootstrap.

    Returns:
        mean, low, high, each `[x]`; with one unit low = high = mean.
    """
    data = values.to_numpy(float)
    mean = data.mean(0)
    if len(data) == 1:
        return mean, mean, mean
    draws = np.random.default_rng(seed).integers(0, len(data), (resamples, len(data)))
    low, high = np.percentile(data[draws].mean(1), [2.5, 97.5], axis=0)
    return mean, low, high


def lines_by_policy(axes: Any, table: pd.DataFrame) -> int:
    """One line a policy over steps, with a band over seeds where there are several, and at most BANDS policies.

    A line ends, with a cross, where a seed has no further value: a run that diverged must not lift the mean of those that did not.

    Args:
        axes: to draw on.
        table: policy, seed, step, value.

    Returns:
        The largest number of seeds of a policy.
    """
    most = 0
    for name in policies(table):
        wide = table[table["policy"] == name].pivot_table(index="seed", columns="step", values="value")
        whole = wide.loc[:, wide.notna().all()]
        mean, low, high = mean_and_band(whole)
        steps = whole.columns.to_numpy()
        if whole.shape[1] < wide.shape[1] and len(steps):
            axes.plot(steps[-1], mean[-1], "x", color=POLICY_COLOUR[family(name)], markersize=8)
        axes.plot(
            steps,
            mean,
            color=POLICY_COLOUR[family(name)],
            marker=POLICY_MARKER[family(name)],
            linestyle=POLICY_STYLE[family(name)][2],
            label=name,
            markevery=max(1, len(steps) // 20),
        )
        if len(wide) > 1 and table["policy"].nunique() <= BANDS:
            axes.fill_between(steps, low, high, color=POLICY_COLOUR[family(name)], alpha=0.2, linewidth=0)
        most = max(most, len(wide))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return most


def seeds_note(axes: Any, seeds: int, bands: bool = True) -> None:
    """Say of how many seeds the lines are, and whether there is a band around them."""
    text = "n=1 seed" if seeds == 1 else f"n={seeds} seeds, 95 % bootstrap" if bands else f"mean of {seeds} seeds"
    corner_note(axes, text, "right")


def corner_note(axes: Any, text: str, side: Literal["left", "right"]) -> None:
    """A small grey remark above a corner of the axes."""
    place = (1 if side == "right" else 0, 1)
    axes.annotate(text, place, xycoords="axes fraction", ha=side, va="bottom", fontsize=7, color=OKABE_ITO["grey"])


def described(figure: Figure, text: str) -> Figure:
    """The figure with its alternative text: what it shows and its main numbers, for who cannot see it. It is the figure's label."""
    figure.set_label(" ".join(text.split()))
    return figure


def alt_text(figure: Figure) -> str:
    """The alternative text of a figure of this package."""
    return str(figure.get_label())


def listed(names: object, values: object, form: str = ".3g") -> str:
    """`a 0.1, b 0.2` for an alternative text."""
    return ", ".join(f"{name} {value:{form}}" for name, value in zip(names, values, strict=True))  # type: ignore[call-overload]


def colour_of(label: str) -> str:
    """The colour of the policy in a label."""
    return POLICY_STYLE[family(label)][0]


def save_figure(figure: Figure, stem: str | Path, table: pd.DataFrame) -> list[Path]:
    """Write PNG, SVG and the plotted table as CSV beside each other; the alternative text goes into both images.

    Args:
        figure: what a function of this package returned.
        stem: path without suffix.
        table: the tidy table that the figure shows.

    Raises:
        ValueError: for a figure without alternative text.
    """
    text = alt_text(figure)
    if not text:
        raise ValueError(f"{Path(stem).name}: expected a figure with alternative text (figures.style.described)")
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(RC):
        figure.savefig(stem.with_suffix(".png"), metadata={"Software": None, "Description": text})
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None, "Title": stem.name, "Description": text})
    table.to_csv(stem.with_suffix(".csv"), index=False, float_format="%.6g")
    return [stem.with_suffix(suffix) for suffix in (".png", ".svg", ".csv")]
