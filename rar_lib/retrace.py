"""The training side of a comparison: the routes and log-probs that one's own model gives to tokens that are already there.

An inference engine can dump its routes; no training framework does. So the tokens of a dump are forwarded once through the model that
trains (any supported Transformers MoE, or a Megatron model), and what its routers choose is recorded. Numbers of the model are
unchanged. Weights must be those of the rollout for a mismatch, and later ones for a drift: nothing in the files can know that, so the
caller says which version they are.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rar_lib.errors import EngineError, TraceError
from rar_lib.replay.contexts import recording
from rar_lib.traces.trace import RouteTrace, Status
from rar_lib.traces.wire import OWN, detect, read_content
from rar_lib.traces.wire.content import Content
from rar_lib.traces.wire.dump import ReadOptions

TELL_SECONDS = 5.0  # between two lines that say how far a long recording is
logger = logging.getLogger("rar")


def record_tokens(
    model: Any, sequences: Sequence[Sequence[int] | np.ndarray], *, batch_size: int = 16, margins: bool = True, scores: bool = False,
    source: Literal["old", "new"] = "old", producer: str = "", producer_version: str = "", model_id: str = "", version: int | None = None,
) -> RouteTrace:  # fmt: skip
    """Route given sequences through a model in memory.

    Args:
        model: a Transformers MoE, or a Megatron GPTModel built by this library; its mode and weights stay as they are.
        sequences: token ids, one list a sequence.
        batch_size: sequences a forward, right-padded (attention is causal, so padding reaches no token).
        margins: keep s_(K) - s_(K+1) of the ranked scores of every cell.
        scores: keep the ranked scores themselves, `[tokens, L, E]`.
        source: `old` for the weights that sampled, `new` for later ones.
        producer, producer_version: what to call the engine and its arithmetic; by default hf or megatron and the model's dtype.
        model_id: what to call the weights.
        version: of the weights, kept for every token.

    Returns:
        A trace in the order of the sequences, with token ids, log-probs at temperature 1 (NaN at the first token of each, which nothing
        predicts), margins and scores as asked for.

    Raises:
        TraceError: without sequences, or with an empty one.
        ReplayError: if the model has routers that cannot be recorded.
    """
    rows = [np.asarray(s, dtype=np.int64) for s in sequences]
    if not rows or any(r.ndim != 1 or len(r) == 0 for r in rows):
        raise TraceError(
            "sequences: expected lists of at least one token id, found " + ("an empty one" if rows else "none")
        )
    megatron = type(model).__module__.startswith("megatron")
    parts, told = [], time.monotonic()
    with torch.no_grad(), recording(model, margins=margins, scores=scores) as record:
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            tokens = torch.zeros(len(part), max(map(len, part)), dtype=torch.int64)
            for i, row in enumerate(part):
                tokens[i, : len(row)] = torch.from_numpy(row)
            logits = _megatron_logits(model, tokens) if megatron else model(input_ids=tokens, use_cache=False).logits
            parts.append(_pack(record, part, tokens, logits))
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                logger.info("recorded %d of %d sequences", start + len(part), len(rows))
    header = record.header.model_copy(
        update={
            "source": source,
            "producer": producer or ("megatron" if megatron else "hf"),
            "model_id": model_id,
            "producer_version": producer_version or _dtype_of(model),
        }
    )
    trace = RouteTrace.concatenate(parts)
    versions = None if version is None else np.full(trace.num_tokens, version, np.int64)
    return replace(trace, header=header, policy_version=versions)


def _dtype_of(model: Any) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def _megatron_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    from rar_lib.engines.megatron_cpu import without_cuda

    length = tokens.shape[1]
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    positions = torch.arange(length)[None, :].expand_as(tokens)
    with without_cuda():
        return model(input_ids=tokens, position_ids=positions, attention_mask=hidden)


def _pack(record: Any, part: list[np.ndarray], tokens: torch.Tensor, logits: torch.Tensor) -> RouteTrace:
    """One forward's routes, without its padding."""
    ids = record.take(len(part)).cpu()[:, : tokens.shape[1]]
    lengths = torch.tensor([len(row) for row in part])
    position = torch.arange(tokens.shape[1])[None, :]
    inside = position < lengths[:, None]
    status = torch.where(position == lengths[:, None] - 1, Status.LAST.value, Status.RECORDED.value)
    logp = torch.full(tokens.shape, torch.nan)
    wide = torch.log_softmax(logits[:, :-1].float(), -1)
    logp[:, 1:] = wide.gather(-1, tokens[:, 1:, None])[..., 0]
    beside = {name: values.cpu()[:, : tokens.shape[1]][inside].float().numpy() for name, values in record.last.items()}
    return RouteTrace.from_packed(
        record.header, ids[inside].numpy(), lengths.numpy(), status[inside].numpy().astype(np.uint8),
        token_ids=tokens[inside].numpy(), logprobs=logp[inside].numpy(), **beside,
    )  # fmt: skip


