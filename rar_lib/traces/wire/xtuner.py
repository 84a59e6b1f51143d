"""XTuner and LMDeploy: `debug_rollout_{step}.pt`, and LMDeploy's answers.

- XTuner: `torch.save` of a list of lists of `RolloutState` (classes, so it needs `allow_pickle=True`; XTuner is not imported):
  `prompt_ids`, `response_ids`, `logprobs`, `response_mask`, `response_model_steps` (weight version of each sampled token),
  `routed_experts [T - 1, L_all, K]` uint16. Rows of layers without a router hold whatever was in memory, or 65535.
- LMDeploy over HTTP: `meta_info.routed_experts` or `choices[].routed_experts` as nested lists. A string there is a key into its
  shared store and not the routes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.dump import Dump, Sample, integers, numbers, routes
from rar_lib.traces.wire.outputs import Choice, choices, response_fields, samples_of, token_ids
from rar_lib.traces.wire.pickles import Inert, plain


def _states(content: Content) -> list[tuple[str, Mapping[str, Any]]]:
    value = content.value if content.kind == "torch" else None
    if not isinstance(value, list):
        return []
    found = []
    for i, group in enumerate(value):
        for j, state in enumerate(group if isinstance(group, list) else [group]):
            fields = state.state if isinstance(state, Inert) else None
            fields = fields.get("__dict__", fields) if isinstance(fields, Mapping) else None
            if isinstance(fields, Mapping) and {"prompt_ids", "response_ids"} <= fields.keys():
                found.append((f"group {i}, rollout {j}", fields))
    return found


def _claims_states(content: Content) -> str | None:
    return "RolloutState records" if _states(content) else None


def _read_states(content: Content) -> Dump:
    samples = []
    for where, state in _states(content):
        ids, prompt = token_ids(where, state["prompt_ids"], state["response_ids"])
        if ids is None or prompt is None:
            raise TraceError(f"{where}: expected prompt_ids and response_ids, found {state['prompt_ids']!r:.40}")
        routed = plain(state.get("routed_experts"))
        if isinstance(routed, Inert | list):
            raise TraceError(f"{where}: routed_experts is a reference into a Ray store, not the routes: {routed!r:.60}")
        experts = routes(f"{where}: routed_experts", routed)
        logp = state.get("logprobs")
        more = response_fields(len(ids), prompt, None if logp is None else numbers(where, logp), where)
        if state.get("response_mask") is not None:
            told = integers(f"{where}: response_mask", state["response_mask"])
            if len(told) != len(ids) - prompt:
                raise TraceError(f"{where}: response_mask: expected {len(ids) - prompt} values, found {len(told)}")
            more["response_mask"] = np.concatenate([np.zeros(prompt, bool), told > 0])
        samples.append(
            Sample(where, len(ids), experts, token_ids=ids, versions=_versions(where, state, len(ids), prompt),
                   text=str(state.get("response") or ""), **more)
        )  # fmt: skip
    return Dump(
        "xtuner", "RolloutState records, all layers", str(content.path), tuple(samples), "all", dense_rows="anything"
    )


def _versions(where: str, state: Mapping[str, Any], tokens: int, prompt: int) -> np.ndarray | None:
    steps = state.get("response_model_steps")
    if not steps:
        return None
    told = integers(f"{where}: response_model_steps", steps)
    if len(told) != tokens - prompt:
        raise TraceError(f"{where}: response_model_steps: expected {tokens - prompt} values, found {len(told)}")
    return np.concatenate([np.full(prompt, told[0]), told]).astype(np.int64)


# ---------------------------------------------------------------- LMDeploy


def _answers(content: Content) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    for where, record in content.records:
        answer = record.get("response", record)
        meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
        if isinstance(meta, Mapping) and isinstance(meta.get("routed_experts"), list):
            yield where, answer, meta["routed_experts"]


def _claims_lists(content: Content) -> str | None:
    if content.kind not in ("json", "jsonl"):
        return None
    if any(True for _ in _answers(content)):
        return "meta_info.routed_experts is a nested list"
    for choice in choices(content.records):
        routed = choice.choice.get("routed_experts")
        if isinstance(routed, list) and choice.response.get("prompt_routed_experts") is None:
            return "choices[].routed_experts is a nested list"
        if isinstance(routed, str) and len(routed) >= 40 and set(routed) <= set("0123456789abcdef"):
            return "choices[].routed_experts is a key into LMDeploy's shared store"
    return None


def _read_lists(content: Content) -> Dump:
    samples = []
    for where, answer, routed in _answers(content):
        ids, prompt = token_ids(where, answer.get("prompt_token_ids"), answer.get("output_ids"))
        if ids is None:
            raise TraceError(f"{where}: expected prompt_token_ids and output_ids, found {sorted(answer)[:8]}")
        more = response_fields(len(ids), prompt, None, where)
        samples.append(Sample(where, len(ids), routes(f"{where}: routed_experts", routed), token_ids=ids, **more))
    samples += samples_of(content.records, _listed)
    return Dump("lmdeploy", "nested lists, all layers", str(content.path), tuple(samples), "all", dense_rows="anything")


def _listed(choice: Choice) -> tuple[np.ndarray | None, int]:
    routed = choice.choice.get("routed_experts")
    if isinstance(routed, str):
        raise TraceError(
            f"{choice.where}: routed_experts is a key into LMDeploy's shared store, not the routes: {routed[:16]}..."
        )
    return routes(f"{choice.where}: routed_experts", routed), 0


READERS = (
    Reader("xtuner", "XTuner debug_rollout_{step}.pt (pickled classes)", _claims_states, _read_states),
    Reader("lmdeploy", "answers of an LMDeploy server, JSON or JSON lines", _claims_lists, _read_lists),
)
