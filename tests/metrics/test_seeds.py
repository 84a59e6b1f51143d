"""Paired t, Holm, and their coverage. Seeds are the unit."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from rar_lib.metrics.seeds import against, holm, iqm, paired_t


def test_paired_t_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1/√3, t(2) at 97.5 % is 4.3027."""
    found = paired_t([2, 4, 6], [1, 2, 3])
    assert found["difference"] == 2
    assert found["high"] == pytest.approx(2 + 4.302653 / math.sqrt(3), rel=1e-5)
    assert found["p"] == pytest.approx(0.0742, abs=1e-4)  # t = 3.4641 with 2 degrees of freedom


def test_pairs_that_say_nothing() -> None:
    assert paired_t([1], [0]) == {"n": 1, "difference": 1.0, "low": None, "high": None, "p": None}
    assert paired_t([1, 1], [1, 1]) == {"n": 2, "difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    assert paired_t([2, 2], [1, 1])["p"] is None
    with pytest.raises(ValueError, match="both sides, found 2 and 1"):
        paired_t([1, 2], [1])
    with pytest.raises(ValueError, match="as many finite values on both sides, found nan"):
        paired_t([1, float("nan")], [1, 2])


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_the_interval_covers() -> None:
    """95 % of the intervals of 8 pairs hold the true difference, where a percentile bootstrap would be short."""
    rng = np.random.default_rng(0)
    pairs = rng.normal(0.3, 1, (2000, 8))
    inside = [f["low"] <= 0.3 <= f["high"] for f in (paired_t(row, np.zeros(8)) for row in pairs)]
    assert 0.935 < np.mean(inside) < 0.965


def table(**arms: list[float]) -> pd.DataFrame:
    return pd.DataFrame([{"policy": a, "seed": s, "x": v} for a, vs in arms.items() for s, v in enumerate(vs)])


def test_against_a_baseline() -> None:
    found = against(table(none=[1, 2, 3, 4], worse=[0, 1.1, 1.9, 3], same=[1.1, 1.8, 3.1, 3.9]), "x", "none").set_index(
        "policy"
    )
    assert list(found.index) == ["worse", "same"]
    assert found.loc["worse", "difference"] == pytest.approx(-1.0)
    assert found["verdict"].tolist() == ["lower", "does not differ"]
    assert found.loc["worse", "p_holm"] == pytest.approx(2 * found.loc["worse", "p"])
    factor = against(table(none=[1, 2, 4], half=[0.5, 1, 2.0001]), "x", "none", log=True)
    assert factor["difference"][0] == pytest.approx(-math.log(2), abs=1e-4)


def test_unpaired_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="every seed, found none of 'other' at seed 1"):
        against(table(none=[1, 2], other=[1]), "x", "none")
    with pytest.raises(ValueError, match="once, found 'none' at seed 0 twice"):
        against(pd.concat([table(none=[1]), table(none=[1])]), "x", "none")


def test_equal_differences_have_no_spread_to_judge_by() -> None:
    """Whatever rounding makes of them."""
    for base in ([1.0, 2.0, 3.0], [0.1, 0.2, 0.3]):
        found = paired_t([b + 0.1 for b in base], base)
        assert (found["low"], found["high"], found["p"]) == (None, None, None)
    moved = against(table(none=[1, 2, 3], up=[2, 3, 4], noisy=[1, 2.5, 2.8]), "x", "none").set_index("policy")
    assert moved.loc["up", "verdict"] == "cannot be told"
    assert moved.loc["noisy", "verdict"] == "does not differ"
    with pytest.raises(ValueError, match="expected policies beside 'none'"):
        against(table(none=[1, 2]), "x", "none")


def test_the_interquartile_mean_by_hand() -> None:
    assert iqm([8, 1, 7, 2, 6, 3, 5, 4]) == 4.5  # of 3, 4, 5, 6
    assert iqm([100, 1, 2, 3]) == 2.5
    assert iqm([1, 2, 6]) == 3  # a quarter of three runs is none
    assert iqm([]) is None
    with pytest.raises(ValueError, match="finite values, found nan"):
        iqm([1, float("nan")])


def test_missing_seeds_are_dropped_with_their_pair_when_asked() -> None:
    runs = table(none=[1, 2, 3, 4], other=[2, 3.5, 3.5, 9])
    runs = runs[~((runs["policy"] == "other") & (runs["seed"] == 3))]
    with pytest.raises(ValueError, match="found none of 'other' at seed 3"):
        against(runs, "x", "none")
    (row,) = against(runs, "x", "none", missing="drop").to_dict("records")
    assert (row["n"], row["difference"]) == (3, 1.0)  # 1, 1.5, 0.5
    assert row["mean"] == 3.0
    one = runs[~((runs["policy"] == "other") & (runs["seed"] > 0))]
    (row,) = against(one, "x", "none", missing="drop").to_dict("records")
    assert (row["n"], row["verdict"]) == (1, "cannot be told")
    alone = pd.concat([table(none=[1, 2]), table(other=[5, 6]).assign(seed=[7, 8])])
    (row,) = against(alone, "x", "none", missing="drop").to_dict("records")
    assert (row["n"], row["verdict"], row["difference"]) == (0, "cannot be told", None)
    zero = table(none=[1, 2, 4], other=[0, 4, 8])
    (row,) = against(zero, "x", "none", log=True, missing="drop").to_dict("records")
    assert (row["n"], row["difference"]) == (2, pytest.approx(np.log(2)))
    with pytest.raises(ValueError, match="expected 'none' among the policies"):
        against(table(a=[1], b=[2]), "x", "none", missing="drop")
