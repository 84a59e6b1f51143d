"""verl: `tq_batch.pt` of trainer V1, and `gen_batch.dp` of trainer V0.

- V1: `torch.save` of `{tensordict, tags, keys, global_steps}`, one row a trajectory, not padded: `prompts`, `responses`, `input_ids`,
  `response_mask` and `rollout_log_probs` over the response, `routed_experts [T, L, K]`, int16 (int64 up to 0.9.0). The last row, and
  after several turns more of them, is zeros. L is all layers under R3, MoE layers where R2's own recording was kept.
- V0: a pickle of `DataProto`, so it needs `allow_pickle=True`; verl is not imported. Padded to `[B, P + R, L, K]`, prompts on the
  left, responses on the right; `attention_mask` says which positions are tokens, and rows follow them.
Weight versions are known where a trajectory's tags say that it was sampled within one step.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.verdicts import Verdict, verdict
from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.dump import Dump, Sample, at_the_end, field_of, integers, numbers, routes
from rar_lib.traces.wire.pickles import Inert, load_torch
from rar_lib.traces.wire.tensordicts import Column, columns, row


def _claims_v1(content: Content) -> str | None:
    value = content.value if content.kind == "torch" else None
    if isinstance(value, dict) and "tensordict" in value and ("keys" in value or "global_steps" in value):
        return "a tensordict with keys"
    return None


def _read_v1(content: Content) -> Dump:
    fields = columns("tensordict", content.value["tensordict"])
    count = len(field_of("tensordict", fields, "responses"))
    keys, tags = content.value.get("keys"), content.value.get("tags")
    samples, notes = [], list[Verdict]()
    for i in range(count):
        name = f"{i} ({keys[i]})" if isinstance(keys, list) and i < len(keys) else f"{i}"
        where = f"trajectory {name}"
        prompt = integers(f"{where}: prompts", row(where, field_of("tensordict", fields, "prompts"), i))
        answer = integers(f"{where}: responses", row(where, fields["responses"], i))
        ids = np.concatenate([prompt, answer]).astype(np.int64)
        mask = np.zeros(len(ids), bool)
        mask[len(prompt) :] = True
        if "response_mask" in fields:
            inside = integers(f"{where}: response_mask", row(where, fields["response_mask"], i))
            mask[len(prompt) :] = _fits(f"{where}: response_mask", inside, len(answer)) > 0
        logprobs = {}
        if "rollout_log_probs" in fields:
            values = numbers(f"{where}: rollout_log_probs", row(where, fields["rollout_log_probs"], i))
            logprobs["rollout"] = at_the_end(len(ids), _fits(f"{where}: rollout_log_probs", values, len(answer)))
        experts = None
        if "routed_experts" in fields:
            routed = row(where, fields["routed_experts"], i)
            experts = routes(f"{where}: routed_experts", routed)
        versions = _versions(tags, i, name, len(ids), notes)
        samples.append(
            Sample(
                where,
                len(ids),
                experts,
                token_ids=ids,
                prompt=len(prompt),
                response_mask=mask,
                logprobs=logprobs,
                versions=versions,
            )
        )
    model = content.options.model
    depth = {s.experts.shape[1] for s in samples if s.experts is not None}
    by_trainer = model is not None and depth == {len(model.moe_layers)} and depth != {model.num_layers}
    layout = "trainer V1, jagged rows, last row zero" + (
        ", MoE layers: recorded by the trainer (R2)" if by_trainer else ""
    )
    return Dump(
        "verl", layout, str(content.path), tuple(samples), source="old" if by_trainer else "rollout", notes=tuple(notes)
    )


def _fits(where: str, values: np.ndarray, length: int) -> np.ndarray:
    if len(values) != length:
        raise TraceError(f"{where}: expected {length} values, one a response token, found {len(values)}")
    return values


def _versions(tags: Any, i: int, name: str, tokens: int, notes: list[Verdict]) -> np.ndarray | None:
    tag = tags[i] if isinstance(tags, list) and i < len(tags) else None
    if not isinstance(tag, Mapping):
        return None
    first, last = tag.get("min_global_steps"), tag.get("max_global_steps")
    if not isinstance(first, int) or not isinstance(last, int):
        return None
    if first != last:
        seen = f"sampled from step {first} to {last}; which token is of which is not told"
        notes.append(verdict("VERSION_MIXED", f"trajectory {name}", seen, samples=(i,)))
        return None
    return np.full(tokens, first, np.int64)


# ---------------------------------------------------------------- trainer V0


def proto_state(content: Content, path: str) -> tuple[Any, ...] | None:
    """State of a pickled DataProto whose class path starts so; None for anything else."""
    if content.kind != "pickle" or path.encode() not in content.data[:4096]:
        return None
    value = content.value
    if isinstance(value, Inert) and type(value).path.startswith(path) and isinstance(value.state, tuple):
        return value.state
    return None


def proto_columns(where: str, first: Any) -> dict[str, Column]:
    """Columns of a DataProto's batch: bytes of a torch file, the same behind a BytesIO, or the numpy form.

    Raises:
        TraceError: if it is none of these.
    """
    if isinstance(first, io.BytesIO):
        first = first.getvalue()
    if isinstance(first, bytes | bytearray):
        first = load_torch(f"{where}: batch", bytes(first), allow_pickle=True)
    return columns(f"{where}: batch", first)


def _claims_v0(content: Content) -> str | None:
    return "a pickled verl DataProto" if proto_state(content, "verl.") is not None else None


def _read_v0(content: Content) -> Dump:
    state = proto_state(content, "verl.")
    assert state is not None
    fields = proto_columns(str(content.path), state[0])
    mask = np.asarray(field_of("batch", fields, "attention_mask")) > 0
    width = np.asarray(field_of("batch", fields, "prompts")).shape[-1]
    samples = []
    for i in range(len(mask)):
        where = f"row {i}"
        at = np.flatnonzero(mask[i])
        require_run(where, at)
        answer = at[at >= width] - width
        ids = np.asarray(field_of("batch", fields, "input_ids"))[i][at].astype(np.int64)
        inside = at >= width
        if "response_mask" in fields:
            inside[at >= width] = np.asarray(fields["response_mask"])[i][answer] > 0
        logprobs = {}
        if "rollout_log_probs" in fields:
            values = numbers(f"{where}: rollout_log_probs", np.asarray(fields["rollout_log_probs"])[i][answer])
            logprobs["rollout"] = at_the_end(len(ids), values)
        experts = padded_routes(where, fields, i, mask.shape[1], at)
        prompt = int((at < width).sum())
        samples.append(
            Sample(where, len(ids), experts, token_ids=ids, prompt=prompt, response_mask=inside, logprobs=logprobs)
        )
    return Dump("verl-v0", "trainer V0, prompts padded left, responses right", str(content.path), tuple(samples))


def padded_routes(where: str, fields: Mapping[str, Column], i: int, width: int, at: np.ndarray) -> np.ndarray | None:
    """Routes of the tokens of a padded row, `[T, L, K]`, or None where the batch has none.

    Args:
        where: place, for messages.
        fields: columns of the batch.
        i: the row.
        width: of the attention mask.
        at: `[T]` positions of the row's tokens.

    Raises:
        TraceError: if the routes are of another width than the mask.
    """
    if "routed_experts" not in fields:
        return None
    experts = integers(f"{where}: routed_experts", np.asarray(fields["routed_experts"])[i], 3)
    if len(experts) != width:
        raise TraceError(f"{where}: routed_experts: expected {width} rows as the mask, found {len(experts)}")
    return experts[at]


def require_run(where: str, at: np.ndarray) -> None:
    """Tokens of a padded row must lie side by side: `at` are their positions `[T]`, rising.

    Raises:
        TraceError: if the attention mask has holes.
    """
    if len(at) and at[-1] - at[0] + 1 != len(at):
        raise TraceError(
            f"{where}: attention_mask: expected one run of tokens, found holes between {at[0]} and {at[-1]}"
        )


READERS = (
    Reader("verl", "verl trainer V1, tq_batch.pt", _claims_v1, _read_v1),
    Reader("verl-v0", "verl trainer V0, gen_batch.dp (a pickle)", _claims_v0, _read_v0),
)
