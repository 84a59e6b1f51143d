"""Contrasts between policies, on tables that a person can compute."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from rar_lib.metrics.contrasts import at_equal_binding, efficiencies, slope


def table(sums: dict[str, list[float]], checkpoint: str | None = None) -> pd.DataFrame:
    rows = [
        {"arm": arm, "prompt": f"p{i}", "tokens": 5, "k3_sum": value}
        for arm, values in sums.items()
        for i, value in enumerate(values)
    ]
    out = pd.DataFrame(rows)
    return out if checkpoint is None else out.assign(checkpoint=checkpoint)


FOUR = {"none": [4.0, 8, 2, 6], "full": [1.0, 2, 1, 1], "half": [2.5, 5, 1.5, 3.5]}


def test_efficiency_is_zero_at_none_and_one_at_full() -> None:
    found = efficiencies(table(FOUR))
    assert found.value == {"none": 0.0, "full": 1.0, "half": pytest.approx(0.5)}
    rows = found.table().set_index("arm")
    assert rows.loc["full", ["low", "high"]].tolist() == [1, 1]
    assert rows.loc["half", ["low", "high"]].tolist() == pytest.approx([0.5, 0.5])  # every prompt lies halfway


def test_differences_are_paired_by_draw() -> None:
    """Two arms that differ by a constant share of every prompt differ by it in every draw, however wide each is."""
    rng = np.random.default_rng(0)
    none = rng.lognormal(0, 2, 60)
    share = rng.random(60)
    found = efficiencies(
        table({"none": list(none), "full": [0.0] * 60, "a": list(none * share), "b": list(none * (share - 0.1))})
    )
    wide = found.interval(found.draws["a"])
    assert wide[1] - wide[0] > 0.05
    difference = found.difference("b", "a")
    assert difference == pytest.approx({"difference": 0.1, "low": 0.1, "high": 0.1})


def test_checkpoints_are_strata_and_prompts_of_two_checkpoints_are_two_clusters() -> None:
    both = pd.concat([table(FOUR, "a"), table({k: [10 * v for v in x] for k, x in FOUR.items()}, "b")])
    found = efficiencies(both)
    assert found.value["half"] == pytest.approx(0.5)
    alone = efficiencies(table({"none": [1.0], "full": [0.0], "x": [0.25]}, "a"))
    assert alone.interval(alone.draws["x"]) == (0.75, 0.75)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        none = rng.gamma(2.0, 1.0, 80)
        found = efficiencies(
            table({"none": list(none), "full": [0.0] * 80, "x": list(none * rng.beta(2, 2, 80))}),
            resamples=300,
            seed=trial,
        )
        low, high = found.interval(found.draws["x"])
        hits += low <= 0.5 <= high
    assert 0.89 <= hits / 200 <= 0.99


def test_slope_by_hand() -> None:
    found = efficiencies(table({"none": [10.0] * 4, "full": [0.0] * 4, "a": [9.0] * 4, "b": [7.0] * 4, "c": [5.0] * 4}))
    assert slope(found, {0.1: "a", 0.3: "b", 0.5: "c"}) == pytest.approx({"slope": 1.0, "low": 1.0, "high": 1.0})


def test_equal_binding_interpolates_between_the_arms_of_a_policy() -> None:
    found = efficiencies(table({"none": [10.0] * 4, "full": [0.0] * 4, "a": [8.0] * 4, "b": [2.0] * 4, "c": [5.0] * 4}))
    binding = {"full": 0.10, "a": 0.01, "b": 0.03, "c": 0.05}
    at = at_equal_binding(found, binding, {"one": ["a", "b"], "two": ["c"]}, 0.02)
    assert at["one"][0] == pytest.approx(0.5)  # halfway from .2 to .8
    assert at["two"][0] == pytest.approx(0.2)  # two fifths of .5
    assert at_equal_binding(found, binding, {"two": ["c"]}, 0.10)["two"][0] == 1.0


def test_arms_that_lack_prompts_are_refused() -> None:
    broken = table(FOUR).iloc[:-1]
    with pytest.raises(ValueError, match="every prompt in every arm; found prompts missing in"):
        efficiencies(broken)
    with pytest.raises(ValueError, match=r"expected arms none and full.*found arms none, x"):
        efficiencies(table({"none": [1.0], "x": [0.0]}))


def test_what_is_not_a_number_or_there_twice_is_refused() -> None:
    broken = table(FOUR)
    broken.loc[2, "k3_sum"] = np.nan
    with pytest.raises(ValueError, match="expected finite sums"):
        efficiencies(broken)
    with pytest.raises(ValueError, match="found one twice"):
        efficiencies(pd.concat([table(FOUR), table(FOUR)]))


def test_inside_the_noise_floor_there_is_no_efficiency() -> None:
    rows = table(
        {"none": [1.0, 2.0] * 4, "full": [0.9, 1.9] * 4, "x": [0.95, 1.95] * 4}
    )  # 5 tokens a prompt: 0.02 a token
    assert efficiencies(rows, noise_floor=0.019).value["x"] == pytest.approx(0.5)
    inside = efficiencies(rows, noise_floor=0.021)
    assert np.isnan(inside.value["x"])
    assert np.isnan(inside.draws["x"]).all()
    assert inside.without_gain == 1
    worse = efficiencies(table({"none": [1.0] * 9 + [0.0], "full": [0.0] * 9 + [30.0], "x": [0.5] * 10}))
    assert 0.5 < worse.without_gain < 0.8  # draws with the one prompt that R3 makes worse


def test_arms_of_equal_binding_come_in_their_own_order_and_full_last() -> None:
    found = efficiencies(table({"none": [10.0] * 4, "full": [0.0] * 4, "a": [8.0] * 4, "b": [4.0] * 4, "c": [6.0] * 4}))
    same = {"full": 0.04, "a": 0.04, "b": 0.04, "c": 0.04}
    assert at_equal_binding(found, same, {"p": ["a", "b", "c"]}, 0.02)["p"][0] == pytest.approx(0.1)
    assert at_equal_binding(found, same, {"p": ["b", "a", "c"]}, 0.02)["p"][0] == pytest.approx(0.3)


def test_nothing_between_none_and_full_is_undefined() -> None:
    found = efficiencies(table({"none": [1.0, 2.0], "full": [1.0, 2.0]}))
    assert np.isnan(found.value["full"])
    assert np.isnan(found.interval(found.draws["full"])).all()
