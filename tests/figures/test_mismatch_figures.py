"""The mismatch and routing figures, by their artists and data: hand-made tables in, known artists out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch, Rectangle
from PIL import Image

from rar_lib.figures import (
    alt_text,
    differences_by_policy,
    expert_flow,
    extreme_curve,
    flips_by_margin,
    kl_by_policy,
    layers_per_token,
    load_shift_map,
    logprob_scatter,
    reward_by_step,
    route_strip,
    routing_drift,
    save_figure,
)
from rar_lib.figures.explorer import explorer, most_different, page
from rar_lib.figures.strip import COLOURS
from rar_lib.figures.style import COLUMN_WIDTH, OKABE_ITO, PAGE_WIDTH, POLICY_COLOUR, POLICY_STYLE, family, new_figure
from rar_lib.metrics.extremes import strip_table
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader

WIDTHS = [COLUMN_WIDTH, PAGE_WIDTH]


def texts(axes: Any) -> list[str]:
    return [t.get_text() for t in axes.texts]


# ------------------------------------------------------------------ reward


REWARDS = pd.DataFrame(
    [{"policy": p, "seed": 0, "step": t, "value": 0.1 * t} for p in ("none", "R3") for t in range(3)]
)


@pytest.mark.parametrize("width", WIDTHS)
def test_held_out_reward_has_a_panel_of_its_own(width: float) -> None:
    held = REWARDS.assign(value=0.9)
    figure = reward_by_step(REWARDS, held, width=width)
    left, right = figure.axes
    assert left.lines[0].get_ydata().tolist() == pytest.approx([0, 0.1, 0.2])
    assert right.lines[0].get_ydata().tolist() == pytest.approx([0.9] * 3)
    assert right.get_ylabel() == "reward (held out)"
    assert figure.get_figwidth() == width
    assert alt_text(figure) == "Reward by step. At the last step: none 0.2, R3 0.2."


def test_many_policies_share_a_legend_below() -> None:
    many = pd.concat([REWARDS[REWARDS["policy"] == "none"].assign(policy=p) for p in list(POLICY_STYLE)[:6]])
    figure = reward_by_step(many)
    assert figure.axes[0].get_legend() is None
    assert len(figure.legends[0].get_texts()) == 6


# ------------------------------------------------------------------ KL


def test_kl_of_a_policy_is_the_geometric_mean_of_its_seeds() -> None:
    table = pd.DataFrame({"policy": ["none"] * 2 + ["tis"], "seed": [0, 1, 0], "value": [1e-3, 4e-3, 5e-3]})
    (axes,) = kl_by_policy(table, noise_floor=2e-4, zero_mismatch=3e-4).axes
    centres = [float(c.lines[0].get_xdata()[0]) for c in axes.containers]
    assert centres == pytest.approx([2e-3, 5e-3])
    assert [t.get_text() for t in axes.get_yticklabels()] == ["none", "tis"]
    levels = {
        line.get_label(): float(line.get_xdata()[0]) for line in axes.lines if line.get_label().startswith(("n", "z"))
    }
    assert levels == pytest.approx({"noise floor 2e-04": 2e-4, "zero mismatch 3e-04": 3e-4})
    assert axes.get_xscale() == "log"


def test_a_floor_far_below_is_said_and_not_drawn() -> None:
    table = pd.DataFrame({"policy": ["none"], "seed": [0], "value": [1e-3]})
    figure = kl_by_policy(table, noise_floor=1e-12, zero_mismatch=1e-11)
    assert figure.axes[0].get_xlabel().endswith("\nfar below: noise floor 1e-12, zero mismatch 1e-11")
    assert "Noise floor 1.0e-12." in alt_text(figure)
    low, high = figure.axes[0].get_xlim()
    assert low > 1e-5
    assert high / low >= 10 * (1 - 1e-9)


@pytest.mark.parametrize("width", WIDTHS)
def test_differences_are_filled_where_they_were_shown(width: float) -> None:
    rows = [("k3", "R3", np.log(0.5), np.log(0.25), 0.0, "lower", True), ("k3", "tis", 0.0, -1.0, 1.0, "does not differ", True),
            ("r", "R3", 0.1, -0.1, 0.3, "does not differ", False), ("r", "tis", -0.2, -0.3, -0.1, "lower", False)]  # fmt: skip
    table = pd.DataFrame(rows, columns=["quantity", "policy", "difference", "low", "high", "verdict", "log"]).assign(
        n=8
    )
    figure = differences_by_policy(table, {"r": "reward", "k3": "k3"}, width=width)
    reward, ratio = figure.axes
    points = [c.lines[0] for c in ratio.containers]
    assert [float(p.get_xdata()[0]) for p in points] == pytest.approx([0.5, 1.0])
    assert [p.get_fillstyle() for p in points] == ["full", "none"]
    assert [float(c.lines[0].get_xdata()[0]) for c in reward.containers] == pytest.approx([0.1, -0.2])
    assert (reward.lines[-1].get_xdata()[0], ratio.lines[-1].get_xdata()[0]) == (0, 1)
    assert ratio.get_xscale() == "log"
    assert alt_text(figure) == "Paired differences from none. k3 of R3 lower; reward of tis lower."


# ------------------------------------------------------------------ tokens


TOKENS = pd.DataFrame(
    {
        "policy": ["none"] * 3 + ["R3"] * 3,
        "logp_rollout": [-1.0, -2.0, -3.0] * 2,
        "logp_train": [-1.0, -3.0, -3.1, -1.0, -2.1, -3.1],
        "flipped": [False, True, False] * 2,
    }
)


@pytest.mark.parametrize("width", WIDTHS)
def test_one_panel_a_policy_with_guides_at_a_factor_of_2(width: float) -> None:
    figure = logprob_scatter(TOKENS, width=width)
    assert [a.get_title() for a in figure.axes] == ["none", "R3"]
    panel = figure.axes[0]
    grey, red = panel.collections
    assert grey.get_offsets().tolist() == [[-1.0, -1.0], [-3.0, pytest.approx(-3.1)]]
    assert red.get_offsets().tolist() == [[-2.0, -3.0]]
    assert to_hex(red.get_facecolor()[0]).upper() == OKABE_ITO["vermillion"]
    diagonal, below, above = (line.get_ydata() - line.get_xdata() for line in panel.lines)
    assert (diagonal[0], below[0], above[0]) == pytest.approx((0, -np.log(2), np.log(2)))
    assert "F(2) 3.3e-01" in texts(panel)
    assert "F(2) 0.0e+00" in texts(figure.axes[1])


def test_five_policies_fill_two_rows_and_hide_the_spare_panel() -> None:
    many = pd.concat(
        [TOKENS[TOKENS["policy"] == "none"].assign(policy=p) for p in ("none", "R2", "R3", "tis", "icepop")]
    )
    figure = logprob_scatter(many)
    assert [a.get_visible() for a in figure.axes] == [True] * 5 + [False]


def test_extreme_curves_leave_out_zeros() -> None:
    table = pd.DataFrame(
        {"policy": "none", "tau": [1.5, 2.0, 4.0], "fraction": [0.1, 0.01, 0.0], "low": [0.05, 0.0, 0.0], "high": [0.2, 0.02, 0.0]}
    )  # fmt: skip
    figure = extreme_curve(table)
    (axes,) = figure.axes
    assert axes.lines[0].get_xdata().tolist() == [1.5, 2.0]
    assert axes.lines[0].get_ydata().tolist() == [0.1, 0.01]
    assert axes.get_ylim()[0] == pytest.approx(0.01 / 3)
    assert alt_text(figure).endswith("F(2): none 1.00e-02.")


# ------------------------------------------------------------------ flips, depth, drift, load


def test_flips_against_the_margin() -> None:
    table = pd.DataFrame(
        {"margin": [1e-3, 1e-1], "flips": [0.2, 0.0], "low": [0.1, 0.0], "high": [0.3, 0.01], "cells": [10, 10]}
    )
    figure = flips_by_margin(table, auc=0.9)
    (axes,) = figure.axes
    line = axes.containers[0].lines[0]
    assert line.get_xdata().tolist() == [1e-3, 1e-1]
    assert line.get_ydata().tolist() == [0.2, 0.0]
    assert "AUC 0.900, 95 %, clustered by prompt" in texts(axes)
    assert "20.00% of the cells flip at a margin of 0.001" in alt_text(figure)


def test_layers_per_token_beside_independence() -> None:
    table = pd.DataFrame(
        {
            "layers": [0, 1, 2],
            "observed": [0.7, 0.1, 0.2],
            "independent": [0.6, 0.38, 0.02],
            "permuted": [0.61, 0.37, 0.02],
        }
    )
    figure = layers_per_token(table, dispersion=2.5)
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == [0.7, 0.1, 0.2]
    assert axes.lines[0].get_ydata().tolist() == [0.6, 0.38, 0.02]
    assert "dispersion 2.50" in texts(axes)
    assert "any flip: 0.3; independent layers would give 0.4" in alt_text(figure)


@pytest.mark.parametrize("width", WIDTHS)
def test_drift_has_a_line_a_layer_and_gamma_its_quantiles(width: float) -> None:
    layers = pd.DataFrame([{"step": t, "layer": i, "value": 0.01 * t * i} for t in range(4) for i in (1, 3)])
    gamma = pd.DataFrame({"step": range(4), "gamma_p50": 0.99, "gamma_p10": 0.95, "gamma_p1": [0.9, 0.7, 0.9, 0.9]})
    figure = routing_drift(layers, gamma, width=width)
    left, right = figure.axes
    assert [line.get_label() for line in left.lines] == ["layer 1", "layer 3"]
    assert left.lines[1].get_ydata().tolist() == pytest.approx([0, 0.03, 0.06, 0.09])
    assert [line.get_label() for line in right.lines] == [
        "γ median",
        "10th percentile",
        "1st percentile",
        "RSPO's floor",
    ]
    assert right.get_ylim()[0] < 0.7
    assert "Smallest 1st percentile of γ in a step: 0.700." in alt_text(figure)
    assert left.get_position().x0 < right.get_position().x0 or width == COLUMN_WIDTH


@pytest.mark.parametrize("width", WIDTHS)
def test_load_maps_before_after_and_between(width: float) -> None:
    before, after = np.array([[0.5, 0.25, 0.25, 0.0]]), np.array([[0.25, 0.5, 0.25, 0.0]])
    figure = load_shift_map(before, after, [7], width=width)
    maps = [a.images[0].get_array() for a in figure.axes[:3]]
    assert maps[0][0, :3].tolist() == [1, 0, 0]
    assert maps[1][0, :3].tolist() == [0, 1, 0]
    assert maps[2][0, :3].tolist() == [-1, 1, 0]
    assert all(np.isnan(np.ma.filled(m, np.nan)[0, 3]) for m in maps)
    assert "Total variation between the two by MoE layer: 7 0.25." in alt_text(figure)


# ------------------------------------------------------------------ flow


def test_flow_draws_a_band_an_exchange_with_its_share() -> None:
    table = pd.DataFrame({"source": [0, 0, 2], "target": [1, 2, 1], "share": [0.02, 0.01, 0.01]})
    figure = expert_flow(table, before="a", after="b")
    (axes,) = figure.axes
    bands = [p for p in axes.patches if isinstance(p, PathPatch)]
    assert len(bands) == 3
    heights = sorted(float(b.get_path().vertices[-2, 1] - b.get_path().vertices[0, 1]) for b in bands)
    assert heights[2] == pytest.approx(2 * heights[0])
    assert sum(heights) == pytest.approx(1 - 2 * 0.02)
    assert {"0", "1", "2", "a", "b", "0.04 routes a cell changed; others not drawn"} <= set(texts(axes))


def test_small_flows_are_gathered() -> None:
    table = pd.DataFrame({"source": range(20), "target": [(i + 1) % 20 for i in range(20)], "share": 0.001})
    names = set(texts(expert_flow(table, top=3).axes[0]))
    assert "others" in names
    assert len([n for n in names if n.isdigit()]) == 3


def test_no_exchange_is_said() -> None:
    empty = pd.DataFrame({"source": [], "target": [], "share": []})
    assert "no route changed" in texts(expert_flow(empty).axes[0])


# ------------------------------------------------------------------ strip and explorer


def pair() -> tuple[RouteTrace, RouteTrace]:
    """Two answers of 3 and 2 tokens, two layers, top-2 of 4; the first answer differs at its second token in layer 1."""
    a = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 0], [0, 0]], [[1, 0], [2, 3]], [[0, 0], [0, 0]]])
    b = a.copy()
    b[0, 0] = [1, 0]  # the same set in another order
    b[1, 1] = [1, 2]
    status = np.array([0, 0, 1, 0, 1], np.uint8)
    status = np.where(status == 1, Status.LAST, Status.RECORDED).astype(np.uint8)
    margins = np.full((5, 2), 0.5, np.float32)
    margins[1, 1] = 1e-3
    made = []
    for source, experts, logp in (
        ("rollout", a, [np.nan, -1, -2, np.nan, -1]),
        ("old", b, [np.nan, -1, -4, np.nan, -1]),
    ):
        header = TraceHeader(num_experts=4, top_k=2, moe_layers=(1, 3), source=source)
        made.append(RouteTrace.from_packed(header, experts, np.array([3, 2]), status, token_ids=np.array([7, 8, 9, 7, 9]),
                                           logprobs=np.array(logp, np.float32), margins=margins))  # fmt: skip
    return made[0], made[1]


def test_a_strip_says_what_differs_and_what_it_did() -> None:
    a, b = pair()
    table = strip_table(a, b, 0, decode=lambda ids: f"<{ids[0]}>")
    assert table["state"].tolist() == ["same", "same", "same", "differs", "missing", "missing"]
    assert table["layer"].tolist() == [1, 3] * 3
    assert table["text"].tolist()[::2] == ["<7>", "<8>", "<9>"]
    assert table["delta"].tolist()[4] == pytest.approx(-2)
    assert table["margin"].tolist()[3] == pytest.approx(1e-3)
    planned = np.zeros((5, 2), bool)
    planned[1, 1] = True
    assert strip_table(a, b, 0, planned=planned)["state"].tolist()[3] == "replayed"
    assert strip_table(a, b, 1)["state"].tolist() == ["same", "same", "missing", "missing"]
    figure = route_strip(table)
    top, bottom = figure.axes
    cells = [p for p in top.patches if isinstance(p, Rectangle)]
    assert [to_hex(c.get_facecolor()).upper() for c in cells] == [COLOURS[s] for s in table["state"]]
    assert [bar.get_height() for bar in bottom.patches] == pytest.approx([0, 0, -2])
    assert top.lines[0].get_xdata()[0] == bottom.lines[0].get_xdata()[0] == 0.5  # the answer begins at token 1
    assert [t.get_text() for t in bottom.get_xticklabels()] == ["<7>", "<8>", "<9>"]
    assert "1 cells differ. The largest move of a log-prob is -2 nats at token '<9>'." in alt_text(figure)


def test_a_strip_pages_through_long_answers_and_escapes_text() -> None:
    table = pd.DataFrame(
        {"position": range(40), "text": ["$ \n"] * 40, "layer": 0, "state": "same", "margin": np.nan, "delta": 0.0}
    )
    figure = route_strip(table, first=10, tokens=5)
    assert len(figure.axes[0].patches) == 5
    assert "tokens 10 to 14 of 40" in texts(figure.axes[0])
    assert figure.axes[1].get_xticklabels()[0].get_text() == r"\$␣⏎"
    figure.canvas.draw()


def test_the_explorer_shows_both_sides_and_escapes_text() -> None:
    a, b = pair()
    text = page(a, b, 0, 1, decode=lambda ids: "<b>&" if ids[0] == 8 else str(ids[0]))
    assert "&lt;b&gt;&amp;" in text
    assert "<b>&" not in text.replace("<b>2</b>", "").replace("<b>3</b>", "").replace("<b>1</b>", "")
    assert "2 <b>3</b>" in text
    assert "<b>1</b> 2" in text
    assert "differs" in text
    assert "it moved by -2 nats" in text
    assert most_different(a, b) == 0


def test_the_explorer_moves() -> None:
    a, b = pair()
    box = explorer(a, b)
    sequence, position = box.children[0].children
    shown = box.children[1]
    assert (sequence.value, position.max) == (0, 2)
    before = shown.value
    position.value = 1
    assert shown.value != before
    assert "differs" in shown.value
    sequence.value = 1
    assert position.max == 1
    assert shown.value == page(a, b, 1, 1)


# ------------------------------------------------------------------ house


@pytest.mark.parametrize("label", ["none", "R3+tis", "tis+geo_rs", "margin 0.25", "R3+rspo gmpo", "fisher 1/4 R2"])
def test_every_label_has_a_style(label: str) -> None:
    assert family(label) in POLICY_STYLE
    assert POLICY_COLOUR[family(label)] in OKABE_ITO.values()


def test_styles_tell_policies_apart() -> None:
    assert len(set(POLICY_STYLE.values())) == len(POLICY_STYLE)


def test_a_saved_figure_carries_its_alternative_text(tmp_path: Path) -> None:
    figure = reward_by_step(REWARDS)
    png, svg, csv = save_figure(figure, tmp_path / "reward", REWARDS)
    assert Image.open(png).text["Description"] == alt_text(figure)
    assert alt_text(figure) in svg.read_text()
    assert pd.read_csv(csv)["value"].tolist() == pytest.approx(REWARDS["value"].tolist())
    bare, _ = new_figure()
    with pytest.raises(ValueError, match="bare: expected a figure with alternative text"):
        save_figure(bare, tmp_path / "bare", REWARDS)


def test_a_line_ends_where_a_seed_diverged() -> None:
    """Three seeds, one of which has no value from step 2 on: the mean of the others would say nothing of it."""
    rows = [
        {"policy": "none", "seed": s, "step": t, "value": float(t)} for s in range(3) for t in range(4) if s or t < 2
    ]
    (axes,) = reward_by_step(pd.DataFrame(rows)).axes
    cross, line = axes.lines
    assert line.get_xdata().tolist() == [0, 1]
    assert (cross.get_xdata()[0], cross.get_marker()) == (1, "x")


def test_no_extreme_token_is_no_crash() -> None:
    table = pd.DataFrame({"policy": "none", "tau": [1.5, 2.0], "fraction": 0.0, "low": 0.0, "high": 0.0})
    assert extreme_curve(table).axes[0].lines[0].get_xdata().size == 0
