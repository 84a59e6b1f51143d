"""What a replay forces, and what it counts while it does: the plan laid over the rows of each forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rar_lib.errors import ReplayError
from rar_lib.metrics.replay import router_probabilities
from rar_lib.replay.counts import PassCounts
from rar_lib.replay.plan import ReplayPlan
from rar_lib.replay.points import SelectionPoint, find_points
from rar_lib.replay.record import describe_routers
from rar_lib.replay.resolve import resolve, resolve_biased
from rar_lib.traces.trace import RouteTrace


class Replaying:
    """The routes that an open `replaying` context forces.

    Raises:
        ReplayError: if trace and model differ in experts, top-k or MoE layers, the plan is not of the trace, or
            forces single experts of a router that chooses within groups.
    """

    def __init__(
        self, model: torch.nn.Module, trace: RouteTrace, plan: ReplayPlan, measure: bool = False, gates: bool = False
    ) -> None:
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
        if plan.unit != "token_layer" and grouped:
            raise ReplayError(
                f"plan of unit {plan.unit}: layers {grouped} choose within groups of experts, which single experts would "
                "leave; use unit token_layer"
            )
        experts, _ = trace.to_padded()
        inside = np.arange(experts.shape[1])[None, :] < trace.lengths[:, None]
        planned = np.zeros((*inside.shape, *plan.planned.shape[1:]), dtype=bool)
        planned[inside] = plan.planned
        # One empty sequence more, which row -1 stands for: it fills up micro-batches, and nothing of it is forced.
        self._planned = _with_filler(torch.from_numpy(planned), False)
        self._targets = _with_filler(torch.from_numpy(experts), -1)
        self._column = {layer: i for i, layer in enumerate(mine.moe_layers)}
        self._points = points
        self._rows: torch.Tensor = torch.arange(trace.num_sequences)
        self._lengths = _with_filler(torch.from_numpy(trace.lengths), 0)
        tokens = _padded_tokens(trace)
        self._tokens = None if tokens is None else _with_filler(tokens, 0)
        self._gates = _with_filler(_padded_scores(trace, inside), 0) if gates else None
        self._bias = None if plan.bias is None else torch.from_numpy(np.asarray(plan.bias, np.float32))
        self._measure = measure
        self._compared = self._differing = 0
        self._sums: dict[str, torch.Tensor] = {}
        self._forced_slots: dict[int, deque[tuple[torch.Tensor, torch.Tensor]]] = {p.layer: deque() for p in points}

    def _add(self, name: str, amount: torch.Tensor) -> None:
        """Add a scalar to a sum; it stays where it was computed, so that no router call waits for a device."""
        before = self._sums.get(name)
        self._sums[name] = amount if before is None else before + amount.to(before.device)

    def _sum(self, name: str) -> float:
        return self._sums[name].item() if name in self._sums else 0

    @property
    def forced_units(self) -> int:
        """Units of the plan that routers were given, since the context opened."""
        return int(self._sum("forced units"))

    @property
    def changed_cells(self) -> int:
        """(token, layer) cells whose executed set of experts differs from the router's live choice."""
        return int(self._sum("changed cells"))

    def focus(self, sequences: Sequence[int] | torch.Tensor, in_flight: bool = False) -> None:
        """The next forward holds these sequences of the trace, in this order; -1 is a filler, which stays native and uncounted.

        Args:
            sequences: `[n]` integers.
            in_flight: earlier forwards still wait for their backward, as in a pipeline.

        Raises:
            ReplayError: for a sequence that the trace does not have.
        """
        rows, known = torch.as_tensor(sequences, dtype=torch.int64), len(self._targets) - 1
        if rows.numel() and not -1 <= int(rows.min()) <= int(rows.max()) < known:
            raise ReplayError(
                f"the trace has {known} sequences; asked to focus on {int(rows.min())} to {int(rows.max())}"
            )
        self._rows = rows
        for point in self._points:
            point.begin(in_flight)
        if not in_flight:
            for waiting in self._forced_slots.values():
                waiting.clear()

    def _check_inputs(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward must hold the tokens that the trace speaks of, right-padded."""
        tokens = kwargs.get("input_ids", args[0] if args else None)
        inputs = tokens if isinstance(tokens, torch.Tensor) else kwargs.get("inputs_embeds")
        if isinstance(inputs, torch.Tensor) and len(inputs) != len(self._rows):
            raise ReplayError(f"the forward holds {len(inputs)} sequences, the replay is focused on {len(self._rows)}")
        if kwargs.get("packed_seq_params") is not None:
            raise ReplayError(
                "the forward holds packed sequences (packed_seq_params); replay needs a row a sequence, right-padded"
            )
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
        steps, rest = divmod(len(ids) * point.parts, max(n, 1))
        if rest or steps < length:
            raise ReplayError(
                f"layer {point.layer}: the forward has {len(ids) * point.parts} rows for {n} sequences of up to {length} recorded "
                f"tokens; expected a multiple of {n}, at least {n * length}"
            )
        if steps > length:
            target = torch.cat([target, target.new_full((n, steps - length, k), -1)], 1)
            planned = torch.cat([planned, planned.new_zeros((n, steps - length, *planned.shape[2:]))], 1)
        recorded, asked = point.flatten(target).to(ids.device), point.flatten(planned).to(ids.device)
        if self._bias is None:
            used = resolve(recorded, asked, scores, ids)
        else:
            used = resolve_biased(recorded, asked, scores, ids, self._bias[column].to(ids.device))
        self._add("forced units", asked.sum())
        self._add("changed cells", ((used.unsqueeze(-1) == ids.unsqueeze(-2)).sum((-1, -2)) < k).sum())
        if self._measure:
            self._count(point, recorded, asked, scores.detach(), ids, used)
        return used

    def _recorded_gates(self, point: SelectionPoint, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The recorded scores of the ids in use, where their set was planned; elsewhere the live ones."""
        assert self._gates is not None
        column = self._column[point.layer]
        recorded, planned = self._gates[self._rows, :, column], self._planned[self._rows, :, column]
        missing = len(values) // len(recorded) - recorded.shape[1]
        if missing:
            recorded = torch.cat([recorded, recorded.new_zeros((len(recorded), missing, recorded.shape[-1]))], 1)
            planned = torch.cat([planned, planned.new_zeros((len(planned), missing))], 1)
        rows, forced = point.flatten(recorded).to(values.device), point.flatten(planned).to(values.device)
        return torch.where(forced[:, None], rows.to(values.dtype).gather(-1, ids), values)

    def _count(
        self,
        point: SelectionPoint,
        recorded: torch.Tensor,
        asked: torch.Tensor,
        scores: torch.Tensor,
        native: torch.Tensor,
        used: torch.Tensor,
    ) -> None:
        """Fidelity and regret of one router call; which executed experts were forced, for the gradients to come."""
        known = recorded[:, 0] >= 0
        same = (used[:, :, None] == recorded[:, None, :]) & known[:, None, None]  # [rows, executed slot, recorded slot]
        held = same.any(-1)
        self._add("cells", known.sum())
        self._add("kept", held.sum())
        p = router_probabilities(scores)
        given_up = p.gather(1, native).sum(-1) - p.gather(1, used).sum(-1)
        self._add("outside", (known & torch.isneginf(scores.gather(1, used)).any(-1)).sum())
        self._add("regret", torch.where(known, given_up, 0).sum())
        forced = held & asked[:, None] if asked.ndim == 1 else (same & asked[:, None, :]).any(-1)
        self._forced_slots[point.layer].append((forced, known))

    def _listen(self, point: SelectionPoint, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Square the gradient of the logits of the executed experts when it comes, apart for forced and free ones."""
        waiting = self._forced_slots[point.layer]
        if (
            not logits.requires_grad or not waiting
        ):  # the graph of a recompute beside that of the forward gets no gradient
            return
        forced, known = waiting.popleft()

        def arrived(gradient: torch.Tensor) -> None:
            squared = gradient.detach().reshape(-1, gradient.shape[-1]).gather(1, ids).double().square()
            for kind, mask in (("forced", forced), ("free", ~forced & known[:, None])):
                self._add(f"{kind} gradient", torch.where(mask, squared, 0).sum())
                self._add(f"{kind} slots", mask.sum())

        logits.register_hook(arrived)

    def counts(self) -> PassCounts:
        """What happened since the context opened."""
        for point in self._points:
            compared, differing = point.take_executed()
            self._compared, self._differing = self._compared + compared, self._differing + differing
        forced, free = (
            (float(self._sum(f"{kind} gradient")), int(self._sum(f"{kind} slots"))) for kind in ("forced", "free")
        )
        regret = None if self._sum("outside") else float(self._sum("regret"))
        return PassCounts(
            self.forced_units, self.changed_cells, self._compared, self._differing, int(self._sum("cells")), int(self._sum("kept")),
            regret, *forced, *free,
        )  # fmt: skip


def _with_filler(rows: torch.Tensor, value: int) -> torch.Tensor:
    """`[S + 1, ...]`: one more row, filled with a value."""
    return torch.cat([rows, rows.new_full((1, *rows.shape[1:]), value)])


def _padded_scores(trace: RouteTrace, inside: np.ndarray) -> torch.Tensor:
    """`[S, T, L, E]` float32, right-padded with 0."""
    if trace.scores is None:
        raise ReplayError("recorded gates: the trace carries no router scores; record it with scores=True")
    scores = np.zeros((*inside.shape, *trace.scores.shape[1:]), np.float32)
    scores[inside] = trace.scores
    return torch.from_numpy(scores)


def _padded_tokens(trace: RouteTrace) -> torch.Tensor | None:
    """`[S, T]` int64, right-padded with 0; None if the trace does not carry its tokens."""
    if trace.token_ids is None:
        return None
    inside = np.arange(int(trace.lengths.max(initial=0)))[None, :] < trace.lengths[:, None]
    tokens = np.zeros(inside.shape, dtype=np.int64)
    tokens[inside] = trace.token_ids
    return torch.from_numpy(tokens)
