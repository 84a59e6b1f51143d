"""prime-rl: routes in its inference answers, the msgpack files of its filesystem transport, and token exports.

- Answer: `choices[].routed_experts = {data, shape: [rows, L_all, K], start[, dtype]}`: base64 of uint8, or uint16 where `dtype` says so; before
  May 2026 base85 of int32, told by its length.
- Transport: `rollouts/step_{N}/rank_{R}.bin`, a list of micro-batches as arrays without keys: 0 input_ids, 1 loss_mask,
  3 inference_logprobs, 5 sequence_lengths, 7 env_names (one a token), 10 routed_experts `[bytes, [S, L, K], dtype]`. Sequences are packed; a padded tail
  (environment "") belongs to the last length and is cut. The last row of a sequence repeats the one before. Other field orders
  (they drifted) are refused by what does not fit.
- Token export: `token_exports/step_{N}/rank_{R}.jsonl`, `inference_logprobs` beside `trainer_logprobs`, no routes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.dump import Dump, Sample, integers, numbers
from rar_lib.traces.wire.files import as_array, decode_base64
from rar_lib.traces.wire.outputs import Choice, choices, samples_of, start_of

FIELDS = 16  # of a micro-batch
ROUTES = 10


def _packed(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return (
        isinstance(value, Mapping) and {"data", "shape"} <= value.keys() and ("start" in value or "dtype" not in value)
    )


def _claims_http(content: Content) -> str | None:
    if content.kind in ("json", "jsonl") and any(
        _packed(c.choice.get("routed_experts")) for c in choices(content.records)
    ):
        return "choices[].routed_experts is {data, shape, start}"
    return None


def unpack(where: str, packed: Mapping[str, Any]) -> np.ndarray:
    """`[rows, L, K]` of a packed answer: uint8 or uint16; int32 for base85.

    Raises:
        TraceError: on an unknown type, or a payload that does not fit its shape.
    """
    shape, dtype, text = packed["shape"], packed.get("dtype") or "uint8", packed["data"]
    if dtype not in ("uint8", "uint16") or not isinstance(shape, list) or len(shape) != 3:
        raise TraceError(f"{where}: expected uint8 or uint16 and three sizes, found {dtype!r:.40}, {shape!r:.60}")
    if not all(isinstance(n, int) and n >= 0 for n in shape) or not isinstance(text, str):
        raise TraceError(f"{where}: expected sizes and a string, found {shape!r:.60}, {type(text).__name__}")
    if "dtype" not in packed and len(text) == math.ceil(math.prod(shape) * 4 / 4 * 5):
        try:
            return as_array(where, base64.b85decode(text), "int32", tuple(shape))
        except ValueError as error:
            raise TraceError(f"{where}: expected base85: {error}") from None
    return as_array(where, decode_base64(where, text), dtype, tuple(shape))


def _routes(choice: Choice) -> tuple[np.ndarray | None, int]:
    packed = choice.choice.get("routed_experts")
    if not _packed(packed):
        return None, 0
    return unpack(f"{choice.where}: routed_experts", packed), start_of(choice.where, packed.get("start"))


def _read_http(content: Content) -> Dump:
    samples = samples_of(content.records, _routes)
    return Dump(
        "prime-rl-http",
        "packed with shape and start, all layers",
        str(content.path),
        samples,
        "all",
        content_sized=True,
    )


# ---------------------------------------------------------------- transport


def _routed(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and isinstance(value[0], bytes) and isinstance(value[1], list)


def _micro_batch(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == FIELDS
        and all(isinstance(value[i], list) for i in (0, 1, 3, 5, 7))
        and (value[ROUTES] is None or _routed(value[ROUTES]))
    )


def _claims_transport(content: Content) -> str | None:
    if content.kind != "msgpack" or not isinstance(content.value, list) or not content.value:
        return None
    return "a list of micro-batches" if all(_micro_batch(v) for v in content.value) else None


def _read_transport(content: Content) -> Dump:
    samples = []
    for b, batch in enumerate(content.value):
        place = f"micro-batch {b}"
        ids = integers(f"{place}: input_ids", batch[0]).astype(np.int64)
        mask = np.asarray(batch[1], dtype=bool)
        logp = numbers(f"{place}: inference_logprobs", batch[3])
        lengths = integers(f"{place}: sequence_lengths", batch[5]).astype(np.int64)
        names = batch[7]
        sizes = {len(ids), len(mask), len(logp), int(lengths.sum()), len(names)}
        if len(sizes) != 1 or (lengths < 0).any():
            raise TraceError(
                f"{place}: input_ids, loss_mask, inference_logprobs, env_names and sequence_lengths speak of {sorted(sizes)} tokens"
            )
        experts = None
        if batch[ROUTES] is not None:
            raw, shape, dtype = batch[ROUTES]
            if dtype not in ("uint8", "uint16", "int32"):
                raise TraceError(f"{place}: routed_experts: expected uint8, uint16 or int32, found {dtype!r:.40}")
            experts = as_array(f"{place}: routed_experts", raw, dtype, tuple(shape))
            if experts.ndim != 3 or len(experts) != len(ids):
                raise TraceError(
                    f"{place}: routed_experts: expected {len(ids)} rows of layers x K, found {list(experts.shape)}"
                )
        start = 0
        for s, length in enumerate(lengths.tolist()):
            end = start + length
            while end > start and names[end - 1] == "":
                end -= 1
            if end > start:
                rows = slice(start, end)
                logprobs = {"rollout": np.where(mask[rows], logp[rows], np.nan)}
                inside = mask[rows]
                prompt = int(inside.argmax()) if inside.any() else None
                samples.append(
                    Sample(
                        f"{place}, sequence {s}", end - start, None if experts is None else experts[rows], token_ids=ids[rows],
                        prompt=prompt, response_mask=inside, logprobs=logprobs,
                    )
                )  # fmt: skip
            start += length
    return Dump(
        "prime-rl",
        "filesystem transport, packed micro-batches",
        str(content.path),
        tuple(samples),
        "all",
        content_sized=True,
    )


def _claims_export(content: Content) -> str | None:
    keys = {"token_ids", "inference_logprobs", "trainer_logprobs", "loss_mask"}
    if content.kind == "jsonl" and content.records and all(keys <= record.keys() for _, record in content.records):
        return "inference_logprobs and trainer_logprobs on every line"
    return None


def _read_export(content: Content) -> Dump:
    samples = []
    for where, record in content.records:
        ids = integers(f"{where}: token_ids", record["token_ids"]).astype(np.int64)
        mask = np.asarray(numbers(f"{where}: loss_mask", record["loss_mask"])) > 0
        logprobs = {
            source: numbers(f"{where}: {key}", record[key])
            for key, source in (("inference_logprobs", "rollout"), ("trainer_logprobs", "new"))
        }
        samples.append(Sample(where, len(ids), token_ids=ids, response_mask=mask, logprobs=logprobs))
    return Dump(
        "prime-rl-export",
        "token export, log-probs, no routes",
        str(content.path),
        tuple(samples),
        routes_expected=False,
    )


READERS = (
    Reader("prime-rl-http", "answers of prime-rl's inference servers, JSON or JSON lines", _claims_http, _read_http),
    Reader("prime-rl", "prime-rl filesystem transport, rank_{R}.bin (msgpack)", _claims_transport, _read_transport),
    Reader("prime-rl-export", "prime-rl token export, JSON lines: log-probs, no routes", _claims_export, _read_export),
)
