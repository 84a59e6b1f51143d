"""Load and routing shift: every invariant, with answers that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rar_lib.errors import TraceError
from rar_lib.metrics import load as loads
from rar_lib.metrics.agreement import agreement
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader
from tests.metrics.test_agreement import random_pair, trace


def test_by_hand() -> None:
    # layer 0: experts 0,1 then 0,2: counts 2 1 1 0; the last token has no route and its zeros count for nobody
    header = TraceHeader(num_experts=4, top_k=2, moe_layers=(3,), source="rollout")
    made = RouteTrace.from_packed(
        header, [[[0, 1]], [[2, 0]], [[0, 0]]], [3], [Status.RECORDED, Status.RECORDED, Status.LAST]
    )
    assert loads.route_counts(made).tolist() == [[2, 1, 1, 0]]
    (row,) = loads.load_table(made).to_dict("records")
    nats = -(0.5 * np.log(0.5) + 2 * 0.25 * np.log(0.25))
    assert row["layer"] == 3
    assert (row["routes"], row["dead"], row["max_load"], row["max_vio"]) == (4, 1, 0.5, 1.0)
    assert row["cv"] == pytest.approx(np.sqrt(0.5))
    assert row["entropy"] == pytest.approx(nats)
    assert row["effective_experts"] == pytest.approx(np.exp(nats))


def test_nothing_recorded_is_no_number() -> None:
    header = TraceHeader(num_experts=4, top_k=2, moe_layers=(3,), source="rollout")
    made = RouteTrace.from_packed(header, [[[0, 0]]], [1], [Status.LAST])
    assert np.isnan(loads.load_table(made)["cv"][0])
    assert np.isnan(loads.load(loads.route_counts(made))).all()
    assert np.isnan(loads.load_shift(made, made)["js"][0])


def test_divergences_by_hand() -> None:
    p, q = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert loads.js_divergence(p, q) == pytest.approx(np.log(2))
    assert loads.total_variation(p, q) == 1
    assert loads.js_divergence(p, p) == 0
    half = np.array([0.5, 0.5])
    assert loads.js_divergence(p, half) == pytest.approx(loads.js_divergence(half, p))
    assert loads.js_divergence(p, half) == pytest.approx(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) - np.log(2) / 2)


@settings(deadline=None)
@given(st.integers(0, 300))
def test_load_shift_is_bounded_by_the_flips(seed: int) -> None:
    a, b = random_pair(seed)
    a = RouteTrace.from_packed(a.header, a.ids(), a.lengths, b.status)  # the same cells on both sides
    shift = loads.load_shift(a, b)
    result = agreement(a, b)
    known = result.known.sum(0)
    slot_flip = np.array([1 - result.shared[result.known[:, i], i].mean() / 2 for i in range(3) if known[i]])
    assert (shift["tv"][known > 0].to_numpy() <= slot_flip + 1e-12).all()
    assert ((shift["js"].dropna() >= 0) & (shift["js"].dropna() <= np.log(2))).all()


def test_equal_loads_do_not_mean_equal_routes() -> None:
    a, b = trace([[[0, 1]], [[2, 3]]], 4), trace([[[2, 3]], [[0, 1]]], 4)
    assert loads.load_shift(a, b)["js"][0] == 0
    assert agreement(a, b).scalars()["router_flip"] == 1


def test_ids_out_of_range_are_named() -> None:
    bad = replace(trace([[[0, 1]]], 4), experts=np.array([[[0, 9]]], np.uint8), _stored_sha256="opened from a file")
    with pytest.raises(TraceError, match="layer 0: expected ids below 4, found 9"):
        loads.route_counts(bad)


def test_router_scores_by_hand() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25]]))
    assert loads.routing_entropy(np.array([[1.0, 0.0], [0.5, 0.5]])) == pytest.approx([0, np.log(2)])
    assert loads.gate_tv(np.array([0.5, 0.5]), np.array([0.75, 0.25])) == 0.25
    assert loads.router_kl(logits, logits - 3)[0] == pytest.approx(0, abs=1e-15)
    other = np.log(np.array([[0.25, 0.5, 0.25]]))
    assert loads.router_kl(logits, other)[0] == pytest.approx(0.5 * np.log(2) - 0.25 * np.log(2))


def test_router_shift_ratio_by_hand() -> None:
    old = np.array([[[0.5, 0.3, 0.2]], [[0.5, 0.3, 0.2]]])
    new = np.array([[[0.25, 0.6, 0.15]], [[0.5, 0.3, 0.2]]])
    gamma = loads.router_shift_ratio(old, new, np.array([[[0, 1]], [[0, 1]]]))
    assert gamma == pytest.approx([0.5, 1.0])  # both activated experts moved by a factor of two
    two = loads.router_shift_ratio(
        np.concatenate([old[:1], old[:1]], 1), np.concatenate([new[:1], old[:1]], 1), np.array([[[0, 1], [0, 1]]])
    )
    assert two == pytest.approx([2**-0.5])  # the second layer did not move: a mean over layers
    summary = loads.shift_summary(gamma)
    assert summary["mean"] == pytest.approx(0.75)
    assert summary["below_floor"] == 0.5
    assert summary["shift_p99"] == pytest.approx(0.99 * np.log(2))
    assert set(loads.shift_summary(np.zeros(0)).values()) == {None}
    with pytest.raises(TraceError, match="token 0, layer axis 0"):
        loads.router_shift_ratio(old, np.zeros_like(new), np.array([[[0, 1]], [[0, 1]]]))


def test_routing_shift_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token by hand, and blocks change nothing."""
    header = TraceHeader(num_experts=4, top_k=2, moe_layers=(2,), source="old")
    p, q = np.array([0.5, 0.25, 0.125, 0.125]), np.array([0.25, 0.5, 0.125, 0.125])
    status = [Status.RECORDED, Status.LAST]

    def made(row: np.ndarray) -> RouteTrace:
        scores = np.stack([np.log(row) + 3, np.zeros(4)])[:, None]
        return RouteTrace.from_packed(header, [[[0, 1]], [[0, 0]]], [2], status, scores=scores)

    table, gamma = loads.routing_shift(made(p), made(q))
    (row,) = table.to_dict("records")
    assert (row["layer"], row["cells"]) == (2, 1)
    assert row["entropy_a"] == row["entropy_b"] == pytest.approx(-(p * np.log(p)).sum())
    assert row["gate_tv"] == pytest.approx(0.25)
    assert row["router_kl"] == pytest.approx(0.25 * np.log(2))
    assert gamma == pytest.approx([0.5])  # both activated experts moved by a factor of two
    rng = np.random.default_rng(0)
    a, b = random_pair(1, n=40)
    a, b = (replace(x, scores=rng.normal(size=(40, 3, 8))) for x in (a, b))
    whole = loads.routing_shift(a, b)
    monkeypatch.setattr("rar_lib.traces.blocks.token_blocks.__defaults__", (50,))
    parts = loads.routing_shift(a, b)
    assert np.allclose(whole[0], parts[0])
    assert np.array_equal(whole[1], parts[1])
    with pytest.raises(TraceError, match="both traces need the ranked scores"):
        loads.routing_shift(a, replace(b, scores=None))
