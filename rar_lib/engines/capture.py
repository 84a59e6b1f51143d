"""From the routes of micro-batches, on one process or many, to one trace of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Part:
    """Where in the batch lies what one process saw of one micro-batch.

    Attributes:
        rows: `[n]` int64, sequences of the batch; -1 is a filler.
        start: first of its t token positions.
        columns: where its l layers lie on the layer axis of the whole model.
    """

    rows: torch.Tensor
    start: int
    columns: list[int]

    def put(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        """Write `mine [n, t, l, ...]` to its place in `whole [S, T, L, ...]`; fillers and what lies beyond T are left out."""
        real = self.rows >= 0
        width = max(0, min(mine.shape[1], whole.shape[1] - self.start))
        time = torch.arange(self.start, self.start + width)
        place = (self.rows[real][:, None, None], time[None, :, None], torch.tensor(self.columns)[None, None, :])
        whole[place] = mine[real][:, :width].to(whole.dtype)


@dataclass(frozen=True)
class RoutePart(Part):
    """Routes of one micro-batch on one process.

    Attributes:
        ids: `[n, t, l, K]` int64; t and l as in Part.
        beside: margins `[n, t, l]` and scores `[n, t, l, E]`, as they were asked for.
    """

    ids: torch.Tensor
    beside: dict[str, torch.Tensor]


class RouteCollector:
    """Keeps what a Recording saw of each micro-batch, with its place in the batch."""

    def __init__(self, record: Recording) -> None:
        self.record = record
        self.parts: list[RoutePart] = []

    def scores(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """What the routers ranked in the last forward, which held these rows `[n]`: `[n, T, L, E]`, T = `width`; it is forgotten."""
        self.record.take(len(rows))
        return self.record.last["scores"][:, :width]

    def take(self, rows: torch.Tensor) -> None:
        """The forwards since the last take held these rows `[n]` int64 of the batch, -1 for a filler."""
        ids = self.record.take(len(rows)).cpu()
        beside = {name: values.cpu() for name, values in self.record.last.items()}
        which, _ = self.record.part
        self.parts.append(RoutePart(rows, which * ids.shape[1], self.record.columns, ids, beside))

    def trace(
        self,
        batch: TokenBatch,
        source: Literal["old", "new"],
        producer: str,
        model_id: str,
        parts: Sequence[RoutePart] | None = None,
    ) -> RouteTrace:
        """The trace of the whole batch; the last token of a sequence is `LAST`, since nothing is predicted from it.

        Args:
            batch: the tokens.
            source, producer, model_id: for the header.
            parts: of all processes; by default this one has seen everything.

        Raises:
            ReplayError: if a token is left without routes in some layer.
        """
        parts, layers = self.parts if parts is None else parts, self.record.header.moe_layers
        ids = torch.full((*batch.tokens.shape, len(layers), self.record.header.top_k), -1)
        for part in parts:
            part.put(ids, part.ids)
        inside = batch.token_mask
        if (ids[inside] < 0).any():
            row, position, layer = (inside[..., None] & (ids < 0).any(-1)).nonzero()[0].tolist()
            raise ReplayError(
                f"sequence {row}, token {position}: no process recorded its routes in layer {layers[layer]}"
            )
        optional = {}
        for name, seen in parts[0].beside.items():
            values = torch.zeros(*ids.shape[:3], *seen.shape[3:])
            for part in parts:
                part.put(values, part.beside[name])
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
    """Open replaying, and inside it recording of what is executed, as asked for.

    Args:
        model: whose routers are forced and recorded; of a pipeline one chunk of layers.
        batch: the tokens of the pass.
        replay: routes to force; None forces nothing.
        capture: what to record; False records nothing.
        measure: count fidelity and regret, and gradients where there is a backward.

    Raises:
        ReplayError: if the trace to replay has another number of sequences than the batch, or does not fit the model.
    """
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
