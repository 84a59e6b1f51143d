"""Every claim of the table that can be computed: their formula, written out token by token, against our number."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from rar_lib.errors import ConfigError
from rar_lib.metrics import aliases
from rar_lib.metrics.aliases import ALIASES, alias_table, find
from rar_lib.metrics.load import load_table
from rar_lib.metrics.mismatch import extreme_token_fraction, k3, mismatch
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader

Tokens = list[tuple[float, float]]  # (log π of the later source, of the earlier one) of each token
PAIRS = ("rollout_old", "old_new", "rollout_new")


def draw(seed: int, equal_lengths: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    base = -rng.exponential(1.5, (6, 9))
    gap = rng.normal(0, 0.5, base.shape)
    lengths = np.full(6, 7) if equal_lengths else rng.integers(1, 10, 6)
    return base + np.minimum(gap, -base), base, np.arange(9) < lengths[:, None]


def tokens(a: np.ndarray, b: np.ndarray, mask: np.ndarray) -> Tokens:
    return [(float(x), float(y)) for x, y, keep in zip(a.flat, b.flat, mask.flat, strict=True) if keep]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def probability_gaps(t: Tokens) -> list[float]:
    return [abs(math.exp(x) - math.exp(y)) for x, y in t]


def correlation(t: Tokens) -> float:
    return statistics.correlation([math.exp(x) for x, _ in t], [math.exp(y) for _, y in t])


def third_estimator(t: Tokens) -> float:
    return mean([math.exp(x) / math.exp(y) - math.log(math.exp(x) / math.exp(y)) - 1 for x, y in t])


def absolute(t: Tokens) -> list[float]:
    return [abs(y - x) for x, y in t]


# their formulas, for each row that says "same" (or, with the sign changed, "same up to sign") of a log-prob column
THEIRS: dict[tuple[str, str], Callable[[Tokens], float]] = {
    ("verl", "training/rollout_probs_diff_mean"): lambda t: mean(probability_gaps(t)),
    ("verl", "training/rollout_probs_diff_max"): lambda t: max(probability_gaps(t)),
    ("verl", "training/rollout_probs_diff_std"): lambda t: statistics.stdev(probability_gaps(t)),
    ("verl", "training/rollout_actor_probs_pearson_corr"): correlation,
    ("verl", "rollout_corr/kl"): lambda t: mean([y - x for x, y in t]),
    ("verl", "rollout_corr/k3_kl"): third_estimator,
    ("verl", "actor/ppo_kl"): lambda t: mean([-max(-20.0, min(20.0, x - y)) for x, y in t]),
    ("NeMo-RL", "train/gen_kl_error"): third_estimator,
    ("NeMo-RL", "train/probs_ratio_max"): lambda t: max(math.exp(x - y) for x, y in t),
    ("prime-rl", "mismatch_kl/all/mean"): third_estimator,
    ("AReaL", "compute_logp/r3/rollout_train_k3_kl/avg"): third_estimator,
    ("AReaL", "compute_logp/r3/rollout_train_logp_abs_diff/avg"): lambda t: mean(absolute(t)),
    ("AReaL", "compute_logp/r3/rollout_train_logp_abs_diff/max"): lambda t: max(absolute(t)),
    ("AReaL", "compute_logp/r3/rollout_train_extreme_frac_tau2/avg"): lambda t: mean(
        [float(not 0.5 <= math.exp(x - y) <= 2) for x, y in t]
    ),
    ("AReaL", "ppo_actor/update/approx_kl/avg"): lambda t: mean([x - y for x, y in t]),
    ("AReaL", "ppo_actor/update/behave_approx_kl/avg"): lambda t: mean([x - y for x, y in t]),
    ("AReaL", "ppo_actor/update/logp_abs_diff/avg"): lambda t: mean(absolute(t)),
    ("SkyRL", "policy/rollout_train_logprobs_abs_diff_mean"): lambda t: mean(absolute(t)),
    ("SkyRL", "policy/rollout_train_logprobs_abs_diff_max"): lambda t: max(absolute(t)),
}
COMPUTABLE = [a for a in ALIASES if a.relation.startswith("same") and a.ours and a.ours.startswith("mismatch/")]


def ours_of(name: str, a: np.ndarray, b: np.ndarray, mask: np.ndarray) -> float:
    value = mismatch(a, b, mask)[name.rpartition("/")[2]]
    assert value is not None
    return value


@pytest.mark.parametrize("alias", COMPUTABLE, ids=lambda a: f"{a.framework}:{a.theirs}")
def test_same_is_the_same_number(alias: aliases.Alias) -> None:
    sign = -1 if alias.relation == "same up to sign" else 1
    for seed in range(5):
        a, b, mask = draw(seed)
        theirs = THEIRS[alias.framework, alias.theirs](tokens(a, b, mask))
        assert alias.ours is not None
        assert sign * theirs == pytest.approx(ours_of(alias.ours, a, b, mask), rel=1e-9, abs=1e-12)


def test_every_formula_belongs_to_a_row() -> None:
    assert set(THEIRS) == {(a.framework, a.theirs) for a in COMPUTABLE}


def test_max_vio_is_the_same_number() -> None:
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(4, dtype=np.int64), (30, 1)), axis=1)[:, None, :2]
    header = TraceHeader(num_experts=4, top_k=2, moe_layers=(3,), source="rollout")
    made = RouteTrace.from_packed(header, ids, [30], [Status.RECORDED] * 30)
    share = np.bincount(ids.ravel(), minlength=4) / ids.size
    assert load_table(made)["max_vio"][0] == pytest.approx((share * 4 - 1).max())


@pytest.mark.parametrize("seed", range(3))
def test_what_the_notes_say(seed: int) -> None:
    a, b, mask = draw(seed)
    t = tokens(a, b, mask)
    values = {name: value for name, value in mismatch(a, b, mask).items() if value is not None}
    w = [math.exp(x - y) for x, y in t]
    # mean w from two columns (sampling_importance_ratio, probs_ratio, tis, importance_weight)
    assert mean(w) == pytest.approx(1 + values["k3"] - values["k1"])
    # chi2_token and ess
    chi2 = mean([x * x for x in w]) - 1
    assert values["ess"] == pytest.approx(mean(w) ** 2 / (1 + chi2))
    # rollout_is_*: a threshold cuts the maximum, the two tails at 2 are F(2), and ess is ours only where nothing is cut
    cut = [min(x, 2.0) for x in w]
    assert max(cut) == pytest.approx(min(values["ratio_max"], 2.0))
    tails = mean([float(x > 2) for x in w]) + mean([float(x < 0.5) for x in w])
    assert tails == pytest.approx(values["extreme_fraction_tau2"])
    wide = [min(x, 1e6) for x in w]
    assert 1 / mean([(x / mean(wide)) ** 2 for x in wide]) == pytest.approx(values["ess"])
    low = [min(x, 1.2) for x in w]
    assert 1 / mean([(x / mean(low)) ** 2 for x in low]) > values["ess"] + 1e-3
    # token_mult_prob_error is no less than exp(abs_mean); policy_kl_error is k3 with the sides swapped
    assert mean([math.exp(x) for x in absolute(t)]) > math.exp(values["abs_mean"])
    assert mean([math.exp(y - x) - 1 - (y - x) for x, y in t]) == pytest.approx(k3(b, a, mask))
    assert mean([float(abs(x - y) > math.log(5)) for x, y in t]) == extreme_token_fraction(a, b, mask, 5)


@pytest.mark.parametrize("seed", range(3))
def test_means_of_sequence_means_agree_at_equal_lengths_only(seed: int) -> None:
    for equal in (True, False):
        a, b, mask = draw(seed, equal)
        per_sequence = [mean([y - x for x, y in tokens(*rows)]) for rows in zip(a, b, mask, strict=True)]
        close = mean(per_sequence) == pytest.approx(mismatch(a, b, mask)["k1"])
        assert close is equal


def test_ours_are_names_that_exist() -> None:
    a, b, mask = draw(0)
    columns = {f"mismatch/{pair}/{name}" for pair in PAIRS for name in mismatch(a, b, mask)}
    header = TraceHeader(num_experts=4, top_k=2, moe_layers=(3,), source="rollout")
    table = load_table(RouteTrace.from_packed(header, [[[0, 1]]], [1], [Status.RECORDED]))
    columns |= {f"load_table[{name}]" for name in table.columns}
    assert {alias.ours for alias in ALIASES} - {None} <= columns


def test_rows_are_whole() -> None:
    keys = [(alias.framework, alias.theirs) for alias in ALIASES]
    assert len(set(keys)) == len(keys)
    for alias in ALIASES:
        assert alias.note.endswith("."), alias
        assert alias.ours is not None or alias.relation == "other", alias


def test_table() -> None:
    table = alias_table()
    assert list(table.columns) == ["framework", "theirs", "ours", "relation", "note"]
    assert len(table) == len(ALIASES)
    assert table["ours"].map(lambda x: x is None or isinstance(x, str)).all()
    assert set(alias_table("verl")["framework"]) == {"verl"}
    assert len(alias_table("nemo-rl")) == len(alias_table("NeMo-RL")) > 0
    assert sum(len(alias_table(name)) for name in table["framework"].unique()) == len(table)


def test_an_unknown_framework_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"verl, NeMo-RL, slime, prime-rl, AReaL, SkyRL, found 'trl'"):
        alias_table("trl")


def test_find() -> None:
    (layer,) = find("rollout/moe/max_vio/layer_3")
    assert layer == find("rollout/moe/max_vio/layer_{i}")[0]
    assert layer.theirs == "rollout/moe/max_vio/layer_{i}"
    assert find("rollout/moe/max_vio/layer_47") == (layer,)
    assert find("rollout/moe/max_vio/layer_x") == ()
    assert find("rollout/moe/max_vio/layer_") == ()
    assert [a.theirs for a in find("rollout/moe/max_vio/max")] == ["rollout/moe/max_vio/max"]
    assert layer in find("load_table[max_vio]")
    by_ours = find("mismatch/rollout_old/k3")
    assert {a.framework for a in by_ours} >= {"verl", "NeMo-RL", "slime", "AReaL"}
    assert all(a.ours == "mismatch/rollout_old/k3" for a in by_ours)
    assert [a.theirs for a in find("gen_kl_error")] == ["train/gen_kl_error"]
    assert {a.theirs for a in find("mismatch_kl")} == {"mismatch_kl/all/mean", "mismatch_kl/all/max"}
    assert set(by_ours) < set(find("k3"))
    assert find("") == find("/") == find("no/such/name") == ()
