"""SkyRL: packed routes in its inference answers, and the pickled training batch.

- Answer: `choices[0].routed_experts = {data: base64, shape: [T, L_all, K], dtype}`, the smallest of uint8, int16, int32 that holds
  the largest id; rows follow the tokens.
- Dump: `dumped_data/global_step_{N}_training_input.pkl`, a pickle of `TrainingInputBatch` (needs `allow_pickle=True`; SkyRL is not
  imported). Everything is padded on the left; response tensors are aligned on the right. Routes are
  `rollout_expert_indices [B, S, L_all, K]`; cells without a route hold arange(K), and `router_padding_mask` says which (True: no
  route). Dumps without that mask (up to 0.3.0) hold zeros there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.dump import Dump, Sample, at_the_end, field_of, integers, numbers
from rar_lib.traces.wire.files import as_array, decode_base64
from rar_lib.traces.wire.outputs import Choice, choices, samples_of
from rar_lib.traces.wire.pickles import Inert, load_torch, plain
from rar_lib.traces.wire.verl import require_run

DTYPES = ("uint8", "int16", "uint16", "int32")


def _packed(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and value.keys() == {"data", "shape", "dtype"}


def _claims_http(content: Content) -> str | None:
    if content.kind in ("json", "jsonl") and any(
        _packed(c.choice.get("routed_experts")) for c in choices(content.records)
    ):
        return "choices[].routed_experts is {data, shape, dtype}"
    return None


def unpack(where: str, packed: Mapping[str, Any]) -> np.ndarray:
    """`[T, L, K]` of a packed answer, in the type that it names.

    Raises:
        TraceError: on an unknown type, or a payload that does not fit its shape.
    """
    dtype, shape = packed["dtype"], packed["shape"]
    if dtype not in DTYPES or not isinstance(shape, list) or len(shape) != 3:
        raise TraceError(
            f"{where}: expected dtype of {', '.join(DTYPES)} and three sizes, found {dtype!r:.40}, {shape!r:.60}"
        )
    return as_array(where, decode_base64(where, packed["data"]), dtype, tuple(shape))


def _routes(choice: Choice) -> tuple[np.ndarray | None, int]:
    packed = choice.choice.get("routed_experts")
    return (unpack(f"{choice.where}: routed_experts", packed) if _packed(packed) else None), 0


def _read_http(content: Content) -> Dump:
    samples = samples_of(content.records, _routes)
    return Dump(
        "skyrl-http", "base64 with shape and type, all layers", str(content.path), samples, "all", content_sized=True
    )


# ---------------------------------------------------------------- the pickled batch


def _batch(content: Content) -> Mapping[str, Any] | None:
    if content.kind != "pickle" or b"TrainingInputBatch" not in content.data[:4096]:
        return None
    value = content.value
    state = value.args[1] if isinstance(value, Inert) and len(value.args) == 2 else getattr(value, "state", None)
    found = state.get("batch_dict") if isinstance(state, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _claims_dump(content: Content) -> str | None:
    return "a pickled SkyRL TrainingInputBatch" if _batch(content) is not None else None


def _tensor(where: str, value: Any) -> np.ndarray | None:
    if value is None:
        return None
    if isinstance(value, Mapping) and isinstance(value.get("data"), bytes):
        if value.get("format") == "torch":
            return plain(load_torch(where, value["data"]))
        return as_array(where, value["data"], str(value["dtype"]).removeprefix("torch."), tuple(value["shape"]))
    return np.asarray(plain(value))


def _read_dump(content: Content) -> Dump:
    batch = _batch(content)
    assert batch is not None
    fields = {key: _tensor(f"batch: {key}", batch.get(key)) for key in (
        "sequences", "attention_mask", "response_mask", "loss_mask", "rollout_logprobs", "action_log_probs",
        "rollout_expert_indices", "router_padding_mask",
    )}  # fmt: skip
    sequences, mask = fields["sequences"], fields["attention_mask"]
    if sequences is None or mask is None or sequences.shape != mask.shape:
        raise TraceError(f"{content.path}: expected sequences and attention_mask of one shape")
    masked = fields["router_padding_mask"] is not None
    samples = []
    for i in range(len(sequences)):
        where = f"row {i}"
        at = np.flatnonzero(mask[i] > 0)
        require_run(where, at)
        tokens = len(at)
        length, more = _response(where, i, fields, tokens)
        experts, recorded = None, None
        if fields["rollout_expert_indices"] is not None:
            experts = integers(f"{where}: rollout_expert_indices", fields["rollout_expert_indices"][i], 3)[at]
            if masked:
                recorded = ~(np.asarray(field_of("batch", fields, "router_padding_mask"))[i][at] > 0)
        ids = sequences[i][at].astype(np.int64)
        samples.append(Sample(where, tokens, experts, recorded=recorded, token_ids=ids, prompt=tokens - length, **more))
    layout = "training batch, padded left, " + ("cells without a route masked" if masked else "zeros where no route is")
    return Dump("skyrl", layout, str(content.path), tuple(samples), "all", content_sized=True)


def _response(where: str, i: int, fields: Mapping[str, Any], tokens: int) -> tuple[int, dict[str, Any]]:
    """Response length, mask and log-probs; response tensors are aligned on the right."""
    inside = np.zeros(tokens, bool)
    length = 0
    for key in ("response_mask", "loss_mask"):
        if fields[key] is not None:
            told = np.asarray(fields[key])[i]
            width = min(tokens, len(told))
            inside[tokens - width :] = told[len(told) - width :] > 0
            length = max(length, int(inside[::-1].nonzero()[0].max(initial=-1)) + 1)
    logprobs = {}
    for key, source in (("rollout_logprobs", "rollout"), ("action_log_probs", "old")):
        if fields[key] is not None:
            values = numbers(f"{where}: {key}", np.asarray(fields[key])[i])
            logprobs[source] = np.where(inside, at_the_end(tokens, values[max(0, len(values) - tokens) :]), np.nan)
    return length, {"response_mask": inside, "logprobs": logprobs}


READERS = (
    Reader("skyrl-http", "answers of SkyRL's inference servers, JSON or JSON lines", _claims_http, _read_http),
    Reader("skyrl", "SkyRL training batch, global_step_{N}_training_input.pkl (a pickle)", _claims_dump, _read_dump),
)
