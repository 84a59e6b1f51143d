"""Which metric names of other frameworks mean the same number as ours, and where they only look alike.

Two dashboards can be laid side by side only if three things agree: the pair of log-prob sources (rollout/old, old/new
or rollout/new), the direction and estimator, and the mean (over all tokens, or over sequences first). Most names say
none of the three, so each row says them. Nothing is called the same because its name suggests it.

A relation is one of formulas: what "same" computes from the same log-probs and the same mask is our number. Where a
framework feeds it other tokens, or another source under some setting, the note says so. In the notes Δ and w = exp Δ
are those of our pair `b_a`, Δ = log π_A - log π_B (mismatch.py), and "no column" means that a run does not write the
number even where its parts are at hand.

`ours` names a column of a run (measure.py) or, as `load_table[max_vio]`, a column of a table in metrics/load.py.

One file: it is a table, and the rows of a framework are read, checked and mended beside those of the others.

Sources, August 2026: verl-project/verl 1dda039 (rollout_corr_helper.py, core_algos.py, metric_utils.py,
utils/debug/metrics.py); NVIDIA-NeMo/RL 7ea279a (loss_functions.py, grpo.py); THUDM/slime 624b824
(megatron_utils/loss.py, cp_utils.py, examples/train_infer_mismatch_helper/mis.py); PrimeIntellect-ai/prime-rl 559b447
(trainer/rl/loss.py, trainer/rl/train.py, trainer/model.py); areal-project/AReaL cbff54d (trainer/ppo/actor.py,
functional.py) and, for `compute_logp/r3/`, its pull request 1496, which that commit does not hold; NovaSky-AI/SkyRL
a956457 (train/trainer.py).
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass, fields
from typing import Literal

import pandas as pd

from rar_lib.errors import ConfigError

Relation = Literal["same", "same up to sign", "monotone transform", "other"]


@dataclass(frozen=True)
class Alias:
    """One metric of another framework and what it is here.

    Attributes:
        framework: whose metric it is.
        theirs: its name as logged; `{i}` stands for any number (a layer).
        ours: the number of ours that it is to be read beside, None where there is none.
        relation: of theirs to ours; "other" where ours is None.
        note: the formula, the pair, and what would make the two differ. Log-probs are in nats.
    """

    framework: str
    theirs: str
    ours: str | None
    relation: Relation
    note: str


_BYPASS = "In bypass mode the trainer side is the current policy: then the pair is rollout_new."
_IS = "Logged only with rollout_is set. "
_SLIME_MEAN = (
    "mean over a rollout's tokens, then over rollouts; the mean over tokens, as ours, only with "
    "--calculate-per-token-loss or at equal lengths."
)
_NEMO_MEAN = "Token mean of each update, then the mean over updates."
_NEMO_KL = "For reference_policy_kl_type k3, the default, and without force_on_policy_ratio."
_AREAL_PROX = (
    "Pair old_new where the proximal log-probs are recomputed by a forward pass; rollout_new where they are the "
    "rollout's; neither where they are approximated (loglinear)."
)

ALIASES: tuple[Alias, ...] = (
    # ---------------------------------------------------------------- verl
    Alias(
        "verl",
        "training/rollout_probs_diff_mean",
        "mismatch/rollout_old/probs_diff_mean",
        "same",
        "mean |exp old - exp rollout|: of probabilities, though its docstring says logprob.",
    ),
    Alias(
        "verl",
        "training/rollout_probs_diff_max",
        "mismatch/rollout_old/probs_diff_max",
        "same",
        "max |exp old - exp rollout|, of probabilities.",
    ),
    Alias(
        "verl",
        "training/rollout_probs_diff_std",
        "mismatch/rollout_old/probs_diff_std",
        "same",
        "Standard deviation of |exp old - exp rollout| with n - 1; NaN for one token, where ours is None.",
    ),
    Alias(
        "verl",
        "training/rollout_actor_probs_pearson_corr",
        "mismatch/rollout_old/pearson",
        "same",
        "Correlation of probabilities (2506.13585); NaN for a constant side, where ours is None.",
    ),
    Alias(
        "verl",
        "rollout_corr/kl",
        "mismatch/rollout_old/k1",
        "same",
        "mean(rollout - old) = mean(-Δ), estimates KL(rollout‖old); mask before rejection. " + _BYPASS,
    ),
    Alias(
        "verl",
        "rollout_corr/k3_kl",
        "mismatch/rollout_old/k3",
        "same",
        "mean(w - 1 - Δ), w = old/rollout, estimates KL(rollout‖old); mask before rejection. " + _BYPASS,
    ),
    Alias(
        "verl",
        "rollout_corr/log_ppl_diff",
        "mismatch/rollout_old/k1",
        "other",
        "mean(-Δ) of each sequence, then the mean over sequences; equals k1 only at equal lengths. " + _BYPASS,
    ),
    Alias(
        "verl",
        "rollout_corr/log_ppl_abs_diff",
        None,
        "other",
        "Mean over sequences of |mean Δ|: signs cancel within a sequence, so at most the mean of |Δ| per sequence. No "
        "column; sequence_log_ratios gives the parts.",
    ),
    Alias(
        "verl",
        "rollout_corr/log_ppl_diff_max",
        None,
        "other",
        "Largest mean(-Δ) of a sequence. No column; sequence_log_ratios gives the parts.",
    ),
    Alias(
        "verl",
        "rollout_corr/log_ppl_diff_min",
        None,
        "other",
        "Smallest mean(-Δ) of a sequence. No column; sequence_log_ratios gives the parts.",
    ),
    Alias(
        "verl",
        "rollout_corr/ppl_ratio",
        None,
        "other",
        "Mean over sequences of exp(mean(-Δ)): of 1/geo_ratio, rollout over old. No column; sequence_log_ratios gives "
        "the parts.",
    ),
    Alias(
        "verl",
        "rollout_corr/chi2_token",
        "mismatch/rollout_old/ess",
        "other",
        "mean(w²) - 1 with Δ clamped to ±20, estimates χ²(old‖rollout). ess = (mean w)² / (1 + chi2_token): "
        "1 / (1 + chi2_token) only where mean w = 1.",
    ),
    Alias(
        "verl",
        "rollout_corr/chi2_seq",
        None,
        "other",
        "Mean over sequences of exp(2 ΣΔ), less 1, ΣΔ clamped to ±20. No column; sequence_log_ratios gives ΣΔ.",
    ),
    Alias(
        "verl",
        "rollout_corr/rollout_is_eff_sample_size",
        "mismatch/rollout_old/ess",
        "other",
        _IS + "The same formula, 1 / mean((w/mean w)²), of weights already truncated at rollout_is_threshold (2.0) or "
        "zeroed (IcePop): equals ours for rollout_is=token where no ratio is out of bounds. For rollout_is=sequence w "
        "is exp(ΣΔ), repeated on each token.",
    ),
    Alias(
        "verl",
        "rollout_corr/rollout_is_mean",
        None,
        "other",
        _IS + "Mean of the truncated weights: update/weight_mean of a run with correction tis and their threshold "
        "(rollout_is=token). Of other runs no column; without truncation, mean w = 1 + k3 - k1 of mismatch/rollout_old.",
    ),
    Alias(
        "verl",
        "rollout_corr/rollout_is_max",
        "mismatch/rollout_old/ratio_max",
        "monotone transform",
        _IS
        + "min(ratio_max, rollout_is_threshold) for rollout_is=token without IcePop: never above the threshold. For "
        "rollout_is=sequence another number: the largest exp(ΣΔ), not truncated.",
    ),
    Alias(
        "verl",
        "rollout_corr/rollout_is_ratio_fraction_high",
        "mismatch/rollout_old/extreme_fraction_tau2",
        "other",
        _IS + "Share of tokens with w > rollout_is_threshold: the upper tail only. At threshold 2 (default) and "
        "rollout_is=token, high + low = ours. For rollout_is=sequence a share of sequences.",
    ),
    Alias(
        "verl",
        "rollout_corr/rollout_is_ratio_fraction_low",
        "mismatch/rollout_old/extreme_fraction_tau2",
        "other",
        _IS + "Share of tokens with w < 1/rollout_is_threshold (or IcePop's lower bound): the lower tail only. See "
        "rollout_is_ratio_fraction_high.",
    ),
    Alias(
        "verl",
        "actor/ppo_kl",
        "mismatch/old_new/k1",
        "same",
        "mean(old - new) = mean(-Δ), new - old clamped to ±20; the tokens come from the rollout: no estimate of "
        "KL(old‖new). Per micro-batch. The loss kl_cov logs abs_mean under this name. In bypass mode the pair is "
        "rollout_new.",
    ),
    Alias(
        "verl",
        "rollout/moe/max_vio/layer_{i}",
        "load_table[max_vio]",
        "same",
        "max n / mean n - 1 of the routes n of a layer's experts. Counted on response tokens without each sequence's "
        "last; ours counts every recorded cell, prompts included. i is a position in the captured routes, our `layer` "
        "a transformer layer number.",
    ),
    Alias(
        "verl",
        "rollout/moe/min_vio/layer_{i}",
        None,
        "other",
        "min n / mean n - 1. No column; -1 exactly where load_table[dead] > 0.",
    ),
    Alias(
        "verl",
        "rollout/moe/avg_vio/layer_{i}",
        None,
        "other",
        "mean |n / mean n - 1| over experts: twice the total variation from a uniform load. No column.",
    ),
    Alias(
        "verl",
        "rollout/moe/max_vio/max",
        "load_table[max_vio]",
        "other",
        "The largest max_vio of the layers: the maximum of our column, on their cells.",
    ),
    Alias(
        "verl",
        "rollout/moe/max_vio/avg",
        "load_table[max_vio]",
        "other",
        "The mean max_vio of the layers: the mean of our column, on their cells.",
    ),
    # ---------------------------------------------------------------- NeMo-RL
    Alias(
        "NeMo-RL",
        "train/token_mult_prob_error",
        "mismatch/rollout_old/abs_mean",
        "other",
        "mean exp|Δ|, 1 where nothing differs: at least exp(abs_mean), and no function of it; single tokens carry it. "
        + _NEMO_MEAN,
    ),
    Alias(
        "NeMo-RL",
        "train/gen_kl_error",
        "mismatch/rollout_old/k3",
        "same",
        "mean(w - 1 - Δ), w = old/rollout, estimates KL(rollout‖old). " + _NEMO_KL + " " + _NEMO_MEAN,
    ),
    Alias(
        "NeMo-RL",
        "train/policy_kl_error",
        "mismatch/rollout_old/k3",
        "other",
        "The other direction: mean(1/w - 1 + Δ), k3 with the sides swapped, meant as KL(old‖rollout). The tokens come "
        "from the rollout, so it is no unbiased estimate of it; single tokens with old << rollout carry it. "
        "" + _NEMO_KL,
    ),
    Alias(
        "NeMo-RL",
        "train/js_divergence_error",
        None,
        "other",
        "Mean of ½ (r - 1 - log r) over r = old/m and r = rollout/m, m = ½ (old + rollout) at the sampled token. No "
        "such number; our js is of loads.",
    ),
    Alias(
        "NeMo-RL",
        "train/sampling_importance_ratio",
        None,
        "other",
        "mean w, w = old/rollout, after truncation where that is on; over sequences, of exp(ΣΔ), with "
        "sequence_level_importance_ratios. No column; without either, 1 + k3 - k1 of mismatch/rollout_old.",
    ),
    Alias(
        "NeMo-RL",
        "train/probs_ratio",
        None,
        "other",
        "mean w, w = new/old. No column; 1 + k3 - k1 of mismatch/old_new (token ratios). " + _NEMO_MEAN,
    ),
    Alias(
        "NeMo-RL",
        "train/probs_ratio_max",
        "mismatch/old_new/ratio_max",
        "same",
        "max new/old before clipping, over all updates; with sequence_level_importance_ratios of geo_ratio instead.",
    ),
    Alias(
        "NeMo-RL",
        "train/probs_ratio_min",
        None,
        "other",
        "min new/old before clipping. No column: ours keeps the largest ratio only.",
    ),
    Alias(
        "NeMo-RL",
        "train/max_seq_mult_prob_error",
        None,
        "other",
        "The largest mean exp|Δ| of a sequence, pair rollout_old. No such number.",
    ),
    # ---------------------------------------------------------------- slime
    Alias(
        "slime",
        "train/train_rollout_logprob_abs_diff",
        "mismatch/rollout_old/abs_mean",
        "other",
        "|old - rollout|, of log-probs: " + _SLIME_MEAN + " With --use-rollout-logprobs the pair is rollout_new.",
    ),
    Alias(
        "slime",
        "train/ppo_kl",
        "mismatch/old_new/k1",
        "other",
        "old - new: "
        + _SLIME_MEAN
        + " For gspo the sequence's mean; with --use-rollout-logprobs the pair is rollout_new.",
    ),
    Alias(
        "slime",
        "train/mis_kl",
        "mismatch/rollout_old/k1",
        "other",
        "rollout - old, estimates KL(rollout‖old): " + _SLIME_MEAN,
    ),
    Alias(
        "slime",
        "train/mis_k3_kl",
        "mismatch/rollout_old/k3",
        "other",
        "w - 1 - Δ, w = old/rollout, estimates KL(rollout‖old): " + _SLIME_MEAN,
    ),
    Alias(
        "slime",
        "train/mis_log_ppl_diff",
        "mismatch/rollout_old/k1",
        "other",
        "mean(-Δ) of each sequence, then over sequences: verl's log_ppl_diff. Equals k1 only at equal lengths.",
    ),
    Alias(
        "slime",
        "train/mis_log_ppl_abs_diff",
        None,
        "other",
        "Mean over sequences of |mean Δ|. No column; sequence_log_ratios gives the parts.",
    ),
    Alias(
        "slime",
        "train/mis_ppl_ratio",
        None,
        "other",
        "Mean over sequences of exp(mean(-Δ)), of 1/geo_ratio. No column; sequence_log_ratios gives the parts.",
    ),
    Alias(
        "slime",
        "train/mis_chi2_token",
        None,
        "other",
        "mean(w²) - 1 within each sequence, Δ clamped to ±20, then over sequences: other than verl's chi2_token, "
        "which is over all tokens. No such number.",
    ),
    Alias(
        "slime",
        "train/mis_chi2_seq",
        None,
        "other",
        "Mean over sequences of exp(2 ΣΔ), less 1, ΣΔ clamped to ±20. No column; sequence_log_ratios gives ΣΔ.",
    ),
    Alias(
        "slime",
        "train/tis",
        None,
        "other",
        "w = old/rollout before the clip: "
        + _SLIME_MEAN
        + " No column; then mean w = 1 + k3 - k1 of mismatch/rollout_old.",
    ),
    Alias(
        "slime",
        "train/tis_abs",
        None,
        "other",
        "|w - 1|, w = old/rollout before the clip: " + _SLIME_MEAN + " No such number.",
    ),
    # ---------------------------------------------------------------- prime-rl
    Alias(
        "prime-rl",
        "mismatch_kl/all/mean",
        "mismatch/rollout_new/k3",
        "same",
        "mean(w - 1 - Δ), w = trainer/inference, estimates KL(inference‖trainer). The trainer side is the training "
        "forward itself (there is no old pass) and rollouts may be of older weights: rollout_new, not rollout_old.",
    ),
    Alias(
        "prime-rl",
        "mismatch_kl/all/max",
        None,
        "other",
        "The largest w - 1 - Δ of a token, pair rollout_new. No such number.",
    ),
    Alias(
        "prime-rl",
        "masked_mismatch_kl/mean",
        None,
        "other",
        "w - 1 - Δ over the tokens that the trust region drops, pair rollout_new. No such number.",
    ),
    Alias(
        "prime-rl",
        "unmasked_mismatch_kl/mean",
        None,
        "other",
        "w - 1 - Δ over the tokens that the trust region keeps, pair rollout_new. No such number.",
    ),
    Alias(
        "prime-rl",
        "max_vio/mean",
        "load_table[max_vio]",
        "other",
        "max n / mean n - 1 of the trainer's own routes, after the top_k most used experts of the layer are left out "
        "(so that padding does not count); then the mean over layers, micro-steps and ranks.",
    ),
    Alias(
        "prime-rl",
        "routing_confidence/mean",
        None,
        "other",
        "Router probability on the chosen experts, a mean over tokens and layers. No such number.",
    ),
    # ---------------------------------------------------------------- AReaL
    Alias(
        "AReaL",
        "compute_logp/r3/rollout_train_k3_kl/avg",
        "mismatch/rollout_old/k3",
        "same",
        "mean(w - 1 - Δ), w = old/rollout: estimates KL(rollout‖old), though pull request 1207 writes the reverse.",
    ),
    Alias(
        "AReaL",
        "compute_logp/r3/rollout_train_logp_abs_diff/avg",
        "mismatch/rollout_old/abs_mean",
        "same",
        "mean |Δ|, of log-probs.",
    ),
    Alias(
        "AReaL",
        "compute_logp/r3/rollout_train_logp_abs_diff/max",
        "mismatch/rollout_old/abs_max",
        "same",
        "max |Δ|, of log-probs.",
    ),
    Alias(
        "AReaL",
        "compute_logp/r3/rollout_train_logp_sq_diff/avg",
        None,
        "other",
        "mean Δ², twice the k2 estimator. No such number.",
    ),
    Alias(
        "AReaL",
        "compute_logp/r3/rollout_train_extreme_frac_tau2/avg",
        "mismatch/rollout_old/extreme_fraction_tau2",
        "same",
        "Share of tokens with |Δ| > log 2: F(2).",
    ),
    Alias(
        "AReaL",
        "compute_logp/r3/rollout_train_extreme_frac_tau5/avg",
        None,
        "other",
        "Share of tokens with |Δ| > log 5: F(5). A run writes F(2) only; extreme_token_fraction(tau=5) is the same "
        "number.",
    ),
    Alias(
        "AReaL",
        "ppo_actor/update/approx_kl/avg",
        "mismatch/old_new/k1",
        "same up to sign",
        "mean(new - old) = mean Δ, our k1 with the sign changed. " + _AREAL_PROX,
    ),
    Alias(
        "AReaL",
        "ppo_actor/update/importance_weight/avg",
        None,
        "other",
        "mean w, w = new/old before the clip; of geo_ratio with importance_sampling_level sequence. No column; for "
        "token ratios 1 + k3 - k1 of mismatch/old_new. " + _AREAL_PROX,
    ),
    Alias(
        "AReaL",
        "ppo_actor/update/behave_approx_kl/avg",
        "mismatch/rollout_old/k1",
        "same up to sign",
        "mean(old - rollout) = mean Δ, our k1 with the sign changed, where the proximal log-probs are recomputed. "
        "Logged only with rejection_sampling, and over the tokens that it keeps.",
    ),
    Alias(
        "AReaL",
        "ppo_actor/update/logp_abs_diff/avg",
        "mismatch/rollout_new/abs_mean",
        "same",
        "mean |new - rollout|, of log-probs. Pair old_new where recompute_logprob is on and use_decoupled_loss off, "
        "since the recomputed log-probs then take the rollout's place.",
    ),
    # ---------------------------------------------------------------- SkyRL
    Alias(
        "SkyRL",
        "policy/rollout_train_logprobs_abs_diff_mean",
        "mismatch/rollout_old/abs_mean",
        "same",
        "mean |Δ|, of log-probs, from the forward pass before the updates.",
    ),
    Alias(
        "SkyRL",
        "policy/rollout_train_logprobs_abs_diff_max",
        "mismatch/rollout_old/abs_max",
        "same",
        "max |Δ|, of log-probs.",
    ),
    Alias(
        "SkyRL",
        "policy/rollout_train_logprobs_abs_diff_std",
        None,
        "other",
        "Standard deviation of |Δ| with n - 1. No such number: our probs_diff_std is of probabilities.",
    ),
)


def alias_table(framework: str | None = None) -> pd.DataFrame:
    """The aliases as a table.

    Args:
        framework: only this one's, in any case; all of them if None.

    Returns:
        A row an alias, in the order of ALIASES; columns `framework`, `theirs`, `ours` (None where there is none),
        `relation`, `note`.

    Raises:
        ConfigError: for a framework that no alias speaks of.
    """
    known = tuple(dict.fromkeys(alias.framework for alias in ALIASES))
    if framework is not None and framework.casefold() not in {name.casefold() for name in known}:
        raise ConfigError(f"framework: expected one of {', '.join(known)}, found {framework!r}")
    rows = [
        astuple(alias) for alias in ALIASES if framework is None or alias.framework.casefold() == framework.casefold()
    ]
    # dtype object: a string column would turn None into NaN
    return pd.DataFrame(rows, columns=[field.name for field in fields(Alias)], dtype=object)


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\{i\}", r"\d+"), name) is not None


def find(name: str) -> tuple[Alias, ...]:
    """The aliases that a name stands for.

    Args:
        name: theirs (`rollout/moe/max_vio/layer_3`, or its pattern `rollout/moe/max_vio/layer_{i}`) or ours. If it is
            no full name, whole parts of one between slashes will do: `gen_kl_error`, `k3`.

    Returns:
        Every match, in the order of ALIASES; empty if there is none.
    """
    full = [(alias, (alias.theirs, alias.ours or alias.theirs)) for alias in ALIASES]
    exact = tuple(alias for alias, names in full if any(name == one or _matches(one, name) for one in names))
    if exact or not name.strip("/"):
        return exact
    part = f"/{name.strip('/')}/"
    return tuple(alias for alias, names in full if any(part in f"/{one}/" for one in names))
