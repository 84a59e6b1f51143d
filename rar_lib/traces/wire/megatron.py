"""Megatron-Core: the lists of its RouterReplay, and the JSON lines of its router tracer.

Rows are sequence-major: position 0 of every sequence of the micro-batch, then position 1. Read as batch-major, a micro-batch of
more than one sequence is scrambled, so the batch size must be known.
- Recorded lists: `RouterReplay.get_recorded_data()`, one `[tokens, K]` int64 tensor a router in construction order, the tokens of this
  rank. `from_recorded` joins the ranks of a tensor-parallel group (sequence parallel: consecutive positions) and of a context-parallel
  one (zigzag: rank r holds chunks r and 2C - 1 - r). On disk: `torch.save` of `{"recorded": [ranks][layers] tensors, "token_ids" [b, s],
  "lengths" [b], "layer_numbers", "tensor_parallel", "context_parallel"}`, the arguments of that function.
- Tracer: `router_trace_rank{N}.jsonl`, a line a router call: `step, block, layer, rank, num_tokens, topk, top_indices`. The training hook
  counts layers from 0, the inference sink from 1; MTP blocks are left out. Micro-batches of a step repeat the same key in forward
  order (recomputed activations fire the hook a second time: trace without recompute). It holds no token ids. Give `batch_size`. Router logits,
  raw bfloat16 in `logits_rank{N}.bin` beside it, are read where they are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rar_lib.errors import TraceError, UndecidedError
from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.dump import Dump, Sample, field_of, integers
from rar_lib.traces.wire.pickles import plain


def _claims_recorded(content: Content) -> str | None:
    value = content.value if content.kind == "torch" else None
    return (
        "recorded lists with token_ids"
        if isinstance(value, dict) and {"recorded", "token_ids"} <= value.keys()
        else None
    )


def _read_recorded(content: Content) -> Dump:
    value = content.value
    arguments = {key: value[key] for key in ("layer_numbers", "tensor_parallel", "context_parallel") if key in value}
    return from_recorded(
        field_of("the object", value, "recorded"), plain(value["token_ids"]), plain(field_of("the object", value, "lengths")),
        path=str(content.path), **arguments,
    )  # fmt: skip


def from_recorded(
    ranks: Sequence[Sequence[Any]], token_ids: Any, lengths: Any, *, layer_numbers: Sequence[int] | None = None,
    tensor_parallel: int = 1, context_parallel: int = 1, path: str = "recorded lists", source: Any = "old",
) -> Dump:  # fmt: skip
    """Routes of one micro-batch from `RouterReplay.get_recorded_data()` of every rank that holds a part of it.

    Args:
        ranks: `[context_parallel * tensor_parallel]` lists of L_moe tensors `[tokens of this rank, K]`; the tensor-parallel
            ranks of context rank 0 first. Without sequence parallelism give one rank and tensor_parallel 1.
        token_ids: `[b, s]` integers, right-padded, as they were forwarded.
        lengths: `[b]` tokens of each sequence; rows of the padding are dropped.
        layer_numbers: transformer layer number of each router.
        tensor_parallel, context_parallel: sizes of the groups that the tokens are spread over.
        path: a name to show.
        source: which pass it was, `old` or `new`.

    Raises:
        TraceError: if ranks, routers or rows do not fit the batch.
    """
    ids = integers("token_ids", plain(token_ids), 2).astype(np.int64)
    told = integers("lengths", plain(lengths)).astype(np.int64)
    b, s = ids.shape
    if len(told) != b or (told < 0).any() or (told > s).any():
        raise TraceError(f"lengths: expected {b} lengths of at most {s} tokens, found {told.tolist()[:8]}")
    if (
        not isinstance(tensor_parallel, int)
        or not isinstance(context_parallel, int)
        or tensor_parallel * context_parallel < 1
    ):
        raise TraceError(
            f"recorded: expected parallel sizes of 1 or more, found {tensor_parallel!r} and {context_parallel!r}"
        )
    if len(ranks) != tensor_parallel * context_parallel:
        raise TraceError(
            f"recorded: expected {context_parallel} x {tensor_parallel} ranks (context x tensor), found {len(ranks)}"
        )
    depth = {len(rank) for rank in ranks}
    if len(depth) != 1 or 0 in depth:
        raise TraceError(f"recorded: expected the same routers on every rank, found {[len(rank) for rank in ranks]}")
    layers = []
    for layer in range(depth.pop()):
        parts = [_router(f"recorded: rank {r}, router {layer}", rank[layer]) for r, rank in enumerate(ranks)]
        layers.append(_unshard(f"recorded: router {layer}", parts, b, s, tensor_parallel, context_parallel))
    if len({part.shape for part in layers}) != 1:
        raise TraceError(
            f"recorded: routers choose different numbers of experts: {[part.shape[-1] for part in layers]}"
        )
    experts = np.stack(layers, 2)  # [b, s, L, K]
    samples = tuple(
        Sample(f"sequence {i}", int(n), experts[i, :n], token_ids=ids[i, :n]) for i, n in enumerate(told.tolist())
    )
    numbers = None if layer_numbers is None else tuple(int(n) for n in layer_numbers)
    layout = f"RouterReplay lists, [s, b] order, TP {tensor_parallel}, CP {context_parallel}"
    return Dump("megatron", layout, path, samples, "moe", numbers, source=source)


def _router(where: str, rows: Any) -> np.ndarray:
    if rows is None:
        raise TraceError(f"{where}: nothing was recorded (a fused router skips the hook)")
    return integers(where, plain(rows), 2)


def _unshard(where: str, parts: list[np.ndarray], b: int, s: int, tp: int, cp: int) -> np.ndarray:
    """`[b, s, K]` from the rows of every rank."""
    chunks: dict[int, np.ndarray] = {}
    for rank in range(cp):
        rows = np.concatenate(parts[rank * tp : (rank + 1) * tp])
        if len(rows) * cp != b * s:
            raise TraceError(
                f"{where}: {b} sequences of {s} tokens over {cp} context ranks need {b * s // cp} rows, found {len(rows)}"
            )
        local = rows.reshape(s // cp, b, -1)
        if cp == 1:
            return local.transpose(1, 0, 2)
        if s % (2 * cp):
            raise TraceError(f"{where}: {s} tokens do not split into {2 * cp} chunks of a zigzag")
        chunks[rank], chunks[2 * cp - 1 - rank] = np.split(local, 2)
    return np.concatenate([chunks[i] for i in range(2 * cp)]).transpose(1, 0, 2)


# ---------------------------------------------------------------- tracer

KEYS = {"step", "layer", "num_tokens", "top_indices"}


def _claims_tracer(content: Content) -> str | None:
    if content.kind == "jsonl" and content.records and all(record.keys() >= KEYS for _, record in content.records):
        return "step, layer and top_indices on every line"
    return None


def _read_tracer(content: Content) -> Dump:
    batch = content.options.batch_size
    if batch is None:
        raise UndecidedError(
            f"{content.path}: the tracer's rows interleave the sequences of a micro-batch, and it does not say how many there are; "
            f"give batch_size (--batch-size)"
        )
    if batch < 1:
        raise TraceError(f"{content.path}: batch_size: expected 1 or more, found {batch}")
    calls: dict[tuple[int, int], list[np.ndarray]] = {}
    scored: dict[tuple[int, int], list[np.ndarray | None]] = {}
    for where, record in content.records:
        if record.get("block", "decoder") != "decoder":
            continue
        rows = integers(f"{where}: top_indices", record["top_indices"], 2)
        step, layer, count = (_number(f"{where}: {key}", record[key]) for key in ("step", "layer", "num_tokens"))
        if len(rows) != count:
            raise TraceError(f"{where}: top_indices: expected num_tokens = {count} rows, found {len(rows)}")
        calls.setdefault((step, layer), []).append(rows)
        scored.setdefault((step, layer), []).append(_logits(content, where, record, count))
    layers = sorted({layer for _, layer in calls})
    samples = []
    for step in sorted({step for step, _ in calls}):
        counts = {layer: len(calls.get((step, layer), [])) for layer in layers}
        if len(set(counts.values())) != 1:
            raise TraceError(f"step {step}: routers fired unequally often, by layer: {counts}")
        for number in range(counts[layers[0]]):
            pieces = [calls[step, layer][number] for layer in layers]
            if len({piece.shape for piece in pieces}) != 1 or len(pieces[0]) % batch:
                shapes = sorted({piece.shape for piece in pieces})
                raise TraceError(f"step {step}, micro-batch {number}: {shapes} rows do not fit {batch} sequences")
            joined = np.stack(pieces, 1).reshape(-1, batch, len(layers), pieces[0].shape[1])
            parts = [scored[step, layer][number] for layer in layers]
            logits = [part.reshape(-1, batch, part.shape[-1]) for part in parts if part is not None]
            for i in range(batch):
                name = f"step {step}, micro-batch {number}, sequence {i}"
                own = np.stack([part[:, i] for part in logits], 1) if len(logits) == len(layers) else None
                samples.append(Sample(name, len(joined), joined[:, i], router_logits=own))
    offset, base = _first_layer(content, layers)
    return Dump(
        "megatron-tracer", f"tracer JSON lines, [s, b] order, layers counted from {base}", str(content.path), tuple(samples), "moe",
        tuple(layer - offset for layer in layers), source="old",
    )  # fmt: skip


def _logits(content: Content, where: str, record: Mapping[str, Any], tokens: int) -> np.ndarray | None:
    """Router logits of a call, `[tokens, E]` float32, from the file beside the tracer's; None where there is none."""
    side = content.path.with_name(content.path.name.replace("router_trace_", "logits_")).with_suffix(".bin")
    if "logit_offset" not in record or not side.exists() or side == content.path:
        return None
    shape = integers(f"{where}: logit_shape", record.get("logit_shape")).tolist()
    start, size = (_number(f"{where}: {key}", record.get(key)) for key in ("logit_offset", "logit_bytes"))
    if (
        len(shape) != 2
        or shape[0] != tokens
        or shape[1] < 1
        or size != shape[0] * shape[1] * 2
        or not 0 <= start <= side.stat().st_size - size
    ):
        raise TraceError(f"{where}: logits: {shape} at byte {start} for {tokens} tokens do not fit {side.name}")
    with side.open("rb") as file:
        file.seek(start)
        raw = np.frombuffer(file.read(size), "<u2")
    return (raw.astype(np.uint32) << 16).view(np.float32).reshape(shape)


def _number(where: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TraceError(f"{where}: expected an integer, found {value!r:.40}")
    return value


def _first_layer(content: Content, layers: list[int]) -> tuple[int, str]:
    """Are layers counted from 0 or from 1? A layer 0 or the model's own numbers decide."""
    model = content.options.model
    if 0 in layers:
        return 0, "0"
    if model is None:
        return 0, "an unknown start (give --model)"
    fits = [offset for offset in (0, 1) if {layer - offset for layer in layers} >= set(model.moe_layers)]
    if len(fits) != 1:
        raise TraceError(
            f"{content.path}: layers {layers} fit the MoE layers {list(model.moe_layers)} "
            f"{'counted from 0 and from 1' if fits else 'neither counted from 0 nor from 1'}"
        )
    return fits[0], str(fits[0])


READERS = (
    Reader(
        "megatron",
        "lists of Megatron-Core's RouterReplay with their batch, a torch file",
        _claims_recorded,
        _read_recorded,
    ),
    Reader("megatron-tracer", "Megatron-Core's router_trace_rank{N}.jsonl", _claims_tracer, _read_tracer),
)
