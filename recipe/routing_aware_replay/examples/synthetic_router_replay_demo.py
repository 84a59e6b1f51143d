"""All arms at one budget on made-up routes: what each forces, and how far a drifted router then agrees with the record.

    python recipe/routing_aware_replay/examples/synthetic_router_replay_demo.py

A rollout's routes and the trainer's scores behind the same tokens are drawn so that a few per cent of the decisions differ.
Then the trainer's router drifts (noise on its logits, as an update would move it) and is run under each mask. No engine, no
GPU, a few seconds. The scores are synthetic as well: the table shows what the masks are, not which of them trains better.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(RECIPE), str(RECIPE.parents[1])]  # runs from a checkout, installed or not

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
from routing_aware_replay.diagnostics import agreement, diagnose  # noqa: E402
from routing_aware_replay.replay_policy import ARMS, PolicyFile, arm_file, plan_for  # noqa: E402

from rar_lib.replay.fixed import executed, synthetic_world  # noqa: E402
from rar_lib.traces.trace import RouteTrace  # noqa: E402


def drifted(native: RouteTrace, scores: np.ndarray, size: float, seed: int) -> tuple[RouteTrace, np.ndarray]:
    """The router after an update: its log-scores plus noise, its choice and its scores `[N, L, E]`.

    Args:
        native, scores: before.
        size: standard deviation of the noise on the logits.
        seed: of the noise.
    """
    logits = np.log(scores) + size * np.random.default_rng(seed).normal(size=scores.shape)
    moved = np.exp(logits - logits.max(-1, keepdims=True))
    moved = (moved / moved.sum(-1, keepdims=True)).astype(np.float32)
    best = np.argsort(-moved, -1, kind="stable")[..., : native.header.top_k]
    ids = np.where(native.recorded[..., None], best, 0).astype(native.experts.dtype)
    return replace(native, experts=ids, scores=None, margins=None), moved


def table(drift: float = 0.1, seed: int = 0) -> pd.DataFrame:
    """A row an arm: budget that was asked for and met, slots kept, and agreement with the record after the drift."""
    world = synthetic_world(64, 24, layers=8, experts=32, top_k=4, flip_rate=0.04, seed=seed)
    record = world.made.rollout
    live, scores = drifted(world.made.native, world.made.scores, drift, seed)
    rows = []
    for arm in ARMS:
        policy = PolicyFile.model_validate_json(arm_file(arm).read_text())
        # R2 replays the trainer's own record, R3 the rollout's
        source = world.made.native if policy.arm == "R2" else record
        plan = plan_for(policy, replace(world.seen, trace=source, seed=policy.seed))
        told = diagnose(plan, source, live, scores, mode=policy.arm)
        ids = live.experts if plan is None else executed(plan, source, live, scores).astype(live.experts.dtype)
        after = replace(live, experts=np.where(live.recorded[..., None], ids, 0).astype(live.experts.dtype))
        found = agreement(record, after).scalars()
        rows.append(
            {
                "arm": arm, "asked": told.requested or ("all" if plan else "0"), "realised": told.nominal, "units": told.budget,
                "kept slots": 0 if plan is None else int(plan.planned.sum()) * (1 if plan.unit == "slot" else record.header.top_k),
                "forced routers": told.update.forced_routers_native_local, "overlap": found["overlap"],
                "router flip": found["router_flip"],
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


if __name__ == "__main__":
    print(table().to_string(index=False, float_format=lambda x: f"{x:.4f}"))
