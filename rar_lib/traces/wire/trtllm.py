"""TensorRT-LLM: `CompletionOutput.routed_experts`, `[T - 1, L_moe, K]` int16, in process.

The layer axis counts MoE layers only, unlike vLLM's of today; ids are logical. Read from live outputs (`from_outputs`) or from a
`torch.save`d list of dicts with its field names, which are vLLM's (`prompt_token_ids`, `outputs: [{token_ids,
routed_experts}]`); int16 in one piece tells the two apart. Where a server puts it was not settled when this was written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.dump import Dump
from rar_lib.traces.wire.pickles import plain
from rar_lib.traces.wire.vllm import _dump


def _claims(content: Content) -> str | None:
    if content.kind != "torch" or not isinstance(content.value, list):
        return None
    for record in content.value:
        if not isinstance(record, dict) or record.get("prompt_routed_experts") is not None:
            return None
        for answer in record.get("outputs") or []:
            if isinstance(answer, dict) and getattr(plain(answer.get("routed_experts")), "dtype", None) == np.int16:
                return "a list of request outputs with int16 routes in one piece"
    return None


def from_outputs(outputs: Iterable[Any], *, path: str = "request outputs", version: str = "") -> Dump:
    """Live outputs of an engine in this process, or dicts with their field names. Arguments as for
    `wire.vllm.from_outputs`.

    Raises:
        TraceError: as there.
    """
    return _dump(outputs, "tensorrt-llm", path, version, "one array, MoE layers", "moe")


def _read(content: Content) -> Dump:
    return from_outputs(content.value, path=str(content.path))


READERS = (Reader("tensorrt-llm", "request outputs of TensorRT-LLM, a torch file", _claims, _read),)