def token_sequences(
    path: str | Path, format: str = "auto", *, allow_pickle: bool = False, model: Any = None
) -> list[np.ndarray]:
    """The token ids of a trace, a dump or a token file: `[T]` int64 a sequence.

    Args:
        path: of the file.
        format, allow_pickle, model: as for `read_dump`.

    Raises:
        TraceError: if the file cannot be read, or a sequence carries none.
    """
    from rar_lib.traces.layers import ModelShape

    shape = None if model is None else ModelShape.load(model)
    content = Content(Path(path), ReadOptions(model=shape, allow_pickle=allow_pickle))
    name = detect(content) if format == "auto" else format
    if name == OWN:
        trace = RouteTrace.load(path)
        if trace.token_ids is None:
            raise TraceError(f"{path}: the trace carries no token ids")
        return np.split(np.asarray(trace.token_ids), trace.offsets[1:-1])
    dump = read_content(content, name)
    missing = [s.name for s in dump.samples if s.token_ids is None]
    if missing:
        raise TraceError(f"{path}: {missing[0]} carries no token ids, so nothing can be routed")
    return [s.token_ids for s in dump.samples if s.token_ids is not None]


def record_file(
    path: str | Path, checkpoint: Path, *, engine: Literal["hf", "megatron"] = "hf", format: str = "auto",
    dtype: Literal["float32", "bfloat16"] = "float32", allow_pickle: bool = False, **options: Any,
) -> RouteTrace:  # fmt: skip
    """Route the tokens of a file through a checkpoint.

    Args:
        path: a trace, a dump with token ids, or a token file.
        checkpoint: folder of a Hugging Face MoE.
        engine: `hf` (any supported family), or `megatron` (the families that its adapter maps).
        format, allow_pickle: as for `read_dump`.
        dtype: of the forward.
        options: as for `record_tokens`.

    Raises:
        TraceError: if the file carries no token ids.
        EngineError: if the engine is missing or cannot load the checkpoint, or a token is outside its vocabulary.
    """
    sequences = token_sequences(path, format, allow_pickle=allow_pickle, model=checkpoint)
    with _loaded(checkpoint, engine, dtype) as (model, vocabulary):
        largest = max(int(row.max(initial=0)) for row in sequences)
        if largest >= vocabulary:
            raise EngineError(
                f"{path}: token id {largest} is outside the {vocabulary} of {checkpoint}: another model's tokens"
            )
        return record_tokens(model, sequences, model_id=checkpoint.name, **options)


@contextlib.contextmanager
def _loaded(checkpoint: Path, engine: str, dtype: str) -> Iterator[tuple[Any, int]]:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise EngineError(
            "recording needs Transformers, which is not installed; install the extra rar-lib[hf]"
        ) from None
    from rar_lib.checkpoint import load_model, load_model_config

    size = int(load_model_config(checkpoint).vocab_size)
    if engine == "hf":
        yield load_model(checkpoint, getattr(torch, dtype)), size
        return
    if engine != "megatron" or dtype != "float32":
        raise EngineError(f"engine: expected hf, or megatron in float32, found {engine!r} in {dtype}")
    from rar_lib.engines.megatron_cpu import start_parallel_state, without_cuda
    from rar_lib.engines.megatron_model import build_model

    start_parallel_state()
    with without_cuda():
        model = build_model(checkpoint)
    yield model.eval(), size
