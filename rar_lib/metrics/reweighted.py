"""The reward of a policy on samples of another: what the trainer's own policy would score on the rollout's answers.

A served model is the rollout engine's policy μ; its mean reward is measured directly. The trainer's policy, natively or under replay, never
samples. Its reward is estimated by self-normalised importance sampling over whole answers,

    Σ w r / Σ w,  w = exp(Σ_t log π(y_t) - log μ(y_t))

which is consistent but biased by O(1/n), and worth as much as its effective sample size says.
"""

from __future__ import annotations

import numpy as np

from rar_lib.metrics.mismatch import Array, sequence_log_ratios


def reweighted_reward(
    rewards: Array, logp_policy: Array, logp_rollout: Array, mask: Array
) -> tuple[float | None, float | None]:
    """Estimated reward of `policy`, and the effective sample size as a share of the answers, in (0, 1].

    Args:
        rewards: `[S]`, one an answer.
        logp_policy, logp_rollout: `[S, T]` in nats.
        mask: `[S, T]` bool, response tokens.

    Returns:
        Both None without answers. Equal policies give the plain mean and 1.

    Raises:
        ValueError: if shapes differ, or a log-prob under the mask is not finite.
    """
    total, _ = sequence_log_ratios(logp_policy, logp_rollout, mask)
    if not len(total):
        return None, None
    w = np.exp(total - total.max())
    return float(w @ np.asarray(rewards, np.float64) / w.sum()), float(w.sum() ** 2 / (len(w) * (w**2).sum()))
