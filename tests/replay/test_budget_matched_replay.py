"""Integer budgets, keys, nesting, and every policy without scores."""

from __future__ import annotations

from dataclasses import fields, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rar_lib.errors import ConfigError, ReplayError
from rar_lib.replay.budget import (
    U64,
    as_fraction,
    integer_budget,
    rank_in_groups,
    take_smallest,
    uniform_from,
    unit_keys,
)
from rar_lib.replay.flip_model import FlipModel
from rar_lib.replay.plan import ReplayPlan
from rar_lib.replay.policies import POLICIES, get_policy, make_plan, require_policy
from rar_lib.replay.policy import Candidates
from rar_lib.replay.scores import ExpertScore, RouteSignals
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader

MATCHED = [name for name in POLICIES if get_policy(name).budget == "matched"]
PAIRS = [(name, unit) for name in MATCHED for unit in get_policy(name).units]
SHARES = [Fraction(0), Fraction(1, 20), Fraction(1, 10), Fraction(1, 4), Fraction(1, 2), Fraction(1)]


def traces(
    seed: int = 0, lengths: tuple[int, ...] = (5, 1, 7, 4), layers: int = 3, e: int = 8, k: int = 2
) -> tuple[RouteTrace, RouteTrace]:
    """A record with missing cells and last tokens, and a planning pass that disagrees here and there."""
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    ids = np.argsort(rng.random((n, layers, e)) ** 2, -1)[..., :k]
    other = np.argsort(rng.random((n, layers, e)), -1)[..., :k]
    status = np.where(rng.random((n, layers)) < 0.15, Status.MISSING, Status.RECORDED)
    status[np.cumsum(lengths) - 1] = Status.LAST
    header = TraceHeader(num_experts=e, top_k=k, moe_layers=tuple(range(1, layers + 1)), source="rollout")
    record = RouteTrace.from_packed(header, ids, lengths, status)
    live = np.where(rng.random((n, layers, 1)) < 0.3, other, ids)
    last = np.full(n, Status.RECORDED)
    last[np.cumsum(lengths) - 1] = Status.LAST
    margins = rng.random((n, layers))
    return record, RouteTrace.from_packed(header, live, lengths, last, margins=margins)


def candidates(seed: int = 0, **sizes: Any) -> Candidates:
    """Everything that any policy looks at: routes, margins, scores of cells, signals and P(flip)."""
    record, native = traces(seed, **sizes)
    rng = np.random.default_rng(seed + 1)
    shape, header = record.experts.shape, record.header
    values = rng.random((header.num_layers, header.num_experts))
    values[0, 0] = -np.inf  # a cell without routes in the planning pass
    score = ExpertScore(values, np.ones_like(values), "gate", "per_route", "rollout", 1.0)
    gates, a = rng.random(shape, np.float32), rng.normal(size=shape).astype(np.float32)
    gaps = np.sort(rng.random(shape, np.float32), -1)[..., ::-1]
    signals = RouteSignals("rollout", gates, a, a, rng.normal(size=shape[:2]).astype(np.float32), gaps)
    earlier = rng.random((100, 3))
    flips = FlipModel.empty().seen(earlier, rng.random((100, 3)) > earlier, np.ones((100, 3), bool))
    names = [f"sample-{i}" for i in range(record.num_sequences)]
    return Candidates(record, names, 7, 3, native, score, signals, flips)


def selected(signals: RouteSignals, trace: RouteTrace, order: Any) -> RouteSignals:
    """Signals of some of the sequences."""
    rows = np.concatenate([np.arange(trace.offsets[i], trace.offsets[i + 1]) for i in order])
    arrays = {f.name: getattr(signals, f.name) for f in fields(signals)}
    return RouteSignals(**{n: v[rows] if isinstance(v, np.ndarray) else v for n, v in arrays.items()})


def cells(plan: ReplayPlan, trace: RouteTrace, uids: list[str]) -> set[Any]:
    """The planned units as (uid, position, layer[, expert]), so that plans of other orders can be compared."""
    out = set()
    for place in np.argwhere(plan.planned):
        token, layer = place[:2]
        sequence = int(np.searchsorted(trace.offsets, token, side="right")) - 1
        expert = (int(trace.experts[tuple(place)]),) if plan.unit == "slot" else ()
        out.add((uids[sequence], int(token - trace.offsets[sequence]), trace.header.moe_layers[layer], *expert))
    return out


# ------------------------------------------------------------------ budgets and keys


@pytest.mark.parametrize(
    ("share", "valid", "budget"),
    [("0.1", 25, 3), ("0.1", 24, 2), ("1/4", 2, 1), ("0", 9, 0), ("1", 9, 9), ("0.5", 0, 0)],
)
def test_budgets_are_rounded_half_up_in_exact_arithmetic(share: str, valid: int, budget: int) -> None:
    assert integer_budget(as_fraction(share), valid) == budget


