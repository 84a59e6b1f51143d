"""Signals for scores: one backward of the sequences' log-likelihood, stopped at routers, gates and expert outputs.

`torch.autograd.grad` walks the graph to the tapped tensors only, so no parameter gets a gradient and nothing of the
trainer's state moves. The output of each active expert needs no second evaluation: <u, o_e> is the gradient of its gate.
Only the runner-up of `swap` and the inner activations of `param` are computed again, from the experts' weights; norms of the gradients of
single routes as in arXiv 1510.01799.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from rar_lib.engines.base import TokenBatch
from rar_lib.engines.capture import Part
from rar_lib.engines.logits import response_logprobs
from rar_lib.errors import EngineError
from rar_lib.replay.budget import hash_text, mix, uniform_from
from rar_lib.replay.points import SelectionPoint, selecting, tapping
from rar_lib.replay.scores import RouteSignals, SignalRequest


@dataclass(frozen=True)
class ExpertWeights:
    """A gated expert: o = w2ᵀ glu(w1ᵀ x + b1) + b2.

    Attributes:
        w1: `[H, 2I]`, w2: `[I, H]`; b1 `[2I]` and b2 `[H]` or None.
        glu: from `[rows, 2I]` to `[rows, I]`, differentiable.
    """

    w1: torch.Tensor
    w2: torch.Tensor
    glu: Callable[[torch.Tensor], torch.Tensor]
    b1: torch.Tensor | None = None
    b2: torch.Tensor | None = None

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """w1ᵀ x + b1, `[rows, 2I]`."""
        pre = x @ self.w1
        return pre if self.b1 is None else pre + self.b1

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """o, `[rows, H]`."""
        out = self.glu(self.inner(x)) @ self.w2
        return out if self.b2 is None else out + self.b2


@dataclass
class LayerSeen:
    """What one MoE layer showed in one forward, a row a token; `logits`, `gates` and `output` are nodes of the graph.

    Attributes:
        logits: `[..., E]` of the router.
        ids: `[rows, K]` int64, the experts that were picked, forced ones included.
        runner_up: `[rows]` int64, the best expert outside them by ranked score, -1 where there is none (estimator swap).
        gaps: `[rows, K]`, ranked score of each slot less that of the runner-up (estimator swap).
        x: `[..., H]`, input of the experts.
        gates: `[rows, K]`, or `[rows, E]` (see Block).
        output: `[..., H]` of the experts together.
    """

    logits: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    runner_up: torch.Tensor | None = None
    gaps: torch.Tensor | None = None
    x: torch.Tensor | None = None
    gates: torch.Tensor | None = None
    output: torch.Tensor | None = None


@dataclass(frozen=True)
class SignalPart(Part):
    """What one process saw of the signals of one micro-batch.

    Attributes:
        values: by name (fields of RouteSignals), `[n, t, l, K]` float32, or `[n, t, l]`; t and l as in Part.
        exact: `[n, l, E]` float32, for estimator param_exact.
    """

    values: dict[str, torch.Tensor]
    exact: torch.Tensor | None


class Block(Protocol):
    """A MoE layer of an engine.

    Attributes:
        gates_of_all_experts: `gates` are `[rows, E]`, by expert, and not those of the slots.
    """

    gates_of_all_experts: bool

    def listen(self, seen: LayerSeen) -> Callable[[], None]:
        """Let each forward fill `x`, `gates` and `output`; returns what stops it."""

    def expert(self, index: int) -> ExpertWeights:
        """Weights of an expert by its number in the layer, detached, float32."""


class Taps:
    """Collects the signals of the micro-batches of a pass.

    Args:
        points: selection points of the MoE layers.
        blocks: their layers, in the same order.
        batch: the tokens.
        request: estimators and labels.
        temperature: divides the logits.
    """

    def __init__(
        self,
        points: Sequence[SelectionPoint],
        blocks: Sequence[Block],
        batch: TokenBatch,
        request: SignalRequest,
        temperature: float,
    ) -> None:
        self.points, self.blocks, self.batch, self.request, self.temperature = (
            points,
            blocks,
            batch,
            request,
            temperature,
        )
        self.seen = {point.layer: LayerSeen() for point in points}
        self.parts: list[SignalPart] = []

    def _select(self, point: SelectionPoint, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if "swap" in self.request.estimators:
            seen, ranked = self.seen[point.layer], scores.detach()
            best = ranked.scatter(1, ids, -torch.inf).max(-1)
            seen.runner_up = torch.where(best.values.isneginf(), -1, best.indices)
            seen.gaps = ranked.gather(1, ids) - best.values[:, None]
        return ids

    def _listen(self, point: SelectionPoint, logits: torch.Tensor, ids: torch.Tensor) -> None:
        self.seen[point.layer].logits, self.seen[point.layer].ids = logits, ids

    def take(self, rows: torch.Tensor, logits: torch.Tensor, logp: torch.Tensor) -> None:
        """Back-propagate ℓ of a micro-batch that was just forwarded.

        Args:
            rows: `[n]` int64, of the batch.
            logits: `[n, T, V]`, a node of the graph.
            logp: `[n, T]`, log-probs of the sampled tokens in nats, 0 outside the responses.

        Raises:
            EngineError: if a MoE layer ran without a graph.
        """
        likelihood = self.likelihood(rows, logits, logp)
        layers, nodes = self._taken()
        self._keep(rows, layers, torch.autograd.grad(likelihood, nodes))
        for point in self.points:
            point.begin()  # what comes next is another micro-batch

    def take_later(self, rows: torch.Tensor) -> None:
        """The same for rows `[n]` on a pipeline stage, where the gradients come when the schedule runs the backward of `likelihood`."""
        layers, nodes = self._taken()
        gradients: list[torch.Tensor | None] = [None] * len(nodes)

        def listen(index: int) -> Callable[[torch.Tensor], None]:
            def arrived(gradient: torch.Tensor) -> None:
                gradients[index] = gradient.detach()
                if all(one is not None for one in gradients):
                    self._keep(rows, layers, gradients)  # type: ignore[arg-type]

            return arrived

        for index, node in enumerate(nodes):
            node.register_hook(listen(index))

    def likelihood(self, rows: torch.Tensor, logits: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
        """ℓ of a micro-batch in nats, a scalar summed over its sequences, of the sampled tokens or of tokens drawn at the same contexts.

        Args:
            rows, logits, logp: as for `take`.
        """
        if self.request.labels == "rollout":
            return logp.sum()
        uids = [self.batch.uids[i] for i in rows.tolist()]
        labels = draw_labels(logits.detach(), self.batch.tokens[rows], uids, self.request.seed, self.temperature)
        return response_logprobs(logits, labels, self.batch.scored(rows), self.temperature).sum()

    def _taken(self) -> tuple[list[LayerSeen], list[torch.Tensor]]:
        """What each layer showed in the last forward, and the nodes whose gradients are wanted; the next forward gets new ones."""
        layers = [self.seen[point.layer] for point in self.points]
        nodes = [node for seen in layers for node in (seen.logits, seen.gates, seen.output)]
        if any(node is None or not node.requires_grad for node in nodes):
            raise EngineError(
                "signals for scores: a MoE layer ran without a graph (activation recompute, or no gradient)"
            )
        taken = [replace(seen) for seen in layers]
        for seen in layers:
            seen.logits = seen.gates = seen.output = seen.x = None  # they hold the graph
        return taken, nodes  # type: ignore[return-value]

    def _keep(self, rows: torch.Tensor, layers: Sequence[LayerSeen], gradients: Sequence[torch.Tensor]) -> None:
        """The signals of a micro-batch from the gradients of its nodes: logits, gates and output, layer after layer."""
        with torch.no_grad():
            pieces = [
                self._layer(point, block, seen, gradients[3 * i : 3 * i + 3], rows)
                for i, (point, block, seen) in enumerate(zip(self.points, self.blocks, layers, strict=True))
            ]
        exact = [piece.pop("exact").cpu() for piece in pieces if "exact" in piece]
        stacked = {
            name: torch.stack(
                [p.unflatten(piece[name], len(rows)) for p, piece in zip(self.points, pieces, strict=True)], 2
            ).cpu()
            for name in pieces[0]
        }
        first = self.points[0]
        layout = first.layers or tuple(point.layer for point in self.points)
        width = next(iter(stacked.values())).shape[1]
        self.parts.append(
            SignalPart(
                rows, first.part * width, [layout.index(p.layer) for p in self.points], stacked,
                torch.stack(exact, 1) if exact else None,
            )
        )  # fmt: skip
        for seen in layers:
            seen.logits = seen.gates = seen.output = seen.x = None

    def _layer(
        self,
        point: SelectionPoint,
        block: Block,
        seen: LayerSeen,
        gradients: Sequence[torch.Tensor],
        rows: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The signals of one layer, by row of its forward; gradients are those of logits, gates and output."""
        logit_grad, gate_grad, u = gradients
        ids, gates, x = seen.ids, seen.gates, seen.x
        assert ids is not None
        assert gates is not None
        assert x is not None
        if block.gates_of_all_experts:
            gates, gate_grad = gates.gather(1, ids), gate_grad.gather(1, ids)
        g, x, u = gates.detach().float(), x.reshape(len(ids), -1).float(), u.reshape(len(ids), -1).float()
        out = {
            "gates": g,
            "logit_grad": logit_grad.reshape(-1, point.num_experts).gather(1, ids).float(),
            "gate_grad": gate_grad.float(),
        }
        wanted = self.request.estimators
        if "swap" in wanted:
            assert seen.runner_up is not None
            assert seen.gaps is not None
            out["gaps"] = seen.gaps.float()
            value = torch.full((len(ids),), torch.nan)
            for expert in seen.runner_up.unique().tolist():
                if expert >= 0:
                    where = (seen.runner_up == expert).nonzero()[:, 0]
                    value[where] = (u[where] * block.expert(expert).output(x[where])).sum(-1)
            out["runner_up"] = value
        if wanted & {"param", "param_exact"}:
            out |= self._inside(point, block, ids, g, x, u, rows)
        return out

    def _inside(
        self,
        point: SelectionPoint,
        block: Block,
        ids: torch.Tensor,
        g: torch.Tensor,
        x: torch.Tensor,
        u: torch.Tensor,
        rows: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """What lies inside the experts: norms of routes, and, for param_exact, of sequences (ghost norm)."""
        hidden, pre_grad = torch.zeros_like(g), torch.zeros_like(g)
        exact = torch.zeros(len(rows), point.num_experts)
        sequence = point.flatten(torch.arange(len(rows))[:, None].expand(-1, len(ids) // len(rows)))
        bias = 0.0
        for expert in ids.unique().tolist():
            row, slot = (ids == expert).nonzero(as_tuple=True)
            weights = block.expert(expert)
            bias = 0.0 if weights.b1 is None else 1.0  # a bias is a weight whose input is 1
            signal = g[row, slot, None] * u[row]
            with torch.enable_grad():
                pre = weights.inner(x[row]).detach().requires_grad_()
                inner = weights.glu(pre)
            (d,) = torch.autograd.grad(inner, pre, signal @ weights.w2.T)
            m = inner.detach()
            hidden[row, slot], pre_grad[row, slot] = m.square().sum(-1) + bias, d.square().sum(-1)
            if "param_exact" in self.request.estimators:
                same = sequence[row][:, None] == sequence[row][None, :]
                gram = (signal @ signal.T) * (m @ m.T + bias) + (d @ d.T) * (x[row] @ x[row].T + bias)
                exact[:, expert].index_add_(0, sequence[row], (gram * same).sum(1))
        out = {
            "hidden_sq": hidden, "pre_grad_sq": pre_grad, "input_sq": x.square().sum(-1) + bias,
            "output_grad_sq": u.square().sum(-1),
        }  # fmt: skip
        return out | ({"exact": exact} if "param_exact" in self.request.estimators else {})

    def signals(self, parts: Sequence[SignalPart] | None = None) -> RouteSignals:
        """Of the whole batch, packed like its trace.

        Args:
            parts: of all processes; by default this one has seen everything.
        """
        parts, inside, packed = self.parts if parts is None else parts, self.batch.token_mask, {}
        first = self.points[0]
        layers = len(first.layers or self.points)
        for name, example in parts[0].values.items():
            values = torch.zeros(*inside.shape, layers, *example.shape[3:])
            for part in parts:
                part.put(values, part.values[name])
            packed[name] = values[inside].numpy()
        if parts[0].exact is not None:
            exact = torch.zeros(len(self.batch), layers, first.num_experts)
            for part in parts:
                assert part.exact is not None
                real = part.rows >= 0  # sums of squares; rounding can leave one a hair below 0
                exact[part.rows[real][:, None], torch.tensor(part.columns)] = part.exact[real].clamp_min(0)
            packed["exact"] = exact.numpy()
        name = self.request.labels + ("" if self.temperature == 1 else f", temperature {self.temperature:g}")
        return RouteSignals(labels=name, **packed)


def draw_labels(
    logits: torch.Tensor, tokens: torch.Tensor, uids: Sequence[str], seed: int, temperature: float
) -> torch.Tensor:
    """A token drawn at each position given the true ones before it: `[n, T]` int64, position 0 as it was.

    A draw depends on seed, name of the sequence and position alone, not on the batch.

    Args:
        logits: `[n, T, V]`, row t predicts token t + 1.
        tokens: `[n, T]` int64.
        uids: name of each sequence.
        seed: of the draw.
        temperature: divides the logits.
    """
    start = hash_text(seed, "resampled")
    names = np.array([hash_text(uid) for uid in uids], dtype=np.uint64)
    positions = np.arange(tokens.shape[1], dtype=np.uint64)
    uniform = torch.from_numpy(uniform_from(mix(mix(names ^ start)[:, None] ^ positions[None, :])))
    cumulative = (logits[:, :-1].double() / temperature).softmax(-1).cumsum(-1)
    below = uniform[:, 1:, None].to(cumulative.device) * cumulative[..., -1:] > cumulative
    labels = tokens.clone()
    labels[:, 1:] = below.sum(-1).cpu()
    return labels


@contextlib.contextmanager
def open_taps(
    model: Any,
    points: Sequence[SelectionPoint],
    blocks: Sequence[Block],
    batch: TokenBatch,
    request: SignalRequest | None,
    temperature: float,
) -> Iterator[Taps | None]:
    """Taps at every MoE layer of a model while the context is open; None without a request.

    Args:
        model: or one chunk of its layers, on a pipeline stage.
        points, blocks, batch, request, temperature: as for Taps.
    """
    if request is None:
        yield None
        return
    taps = Taps(points, blocks, batch, request, temperature)
    stops: list[Callable[[], None]] = []
    try:
        for point, block in zip(points, blocks, strict=True):
            stops.append(block.listen(taps.seen[point.layer]))
        with selecting(model, [taps._select] * len(points)), tapping(model, taps._listen):
            yield taps
    finally:
        for stop in stops:
            stop()
