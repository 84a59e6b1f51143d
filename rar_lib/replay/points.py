"""Selection points: the one place in a router where K of E experts are picked.

Hooking what a router returns breaks on every second family (the order of the tuple, probabilities that were zeroed
before they can be gathered, renormalisation already done). So the hook sits on the pick itself: inside the router's
forward, the one `torch.topk` with k = K over a last dimension of E is intercepted, its indices may be replaced, and its
values are gathered from the very scores that were ranked. The model's own code does the rest: softmax before or after,
sigmoid and bias, groups, renormalisation, scaling. Megatron-Core asks for the same contract by itself
(`router_replay.get_replay_topk`), so its routers carry a SelectionPoint as their replay object.

State belongs to the model and to open contexts, never to the process: two models cannot see each other's routes.

One file: the point, the pick that it stands for and the contexts that open it hold each other's state.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch.overrides import TorchFunctionMode

from rar_lib.errors import ReplayError
from rar_lib.traces.layers import moe_layer_numbers

ROUTER_CLASS = re.compile(r"(TopKRouter|TopkRouter)$")
OTHER_ROUTER = re.compile(r"(Router|Gating|MoeGate|MoEGate|MoEV1Gate)$")
_LINEAR = torch.nn.functional.linear
LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
RowOrder = Literal["batch", "sequence"]


class Selector(Protocol):
    """Something that sees, and may replace, the experts picked at a point."""

    def __call__(self, point: SelectionPoint, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Given ranked scores `[rows, E]` and picked ids `[rows, K]`, return the ids `[rows, K]` to use."""


