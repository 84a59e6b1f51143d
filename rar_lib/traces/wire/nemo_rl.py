"""NeMo-RL: the wire string of its routes, and the JSON lines of its training data.

- Wire: `nrlre1:<dtype>:<S>x<L>x<K>:<base64>`, little-endian int8 (up to 128 experts), int16 or int32, S = prompt + generated tokens. A
  row of -1 in all slots is no route; the last row is filler (0..K-1), since the last token is never an input. Found under
  `choices[].message.routed_experts` beside `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`, or as bare
  strings, one a line. Before the wire string: nested lists in the same place.
- Log: `train_data_step{N}.jsonl`, one line a sample, every value in a batch of one, per-token lists padded to the batch:
  `token_ids, input_lengths, token_loss_mask, generation_logprobs, prev_logprobs`. It holds no routes, but both log-probs.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.dump import Dump, Sample, field_of, integers, numbers, routes
from rar_lib.traces.wire.files import as_array, decode_base64
from rar_lib.traces.wire.outputs import choices, response_fields, token_ids

WIRE = re.compile(r"nrlre1:(int8|int16|int32):(\d{1,9})x(\d{1,6})x(\d{1,6}):([A-Za-z0-9+/=]*)")


def decode(where: str, text: str) -> np.ndarray:
    """`[S, L, K]` of a wire string, int8, int16 or int32.

    Raises:
        TraceError: if it does not follow the grammar, or shape and payload differ.
    """
    found = WIRE.fullmatch(text.strip())
    if found is None:
        raise TraceError(f"{where}: expected nrlre1:<int8|int16|int32>:<S>x<L>x<K>:<base64>, found {text[:48]!r}")
    dtype, *sizes, payload = found.groups()
    return as_array(where, decode_base64(where, payload), dtype, tuple(int(n) for n in sizes))


def _routes(where: str, value: Any) -> np.ndarray | None:
    return decode(where, value) if isinstance(value, str) else routes(where, value)


def _claims_wire(content: Content) -> str | None:
    if content.kind == "text" and content.data.lstrip().startswith(b"nrlre1:"):
        return "a wire string"
    if content.kind in ("json", "jsonl"):
        for choice in choices(content.records):
            message = choice.choice.get("message")
            routed = message.get("routed_experts") if isinstance(message, dict) else None
            if isinstance(routed, str) and routed.startswith("nrlre1:"):
                return "choices[].message.routed_experts is a wire string"
            if isinstance(routed, list) and isinstance(message, dict) and "generation_token_ids" in message:
                return "choices[].message.routed_experts beside generation_token_ids"
    return None


def _read_wire(content: Content) -> Dump:
    samples = []
    if content.kind == "text":
        for number, line in enumerate(content.value.splitlines(), 1):
            if line.strip():
                experts = decode(f"line {number}", line)
                samples.append(Sample(f"line {number}", len(experts), experts))
    for choice in choices(content.records):
        where = choice.where
        ids, prompt = token_ids(where, choice.get("prompt_token_ids"), choice.get("generation_token_ids"))
        routed = _routes(f"{where}: routed_experts", choice.get("routed_experts"))
        if ids is None and routed is None:
            continue
        tokens = len(ids) if ids is not None else len(routed) if routed is not None else 0
        logp = choice.get("generation_log_probs")
        more = response_fields(tokens, prompt, None if logp is None else numbers(where, logp), where)
        samples.append(Sample(where, tokens, routed, token_ids=ids, **more))
    return Dump("nemo-rl", "wire string nrlre1, last row filler", str(content.path), tuple(samples))


def _claims_log(content: Content) -> str | None:
    keys = {"generation_logprobs", "prev_logprobs", "input_lengths"}
    if content.kind == "jsonl" and content.records and all(keys <= record.keys() for _, record in content.records):
        return "generation_logprobs and prev_logprobs on every line"
    return None


def _one(where: str, value: Any) -> Any:
    """The member of a batch of one."""
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    raise TraceError(f"{where}: expected a batch of one, found {type(value).__name__} of {np.size(value)}")


def _read_log(content: Content) -> Dump:
    samples = []
    for where, record in content.records:
        tokens = int(integers(f"{where}: input_lengths", record["input_lengths"])[0])
        parts = {}
        for key in ("generation_logprobs", "prev_logprobs", "token_ids", "token_loss_mask"):
            if key in record:
                values = numbers(f"{where}: {key}", _one(f"{where}: {key}", field_of(where, record, key)))
                if not 0 <= tokens <= len(values):
                    raise TraceError(
                        f"{where}: {key}: expected at least input_lengths = {tokens} values, found {len(values)}"
                    )
                parts[key] = values[:tokens]
        mask = parts.get("token_loss_mask")
        dropped = (
            "sample_loss_mask" in record and not numbers(f"{where}: sample_loss_mask", record["sample_loss_mask"])[0]
        )
        ids = (
            integers(f"{where}: token_ids", _one(where, record["token_ids"])[:tokens]) if "token_ids" in parts else None
        )
        inside = np.ones(tokens, bool) if mask is None else mask > 0
        inside[: tokens if dropped else 1] = False  # a sample left out of the loss; nothing predicts the first token
        samples.append(
            Sample(
                where, tokens, token_ids=None if ids is None else ids.astype(np.int64), response_mask=inside,
                logprobs={"rollout": parts["generation_logprobs"], "old": parts["prev_logprobs"]},
            )
        )  # fmt: skip
    masked = (
        "" if all("token_loss_mask" in record for _, record in content.records) else ", no loss mask: prompts count too"
    )
    return Dump(
        "nemo-rl-log",
        f"train_data JSON lines, no routes{masked}",
        str(content.path),
        tuple(samples),
        routes_expected=False,
    )


READERS = (
    Reader("nemo-rl", "NeMo-RL wire strings, bare or in answers", _claims_wire, _read_wire),
    Reader("nemo-rl-log", "NeMo-RL train_data_step JSON lines: log-probs, no routes", _claims_log, _read_log),
)