def test_a_share_is_the_decimal_that_was_written() -> None:
    assert as_fraction(0.1) == Fraction(1, 10)
    for bad in (-0.1, 1.01, "a", "1/0", float("nan"), True and "x"):
        with pytest.raises(ConfigError, match="expected a share from 0 to 1"):
            as_fraction(bad)


def test_ties_go_to_the_smaller_key_and_never_to_the_smaller_index() -> None:
    keys = np.array([9, 1, 8, 2], dtype=np.uint64)
    chosen = take_smallest(np.zeros(4), keys, np.ones(4, bool), 2)
    assert chosen.tolist() == [False, True, False, True]
    mixed = take_smallest(np.array([1.0, 0.0, 1.0, 1.0]), keys, np.array([True, True, True, False]), 2)
    assert mixed.tolist() == [False, True, True, False]


def test_nan_and_too_large_budgets_are_refused() -> None:
    keys, valid = np.arange(3, dtype=np.uint64), np.array([True, True, False])
    with pytest.raises(ReplayError, match="found NaN in 1 of 2 valid units"):
        take_smallest(np.array([np.nan, 1, 2]), keys, valid, 1)
    assert take_smallest(np.array([0, 1, np.nan]), keys, valid, 1).tolist() == [True, False, False]
    with pytest.raises(ReplayError, match="at most the 2 valid units, found 3"):
        take_smallest(np.zeros(3), keys, valid, 3)


def test_keys_look_uniform_and_independent() -> None:
    record, _ = traces(lengths=(400, 400), e=64, k=4)
    u = uniform_from(unit_keys(record, ["a", "b"], 0, "p", per_slot=True))[record.recorded]
    assert 0 < u.min() < u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.02
    assert len(np.unique(u)) == u.size


def test_ranks_within_groups_by_hand_also_where_packed_keys_meet() -> None:
    groups = np.array([1, 0, 1, 1, 0])
    for keys in (
        np.array([5, 9, 3, 4, 1], U64),
        np.array([5, 9, 3, 4, 1], U64) << U64(58),
        np.array([3, 2, 1, 2, 1], U64),
    ):
        rank, size = rank_in_groups(groups, keys)
        assert rank.tolist() == [2, 1, 0, 1, 0]
        assert size.tolist() == [3, 2, 3, 3, 2]
    rank, size = rank_in_groups(np.zeros(0, np.int64), np.zeros(0, U64))
    assert (rank.size, size.size) == (0, 0)


def test_names_must_be_one_a_sequence() -> None:
    record, _ = traces()
    with pytest.raises(ReplayError, match="expected 4 different names, found 1 of 4"):
        unit_keys(record, ["same"] * 4, 0, "p", per_slot=False)


# ------------------------------------------------------------------ every matched policy


@pytest.mark.parametrize("unit", ["token_layer", "slot"])
@pytest.mark.parametrize("share", SHARES)
def test_all_matched_policies_have_the_same_integer_budget(unit: Any, share: Fraction) -> None:
    seen = candidates()
    valid = int(seen.trace.recorded.sum()) * (2 if unit == "slot" else 1)
    for name, has in PAIRS:
        if has == unit:
            plan = make_plan(name, seen, unit, share)
            assert (plan.budget, plan.valid, plan.requested) == (integer_budget(share, valid), valid, share)
            plan.require(seen.trace)


@pytest.mark.parametrize(("name", "unit"), PAIRS)
def test_prefixes_are_nested(name: str, unit: Any) -> None:
    seen = candidates()
    plans = [make_plan(name, seen, unit, share).planned for share in SHARES]
    for small, large in pairwise(plans):
        assert not (small & ~large).any()


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(PAIRS), st.integers(0, 1000), st.sampled_from(SHARES))
def test_batch_order_slot_order_and_sharding_change_no_plan(pair: Any, seed: int, share: Fraction) -> None:
    name, unit = pair
    seen = candidates(seed)
    assert seen.native is not None
    uids = list(seen.uids)
    plan = cells(make_plan(name, seen, unit, share), seen.trace, uids)
    order = np.random.default_rng(seed).permutation(4)
    assert seen.signals is not None
    moved = replace(
        seen, trace=seen.trace.select(order), native=seen.native.select(order), uids=[uids[i] for i in order],
        signals=selected(seen.signals, seen.trace, order),
    )  # fmt: skip
    assert cells(make_plan(name, moved, unit, share), moved.trace, list(moved.uids)) == plan
    turned = replace(seen, trace=replace(seen.trace, experts=np.ascontiguousarray(seen.trace.experts[..., ::-1])))
    assert cells(make_plan(name, turned, unit, share), turned.trace, uids) == plan
    whole = make_plan(name, seen, unit, share)
    parts = [whole.select(seen.trace, [i]) for i in range(4)]
    assert set().union(*(cells(p, t, [uids[i]]) for i, (t, p) in enumerate(parts))) == plan