class Tap(Protocol):
    """Something that sees the logits of a router and the experts that were picked from them."""

    def __call__(self, point: SelectionPoint, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Given `logits [..., E]`, a node of the graph, and the ids `[rows, K]` in use."""


class Gates(Protocol):
    """Something that replaces the scores of the picked experts."""

    def __call__(self, point: SelectionPoint, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Given the live scores `[rows, K]` of the ids `[rows, K]` in use, return those to use."""


class SelectionPoint:
    """The pick of one router.

    Args:
        layer: transformer layer number, from 0.
        num_experts: E.
        top_k: K.
        row_order: how rows follow a `[sequences, time]` batch: "batch" is `b * T + t` (Transformers), "sequence" is
            `t * B + b` (Megatron-Core).
        owner: name of the router class, for messages.
        groups: groups of experts that limit the choice; 1 where there are none.
        layers: MoE layers of the whole model, where this process holds a part of them (pipeline parallel); None: those found.
        part, parts: which of equal parts of the time axis the router sees (sequence parallel); row order "sequence".
    """

    def __init__(
        self,
        layer: int,
        num_experts: int,
        top_k: int,
        row_order: RowOrder,
        owner: str,
        groups: int = 1,
        *,
        layers: tuple[int, ...] | None = None,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        self.layer, self.num_experts, self.top_k, self.row_order, self.owner = (
            layer,
            num_experts,
            top_k,
            row_order,
            owner,
        )
        self.groups, self.layers, self.part, self.parts = groups, layers, part, parts
        self.selectors: list[Selector] = []
        self.taps: list[Tap] = []
        self.gates: list[Gates] = []
        self.watched = 0  # open contexts that compare what the experts got with what was picked
        self._used: torch.Tensor | None = None
        self._awaited: deque[torch.Tensor] = deque()  # ids of forwards whose recompute may still come, oldest first
        self._in_flight = False
        self._compared, self._differing = 0, torch.zeros((), dtype=torch.int64)

    def begin(self, in_flight: bool = False) -> None:
        """A new micro-batch starts. Forgets the forwards before, unless they are `in_flight`: a pipeline runs several forwards ahead, and
        recompute then asks for the oldest first."""
        self._used, self._in_flight = None, in_flight
        if not in_flight:
            self._awaited.clear()

    @property
    def awaited(self) -> int:
        """Forwards whose recompute has not come."""
        return len(self._awaited)

    def select(self, scores: torch.Tensor, native: torch.Tensor) -> torch.Tensor:
        """Ids to use for ranked `scores [rows, E]`, given the router's own `native [rows, K]`.

        The backward pass of activation recompute runs the router again: it gets the ids of the forward pass, also
        where they were native and lie near a tie.

        Raises:
            ReplayError: if recompute cannot be matched with one forward.
        """
        if _in_backward():
            waiting = self._awaited
            if not waiting or (len(waiting) != 1 and not self._in_flight) or waiting[0].shape != native.shape:
                raise ReplayError(
                    f"layer {self.layer}: recompute asks for the routes of a forward pass; expected exactly one forward "
                    f"of {tuple(native.shape)} since this micro-batch began, found {len(waiting)} "
                    f"({tuple(waiting[0].shape) if waiting else None}); call focus() before each micro-batch"
                )
            self._used = waiting.popleft() if self._in_flight else waiting[0]
            return self._used
        ids = native
        for selector in self.selectors:
            ids = selector(self, scores, ids)
        self._used = ids
        self._awaited.append(ids)
        if len(self._awaited) > 2 and not self._in_flight:  # two are as wrong as many, and cost less
            self._awaited.popleft()
        return ids

    def unflatten(self, rows: torch.Tensor, num_sequences: int) -> torch.Tensor:
        """Rows `[S * T, ...]` of a forward as `[S, T, ...]`; T is the point's part of the time axis.

        Raises:
            ReplayError: if the rows do not divide by the sequences.
        """
        steps, rest = divmod(len(rows), num_sequences)
        if rest:
            raise ReplayError(f"layer {self.layer}: {len(rows)} rows do not divide by {num_sequences} sequences")
        if self.row_order == "batch":
            return rows.reshape(num_sequences, steps, *rows.shape[1:])
        return rows.reshape(steps, num_sequences, *rows.shape[1:]).transpose(0, 1)

    def flatten(self, padded: torch.Tensor) -> torch.Tensor:
        """`[S, T, ...]` as the rows `[S * T, ...]` of a forward; of its part of the time axis where there are several."""
        ordered = padded if self.row_order == "batch" else padded.transpose(0, 1)
        if self.parts > 1:
            ordered = ordered.tensor_split(self.parts)[self.part]
        return ordered.reshape(-1, *padded.shape[2:])

    def picked(self, logits: torch.Tensor) -> None:
        """The router is done: its logits `[..., E]` go to the taps, in a forward and in its recompute."""
        if self._used is not None:
            for tap in self.taps:
                tap(self, logits, self._used)

    def executed(self, ids: torch.Tensor) -> None:
        """The experts were called with `ids [rows, K]`, or with a map `[rows, E]` of booleans: compare with the pick."""
        if self._used is None:
            return
        if ids.dtype == torch.bool:
            same = ids.gather(1, self._used).all(-1) & (ids.sum(-1) == self.top_k)
        else:
            same = (ids == self._used).all(-1)
        self._compared += len(same)
        self._differing = self._differing.to(same.device) + (~same).sum()

    def take_executed(self) -> tuple[int, int]:
        """(rows compared, rows on which the experts got other ids than were picked) since the last call."""
        counts = self._compared, int(self._differing)
        self._compared, self._differing = 0, torch.zeros((), dtype=torch.int64)
        return counts

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Megatron-Core's contract (router_replay.RouterReplay.get_replay_topk): (values, ids), each `[rows, K]`."""
        assert default_compute_topk is not None
        values, native = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if not self.selectors:
            return values, native
        return self.gated(*_gather(scores, values, native, self.select(scores, native)))

    def gated(self, values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and ids `[rows, K]` of a pick, the values replaced where recorded gates are replayed."""
        for gates in self.gates:
            values = gates(self, values, ids)
        return values, ids


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _gather(
    scores: torch.Tensor, values: torch.Tensor, native: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # With a graph always gathered, so that a forward and its recompute, which is told its ids, save the same tensors.
    return (values, native) if ids is native and not torch.is_grad_enabled() else (scores.gather(-1, ids), ids)


class _InterceptTopK(TorchFunctionMode):
    """Hands the pick of K of E to a selection point, for the duration of one router forward."""

    def __init__(self, point: SelectionPoint) -> None:
        super().__init__()
        self.point, self.calls = point, 0
        self.logits: torch.Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.topk and func is not torch.Tensor.topk:  # the fast path: a router calls a dozen others
            plain = func(*args, **kwargs) if kwargs else func(*args)
            if func is _LINEAR and self.point.taps and plain.shape[-1] == self.point.num_experts:
                self.logits = plain
            return plain
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        point = self.point
        if k != point.top_k or scores.ndim != 2 or scores.shape[-1] != point.num_experts or dim not in (-1, 1):
            return out
        self.calls += 1
        values, native = out
        values, ids = point.gated(*_gather(scores, values, native, point.select(scores, native)))
        return torch.return_types.topk((values, ids))


class _TransformersPoints:
    """Selection points of a Transformers model: forwards of its routers are wrapped while a context is open."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.points: list[SelectionPoint] = []
        self.routers: list[torch.nn.Module] = []
        self.experts: list[torch.nn.Module] = []
        self._open = 0
        self._before: list[Any] = []
        others = []
        for name, module in model.named_modules():
            kind = type(module).__name__
            if not ROUTER_CLASS.search(kind):
                if OTHER_ROUTER.search(kind):
                    others.append(f"{name} ({kind})")
                continue
            number = LAYER_NUMBER.search(name)
            experts, k = getattr(module, "num_experts", None), getattr(module, "top_k", None)
            groups = getattr(module, "num_group", None) or getattr(module, "n_group", None) or 1
            if number is None or experts is None or k is None:
                raise ReplayError(f"router {name} ({kind}): its layer number, num_experts or top_k is not known")
            self.points.append(SelectionPoint(int(number.group(1)), experts, k, "batch", kind, groups))
            self.routers.append(module)
            self.experts.append(_experts_beside(model, name, kind))
        if not self.points:
            raise ReplayError(
                f"{type(model).__name__}: no router found whose top-k can be replayed; expected modules named *TopKRouter"
                + (f", found {', '.join(others[:3])}, which choose experts in another way" if others else "")
            )
        config: Any = getattr(model, "config", None)
        if config is not None:
            config = config.get_text_config() if hasattr(config, "get_text_config") else config
            expected, found = moe_layer_numbers(config), tuple(sorted(p.layer for p in self.points))
            if expected != found:
                raise ReplayError(
                    f"{type(model).__name__}: the config puts MoE layers at {expected}, routers with a top-k were found at "
                    f"{found}" + (f"; others choose in another way: {', '.join(others[:3])}" if others else "")
                )

    def attach(self) -> None:
        self._open += 1
        if self._open == 1:
            self._before = [router.__dict__.get("forward") for router in self.routers]
            for point, router in zip(self.points, self.routers, strict=True):
                router.forward = _wrapped(point, router.forward)

    def detach(self) -> None:
        self._open -= 1
        if self._open == 0:
            for router, before in zip(self.routers, self._before, strict=True):
                if before is None:
                    del router.forward
                else:  # somebody had wrapped it already
                    router.forward = before

    def watch(self) -> Callable[[], None]:
        return self.at_experts(SelectionPoint.executed)

    def at_experts(self, call: Callable[[SelectionPoint, torch.Tensor], None]) -> Callable[[], None]:
        """Call with each point and the ids that its experts are given; returns what stops it."""
        handles = [
            experts.register_forward_pre_hook(_tells(point, call))
            for point, experts in zip(self.points, self.experts, strict=True)
        ]

        def stop() -> None:
            for handle in handles:
                handle.remove()

        return stop


def _experts_beside(model: torch.nn.Module, router: str, kind: str) -> torch.nn.Module:
    """The experts that a Transformers router serves: called as (hidden states, ids, weights) in every family."""
    parent, _, _ = router.rpartition(".")
    experts = getattr(model.get_submodule(parent), "experts", None)
    if not isinstance(experts, torch.nn.Module):
        raise ReplayError(f"router {router} ({kind}): expected the experts beside it as {parent}.experts, found none")
    return experts


def _tells(point: SelectionPoint, call: Callable[[SelectionPoint, torch.Tensor], None]) -> Callable[..., None]:
    """A hook before the experts: their second argument is what is executed."""

    def before(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        call(point, args[1])

    return before


def _wrapped(point: SelectionPoint, forward: Callable[..., Any]) -> Callable[..., Any]:
    mode = _InterceptTopK(point)

    def call(*args: Any, **kwargs: Any) -> Any:
        mode.calls, mode.logits = 0, None
        with mode:
            out = forward(*args, **kwargs)
        logits, mode.logits = mode.logits, None  # it holds the graph
        if mode.calls != 1:
            raise ReplayError(
                f"layer {point.layer}: {point.owner} made {mode.calls} picks of {point.top_k} of {point.num_experts} in "
                "one forward, expected exactly one; replay at the selection does not support it"
            )
        if point.taps:
            if logits is None:
                raise ReplayError(f"layer {point.layer}: {point.owner} computes its logits in a way that is not known")
            point.picked(logits)
        return out

    return call


class _NativePoints:
    """Selection points that the model carries itself (Megatron-Core routers built by this library)."""

    def __init__(self, points: list[SelectionPoint]) -> None:
        self.points = points

    def attach(self) -> None:
        """Nothing to wrap: the routers ask their point at every forward."""

    def detach(self) -> None:
        """See attach."""

    def watch(self) -> Callable[[], None]:
        """The routers tell their point what is executed while it is watched."""
        for point in self.points:
            point.watched += 1

        def stop() -> None:
            for point in self.points:
                point.watched -= 1

        return stop


_KNOWN: weakref.WeakKeyDictionary[torch.nn.Module, _TransformersPoints | _NativePoints] = weakref.WeakKeyDictionary()


def find_points(model: torch.nn.Module) -> _TransformersPoints | _NativePoints:
    """The selection points of a model, in layer order.

    Raises:
        ReplayError: if the model has no router whose pick can be intercepted.
    """
    if model not in _KNOWN:
        carried = [p for m in model.modules() if isinstance(p := getattr(m, "router_replay", None), SelectionPoint)]
        found = _NativePoints(carried) if carried else _TransformersPoints(model)
        _KNOWN[model] = found
    return _KNOWN[model]


@contextmanager
def selecting(model: torch.nn.Module, selectors: Sequence[Selector]) -> Iterator[list[SelectionPoint]]:
    """Put one selector at each point of a model (in layer order); afterwards everything is as before.

    Raises:
        ReplayError: if there are more or fewer selectors than routers.
    """
    found = find_points(model)
    if len(selectors) != len(found.points):
        raise ReplayError(f"{type(model).__name__}: {len(selectors)} selectors for {len(found.points)} routers")
    found.attach()
    for point, selector in zip(found.points, selectors, strict=True):
        point.selectors.append(selector)
    try:
        yield found.points
    finally:
        for point, selector in zip(found.points, selectors, strict=True):
            point.selectors.remove(selector)
            if not point.selectors:
                point.begin()
        found.detach()


@contextmanager
def watching(model: torch.nn.Module) -> Iterator[list[SelectionPoint]]:
    """Compare what the experts of each layer are called with with what was picked, recompute included.

    The comparison sits at the experts and not at the pick, so that whatever a model does between the two is seen; read it
    with SelectionPoint.take_executed.
    """
    found = find_points(model)
    for point in found.points:
        point.take_executed()
    stop = found.watch()
    try:
        yield found.points
    finally:
        stop()


@contextmanager
def tapping(model: torch.nn.Module, tap: Tap) -> Iterator[list[SelectionPoint]]:
    """Show a tap the logits and picked experts of every router, inside a context that selects (recording or replaying)."""
    points = find_points(model).points
    for point in points:
        point.taps.append(tap)
    try:
        yield points
    finally:
        for point in points:
            point.taps.remove(tap)


@contextmanager
def gating(model: torch.nn.Module, gates: Gates) -> Iterator[list[SelectionPoint]]:
    """Let something replace the scores of the picked experts at every router, inside a context that selects."""
    points = find_points(model).points
    for point in points:
        point.gates.append(gates)
    try:
        yield points
    finally:
        for point in points:
            point.gates.remove(gates)


@contextmanager
def at_experts(model: torch.nn.Module, call: Callable[[SelectionPoint, torch.Tensor], None]) -> Iterator[None]:
    """Call with each point and the ids `[rows, K]` that its experts are given. No pick is intercepted, so it costs little.

    Raises:
        ReplayError: for a model whose experts are not called with ids (Megatron-Core's get a permuted batch).
    """
    found = find_points(model)
    if not isinstance(found, _TransformersPoints):
        raise ReplayError(f"{type(model).__name__}: its experts are not called with ids; record at the pick instead")
    stop = found.at_experts(call)
    try:
        yield
    finally:
        stop()
