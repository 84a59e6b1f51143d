"""From a number to its cause: the tokens whose log-probs moved most, and what their routers did.

A mismatch statistic is often carried by a few tokens. Here they are listed with how many of their layers flipped, and any one of them
can be opened: which experts each side chose, layer by layer, and how small the margin was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rar_lib.errors import TraceError
from rar_lib.metrics.agreement import Agreement, check_pair
from rar_lib.traces.trace import RouteTrace

Decode = Callable[[Sequence[int]], str]


def extreme_tokens(
    a: RouteTrace, b: RouteTrace, result: Agreement, *, mask: np.ndarray | None = None, top: int = 10, decode: Decode | None = None
) -> pd.DataFrame:  # fmt: skip
    """The tokens with the largest |log π_B - log π_A|.

    The route that decides a token's log-prob is the one of the token before it (its input), so `layers_flipped` is counted there.

    Args:
        a, b: two records of the same tokens, both with log-probs (A the rollout, B the trainer).
        result: their agreement.
        mask: `[N]` bool, tokens to look at; by default those that both sides scored.
        top: how many.
        decode: turns token ids into text, for a readable column.

    Returns:
        One row a token: `sequence`, `position`, `token`, `logp_a`, `logp_b` (nats), `delta` (B - A, nats),
        `layers_flipped` (None where the input's routes are not known in every layer), `text` with `decode`.

    Raises:
        TraceError: if a side carries no log-probs, the first no token ids, or the two are of other tokens or routers.
    """
    check_pair(a, b)
    if a.logprobs is None or b.logprobs is None or a.token_ids is None:
        raise TraceError("extreme tokens: both records need log-probs, and the first its token ids")
    first, second = np.asarray(a.logprobs, np.float64), np.asarray(b.logprobs, np.float64)
    known = np.isfinite(first) & np.isfinite(second)
    known = known if mask is None else known & mask
    delta = second - first
    order = np.flatnonzero(known)
    order = order[np.argsort(-np.abs(delta[order]), kind="stable")]
    rows = []
    for token in (int(t) for t in order[:top]):
        sequence = int(np.searchsorted(a.offsets, token, side="right")) - 1
        position = token - int(a.offsets[sequence])
        told = position > 0 and bool(result.full_rows[token - 1])
        row: dict[str, Any] = {
            "sequence": sequence, "position": position, "token": int(a.token_ids[token]), "logp_a": first[token], "logp_b": second[token],
            "delta": delta[token], "layers_flipped": int(result.flipped[token - 1].sum()) if told else None,
        }  # fmt: skip
        if decode is not None:
            row["text"] = decode([int(a.token_ids[token])])
        rows.append(row)
    columns = ["sequence", "position", "token", "logp_a", "logp_b", "delta", "layers_flipped"]
    return pd.DataFrame(rows, columns=columns + (["text"] if decode is not None else []))


def context_of(trace: RouteTrace, sequence: int, position: int, decode: Decode, before: int = 24) -> str:
    """The text of up to `before` tokens before a token, and the token itself in brackets: `...25 + 17 = [42]`.

    Args:
        trace: a record with token ids.
        sequence, position: of the token.
        decode: turns token ids into text.
        before: tokens to show before it.

    Raises:
        TraceError: if the record carries no token ids.
    """
    if trace.token_ids is None:
        raise TraceError("context: the record carries no token ids")
    start, token = int(trace.offsets[sequence]), int(trace.offsets[sequence]) + position
    left = [int(t) for t in trace.token_ids[max(start, token - before) : token]]
    return f"{'...' if position > before else ''}{decode(left)}[{decode([int(trace.token_ids[token])])}]"


def routes_of(a: RouteTrace, b: RouteTrace, sequence: int, position: int) -> pd.DataFrame:
    """What both sides chose at one token, layer by layer.

    Args:
        a, b: two records of the same tokens.
        sequence, position: of the token whose routes to show. To explain a token's log-prob, ask for the one before it.

    Returns:
        One row a layer: `layer`, `experts_a`, `experts_b` (None where not recorded), `only_a`, `only_b`, `shared`, and `margin_b`
        where B carries margins.

    Raises:
        TraceError: for a position that the sequence does not have, or records of other tokens.
    """
    check_pair(a, b)
    token = int(a.offsets[sequence]) + position
    if not 0 <= position < int(a.lengths[sequence]):
        raise TraceError(
            f"sequence {sequence}: expected a position from 0 to {int(a.lengths[sequence]) - 1}, found {position}"
        )
    rows = []
    for i, layer in enumerate(a.header.moe_layers):
        left = sorted(a.experts[token, i].tolist()) if a.recorded[token, i] else None
        right = sorted(b.experts[token, i].tolist()) if b.recorded[token, i] else None
        both = left is not None and right is not None
        row: dict[str, Any] = {
            "layer": layer, "experts_a": left, "experts_b": right,
            "only_a": sorted(set(left or []) - set(right or [])) if both else None,
            "only_b": sorted(set(right or []) - set(left or [])) if both else None,
            "shared": len(set(left or []) & set(right or [])) if both else None,
        }  # fmt: skip
        if b.margins is not None:
            row["margin_b"] = float(b.margins[token, i])
        rows.append(row)
    return pd.DataFrame(rows)


def strip_table(
    a: RouteTrace, b: RouteTrace, sequence: int, *, planned: np.ndarray | None = None, decode: Decode | None = None
) -> pd.DataFrame:
    """One answer, a row a token and MoE layer: whether the two sides chose the same experts there.

    Args:
        a, b: two records of the same tokens (A the rollout, B the trainer without replay).
        sequence: which.
        planned: `[N, L]` bool, cells that replay forces.
        decode: turns token ids into text; without it the text is the id.

    Returns:
        `position`, `text`, `layer`, `state` (`same`, `differs`, `replayed`: differs and planned, `missing`: a side has no record),
        `margin` (of B, NaN without), `delta` (log π_B - log π_A of the token in nats, NaN where a side did not score it).

    Raises:
        TraceError: for a sequence that is not there, or records of other tokens.
    """
    check_pair(a, b)
    if not 0 <= sequence < a.num_sequences:
        raise TraceError(f"sequence: expected 0 to {a.num_sequences - 1}, found {sequence}")
    rows = slice(int(a.offsets[sequence]), int(a.offsets[sequence + 1]))
    known = a.recorded[rows] & b.recorded[rows]
    differs = np.sort(a.experts[rows], -1) != np.sort(b.experts[rows], -1)
    forced = np.zeros_like(known) if planned is None else planned[rows]
    state = np.where(~known, "missing", np.where(~differs.any(-1), "same", np.where(forced, "replayed", "differs")))
    count, layers = known.shape
    margin = np.full(known.shape, np.nan) if b.margins is None else b.margins[rows]
    if a.logprobs is None or b.logprobs is None:
        delta = np.full(count, np.nan)
    else:
        delta = np.asarray(b.logprobs[rows], np.float64) - np.asarray(a.logprobs[rows], np.float64)
    tokens = [None] * count if a.token_ids is None else a.token_ids[rows].tolist()
    texts = ["" if t is None else str(t) if decode is None else decode([int(t)]) for t in tokens]
    return pd.DataFrame(
        {
            "position": np.repeat(np.arange(count), layers), "text": np.repeat(np.array(texts, dtype=object), layers),
            "layer": np.tile(a.header.moe_layers, count), "state": state.ravel(), "margin": np.where(known, margin, np.nan).ravel(),
            "delta": np.repeat(delta, layers),
        }
    )  # fmt: skip
