"""Replay objects of a Megatron model that force part of a record, made from the trainer's own.

Megatron-Core and verl each have a RouterReplay: an object a router, with targets, an action (record, replay forward, replay
backward) and a queue of targets that activation recompute takes from. Their forward forces whole rows. Here the object of
each router becomes an instance of a subclass whose forward reads -1 in a target as "not forced" (NO_ROUTE: nor recorded) and
asks the resolver; the ids that were executed then take the target's place in the queue, so that recompute gets exactly these, native ones
included. Everything else, the process-wide list and the other models' objects too, stays the trainer's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from rar_lib.errors import ReplayError
from rar_lib.integrations.sequences import NO_ROUTE, Routers
from rar_lib.replay.counts import PassCounts
from rar_lib.replay.resolve import resolve


def _zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


@dataclass
class RouterState:
    """What a router of a replaying model knows and counts.

    Attributes:
        layer: transformer layer number, from 0.
        owner: what attached it; a trainer's hook finds its planner there.
        by_slot: single experts are forced, and counted; else whole sets.
        ratio: of policy threshold; None for others.
        logits: the router ranks logits, so that a ratio is taken of their softmax.
        targets, forwards: targets given, and forwards that asked for them, since `begin`.
        used: `[rows, K]` int64, ids of the last pick, until they are compared with what the experts got.
        forced, changed, cells, differing: int64 scalars on the routers' device, since `begin`: units forced, cells whose executed set is
            not the native one, cells with a route, rows whose experts are not those that were resolved.
        compared: rows that were compared.
    """

    layer: int
    owner: Any
    by_slot: bool
    ratio: float | None
    logits: bool
    targets: int = 0
    forwards: int = 0
    used: torch.Tensor | None = None
    forced: torch.Tensor = field(default_factory=_zero)
    changed: torch.Tensor = field(default_factory=_zero)
    cells: torch.Tensor = field(default_factory=_zero)
    differing: torch.Tensor = field(default_factory=_zero)
    compared: int = 0

    def begin(self) -> None:
        """Forget what was counted."""
        self.targets = self.forwards = self.compared = 0
        self.used = None
        self.forced, self.changed, self.cells, self.differing = _zero(), _zero(), _zero(), _zero()

    def add(self, forced: torch.Tensor, changed: torch.Tensor, cells: torch.Tensor) -> None:
        """Count one forward, in scalars; nothing is read from the device here."""
        self.forced = self.forced.to(forced.device) + forced
        self.changed = self.changed.to(changed.device) + changed
        self.cells = self.cells.to(cells.device) + cells

    def planned(self, target: torch.Tensor, scores: torch.Tensor, native: torch.Tensor) -> torch.Tensor:
        """bool `[rows, K]`: which slots of a target are forced.

        Args:
            target: `[rows, K]` ids, negative where nothing is planned.
            scores: `[rows, E]`, what the router ranks.
            native: `[rows, K]`, its own choice.
        """
        keep = target >= 0
        if self.ratio is None:
            return keep
        ranked = torch.softmax(scores, -1, dtype=torch.float32) if self.logits else scores
        weakest = ranked.gather(1, native).amin(-1, keepdim=True)
        return keep & (ranked.gather(1, target.clamp_min(0)) >= self.ratio * weakest)


class PlannedReplay:
    """Mixed into a trainer's RouterReplay; `rar` is its state."""

    rar: RouterState

    def set_target_indices(self, topk_indices: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """The trainer's own, of targets `[rows, K]`; counted.

        Raises:
            ReplayError: if the targets before were not asked for, or none was planned.
        """
        if self.rar.targets != self.rar.forwards:
            raise ReplayError(
                f"layer {self.rar.layer}: new targets before the router asked for those before; found "
                f"{self.rar.targets} targets and {self.rar.forwards} forwards, so this router does not replay"
            )
        self.rar.owner.require_planned()
        super().set_target_indices(topk_indices, *args, **kwargs)  # type: ignore[misc]
        self.rar.targets += 1

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, ids), each `[rows, K]`, of scores `[rows, E]`: the trainer's own but for a forward with targets.

        Raises:
            ReplayError: if the targets are for another number of rows or slots, or were replayed before.
        """
        base: Any = super()
        mine: Any = self
        state, action = self.rar, getattr(mine.router_replay_action, "name", None)
        if action != "REPLAY_FORWARD" or mine.target_topk_idx is None:
            values, ids = base.get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
            state.used = ids.detach() if action == "REPLAY_BACKWARD" else None
            return values, ids
        _, native = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        target = mine.target_topk_idx.to(scores.device, torch.int64)
        mask = getattr(mine, "target_replay_mask", None)
        rows = (
            target.new_ones(len(target), dtype=torch.bool)
            if mask is None
            else mask.to(scores.device).reshape(-1).bool()
        )
        if target.shape != native.shape or len(rows) != len(native):
            raise ReplayError(
                f"layer {state.layer}: expected targets for {tuple(native.shape)} rows and slots, found "
                f"{tuple(target.shape)} and a mask of {len(rows)}"
            )
        if state.forwards >= state.targets:
            raise ReplayError(f"layer {state.layer}: a second forward on targets that were already replayed")
        target = torch.where(rows[:, None], target, NO_ROUTE)
        keep = state.planned(target, scores.detach(), native)
        used = resolve(target, keep, scores, native)
        mine.replay_backward_list[-1] = used
        if hasattr(mine, "replay_backward_mask_list"):
            mine.replay_backward_mask_list[-1] = None
        state.forwards += 1
        state.used = used
        same = (used.unsqueeze(-1) == native.unsqueeze(-2)).sum((-1, -2)) == topk
        state.add((keep if state.by_slot else keep.all(-1)).sum(), (~same).sum(), (target != NO_ROUTE).any(-1).sum())
        return scores.gather(1, used), used


@functools.cache
def _planned_class(base: type) -> type:
    return type(f"Planned{base.__name__}", (PlannedReplay, base), {})


def _watch(router: Any, _args: Any, output: Any) -> None:
    """Compare what the router hands to its experts with what was resolved, in a forward and in its recompute."""
    state: RouterState = router.router_replay.rar
    if state.used is None:
        return
    routing_map = output[1]
    same = routing_map.gather(1, state.used).all(-1) & (routing_map.sum(-1) == state.used.shape[1])
    state.compared += len(same)
    state.differing = state.differing.to(same.device) + (~same).sum()
    state.used = None


def decoder_routers(model: Any) -> Iterator[Any]:
    """Routers of the decoder that carry a replay object; `model` is a module or its pipeline chunks.

    Layers for multi-token prediction count their layers anew and no record speaks of them, so only `decoder` is looked at.
    """
    for chunk in model if isinstance(model, list | tuple) else [model]:
        inner: Any = chunk
        while not hasattr(inner, "decoder") and isinstance(getattr(inner, "module", None), torch.nn.Module):
            inner = inner.module
        for module in getattr(inner, "decoder", inner).modules():
            if getattr(module, "router_replay", None) is not None and getattr(module, "layer_number", None) is not None:
                yield module


def describe(config: Any) -> Routers:
    """The routers of a Megatron TransformerConfig."""
    every = config.moe_layer_freq
    pattern = [int(i % every == 0) for i in range(config.num_layers)] if isinstance(every, int) else list(every)
    layers = tuple(i for i, moe in enumerate(pattern) if moe)
    return Routers(config.num_moe_experts, config.moe_router_topk, layers, config.num_layers)


def take_routers(model: Any, config: Any, owner: Any, replay: Any) -> list[RouterState]:
    """Let the replay objects of a model force parts of a record.

    Args:
        model: a module or its pipeline chunks, built with the trainer's replay switched on.
        config: its TransformerConfig.
        owner: has `require_planned()`, which is called before targets are taken.
        replay: the RouterReplayConfig.

    Raises:
        ReplayError: if no router has a replay object, one was taken before, or single experts are to be forced where
            routers choose within groups.
    """
    modules = list(decoder_routers(model))
    if not modules:
        raise ReplayError("found no router with a replay object; the trainer's router replay is not switched on")
    if replay.unit == "slot" and replay.arm != "none" and (config.moe_router_num_groups or 1) > 1:
        raise ReplayError(
            f"unit slot: routers choose within {config.moe_router_num_groups} groups of experts, which single experts "
            "would leave; use unit token_layer"
        )
    logits = config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax
    states = []
    for module in modules:
        replayed: Any = module.router_replay
        if isinstance(replayed, PlannedReplay):
            raise ReplayError(f"layer {module.layer_number - 1}: its replay object carries a policy already")
        base: Any = type(replayed)
        replayed.__class__ = _planned_class(base)
        replayed.rar = RouterState(
            module.layer_number - 1, owner, replay.unit == "slot" and replay.arm != "none",
            replay.ratio if replay.arm != "none" else None, logits,
        )  # fmt: skip
        module.register_forward_hook(_watch)
        states.append(replayed.rar)
    return states


def counts_of(states: list[RouterState]) -> PassCounts:
    """What the routers counted since `begin`.

    Raises:
        ReplayError: if a router was given targets and never asked for them: it does not replay.
    """
    deaf = [state.layer for state in states if state.targets != state.forwards]
    if deaf:
        raise ReplayError(f"layers {deaf} were given routes and did not ask for them; replay is not live there")
    total = PassCounts()
    for s in states:
        total += PassCounts(int(s.forced), int(s.changed), s.compared, int(s.differing), int(s.cells), regret=None)
    return total
