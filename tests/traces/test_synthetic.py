"""Synthetic traces have the flip rate, load skew and clustering that were asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rar_lib.errors import TraceError
from rar_lib.metrics.agreement import agreement, flip_clustering
from rar_lib.replay.policies import make_plan
from rar_lib.replay.policy import Candidates
from rar_lib.traces.synthetic import synthetic


def test_the_same_seed_is_the_same_trace() -> None:
    one, two, other = (synthetic([5, 9], seed=s) for s in (3, 3, 4))
    assert one.rollout.equals(two.rollout)
    assert np.array_equal(one.scores, two.scores)
    assert not one.rollout.equals(other.rollout)


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.03, 0.1, 0.5])
def test_the_flip_rate_is_met(rate: float) -> None:
    made = synthetic([200] * 5, flip_rate=rate)
    cells = 5 * 199 * 4
    assert agreement(made.rollout, made.native).scalars()["router_flip"] == pytest.approx(rate, abs=1.5 / cells)


def test_the_native_routes_and_margins_are_those_of_the_scores() -> None:
    made = synthetic([30, 20], experts=8, top_k=3)
    order = np.argsort(-made.scores, -1)
    known = made.native.recorded
    assert (made.native.ids()[known] == order[..., :3][known]).all()
    ranked = -np.sort(-made.scores, -1)
    assert made.native.margins is not None
    assert np.allclose(made.native.margins, ranked[..., 2] - ranked[..., 3])
    assert np.allclose(made.scores.sum(-1), 1, atol=1e-5)


def test_flips_lie_at_small_margins() -> None:
    made = synthetic([400] * 4, flip_rate=0.05)
    flipped = agreement(made.rollout, made.native).flipped[made.native.recorded]
    assert made.native.margins is not None
    margins = made.native.margins[made.native.recorded]
    order = margins.argsort().argsort()
    auc = (order[~flipped].mean() - (len(order) - flipped.sum() - 1) / 2) / flipped.sum()
    assert auc > 0.85  # a flipped cell has a smaller margin than another one, 85 times in 100


@pytest.mark.parametrize(("clustering", "clustered"), [(0.0, False), (1.5, True)])
def test_clustering_makes_flips_meet_on_tokens(clustering: float, clustered: bool) -> None:
    made = synthetic([500] * 4, layers=8, flip_rate=0.05, clustering=clustering)
    found = flip_clustering(agreement(made.rollout, made.native))
    assert found["dispersion"] is not None
    assert found["permuted_p95"] is not None
    assert (found["dispersion"] > 1.3) == clustered


def test_skew_makes_load_uneven() -> None:
    def spread_of_load(skew: float) -> float:
        ids = synthetic([800], load_skew=skew, flip_rate=0).native.ids()[:-1, 0]
        load = np.bincount(ids.ravel(), minlength=16)
        return float(load.std() / load.mean())

    assert spread_of_load(0.0) < 0.2 < 0.6 < spread_of_load(1.5)


def test_policies_find_flips_in_the_order_that_theory_says() -> None:
    """At a tenth of the budget: the oracle finds all flips, margins many, chance a tenth."""
    made = synthetic([300] * 4, flip_rate=0.05)
    flipped = agreement(made.rollout, made.native).flipped
    seen = Candidates(made.rollout, list("abcd"), 0, 0, made.native)

    def share(policy: str) -> float:
        return float(make_plan(policy, seen, "token_layer", "0.1").planned[flipped].mean())

    assert share("disagree") == 1
    assert share("margin") > 0.5
    assert share("random_route") == pytest.approx(0.1, abs=0.04)
    assert share("uniform") == pytest.approx(0.1, abs=0.04)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"top_k": 20}, "top-20 of 16"), ({"flip_rate": 1.0}, "cannot be reached"), ({"top_k": 16}, "cannot be reached"),
     ({"experts": 2, "top_k": 1, "flip_rate": 0.9}, "above what a random choice gives")],
)  # fmt: skip
def test_what_cannot_be_made_is_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        synthetic([50], **sizes)


def test_sizes_of_one() -> None:
    made = synthetic([1, 2, 1], layers=1, experts=2, top_k=1, flip_rate=0)
    assert made.rollout.coverage() == {"recorded": 1.0, "missing": 0.0}
    assert synthetic([3], experts=4, top_k=4, flip_rate=0).native.margins is not None
