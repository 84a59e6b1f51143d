"""`recording(model)` and `replaying(model, trace)`: what happens inside the `with` is all that happens.

    with recording(model) as record:
        model(input_ids, attention_mask=mask)
    trace = record.trace()

    with replaying(model, trace):
        model(input_ids, attention_mask=mask)  # the same experts, at today's scores

Contexts nest: `replaying` outside and `recording` inside records what was executed. Rows follow the batch: sequence i of
the trace is sequence i of the forward, right-padded; with micro-batches, `focus` says which sequences come next. Rows
without a recorded route (the last token, padding, what a producer lost) stay native and are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

from rar_lib.errors import ReplayError
from rar_lib.replay.plan import ReplayPlan, full_plan
from rar_lib.replay.points import SelectionPoint, find_points, selecting
from rar_lib.replay.resolve import resolve
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader


def describe_routers(model: torch.nn.Module) -> TraceHeader:
    """Header of a trace of this model: E, K and MoE layer numbers of its routers (source `old`)."""
    points = find_points(model).points
    first = points[0]
    odd = [p.layer for p in points if (p.num_experts, p.top_k) != (first.num_experts, first.top_k)]
    if odd:
        raise ReplayError(f"layers {odd} have another number of experts or top-k than layer {first.layer}")
    return TraceHeader(
        num_experts=first.num_experts, top_k=first.top_k, moe_layers=tuple(p.layer for p in points), source="old"
    )


class Recording:
    """Routes collected at the points of a model while its context is open."""

    def __init__(self, model: torch.nn.Module, margins: bool = False) -> None:
        self.header = describe_routers(model)
        self.last_margins: torch.Tensor | None = None
        self._margins: dict[int, list[torch.Tensor]] | None = (
            {i: [] for i in self.header.moe_layers} if margins else None
        )
        self._points = find_points(model).points
        self._ids: dict[int, list[torch.Tensor]] = {layer: [] for layer in self.header.moe_layers}
        self._inputs: list[tuple[torch.Tensor, torch.Tensor | None, bool]] = []

    def _select(self, point: SelectionPoint, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self._ids[point.layer].append(ids.detach())
        if self._margins is not None:
            self._margins[point.layer].append(margin(scores.detach(), point.top_k)[:, None])
        return ids

    def _saw_inputs(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(tokens, torch.Tensor):
            cache = kwargs.get("past_key_values")
            goes_on = cache is not None and cache.get_seq_length() > 0
            self._inputs.append((tokens, kwargs.get("attention_mask"), goes_on))

    def take(self, num_sequences: int) -> torch.Tensor:
        """Return and forget what was recorded since the last take: `[num_sequences, T, L, K]` int64.

        Several forwards (a prefill and decode steps) follow each other along T.

        Raises:
            ReplayError: if a router did not fire as often as the others, or rows do not divide by the sequences.
        """
        counts = {layer: len(chunks) for layer, chunks in self._ids.items()}
        if len(set(counts.values())) != 1 or not all(counts.values()):
            raise ReplayError(f"routers fired unequally often since the last take, by layer: {counts}")
        stacked = self._stacked(self._ids, num_sequences, 0, max(counts.values()))
        if self._margins is not None:
            self.last_margins = self._stacked(self._margins, num_sequences, 0, max(counts.values()))[..., 0]
        self._forget()
        return stacked

    def trace(self, *, source: Literal["rollout", "old", "new"] = "old", model_id: str = "") -> RouteTrace:
        """The trace of the forwards since the last take, for a Transformers model called with `input_ids`.

        A forward with filled `past_key_values` continues the sequences of the one before (decoding); any other begins new
        ones, which follow in the trace. Lengths come from `attention_mask` (left or right padding; none: no padding).
        """
        if not self._inputs:
            raise ReplayError("no forward with input_ids was seen; use take() for models that are called otherwise")
        header = self.header.model_copy(update={"source": source, "model_id": model_id})
        starts = [i for i, (_, _, goes_on) in enumerate(self._inputs) if not goes_on]
        pieces = []
        for first, end in zip(starts, [*starts[1:], len(self._inputs)], strict=True):
            seen = self._inputs[first:end]
            n = len(seen[0][0])
            margins = None if self._margins is None else self._stacked(self._margins, n, first, end)[..., 0].cpu()
            pieces.append(_pack(header, self._stacked(self._ids, n, first, end).cpu(), seen, margins))
        self._forget()
        return RouteTrace.concatenate(pieces)

    def _stacked(
        self, rows_by_layer: dict[int, list[torch.Tensor]], num_sequences: int, first: int, end: int
    ) -> torch.Tensor:
        """Forwards `first` to `end` of every layer, joined along T: `[num_sequences, T, L, ...]`."""
        layers = []
        for point in self._points:
            pieces = [_unflatten(rows, num_sequences, point) for rows in rows_by_layer[point.layer][first:end]]
            layers.append(torch.cat(pieces, 1))
        return torch.stack(layers, 2)

    def _forget(self) -> None:
        self._inputs = []
        self._ids = {layer: [] for layer in self._ids}
        if self._margins is not None:
            self._margins = {layer: [] for layer in self._margins}


def _pack(
    header: TraceHeader,
    ids: torch.Tensor,
    seen: list[tuple[torch.Tensor, torch.Tensor | None, bool]],
    margins: torch.Tensor | None,
) -> RouteTrace:
    """Drop the padding of `ids [S, T, L, K]` as the last attention mask says; keep the token ids, and margins if any."""
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
    optional = {} if margins is None else {"margins": margins[keep].float().numpy()}
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


@contextmanager
def recording(model: torch.nn.Module, *, margins: bool = False) -> Iterator[Recording]:
    """Record which experts every router of a model uses. Numbers are unchanged, bit for bit.

    Args:
        model: a Transformers MoE, or a Megatron model built by this library.
        margins: keep the margins of the live scores too: in the trace, and after `take` in `last_margins` `[S, T, L]`.
    """
    record = Recording(model, margins)
    handle = model.register_forward_pre_hook(record._saw_inputs, with_kwargs=True)
    try:
        with selecting(model, [record._select] * len(record._points)):
            yield record
    finally:
        handle.remove()


class Replaying:
    """The routes that an open `replaying` context forces.

    Attributes:
        forced_units: units of the plan that routers were given, since the context opened.
        changed_cells: (token, layer) cells whose executed set of experts differs from the router's live choice.
    """

    def __init__(self, model: torch.nn.Module, trace: RouteTrace, plan: ReplayPlan) -> None:
        mine = describe_routers(model)
        theirs = trace.header
        for name, expected, found in (
            ("experts", mine.num_experts, theirs.num_experts),
            ("top-k", mine.top_k, theirs.top_k),
            ("MoE layers", mine.moe_layers, theirs.moe_layers),
        ):
            if expected != found:
                raise ReplayError(
                    f"trace and model differ in {name}: expected {expected} (model), found {found} (trace)"
                )
        plan.require(trace)
        points = find_points(model).points
        grouped = [p.layer for p in points if p.groups > 1]
        if plan.unit == "slot" and grouped:
            raise ReplayError(
                f"plan of unit slot: layers {grouped} choose within groups of experts, which single slots would leave; use "
                "unit token_layer"
            )
        experts, _ = trace.to_padded()
        inside = np.arange(experts.shape[1])[None, :] < trace.lengths[:, None]
        planned = np.zeros((*inside.shape, *plan.planned.shape[1:]), dtype=bool)
        planned[inside] = plan.planned
        self._planned = torch.from_numpy(planned)
        self._targets = torch.from_numpy(experts)
        self._column = {layer: i for i, layer in enumerate(mine.moe_layers)}
        self._points = points
        self._rows: torch.Tensor = torch.arange(trace.num_sequences)
        self._lengths = torch.from_numpy(trace.lengths)
        self._tokens = _padded_tokens(trace)
        self.forced_units = 0
        self.changed_cells = 0

    def focus(self, sequences: Sequence[int] | torch.Tensor) -> None:
        """The next forward holds these sequences of the trace, in this order.

        Raises:
            ReplayError: for a sequence that the trace does not have.
        """
        rows, known = torch.as_tensor(sequences, dtype=torch.int64), len(self._targets)
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < known:
            raise ReplayError(
                f"the trace has {known} sequences; asked to focus on {int(rows.min())} to {int(rows.max())}"
            )
        self._rows = rows
        for point in self._points:
            point.begin()

    def _check_inputs(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward must hold the tokens that the trace speaks of, right-padded."""
        tokens = kwargs.get("input_ids", args[0] if args else None)
        inputs = tokens if isinstance(tokens, torch.Tensor) else kwargs.get("inputs_embeds")
        if isinstance(inputs, torch.Tensor) and len(inputs) != len(self._rows):
            raise ReplayError(f"the forward holds {len(inputs)} sequences, the replay is focused on {len(self._rows)}")
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and (mask[:, 0] == 0).any():
            raise ReplayError("attention_mask pads on the left; replay needs the sequences right-padded")
        if self._tokens is None or not isinstance(tokens, torch.Tensor) or tokens.ndim != 2:
            return
        width = min(tokens.shape[1], self._tokens.shape[1])
        inside = torch.arange(width)[None, :] < self._lengths[self._rows][:, None]
        expected, found = self._tokens[self._rows][:, :width], tokens[:, :width].cpu()
        wrong = inside & (expected != found)
        if wrong.any():
            row, position = wrong.nonzero()[0].tolist()
            raise ReplayError(
                f"sequence {int(self._rows[row])}, token {position}: the trace speaks of token id "
                f"{int(expected[row, position])}, the forward holds {int(found[row, position])}; replay needs the same "
                "tokens in the same order, right-padded"
            )

    def _select(self, point: SelectionPoint, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        column = self._column[point.layer]
        target, planned = self._targets[self._rows, :, column], self._planned[self._rows, :, column]
        n, length, k = target.shape
        steps, rest = divmod(len(ids), max(n, 1))
        if rest or steps < length:
            raise ReplayError(
                f"layer {point.layer}: the forward has {len(ids)} rows for {n} sequences of up to {length} recorded "
                f"tokens; expected a multiple of {n}, at least {n * length}"
            )
        if steps > length:
            target = torch.cat([target, target.new_full((n, steps - length, k), -1)], 1)
            planned = torch.cat([planned, planned.new_zeros((n, steps - length, *planned.shape[2:]))], 1)
        recorded = _flatten(target, point).to(ids.device)
        asked = _flatten(planned if planned.ndim == 3 else planned[..., None], point).to(ids.device)
        used = resolve(recorded, asked if planned.ndim == 3 else asked[:, 0], scores, ids)
        self.forced_units += int(planned.sum())
        self.changed_cells += int(((used.unsqueeze(-1) == ids.unsqueeze(-2)).sum((-1, -2)) < k).sum())
        return used


@contextmanager
def replaying(model: torch.nn.Module, trace: RouteTrace, plan: ReplayPlan | None = None) -> Iterator[Replaying]:
    """Force the recorded routes of a trace in every forward of a model.

    Args:
        model: a Transformers MoE, or a Megatron model built by this library.
        trace: routes of the sequences that will be forwarded.
        plan: which routes to force; by default all that are recorded.

    Raises:
        ReplayError: if experts, top-k or MoE layers of trace and model differ, if the rows of a forward do not fit, or if
            the forward holds other tokens than the trace (where the trace carries its tokens).
    """
    replay = Replaying(model, trace, full_plan(trace) if plan is None else plan)
    handle = model.register_forward_pre_hook(replay._check_inputs, with_kwargs=True)
    try:
        with selecting(model, [replay._select] * len(replay._points)):
            yield replay
    finally:
        handle.remove()


def _padded_tokens(trace: RouteTrace) -> torch.Tensor | None:
    """`[S, T]` int64, right-padded with 0; None if the trace does not carry its tokens."""
    if trace.token_ids is None:
        return None
    inside = np.arange(int(trace.lengths.max(initial=0)))[None, :] < trace.lengths[:, None]
    tokens = np.zeros(inside.shape, dtype=np.int64)
    tokens[inside] = trace.token_ids
    return torch.from_numpy(tokens)


def _unflatten(rows: torch.Tensor, num_sequences: int, point: SelectionPoint) -> torch.Tensor:
    steps, rest = divmod(len(rows), num_sequences)
    if rest:
        raise ReplayError(f"layer {point.layer}: {len(rows)} rows do not divide by {num_sequences} sequences")
    if point.row_order == "batch":
        return rows.reshape(num_sequences, steps, -1)
    return rows.reshape(steps, num_sequences, -1).transpose(0, 1)


def _flatten(padded: torch.Tensor, point: SelectionPoint) -> torch.Tensor:
    ordered = padded if point.row_order == "batch" else padded.transpose(0, 1)
    return ordered.reshape(-1, padded.shape[-1])
