"""How far two log-prob sources disagree on the same sampled tokens.

There are three sources, never two: `rollout` (μ, the engine that sampled, at θ_old), `old` (the trainer at θ_old) and
`new` (the trainer at θ). A field study once claimed a 400-fold drop in KL because it compared `rollout/old` before with
`old/new` after. So every number here belongs to a named pair, and its column says which:
`mismatch/rollout_old/k3`.

For a pair written `b_a`, Δ = log π_A(y) - log π_B(y) on the response tokens. The tokens come from μ, so only for the
pair `rollout_old` is k3 an estimate under its own B: KL(μ‖old). For `old_new` and `rollout_new` (B = old, μ) the
first is a μ-weighted statistic and no more. arXiv 2510.11370 (R3) writes the reverse direction.

Every function takes arrays `[S, T]` (or any shape) of natural log-probs and a boolean mask of the same shape;
the mask is applied before any reduction, and reductions run in float64. Another shape than the mask's, or a value under
the mask that is not finite, is a ValueError. What cannot be computed is `None`, never NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # numpy array or CPU tensor


def _masked(*arrays: Array, mask: Array) -> list[np.ndarray]:
    keep = np.asarray(mask, dtype=bool)
    out = []
    for array in arrays:
        values = np.asarray(array, dtype=np.float64)
        if values.shape != keep.shape:
            raise ValueError(f"log-probs: expected the shape of the mask, {keep.shape}, found {values.shape}")
        values = values[keep]
        if not np.isfinite(values).all():
            where = np.argwhere(keep)[np.flatnonzero(~np.isfinite(values))[0]]
            raise ValueError(
                f"log-probs: expected finite values under the mask, found one that is not at {tuple(where)}"
            )
        out.append(values)
    return out


def log_ratio(logp_a: Array, logp_b: Array, mask: Array) -> np.ndarray:
    """Δ = log π_A - log π_B of the masked tokens, `[n]` float64 in nats.

    Args:
        logp_a, logp_b: natural log-probs, any shape that both have.
        mask: bool of that shape, tokens to look at.

    Raises:
        ValueError: if shapes differ, or a value under the mask is not finite; says where.
    """
    a, b = _masked(logp_a, logp_b, mask=mask)
    return a - b


def k3_terms(delta: np.ndarray) -> np.ndarray:
    """expm1(Δ) - Δ per token, any shape: >= 0, and 0 only where Δ = 0 (Schulman's k3 estimator)."""
    return np.expm1(delta) - delta


def k1(logp_a: Array, logp_b: Array, mask: Array) -> float | None:
    """mean(-Δ) in nats: the signed estimate of KL(B‖A) on samples of B.

    Arrays of any shape, as `log_ratio`; None without tokens.
    """
    delta = log_ratio(logp_a, logp_b, mask)
    return float(np.mean(-delta)) if delta.size else None


def k3(logp_a: Array, logp_b: Array, mask: Array) -> float | None:
    """mean(expm1(Δ) - Δ) in nats, >= 0: on samples of B an unbiased estimate of KL(B‖A).

    Arrays of any shape, as `log_ratio`; None without tokens.
    """
    delta = log_ratio(logp_a, logp_b, mask)
    return float(np.mean(k3_terms(delta))) if delta.size else None


def extreme_token_fraction(logp_a: Array, logp_b: Array, mask: Array, tau: float = 2.0) -> float | None:
    """F(τ): share of tokens whose probability ratio lies outside [1/τ, τ] (arXiv 2510.11370).

    Symmetric in A and B, non-increasing in τ. Arrays of any shape, as `log_ratio`; None without tokens.

    Raises:
        ValueError: for τ below 1.
    """
    if tau < 1:
        raise ValueError(f"tau: expected a ratio of at least 1, found {tau}")
    delta = log_ratio(logp_a, logp_b, mask)
    return float(np.mean(np.abs(delta) > np.log(tau))) if delta.size else None


def effective_sample_size(logp_a: Array, logp_b: Array, mask: Array) -> float | None:
    """(Σw)² / (n Σw²) with w = exp Δ, a share of the tokens in (0, 1]; 1/(1 + CV²(w)); 1 iff the ratio is constant.

    Arrays of any shape, as `log_ratio`; None without tokens.
    """
    delta = log_ratio(logp_a, logp_b, mask)
    if not delta.size:
        return None
    w = np.exp(delta - delta.max())  # a common factor leaves it unchanged
    return float(w.sum() ** 2 / (w.size * (w**2).sum()))


def pearson(logp_a: Array, logp_b: Array, mask: Array) -> float | None:
    """Correlation of the probabilities (verl's rollout_actor_probs_pearson_corr), arrays of any shape, as `log_ratio`.

    None with fewer than two tokens, or if one side is constant.
    """
    a, b = (np.exp(x) for x in _masked(logp_a, logp_b, mask=mask))
    if a.size < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.clip(np.corrcoef(a, b)[0, 1], -1.0, 1.0))  # rounding may leave the interval by one ulp


