"""ROLL: `rollout_mock_dumps/.../step_{n}.pkl`, a pickle of its DataProto.

The first item of the state is a `BytesIO` of a torch file (0.2: three items; from 0.3: four). Everything over the sequence is padded
on the right: `input_ids`, `attention_mask`, `prompt_mask`, `response_mask [B, S]`, `infer_logprobs [B, S - 1]` (the value at i scores
token i + 1), `routed_experts [B, S, L, K]`, uint8 or int16, with zeros in the last row and the padding. Whether L counts all
layers is not settled by its documentation: the model's config decides.
"""

from __future__ import annotations

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.dump import Dump, Sample, field_of, numbers
from rar_lib.traces.wire.verl import padded_routes, proto_columns, proto_state, require_run


def _claims(content: Content) -> str | None:
    return "a pickled ROLL DataProto" if proto_state(content, "roll.") is not None else None


def _read(content: Content) -> Dump:
    state = proto_state(content, "roll.")
    assert state is not None
    fields = proto_columns(str(content.path), state[0])
    mask = np.asarray(field_of("batch", fields, "attention_mask")) > 0
    samples = []
    for i in range(len(mask)):
        where = f"row {i}"
        at = np.flatnonzero(mask[i])
        require_run(where, at)
        ids = np.asarray(field_of("batch", fields, "input_ids"))[i][at].astype(np.int64)
        inside = np.asarray(field_of("batch", fields, "response_mask"))[i][at] > 0
        prompt = int(inside.argmax()) if inside.any() else len(ids)
        logprobs = {}
        if "infer_logprobs" in fields:
            scored = numbers(f"{where}: infer_logprobs", np.asarray(fields["infer_logprobs"])[i])
            if len(scored) != mask.shape[1] - 1:
                raise TraceError(f"{where}: infer_logprobs: expected {mask.shape[1] - 1} values, found {len(scored)}")
            whole = np.concatenate([[np.nan], scored])[at]
            logprobs["rollout"] = np.where(inside, whole, np.nan)
        experts = padded_routes(where, fields, i, mask.shape[1], at)
        samples.append(
            Sample(where, len(ids), experts, token_ids=ids, prompt=prompt, response_mask=inside, logprobs=logprobs)
        )
    return Dump("roll", "DataProto, padded right, last row zero", str(content.path), tuple(samples), content_sized=True)


READERS = (Reader("roll", "ROLL rollout mock dump, step_{n}.pkl (a pickle)", _claims, _read),)
