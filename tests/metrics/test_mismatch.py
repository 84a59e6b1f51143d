"""Mismatch of two log-prob sources: every invariant, with answers that can be computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rar_lib.metrics import mismatch as m

LOGP = arrays(np.float64, (3, 5), elements=st.floats(-8, -0.01))
MASK = arrays(np.bool_, (3, 5)).filter(lambda x: x.any())
HALF, QUARTER = math.log(0.5), math.log(0.25)
A = np.array([[HALF, HALF, QUARTER]])
B = np.array([[HALF, QUARTER, QUARTER]])
ALL = np.ones((1, 3), dtype=bool)


def test_by_hand() -> None:
    # Δ = (0, log 2, 0)
    assert m.k1(A, B, ALL) == pytest.approx(-math.log(2) / 3)
    assert m.k3(A, B, ALL) == pytest.approx((2 - 1 - math.log(2)) / 3)
    assert m.extreme_token_fraction(A, B, ALL, 1.9) == pytest.approx(1 / 3)
    assert m.extreme_token_fraction(A, B, ALL, 2.1) == 0
    assert m.effective_sample_size(A, B, ALL) == pytest.approx((1 + 2 + 1) ** 2 / (3 * (1 + 4 + 1)))
    values = m.mismatch(A, B, ALL)
    assert values["probs_diff_max"] == pytest.approx(0.25)
    assert values["probs_diff_mean"] == pytest.approx(0.25 / 3)
    assert values["ratio_max"] == pytest.approx(2)
    assert values["tokens"] == 3


def test_k3_estimates_the_kl_from_b_to_a_on_samples_of_b() -> None:
    a, b = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    drawn = np.random.default_rng(0).choice(3, 200_000, p=b)
    estimate = m.k3(np.log(a)[drawn], np.log(b)[drawn], np.ones(drawn.shape, bool))
    assert estimate == pytest.approx(float((b * np.log(b / a)).sum()), rel=0.02)


@settings(deadline=None)
@given(LOGP, LOGP, MASK)
def test_invariants(a: np.ndarray, b: np.ndarray, mask: np.ndarray) -> None:
    v = m.mismatch(a, b, mask)
    assert v["k3"] >= 0
    assert v["abs_p95"] <= v["abs_p99"] <= v["abs_max"]
    assert 0 <= v["probs_diff_mean"] <= v["probs_diff_max"] + 1e-15 <= 1 + 1e-15
    assert 0 < v["ess"] <= 1 + 1e-12
    delta = (a - b)[mask]
    w = np.exp(delta)
    assert v["ess"] == pytest.approx(1 / (1 + w.var() / w.mean() ** 2))
    fractions = [m.extreme_token_fraction(a, b, mask, tau) for tau in (1, 1.5, 2, 4, 100)]
    assert fractions == sorted(fractions, reverse=True)
    assert fractions == [m.extreme_token_fraction(b, a, mask, tau) for tau in (1, 1.5, 2, 4, 100)]
    total, mean = m.sequence_log_ratios(a, b, mask)
    length = mask.sum(-1)
    assert total[length > 0] == pytest.approx((mean * length)[length > 0])


@settings(deadline=None)
@given(LOGP, MASK)
def test_identical_sources_have_no_mismatch(a: np.ndarray, mask: np.ndarray) -> None:
    v = m.mismatch(a, a, mask)
    assert [v[n] for n in ("k1", "k3", "abs_max", "probs_diff_max", "ess", "ratio_max")] == [0, 0, 0, 0, 1, 1]
    if np.ptp(a[mask]) > 1e-6:
        assert v["pearson"] == pytest.approx(1)


def test_k3_is_zero_only_where_delta_is_zero() -> None:
    assert (m.k3_terms(np.array([-1e-3, 1e-3, -2.0, 5.0])) > 0).all()


def test_the_mask_is_applied_before_anything_is_reduced() -> None:
    a, b = A.copy(), B.copy()
    a[0, 0], b[0, 2] = np.nan, -np.inf
    mask = np.array([[False, True, False]])
    assert m.k1(a, b, mask) == pytest.approx(-math.log(2))


def test_what_is_not_finite_under_the_mask_is_refused_with_its_place() -> None:
    a = A.copy()
    a[0, 1] = np.nan
    with pytest.raises(ValueError, match=r"not at \(.*0.*1"):
        m.k3(a, B, ALL)


def test_undefined_is_none() -> None:
    assert m.pearson(A[:, :1], B[:, :1], ALL[:, :1]) is None
    assert m.pearson(np.full((1, 3), HALF), B, ALL) is None
    empty = m.mismatch(A, B, np.zeros((1, 3), bool))
    assert {k for k, v in empty.items() if v is not None} == {"tokens"}


def test_tau_below_one_and_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="tau"):
        m.extreme_token_fraction(A, B, ALL, 0.5)
    with pytest.raises(ValueError, match="shape of the mask"):
        m.k3(A[:, :2], B, ALL)


def test_bad_updates_by_hand_and_monotone() -> None:
    mu, new = np.log([[0.5, 0.5, 0.5]]), np.log([[0.1, 0.45, 0.1]])
    advantages = np.array([[-1.0, -1.0, 1.0]])
    fractions = [m.bad_update_fraction(new, mu, advantages, ALL, d) for d in (0.0, 0.1, 0.5)]
    assert fractions == pytest.approx([2 / 3, 1 / 3, 0])


@settings(deadline=None)
@given(LOGP, LOGP, LOGP, MASK)
def test_the_factorisation_is_exact(mu: np.ndarray, old: np.ndarray, new: np.ndarray, mask: np.ndarray) -> None:
    total, engines, drift = m.factorisation(mu, old, new, mask)
    assert total == pytest.approx(engines + drift, abs=1e-14)


def test_noise_floor_is_the_mismatch_of_an_engine_with_itself() -> None:
    floor = m.noise_floor(B, A, ALL)
    assert floor["noise_floor/k3"] == m.k3(A, B, ALL)
    assert m.noise_floor(A, A, ALL)["noise_floor/k3"] == 0
