"""SGLang: `meta_info.routed_experts`, base64 of raw values without a shape.

Values are row-major `[prompt + completion - 1 - start, L_all, K]`, int32, or the type that `routed_experts_dtype` names (int32,
uint16, uint8). No shape is sent, so the model must be known (`--model`): L_all = num_hidden_layers, dense layers as zeros. `start` is
`routed_experts_start_len`, of the request or echoed; some servers ignore it and send every row: both counts are known, and
what fits neither is a wrong row count. The OpenAI endpoint puts the same string under `sglext` (or `sgl_ext`). Reads `/generate` answers
(one object, a list, JSON lines), bare or as `{"request", "response"}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rar_lib.errors import TraceError, UndecidedError
from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.dump import Dump, ReadOptions, Sample, field_of, numbers
from rar_lib.traces.wire.files import as_array, decode_base64
from rar_lib.traces.wire.outputs import answer_logprobs, choices, response_fields, sized, start_of, token_ids
from rar_lib.traces.wire.segments import join_interrupted

DTYPES = ("int32", "uint16", "uint8")


Records = list[tuple[str, dict[str, Any]]]


def _answers(records: Records) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Place, request and answer of every `/generate` answer."""
    for where, record in records:
        response = record.get("response", record)
        several = response if isinstance(response, list) else [response]
        for i, answer in enumerate(several):
            if isinstance(answer, Mapping) and isinstance(answer.get("meta_info"), Mapping):
                yield where if len(several) == 1 else f"{where}, answer {i}", record.get("request") or {}, answer


def _ext(choice: Any) -> Mapping[str, Any]:
    for key in ("sglext", "sgl_ext"):
        for holder in (choice.choice, choice.response):
            if isinstance(holder.get(key), Mapping):
                return holder[key]
    return {}


def _claims(content: Content) -> str | None:
    if content.kind not in ("json", "jsonl"):
        return None
    for _, _, answer in _answers(content.records):
        if isinstance(answer["meta_info"].get("routed_experts"), str):
            return "meta_info.routed_experts is a string"
    for choice in choices(content.records):
        if "routed_experts" in _ext(choice):
            return "sglext.routed_experts"
    return None


def _read(content: Content) -> Dump:
    return from_answers(content.records, str(content.path), content.options)


def from_answers(records: Records, path: str, options: ReadOptions) -> Dump:
    """Answers of a server, with the request beside each or without.

    Args:
        records: place and answer.
        path: a name to show: the file, or the server.
        options: with the model's shape, which no answer says.

    Raises:
        TraceError: if tokens cannot be told, or the bytes are no whole rows of the model.
    """
    samples, stopped, layouts = [], [], set()
    for where, request, answer in _answers(records):
        meta = answer["meta_info"]
        reason = meta.get("finish_reason")
        stopped.append(isinstance(reason, Mapping) and reason.get("type") == "abort")
        answered = answer.get("output_ids")
        if answered is None and isinstance(meta.get("output_token_logprobs"), list):
            answered = [entry[1] for entry in meta["output_token_logprobs"]]
        prompt_ids = answer.get("prompt_token_ids", request.get("input_ids"))
        ids, prompt = token_ids(where, prompt_ids, answered)
        if ids is None:
            prompt = field_of(f"{where}: meta_info", meta, "prompt_tokens")
            tokens = prompt + field_of(f"{where}: meta_info", meta, "completion_tokens")
        else:
            tokens = len(ids)
        logprobs = meta.get("output_token_logprobs")
        logp = (
            None if logprobs is None else numbers(f"{where}: output_token_logprobs", [entry[0] for entry in logprobs])
        )
        experts, first, layout = _routes(where, options, meta, request, tokens)
        layouts.add(layout)
        more = response_fields(tokens, prompt, logp, where)
        versions = _versions(where, meta, tokens, prompt)
        samples.append(
            Sample(
                where,
                tokens,
                experts,
                first,
                token_ids=ids,
                versions=versions,
                text=str(answer.get("text") or ""),
                **more,
            )
        )
    for choice in choices(records):
        where = choice.where
        ids, prompt = token_ids(where, choice.get("prompt_token_ids"), choice.get("token_ids"))
        tokens, prompt = sized(choice, ids, prompt)
        experts, first, layout = _routes(where, options, _ext(choice), choice.request, tokens)
        layouts.add(layout)
        more = response_fields(tokens, prompt, answer_logprobs(where, choice.choice), where)
        samples.append(Sample(where, tokens, experts, first, token_ids=ids, **more))
        stopped.append(choice.choice.get("finish_reason") == "abort")
    joined, notes = join_interrupted(samples, stopped)
    return Dump("sglang", "; ".join(sorted(layouts)), path, joined, "all", content_sized=True, notes=notes)


def _routes(
    where: str, options: ReadOptions, meta: Mapping[str, Any], request: Mapping[str, Any], tokens: int
) -> tuple[np.ndarray | None, int, str]:
    """Rows, the token of the first, and the layout in words."""
    text = meta.get("routed_experts")
    if text is None:
        return None, 0, "no routes"
    model = options.model
    layers = len(options.payload_layers or ()) or (model.num_layers if model else None)
    if model is None or layers is None:
        raise UndecidedError(
            f"{where}: SGLang sends routes without a shape; give the model's config (--model), which says layers and experts per "
            f"token"
        )
    dtype = meta.get("routed_experts_dtype") or "int32"
    if dtype not in DTYPES:
        raise TraceError(f"{where}: routed_experts_dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    data = decode_base64(f"{where}: routed_experts", text)
    start = start_of(where, meta.get("routed_experts_start_len"), request.get("routed_experts_start_len"))
    row = layers * model.top_k * np.dtype(dtype).itemsize
    if len(data) % row:
        raise TraceError(
            f"{where}: routed_experts: {len(data)} bytes of {dtype} are no whole rows of {layers} layers x top-{model.top_k} ({row} bytes each): "
            f"another model, or another type"
        )
    count = len(data) // row
    first = 0 if start and count in (tokens - 1, tokens) else start  # the start was ignored by the server
    experts = as_array(where, data, dtype, (count, layers, model.top_k))
    ignored = "; start_len ignored by the server" if start and not first else ""
    return experts, first, f"base64 of raw {dtype}, all layers{ignored}"


def _versions(where: str, meta: Mapping[str, Any], tokens: int, prompt: int | None) -> np.ndarray | None:
    """Weight version of every token where the server says numbers; spans count over the sampled tokens."""
    spans, one = meta.get("weight_versions"), meta.get("weight_version")
    if isinstance(spans, list) and prompt is not None:
        out = np.full(tokens, -1, np.int64)
        for span in spans:
            version, begins, ends = (
                field_of(f"{where}: weight_versions", span, key) for key in ("version", "start", "end")
            )
            if not str(version).isdigit():
                return None
            first, end = prompt + int(begins), prompt + int(ends)
            if not prompt <= first <= end <= tokens:
                raise TraceError(f"{where}: weight_versions: span {span} lies outside {tokens - prompt} sampled tokens")
            out[first:end] = int(version)
        out[:prompt] = out[prompt] if tokens > prompt else -1
        return out
    return np.full(tokens, int(str(one)), np.int64) if str(one).isdigit() else None


READERS = (Reader("sglang", "answers of an SGLang server, JSON or JSON lines", _claims, _read),)
