"""The real trainer: Megatron-Core's GPTModel, schedule, DDP and optimizer, with replay at the router.

One process or many: every process is given the whole batch, takes its sequences, token positions and layers of it, and what
they saw is gathered at the first, in layer order. The passes are Megatron's own: forward-backward schedule (1F1B under pipeline
parallel), DDP and `finalize_model_grads`. The loss of a micro-batch is a sum, and Megatron divides by the tokens of the whole
batch (`calculate_per_token_loss`). Not run on a GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rar_lib.config import AlgorithmConfig, TrainerConfig
from rar_lib.engines.base import Capture, LogprobResult, Objective, Replay, TokenBatch, UpdateResult
from rar_lib.engines.capture import RouteCollector, open_routes, require_capture, route_counts
from rar_lib.engines.logits import response_logprobs
from rar_lib.engines.megatron_cpu import import_megatron, start_parallel_state, without_cuda
from rar_lib.engines.megatron_experts import MegatronBlock
from rar_lib.engines.megatron_model import build_chunks
from rar_lib.engines.megatron_state import load_state, save_state
from rar_lib.engines.megatron_weights import hf_shards, put_together
from rar_lib.engines.ranks import Ranks
from rar_lib.engines.seen import Seen, not_taken, require_experts
from rar_lib.engines.taps import Taps, open_taps
from rar_lib.errors import DivergedError, EngineError, ReplayError
from rar_lib.replay.force import Replaying
from rar_lib.replay.points import find_points
from rar_lib.replay.scores import SignalRequest


@dataclass(frozen=True)
class _Watch:
    """What is open on one chunk of layers during a pass."""

    forced: Replaying | None
    collector: RouteCollector | None
    taps: Taps | None

    def focus(self, rows: torch.Tensor, in_flight: bool) -> None:
        """The next forward of the chunk holds these rows of the batch."""
        if self.forced is not None:
            self.forced.focus(rows, in_flight)
        elif self.collector is not None:
            self.collector.record.begin(in_flight)

    def scores(self, rows: torch.Tensor, width: int) -> torch.Tensor | None:
        """What the routers ranked in the last forward, if that is kept."""
        return None if self.collector is None else self.collector.scores(rows, width)


class MegatronTrainer:
    """See `Trainer` in base.py. On several processes all call the same method, and the first returns the result.

    Args:
        path: checkpoint folder of a supported family.
        config: dtype, micro-batch size, recompute, processes and parallel sizes.
        algorithm: learning rate, weight decay, gradient clipping.

    Raises:
        EngineError: if Megatron-Core is missing, the family or layout is not supported, or torch.distributed has another
            number of processes.
    """

    name = "megatron"

    def __init__(self, path: Path, config: TrainerConfig, algorithm: AlgorithmConfig) -> None:
        state = import_megatron().parallel_state
        start_parallel_state(config)
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.config, self.algorithm, self.model_id, self.ranks = config, algorithm, path.name, Ranks()
        self._last_stage = state.is_pipeline_last_stage(ignore_virtual=True)
        self._speaks = self._last_stage and state.get_tensor_model_parallel_rank() == 0
        self._data = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
        with without_cuda():
            self.chunks = build_chunks(path, config)
            if algorithm.freeze_router:
                for layer in self._layers():
                    layer.mlp.router.requires_grad_(False)
            self.ddp: list[Any] = [
                DistributedDataParallel(
                    chunk.config,
                    DistributedDataParallelConfig(
                        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
                    ),
                    _low_precision(chunk) if config.dtype == "bfloat16" else chunk,
                )
                for chunk in self.chunks
            ]
            self.optimizer: Any = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=algorithm.lr,
                    weight_decay=algorithm.weight_decay,
                    adam_beta1=0.9,
                    adam_beta2=0.999,
                    adam_eps=1e-8,
                    clip_grad=algorithm.max_grad_norm,
                    bf16=config.dtype == "bfloat16",
                    params_dtype=self.chunks[0].config.params_dtype,
                    use_distributed_optimizer=False,
                ),
                self.ddp,
                config_overrides={},  # weight decay on every parameter, as the hf trainer does
            )
        for chunk in self.chunks:
            chunk.config.grad_scale_func = None
        self.model: Any = self.chunks[0]

    def _layers(self) -> Iterator[Any]:
        for chunk in self.chunks:
            yield from chunk.decoder.layers

    # ---------------------------------------------------------------- passes

    def _run(
        self,
        batch: TokenBatch,
        micro_batch_size: int,
        watches: list[_Watch],
        seen: Callable[[_Watch, torch.Tensor], None],
        after: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        forward_only: bool,
    ) -> None:
        """Megatron's schedule over the micro-batches of this process: `seen(watch, rows)` after each forward of a chunk, and on the last stage
        `after(rows, logits)`, which gives the loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        pipeline, tensor = self.config.pipeline_parallel, self.config.tensor_parallel
        multiple = 0 if pipeline == 1 else pipeline if self.config.virtual_pipeline > 1 else 1
        parts = batch.micro_batches(micro_batch_size, *self._data, multiple)
        width = -(-batch.tokens.shape[1] // tensor) * tensor  # sequence parallel cuts it into equal parts
        device = next(self.model.parameters()).device
        hidden = torch.ones(1, 1, width, width, dtype=torch.bool, device=device).triu(1)
        _mend_loss_scale()

        def forward_step(iterator: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
            rows = next(iterator)
            watch = watches[next(i for i, chunk in enumerate(self.ddp) if chunk is model)]
            watch.focus(rows, pipeline > 1)
            positions = torch.arange(width, device=device)[None, :].expand(len(rows), width)
            tokens = torch.nn.functional.pad(batch.inputs(rows), (0, width - batch.tokens.shape[1])).to(device)
            logits = model(input_ids=tokens, position_ids=positions, attention_mask=hidden)
            seen(watch, rows)

            def loss(output: torch.Tensor) -> Any:
                return after(rows, output[:, : batch.tokens.shape[1]]), batch.scored(rows).sum().int(), {}

            return logits, loss

        with without_cuda():
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(parts) for _ in self.ddp] if len(self.ddp) > 1 else iter(parts),
                model=self.ddp if len(self.ddp) > 1 else self.ddp[0],
                num_microbatches=len(parts),
                seq_length=width,
                micro_batch_size=len(parts[0]),
                forward_only=forward_only,
            )

    def _result(self, batch: TokenBatch, mine: Seen) -> tuple[torch.Tensor, Seen]:
        """See Seen.gather; log-probs, loss and statistics count once for tensor-parallel peers and the stages of a pipeline."""
        if not self._speaks:
            mine = replace(mine, rows=[], logprobs=[], loss=0.0, statistics={})
        return mine.gather(self.ranks, batch)

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
        """See `Trainer.logprobs`.

        Raises:
            EngineError: for signals that need experts which other processes hold.
        """
        require_capture(signals, capture)
        require_experts(self.config, signals)
        mine = Seen()
        staged = signals is not None and self.config.pipeline_parallel > 1  # their gradients cross stages
        with (
            torch.set_grad_enabled(signals is not None),
            self._for_signals(signals is not None),
            self._watching(batch, replay, capture, measure, signals, temperature) as watches,
        ):

            def seen(watch: _Watch, rows: torch.Tensor) -> None:
                if watch.collector is not None:
                    watch.collector.take(rows)
                if staged and watch.taps is not None:
                    watch.taps.take_later(rows)

            def after(rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
                logp = response_logprobs(logits, batch.tokens[rows], batch.scored(rows), temperature)
                mine.scored(rows, logp)
                taps = watches[-1].taps
                if staged and taps is not None:
                    return taps.likelihood(rows, logits, logp)
                if taps is not None:
                    taps.take(rows, logits, logp)
                return logp.new_zeros(())

            size = micro_batch_size or self.config.micro_batch_size
            self._run(batch, size, watches, seen, after, forward_only=not staged)
            for watch in watches:
                mine.counts += route_counts(watch.forced)
                mine.routes += [] if watch.collector is None else watch.collector.parts
                mine.signals += [] if watch.taps is None else watch.taps.parts
        out, whole = self._result(batch, mine)
        if self.ranks.rank > 0:
            return LogprobResult(out, None, whole.counts)
        collector, taps = watches[0].collector, watches[0].taps
        trace = None if collector is None else collector.trace(batch, "old", self.name, self.model_id, whole.routes)
        return LogprobResult(out, trace, whole.counts, None if taps is None else taps.signals(whole.signals))

    @contextlib.contextmanager
    def _watching(
        self,
        batch: TokenBatch,
        replay: Replay | None,
        capture: Capture,
        measure: bool,
        signals: SignalRequest | None,
        temperature: float,
    ) -> Iterator[list[_Watch]]:
        """Replay, recording and taps of each chunk of layers, as asked for."""
        with contextlib.ExitStack() as stack:
            watches = []
            for chunk in self.chunks:
                forced, collector = stack.enter_context(open_routes(chunk, batch, replay, capture, measure))
                blocks = [MegatronBlock(layer.mlp) for layer in chunk.decoder.layers]
                taps = stack.enter_context(
                    open_taps(chunk, find_points(chunk).points, blocks, batch, signals, temperature)
                )
                watches.append(_Watch(forced, collector, taps))
            yield watches

    @contextlib.contextmanager
    def _for_signals(self, needed: bool) -> Iterator[None]:
        """Without recompute, whose backward of its own no outer graph reaches (numbers are the same), and, where Megatron's backward runs,
        without what would make a step of it."""
        if not needed:
            yield
            return
        config = self.chunks[0].config  # one for all chunks
        owners: list[tuple[Any, str]] = [(config, "recompute_granularity"), (config, "finalize_model_grads_func")]
        for layer in self._layers():
            owners += [(layer.mlp, "moe_layer_recompute"), (layer.self_attention, "checkpoint_core_attention")]
        before = [(owner, name, getattr(owner, name)) for owner, name in owners]
        for owner, name, value in before:
            setattr(owner, name, False if isinstance(value, bool) else None)
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
            for ddp in self.ddp:
                ddp.zero_grad_buffer()

    def gradients(
        self,
        batch: TokenBatch,
        objective: Objective,
        *,
        temperature: float,
        replay: Replay | None = None,
        measure: bool = False,
        routers: bool = False,
    ) -> UpdateResult:
        """The gradient of the token mean, left in the parameters (`main_grad`); grad_norm is NaN. See `update`.

        Raises:
            EngineError: for an objective that looks at routers whose layers or tokens other processes hold.
            ReplayError: if a route that was kept for recompute was not asked for.
        """
        split = (self.config.tensor_parallel, self.config.pipeline_parallel)
        if routers and split != (1, 1):
            raise EngineError(
                "the objective looks at the router scores of all layers and tokens (correction rspo), which tensor_parallel "
                f"{split[0]} and pipeline_parallel {split[1]} spread over processes; use data or expert parallel"
            )
        mine = Seen()

        def after(rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            logp = response_logprobs(logits, batch.tokens[rows], batch.scored(rows), temperature)
            scores = watches[-1].scores(rows, logp.shape[1])
            loss = mine.learned(batch, objective, rows, logp, scores)
            mine.loss += float(loss.detach())
            return loss

        for ddp in self.ddp:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        capture: Capture = "scores" if routers else False
        with self._watching(batch, replay, capture, measure, None, temperature) as watches:
            self._run(batch, self.config.micro_batch_size, watches, lambda watch, rows: None, after, forward_only=False)
            for chunk, watch in zip(self.chunks, watches, strict=True):
                if watch.forced is not None and self.config.recompute and self.config.pipeline_parallel > 1:
                    _require_empty(find_points(chunk).points)
                mine.counts += route_counts(watch.forced)
        out, whole = self._result(batch, mine)
        tokens = int(batch.response_mask.sum())
        counts = replace(  # seen by hooks before Megatron divides by the tokens of the batch
            whole.counts,
            forced_gradient=whole.counts.forced_gradient / tokens**2,
            free_gradient=whole.counts.free_gradient / tokens**2,
        )
        return UpdateResult(whole.loss / tokens, float("nan"), out, whole.statistics, counts)

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
        """See `Trainer.update`, and `gradients` for what it refuses.

        Raises:
            DivergedError: if the gradient is not finite; nothing was learned.
        """
        result = self.gradients(
            batch, objective, temperature=temperature, replay=replay, measure=measure, routers=routers
        )
        with without_cuda():
            self.optimizer.prepare_grads()
            norm = self.optimizer.get_grad_norm()
            if not math.isfinite(norm):  # Megatron's own step would write it into the weights
                raise DivergedError(not_taken(norm, result.loss, self.ranks))
            self.optimizer.step()
        return replace(result, grad_norm=float(norm))

    # ---------------------------------------------------------------- weights and state

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Trainer.weights`; of any shape, nothing but on the first process."""
        yield from self.whole(torch.Tensor.detach)

    def whole(self, value: Callable[[torch.nn.Parameter], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Something of every parameter (itself, its gradient; any shape) as whole tensors in Hugging Face names, on the first process."""
        mine = list(hf_shards(self.chunks, value))
        if self.ranks.size > 1:  # a view would travel with all of the buffer that it is cut from
            mine = [replace(shard, tensor=shard.tensor.clone()) for shard in mine]
        shards = self.ranks.gather(mine)
        if shards is not None:
            yield from put_together(shard for one in shards for shard in one)

    def save(self, folder: Path) -> None:
        """See `Trainer.save`. Every process writes its part; any layout can read it."""
        save_state(self, folder)

    def load(self, folder: Path) -> None:
        """See `Trainer.load`."""
        load_state(self, folder)


def _require_empty(points: list[Any]) -> None:
    """Under recompute every forward of a pipeline is run again in its backward, and takes its routes along."""
    left = {point.layer: point.awaited for point in points if point.awaited}
    if left:
        raise ReplayError(f"routes of forwards that were never recomputed, by layer: {left}; expected none")


def _low_precision(chunk: Any) -> Any:
    from megatron.core.transformer.module import Float16Module

    return Float16Module(chunk.config, chunk)


def _mend_loss_scale() -> None:
    """Megatron keeps one scale of auxiliary losses a process. A backward outside of its schedules makes it a scalar, and the schedules then
    fail to copy their one element into it (megatron-core 0.16)."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    if scale is not None and scale.dim() == 0:
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale.reshape(1)
