"""vLLM's own capture: `CompletionOutput.routed_experts`, in process and over HTTP.

Layouts, told apart by what is there:
- 0.22 and later: one array `[(P - start) + (C - 1), L_all, K]`, uint8 up to 256 experts, else uint16; over HTTP base64 of an
  `.npy` stream. `start` is the request's `routed_experts_prompt_start`; the answer does not echo it, so keep the request. Layers
  without a router are zeros.
- 0.21: two pieces, `prompt_routed_experts [P, L_moe, K]` at the top and `routed_experts [C - 1, L_moe, K]` in the choice, int16
  or nested lists.
- 0.14 to 0.20: one array `[P + C - 1, L_all, K]`, int32.
A request that did not finish has None. In process, the live outputs (`from_outputs`) or a `torch.save`d list of dicts with
vLLM's field names: `prompt_token_ids`, `prompt_routed_experts`, `outputs: [{token_ids, routed_experts, logprobs}]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.dump import Dump, Sample, integers, numbers, routes
from rar_lib.traces.wire.files import decode_base64, parse_npy
from rar_lib.traces.wire.outputs import answer_logprobs, choices, response_fields, sized, start_of, token_ids
from rar_lib.traces.wire.pickles import plain
from rar_lib.traces.wire.segments import join_interrupted

NPY = "k05VTVBZ"  # base64 of the first bytes of an .npy stream


def _is_npy(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(NPY)


def _claims_http(content: Content) -> str | None:
    if content.kind not in ("json", "jsonl"):
        return None
    for choice in choices(content.records):
        if _is_npy(choice.choice.get("routed_experts")):
            return "choices[].routed_experts is base64 of an .npy stream"
        if isinstance(choice.response.get("prompt_routed_experts"), list):
            return "prompt_routed_experts beside choices"
    return None


def _read_http(content: Content) -> Dump:
    return from_answers(content.records, str(content.path))


def from_answers(records: list[tuple[str, dict[str, Any]]], path: str) -> Dump:
    """Answers of a server, with the request beside each or without.

    Args:
        records: place and answer.
        path: a name to show: the file, or the server.

    Raises:
        TraceError: if tokens cannot be told, or routes are no `.npy` stream of integers.
    """
    samples, stopped, layouts = [], [], set()
    for choice in choices(records):
        where = choice.where
        ids, prompt = token_ids(where, choice.get("prompt_token_ids"), choice.get("token_ids"))
        tokens, prompt = sized(choice, ids, prompt)
        first, experts = 0, None
        stopped.append(choice.choice.get("finish_reason") == "abort")
        routed, before = choice.choice.get("routed_experts"), choice.response.get("prompt_routed_experts")
        if before is not None:
            experts = _joined(where, before, routed)
            layouts.add("0.21: prompt and answer in two pieces, MoE layers")
        elif routed is not None:
            experts = parse_npy(f"{where}: routed_experts", decode_base64(f"{where}: routed_experts", routed))
            experts = integers(f"{where}: routed_experts", experts, 3)
            first = start_of(
                where, choice.request.get("routed_experts_prompt_start"), choice.get("routed_experts_prompt_start")
            )
            layouts.add("0.22 and later: base64 .npy, all layers")
        more = response_fields(tokens, prompt, answer_logprobs(where, choice.choice), where)
        text = choice.choice.get("text") or ""
        samples.append(Sample(where, tokens, experts, first, token_ids=ids, text=str(text), **more))
    moe = any(layout.startswith("0.21") for layout in layouts)
    joined, notes = join_interrupted(samples, stopped)
    return Dump(
        "vllm-http",
        "; ".join(sorted(layouts)) or "no routes",
        path,
        joined,
        "moe" if moe else "all",
        notes=notes,
    )


def _joined(where: str, before: Any, routed: Any) -> np.ndarray | None:
    both = (("prompt_routed_experts", before), ("routed_experts", routed))
    pieces = [
        piece for key, value in both if (piece := routes(f"{where}: {key}", plain(value))) is not None and piece.size
    ]
    if not pieces:
        return None
    if len({piece.shape[1:] for piece in pieces}) > 1:
        raise TraceError(
            f"{where}: the prompt's routes are {pieces[0].shape[1:]} a token, the answer's {pieces[1].shape[1:]}"
        )
    return np.concatenate(pieces)


def _outputs(record: Any) -> bool:
    """True for a dict with vLLM's field names. TensorRT-LLM's are the same; its routes are int16 in one piece."""
    if not isinstance(record, dict) or "prompt_token_ids" not in record or not isinstance(record.get("outputs"), list):
        return False
    routed = [plain(o.get("routed_experts")) for o in record["outputs"] if isinstance(o, dict)]
    one_piece = record.get("prompt_routed_experts") is None
    return not (one_piece and any(getattr(r, "dtype", None) == np.int16 for r in routed))


def _claims_outputs(content: Content) -> str | None:
    if content.kind != "torch" or not isinstance(content.value, list) or not content.value:
        return None
    return "a list of request outputs" if all(_outputs(record) for record in content.value) else None


def _read_outputs(content: Content) -> Dump:
    return from_outputs(content.value, path=str(content.path))


def from_outputs(outputs: Iterable[Any], *, path: str = "request outputs", version: str = "") -> Dump:
    """Live `RequestOutput`s of an engine in this process, or dicts with their field names.

    Args:
        outputs: what `LLM.generate` returned.
        path: a name to show.
        version: of vLLM, where known.

    Raises:
        TraceError: if token ids are not there, or routes are not `[rows, layers, K]` integers.
    """
    return _dump(outputs, "vllm", path, version, "0.22 and later: one array, all layers")


def _field(record: Any, key: str) -> Any:
    return plain(record.get(key) if isinstance(record, Mapping) else getattr(record, key, None))


def _dump(outputs: Iterable[Any], name: str, path: str, version: str, layout: str, axis: Any = "all") -> Dump:
    samples = []
    for i, request in enumerate(outputs):
        params = _field(request, "sampling_params")
        for j, answer in enumerate(_field(request, "outputs") or []):
            where = f"[{i}], output {j}"
            ids, prompt = token_ids(where, _field(request, "prompt_token_ids"), list(_field(answer, "token_ids") or []))
            if ids is None:
                raise TraceError(f"{where}: expected prompt_token_ids, found none")
            routed, before = _field(answer, "routed_experts"), _field(request, "prompt_routed_experts")
            experts = None
            if before is not None:
                experts, layout, axis = _joined(where, before, routed), "0.21: two pieces, MoE layers", "moe"
            elif routed is not None:
                experts = integers(f"{where}: routed_experts", routed, 3)
                if experts.dtype == np.int32:
                    layout = "0.14 to 0.20: one int32 array, all layers"
            first = start_of(
                where, _field(request, "routed_experts_prompt_start"), _field(params, "routed_experts_prompt_start")
            )
            more = response_fields(len(ids), prompt, _sampled_logprobs(where, _field(answer, "logprobs"), ids), where)
            text = _field(answer, "text")
            samples.append(Sample(where, len(ids), experts, first, token_ids=ids, text=str(text or ""), **more))
    return Dump(name, layout, path, tuple(samples), axis, producer_version=version)


def _sampled_logprobs(where: str, steps: Any, ids: np.ndarray) -> np.ndarray | None:
    """vLLM keeps a dict from token id to an object with `logprob` a step; a plain list of numbers is taken as it is."""
    if steps is None:
        return None
    steps = list(steps)
    if not all(isinstance(step, Mapping) for step in steps):
        return numbers(f"{where}: logprobs", steps)
    values = []
    for step, token in zip(steps, ids[len(ids) - len(steps) :].tolist(), strict=True):
        entry = step.get(token, step.get(str(token)))
        values.append(getattr(entry, "logprob", entry))
    return numbers(f"{where}: logprobs", values)


READERS = (
    Reader("vllm-http", "answers of a vLLM server, JSON or JSON lines", _claims_http, _read_http),
    Reader("vllm", "request outputs of vLLM in process, a torch file", _claims_outputs, _read_outputs),
)
