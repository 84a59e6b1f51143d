"""From the routes of micro-batches to one trace of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch

from rar_lib.engines.base import Capture, Replay, TokenBatch
from rar_lib.errors import EngineError, ReplayError
from rar_lib.replay.contexts import recording, replaying
from rar_lib.replay.counts import PassCounts
from rar_lib.replay.force import Replaying
from rar_lib.replay.record import Recording
from rar_lib.replay.scores import SignalRequest
from rar_lib.traces.trace import RouteTrace, Status


class RouteCollector:
    """Puts what a Recording saw of each micro-batch into its rows."""

    def __init__(self, record: Recording) -> None:
        self.record = record
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._beside: list[dict[str, torch.Tensor]] = []

    def scores(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """What the routers ranked in the last forward, which held these rows: `[n, T, L, E]`; it is forgotten."""
        self.record.take(len(rows))
        return self.record.last["scores"][:, :width]

    def take(self, rows: torch.Tensor) -> None:
        """The forwards since the last take held these rows of the batch."""
        self._parts.append((rows, self.record.take(len(rows)).cpu()))
        self._beside.append({name: values.cpu() for name, values in self.record.last.items()})

    def trace(self, batch: TokenBatch, source: Literal["old", "new"], producer: str, model_id: str) -> RouteTrace:
        """The trace of the whole batch; the last token of a sequence is `LAST`, since nothing is predicted from it."""
        first = self._parts[0][1]
        ids = torch.full((len(batch), batch.tokens.shape[1], *first.shape[2:]), -1)
        for rows, part in self._parts:
            ids[rows] = part[:, : ids.shape[1]]
        inside = batch.token_mask
        optional = {}
        for name, seen in self._beside[0].items():
            values = torch.zeros(*ids.shape[:3], *seen.shape[3:])
            for (rows, _), beside in zip(self._parts, self._beside, strict=True):
                values[rows] = beside[name][:, : ids.shape[1]].float()
            optional[name] = values[inside].numpy()
        position = torch.arange(ids.shape[1])[None, :]
        status = torch.where(position == batch.lengths[:, None] - 1, Status.LAST.value, Status.RECORDED.value)
        header = self.record.header.model_copy(update={"source": source, "producer": producer, "model_id": model_id})
        return RouteTrace.from_packed(
            header,
            ids[inside].numpy(),
            batch.lengths.numpy(),
            status[inside].numpy().astype(np.uint8),
            token_ids=batch.packed_token_ids(),
            **optional,
        )


@contextlib.contextmanager
def open_routes(
    model: Any, batch: TokenBatch, replay: Replay | None, capture: Capture, measure: bool = False
) -> Iterator[tuple[Replaying | None, RouteCollector | None]]:
    """Open replaying, and inside it recording of what is executed, as asked for."""
    if replay is not None and replay.trace.num_sequences != len(batch):
        raise ReplayError(f"the batch has {len(batch)} sequences, the trace to replay {replay.trace.num_sequences}")
    with contextlib.ExitStack() as stack:
        forced = collector = None
        if replay is not None:
            forced = stack.enter_context(
                replaying(model, replay.trace, replay.plan, measure=measure, gates=replay.gates)
            )
        if capture:
            beside = {"margins": capture in ("margins", "scores"), "scores": capture == "scores"}
            collector = RouteCollector(stack.enter_context(recording(model, **beside)))
        yield forced, collector


def route_counts(forced: Replaying | None) -> PassCounts:
    """What a pass forced; zeros without replay."""
    return PassCounts() if forced is None else forced.counts()


def require_capture(signals: SignalRequest | None, capture: Capture) -> None:
    """Signals are packed like a trace, so the routes must be kept too.

    Raises:
        EngineError: if they are not.
    """
    if signals is not None and not capture:
        raise EngineError("logprobs: signals need capture of the routes that they belong to; found capture False")
