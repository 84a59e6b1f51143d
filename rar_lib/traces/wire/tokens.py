"""Token files: JSON lines of `{"token_ids": [...]}`, to be routed by one's own model.

`prompt` (number of prompt tokens) and `text` are optional. No framework dumps the routes of its training side; with the tokens at hand
they can be recorded anywhere the model runs.
"""

from __future__ import annotations

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.dump import Dump, Sample, integers

KEYS = {"token_ids", "prompt", "text"}


def _claims(content: Content) -> str | None:
    records = content.records if content.kind == "jsonl" else []
    plain = bool(records) and all("token_ids" in record and record.keys() <= KEYS for _, record in records)
    return "token_ids on every line" if plain else None


def _read(content: Content) -> Dump:
    samples = []
    for where, record in content.records:
        ids = integers(f"{where}: token_ids", record["token_ids"]).astype(np.int64)
        prompt = record.get("prompt")
        if prompt is not None and (not isinstance(prompt, int) or not 0 <= prompt <= len(ids)):
            raise TraceError(f"{where}: prompt: expected a number of tokens from 0 to {len(ids)}, found {prompt!r:.40}")
        mask = None if prompt is None else np.arange(len(ids)) >= prompt
        samples.append(
            Sample(
                where, len(ids), token_ids=ids, prompt=prompt, response_mask=mask, text=str(record.get("text") or "")
            )
        )
    return Dump("tokens", "token ids, no routes", str(content.path), tuple(samples), routes_expected=False)


READERS = (Reader("tokens", "token ids, JSON lines", _claims, _read),)