@pytest.mark.parametrize(("name", "unit"), PAIRS)
def test_degenerate_sizes(name: str, unit: Any) -> None:
    for sizes in ({"k": 1}, {"k": 4, "e": 4}, {"lengths": (1, 1)}, {"lengths": (2, 3), "layers": 1}):
        seen = candidates(**sizes)
        for share in SHARES:
            plan = make_plan(name, seen, unit, share)
            assert plan.budget == integer_budget(share, plan.valid)


def test_another_seed_is_another_draw_and_the_batch_matters_where_it_should() -> None:
    seen = candidates(lengths=(40, 40))

    def plan(name: str, unit: Any, **change: Any) -> np.ndarray:
        return make_plan(name, replace(seen, **change), unit, Fraction(1, 4)).planned

    for name, unit in (
        ("random_route", "slot"),
        ("uniform", "slot"),
        ("random_cell", "slot"),
        ("random_route", "token_layer"),
    ):
        assert not np.array_equal(plan(name, unit), plan(name, unit, seed=8))
    assert np.array_equal(plan("random_cell", "slot"), plan("random_cell", "slot", batch=4))
    assert not np.array_equal(plan("random_cell_resampled", "slot"), plan("random_cell_resampled", "slot", batch=4))
    assert not np.array_equal(plan("random_route", "slot"), plan("random_route", "slot", batch=4))


# ------------------------------------------------------------------ what each policy prefers


def test_uniform_takes_the_same_share_of_every_cell() -> None:
    seen = candidates(lengths=(60, 60), e=4)
    plan = make_plan("uniform", seen, "slot", Fraction(1, 4))
    for layer in range(3):
        for expert in range(4):
            mine = (seen.trace.experts[:, layer] == expert) & seen.trace.recorded[:, layer, None]
            assert abs(plan.planned[:, layer][mine].sum() - mine.sum() / 4) <= 1
    whole = make_plan("uniform", seen, "token_layer", Fraction(1, 4))
    per_layer = whole.planned.sum(0)
    assert (abs(per_layer - seen.trace.recorded.sum(0) / 4) <= 1).all()


def test_random_cell_takes_whole_cells_and_cuts_one() -> None:
    seen = candidates(lengths=(60, 60), e=4)
    plan = make_plan("random_cell", seen, "slot", Fraction(1, 3))
    partly = 0
    for layer in range(3):
        for expert in range(4):
            mine = (seen.trace.experts[:, layer] == expert) & seen.trace.recorded[:, layer, None]
            partly += 0 < plan.planned[:, layer][mine].sum() < mine.sum()
    assert partly <= 1


def test_margin_takes_the_closest_decisions() -> None:
    seen = candidates()
    assert seen.native is not None
    assert seen.native.margins is not None
    plan = make_plan("margin", seen, "token_layer", Fraction(1, 4))
    inside, outside = seen.native.margins[plan.planned], seen.native.margins[seen.trace.recorded & ~plan.planned]
    assert inside.max() < outside.min()


def test_disagree_takes_what_differs_first() -> None:
    seen = candidates()
    assert seen.native is not None
    differs = (
        (np.sort(seen.trace.ids(), -1) != np.sort(seen.native.ids(), -1)).any(-1)
        & seen.trace.recorded
        & seen.native.recorded
    )
    share = Fraction(int(differs.sum()), int(seen.trace.recorded.sum()))
    assert np.array_equal(make_plan("disagree", seen, "token_layer", share).planned, differs)


def test_frequency_takes_the_most_used_cells() -> None:
    header = TraceHeader(num_experts=4, top_k=1, moe_layers=(0,), source="rollout")
    record = RouteTrace.from_packed(header, [[[e]] for e in (0, 0, 0, 1, 1, 2)] + [[[0]]], [7], [1] * 6 + [2])
    plan = make_plan("frequency", Candidates(record, ["a"], 0), "slot", Fraction(1, 2))
    assert plan.planned[:, 0, 0].tolist() == [True, True, True, False, False, False, False]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "unit", "budget", "message"),
    [
        ("fishr", "slot", "0.1", "expected one of full, uniform"),
        ("random_cell", "token_layer", "0.1", "policy random_cell exists in slot, found 'token_layer'"),
        ("uniform", "slot", None, "needs a share from 0 to 1, found none"),
        ("uniform", "slot", "1.5", "expected a share from 0 to 1, found '1.5'"),
        ("full", "slot", "0.5", "policy full has no budget"),
    ],
)
def test_what_does_not_go_together_is_refused(name: str, unit: str, budget: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_policy(name, unit, budget)


def test_a_policy_without_its_planning_pass_is_refused() -> None:
    record, native = traces()
    for name in ("margin", "disagree"):
        with pytest.raises(ReplayError, match="no planning pass"):
            make_plan(name, Candidates(record, list("abcd"), 0), "slot", "0.1")
    with pytest.raises(ReplayError, match="recorded no margins"):
        make_plan("margin", Candidates(record, list("abcd"), 0, 0, replace(native, margins=None)), "slot", "0.1")
