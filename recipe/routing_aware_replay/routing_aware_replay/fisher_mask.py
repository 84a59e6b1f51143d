"""Fisher scores of experts, and the mask of recorded routes that they rank.

The squared gradient of the sequence log-likelihood at a router's logit says how much the likelihood moves with that expert's
gate (rar_lib/replay/scores.py). A mask takes the routes of the highest cells (layer, expert) up to a budget; its two controls
take the same number of routes in another order: scores permuted within layers, and lowest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rar_lib.replay.plan import ReplayPlan, Unit
from rar_lib.replay.policies import make_plan
from rar_lib.replay.policy import Candidates
from rar_lib.replay.score_file import load_score, save_score
from rar_lib.replay.scores import ExpertScore, RouteSignals, expert_score
from rar_lib.traces.trace import RouteTrace

__all__ = ["ExpertScore", "RouteSignals", "expert_score", "fisher_mask", "load_score", "save_score"]


def fisher_mask(
    trace: RouteTrace,
    score: ExpertScore,
    uids: Sequence[str],
    budget: float | str,
    unit: Unit = "slot",
    order: Literal["fisher", "permuted_fisher", "inverse_fisher"] = "fisher",
    seed: int = 0,
) -> ReplayPlan:
    """The recorded routes to force.

    Args:
        trace: the record, N tokens in L layers of K slots.
        score: `[L, E]`, of the same layers.
        uids: name of each sequence; keys of ties come from it, so that batch order does not matter.
        budget: share of the recorded units.
        unit: `slot` or `token_layer`.
        order: by score, or a control.
        seed: of the keys.

    Returns:
        A plan with `planned` bool `[N, L, K]` (or `[N, L]`), exactly floor(budget · M + 1/2) true of M recorded units.

    Raises:
        ReplayError: for a score of other layers or experts, or with NaN or negative values.
        ConfigError: for a budget outside [0, 1].
    """
    return make_plan(order, Candidates(trace, uids, seed, score=score), unit, budget)
