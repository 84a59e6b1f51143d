"""Figures by their artists and data, not by pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from rar_lib.figures import (
    disagreement_by_layer,
    estimator_agreement,
    flip_calibration,
    flips_by_layer,
    frontier,
    load_map,
    mismatch_by_step,
    reward_by_step,
    save_figure,
    score_map,
    score_stability,
)
from rar_lib.figures.style import POLICY_COLOUR, POLICY_MARKER, POLICY_STYLE, mean_and_band
from rar_lib.replay.policies import POLICIES


def steps(policies: tuple[str, ...] = ("none", "R3"), seeds: int = 1) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"policy": p, "seed": s, "step": t, "value": 0.1 + t + s}
            for p in policies
            for s in range(seeds)
            for t in range(4)
        ]
    )


def test_one_line_a_policy_in_its_colour_and_marker() -> None:
    (axes,) = reward_by_step(steps()).axes
    assert [line.get_label() for line in axes.lines] == ["none", "R3"]
    for line in axes.lines:
        assert to_hex(line.get_color()).upper() == POLICY_COLOUR[line.get_label()]
        assert line.get_marker() == POLICY_MARKER[line.get_label()]
        assert line.get_ydata().tolist() == pytest.approx([0.1, 1.1, 2.1, 3.1])
    assert not axes.collections
    assert "n=1 seed" in [t.get_text() for t in axes.texts]


def test_several_seeds_get_a_band() -> None:
    (axes,) = reward_by_step(steps(seeds=3)).axes
    assert len(axes.collections) == 2
    assert "n=3 seeds, 95 % bootstrap" in [t.get_text() for t in axes.texts]


RATIOS = pd.DataFrame({"group": ["none", "all three"], "ratio": [0.5, 0.7], "low": [0.3, 0.6], "high": [0.9, 1.4]})


@pytest.mark.parametrize(
    ("floor", "lines", "text"),
    [
        (None, 2, "noise floor not measured"),
        (0.0, 2, "noise floor 0 (bit-equal)"),
        (1e-9, 2, "noise floor 1e-09, far below"),
        (0.05, 3, "noise floor"),
    ],
)
def test_the_noise_floor_is_drawn_or_said(floor: float | None, lines: int, text: str) -> None:
    left, _ = mismatch_by_step(steps(), floor, RATIOS).axes
    assert len(left.lines) == lines
    assert text in [t.get_text() for t in left.texts]
    assert left.get_yscale() == "log"


def test_paired_ratios_are_points_with_intervals_beside_1() -> None:
    _, right = mismatch_by_step(steps(), None, RATIOS).axes
    points = [container.lines[0] for container in right.containers]
    assert [p.get_xdata()[0] for p in points] == [0.5, 0.7]
    assert to_hex(points[0].get_color()).upper() == POLICY_COLOUR["none"]
    bars = [container.lines[2][0].get_segments()[0] for container in right.containers]
    assert [bar[:, 0].tolist() for bar in bars] == [pytest.approx([0.3, 0.9]), pytest.approx([0.6, 1.4])]
    assert [t.get_text() for t in right.get_yticklabels()] == ["none", "all three"]
    assert right.get_xlim()[1] > 1.4


def test_flips_by_layer_show_the_mean_over_steps() -> None:
    table = pd.DataFrame(
        [
            {"policy": "none", "seed": 0, "step": t, "layer": layer, "value": layer + t / 10}
            for t in range(3)
            for layer in (1, 4)
        ]
    )
    (axes,) = flips_by_layer(table).axes
    points = axes.containers[0].lines[0]
    assert points.get_ydata().tolist() == pytest.approx([1.1, 4.1])
    assert axes.get_xticks().tolist() == [1, 4]
    assert axes.get_ylim()[0] == 0


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="found R7"):
        reward_by_step(steps(("R7",)))


def test_bands_are_seeded_and_contain_the_mean() -> None:
    values = pd.DataFrame(np.random.default_rng(0).normal(size=(20, 3)))
    mean, low, high = mean_and_band(values)
    assert (low < mean).all()
    assert (mean < high).all()
    assert all(np.array_equal(a, b) for a, b in zip((mean, low, high), mean_and_band(values), strict=True))


def test_saving_writes_three_files_the_same_twice_and_leaves_the_style_alone(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    table = steps()
    for name in ("a", "b"):
        paths = save_figure(reward_by_step(table), tmp_path / name / "reward", table)
        assert [p.suffix for p in paths] == [".png", ".svg", ".csv"]
    for suffix in (".png", ".svg", ".csv"):
        one, two = ((tmp_path / n / "reward").with_suffix(suffix).read_bytes() for n in ("a", "b"))
        assert one == two
    assert dict(mpl.rcParams) == before
    assert pd.read_csv(tmp_path / "a" / "reward.csv").equals(table)


def curve(policy: str, budgets: tuple[float, ...] = (0.1, 0.5)) -> list[dict[str, Any]]:
    return [
        {"policy": policy, "nominal": b, "binding": b / 50, "efficiency": b, "low": b - 0.1, "high": b + 0.2}
        for b in budgets
    ]


def test_the_frontier_joins_none_the_policy_and_full() -> None:
    ends = [{"policy": "none", "nominal": 0.0, "binding": 0.0, "efficiency": 0.0, "low": 0.0, "high": 0.0},
            {"policy": "full", "nominal": 1.0, "binding": 0.02, "efficiency": 1.0, "low": 1.0, "high": 1.0}]  # fmt: skip
    table = pd.DataFrame([*curve("margin"), *curve("fisher"), *curve("bias"), *ends])
    figure = frontier({"before": table, "after": table})
    assert len(figure.axes) == 4
    nominal, binding = figure.axes[:2]
    path = nominal.lines[0]
    assert path.get_xdata().tolist() == [0, 0.1, 0.5, 1]
    assert path.get_ydata().tolist() == [0, 0.1, 0.5, 1]
    assert [t.get_text() for t in figure.legends[0].texts] == ["fisher", "margin", "bias"]
    assert len(nominal.containers) == 2  # λ has no nominal share
    assert len(binding.containers) == 3
    assert {to_hex(c.lines[0].get_color()).upper() for c in nominal.containers} == {
        POLICY_COLOUR["fisher"],
        POLICY_COLOUR["margin"],
    }
    assert nominal.get_ylabel() == "efficiency, before"


def test_every_policy_has_a_look_of_its_own() -> None:
    assert set(POLICIES) - {"full"} <= set(POLICY_STYLE)
    assert len(set(POLICY_STYLE.values())) == len(POLICY_STYLE)


def test_a_score_map_diverges_at_the_layers_median_and_hatches_what_has_no_score() -> None:
    values = np.array([[1.0, 2.0, 4.0, -np.inf], [3.0, 3.0, 3.0, 12.0]])
    axes, bar = score_map(values, [1, 5], "gate").axes
    shown = axes.images[0].get_array()
    assert np.asarray(shown)[0, :3].tolist() == [-1, 0, 1]
    assert np.asarray(shown)[1].tolist() == [0, 0, 0, 2]
    assert np.isnan(np.asarray(shown.filled(np.nan) if hasattr(shown, "filled") else shown)[0, 3])
    limit = np.quantile([1, 0, 1, 0, 0, 0, 2], 0.9)
    assert axes.images[0].get_clim() == (-limit, limit)
    assert len(bar.patches) == 2  # arrows: one value lies beyond
    assert len(axes.patches) == 1
    assert [t.get_text() for t in axes.get_yticklabels()] == ["1", "5"]


def test_agreement_stability_and_calibration_show_their_tables() -> None:
    names = ["gate", "param"]
    pairs = pd.DataFrame([{"a": a, "b": b, "spearman": 1.0 if a == b else 0.25} for a in names for b in names])
    (axes,) = estimator_agreement(pairs).axes
    assert sorted(t.get_text() for t in axes.texts if t.get_text()[0].isdigit()) == ["0.25", "0.25", "1.00", "1.00"]
    stable = pd.DataFrame({"name": names * 2, "spearman": [0.8, 0.4, 0.7, 0.5], "null_low": -0.3, "null_high": 0.3})
    (axes,) = score_stability(stable).axes
    assert axes.lines[0].get_xdata().tolist() == [-0.3, 0.3]
    assert axes.lines[1].get_xdata().tolist() == [0.8, 0.7]
    table = pd.DataFrame({"predicted": [0.001, 0.1], "observed": [0.0, 0.2], "cells": [100, 100]})
    (axes,) = flip_calibration(table).axes
    assert axes.lines[1].get_ydata().tolist() == [0.2]
    assert axes.lines[2].get_ydata().tolist() == [0.005]  # half a flip: nothing happened there


def test_disagreement_is_flips_over_cells_with_a_band_over_sequences() -> None:
    table = pd.DataFrame(
        {"sequence": [0, 0, 1, 1], "layer": [2, 5, 2, 5], "flips": [1, 0, 3, 0], "cells": [10, 10, 10, 10]}
    )
    (axes,) = disagreement_by_layer(table).axes
    line = axes.containers[0].lines[0]
    assert line.get_xdata().tolist() == [2, 5]
    assert line.get_ydata().tolist() == [0.2, 0.0]
    low, high = axes.containers[0].lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == (pytest.approx(0.1), pytest.approx(0.3))
    assert "n=2 sequences" in axes.texts[0].get_text()


def test_load_is_white_at_uniform_and_grey_where_nothing_went() -> None:
    load = np.array([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]])
    figure = load_map(load, [1, 4])
    axes = figure.axes[0]
    (image,) = axes.images
    values = image.get_array()
    assert values[0, :3].tolist() == [1, 0, 0]
    assert bool(np.ma.getmaskarray(values)[0, 3]) or np.isnan(values[0, 3])
    assert image.norm(0) == 0.5
    assert [t.get_text() for t in axes.get_yticklabels()] == ["1", "4"]
