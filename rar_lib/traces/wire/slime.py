"""slime: the rollout dump `rollout_data/{id}.pt` and the training dump `train_data/{id}.pt`.

- Rollout: `torch.save` of `{rollout_id, samples: [dict]}`; a sample has `tokens`, `response_length`, and for the response
  `loss_mask` and `rollout_log_probs`; `rollout_routed_experts` is `[T - 1, L_all, K]` int32 (a numpy array up to 0.3.0, a tensor
  after), in 0.2.0 `[T, L_all, K]` int64. None: the sample came back without routes (its status says why).
- Training, `format_version` 2: `{samples: [dict]}` with `log_probs` beside `rollout_log_probs`; routes are deleted before it is
  written. It gives the mismatch of the two engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.verdicts import Verdict, verdict
from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.dump import Dump, Sample, at_the_end, field_of, integers, numbers, routes
from rar_lib.traces.wire.pickles import plain


def _samples(content: Content) -> list[Mapping[str, Any]]:
    value = content.value if content.kind == "torch" else None
    found = value.get("samples") if isinstance(value, dict) else None
    return [s for s in found if isinstance(s, Mapping)] if isinstance(found, list) else []


def _claims_rollout(content: Content) -> str | None:
    found = _samples(content)
    if found and all({"tokens", "response_length"} <= s.keys() for s in found):
        return "samples with tokens and response_length"
    return None


def _claims_train(content: Content) -> str | None:
    found = _samples(content)
    return "samples with tokens, log_probs and response_lengths" if found and "response_lengths" in found[0] else None


def _response(where: str, sample: Mapping[str, Any], tokens: int, length: int, mask: str, keys: dict[str, str]) -> Any:
    """Mask and log-probs of the response, each checked to have one value a response token."""
    if not 0 <= length <= tokens:
        raise TraceError(f"{where}: expected a response of at most {tokens} tokens, found {length}")
    values = {}
    for key in (mask, *keys):
        if sample.get(key) is not None:
            values[key] = numbers(f"{where}: {key}", plain(sample[key]))
            if len(values[key]) != length:
                raise TraceError(
                    f"{where}: {key}: expected {length} values, one a response token, found {len(values[key])}"
                )
    inside = np.zeros(tokens, bool)
    inside[tokens - length :] = values[mask] > 0 if mask in values else True
    logprobs = {source: at_the_end(tokens, values[key]) for key, source in keys.items() if key in values}
    return {"prompt": tokens - length, "response_mask": inside, "logprobs": logprobs}


def _read_rollout(content: Content) -> Dump:
    samples: list[Sample] = []
    notes: list[Verdict] = []
    for i, sample in enumerate(content.value["samples"]):
        where = f"samples[{i}]"
        ids = integers(f"{where}: tokens", plain(field_of(where, sample, "tokens"))).astype(np.int64)
        more = _response(
            where,
            sample,
            len(ids),
            int(field_of(where, sample, "response_length")),
            "loss_mask",
            {"rollout_log_probs": "rollout"},
        )
        routed = plain(sample.get("rollout_routed_experts"))
        experts = routes(f"{where}: rollout_routed_experts", routed)
        told = sorted({str(v) for v in sample.get("weight_versions") or []})
        if len(told) > 1:
            notes.append(
                verdict(
                    "VERSION_MIXED",
                    where,
                    f"weight versions {', '.join(told)}; which token is of which is not told",
                    samples=(i,),
                )
            )
        versions = np.full(len(ids), int(told[0]), np.int64) if len(told) == 1 and told[0].isdigit() else None
        samples.append(
            Sample(
                where,
                len(ids),
                experts,
                token_ids=ids,
                versions=versions,
                text=str(sample.get("response") or ""),
                **more,
            )
        )
    return Dump("slime", "rollout dump, all layers", str(content.path), tuple(samples), "all", notes=tuple(notes))


def _read_train(content: Content) -> Dump:
    samples = []
    for i, sample in enumerate(content.value["samples"]):
        where = f"samples[{i}]"
        ids = integers(f"{where}: tokens", plain(field_of(where, sample, "tokens"))).astype(np.int64)
        length = int(field_of(where, sample, "response_lengths"))
        more = _response(
            where, sample, len(ids), length, "loss_masks", {"rollout_log_probs": "rollout", "log_probs": "old"}
        )
        samples.append(Sample(where, len(ids), token_ids=ids, **more))
    return Dump(
        "slime-train", "training dump, format 2, no routes", str(content.path), tuple(samples), routes_expected=False
    )


READERS = (
    Reader("slime", "slime rollout dump, rollout_data/{id}.pt", _claims_rollout, _read_rollout),
    Reader("slime-train", "slime training dump, train_data/{id}.pt: log-probs, no routes", _claims_train, _read_train),
)
