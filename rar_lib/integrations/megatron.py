"""A replay policy on Megatron-Core's own RouterReplay, for trainers that drive it: NeMo-RL, SkyRL and others.

    acting = attach(model, policy)                        # once, after the model is built (moe_enable_routing_replay)
    routes = [acting.plan(r, known) for r, known in ...]  # a sequence each, before the trainer packs and shards them
    ...                                                   # the trainer's own set_target_indices, forward, backward, clear
    acting.take_metrics()                                 # after a pass

A plan is -1 in every slot that is not forced, -2 in all slots where there is no route. The trainer carries it as it carries routes (in a signed type), and its calls
stay as they are: set_replay_data or set_target_indices, the actions REPLAY_FORWARD and REPLAY_BACKWARD, clear_indices.
NeMo-RL marks missing routes by a row of -1, which plan() takes; its own fallback is not reached, and its optional check of
routes (NRL_ROUTER_REPLAY_VALIDATE) refuses plans that hold -2 or single slots. SkyRL pads with the experts 0 to K-1, which look
like routes: pad planned routes with -2 (-1 is counted as a recorded cell that was left native).

What replay means for losses and counters beside the pick: engines/megatron_router.py.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

import torch

from rar_lib.engines.megatron_cpu import import_megatron
from rar_lib.engines.megatron_router import refuse_unreplayable
from rar_lib.errors import EngineError, ReplayError
from rar_lib.integrations.pass_counts import pass_metrics
from rar_lib.integrations.policy_file import ReplayPolicy
from rar_lib.integrations.routers import counts_of, describe, take_routers
from rar_lib.integrations.sequences import PlanCounts, SequencePlanner

SERIES = "0.16."
SIGNATURES: dict[str, tuple[str, ...]] = {
    "set_target_indices": ("self", "topk_indices"),
    "get_replay_topk": ("self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk"),
    "clear_indices": ("self",),
    "set_router_replay_action": ("self", "router_replay_action"),
}


def require_known() -> None:
    """Refuse a Megatron-Core whose RouterReplay is not the one that this module knows.

    Raises:
        EngineError: if it is not installed, of another series, or has other signatures.
    """
    import_megatron()
    from megatron.core.transformer.moe.router_replay import RouterReplay

    found = importlib.metadata.version("megatron-core")
    if not found.startswith(SERIES):
        raise EngineError(f"expected Megatron-Core {SERIES}x, found {found}")
    for name, expected in SIGNATURES.items():
        parameters = tuple(inspect.signature(getattr(RouterReplay, name)).parameters)
        # NeMo-RL wraps get_replay_topk and names the object replay_instance
        if parameters[1:] != expected[1:]:
            raise EngineError(
                f"RouterReplay.{name}: expected the parameters {', '.join(expected)}, found {', '.join(parameters)}"
            )


class Attached:
    """A policy on one model; made by `attach`.

    Attributes:
        policy: what is forced.
        states: of its routers on this rank.
    """

    def __init__(self, model: Any, config: Any, policy: ReplayPolicy) -> None:
        refuse_unreplayable(config)
        routers = describe(config)
        self.policy, self._planner = policy, SequencePlanner(policy, routers)
        self.states = take_routers(model, config, self, policy.replay)
        self._local = [routers.moe_layers.index(state.layer) for state in self.states]
        self._has_planned = False

    def plan(self, routes: torch.Tensor, known: torch.Tensor | None = None) -> torch.Tensor:
        """The routes of one sequence with -1 in every slot that is not to be forced, and -2 where there is no route: `[T, L, K]`.

        Args:
            routes: `[T, L, K]` ids, L all transformer layers or the MoE layers; the rows of the forward, T or T-1.
            known: bool `[T]`, rows that may replay; all by default.

        Raises:
            ReplayError: see SequencePlanner.plan.
        """
        mask = torch.ones(len(routes), dtype=torch.bool) if known is None else known
        self._has_planned = True
        return self._planner.plan(routes, mask)

    def require_planned(self) -> None:
        """Routes without a plan would all be forced, whatever the policy.

        Raises:
            ReplayError: if none was planned yet.
        """
        if not self._has_planned:
            raise ReplayError("targets were set before any routes were planned; pass routes through plan() first")

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call (integrations/pass_counts.py), without a prefix.

        Raises:
            ReplayError: if a router was given targets and did not ask for them.
        """
        found = pass_metrics(self._planner.counts, self._local, counts_of(self.states))
        self._planner.counts = PlanCounts.empty(len(self._planner.routers.moe_layers))
        for state in self.states:
            state.begin()
        return found


def attach(model: Any, policy: ReplayPolicy, config: Any = None) -> Attached:
    """Put a policy on the routers of a Megatron model.

    Args:
        model: a module, or a list of its pipeline chunks, wrapped or not.
        policy: from a policy file.
        config: its TransformerConfig; the model's own by default.

    Raises:
        EngineError: for another Megatron-Core.
        ReplayError, ConfigError: for routers that cannot be replayed, or a policy that cannot be had here.
    """
    require_known()
    if config is None:
        config = (model[0] if isinstance(model, list | tuple) else model).config
    return Attached(model, config, policy)
