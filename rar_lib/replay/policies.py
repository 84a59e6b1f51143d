"""Policies: which of the recorded routes are forced.

Most policies give every unit a priority, smaller first; budget, ties and nesting are the same for all (budget.py). A new one
is a small class and a line in POLICIES:

    class Early:
        units, needs, budget, compares = ("token_layer", "slot"), (), "matched", False
        def priority(self, seen: Candidates, unit: Unit) -> np.ndarray:
            position = np.arange(seen.trace.num_tokens) - np.repeat(seen.trace.offsets[:-1], seen.trace.lengths)
            return spread(position[:, None] + 0.0 * seen.trace.recorded, seen, unit)

`needs` names what must be looked at before (policy.py); the cost of that belongs to the policy. The classes are in rules.py
(no scores) and rules_scored.py.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

from rar_lib.errors import ConfigError
from rar_lib.replay.budget import as_fraction, integer_budget, take_smallest, unit_keys
from rar_lib.replay.plan import ReplayPlan, Unit
from rar_lib.replay.policy import Candidates, Free, Matched, Policy, valid_units
from rar_lib.replay.rules import Disagree, Frequency, Full, Margin, RandomCell, RandomRoute, Uniform
from rar_lib.replay.rules_scored import Bias, Fisher, Swap, Threshold

POLICIES: dict[str, Callable[[], Any]] = {
    "full": Full,
    "uniform": Uniform,
    "random_route": RandomRoute,
    "random_cell": lambda: RandomCell(resampled=False),
    "random_cell_resampled": lambda: RandomCell(resampled=True),
    "margin": Margin,
    "frequency": Frequency,
    "disagree": Disagree,
    "fisher": Fisher,
    "permuted_fisher": lambda: Fisher("permuted"),
    "inverse_fisher": lambda: Fisher("inverse"),
    "swap": Swap,
    "threshold": Threshold,
    "bias": Bias,
}


def get_policy(name: str) -> Policy:
    """A policy by name.

    Raises:
        ConfigError: names the policies that there are.
    """
    if name not in POLICIES:
        raise ConfigError(f"router_replay.policy: expected one of {', '.join(POLICIES)}, found {name!r}")
    return POLICIES[name]()


def require_policy(name: str, unit: str, budget: float | str | Fraction | None, ratio: float | None = None) -> None:
    """Refuse what does not go together.

    Args:
        name: of the policy.
        unit: what is counted and forced.
        budget: β, a share; None for a policy without one.
        ratio: of the policy threshold, and None for any other.

    Raises:
        ConfigError: for an unknown policy, a unit that it does not have, or a budget or ratio that is missing, needless or
            no share.
    """
    policy = get_policy(name)
    if unit not in policy.units:
        raise ConfigError(f"router_replay.unit: policy {name} exists in {' and '.join(policy.units)}, found {unit!r}")
    if policy.budget != "none" and budget is None:
        raise ConfigError(f"router_replay.budget: policy {name} needs a share from 0 to 1, found none")
    if policy.budget == "none" and budget is not None:
        raise ConfigError(f"router_replay.budget: policy {name} has no budget, found {budget!r}")
    if (name == "threshold") != (ratio is not None):
        raise ConfigError(f"router_replay.ratio: goes with policy threshold and only there; found {ratio!r} for {name}")
    if budget is not None:
        as_fraction(budget)


def make_plan(name: str, seen: Candidates, unit: Unit, budget: float | str | Fraction | None = None) -> ReplayPlan:
    """The plan of a policy for one record.

    Args:
        name: of the policy.
        seen: what it looks at.
        unit: what is counted and forced.
        budget: β; None for a policy without one.

    Returns:
        For a matched policy, a plan with exactly floor(β M + 1/2) units.

    Raises:
        ConfigError: see require_policy.
        ReplayError: if something that the policy needs is missing, or holds NaN or negative values.
    """
    require_policy(name, unit, budget, seen.ratio)
    policy, trace = get_policy(name), seen.trace
    share = None if budget is None else as_fraction(budget)
    if policy.budget != "matched":
        return cast(Free, policy).plan(seen, unit, share)
    assert share is not None
    valid = valid_units(trace, unit)
    total = int(valid.sum())
    keys = unit_keys(trace, seen.uids, seen.seed, f"tie/{name}", unit == "slot")
    priority = cast(Matched, policy).priority(seen, unit)
    planned = take_smallest(priority, keys, valid, integer_budget(share, total))
    score = seen.score.id if seen.score is not None and "score" in policy.needs else None
    return ReplayPlan(unit, planned, trace.payload_sha256(), name, seen.seed, share, total, score)
