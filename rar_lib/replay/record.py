"""What a recording keeps: the experts of every router, forward after forward, until it is asked for a trace."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from rar_lib.errors import ReplayError
from rar_lib.replay.points import SelectionPoint, find_points
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader


def describe_routers(model: torch.nn.Module) -> TraceHeader:
    """Header of a trace of this model: E, K and MoE layer numbers of its routers (source `old`); of the whole model
    on a pipeline stage.

    Raises:
        ReplayError: if routers differ in E or K, or the model has none whose pick can be intercepted.
    """
    points = find_points(model).points
    first = points[0]
    odd = [p.layer for p in points if (p.num_experts, p.top_k) != (first.num_experts, first.top_k)]
    if odd:
        raise ReplayError(f"layers {odd} have another number of experts or top-k than layer {first.layer}")
    return TraceHeader(
        num_experts=first.num_experts,
        top_k=first.top_k,
        moe_layers=first.layers or tuple(p.layer for p in points),
        source="old",
    )


class Recording:
    """Routes collected at the points of a model while its context is open.

    Attributes:
        last: after `take`, what was kept beside the ids: `margins` `[S, T, L]`, `scores` `[S, T, L, E]`, in the
            router's dtype.
    """

    def __init__(self, model: torch.nn.Module, *, margins: bool = False, scores: bool = False) -> None:
        self.header = describe_routers(model)
        self.last: dict[str, torch.Tensor] = {}
        self._points = find_points(model).points
        self._ids: dict[int, list[torch.Tensor]] = {p.layer: [] for p in self._points}
        wanted = {"margins": margins, "scores": scores}
        self._beside: dict[str, dict[int, list[torch.Tensor]]] = {
            name: {p.layer: [] for p in self._points} for name, asked in wanted.items() if asked
        }
        self._inputs: list[tuple[torch.Tensor, torch.Tensor | None, bool]] = []

    def _select(self, point: SelectionPoint, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self._ids[point.layer].append(ids.detach())
        if "margins" in self._beside:
            self._beside["margins"][point.layer].append(margin(scores.detach(), point.top_k))
        if "scores" in self._beside:
            self._beside["scores"][point.layer].append(scores.detach())
        return ids

    def _hear(self, point: SelectionPoint, ids: torch.Tensor) -> None:
        self._ids[point.layer].append(ids.detach())

    def _saw_inputs(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(tokens, torch.Tensor):
            cache = kwargs.get("past_key_values")
            goes_on = cache is not None and cache.get_seq_length() > 0
            self._inputs.append((tokens, kwargs.get("attention_mask"), goes_on))

    def begin(self, in_flight: bool = False) -> None:
        """A new micro-batch starts; needed where the backward pass recomputes activations. See SelectionPoint.begin."""
        for point in self._points:
            point.begin(in_flight)

    @property
    def columns(self) -> list[int]:
        """Which layers of the header the routers of this process are."""
        return [self.header.moe_layers.index(p.layer) for p in self._points]

    @property
    def part(self) -> tuple[int, int]:
        """(which, of how many) equal parts of the time axis the routers of this process see."""
        return self._points[0].part, self._points[0].parts

    def take(self, num_sequences: int) -> torch.Tensor:
        """Return and forget what was recorded since the last take: `[num_sequences, T, L, K]` int64.

        Several forwards (a prefill and decode steps) follow each other along T. T and L are those of this process.

        Raises:
            ReplayError: if a router did not fire as often as the others, or rows do not divide by the sequences.
        """
        counts = {layer: len(chunks) for layer, chunks in self._ids.items()}
        if len(set(counts.values())) != 1 or not all(counts.values()):
            raise ReplayError(f"routers fired unequally often since the last take, by layer: {counts}")
        end = max(counts.values())
        stacked = self._stacked(self._ids, num_sequences, 0, end)
        self.last = {name: self._stacked(rows, num_sequences, 0, end) for name, rows in self._beside.items()}
        self._forget()
        return stacked

    def trace(self, *, source: Literal["rollout", "old", "new"] = "old", model_id: str = "") -> RouteTrace:
        """The trace of the forwards since the last take, for a Transformers model called with `input_ids`.

        A forward with filled `past_key_values` continues the sequences of the one before (decoding); any other begins new
        ones, which follow in the trace. Lengths come from `attention_mask` (left or right padding; none: no padding).

        Raises:
            ReplayError: if no forward was seen, or the mask does not fit the tokens.
        """
        if not self._inputs:
            raise ReplayError(
                "no forward with input_ids was seen since the last trace(), which takes what was recorded; use take() for models that are called "
                "otherwise"
            )
        header = self.header.model_copy(update={"source": source, "model_id": model_id})
        starts = [i for i, (_, _, goes_on) in enumerate(self._inputs) if not goes_on]
        pieces = []
        for first, end in zip(starts, [*starts[1:], len(self._inputs)], strict=True):
            seen = self._inputs[first:end]
            n = len(seen[0][0])
            beside = {name: self._stacked(rows, n, first, end).cpu() for name, rows in self._beside.items()}
            pieces.append(_pack(header, self._stacked(self._ids, n, first, end).cpu(), seen, beside))
        self._forget()
        return RouteTrace.concatenate(pieces)

    def _stacked(
        self, rows_by_layer: dict[int, list[torch.Tensor]], num_sequences: int, first: int, end: int
    ) -> torch.Tensor:
        """Forwards `first` to `end` of every layer, joined along T: `[num_sequences, T, L, ...]`."""
        layers = []
        for point in self._points:
            pieces = [point.unflatten(rows, num_sequences) for rows in rows_by_layer[point.layer][first:end]]
            layers.append(torch.cat(pieces, 1))
        return torch.stack(layers, 2)

    def _forget(self) -> None:
        self._inputs = []
        self._ids = {layer: [] for layer in self._ids}
        self._beside = {name: {layer: [] for layer in rows} for name, rows in self._beside.items()}


def _pack(
    header: TraceHeader,
    ids: torch.Tensor,
    seen: list[tuple[torch.Tensor, torch.Tensor | None, bool]],
    beside: dict[str, torch.Tensor],
) -> RouteTrace:
    """Drop the padding of `ids [S, T, L, K]` as the last attention mask says; keep the token ids and what lies beside."""
    tokens = torch.cat([part for part, _, _ in seen], 1).cpu()
    mask = seen[-1][1]
    keep = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool().cpu()
    if keep.shape != tokens.shape:
        raise ReplayError(
            f"attention_mask: expected the shape of all tokens seen, {tuple(tokens.shape)}, found {tuple(keep.shape)}"
        )
    lengths = keep.sum(1).numpy()
    ends = np.cumsum(lengths) - 1
    status = np.full(int(lengths.sum()), Status.RECORDED, dtype=np.uint8)
    status[ends[lengths > 0]] = Status.LAST
    optional = {name: values[keep].float().numpy() for name, values in beside.items()}
    return RouteTrace.from_packed(
        header, ids[keep].numpy(), lengths, status, token_ids=tokens[keep].numpy(), **optional
    )


def margin(scores: torch.Tensor, k: int) -> torch.Tensor:
    """s_(K) - s_(K+1) of ranked scores `[rows, E]`, among the experts that the router may choose: `[rows]`, >= 0.

    Infinite where nothing could take the last place: at K = E, or with every other expert outside the allowed groups.
    """
    if k == scores.shape[-1]:
        return scores.new_full((len(scores),), torch.inf)
    top = scores.topk(k + 1, dim=-1).values
    return top[:, k - 1] - top[:, k]
