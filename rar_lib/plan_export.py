"""A plan for another framework: `rar export PLAN --for verl | nemo-rl`.

What a framework can be told differs, and what it cannot be told is not made up (verl 0.9.1 and NeMo-RL, as read in their code):

- NeMo-RL replays a wire string of ids; a (token, layer) row of -1 in all K slots has no route and stays with the router. That is a plan
  of unit token_layer, exactly. A row of which only some slots are -1 is an error there, so single slots cannot be said.
- verl replays `routed_experts` and builds its own mask, one bool a token for all layers (`build_r3_replay_mask`), though each router
  could take another (`RouterReplay.set_target_indices`). So a plan goes beside the recorded ids, as `replay_mask`, in the jagged rows
  that its trainer V1 carries. verl itself reads no such field: what loads the file must hand each router its layer's column.
- With `native`, the routes of a planning pass with its scores, a plan is resolved: plain ids that either framework replays as they are.
  What the plan leaves to the router is then frozen at the picks of that pass. It is no longer the plan once the weights move.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rar_lib.errors import ConfigError, ReplayError
from rar_lib.metrics.agreement import check_pair
from rar_lib.replay.fixed import executed
from rar_lib.replay.plan import ReplayPlan
from rar_lib.replay.plan_file import find_trace, load_plan
from rar_lib.traces.trace import RouteTrace, Status


@dataclass(frozen=True, eq=False)
class Payload:
    """What is to be written.

    Attributes:
        plan, trace: the plan and its record.
        ids: `[N, L, K]` int64 ids to replay, -1 in every slot of a cell that has none.
        forced: bool, `[N, L]` or `[N, L, K]`, what of `ids` is to be replayed.
        frozen: `[N, L]` bool, cells that take picks of the planning pass.
        facts: what the file says of itself.
    """

    plan: ReplayPlan
    trace: RouteTrace
    ids: np.ndarray
    forced: np.ndarray
    frozen: np.ndarray
    facts: dict[str, Any]

    def rows(self, values: np.ndarray) -> list[np.ndarray]:
        """Values `[N, ...]` of all tokens, cut into those of each sequence."""
        return np.split(values, self.trace.offsets[1:-1])

    def prompts(self) -> np.ndarray | None:
        """`[S]` prompt tokens, up to the first that has a log-prob; None where the trace has no ids or no rollout's log-probs."""
        trace = self.trace
        if trace.token_ids is None or trace.logprobs is None or trace.header.source != "rollout":
            return None
        return np.array([int(np.append(~np.isnan(row), True).argmax()) for row in self.rows(trace.logprobs)])


@dataclass(frozen=True)
class Exported:
    """A file that was written.

    Attributes:
        path: of it.
        facts: what it says of itself.
    """

    path: Path
    facts: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.path}\n{self.facts['says']}"


