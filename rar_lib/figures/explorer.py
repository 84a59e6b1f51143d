"""Explorer: one answer token by token in a notebook. Choose an answer and a token; read its routes by layer, margins and what was replayed.

    explorer(rollout, trainer, decode=tokenizer.decode)

Without ipywidgets, and in print, route_strip shows the same.
"""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from rar_lib.errors import EngineError
from rar_lib.figures.strip import COLOURS
from rar_lib.metrics.extremes import Decode, routes_of, strip_table
from rar_lib.traces.trace import RouteTrace


def explorer(
    rollout: RouteTrace, trainer: RouteTrace, *, planned: np.ndarray | None = None, decode: Decode | None = None, sequence: int | None = None
) -> Any:  # fmt: skip
    """An ipywidget over two records of the same tokens.

    Args:
        rollout, trainer: the records; log-probs and margins are shown where they carry them.
        planned: `[N, L]` bool, cells that replay forces.
        decode: turns token ids into text; without it ids are shown.
        sequence: answer to open first, by default the one with the most differing cells.

    Returns:
        A widget: sliders for answer and position, the answer as text, and a table of layers.

    Raises:
        EngineError: if ipywidgets is not installed.
        TraceError: for records of other tokens.
    """
    try:
        import ipywidgets
    except ImportError:
        raise EngineError(
            "the explorer needs ipywidgets (extra notebooks); figures.route_strip shows the same"
        ) from None
    if sequence is None:
        sequence = most_different(rollout, trainer)
    chosen = ipywidgets.IntSlider(sequence, 0, rollout.num_sequences - 1, description="answer")
    position = ipywidgets.IntSlider(0, 0, max(0, int(rollout.lengths[sequence]) - 1), description="token")
    shown = ipywidgets.HTML()

    def draw(_: object = None) -> None:
        shown.value = page(rollout, trainer, chosen.value, position.value, planned=planned, decode=decode)

    def move(_: object) -> None:
        position.max = max(0, int(rollout.lengths[chosen.value]) - 1)
        draw()

    chosen.observe(move, "value")
    position.observe(draw, "value")
    draw()
    return ipywidgets.VBox([ipywidgets.HBox([chosen, position]), shown])


def most_different(rollout: RouteTrace, trainer: RouteTrace) -> int:
    """The answer with the most cells on which the two records differ."""
    from rar_lib.metrics.agreement import agreement

    starts = rollout.offsets[:-1]
    flips = np.add.reduceat(agreement(rollout, trainer).flipped.sum(1), starts[rollout.lengths > 0])
    return int(np.flatnonzero(rollout.lengths > 0)[int(flips.argmax())])


def page(
    rollout: RouteTrace, trainer: RouteTrace, sequence: int, position: int, *, planned: np.ndarray | None = None, decode: Decode | None = None
) -> str:  # fmt: skip
    """The HTML of one token of one answer: the whole answer with its differing tokens marked, then the token's layers.

    Args:
        rollout, trainer: records of the same tokens.
        sequence, position: of the token.
        planned, decode: as for `explorer`; `planned` is `[N, L]` bool.

    Raises:
        TraceError: for a sequence or position that is not there, or records of other tokens.
    """
    table = strip_table(rollout, trainer, sequence, planned=planned, decode=decode)
    marks = []
    for place, part in table.groupby("position"):
        differs = int(part["state"].isin(["differs", "replayed"]).sum())
        border = "2px solid #000" if place == position else "1px solid #DDD"
        back = f"rgba(213,94,0,{min(1.0, differs / 4):.2f})" if differs else "none"
        text = html.escape(str(part["text"].iloc[0])).replace(" ", "&nbsp;")
        marks.append(
            f'<span title="{differs} layers differ" style="border:{border};background:{back};padding:1px 3px">{text}</span>'
        )
    here = table[table["position"] == position].set_index("layer")
    rows = []
    for cell in routes_of(rollout, trainer, sequence, position).to_dict("records"):
        state = here.loc[cell["layer"], "state"]
        margin = here.loc[cell["layer"], "margin"]
        ink = "#000" if state == "same" else "#FFF"
        values = (
            cell["layer"], _experts(cell["experts_a"], cell["only_a"]), _experts(cell["experts_b"], cell["only_b"]),
            "" if not np.isfinite(margin) else f"{margin:.2e}",
            f'<span style="background:{COLOURS[state]};color:{ink};padding:0 4px">{state}</span>',
        )  # fmt: skip
        rows.append("<tr>" + "".join(f"<td style='padding:0 8px'>{v}</td>" for v in values) + "</tr>")
    names = ("layer", "rollout", "trainer", "margin", "")
    head = "".join(f"<th style='text-align:left;padding:0 8px'>{n}</th>" for n in names)
    after = table[table["position"] == position + 1]["delta"]
    moved = float(after.iloc[0]) if len(after) else float("nan")
    note = (
        f"<p>The next token's log-prob is computed from these routes; it moved by {moved:+.3g} nats.</p>"
        if np.isfinite(moved)
        else ""
    )
    return f"<div>{''.join(marks)}</div><table>{f'<tr>{head}</tr>'}{''.join(rows)}</table>{note}"


def _experts(ids: list[int] | None, only: list[int] | None) -> str:
    """The experts of one side, those of this side alone in bold."""
    if ids is None:
        return "not recorded"
    return " ".join(f"<b>{e}</b>" if e in (only or []) else str(e) for e in ids)
