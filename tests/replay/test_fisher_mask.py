"""Policies that weigh: scores of cells by hand, their plans and controls, and P(flip)."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rar_lib.errors import ConfigError, ReplayError
from rar_lib.replay.flip_model import FlipModel
from rar_lib.replay.plan import ReplayPlan, full_plan
from rar_lib.replay.policies import make_plan
from rar_lib.replay.policy import Candidates, unit_cells
from rar_lib.replay.resolve import resolve_biased
from rar_lib.replay.rules_scored import calibrate_bias, permuted_within_layers
from rar_lib.replay.scores import (
    ExpertScore,
    RouteSignals,
    ScoreSums,
    aggregate,
    cell_sums,
    expert_score,
    route_scores,
    score_sums,
)
from rar_lib.replay.stability import half_of_prompts, rank_agreement, stability
from rar_lib.traces.synthetic import synthetic
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader
from tests.replay.test_budget_matched_replay import candidates

HEADER = TraceHeader(num_experts=4, top_k=2, moe_layers=(3,), source="old")
#           token 0  token 1  token 2 (last)
IDS = np.array([[[0, 1]], [[1, 2]], [[0, 0]]])
TRACE = RouteTrace.from_packed(HEADER, IDS, [3], np.array([1, 1, 2]))


def signals(**more: Any) -> RouteSignals:
    """Two tokens with gradients that a person can square."""
    zeros = np.zeros((1, 2), np.float32)
    grad = np.array([[[1.0, -1.0]], [[3.0, -3.0]], zeros], np.float32)
    gates = np.array([[[0.5, 0.5]], [[0.75, 0.25]], zeros], np.float32)
    a = np.array([[[4.0, 0.0]], [[2.0, 1.0]], zeros], np.float32)
    return RouteSignals("rollout", gates, grad, a, **more)


# ---------------------------------------------------------------- scores by hand


def test_sums_means_and_cells_without_routes() -> None:
    sums = score_sums(signals(), TRACE, "gate")
    assert sums.mass.tolist() == [[1.0, 1.0 + 9.0, 9.0, 0.0]]
    assert sums.count.tolist() == [[1.0, 2.0, 1.0, 0.0]]
    assert sums.tokens == 2
    assert aggregate(sums, "per_route").tolist() == [[1.0, 5.0, 9.0, -np.inf]]
    assert aggregate(sums, "mass").tolist() == [[1.0, 10.0, 9.0, -np.inf]]
    # the layer's mean is 20 / 4 = 5: (1 + 2·5)/3, (10 + 2·5)/4, (9 + 2·5)/3
    assert aggregate(sums, "shrunk", shrinkage=2.0).tolist() == [[11 / 3, 5.0, 19 / 3, -np.inf]]
    free = score_sums(signals(), TRACE, "gate", "gate_free")
    assert aggregate(free, "gate_free").tolist() == [[4.0, (4 + 16) / 2, 144.0, -np.inf]]


def test_swap_and_param_by_hand() -> None:
    other = np.array([[2.0], [np.nan], [0.0]], np.float32)  # no runner-up at token 1
    swap = route_scores(signals(runner_up=other), "swap")
    assert swap[0].tolist() == [[(0.5 * (2 - 4)) ** 2, (0.5 * 2) ** 2]]
    assert swap[1].tolist() == [[0, 0]]
    ones = np.ones((3, 1), np.float32)
    inner, pre = np.full((3, 1, 2), 3.0, np.float32), np.full((3, 1, 2), 5.0, np.float32)
    given = signals(input_sq=2 * ones, output_grad_sq=7 * ones, hidden_sq=inner, pre_grad_sq=pre)
    assert route_scores(given, "param")[0].tolist() == [[0.25 * 7 * 3 + 5 * 2] * 2]  # g²‖u‖²‖m‖² + ‖d‖²‖x‖²


def test_exact_norms_keep_their_sequences() -> None:
    exact = np.array([[[1.0, 2.0, 3.0, 0.0]]], np.float32)
    sums = score_sums(signals(exact=exact), TRACE, "param_exact")
    assert aggregate(sums, "per_route").tolist() == [[1.0, 1.0, 3.0, -np.inf]]
    with pytest.raises(ReplayError, match="no gate of a single route"):
        score_sums(signals(exact=exact), TRACE, "param_exact", "gate_free")
    with pytest.raises(ReplayError, match="norm per sequence"):
        route_scores(signals(exact=exact), "param_exact")


def test_a_moving_average_divides_after_averaging() -> None:
    a = ScoreSums(np.array([[4.0, 0.0]]), np.array([[4.0, 0.0]]), 4)
    b = ScoreSums(np.array([[9.0, 2.0]]), np.array([[1.0, 1.0]]), 2)
    mixed = a.decayed_with(b, 0.5)
    assert aggregate(mixed, "per_route").tolist() == [[6.5 / 2.5, 2.0]]  # not (1 + 9) / 2
    assert mixed.tokens == 3
    with pytest.raises(ConfigError, match=r"score\.ema"):
        a.decayed_with(b, 1.0)


def test_what_is_not_a_score_is_refused_with_its_place() -> None:
    q = route_scores(signals(), "gate")
    for bad in (np.nan, -1.0):
        broken = q.copy()
        broken[1, 0, 1] = bad
        with pytest.raises(ReplayError, match=rf"found {bad} at token 1, layer 3, expert 2"):
            cell_sums(broken, TRACE)
    broken = q.copy()
    broken[2] = np.nan  # the last token has no route: nothing is read there
    cell_sums(broken, TRACE)
    with pytest.raises(ReplayError, match=r"expected the shape of the routes \(3, 1, 2\), found \(2, 1, 2\)"):
        cell_sums(q[:2], TRACE)
    with pytest.raises(ReplayError, match="captured no runner_up; ask for swap"):
        route_scores(signals(), "swap")
    zero = replace(signals(), gates=np.zeros_like(signals().gates))
    with pytest.raises(ReplayError, match="gate of exactly 0"):
        score_sums(zero, TRACE, "gate", "gate_free")
    with pytest.raises(ConfigError, match=r"score\.aggregation: expected one of per_route, mass"):
        aggregate(score_sums(signals(), TRACE, "gate"), "median")  # type: ignore[arg-type]


def test_relabelling_the_experts_permutes_the_scores() -> None:
    order = np.array([2, 0, 3, 1])  # expert e becomes order[e]
    moved = replace(TRACE, experts=np.where(TRACE.recorded[..., None], order[TRACE.experts], 0).astype(np.uint8))
    for aggregation in ("per_route", "mass", "shrunk", "gate_free"):
        a, b = (expert_score(signals(), t, "gate", aggregation).values for t in (TRACE, moved))  # type: ignore[arg-type]
        assert b[:, order].tolist() == a.tolist()


def test_ranks_agree_by_hand() -> None:
    a = np.array([[1.0, 2.0, 3.0, 4.0]])
    assert rank_agreement(a, a * 10) == pytest.approx(1)
    assert rank_agreement(a, -a) == pytest.approx(-1)
    assert rank_agreement(a, np.array([[1.0, 3.0, 2.0, 4.0]])) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert rank_agreement(a, np.array([[1.0, 1.0, 1.0, 1.0]])) is None  # no ranking to speak of
    assert rank_agreement(a[:, :2], a[:, :2]) is None
    unscored = np.array([[1.0, -np.inf, 3.0, 4.0]])
    assert rank_agreement(a, unscored) == pytest.approx(1)


def test_the_null_of_stability_lies_around_zero_and_a_signal_above_it() -> None:
    rng = np.random.default_rng(0)
    signal = rng.random((4, 32))
    found = stability(signal + 0.1 * rng.random((4, 32)), signal + 0.1 * rng.random((4, 32)))
    assert found.null_low is not None and found.null_high is not None and found.spearman is not None  # noqa: PT018
    assert found.null_low < 0 < found.null_high < 0.35 < found.spearman
    noise = stability(rng.random((4, 32)), rng.random((4, 32)))
    assert noise.spearman is not None
    assert abs(noise.spearman) < 0.4


def test_halves_are_of_whole_prompts() -> None:
    groups = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    half = half_of_prompts(groups, 1)
    assert half.sum() == 4
    assert all(len(set(half[groups == g])) == 1 for g in range(4))


# ---------------------------------------------------------------- plans


def scored(values: list[list[float]]) -> ExpertScore:
    array = np.array(values)
    return ExpertScore(array, np.ones_like(array), "gate", "per_route", "rollout", 1.0)


def test_fisher_takes_whole_cells_in_the_order_of_their_scores() -> None:
    seen = replace(candidates(lengths=(30, 30), layers=2), flips=None)
    rng = np.random.default_rng(3)
    values = rng.permutation(16).reshape(2, 8).astype(float)
    values[1, 5] = -np.inf
    seen = replace(seen, score=scored(values.tolist()))
    cells = unit_cells(seen.trace, "slot")
    valid = np.repeat(seen.trace.recorded[..., None], 2, -1)
    plan = make_plan("fisher", seen, "slot", "1/4")
    assert plan.score_id == "gate/per_route/rollout"
    share = {c: plan.planned[(cells == c) & valid].mean() for c in np.unique(cells[valid])}
    order = sorted(share, key=lambda c: -values.reshape(-1)[c])
    shares = [share[c] for c in order]
    assert shares == sorted(shares, reverse=True)  # whole cells first, then one that is cut, then none
    assert sum(0 < s < 1 for s in shares) <= 1
    last = make_plan("inverse_fisher", seen, "slot", "1/4")
    share = {c: last.planned[(cells == c) & valid].mean() for c in np.unique(cells[valid])}
    assert share.get(8 + 5, 0.0) == 0  # unscored is last there too
    assert not (last.planned & plan.planned).any()


def test_fisher_for_whole_sets_sums_the_scores_of_a_set() -> None:
    header = TraceHeader(num_experts=4, top_k=2, moe_layers=(0,), source="rollout")
    ids = np.array([[[0, 1]], [[2, 3]], [[0, 3]], [[0, 0]]])
    trace = RouteTrace.from_packed(header, ids, [4], np.array([1, 1, 1, 2]))
    seen = Candidates(trace, ["a"], 0, score=scored([[5.0, 1.0, 3.0, 4.0]]))  # sums 6, 7, 9
    assert make_plan("fisher", seen, "token_layer", "1/3").planned[:, 0].tolist() == [False, False, True, False]
    assert make_plan("fisher", seen, "token_layer", "2/3").planned[:, 0].tolist() == [False, True, True, False]
    assert make_plan("inverse_fisher", seen, "token_layer", "1/3").planned[:, 0].tolist() == [True, False, False, False]


def test_the_permuted_control_keeps_the_values_of_each_layer() -> None:
    values = np.random.default_rng(0).random((3, 16))
    values[0, 3] = -np.inf
    moved = permuted_within_layers(values, 5)
    assert np.array_equal(np.sort(moved, 1), np.sort(values, 1))
    assert np.isneginf(moved[0, 3])
    assert (moved != values).mean() > 0.7
    assert np.array_equal(moved, permuted_within_layers(values, 5))
    assert not np.array_equal(moved, permuted_within_layers(values, 6))
    assert not np.array_equal(moved, permuted_within_layers(values, 5, batch=1))


def test_equal_scores_go_by_key_and_not_by_index() -> None:
    seen = replace(candidates(lengths=(40, 40)), score=scored(np.ones((3, 8)).tolist()))
    plans = [make_plan("fisher", replace(seen, seed=s), "slot", "1/4").planned for s in range(4)]
    assert len({p.tobytes() for p in plans}) == 4


def test_swap_weighs_the_price_by_the_chance() -> None:
    header = TraceHeader(num_experts=4, top_k=2, moe_layers=(0,), source="rollout")
    record = RouteTrace.from_packed(
        header, np.array([[[0, 1]], [[0, 1]], [[0, 3]], [[0, 0]]]), [4], np.array([1, 1, 1, 2])
    )
    native = replace(record, experts=np.array([[[0, 1]], [[0, 1]], [[0, 1]], [[0, 0]]], np.uint8))
    gaps = np.array([[[2.0, 0.01]], [[2.0, 0.01]], [[2.0, 0.01]], [[1, 1]]], np.float32)
    a = np.array([[[0, 3.0]], [[0, 1.0]], [[0, 2.0]], [[0, 0]]], np.float32)
    seen = Candidates(
        record, ["s"], 0, 0, native, None,
        RouteSignals("rollout", np.ones((4, 1, 2), np.float32), a, a, np.zeros((4, 1), np.float32), gaps),
        flip_model(),
    )  # fmt: skip
    assert make_plan("swap", seen, "token_layer", "1/3").planned[:, 0].tolist() == [True, False, False, False]
    assert make_plan("swap", seen, "token_layer", "2/3").planned[:, 0].tolist() == [True, False, True, False]
    slots = make_plan("swap", seen, "slot", "1/3").planned[:, 0]
    # the expert at the margin of token 0, and the expert that the live set of token 2 lacks
    assert slots.tolist() == [[False, True], [False, False], [False, True], [False, False]]
    wide = gaps.copy()
    wide[0, 0, 1] = 1.5  # the dearest exchange, and one that hardly ever happens
    rare = replace(seen, signals=replace(seen.signals, gaps=wide))  # type: ignore[type-var]
    assert make_plan("swap", rare, "token_layer", "1/3").planned[:, 0].tolist() == [False, False, True, False]


def test_threshold_by_hand() -> None:
    header = TraceHeader(num_experts=4, top_k=2, moe_layers=(0,), source="rollout")
    record = RouteTrace.from_packed(header, np.array([[[0, 2]], [[3, 1]], [[0, 0]]]), [3], np.array([1, 1, 2]))
    scores = np.array([[[0.4, 0.3, 0.2, 0.1]]] * 3, np.float32)
    native = replace(record, experts=np.array([[[0, 1]]] * 2 + [[[0, 0]]], np.uint8), scores=scores)

    def kept(ratio: float, given: RouteTrace = native) -> list[Any]:
        seen = Candidates(record, ["s"], 0, native=given, ratio=ratio)
        return make_plan("threshold", seen, "slot").planned[:2, 0].tolist()

    assert kept(1.0) == [[True, False], [False, True]]  # 0.3 is the weakest live score
    # so at ratio 1 what is kept would have been chosen anyway, and nothing is forced
    assert kept(0.6) == [[True, True], [False, True]]
    assert kept(0.3) == [[True, True], [True, True]]
    logits = replace(native, scores=np.log(scores))
    assert kept(0.6, logits) == kept(0.6)  # compared after a softmax
    with pytest.raises(ConfigError, match=r"router_replay\.ratio: goes with policy threshold"):
        make_plan("threshold", Candidates(record, ["s"], 0, native=native), "slot")


# ---------------------------------------------------------------- unit bias

SCORES = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
NATIVE = torch.tensor([[0, 1]])


def biased(recorded: list[int], size: float) -> list[int]:
    return resolve_biased(torch.tensor([recorded]), torch.tensor([True]), SCORES, NATIVE, torch.full((4,), size))[
        0
    ].tolist()


def test_bias_by_hand() -> None:
    assert biased([3, 2], 0.0) == [0, 1]
    assert biased([3, 2], 0.09) == [0, 1]  # 0.2 + 0.09 does not reach 0.3
    assert sorted(biased([3, 2], 0.15)) == [0, 2]
    assert biased([3, 2], 0.35) == [3, 2]  # both: the record itself, slot order included
    assert biased([3, 2], np.inf) == [3, 2]
    assert biased([0, 3], 0.25) == [0, 3]
    assert biased([1, 0], 5.0) == [1, 0]  # the same set: the slot order of the record, as in R3
    assert biased([1, 0], 0.0) == [0, 1]
    assert biased([-1, -1], 5.0) == [0, 1]
    ties = resolve_biased(
        torch.tensor([[2, 0]]),
        torch.tensor([True]),
        torch.tensor([[0.5, 0.25, 0.125, 0.0]]),
        NATIVE,
        torch.full((4,), 0.125),
    )
    assert ties.tolist() == [[0, 1]]  # equal scores: the native expert stays


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 8))
def test_bias_invariants_at_fixed_scores(seed: int, k: int, extra: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, experts = 500, k + extra
    scores = torch.randint(0, 3 * experts, (rows, experts), generator=generator).float()
    recorded = torch.rand(rows, experts, generator=generator).topk(k).indices
    native, planned = scores.topk(k).indices, torch.rand(rows, generator=generator) < 0.9
    kept = []
    for size in (0.0, 1.0, 2.5, 7.0, np.inf):
        used = resolve_biased(recorded, planned, scores, native, torch.full((experts,), size))
        assert (used.sort(-1).values.diff(dim=-1) > 0).all()
        assert torch.equal(used[~planned], native[~planned])
        kept.append((used[:, :, None] == recorded[:, None, :]).sum((1, 2)))
        if size == 0:
            assert torch.equal(used, native)
        if size == np.inf:
            assert torch.equal(used[planned], recorded[planned])
        # any exchanged pair has a gap below λ: the worst that came in against the best that went out
        came = ~(used[:, :, None] == native[:, None, :]).any(-1)
        went = ~(native[:, :, None] == used[:, None, :]).any(-1)
        low = scores.gather(1, used).masked_fill(~came, torch.inf).amin(1)
        high = scores.gather(1, native).masked_fill(~went, -torch.inf).amax(1)
        swapped = came.any(1)
        assert (high[swapped] - low[swapped] < size).all()
    for less, more in pairwise(kept):
        assert (less <= more).all()


@pytest.mark.parametrize("share", ["0", "0.05", "0.25", "0.5", "1"])
def test_lambda_changes_the_share_of_differing_cells_that_was_asked_for(share: str) -> None:
    made = synthetic([40] * 6, experts=16, top_k=3, flip_rate=0.1, seed=4)
    native = replace(made.native, scores=made.scores)
    seen = Candidates(made.rollout, [str(i) for i in range(6)], 0, native=native)
    plan = make_plan("bias", seen, "bias", share)
    assert plan.bias is not None
    known = made.rollout.recorded
    recorded, live = (torch.from_numpy(t.experts[known].astype(np.int64)) for t in (made.rollout, native))
    scores = torch.from_numpy(made.scores[known])

    def changed(size: float) -> int:
        used = resolve_biased(recorded, torch.ones(len(live), dtype=torch.bool), scores, live, torch.full((16,), size))
        return int((used.sort(-1).values != live.sort(-1).values).any(-1).sum())

    differ = int((recorded.sort(-1).values != live.sort(-1).values).any(-1).sum())
    wanted = int(Fraction(share) * differ + Fraction(1, 2))
    size = float(plan.bias.max())
    assert changed(size) == wanted
    assert size == 0 or changed(float(np.nextafter(np.float32(size), np.float32(0)))) < wanted  # the smallest that does
    plan.require(made.rollout)


def test_no_bias_can_be_found_where_scores_are_infinite() -> None:
    out = torch.tensor([[0.0, -torch.inf]])
    with pytest.raises(ReplayError, match="no λ changes 1 of the 1 rows"):
        calibrate_bias(torch.tensor([[1]]), torch.tensor([[0]]), out, Fraction(1))


def test_plans_of_unit_bias_carry_their_lambda_and_only_they() -> None:
    plan = full_plan(TRACE)
    with pytest.raises(ReplayError, match=r"expected λ of shape \(1, 4\) for unit bias only, found None"):
        replace(plan, unit="bias").require(TRACE)
    with pytest.raises(ReplayError, match="for unit bias only"):
        replace(plan, bias=np.zeros((1, 4), np.float32)).require(TRACE)
    for bad in (-1.0, np.nan):
        broken = ReplayPlan(
            "bias", plan.planned, plan.trace_digest, "bias", 0, None, 2, bias=np.full((1, 4), bad, np.float32)
        )
        with pytest.raises(ReplayError, match="λ of 0 or more"):
            broken.require(TRACE)


# ---------------------------------------------------------------- P(flip)


def flip_model(slope: float = -1.0, cells: int = 200_000) -> FlipModel:
    """Cells whose chance of a flip is known: logit P = -5 + slope · log margin."""
    rng = np.random.default_rng(0)
    margins = np.exp(rng.uniform(-8, 0, cells))
    p = 1 / (1 + np.exp(5 - slope * np.log(margins)))
    flipped = rng.random(cells) < p
    known = np.ones(cells, bool)
    return FlipModel.empty().seen(margins, flipped, known)


def test_the_curve_is_found_again_and_calibrated() -> None:
    model = flip_model()
    intercept, slope = model.coefficients()
    assert slope == pytest.approx(-1, abs=0.05)
    assert intercept == pytest.approx(-5, abs=0.1)
    table = model.calibration()
    assert table.cells.sum() == 200_000
    assert (abs(table.predicted - table.observed) < 0.02).all()
    p = model.probability(np.array([1e-3, 1e-1, np.inf]))
    assert p[0] > p[1] > p[2] == 0


def test_batches_add_up_and_unknown_cells_are_left_out() -> None:
    rng = np.random.default_rng(1)
    margins, flipped = rng.random((50, 4)), rng.random((50, 4)) < 0.2
    known = rng.random((50, 4)) < 0.8
    known[0] = False
    whole = FlipModel.empty().seen(margins, flipped, known)
    parts = FlipModel.empty().seen(margins[:20], flipped[:20], known[:20]).seen(margins[20:], flipped[20:], known[20:])
    assert np.array_equal(whole.cells, parts.cells)
    assert np.array_equal(whole.flips, parts.flips)
    assert whole.cells.sum() == known.sum()
    assert whole.flips.sum() == (flipped & known).sum()


def test_degenerate_histograms() -> None:
    margins, none = np.full((10, 1), 0.5), np.zeros((10, 1), bool)
    known = np.ones((10, 1), bool)
    calm = FlipModel.empty().seen(margins, none, known)
    assert calm.probability(np.array([0.0, 1.0])).tolist() == pytest.approx([0.5 / 11] * 2)
    with pytest.raises(ReplayError, match="expected cells of earlier batches, found none"):
        FlipModel.empty().probability(np.array([0.5]))
    with pytest.raises(ReplayError, match="expected 0 or more"):
        calm.seen(-margins, none, known)
    separated = FlipModel.empty().seen(np.array([[1e-6], [1.0]]), np.array([[True], [False]]), np.ones((2, 1), bool))
    p = separated.probability(np.array([1e-6, 1.0]))
    assert np.isfinite(p).all()
    assert p[0] > 0.9 > 0.1 > p[1]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0, 2.0]], r"expected shape \(3, 8\) \(layers, experts\), found \(1, 2\)"),
        ([[np.nan] * 8] * 3, "expected values of 0 or more, found nan at layer 1, expert 0"),
        ([[-1.0] * 8] * 3, r"expected values of 0 or more, found -1\.0 at layer 1, expert 0"),
    ],
)
def test_scores_that_do_not_fit_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        make_plan("fisher", replace(candidates(), score=scored(values)), "slot", "0.1")


def test_what_a_policy_needs_is_asked_for_by_name() -> None:
    seen = candidates()
    with pytest.raises(ReplayError, match="ranks scores of experts, and none were given"):
        make_plan("fisher", replace(seen, score=None), "slot", "0.1")
    for missing in ({"signals": None}, {"flips": None}):
        with pytest.raises(ReplayError, match="no signals of swap, or no P"):
            make_plan("swap", replace(seen, **missing), "slot", "0.1")
    with pytest.raises(ReplayError, match="looks at live scores, and the planning pass recorded none"):
        make_plan("bias", seen, "bias", "0.1")
    with pytest.raises(ConfigError, match="policy bias exists in bias, found 'slot'"):
        make_plan("bias", seen, "slot", "0.1")
    with pytest.raises(ConfigError, match="policy threshold has no budget"):
        make_plan("threshold", replace(seen, ratio=0.5), "slot", "0.1")


def test_status_of_a_cell_decides_and_not_its_zeros() -> None:
    """A missing cell holds zeros; they are not routes of expert 0."""
    status = np.array([[Status.MISSING], [Status.RECORDED], [Status.LAST]])
    trace = replace(TRACE, status=status.astype(np.uint8), experts=np.array([[[0, 0]], [[1, 2]], [[0, 0]]], np.uint8))
    assert cell_sums(np.ones((3, 1, 2)), trace).count.tolist() == [[0, 1, 1, 0]]
