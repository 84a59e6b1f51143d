"""Plans at fixed scores: the CPU demo's numbers have ends that a person knows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from rar_lib.errors import ReplayError
from rar_lib.replay.fixed import World, execute, executed, plan_row, synthetic_frontier, synthetic_world
from rar_lib.replay.plan import full_plan
from rar_lib.replay.policies import POLICIES, get_policy, make_plan

MATCHED = [name for name in POLICIES if get_policy(name).budget == "matched"]


@pytest.fixture(scope="module")
def world() -> World:
    return synthetic_world(64, flip_rate=0.04)


@pytest.mark.parametrize("unit", ["token_layer", "slot"])
def test_nothing_and_everything(world: World, unit: str) -> None:
    table = synthetic_frontier(world, MATCHED, ["0", "1"], unit)  # type: ignore[arg-type]
    assert set(table["policy"]) == {n for n in MATCHED if unit in get_policy(n).units}
    none, full = table[table["budget"] == 0], table[table["budget"] == 1]
    for column, low, high in (
        ("cells restored", 0, 1),
        ("price restored", 0, 1),
        ("fidelity", None, 1),
        ("forced", 0, None),
    ):
        if low is not None:
            assert (none[column] == low).all()
        if high is not None:
            assert full[column].tolist() == pytest.approx([high] * len(full))
    assert (none["regret"] == 0).all()
    assert full["forced"].tolist() == pytest.approx([0.04] * len(full), abs=5e-4)
    assert full["regret"].nunique() == 1


def test_everything_is_the_record(world: World) -> None:
    used, trace = execute(full_plan(world.made.rollout), world), world.made.rollout
    assert np.array_equal(used[trace.recorded], trace.experts[trace.recorded])


def test_more_budget_restores_more_and_the_oracle_all_at_once(world: World) -> None:
    table = synthetic_frontier(world, ["margin", "swap", "fisher", "disagree"], ["0.05", "0.1", "0.3", "0.6", "1"])
    for _, rows in table.groupby("policy"):
        for column in ("cells restored", "price restored", "fidelity", "regret", "binding"):
            assert rows[column].is_monotonic_increasing
    oracle = table[table["policy"] == "disagree"]
    assert (oracle["price restored"] == 1).all()


def test_swap_finds_the_price_and_margin_the_flips() -> None:
    """What the two are for: averaged over draws, so that no single one decides."""
    table = pd.concat([synthetic_frontier(synthetic_world(128, seed=s), ["margin", "swap", "random_route"], ["0.05"])
                       for s in range(4)])  # fmt: skip
    mean = table.groupby("policy")[["cells restored", "price restored"]].mean()
    assert mean.loc["swap", "price restored"] > mean.loc["margin", "price restored"] > 0.3
    assert mean.loc["margin", "cells restored"] > mean.loc["swap", "cells restored"]
    assert mean.loc["random_route", "price restored"] < 0.2


def test_a_bonus_binds_the_share_that_was_asked_for(world: World) -> None:
    full = plan_row(full_plan(world.made.rollout), world)
    half = plan_row(make_plan("bias", world.seen, "bias", "0.5"), world)
    assert half["forced"] == pytest.approx(full["forced"] / 2, rel=0.02)  # type: ignore[operator]
    assert half["binding"] == half["forced"]


def test_the_same_seed_is_the_same_world() -> None:
    a, b, c = (synthetic_world(8, seed=s) for s in (3, 3, 4))
    assert np.array_equal(a.price, b.price)
    assert a.made.rollout.equals(b.made.rollout)
    assert not np.array_equal(a.price, c.price)


def test_single_slots_are_not_filled_up_without_scores(world: World) -> None:
    made = world.made
    sets, slots = (make_plan("random_route", world.seen, unit, "1/3") for unit in ("token_layer", "slot"))
    assert np.array_equal(executed(sets, made.rollout, made.native, None), execute(sets, world))
    with pytest.raises(ReplayError, match="unit slot: expected live scores to fill up its sets, found none"):
        executed(slots, made.rollout, made.native, None)
