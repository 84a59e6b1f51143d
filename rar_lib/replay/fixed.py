"""Plans at fixed scores: what a plan does to the routes of a trace whose live scores are known. No engine, no model.

The scores of a synthetic trace do not move when a route is forced, and the price of every exchange is made up and known, so
a policy can be judged in a second: which share of the flipped cells it restores, and which share of their price. On a model
the hidden states move as well, and the price is a first-order guess; there score_arms measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from rar_lib.errors import ReplayError
from rar_lib.metrics.agreement import agreement
from rar_lib.metrics.replay import binding_share, fidelity, forced_routers, regret
from rar_lib.replay.budget import as_fraction
from rar_lib.replay.flip_model import FlipModel
from rar_lib.replay.plan import ReplayPlan, Unit
from rar_lib.replay.policies import get_policy, make_plan
from rar_lib.replay.policy import Candidates
from rar_lib.replay.resolve import resolve, resolve_biased
from rar_lib.replay.scores import RouteSignals, expert_score, route_scores
from rar_lib.traces.synthetic import Synthetic, synthetic
from rar_lib.traces.trace import RouteTrace


@dataclass(frozen=True)
class World:
    """A synthetic batch with everything that a policy looks at.

    Attributes:
        made: the traces and scores.
        seen: what policies look at; P(flip) comes from another batch of the same kind.
        price: `[N, L]` float64, what a flip of the cell costs: swap of its weakest expert.
    """

    made: Synthetic
    seen: Candidates
    price: np.ndarray


def synthetic_world(
    sequences: int = 64,
    length: int = 12,
    *,
    layers: int = 4,
    experts: int = 16,
    top_k: int = 2,
    flip_rate: float = 0.03,
    load_skew: float = 0.5,
    clustering: float = 0.5,
    price_spread: float = 1.0,
    seed: int = 0,
) -> World:
    """Make one.

    Args:
        sequences, length: number and tokens of the sequences.
        layers, experts, top_k, flip_rate, load_skew, clustering, seed: see traces/synthetic.py.
        price_spread: standard deviation of the log of <u, o_e> over the cells (layer, expert); it decides how much there is
            for a score of cells to find.
    """
    sizes = {"layers": layers, "experts": experts, "top_k": top_k}
    made, earlier = (
        synthetic(
            [length] * sequences, flip_rate=flip_rate, load_skew=load_skew, clustering=clustering, seed=s, **sizes
        )
        for s in (seed, seed + 1)
    )
    native, rng = made.native, np.random.default_rng([seed, 2])
    best = np.argsort(-made.scores, -1, kind="stable")[..., :top_k]
    ids = np.where(native.recorded[..., None], native.experts, best)  # the trace holds zeros where there is no route
    chosen = np.take_along_axis(made.scores, ids, -1)
    rest = made.scores.copy()
    np.put_along_axis(rest, ids, -np.inf, -1)
    runner = rest.argmax(-1)
    gates = chosen / chosen.sum(-1, keepdims=True)
    scale = np.exp(price_spread * rng.normal(size=(layers, experts)))
    signal = rng.normal(size=made.scores.shape) * scale  # <u, o_e> of every expert at every token
    a = np.take_along_axis(signal, ids, -1)
    other = np.take_along_axis(signal, runner[..., None], -1)[..., 0]
    gaps = np.maximum(chosen - np.take_along_axis(rest, runner[..., None], -1), 0)  # rounding of the softmax can tie
    mean = (gates * a).sum(-1, keepdims=True)
    arrays = [x.astype(np.float32) for x in (gates, gates * (a - mean), a, other, gaps)]
    signals = RouteSignals("rollout", *arrays)
    swap = route_scores(signals, "swap")
    price = np.take_along_axis(swap, gaps.argmin(-1)[..., None], -1)[..., 0]
    compared = agreement(earlier.rollout, earlier.native)
    assert earlier.native.margins is not None
    flips = FlipModel.empty().seen(earlier.native.margins, compared.flipped, compared.known)
    groups = np.arange(sequences) // 4
    names = [f"prompt-{g}/{i % 4}" for i, g in enumerate(groups)]
    full = RouteTrace(
        native.header, native.experts, native.offsets, native.status, scores=made.scores, margins=native.margins
    )
    score = expert_score(signals, native, "gate", "per_route", groups=groups)
    return World(made, Candidates(made.rollout, names, seed, 0, full, score, signals, flips), price)


def executed(plan: ReplayPlan, trace: RouteTrace, native: RouteTrace, scores: np.ndarray | None) -> np.ndarray:
    """Ids that routers execute under a plan where their live scores are these.

    Args:
        plan: of `trace`.
        trace: the record.
        native: the live choice, of the same tokens; cells without a route count as experts 0.
        scores: `[N, L, E]` live scores; None will do for unit token_layer, whose rows are taken whole.

    Returns:
        `[N, L, K]` int64: for a cell without a planned unit the native ids, in their order.

    Raises:
        ReplayError: without scores for a unit that needs them.
    """
    if scores is None and plan.unit != "token_layer":
        raise ReplayError(f"plan of unit {plan.unit}: expected live scores to fill up its sets, found none")
    out = native.experts.astype(np.int64)
    for layer in range(trace.header.num_layers):
        recorded, live = (torch.from_numpy(t.experts[:, layer].astype(np.int64)) for t in (trace, native))
        recorded = torch.where(torch.from_numpy(trace.recorded[:, layer].copy())[:, None], recorded, -1)
        planned = torch.from_numpy(plan.planned[:, layer])
        ranked = torch.zeros(0) if scores is None else torch.from_numpy(scores[:, layer])
        if plan.bias is None:
            used = resolve(recorded, planned, ranked, live)
        else:
            used = resolve_biased(recorded, planned, ranked, live, torch.from_numpy(plan.bias[layer]))
        out[:, layer] = used.numpy()
    return out


def execute(plan: ReplayPlan, world: World) -> np.ndarray:
    """Executed ids `[N, L, K]` int64 under a plan of the world's rollout, its scores being what they are."""
    return executed(plan, world.made.rollout, world.made.native, world.made.scores)


