"""The embedded trainer: a Transformers MoE with replay at the selection, any family, on one process or under FSDP2.

Under FSDP2 every process is given the whole batch, takes its sequences, and what they saw is gathered at the first; weights,
gradients and moments are sharded layer by layer (`fully_shard`). Gradients of micro-batches add up to the gradient of the token mean over the whole batch, so the split changes nothing
but float summation. Replay covers the forward and, with recomputed activations, the second forward in the backward.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rar_lib.checkpoint import load_model
from rar_lib.config import AlgorithmConfig, TrainerConfig
from rar_lib.engines.base import Capture, LogprobResult, Objective, Replay, TokenBatch, UpdateResult
from rar_lib.engines.capture import open_routes, require_capture, route_counts
from rar_lib.engines.hf_experts import HFBlock
from rar_lib.engines.hf_weights import hf_names, whole
from rar_lib.engines.logits import response_logprobs
from rar_lib.engines.ranks import ALONE, Ranks
from rar_lib.engines.seen import Seen, not_taken, require_experts
from rar_lib.engines.slices import MOMENTS, Shard, Slices, require_one_step, save_slices
from rar_lib.engines.taps import open_taps
from rar_lib.errors import DivergedError, EngineError
from rar_lib.replay.points import find_points
from rar_lib.replay.scores import SignalRequest


class HFTrainer:
    """See `Trainer` in base.py. On several processes all call the same method, and the first returns the result.

    Args:
        path: checkpoint folder.
        config: dtype (bfloat16 means autocast over fp32 weights), micro-batch size, recompute, processes.
        algorithm: learning rate, weight decay, gradient clipping.

    Raises:
        EngineError: if torch.distributed has another number of processes than the config.
    """

    name = "hf"

    def __init__(self, path: Path, config: TrainerConfig, algorithm: AlgorithmConfig) -> None:
        self.config, self.algorithm, self.model_id = config, algorithm, path.name
        self.ranks = Ranks() if config.processes > 1 else ALONE
        if self.ranks.size != config.processes:
            raise EngineError(
                f"trainer.processes: expected {config.processes}, found a process group of {self.ranks.size}"
            )
        self.model: Any = load_model(path, kernels=config.kernels)
        if config.recompute:
            noisy = {k: v for k, v in self.model.config.to_dict().items() if ("dropout" in k or "jitter" in k) and v}
            if noisy:
                raise EngineError(
                    f"trainer.recompute: Transformers recomputes in training mode, where {noisy} would add noise"
                )
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()  # Transformers recomputes in training mode only
        found = find_points(self.model)
        self._points = found.points
        self._blocks = [HFBlock(experts) for experts in getattr(found, "experts", [])]
        if algorithm.freeze_router:
            for router in getattr(found, "routers", []):
                router.requires_grad_(False)
        if config.processes > 1:
            _shard(self.model, config.processes)
        fused = True if config.kernels == "fused" and config.processes == 1 else None  # None: as PyTorch chooses
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=algorithm.lr, weight_decay=algorithm.weight_decay, fused=fused
        )

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        # Sequences are right-padded and attention is causal: padding cannot reach a token, so no mask is needed.
        low, device = self.config.dtype == "bfloat16", next(self.model.parameters()).device
        with torch.autocast(device.type, torch.bfloat16) if low else contextlib.nullcontext():
            return self.model(input_ids=tokens.to(device), use_cache=False).logits

    def logprobs(
        self,
        batch: TokenBatch,
        *,
        temperature: float,
        replay: Replay | None = None,
        capture: Capture = False,
        micro_batch_size: int | None = None,
        signals: SignalRequest | None = None,
        measure: bool = False,
    ) -> LogprobResult:
        """See `Trainer.logprobs`."""
        require_capture(signals, capture)
        require_experts(self.config, signals)
        mine = Seen()
        with (
            torch.set_grad_enabled(signals is not None),
            open_routes(self.model, batch, replay, capture, measure) as (forced, collector),
            open_taps(self.model, self._points, self._blocks, batch, signals, temperature) as taps,
        ):
            size = micro_batch_size or self.config.micro_batch_size
            for rows in batch.micro_batches(size, self.ranks.rank, self.ranks.size):
                if forced is not None:
                    forced.focus(rows)
                logits = self._logits(batch.inputs(rows))
                logp = response_logprobs(logits, batch.tokens[rows], batch.scored(rows), temperature)
                mine.scored(rows, logp)
                if taps is not None:
                    taps.take(rows, logits, logp)
                if collector is not None:
                    collector.take(rows)
        mine.counts = route_counts(forced)
        mine.routes = [] if collector is None else collector.parts
        mine.signals = [] if taps is None else taps.parts
        out, whole_batch = mine.gather(self.ranks, batch)
        if self.ranks.rank > 0:
            return LogprobResult(out, None, whole_batch.counts)
        trace = None
        if collector is not None:
            trace = collector.trace(batch, "old", self.name, self.model_id, whole_batch.routes)
        return LogprobResult(
            out, trace, whole_batch.counts, None if taps is None else taps.signals(whole_batch.signals)
        )

    def update(
        self,
        batch: TokenBatch,
        objective: Objective,
        *,
        temperature: float,
        replay: Replay | None = None,
        measure: bool = False,
        routers: bool = False,
    ) -> UpdateResult:
        """See `Trainer.update`."""
        tokens, mine = int(batch.response_mask.sum()), Seen()
        self.optimizer.zero_grad()
        capture: Capture = "scores" if routers else False
        with open_routes(self.model, batch, replay, capture, measure) as (forced, collector):
            for rows in batch.micro_batches(self.config.micro_batch_size, self.ranks.rank, self.ranks.size):
                if forced is not None:
                    forced.focus(rows)
                elif collector is not None:
                    collector.record.begin()
                logits = self._logits(batch.inputs(rows))
                logp = response_logprobs(logits, batch.tokens[rows], batch.scored(rows), temperature)
                scores = None if collector is None else collector.scores(rows, logp.shape[1])
                part = mine.learned(batch, objective, rows, logp, scores) / tokens
                part.backward()
                mine.loss += float(part.detach())
        mine.counts = route_counts(forced)
        out, whole_batch = mine.gather(self.ranks, batch)
        clipped = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.algorithm.max_grad_norm)
        norm, loss = float(whole(clipped)), whole_batch.loss
        if not math.isfinite(norm):
            raise DivergedError(not_taken(norm, loss, self.ranks))
        self.optimizer.step()
        return UpdateResult(loss, norm, out, whole_batch.statistics, whole_batch.counts)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Trainer.weights`; of any shape, whole on every process."""
        yield from hf_names(self.model)

    def save(self, folder: Path) -> None:
        """See `Trainer.save`: weights and AdamW moments under the names of the model's parameters; every process writes its part."""
        named = dict(self.model.named_parameters())
        states = {name: self.optimizer.state.get(p, {}) for name, p in named.items() if p.requires_grad}
        step = require_one_step(float(state["step"]) if state else 0.0 for state in states.values())
        shards = [self._slice(f"model.{name}", p) for name, p in named.items()]
        for name, state in states.items():
            shards += [self._slice(f"optimizer.{key}.{name}", state[key]) for key in MOMENTS if key in state]
        save_slices(folder, self.name, self.ranks, step, shards)

    def _slice(self, name: str, tensor: torch.Tensor) -> Shard:
        """What this process holds: FSDP2 cuts along the first dimension, in the order of ranks."""
        if not isinstance(tensor, DTensor):
            return Shard(name, tensor)
        return Shard(name, tensor.to_local(), 0, self.ranks.rank, self.ranks.size)

    def load(self, folder: Path) -> None:
        """See `Trainer.load`; any number of processes reads what another wrote."""
        state = Slices(folder, self.name)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(_like(parameter, state.require(f"model.{name}")))
                self.optimizer.state.pop(parameter, None)  # a state saved before the first step has no moments
                if state.step and parameter.requires_grad:
                    moments = {key: _like(parameter, state.require(f"optimizer.{key}.{name}")) for key in MOMENTS}
                    self.optimizer.state[parameter] = {"step": state.step.clone(), **moments}


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A whole tensor, cut as a parameter is."""
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


@functools.cache
def _mesh(processes: int) -> Any:
    """One a process: it holds a process group."""
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (processes,))


def _shard(model: Any, processes: int) -> None:
    """FSDP2: each decoder layer is gathered for its forward and backward alone; gradients are summed, not averaged."""
    mesh = _mesh(processes)
    base = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    for part in (*base.layers, model):
        # The root too: after a pass without backward it would stay whole, and hide its shards from the optimizer's state.
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
        part.set_gradient_divide_factor(1.0)  # the loss is already a share of the whole batch's token mean
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other
