"""Routes in the wild: one small reader a producer, each with its real layout.

    read_dump(path)                    # the samples as they were written
    read_trace(path, model="config.json")  # the RouteTrace, or an error that says what cannot be trusted

`format="auto"` asks every reader; the one that recognises the file is used and named. Where two do, both are named and the caller
decides. Nothing here imports a producer's package, and nothing executes what a file holds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rar_lib.errors import TraceError, UndecidedError
from rar_lib.traces.layers import ModelShape
from rar_lib.traces.trace import RouteTrace
from rar_lib.traces.verdicts import verdict
from rar_lib.traces.wire import (
    megatron,
    nemo_rl,
    prime_rl,
    roll,
    sglang,
    skyrl,
    slime,
    tokens,
    trtllm,
    verl,
    vllm,
    xtuner,
)
from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.convert import to_trace
from rar_lib.traces.wire.dump import Dump, ReadOptions, Sample

MODULES = (verl, vllm, sglang, nemo_rl, slime, megatron, skyrl, prime_rl, trtllm, xtuner, roll, tokens)
READERS: dict[str, Reader] = {reader.name: reader for module in MODULES for reader in module.READERS}
OWN = "rar"
logger = logging.getLogger("rar.wire")

__all__ = ["OWN", "READERS", "Dump", "Sample", "detect", "read_dump", "read_trace"]


def _options(
    model: Any, payload_layers: Sequence[int] | None, batch_size: int | None, allow_pickle: bool
) -> ReadOptions:
    shape = None if model is None else ModelShape.load(model)
    layers = None if payload_layers is None else tuple(int(n) for n in payload_layers)
    return ReadOptions(shape, layers, batch_size, allow_pickle)


def detect(content: Content) -> str:
    """The format of a file: a key of `READERS`, or `OWN`.

    Raises:
        UndecidedError: if several readers recognise it.
        TraceError: if none does.
    """
    if content.kind == "safetensors":
        return OWN
    claims = {name: why for name, reader in READERS.items() if (why := reader.claims(content)) is not None}
    if len(claims) == 1:
        return next(iter(claims))
    if claims:
        told = "; ".join(f"{name} ({why})" for name, why in claims.items())
        raise UndecidedError(f"{content.path}: {len(claims)} readings are possible: {told}; say which with format=")
    raise TraceError(
        f"{content.path}: a {content.kind} file that no reader recognises; known are {', '.join((OWN, *READERS))} (format=)"
    )


def _open(path: str | Path, format: str, options: ReadOptions) -> tuple[Content, str]:
    content = Content(Path(path), options)
    return content, detect(content) if format == "auto" else format


def read_content(content: Content, name: str) -> Dump:
    """The samples of an opened file.

    Raises:
        TraceError: for an unknown format, or a file that is not of it.
    """
    if name == OWN:
        raise TraceError(
            f"{content.path}: a trace of this library's own format holds no dump; use read_trace or RouteTrace.load"
        )
    if name not in READERS:
        raise TraceError(f"format: expected auto or one of {', '.join((OWN, *READERS))}, found {name!r}")
    reader = READERS[name]
    try:
        if reader.claims(content) is None:
            raise TraceError(f"{content.path}: expected {reader.what}, found another {content.kind} file")
        dump = reader.read(content)
    except TraceError as error:
        told = str(error)
        raise (error if told.startswith(str(content.path)) else type(error)(f"{content.path}: {told}")) from None
    except (
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        ValueError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
    ) as error:
        raise TraceError(
            f"{content.path}: {name}: its content does not have the layout that it promises: {error!r:.200}"
        ) from None
    odd = (
        [where for where, record in content.all_records if not _answer(record)]
        if content.kind in ("json", "jsonl")
        else []
    )
    if odd and len(odd) < len(content.all_records):
        seen = f"{len(odd)} of {len(content.all_records)} records hold no answer"
        dump = replace(dump, notes=(*dump.notes, verdict("RECORDS_WITHOUT_ANSWER", f"{', '.join(odd[:6])}", seen)))
    if not dump.samples:
        raise TraceError(f"{content.path}: {name}: expected samples, found none")
    logger.info("%s: %s (%s)", content.path.name, dump.format, dump.layout)
    return dump


def _answer(record: Any) -> bool:
    """False for a server's error or an empty line among answers; records of other kinds are their reader's matter."""
    answer = record.get("response", record) if isinstance(record, dict) else record
    if isinstance(answer, list):
        return bool(answer)
    return isinstance(answer, dict) and "error" not in answer and (len(answer) > 0)


def read_dump(
    path: str | Path, format: str = "auto", *, model: ModelShape | Mapping[str, Any] | str | Path | None = None,
    payload_layers: Sequence[int] | None = None, batch_size: int | None = None, allow_pickle: bool = False,
) -> Dump:  # fmt: skip
    """The samples of a foreign file as they were written.

    Args:
        path: of the file.
        format: a key of `READERS`, or auto.
        model: the routers: a `config.json`, a checkpoint folder, a config's mapping, or a ModelShape.
        payload_layers: transformer layer number of each position on the producer's layer axis, where neither rule fits.
        batch_size: sequences of a forward, for Megatron's tracer.
        allow_pickle: read pickles. Their classes are not imported even then (pickles.py).

    Raises:
        UndecidedError: for a file of several formats, or one that needs the model, the batch size or `allow_pickle`.
        TraceError: names file, place, expected and found.
    """
    content, name = _open(path, format, _options(model, payload_layers, batch_size, allow_pickle))
    return read_content(content, name)


def read_trace(
    path: str | Path, format: str = "auto", *, model: ModelShape | Mapping[str, Any] | str | Path | None = None,
    payload_layers: Sequence[int] | None = None, batch_size: int | None = None, allow_pickle: bool = False,
) -> RouteTrace:  # fmt: skip
    """The RouteTrace of a file, of this library's own format or a foreign one. Arguments as for `read_dump`.

    Raises:
        TraceError: names file, place, expected and found; for content that cannot be trusted also the doctor's code.
    """
    options = _options(model, payload_layers, batch_size, allow_pickle)
    content, name = _open(path, format, options)
    if name == OWN:
        return RouteTrace.load(path)
    return to_trace(read_content(content, name), options.model, options.payload_layers)