def plan_row(plan: ReplayPlan, world: World) -> dict[str, float | None]:
    """What a plan does: nominal, binding, forced, fidelity, regret, and the shares of flipped cells and of their price that
    it restores."""
    trace, native = world.made.rollout, world.made.native
    known = trace.recorded & native.recorded
    used = execute(plan, world)
    flipped = known & (np.sort(trace.experts, -1) != np.sort(native.experts, -1)).any(-1)
    restored = flipped & (np.sort(used, -1) == np.sort(trace.experts, -1)).all(-1)
    total = world.price[flipped].sum()
    forced = forced_routers(native.experts, used, known)
    return {
        "nominal": plan.nominal,
        "binding": forced if plan.bias is not None else binding_share(plan.planned, trace.experts, native.experts, known),
        "forced": forced,
        "fidelity": fidelity(trace.experts, used, known),
        "regret": regret(world.made.scores, native.experts.astype(np.int64), used, known),
        "cells restored": float(restored.sum() / flipped.sum()) if flipped.any() else None,
        "price restored": float(world.price[restored].sum() / total) if total > 0 else None,
    }  # fmt: skip


def synthetic_frontier(
    world: World, policies: Sequence[str], budgets: Sequence[str], unit: Unit = "token_layer"
) -> pd.DataFrame:
    """A row a policy and budget: policy, budget, and plan_row.

    Args:
        world: of `synthetic_world`.
        policies: names; those that do not have the unit, or no matched budget, are left out.
        budgets: shares β.
        unit: what is counted and forced.

    Raises:
        ConfigError: for a policy that does not exist, or a budget outside [0, 1].
    """
    rows = []
    for name in policies:
        policy = get_policy(name)
        if unit in policy.units and policy.budget == "matched":
            rows += [
                {
                    "policy": name,
                    "budget": float(as_fraction(b)),
                    **plan_row(make_plan(name, world.seen, unit, b), world),
                }
                for b in budgets
            ]
    return pd.DataFrame(rows)
