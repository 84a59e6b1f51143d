"""Is this record of routes sound? Verdicts for a file from anywhere, without a GPU and without the engine that wrote it.

A record that looks fine can be dead (every route reads as expert 0), shifted by a row, cut to eight bits, or of another request; forced
in training it does damage that no loss curve explains. The doctor looks at what was written, before anything is repaired, and says
what is wrong, where, why that happens, and what to do. Errors mean that the record must not be replayed.

    report = examine("tq_batch.pt", model="config.json")
    print(report); report.exit_status   # 0 clean, 1 warnings, 2 must not be replayed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rar_lib.errors import TraceError, UndecidedError
from rar_lib.traces.blocks import token_blocks
from rar_lib.traces.layers import ModelShape
from rar_lib.traces.scan import are_probabilities, scan
from rar_lib.traces.siblings import Member, prefix_verdicts, repeated_verdicts
from rar_lib.traces.tally import Tally
from rar_lib.traces.trace import RouteTrace, Status
from rar_lib.traces.verdicts import Report, Verdict, listed, merged, verdict
from rar_lib.traces.wire import OWN, detect, read_content
from rar_lib.traces.wire.content import Content
from rar_lib.traces.wire.convert import POSITIVE, Placed, place, positions
from rar_lib.traces.wire.dump import Dump, ReadOptions, Sample


def examine(
    source: str | Path | RouteTrace | Dump, format: str = "auto", *, model: ModelShape | Mapping[str, Any] | str | Path | None = None,
    payload_layers: Sequence[int] | None = None, batch_size: int | None = None, allow_pickle: bool = False,
    name: str = "trace in memory",
) -> Report:  # fmt: skip
    """Verdicts on a file, a dump that was read, or a trace in memory.

    Args:
        source: path of a file of any known format, a Dump, or a RouteTrace.
        format: of the file; `auto` detects it.
        model: the routers: `config.json`, checkpoint folder, mapping or ModelShape. Without it neither the number of experts nor
            the layer numbers can be checked, which the report says.
        payload_layers, batch_size, allow_pickle: as for `read_dump`.
        name: what to call a trace in memory.

    Returns:
        A Report. A file that cannot be read gives one with the verdict UNREADABLE and the reader's message.

    Raises:
        TraceError: only for a model that cannot be read.
    """
    shape = None if model is None else ModelShape.load(model)
    layers = None if payload_layers is None else tuple(payload_layers)
    if isinstance(source, RouteTrace):
        return _trace_report(name, source, shape)
    if isinstance(source, Dump):
        return _dump_report(source, shape, layers)
    options = ReadOptions(shape, layers, batch_size, allow_pickle)
    try:
        content = Content(Path(source), options)
        found = detect(content) if format == "auto" else format
        if found == OWN:
            return _trace_report(str(source), RouteTrace.load(source), shape)
        dump = read_content(content, found)
    except TraceError as error:
        code = "UNDECIDED" if isinstance(error, UndecidedError) else "UNREADABLE"
        return Report(str(source), {}, (verdict(code, str(source), str(error)),))
    return _dump_report(dump, shape, layers)


# ---------------------------------------------------------------- our own format


def _trace_report(name: str, trace: RouteTrace, shape: ModelShape | None) -> Report:
    header = trace.header
    found: list[Verdict] = []
    if not trace.is_intact():
        found.append(verdict("PAYLOAD_CHANGED", name, "the SHA-256 of header and arrays is not the one in the file"))
    status = np.asarray(trace.status)
    if status.max(initial=0) > max(Status):
        found.append(
            verdict("TRACE_CONTRADICTS_ITSELF", name, f"a state of {status.max()}, where {max(Status)} is the largest")
        )
    if shape is not None and (shape.moe_layers, shape.top_k) != (header.moe_layers, header.top_k):
        seen = f"layers {listed(header.moe_layers)} with top-{header.top_k}; the model has {listed(shape.moe_layers)} with top-{shape.top_k}"
        found.append(verdict("LAYERS_MISMATCH", "header", seen))
    experts = header.num_experts if shape is None else min(shape.num_experts, header.num_experts)
    if shape is not None and shape.num_experts != header.num_experts:
        found.append(
            verdict("LAYERS_MISMATCH", "header", f"{header.num_experts} experts, the model has {shape.num_experts}")
        )
    if trace.logprobs is not None:
        found += _wild(header.source, [(name, np.asarray(trace.logprobs))])
    tally = Tally(header.moe_layers, header.top_k, experts)
    recorded = trace.recorded
    written_over = 0
    for rows in token_blocks(trace.num_tokens, header.num_layers):
        ids, known = trace.experts[rows], recorded[rows]
        cells = scan(ids, experts)
        tally.add(ids, known, cells, rows.start, trace.place_of)
        if not known.all():
            written_over += int((ids[~known] != 0).any(-1).sum())
    if written_over:
        seen = f"{written_over} cells without a route hold ids"
        found.append(verdict("TRACE_CONTRADICTS_ITSELF", name, seen, cells=written_over))
    tally.possible = _possible(trace)
    found += tally.verdicts()
    if not tally.dead:
        found += _gaps(_sequences(trace), tally.dead_layers())
    if trace.policy_version is not None:
        found += _mixed(enumerate(np.split(trace.policy_version, trace.offsets[1:-1])))
    if trace.token_ids is None:
        found.append(verdict("TOKENS_MISSING", name, "no token ids"))
    elif not tally.dead:
        members = _members(trace)
        found += prefix_verdicts(members) + repeated_verdicts(members)
    facts = {
        "format": OWN, "layout": f"schema {header.schema_version}, written by {header.producer} {header.producer_version}".strip(),
        "samples": trace.num_sequences, "tokens": trace.num_tokens,
        "routes": f"{header.num_layers} MoE layers ({listed(header.moe_layers)}), top-{header.top_k} of {header.num_experts}",
        **tally.facts(),
    }  # fmt: skip
    return Report(name, facts, tuple(found))


def _possible(trace: RouteTrace) -> np.ndarray:
    """`[L]` cells of each layer that could hold a route."""
    if trace.status.ndim == 2:
        return np.asarray((trace.status != Status.LAST).sum(0))
    return np.full(trace.header.num_layers, trace.num_tokens - int((trace.status == Status.LAST).sum()))


def _sequences(trace: RouteTrace) -> Iterator[tuple[int, str, int | None, np.ndarray]]:
    """Index, name, prompt length and `[T, L]` missing mask of the sequences in which something is missing."""
    if not (np.asarray(trace.status) == Status.MISSING).any():
        return
    for i in range(trace.num_sequences):
        status = trace.status[trace.offsets[i] : trace.offsets[i + 1]]
        missing = status == Status.MISSING
        if missing.any():
            wide = (
                missing
                if missing.ndim == 2
                else np.broadcast_to(missing[:, None], (len(missing), trace.header.num_layers))
            )
            yield i, f"sequence {i}", None, wide


def _members(trace: RouteTrace) -> list[Member]:
    """Every sequence, as views."""
    assert trace.token_ids is not None
    recorded = trace.recorded
    out = []
    for i in range(trace.num_sequences):
        rows = slice(int(trace.offsets[i]), int(trace.offsets[i + 1]))
        versions = None if trace.policy_version is None else trace.policy_version[rows]
        out.append(Member(f"sequence {i}", trace.token_ids[rows], trace.experts[rows], recorded[rows], versions))
    return out


# ---------------------------------------------------------------- foreign dumps


def _dump_report(dump: Dump, shape: ModelShape | None, payload_layers: tuple[int, ...] | None) -> Report:
    found = [*dump.notes, *_logprobs(dump)]
    facts = dump.facts()
    routed = dump.with_routes()
    if not routed:
        if dump.routes_expected and any(sample.tokens > 1 for sample in dump.samples):
            found.append(verdict("NO_ROUTES", dump.path, f"none of {len(dump.samples)} samples carries routes"))
        return Report(dump.path, {**facts, **_logprob_facts(dump)}, (*merged(found), *_versions(dump)))
    axes = {experts.shape[1] for _, _, experts in routed}
    numbers, layout = _layers(dump, shape, payload_layers, max(axes))
    if isinstance(layout, Verdict) or len(axes) > 1:
        told = (
            layout
            if isinstance(layout, Verdict)
            else verdict("LAYERS_MISMATCH", "samples", f"layer axes of {sorted(axes)} in one file")
        )
        return Report(dump.path, facts, (*found, told))
    top_k = shape.top_k if shape is not None else routed[0][2].shape[2]
    experts = shape.num_experts if shape is not None else dump.num_experts
    if shape is None:
        found.append(
            verdict(
                "MODEL_UNKNOWN",
                "layers and ids",
                f"{max(axes)} payload layers; the largest id is checked against nothing",
            )
        )
    if top_k == 1:
        found.append(verdict("ZERO_AMBIGUOUS", "all layers", "top-1 routing"))
    tally = Tally(numbers, top_k, experts, guessed=shape is None and dump.layer_axis != "moe")
    placed: list[Placed | None] = [None] * len(dump.samples)
    for i, sample, _ in routed:
        put = place(sample, i, layout, top_k, experts, dump.content_sized)
        placed[i] = put
        if put.problem is not None:
            found.append(put.problem)
            if put.problem.code != "ID_WRAPPED":  # wrapped ids lie on their tokens all the same
                tally.unplaced += max(sample.tokens - 1, 0) * len(layout)
                continue
        known = put.status == Status.RECORDED
        tally.add(put.ids, known, put.cells, 0, partial("{}, token {}".format, sample.name))
        tally.possible = tally.possible + (put.status != Status.LAST).sum(0)
    found += tally.verdicts()
    empty = [i for i, sample in enumerate(dump.samples) if sample.experts is None and sample.tokens > 1]
    tally.unplaced += sum((dump.samples[i].tokens - 1) * len(layout) for i in empty)
    if shape is not None and dump.dense_rows == "zeros" and not tally.dead:
        found += _dense_layers(routed, layout)
    if empty:
        found.append(
            verdict(
                "SAMPLE_WITHOUT_ROUTES",
                f"samples {listed(empty)}",
                f"{len(empty)} of {len(dump.samples)} came without routes",
                samples=tuple(empty),
            )
        )
    if not tally.dead:
        masks = [
            (i, s, p.status == Status.MISSING)
            for i, (s, p) in enumerate(zip(dump.samples, placed, strict=True))
            if p and not p.problem
        ]
        found += _gaps(((i, s.name, s.prompt, m) for i, s, m in masks if m.any()), tally.dead_layers())
        members = [
            Member(s.name, s.token_ids, p.ids, p.status == Status.RECORDED, s.versions)
            for s, p in zip(dump.samples, placed, strict=True)
            if p is not None and p.problem is None and s.token_ids is not None and s.tokens
        ]
        found += prefix_verdicts(members) + repeated_verdicts(members)
    found += _versions(dump)
    if any(s.token_ids is None for s in dump.samples):
        found.append(verdict("TOKENS_MISSING", dump.path, "samples without token ids"))
    scored = [s for s in dump.samples if s.router_logits is not None]
    if scored and all(are_probabilities(np.asarray(s.router_logits)) for s in scored):
        found.append(
            verdict("SCORES_ARE_PROBABILITIES", f"{len(scored)} samples", "every row is non-negative and sums to 1")
        )
    without = {"samples without routes": len(empty)}
    return Report(dump.path, {**facts, **tally.facts(), **without, **_logprob_facts(dump)}, tuple(merged(found)))


def _dense_layers(routed: list[tuple[int, Sample, np.ndarray]], layout: tuple[int, ...]) -> list[Verdict]:
    """Positions that the config calls dense, and that hold routes all the same."""
    length = routed[0][2].shape[1]
    others = [p for p in range(length) if p not in layout]
    if not others:
        return []
    written, rows = np.zeros(len(others), np.int64), 0
    for _, _, experts in routed:
        written += ((experts[:, others] != 0) & (experts[:, others].astype(np.int64) != -1)).any(-1).sum(0)
        rows += len(experts)
    full = [p for p, n in zip(others, written.tolist(), strict=True) if n > 0.5 * rows]
    if not full:
        return []
    seen = f"{int(written.sum())} rows hold routes at positions {listed(full)}, which the config says have no router"
    return [verdict("DENSE_LAYER_HAS_ROUTES", f"layers {listed(full)}", seen, layers=tuple(full))]


def _layers(
    dump: Dump, shape: ModelShape | None, payload_layers: tuple[int, ...] | None, length: int
) -> tuple[tuple[int, ...], tuple[int, ...] | Verdict]:
    """Layer numbers to show, and the positions to look at (or the verdict that there are none)."""
    if shape is None:
        named = payload_layers or dump.payload_layers
        return (named if named is not None and len(named) == length else tuple(range(length))), tuple(range(length))
    try:
        return shape.moe_layers, positions(dump, length, shape, payload_layers)
    except TraceError as error:
        return shape.moe_layers, verdict("LAYERS_MISMATCH", "layer axis", str(error).removeprefix("layer axis: "))


def _logprobs(dump: Dump) -> list[Verdict]:
    """Log-probs of sampled tokens that are missing, or that no policy can have given."""
    out = []
    for source in sorted({name for sample in dump.samples for name in sample.logprobs}):
        sampled = []
        for sample in dump.samples:
            if source in sample.logprobs:
                values = sample.logprobs[source]
                mask = sample.response_mask
                sampled.append((sample.name, values if mask is None else np.where(mask, values, np.nan)))
                gone = 0 if mask is None else int((mask & np.isnan(values)).sum())
                if gone:
                    first = int(np.flatnonzero(mask & np.isnan(values))[0])
                    seen = f"{source}: {gone} sampled tokens, first token {first}"
                    out.append(verdict("LOGPROBS_MISSING", sample.name, seen, cells=gone))
        out += _wild(source, sampled)
    return out


def _wild(source: str, values: list[tuple[str, np.ndarray]]) -> list[Verdict]:
    """Log-probs above 0, or infinite."""
    wild = []
    for name, found in values:
        bad = np.flatnonzero((found > POSITIVE) | np.isinf(found))
        wild += [(name, int(token), float(found[token])) for token in bad[:1]]
    if not wild:
        return []
    name, token, value = wild[0]
    return [
        verdict(
            "LOGPROBS_IMPOSSIBLE",
            f"{name}, token {token}",
            f"{source}: {value:.6g} there, and in {len(wild)} samples in all",
        )
    ]


def _logprob_facts(dump: Dump) -> dict[str, Any]:
    sources = sorted({name for sample in dump.samples for name in sample.logprobs})
    return {"log-probs": ", ".join(sources)} if sources else {}


# ---------------------------------------------------------------- gaps and versions


def _gaps(missing: Iterable[tuple[int, str, int | None, np.ndarray]], dead: tuple[int, ...]) -> list[Verdict]:
    """Rows without a route, by where they lie: at the start of a sequence (its prompt) or further on."""
    prompts: list[tuple[int, int]] = []
    blocks: list[tuple[int, str, int]] = []
    whole: list[int] = []
    for i, name, prompt, mask in missing:
        living = np.delete(mask, list(dead), 1) if dead else mask
        rows = np.asarray(living.all(-1))[:-1]
        if not len(rows):
            continue
        if rows.all():
            whole.append(i)
            continue
        lead = int(rows.argmin())
        begins = lead if prompt is None else min(lead, prompt)
        if begins:
            prompts.append((i, begins))
        rest = living[begins:-1]
        if rest.any():
            first = begins + int(rest.any(-1).argmax())
            blocks.append((i, f"{name}, from token {first}", int(rest.any(-1).sum())))
    out = []
    if whole:
        out.append(
            verdict(
                "SAMPLE_WITHOUT_ROUTES",
                f"samples {listed(whole)}",
                f"{len(whole)} sequences hold no route",
                samples=tuple(whole),
            )
        )
    if prompts:
        total = sum(n for _, n in prompts)
        samples = tuple(i for i, _ in prompts)
        out.append(
            verdict(
                "PROMPT_MISSING",
                f"samples {listed(samples)}",
                f"{total} rows at the start of {len(samples)} sequences",
                samples=samples,
                cells=total,
            )
        )
    if blocks:
        total = sum(n for _, _, n in blocks)
        samples = tuple(i for i, _, _ in blocks)
        seen = f"{total} rows in {len(samples)} sequences lack routes after the start, first {blocks[0][1]}"
        out.append(verdict("ROWS_MISSING", f"samples {listed(samples)}", seen, samples=samples, cells=total))
    return out


def _versions(dump: Dump) -> list[Verdict]:
    out = _mixed(((i, s.versions) for i, s in enumerate(dump.samples) if s.versions is not None))
    split = []
    for i, sample in enumerate(dump.samples):
        if sample.versions is not None and sample.logprob_versions is not None:
            differs = sample.versions != sample.logprob_versions
            if sample.response_mask is not None:
                differs &= sample.response_mask
            if differs.any():
                split.append((i, int(differs.sum())))
    if split:
        samples = tuple(i for i, _ in split)
        seen = f"{sum(n for _, n in split)} tokens were routed and scored under different weights"
        out.append(verdict("VERSION_SPLIT", f"samples {listed(samples)}", seen, samples=samples))
    return out


def _mixed(versions: Iterable[tuple[int, np.ndarray]]) -> list[Verdict]:
    mixed = [(i, np.unique(v)) for i, v in versions if len(v) and (v != v[0]).any()]
    if not mixed:
        return []
    i, seen = mixed[0]
    samples = tuple(i for i, _ in mixed)
    told = f"{len(mixed)} sequences hold several weight versions, sample {i}: {listed(seen.tolist())}"
    return [verdict("VERSION_MIXED", f"samples {listed(samples)}", told, samples=samples)]
