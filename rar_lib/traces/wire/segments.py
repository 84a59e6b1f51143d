"""Generations that were interrupted and resumed: one sequence from several answers.

A partial rollout goes on after a weight update with what was generated so far as its prompt, so its routes come in segments that may
overlap by a row or leave a gap. Rows are placed by their token, never shifted: where two segments hold a row, the first is kept (it chose
the token that follows); where none does, the row is missing. Each token keeps the version of the weights that consumed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.scan import scan
from rar_lib.traces.verdicts import Verdict, verdict
from rar_lib.traces.wire.dump import Sample


def join_segments(segments: Sequence[Sample], name: str = "") -> tuple[Sample, tuple[Verdict, ...]]:
    """One sample from the segments of one generation.

    Args:
        segments: in order of time. Each is the whole sequence so far (its prompt holds what was generated before) with routes from its
            `first` token on; token ids are required.
        name: of the joined sample, by default the last one's.

    Returns:
        The sample, and a SEGMENTS_DISAGREE verdict where overlapping rows differ under one weight version. Its
        `experts` are `[T, layers, K]` int64, -1 where no segment holds a row; its response mask and log-probs are
        those of the segment that sampled each token.

    Raises:
        TraceError: without token ids or routes, or if a segment does not continue the one before it.
    """
    whole = segments[-1]
    if whole.token_ids is None:
        raise TraceError(f"{whole.name}: segments need token ids")
    shapes = {s.experts.shape[1:] for s in segments if s.experts is not None}
    if len(shapes) != 1:
        raise TraceError(f"{whole.name}: expected segments with one shape of routes, found {sorted(shapes)}")
    name = name or whole.name
    experts = np.full((whole.tokens, *shapes.pop()), -1, np.int64)
    versions = np.full(whole.tokens, -1, np.int64)
    notes, before = [], 0
    for segment in segments:
        if segment.token_ids is None or not np.array_equal(segment.token_ids, whole.token_ids[: segment.tokens]):
            raise TraceError(f"{segment.name}: expected the first {segment.tokens} tokens of {whole.name}")
        if segment.versions is not None:  # the last token of a segment is consumed by the next one
            versions[max(before - 1, 0) :] = segment.versions[-1]
            versions[max(before - 1, 0) : segment.tokens] = segment.versions[max(before - 1, 0) :]
        before = segment.tokens
    for number, segment in enumerate(segments):
        if segment.experts is None:
            continue
        rows = np.arange(segment.first, min(segment.first + len(segment.experts), segment.tokens - 1))
        told = segment.experts[: len(rows)].astype(np.int64)
        written = ~scan(told, None).nothing.all(-1)
        taken = (experts[rows] >= 0).any((-1, -2))
        same = segment.versions is None or versions[rows] == segment.versions[rows]
        differs = taken & written & same & (np.sort(experts[rows], -1) != np.sort(told, -1)).any((-1, -2))
        if differs.any():
            where = f"{name}, segment {number}, tokens {rows[differs].tolist()[:6]}"
            notes.append(verdict("SEGMENTS_DISAGREE", where, f"{int(differs.sum())} overlapping rows differ"))
        fresh = written & ~taken
        experts[rows[fresh]] = told[fresh]
    known = all(s.versions is not None for s in segments)
    joined = replace(
        whole, name=name, experts=experts, first=0, recorded=None, prompt=segments[0].prompt, response_mask=_masks(segments),
        logprobs=_logprobs(segments), versions=versions if known else None,
    )  # fmt: skip
    return joined, tuple(notes)


def _masks(segments: Sequence[Sample]) -> np.ndarray | None:
    """Tokens that the policy sampled, as the segment says that brought them."""
    if any(s.response_mask is None for s in segments):
        return None
    out, before = np.zeros(segments[-1].tokens, bool), 0
    for segment in segments:
        assert segment.response_mask is not None
        out[before : segment.tokens] = segment.response_mask[before:]
        before = segment.tokens
    return out


def _logprobs(segments: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Log-probs of the segment that sampled each token."""
    if any("rollout" not in s.logprobs for s in segments):
        return {}
    out, before = np.full(segments[-1].tokens, np.nan), 0
    for segment in segments:
        out[before : segment.tokens] = segment.logprobs["rollout"][before:]
        before = segment.tokens
    return {"rollout": out}


def join_interrupted(
    samples: Sequence[Sample], interrupted: Sequence[bool]
) -> tuple[tuple[Sample, ...], tuple[Verdict, ...]]:
    """Join every interrupted answer with the later one whose prompt is exactly what it had so far.

    Args:
        samples: in file order.
        interrupted: one flag a sample: it was ended from outside, not by a stop token or its length.

    Returns:
        The samples, joined ones in place of their last part, and what `join_segments` noticed.

    Raises:
        TraceError: as `join_segments`.
    """
    waiting: dict[bytes, list[Sample]] = {}
    out: list[Sample] = []
    notes: list[Verdict] = []
    for sample, stopped in zip(samples, interrupted, strict=True):
        chain = [sample]
        if sample.token_ids is not None and sample.prompt is not None:
            chain = waiting.pop(sample.token_ids[: sample.prompt].tobytes(), []) + chain
        if stopped and sample.token_ids is not None:
            waiting[sample.token_ids.tobytes()] = chain
            continue
        if len(chain) > 1 and any(s.experts is not None for s in chain):
            joined, found = join_segments(chain)
            out.append(joined)
            notes += found
        else:
            out.append(sample)
    out += [chain[-1] for chain in waiting.values()]  # never resumed: aborted
    return tuple(out), tuple(notes)