def mismatch(
    logp_a: Array, logp_b: Array, mask: Array, *, prefix: str = "", tau: float = 2.0
) -> dict[str, float | None]:
    """Every token statistic for one pair.

    Args:
        logp_a, logp_b: natural log-probs, any shape that both have.
        mask: bool of that shape, true on response tokens.
        prefix: put before each name, e.g. `mismatch/rollout_old/`.
        tau: the factor of the extreme-token fraction.

    Returns:
        k1, k3, extreme_fraction_tau{τ}, abs_{mean,p50,p95,p99,max} of |Δ| (nats), probs_diff_{mean,max,std} (verl's
        rollout_probs_diff, on probabilities), pearson, ess, ratio_max (of exp Δ) and tokens. Values are None without
        tokens.

    Raises:
        ValueError: if shapes differ, or a value under the mask is not finite; for τ below 1.
    """
    a, b = _masked(logp_a, logp_b, mask=mask)
    n = a.size
    every = np.ones(n, dtype=bool)
    size, gap = np.abs(a - b), np.abs(np.exp(a) - np.exp(b))
    p50, p95, p99 = (float(x) for x in np.percentile(size, [50, 95, 99])) if n else (None, None, None)
    values: dict[str, float | None] = {
        "k1": k1(a, b, every),
        "k3": k3(a, b, every),
        f"extreme_fraction_tau{tau:g}": extreme_token_fraction(a, b, every, tau),
        "abs_mean": float(size.mean()) if n else None,
        "abs_p50": p50,
        "abs_p95": p95,
        "abs_p99": p99,
        "abs_max": float(size.max()) if n else None,
        "ratio_max": float(np.exp((a - b).max())) if n else None,
        "probs_diff_mean": float(gap.mean()) if n else None,
        "probs_diff_max": float(gap.max()) if n else None,
        "probs_diff_std": float(gap.std(ddof=1)) if n > 1 else None,
        "pearson": pearson(a, b, every),
        "ess": effective_sample_size(a, b, every),
        "tokens": float(n),
    }
    return {prefix + name: value for name, value in values.items()}


def sequence_log_ratios(logp_a: Array, logp_b: Array, mask: Array) -> tuple[np.ndarray, np.ndarray]:
    """Per sequence of `[S, T]`: (ΣΔ, mean Δ), each `[S]` in nats.

    exp of them are seq_ratio and geo_ratio (GSPO, arXiv 2507.18071). A sequence without response tokens gives 0 in the
    first and NaN in the second.
    """
    keep = np.asarray(mask, dtype=bool)
    _masked(logp_a, logp_b, mask=keep)  # refuses what is not finite
    delta = np.where(keep, np.asarray(logp_a, np.float64) - np.asarray(logp_b, np.float64), 0.0)
    total, length = delta.sum(-1), keep.sum(-1)
    return total, np.divide(total, length, out=np.full(total.shape, np.nan), where=length > 0)


def bad_update_fraction(
    logp_new: Array, logp_rollout: Array, advantages: Array, mask: Array, delta: float
) -> float | None:
    """Share of tokens with A < 0 whose probability fell from μ to new by at least δ (arXiv 2602.04879).

    Args:
        logp_new, logp_rollout, mask: as for `log_ratio`, any shape.
        advantages: one a token, of the same shape.
        delta: δ, a difference of probabilities; the share falls as it grows.

    Raises:
        ValueError: for an advantage under the mask that is not finite, and as `log_ratio`.
    """
    new, mu = _masked(logp_new, logp_rollout, mask=mask)
    advantage = np.asarray(advantages, np.float64)[np.asarray(mask, bool)]
    bad = advantage[~np.isfinite(advantage)]
    if bad.size:
        raise ValueError(f"advantages: expected finite values under the mask, found {bad[0]}")
    return float(np.mean((advantage < 0) & (np.exp(mu) - np.exp(new) >= delta))) if new.size else None


def factorisation(
    logp_rollout: Array, logp_old: Array, logp_new: Array, mask: Array
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log(new/μ) = log(old/μ) + log(new/old) per masked token.

    Returns:
        The total, the mismatch of the engines and the drift of the policy, each `[n]` float64 in nats.
    """
    engines = log_ratio(logp_old, logp_rollout, mask)
    drift = log_ratio(logp_new, logp_old, mask)
    return log_ratio(logp_new, logp_rollout, mask), engines, drift


def noise_floor(
    logp_once: Array, logp_again: Array, mask: Array, *, prefix: str = "noise_floor/"
) -> dict[str, float | None]:
    """The disagreement of one engine with itself on the same tokens.

    For a rollout engine: log-probs while decoding against its own re-scoring. For a trainer: the same batch under
    another micro-batch split (a plain repeat is bit-equal on a CPU and says nothing). Arrays of any shape, as
    `log_ratio`. Returns k3, abs_mean and abs_max, in nats.
    """
    values = mismatch(logp_again, logp_once, mask)
    return {prefix + name: values[name] for name in ("k3", "abs_mean", "abs_max")}
