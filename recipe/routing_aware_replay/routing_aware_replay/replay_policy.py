"""The arms of the recipe, and the policy file by which a trainer is told one.

An arm is a JSON file in policies/. All partial arms have one unit and one budget, so that they differ in the choice alone; the
test of this folder holds them to it.
"""

from __future__ import annotations

from pathlib import Path

from rar_lib.integrations.policy_file import PolicyFile, ReplayPolicy, load_policy
from rar_lib.replay.plan import ReplayPlan
from rar_lib.replay.policies import make_plan
from rar_lib.replay.policy import Candidates

__all__ = ["ARMS", "POLICIES", "PolicyFile", "ReplayPolicy", "arm_file", "load_policy", "plan_for"]

POLICIES = Path(__file__).resolve().parents[1] / "policies"
ARMS = ("none", "r2", "r3", "fisher", "uniform", "random")


def arm_file(arm: str) -> Path:
    """The policy file of an arm."""
    return POLICIES / f"{arm}.json"


def plan_for(replay: PolicyFile, seen: Candidates) -> ReplayPlan | None:
    """The plan of a policy file for one batch, or None where it forces nothing.

    Args:
        replay: as it was read.
        seen: the record and what the policy looks at; its seed is that of the file.

    Raises:
        ReplayError: if something that the policy needs is missing.
    """
    if replay.arm == "none":
        return None
    return make_plan(replay.policy, seen, replay.unit, replay.budget)