def export_plan(
    path: str | Path, framework: str, out: str | Path, trace: str | Path | None = None, native: str | Path | None = None
) -> Exported:
    """Write a stored plan for another framework.

    Args:
        path: of the plan (replay/plan_file.py).
        framework: verl or nemo-rl.
        out: folder to write into; the file is `<out>/<framework>/<name of the plan>.mask` or `.ids`, with a suffix of theirs;
            what an earlier export wrote there is replaced.
        trace: file of the record; by default the one beside the plan that the plan names.
        native: trace of the planning pass, with scores where the plan is not of whole sets; the plan is resolved to ids.

    Raises:
        ConfigError: for another framework.
        ReplayError, TraceError: for files that do not belong together, and for what the framework cannot be told.
    """
    if framework not in FRAMEWORKS:
        raise ConfigError(f"for: expected one of {', '.join(FRAMEWORKS)}, found {framework!r}")
    path, target = Path(path), FRAMEWORKS[framework]
    if path.is_dir():
        plans = sorted(str(found) for found in path.glob("**/*-plan.safetensors"))
        told = f"plans in it: {', '.join(plans)}" if plans else "no plans in it"
        raise ReplayError(f"{path}: expected the file of a plan, found a folder ({told})")
    plan = load_plan(path)
    record = find_trace(plan, path) if trace is None else RouteTrace.load(trace)
    record.verify()
    plan.require(record)
    if native is None:
        payload = _told(plan, record)
    else:
        payload = _resolved(plan, record, RouteTrace.load(native), target.keeps_native)
    target.require(payload)
    payload.facts["says"] = f"{framework}: {_says(payload)}{target.note(payload)}"
    file = Path(out) / framework / f"{path.stem}.{payload.facts['form']}{target.suffix}"
    partial = file.with_name(file.name + ".partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        target.write(payload, partial)
        partial.replace(file)
    except OSError as error:
        raise ReplayError(f"export {file}: {error.strerror or error}") from None
    return Exported(file, payload.facts)


# ---------------------------------------------------------------- what is written


def _facts(plan: ReplayPlan, trace: RouteTrace, form: str) -> dict[str, Any]:
    header = trace.header
    return {
        "form": form, "policy": plan.policy, "unit": plan.unit, "seed": plan.seed, "score": plan.score_id,
        "requested": None if plan.requested is None else str(plan.requested), "budget": plan.budget, "valid": plan.valid,
        "trace": plan.trace_digest, "tokens": trace.token_digest, "num_experts": header.num_experts, "top_k": header.top_k,
        "moe_layers": list(header.moe_layers), "frozen_cells": 0, "native": None, "native_versions": None,
    }  # fmt: skip


def _told(plan: ReplayPlan, trace: RouteTrace) -> Payload:
    """Recorded ids and what of them is forced; the router keeps the rest."""
    if plan.unit == "bias":
        raise ReplayError(
            "plan of unit bias: it adds λ to live scores, which no framework is told; --native resolves it to ids"
        )
    none = np.zeros(trace.experts.shape[:2], bool)
    return Payload(plan, trace, trace.ids(), plan.planned, none, _facts(plan, trace, "mask"))


def _resolved(plan: ReplayPlan, trace: RouteTrace, native: RouteTrace, keeps_native: bool) -> Payload:
    """Ids as they would be executed at the scores of the planning pass.

    Args:
        plan, trace: the plan and its record.
        native: the planning pass.
        keeps_native: the framework leaves a cell without a route to its router, so cells that the plan does not touch need
            no ids.
    """
    native.verify()
    check_pair(trace, native)
    if native.scores is None and plan.unit != "token_layer":
        raise ReplayError(
            f"native: expected router scores, by which a plan of unit {plan.unit} is resolved (rar record --scores), found none"
        )
    ids = executed(plan, trace, native, native.scores)
    touched = plan.planned.any(-1) if plan.unit == "slot" else plan.planned
    whole = plan.planned.all(-1) if plan.unit == "slot" else touched
    if plan.unit == "bias":
        whole = np.zeros_like(whole)
    last = np.broadcast_to((trace.status == Status.LAST).reshape(len(ids), -1), whole.shape)
    frozen = ~whole & ~last & (touched if keeps_native else True)
    lost = frozen & ~native.recorded
    if lost.any():
        token, layer = (int(i) for i in np.argwhere(lost)[0])
        raise ReplayError(
            f"native: expected a route at {trace.place_of(token)}, layer {trace.header.moe_layers[layer]}, which the plan leaves to "
            f"the router; found none"
        )
    used = whole | frozen
    versions = None if native.policy_version is None else np.unique(native.policy_version).tolist()
    facts = _facts(plan, trace, "ids") | {
        "frozen_cells": int(frozen.sum()), "native": native.payload_sha256(), "native_versions": versions,
    }  # fmt: skip
    return Payload(plan, trace, np.where(used[..., None], ids, -1), used, frozen, facts)


def _says(payload: Payload) -> str:
    plan, facts = payload.plan, payload.facts
    what = f"{facts['form']} of {plan.policy}, {plan.budget} of {plan.valid} units of unit {plan.unit}; "
    if facts["form"] == "mask":
        return what + "what is not forced stays with the router"
    if not payload.frozen.any():
        return what + "nothing is frozen"
    at = "" if facts["native_versions"] is None else f" (weights {', '.join(map(str, facts['native_versions']))})"
    return what + (
        f"FROZEN: {facts['frozen_cells']} of {int(payload.forced.sum())} cells hold native picks of recording time, trace "
        f"{facts['native'][:12]}…{at}, and are replayed as if they were recorded"
    )


# ---------------------------------------------------------------- verl


def _require_verl(payload: Payload) -> None:
    if payload.trace.header.num_experts > 32768:
        raise ReplayError(
            f"verl: its routes are int16; expected at most 32768 experts, found {payload.trace.header.num_experts}"
        )


def _note_verl(payload: Payload) -> str:
    if payload.facts["form"] == "ids":
        return ""
    if payload.plan.unit == "slot":
        return "; verl's routers mask whole rows: no field of verl takes a mask of single slots, and --native resolves it to ids"
    return (
        "; verl reads no replay_mask of its batch: give each router the column of its layer, RouterReplay.set_target_indices(ids, "
        "replay_mask)"
    )


def _write_verl(payload: Payload, path: Path) -> None:
    """Rows as trainer V1 carries them: jagged `[T, L_moe, K]` int16, zeros where there is no route."""
    trace, prompts = payload.trace, payload.prompts()
    columns: dict[str, list[np.ndarray]] = {
        "routed_experts": payload.rows(np.where(payload.ids >= 0, payload.ids, 0).astype(np.int16)),
        "replay_mask": payload.rows(payload.forced),
    }
    if trace.token_ids is not None:
        columns["input_ids"] = payload.rows(trace.token_ids.astype(np.int64))
    if prompts is not None and trace.logprobs is not None:
        pairs = list(zip(columns["input_ids"], prompts, strict=True))
        columns["prompts"], columns["responses"] = [r[:p] for r, p in pairs], [r[p:] for r, p in pairs]
        sampled = payload.rows((~np.isnan(trace.logprobs)).astype(np.int64))
        columns["response_mask"] = [r[p:] for r, p in zip(sampled, prompts, strict=True)]
    fields = {
        name: torch.nested.as_nested_tensor(
            [torch.from_numpy(np.ascontiguousarray(row)) for row in rows], layout=torch.jagged
        )
        for name, rows in columns.items()
    }
    keys = [str(i) for i in range(trace.num_sequences)]
    torch.save({"tensordict": fields, "keys": keys, "rar_plan": json.dumps(payload.facts)}, path)


# ---------------------------------------------------------------- NeMo-RL


def _require_nemo(payload: Payload) -> None:
    if payload.facts["form"] == "mask" and payload.plan.unit == "slot":
        raise ReplayError(
            "nemo-rl: a plan of unit slot forces single slots, and a route is there whole or not at all; --native resolves it to "
            "ids, which freezes the rest of each set"
        )
    if payload.facts["form"] == "ids" and payload.plan.unit == "token_layer":
        raise ReplayError(
            "nemo-rl: a plan of unit token_layer is told exactly, so nothing is to be resolved; leave --native out"
        )


def _write_nemo(payload: Payload, path: Path) -> None:
    """A line a sequence, with the wire string where a chat answer has it."""
    experts = payload.trace.header.num_experts
    dtype = next(d for d in ("int8", "int16", "int32") if experts - 1 <= np.iinfo(d).max)
    forced = payload.forced.reshape(*payload.ids.shape[:2], -1).all(-1, keepdims=True)
    ids = np.where(forced, payload.ids, -1).astype(np.dtype(dtype).newbyteorder("<"))
    prompts = payload.prompts()
    lines = []
    for i, rows in enumerate(payload.rows(ids)):
        wire = f"nrlre1:{dtype}:{'x'.join(map(str, rows.shape))}:{base64.b64encode(rows.tobytes()).decode()}"
        message: dict[str, Any] = {"role": "assistant", "routed_experts": wire}
        if prompts is not None and payload.trace.token_ids is not None:
            tokens = payload.rows(payload.trace.token_ids)[i].tolist()
            message |= {"prompt_token_ids": tokens[: prompts[i]], "generation_token_ids": tokens[prompts[i] :]}
        line = {"rar_plan": payload.facts, "choices": [{"index": 0, "message": message}]}
        lines.append(json.dumps(line) + "\n")
    path.write_text("".join(lines))


@dataclass(frozen=True)
class Framework:
    """How a framework is told.

    Attributes:
        suffix: of its file.
        keeps_native: a cell without a route stays with its router.
        require: refuses what it cannot be told.
        note: what the printed line adds.
        write: the file.
    """

    suffix: str
    keeps_native: bool
    require: Callable[[Payload], None]
    note: Callable[[Payload], str]
    write: Callable[[Payload, Path], None]


FRAMEWORKS: dict[str, Framework] = {
    "verl": Framework(".pt", False, _require_verl, _note_verl, _write_verl),
    "nemo-rl": Framework(".jsonl", True, _require_nemo, lambda _: "", _write_nemo),
}
