"""Agreement of two records: every invariant, with answers that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rar_lib.errors import TraceError
from rar_lib.metrics.agreement import (
    agreement,
    churn_matrix,
    flip_clustering,
    flip_counts,
    margin_auc,
    overlap,
    poisson_binomial,
    top1_flip,
)
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader


def trace(experts: object, e: int = 8, status: object = None, lengths: list[int] | None = None) -> RouteTrace:
    ids = np.asarray(experts)
    header = TraceHeader(num_experts=e, top_k=ids.shape[2], moe_layers=tuple(range(ids.shape[1])), source="rollout")
    status = np.full(len(ids), Status.RECORDED) if status is None else status
    return RouteTrace.from_packed(header, ids, lengths or [len(ids)], status)


def random_pair(seed: int, n: int = 20, layers: int = 3, e: int = 8, k: int = 2) -> tuple[RouteTrace, RouteTrace]:
    rng = np.random.default_rng(seed)
    a = np.argsort(rng.random((n, layers, e)), -1)[..., :k]
    other = np.argsort(rng.random((n, layers, e)), -1)[..., :k]
    b = np.where(rng.random((n, layers, 1)) < 0.5, a, other)
    return trace(a), trace(b, status=np.where(rng.random((n, layers)) < 0.2, Status.MISSING, Status.RECORDED))


# two tokens, two layers, K = 2: one slot differs in layer 0 of token 0, both in layer 1 of token 0
A = trace([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
B = trace([[[1, 2], [4, 5]], [[5, 4], [6, 7]]])


def test_by_hand() -> None:
    result = agreement(A, B)
    assert result.shared.tolist() == [[1, 0], [2, 2]]
    values = result.scalars()
    assert values["overlap"] == 5 / 8
    assert values["slot_flip"] == 3 / 8
    assert values["jaccard"] == pytest.approx((1 / 3 + 0 + 1 + 1) / 4)
    assert values["router_flip"] == 0.5
    assert values["token_any_flip"] == 0.5
    assert values["layers_per_token"] == 1
    assert result.router_flip_by_layer().tolist() == [0.5, 0.5]


def test_slot_order_means_nothing() -> None:
    flipped = trace(A.ids()[..., ::-1])
    assert agreement(A, flipped).scalars()["router_flip"] == 0


@settings(deadline=None)
@given(st.integers(0, 500))
def test_invariants(seed: int) -> None:
    a, b = random_pair(seed)
    result = agreement(a, b)
    v, by_layer = result.scalars(), result.router_flip_by_layer()
    assert 0 <= v["overlap"] <= 1
    assert v["jaccard"] <= v["overlap"]
    assert v["slot_flip"] <= v["router_flip"] <= 2 * v["slot_flip"]
    full = replace(result, known=np.broadcast_to(result.full_rows[:, None], result.known.shape))
    if result.full_rows.any():
        assert v["token_any_flip"] >= np.nanmax(full.router_flip_by_layer()) - 1e-12
        assert v["layers_per_token"] == pytest.approx(3 * full.scalars()["router_flip"])
    assert ((by_layer >= 0) & (by_layer <= 1)).all()
    churn = churn_matrix(a, b)
    assert churn.sum((1, 2)) == pytest.approx(((2 - result.shared) * result.known).sum(0) / result.known.sum(0))


def test_random_subsets_overlap_in_k_over_e() -> None:
    rng = np.random.default_rng(0)
    a, b = (np.argsort(rng.random((20_000, 1, 16)), -1)[..., :4] for _ in range(2))
    assert agreement(trace(a, 16), trace(b, 16)).scalars()["overlap"] == pytest.approx(4 / 16, abs=0.005)


def test_missing_rows_are_left_out_and_never_read_as_expert_zero() -> None:
    a = trace([[[0, 1]], [[0, 1]]], status=[Status.RECORDED, Status.MISSING])
    b = trace([[[0, 1]], [[2, 3]]])
    values = agreement(a, b).scalars()
    assert (values["router_flip"], values["cells"]) == (0, 1)
    nothing = trace([[[0, 1]], [[0, 1]]], status=[Status.MISSING, Status.MISSING])
    assert agreement(nothing, b).scalars()["router_flip"] is None


def test_churn_by_hand() -> None:
    churn = churn_matrix(A, B)
    assert churn[0, 0, 2] == 0.5  # expert 0 left for 2 on one of two tokens
    assert churn[0].sum() == 0.5
    # 2, 3 left for 4, 5 at once: each pair gets half of its expert's share
    assert churn[1][np.ix_([2, 3], [4, 5])].tolist() == [[0.25, 0.25], [0.25, 0.25]]
    assert churn[1].sum(1)[[2, 3]].tolist() == [0.5, 0.5]  # rows sum to the outflow


def test_poisson_binomial_by_hand() -> None:
    assert poisson_binomial(np.array([0.5, 0.5])).tolist() == [0.25, 0.5, 0.25]
    assert poisson_binomial(np.array([0.2, 1.0])) == pytest.approx([0, 0.8, 0.2])


def test_clustered_flips_are_over_dispersed_and_independent_ones_are_not() -> None:
    rng = np.random.default_rng(1)
    base = np.tile([0, 1], (400, 6, 1))
    bad_token = rng.random(400) < 0.1
    clustered = np.where(bad_token[:, None, None], base + 2, base)
    together = flip_clustering(agreement(trace(base), trace(clustered)))
    assert together["dispersion"] == pytest.approx(6, rel=0.01)  # all six layers flip at once
    assert together["dispersion"] > together["permuted_p95"]
    alone = flip_clustering(agreement(trace(base), trace(np.where(rng.random((400, 6, 1)) < 0.1, base + 2, base))))
    assert alone["dispersion"] == pytest.approx(1, abs=0.25)
    assert alone["any"] == pytest.approx(alone["any_independent"], abs=0.05)
    same = flip_clustering(agreement(trace(base), trace(base)))
    assert set(same.values()) == {None}


def test_top1_needs_gates() -> None:
    ids = np.array([[[0, 1]], [[2, 3]]])
    gates_a, gates_b = np.array([[[0.6, 0.4]], [[0.6, 0.4]]]), np.array([[[0.4, 0.6]], [[0.7, 0.3]]])
    known = np.ones((2, 1), bool)
    assert top1_flip(ids, gates_a, ids, gates_b, known) == 0.5
    assert top1_flip(ids, gates_a, ids[..., ::-1], gates_a[..., ::-1], known) == 0


def test_traces_of_other_tokens_or_routers_are_refused() -> None:
    with pytest.raises(TraceError, match="experts: 8 against 16"):
        agreement(A, trace(A.ids(), 16))
    with pytest.raises(TraceError, match="sequences: 1 against 2"):
        agreement(A, trace(A.ids(), lengths=[1, 1]))
    with pytest.raises(TraceError, match="2 against 1 tokens in sequence 0"):
        agreement(trace(A.ids(), lengths=[2, 0]), trace(A.ids(), lengths=[1, 1]))
    with pytest.raises(TraceError, match="other tokens"):
        agreement(replace(A, token_ids=np.array([1, 2])), replace(B, token_ids=np.array([1, 3])))


def test_margin_auc_by_hand() -> None:
    known = np.ones((1, 4), bool)
    flipped = np.array([[True, True, False, False]])
    assert margin_auc(np.array([[0.1, 0.2, 0.3, np.inf]]), flipped, known) == 1
    assert margin_auc(np.array([[0.3, 0.4, 0.1, 0.2]]), flipped, known) == 0
    assert margin_auc(np.array([[0.1, 0.3, 0.2, 0.3]]), flipped, known) == (1 + 1 + 0 + 0.5) / 4
    assert margin_auc(np.ones((1, 4)), flipped, known) == 0.5
    assert margin_auc(np.ones((1, 4)), ~known, known) is None
    with pytest.raises(TraceError, match="NaN"):
        margin_auc(np.full((1, 4), np.nan), flipped, known)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 2, 8, 22]), st.sampled_from([8, 64, 300]), st.integers(0, 99))
def test_overlap_is_the_size_of_the_common_set(k: int, e: int, seed: int) -> None:
    k = min(k, e)
    rng = np.random.default_rng(seed)
    a, b = (np.argsort(rng.random((5, 3, e)), -1)[..., :k].astype(np.uint16) for _ in range(2))
    expected = [[len({*a[i, j].tolist()} & {*b[i, j].tolist()}) for j in range(3)] for i in range(5)]
    assert overlap(a, b).tolist() == expected


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = random_pair(3, n=50)
    whole, churn = agreement(a, b), churn_matrix(a, b)
    monkeypatch.setattr("rar_lib.traces.blocks.token_blocks.__defaults__", (7,))
    pieces = agreement(a, b)
    assert np.array_equal(whole.shared, pieces.shared)
    assert pieces.scalars() == whole.scalars()
    assert np.array_equal(churn_matrix(a, b), churn)


def test_flip_counts_by_sequence() -> None:
    a = trace(np.concatenate([A.ids(), A.ids()]), lengths=[1, 3])
    b = trace(np.concatenate([B.ids(), A.ids()]), lengths=[1, 3], status=[Status.RECORDED] * 3 + [Status.MISSING])
    table = flip_counts(agreement(a, b), a)
    assert table["sequence"].tolist() == [0, 0, 1, 1]
    assert table["flips"].tolist() == [1, 1, 0, 0]
    assert table["cells"].tolist() == [1, 1, 2, 2]
    assert table["flips"].sum() == agreement(a, b).flipped.sum()
