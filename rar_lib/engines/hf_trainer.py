"""The embedded trainer: a Transformers MoE with replay at the selection, any family, one process.

Gradients of micro-batches add up to the gradient of the token mean over the whole batch, so the split changes nothing
but float summation. Replay covers the forward and, with recomputed activations, the second forward in the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rar_lib.checkpoint import load_model
from rar_lib.config import AlgorithmConfig, TrainerConfig
from rar_lib.engines.base import Capture, LogprobResult, Objective, Replay, TokenBatch, UpdateResult
from rar_lib.engines.capture import open_routes, require_capture, route_counts
from rar_lib.engines.hf_experts import HFBlock
from rar_lib.engines.hf_weights import hf_names
from rar_lib.engines.logits import response_logprobs
from rar_lib.engines.taps import open_taps
from rar_lib.errors import DivergedError, EngineError
from rar_lib.replay.points import find_points
from rar_lib.replay.scores import SignalRequest


class HFTrainer:
    """See `Trainer` in base.py.

    Args:
        path: checkpoint folder.
        config: dtype (bfloat16 means autocast over fp32 weights), micro-batch size, recompute.
        algorithm: learning rate, weight decay, gradient clipping.
    """

    name = "hf"

    def __init__(self, path: Path, config: TrainerConfig, algorithm: AlgorithmConfig) -> None:
        self.config, self.algorithm, self.model_id = config, algorithm, path.name
        self.model: Any = load_model(path)
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
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=algorithm.lr, weight_decay=algorithm.weight_decay
        )

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        # Sequences are right-padded and attention is causal: padding cannot reach a token, so no mask is needed.
        low = self.config.dtype == "bfloat16"
        with torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext():
            return self.model(input_ids=tokens, use_cache=False).logits

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
            open_routes(self.model, batch, replay, capture, measure) as (forced, collector),
            open_taps(self.model, self._points, self._blocks, batch, signals, temperature) as taps,
        ):
            for rows in batch.micro_batches(micro_batch_size or self.config.micro_batch_size):
                if forced is not None:
                    forced.focus(rows)
                logits = self._logits(batch.tokens[rows])
                logp = response_logprobs(logits, batch.tokens[rows], mask[rows], temperature)
                out[rows] = logp.detach().float()
                if taps is not None:
                    taps.take(rows, logits, logp)
                if collector is not None:
                    collector.take(rows)
        trace = collector.trace(batch, "old", self.name, self.model_id) if collector is not None else None
        return LogprobResult(out, trace, route_counts(forced), None if taps is None else taps.signals())

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
        mask = batch.response_mask
        tokens = int(mask.sum())
        out = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        loss, statistics = 0.0, dict[str, float]()
        self.optimizer.zero_grad()
        capture: Capture = "scores" if routers else False
        with open_routes(self.model, batch, replay, capture, measure) as (forced, collector):
            for rows in batch.micro_batches(self.config.micro_batch_size):
                if forced is not None:
                    forced.focus(rows)
                elif collector is not None:
                    collector.record.begin()
                logp = response_logprobs(self._logits(batch.tokens[rows]), batch.tokens[rows], mask[rows], temperature)
                scores = None if collector is None else collector.scores(rows, logp.shape[1])
                terms, sums = objective(logp, rows, scores)
                part = terms[mask[rows]].sum() / tokens
                part.backward()
                loss += float(part.detach())
                out[rows] = logp.detach().float()
                statistics = {name: statistics.get(name, 0.0) + value for name, value in sums.items()}
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.algorithm.max_grad_norm)
        if not torch.isfinite(norm):
            raise DivergedError(f"gradient norm is {float(norm)} at a loss of {loss}: the update was not taken")
        self.optimizer.step()
        return UpdateResult(loss, float(norm), out, statistics, route_counts(forced))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Trainer.weights`."""
        yield from hf_names(self.model)

    def save(self, folder: Path) -> None:
        """Weights and AdamW moments as safetensors; names are those of the model's parameters."""
        tensors = {f"model.{n}": p.detach().contiguous() for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value).contiguous()
        save_file(tensors, folder / "trainer.safetensors", metadata={"engine": self.name})

    def load(self, folder: Path) -> None:
        """See `Trainer.load`."""
        tensors = load_file(folder / "trainer.safetensors")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
                moments = {
                    key.split(".", 2)[1]: value.clone()
                    for key, value in tensors.items()
                    if key.startswith("optimizer.") and key.split(".", 2)[2] == name
                }
                self.optimizer.state.pop(parameter, None)  # a state saved before the first step has no moments
                if moments:
                    self.optimizer.state[parameter] = moments
