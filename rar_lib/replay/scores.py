"""Fisher scores of experts: how much the log-likelihood of a sequence moves with what a router or an expert does.

One native pass with a backward gives everything: ℓ = log π(y | x), the sum over the response tokens of a sequence, is
back-propagated to each MoE layer. Engines hand over signals (gates, gradients, norms) and this module does the arithmetic.
With y drawn from π itself, E[∂ℓ ∂ℓᵀ] is the Fisher information; terms between two tokens of ℓ have mean zero, so a square
of the sequence's gradient is an unbiased estimate of the sum over its tokens (and never the square of a batch's mean).

    gate         (∂ℓ/∂ z_e)² at the router logit of each active expert
    param        squared norm of the route's part of ∂ℓ/∂θ_e (per-example norms, arXiv 1510.01799): exact where an expert
                 sees one token of a sequence, else without the terms between its tokens
    param_exact  squared norm of ∂ℓ/∂θ_e per sequence, between-token terms included: the reference for `param`
    swap         [g_e (a_r - a_e)]², the first-order change of ℓ if the runner-up r took the place of e, squared: KL is
                 about half its mean

u = ∂ℓ/∂y at the output of the experts, o_e an expert's output, a_e = <u, o_e> = ∂ℓ/∂g_e, g_e its gate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rar_lib.errors import ConfigError, ReplayError
from rar_lib.replay.stability import Stability, half_of_prompts, stability
from rar_lib.traces.trace import RouteTrace

Estimator = Literal["gate", "param", "param_exact", "swap"]
Aggregation = Literal["per_route", "mass", "shrunk", "gate_free"]
Labels = Literal["rollout", "resampled"]
ESTIMATORS: tuple[Estimator, ...] = ("gate", "param", "param_exact", "swap")
AGGREGATIONS: tuple[Aggregation, ...] = ("per_route", "mass", "shrunk", "gate_free")


@dataclass(frozen=True)
class SignalRequest:
    """What to back-propagate.

    Attributes:
        estimators: the scores that will be computed; `gate` alone is the cheapest.
        labels: `rollout`: ℓ of the sampled tokens, which the rollout engine drew. `resampled`: tokens drawn again from the
            trainer's own distribution at the same contexts, which removes the mismatch between engines from the labels, though
            not from the contexts.
        seed: of the draw.

    Raises:
        ConfigError: for no estimator, or an unknown one.
    """

    estimators: frozenset[str]
    labels: Labels = "rollout"
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = self.estimators - set(ESTIMATORS)
        if unknown or not self.estimators:
            raise ConfigError(f"score estimator: expected some of {', '.join(ESTIMATORS)}, found {sorted(unknown)}")


@dataclass(frozen=True, eq=False)
class RouteSignals:
    """Back-propagated signals of one native pass, packed like its trace: N tokens, L layers, K slots; float32.

    Attributes:
        labels: name of the labels: `resampled` at temperature 1 are draws from π, `rollout` from the rollout's μ, which is
            close to it; with another temperature the name says so.
        gates: `[N, L, K]` g_e as the model used it, scaling included.
        logit_grad: `[N, L, K]` ∂ℓ/∂z_e of the active experts.
        gate_grad: `[N, L, K]` a_e.
        runner_up: `[N, L]` a_r of the first rejected expert; NaN where there is none.
        gaps: `[N, L, K]` score of each active expert less that of the first rejected; infinite where there is none.
        input_sq, output_grad_sq: `[N, L]` ‖x‖² (+1 for experts with biases) and ‖u‖².
        hidden_sq, pre_grad_sq: `[N, L, K]` ‖m‖² (+1 with biases) of the expert's inner activation, and ‖∂ℓ/∂(W_1 x)‖².
        exact: `[S, L, E]` squared norm of ∂ℓ/∂θ_e per sequence.
    """

    labels: str
    gates: np.ndarray
    logit_grad: np.ndarray
    gate_grad: np.ndarray
    runner_up: np.ndarray | None = None
    gaps: np.ndarray | None = None
    input_sq: np.ndarray | None = None
    output_grad_sq: np.ndarray | None = None
    hidden_sq: np.ndarray | None = None
    pre_grad_sq: np.ndarray | None = None
    exact: np.ndarray | None = None


def route_scores(signals: RouteSignals, estimator: Estimator) -> np.ndarray:
    """The per-route quantity q, `[N, L, K]` float64, >= 0; `gate` and `swap` in nats squared.

    Raises:
        ReplayError: if the signals that it needs were not captured; for `param_exact`, which is not a sum over routes.
    """
    g = signals.gates.astype(np.float64)
    if estimator == "gate":
        return signals.logit_grad.astype(np.float64) ** 2
    if estimator == "swap":
        other = _captured(signals, "runner_up", estimator)
        return (g * (np.where(np.isnan(other), 0.0, other)[..., None] - signals.gate_grad)) ** 2 * ~np.isnan(other)[
            ..., None
        ]
    if estimator == "param":
        u, x = _captured(signals, "output_grad_sq", estimator), _captured(signals, "input_sq", estimator)
        m, d = _captured(signals, "hidden_sq", estimator), _captured(signals, "pre_grad_sq", estimator)
        return g**2 * u[..., None] * m + d * x[..., None]
    raise ReplayError(f"score {estimator}: it is a norm per sequence and expert, there is no value of a single route")


def _captured(signals: RouteSignals, name: str, estimator: str) -> np.ndarray:
    values = getattr(signals, name)
    if values is None:
        raise ReplayError(f"score {estimator}: the pass captured no {name}; ask for {estimator} in the SignalRequest")
    return values.astype(np.float64)


@dataclass(frozen=True, eq=False)
class ScoreSums:
    """What adds up over batches: N and C of each cell.

    Attributes:
        mass: `[L, E]` float64 N, the sum of q over the routes of a cell.
        count: `[L, E]` float64 C, its routes (a moving average keeps fractions).
        tokens: tokens seen.
    """

    mass: np.ndarray
    count: np.ndarray
    tokens: float

    def decayed_with(self, new: ScoreSums, decay: float) -> ScoreSums:
        """decay · self + (1 - decay) · new, N and C apart; the division comes after.

        Raises:
            ConfigError: for a decay outside [0, 1).
        """
        if not 0 <= decay < 1:
            raise ConfigError(f"score.ema: expected a share from 0 to below 1, found {decay}")
        parts = ((getattr(self, f), getattr(new, f)) for f in ("mass", "count", "tokens"))
        return ScoreSums(*(decay * a + (1 - decay) * b for a, b in parts))


def cell_sums(q: np.ndarray, trace: RouteTrace, sequences: np.ndarray | None = None) -> ScoreSums:
    """N and C from the q of routes.

    Args:
        q: `[N, L, K]`.
        trace: the native routes of the pass.
        sequences: bool `[S]`, the sequences to take; all by default.

    Raises:
        ReplayError: for another shape, and for NaN or negative values; says where.
    """
    if q.shape != trace.experts.shape:
        raise ReplayError(f"scores: expected the shape of the routes {trace.experts.shape}, found {q.shape}")
    use = trace.recorded
    if sequences is not None:
        use = use & np.repeat(np.asarray(sequences, bool), trace.lengths)[:, None]
    bad = use[..., None] & ~(q >= 0)
    if bad.any():
        token, layer, slot = (int(i) for i in np.argwhere(bad)[0])
        raise ReplayError(
            f"scores: expected values of 0 or more, found {q[token, layer, slot]} at token {token}, layer "
            f"{trace.header.moe_layers[layer]}, expert {int(trace.experts[token, layer, slot])}"
        )
    layers, experts = trace.header.num_layers, trace.header.num_experts
    cells = (np.arange(layers)[None, :, None] * experts + trace.experts.astype(np.int64))[use].reshape(-1)
    size = layers * experts
    mass = np.bincount(cells, weights=q[use].reshape(-1), minlength=size).reshape(layers, experts)
    count = np.bincount(cells, minlength=size).reshape(layers, experts).astype(np.float64)
    return ScoreSums(mass, count, float(use.any(-1).sum()))


@dataclass(frozen=True, eq=False)
class ExpertScore:
    """A score of each cell (layer, expert).

    Attributes:
        values: `[L, E]` float64; -inf where a cell has no routes: unscored, ranked last, never 0 or NaN.
        count: `[L, E]` C behind each value.
        estimator, aggregation, labels: how it was made.
        tokens: tokens seen.
        stability: agreement of two halves of the last batch, if it was measured; with a moving average the values are
            steadier than that.
    """

    values: np.ndarray
    count: np.ndarray
    estimator: str
    aggregation: str
    labels: str
    tokens: float
    stability: Stability | None = None

    @property
    def id(self) -> str:
        """Name for plans and figures."""
        return f"{self.estimator}/{self.aggregation}/{self.labels}"

    @property
    def unscored(self) -> int:
        """Cells without a route."""
        return int(np.isneginf(self.values).sum())

    def first_bad(self) -> tuple[int, int] | None:
        """Row and expert of the first value that no score has: NaN, or below 0 and not -inf. None if there is none."""
        bad = np.argwhere(~(self.values >= 0) & ~np.isneginf(self.values))
        return (int(bad[0, 0]), int(bad[0, 1])) if len(bad) else None

    def require(self, trace: RouteTrace) -> None:
        """Refuse a score of another shape, or with NaN or negative values.

        Raises:
            ReplayError: says what was expected and found.
        """
        expected = (trace.header.num_layers, trace.header.num_experts)
        if self.values.shape != expected:
            raise ReplayError(
                f"score {self.id}: expected shape {expected} (layers, experts), found {self.values.shape}"
            )
        bad = self.first_bad()
        if bad is not None:
            layer, expert = bad
            raise ReplayError(
                f"score {self.id}: expected values of 0 or more, found {self.values[layer, expert]} at layer "
                f"{trace.header.moe_layers[layer]}, expert {expert}"
            )


def aggregate(sums: ScoreSums, aggregation: Aggregation, shrinkage: float = 32.0) -> np.ndarray:
    """`[L, E]` float64 from N and C; -inf where C is 0.

    mass N; per_route and gate_free N/C (for gate_free, N is of q/g²); shrunk (N + κ·layer mean)/(C + κ), the layer mean
    being ΣN/ΣC, so that a cell of few routes says little.

    Args:
        sums: N and C.
        aggregation: one of AGGREGATIONS.
        shrinkage: κ, in routes.

    Raises:
        ConfigError: for an unknown aggregation.
    """
    mass, count = sums.mass, sums.count
    if aggregation == "mass":
        values = mass
    elif aggregation in ("per_route", "gate_free"):
        values = mass / np.where(count > 0, count, 1)
    elif aggregation == "shrunk":
        total = count.sum(1, keepdims=True)
        layer_mean = mass.sum(1, keepdims=True) / np.where(total > 0, total, 1)
        values = (mass + shrinkage * layer_mean) / (count + shrinkage)
    else:
        raise ConfigError(f"score.aggregation: expected one of {', '.join(AGGREGATIONS)}, found {aggregation!r}")
    return np.where(count > 0, values, -np.inf)


def score_sums(
    signals: RouteSignals,
    trace: RouteTrace,
    estimator: Estimator,
    aggregation: Aggregation = "per_route",
    sequences: np.ndarray | None = None,
) -> ScoreSums:
    """N and C of an estimator on one pass; for gate_free, N is of q/g².

    Args:
        signals: of the pass.
        trace: its native routes.
        estimator, aggregation: what is summed.
        sequences: bool `[S]`, the sequences to take; all by default.

    Raises:
        ReplayError: see cell_sums; gate_free refuses a gate of exactly 0, and a norm per sequence.
    """
    if estimator == "param_exact":
        exact = _captured(signals, "exact", estimator)
        if aggregation == "gate_free":
            raise ReplayError(
                "score param_exact: it has no gate of a single route to divide by; use another aggregation"
            )
        routes = cell_sums(np.zeros(trace.experts.shape), trace, sequences)
        chosen = exact if sequences is None else exact[np.asarray(sequences, bool)]
        return replace(routes, mass=chosen.sum(0))
    q = route_scores(signals, estimator)
    if aggregation == "gate_free":
        g = signals.gates.astype(np.float64)
        if (g[trace.recorded] == 0).any():
            raise ReplayError("score gate_free: found a gate of exactly 0, which nothing can be divided by")
        q = q / np.where(g == 0, 1, g) ** 2
    return cell_sums(q, trace, sequences)


def expert_score(
    signals: RouteSignals,
    trace: RouteTrace,
    estimator: Estimator = "gate",
    aggregation: Aggregation = "per_route",
    *,
    shrinkage: float = 32.0,
    groups: np.ndarray | None = None,
    seed: int = 0,
) -> ExpertScore:
    """The score of every cell from one pass.

    Args:
        signals: of the pass.
        trace: its native routes.
        estimator, aggregation: see above.
        shrinkage: κ of `shrunk`, in routes.
        groups: `[S]` the prompt of each sequence; with it, stability is measured between two halves of the prompts.
        seed: of the halves and the null.

    Raises:
        ReplayError: as `score_sums`.
        ConfigError: for an unknown aggregation.
    """
    sums = score_sums(signals, trace, estimator, aggregation)
    found = None
    if groups is not None:
        first = half_of_prompts(groups, seed)
        halves = [
            aggregate(score_sums(signals, trace, estimator, aggregation, part), aggregation, shrinkage)
            for part in (first, ~first)
        ]
        found = stability(halves[0], halves[1], seed=seed)
    values = aggregate(sums, aggregation, shrinkage)
    return ExpertScore(values, sums.count, estimator, aggregation, signals.labels, sums.tokens, found)
