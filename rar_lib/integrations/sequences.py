"""Plans in a trainer that shows one micro-batch at a time: each sequence is planned by itself.

Another trainer packs, shards and orders its batches as it likes, and not the same way in the old-log-prob pass and in an
update. A plan that must be the same in all of them can depend on nothing but the sequence: its recorded routes, which name
it, and a seed. So the share β is met in every sequence, B = floor(β M + 1/2) of its M recorded units, where run_job meets
it once over a batch. A plan is written into the routes themselves: -1 in every slot that is not forced, and NO_ROUTE where
none was recorded, so that the trainer's own packing carries it to the routers.

What can be had:
    full, uniform, random_route, random_cell, fisher, permuted_fisher, inverse_fisher    share met in each sequence
    threshold                                                   decided in each forward from the live scores, as published
What cannot, and is refused by name: REFUSED.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rar_lib.errors import ConfigError, ReplayError
from rar_lib.integrations.policy_file import ReplayPolicy
from rar_lib.replay.plan import ReplayPlan, full_plan
from rar_lib.replay.policies import make_plan
from rar_lib.replay.policy import Candidates
from rar_lib.traces.header import Status, TraceHeader, id_dtype
from rar_lib.traces.trace import RouteTrace

NO_ROUTE = -2  # in all slots of a cell; what is not forced there is no choice of the plan, and counted apart

_NO_PASS = "it looks at a forward without replay at the weights that sampled, which this trainer does not make"
REFUSED = {
    "margin": _NO_PASS,
    "disagree": _NO_PASS,
    "swap": _NO_PASS,
    "bias": _NO_PASS,
    "frequency": "it counts the use of cells over the whole batch, and only a micro-batch is seen",
    "random_cell_resampled": "it draws anew for each batch, and the number of the batch is not known",
}


def require_available(policy: ReplayPolicy) -> None:
    """Refuse a policy that a single sequence does not suffice for.

    Raises:
        ConfigError: names the policy and the reason.
    """
    if policy.replay.arm != "none" and policy.replay.policy in REFUSED:
        raise ConfigError(
            f"policy {policy.replay.policy} cannot be had inside another trainer: {REFUSED[policy.replay.policy]}"
        )


@dataclass(frozen=True)
class Routers:
    """What the routers of a model are like.

    Attributes:
        num_experts, top_k: E and K.
        moe_layers: transformer layer numbers (from 0) of all MoE layers of the model, on whatever rank they lie.
        num_layers: all transformer layers.
    """

    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]
    num_layers: int

    def columns(self, axis: int) -> Sequence[int]:
        """Where the MoE layers lie on a layer axis of that length.

        Raises:
            ReplayError: if it is neither that of all layers nor that of the MoE layers.
        """
        if axis == self.num_layers:
            return self.moe_layers
        if axis == len(self.moe_layers):
            return range(axis)
        raise ReplayError(
            f"routes: expected {self.num_layers} layers, or the {len(self.moe_layers)} MoE layers {self.moe_layers}, "
            f"found {axis}"
        )


@dataclass
class PlanCounts:
    """What was planned, summed over sequences; `[L]` int64 each, one a MoE layer.

    Attributes:
        expected: cells (token, layer) that the trainer asks to replay.
        recorded: those of them that have a route.
        valid: units of the policy in them, M.
        planned: units that are forced.
    """

    expected: np.ndarray
    recorded: np.ndarray
    valid: np.ndarray
    planned: np.ndarray

    @classmethod
    def empty(cls, layers: int) -> PlanCounts:
        """Zeros."""
        return cls(*(np.zeros(layers, np.int64) for _ in range(4)))


class SequencePlanner:
    """Plans sequences under a policy.

    Args:
        policy: what to force.
        routers: of the model that replays.

    Raises:
        ConfigError: for a policy that cannot be had here, or scores of another model.
    """

    def __init__(self, policy: ReplayPolicy, routers: Routers) -> None:
        require_available(policy)
        self.policy, self.routers = policy, routers
        if policy.stored is not None:
            expected = (routers.moe_layers, (len(routers.moe_layers), routers.num_experts))
            found = (policy.stored.moe_layers, policy.stored.score.values.shape)
            if found != expected:
                raise ConfigError(
                    f"scores: expected MoE layers {expected[0]} and shape {expected[1]} (the model's), found {found[0]} "
                    f"and {found[1]}"
                )
        self._header = TraceHeader(
            num_experts=routers.num_experts, top_k=routers.top_k, moe_layers=routers.moe_layers, source="rollout"
        )
        self.counts = PlanCounts.empty(len(routers.moe_layers))

    def plan(self, routes: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """The routes of one sequence with -1 in every slot that is not to be forced, and NO_ROUTE in cells without a route.

        Args:
            routes: `[T, L, K]` ids of any integer type, L all transformer layers or the MoE layers. A cell of -1, or of
                zeros where K > 1, holds no route: it stays native and is counted as missing.
            known: bool `[T]`, the rows that the trainer asks to replay; the others stay native.

        Returns:
            `[T, L, K]` int16 (int32 where ids need it), on the device of `routes`.

        Raises:
            ReplayError: for a wrong shape, an id out of range, or an expert twice in a row; names token and layer.
        """
        columns = list(self.routers.columns(routes.shape[1]))
        trace = self._trace(routes[:, columns].cpu().numpy(), known.cpu().numpy())
        plan = self._plan(trace)
        kept = plan.planned if plan.unit == "slot" else plan.planned[..., None]
        dtype = np.int16 if self.routers.num_experts <= np.iinfo(np.int16).max else np.int32
        out = np.full(routes.shape, NO_ROUTE, dtype)
        native = np.where(trace.recorded, dtype(-1), dtype(NO_ROUTE))[..., None]
        out[:, columns] = np.where(kept, trace.experts.astype(dtype), native)
        self._count(trace, plan, known.cpu().numpy())
        return torch.from_numpy(out).to(routes.device)

    def _trace(self, routes: np.ndarray, known: np.ndarray) -> RouteTrace:
        k, layers = self.routers.top_k, self.routers.moe_layers
        if routes.shape != (len(known), len(layers), k):
            raise ReplayError(
                f"routes: expected {(len(known), len(layers), k)} (tokens, layers, K), found {routes.shape}"
            )
        wide = routes.astype(np.int64)
        empty = (wide == -1).all(-1) | ((wide == 0).all(-1) & (k > 1))
        recorded = known[:, None] & ~empty
        ordered = np.sort(wide, -1)
        for what, bad in (
            (
                f"ids from 0 to {self.routers.num_experts - 1}",
                ((wide < 0) | (wide >= self.routers.num_experts)).any(-1),
            ),
            (f"{k} different experts", (ordered[..., 1:] == ordered[..., :-1]).any(-1)),
        ):
            wrong = np.argwhere(bad & recorded)
            if len(wrong):
                token, layer = wrong[0]
                raise ReplayError(
                    f"routes: expected {what}, found {wide[token, layer].tolist()} at token {token}, layer {layers[layer]}"
                )
        status = np.where(recorded, Status.RECORDED, Status.MISSING).astype(np.uint8)
        experts = np.where(recorded[..., None], wide, 0).astype(id_dtype(self.routers.num_experts))
        return RouteTrace(self._header, experts, np.array([0, len(known)], np.int64), status)

    def _plan(self, trace: RouteTrace) -> ReplayPlan:
        replay = self.policy.replay
        unit = "token_layer" if replay.arm == "none" else replay.unit
        if replay.arm == "none" or replay.policy == "threshold":
            whole = full_plan(trace, unit)
            return whole if replay.arm != "none" else _nothing(whole)
        digest = hashlib.blake2b(trace.experts.tobytes() + trace.status.tobytes(), digest_size=16).hexdigest()
        # uniform rounds cells up by a number that is drawn once a batch; here every sequence is a batch of its own
        batch = int(digest[:15], 16) if replay.policy == "uniform" else 0
        score = None if self.policy.stored is None else self.policy.stored.score
        seen = Candidates(trace, [digest], replay.seed, batch, score=score)
        return make_plan(replay.policy, seen, unit, replay.budget)

    def _count(self, trace: RouteTrace, plan: ReplayPlan, known: np.ndarray) -> None:
        per_cell = self.routers.top_k if plan.unit == "slot" else 1
        recorded = trace.recorded.sum(0)
        self.counts.expected += int(known.sum())
        self.counts.recorded += recorded
        self.counts.valid += recorded * per_cell
        self.counts.planned += plan.planned.sum(0) if plan.planned.ndim == 2 else plan.planned.sum((0, 2))


def _nothing(plan: ReplayPlan) -> ReplayPlan:
    return ReplayPlan(plan.unit, np.zeros_like(plan.planned), plan.trace_digest, "none", 0, None, plan.valid)
