"""The real trainer: Megatron-Core's GPTModel, schedule, DDP and optimizer, with replay at the router.

One process so far. The pass goes through Megatron's own forward-backward schedule and `finalize_model_grads`, batches
travel as micro-batches and weights under their Hugging Face names, so that a parallel layout is a matter of process
groups and not of this code's shape. The loss of a micro-batch is a sum and Megatron divides by the tokens of the whole
batch (`calculate_per_token_loss`). Not run on a GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rar_lib.config import AlgorithmConfig, TrainerConfig
from rar_lib.engines.base import Capture, LogprobResult, Objective, Replay, TokenBatch, UpdateResult
from rar_lib.engines.capture import RouteCollector, open_routes, require_capture, route_counts
from rar_lib.engines.logits import response_logprobs
from rar_lib.engines.megatron_cpu import import_megatron, start_parallel_state, without_cuda
from rar_lib.engines.megatron_experts import MegatronBlock
from rar_lib.engines.megatron_model import build_model, hf_weights
from rar_lib.engines.taps import open_taps
from rar_lib.errors import DivergedError, EngineError
from rar_lib.replay.force import Replaying
from rar_lib.replay.points import find_points
from rar_lib.replay.scores import SignalRequest


class MegatronTrainer:
    """See `Trainer` in base.py.

    Args:
        path: checkpoint folder of a supported family.
        config: dtype, micro-batch size, recompute, parallel sizes.
        algorithm: learning rate, weight decay, gradient clipping.

    Raises:
        EngineError: if Megatron-Core is missing, the family is not supported, or more than one process is asked for.
    """

    name = "megatron"

    def __init__(self, path: Path, config: TrainerConfig, algorithm: AlgorithmConfig) -> None:
        sizes = (
            config.tensor_parallel,
            config.pipeline_parallel,
            config.expert_parallel,
            config.expert_tensor_parallel,
        )
        if sizes != (1, 1, 1, 1):
            raise EngineError(
                f"trainer: parallel sizes (TP, PP, EP, ETP) {sizes} need several processes; this trainer runs in one"
            )
        import_megatron()
        start_parallel_state(*sizes)
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.config, self.algorithm, self.model_id = config, algorithm, path.name
        with without_cuda():
            self.model: Any = build_model(path, config)
            if algorithm.freeze_router:
                for layer in self.model.decoder.layers:
                    layer.mlp.router.requires_grad_(False)
            chunk = self.model
            if config.dtype == "bfloat16":
                from megatron.core.transformer.module import Float16Module

                chunk = Float16Module(self.model.config, self.model)
            self.ddp: Any = DistributedDataParallel(
                self.model.config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
                ),
                chunk,
            )
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
                    params_dtype=self.model.config.params_dtype,
                    use_distributed_optimizer=False,
                ),
                [self.ddp],
                config_overrides={},  # weight decay on every parameter, as the hf trainer does
            )
        self.model.config.grad_scale_func = None
        self._points = find_points(self.model).points
        self._blocks = [MegatronBlock(layer.mlp) for layer in self.model.decoder.layers]

    # ---------------------------------------------------------------- passes

    def _run(
        self, batch: TokenBatch, micro_batch_size: int, focus: Any, after: Any, *, forward_only: bool
    ) -> list[Any]:
        """Megatron's schedule over the micro-batches: `focus(rows)` before each forward, `after(rows, logits)` gives what its loss
        function returns."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        parts = batch.micro_batches(micro_batch_size)
        _mend_loss_scale()

        def forward_step(iterator: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
            rows = next(iterator)
            focus(rows)
            tokens = batch.tokens[rows]
            length = tokens.shape[1]
            positions = torch.arange(length)[None, :].expand_as(tokens)
            hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
            logits = model(input_ids=tokens, position_ids=positions, attention_mask=hidden)
            return logits, lambda output: after(rows, output)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(parts),
            model=self.ddp,
            num_microbatches=len(parts),
            seq_length=batch.tokens.shape[1],
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
        )

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
        out = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        mask = batch.response_mask
        with (
            torch.set_grad_enabled(signals is not None),
            without_cuda(),
            self._without_recompute(signals is not None),
            open_routes(self.model, batch, replay, capture, measure) as (forced, collector),
            open_taps(self.model, self._points, self._blocks, batch, signals, temperature) as taps,
        ):

            def after(rows: torch.Tensor, logits: torch.Tensor) -> Any:
                logp = response_logprobs(logits, batch.tokens[rows], mask[rows], temperature)
                out[rows] = logp.detach().float()
                if taps is not None:
                    taps.take(rows, logits, logp)
                if collector is not None:
                    collector.take(rows)
                return out.new_zeros(()), torch.zeros((), dtype=torch.int), {}

            focus = _focus(forced, collector)
            self._run(batch, micro_batch_size or self.config.micro_batch_size, focus, after, forward_only=True)
        trace = collector.trace(batch, "old", self.name, self.model_id) if collector is not None else None
        return LogprobResult(out, trace, route_counts(forced), None if taps is None else taps.signals())

    @contextlib.contextmanager
    def _without_recompute(self, needed: bool) -> Iterator[None]:
        """Megatron recomputes in a backward of its own, where no outer graph reaches the routers; numbers are the same."""
        before = self.model.config.recompute_granularity
        if needed:
            self.model.config.recompute_granularity = None
        try:
            yield
        finally:
            self.model.config.recompute_granularity = before

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
        """The gradient of the token mean, left in the parameters (`main_grad`); grad_norm is NaN. See `update`."""
        mask = batch.response_mask
        out = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        statistics: dict[str, float] = {}
        total = 0.0

        def after(rows: torch.Tensor, logits: torch.Tensor) -> Any:
            nonlocal total
            logp = response_logprobs(logits, batch.tokens[rows], mask[rows], temperature)
            scores = None if collector is None else collector.scores(rows, logp.shape[1])
            terms, sums = objective(logp, rows, scores)
            out[rows] = logp.detach().float()
            for name, value in sums.items():
                statistics[name] = statistics.get(name, 0.0) + value
            loss = terms[mask[rows]].sum()
            total += float(loss.detach())
            return loss, mask[rows].sum().int(), {}

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        capture: Capture = "scores" if routers else False
        with without_cuda(), open_routes(self.model, batch, replay, capture, measure) as (forced, collector):
            focus = _focus(forced, collector)
            self._run(batch, self.config.micro_batch_size, focus, after, forward_only=False)
        tokens = int(mask.sum())
        counts = route_counts(forced)  # seen by hooks before Megatron divides by the tokens of the batch
        counts = replace(
            counts,
            forced_gradient=counts.forced_gradient / tokens**2,
            free_gradient=counts.free_gradient / tokens**2,
        )
        return UpdateResult(total / tokens, float("nan"), out, statistics, counts)

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
        result = self.gradients(
            batch, objective, temperature=temperature, replay=replay, measure=measure, routers=routers
        )
        with without_cuda():
            self.optimizer.prepare_grads()
            norm = self.optimizer.get_grad_norm()
            if not math.isfinite(norm):  # Megatron's own step would write it into the weights
                raise DivergedError(f"gradient norm is {norm} at a loss of {result.loss}: the update was not taken")
            self.optimizer.step()
        return replace(result, grad_norm=float(norm))

    # ---------------------------------------------------------------- weights and state

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Trainer.weights`."""
        yield from hf_weights(self.model.named_parameters(), self.model.config)

    def _optimizer_tensors(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """(name, main parameter, its AdamW state) of every parameter; the main parameter is fp32, also under bf16."""
        state = (
            self.optimizer.chained_optimizers[0] if hasattr(self.optimizer, "chained_optimizers") else self.optimizer
        )
        inner = state.optimizer
        for name, parameter in self.model.named_parameters():
            main = getattr(parameter, "main_param", parameter)
            yield name, main, inner.state[main]

    def save(self, folder: Path) -> None:
        """Weights (fp32 masters under bf16) and AdamW moments as safetensors, under Megatron's parameter names."""
        tensors = {}
        for name, main, moments in self._optimizer_tensors():
            tensors[f"model.{name}"] = main.detach().contiguous()
            for key, value in moments.items():
                tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value).contiguous()
        save_file(tensors, folder / "trainer.safetensors", metadata={"engine": self.name})

    def load(self, folder: Path) -> None:
        """See `Trainer.load`."""
        tensors = load_file(folder / "trainer.safetensors")
        with torch.no_grad():
            parameters = dict(self.model.named_parameters())
            for name, main, moments in self._optimizer_tensors():
                main.copy_(tensors[f"model.{name}"])
                parameters[name].copy_(main)
                moments.clear()  # a state saved before the first step has none
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    if f"optimizer.{key}.{name}" in tensors:
                        moments[key] = tensors[f"optimizer.{key}.{name}"].clone()


def _focus(forced: Replaying | None, collector: RouteCollector | None) -> Callable[[torch.Tensor], None]:
    """What tells a replay, or else a recording, that the next forward holds these rows of the batch."""

    def focus(rows: torch.Tensor) -> None:
        if forced is not None:
            forced.focus(rows)
        elif collector is not None:
            collector.record.begin()

    return focus


def _mend_loss_scale() -> None:
    """Megatron keeps one scale of auxiliary losses a process. A backward outside of its schedules makes it a scalar, and the schedules then
    fail to copy their one element into it (megatron-core 0.16)."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    if scale is not None and scale.dim() == 0:
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale.reshape(1)
