"""Megatron's TopKRouter with a plain gate and a selection point as its replay object.

What stays Megatron's: scores, score function, softmax before or after the pick, expert bias, groups, scaling, the map
and the losses. What replay means for the parts that Megatron computes beside the pick:
- The auxiliary load-balancing losses look at the live top-k of the live scores, so they push on what the router would
  choose, also where a route is forced.
- The counters behind the expert bias (aux-loss-free balancing) count the map that was executed, forced routes included.
- A forced route may lie outside the groups that a group-limited router would allow; its weight is gathered all the same.
Routers that change the choice before or after the pick cannot be replayed at it and are refused by name.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from rar_lib.engines.megatron_cpu import import_megatron
from rar_lib.errors import ReplayError
from rar_lib.replay.points import SelectionPoint


def refuse_unreplayable(config: Any) -> None:
    """Refuse a TransformerConfig whose routers do not choose at one replayable top-k.

    Raises:
        ReplayError: names the setting, its value and why.
    """
    balancing = config.moe_router_load_balancing_type
    balancing = balancing if isinstance(balancing, list) else [balancing]
    reasons = {
        "moe_router_fusion": (config.moe_router_fusion, "the fused kernel asks nobody for routes"),
        "moe_router_load_balancing_type": (
            "sinkhorn" if "sinkhorn" in balancing else None, "sinkhorn chooses without the top-k that is replayed"
        ),
        "moe_expert_capacity_factor": (config.moe_expert_capacity_factor, "tokens are dropped after the choice"),
        "moe_input_jitter_eps": (config.moe_input_jitter_eps, "the router's input is noise that no record holds"),
        "moe_router_force_load_balancing": (config.moe_router_force_load_balancing, "the choice is random"),
        "context_parallel_size": (
            config.context_parallel_size if config.context_parallel_size > 1 else None,
            "a process then holds two stretches of a sequence, whose rows were not proven to follow their tokens",
        ),
    }  # fmt: skip
    for name, (value, why) in reasons.items():
        if value:
            raise ReplayError(f"Megatron router: {name}={value} cannot be replayed: {why}")


@functools.cache
def point_router() -> type:
    """The router class for a layer spec; made on demand, since Megatron-Core is imported when it is asked for."""
    import_megatron()
    from megatron.core.transformer.moe.router import TopKRouter

    class PointRouter(TopKRouter):
        """TopKRouter whose pick goes through a SelectionPoint of its own, `router_replay`."""

        def __init__(self, config: Any, pg_collection: Any = None) -> None:
            refuse_unreplayable(config)
            super().__init__(config=config, pg_collection=pg_collection)
            self._logits: torch.Tensor | None = None

        def gating(self, input: torch.Tensor) -> torch.Tensor:
            # Megatron's own asks for Transformer Engine's GEMM; the router dtype is kept as it keeps it.
            dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = torch.nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)
            if self.router_replay.taps:
                self._logits = logits
            return logits

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            point = self.router_replay
            try:
                probs, routing_map = super().forward(*args, **kwargs)
                if point.watched:
                    point.executed(routing_map)
                if point.taps and self._logits is not None:
                    point.picked(self._logits)
            finally:
                self._logits = None  # it holds the graph
            return probs, routing_map

        def set_layer_number(self, layer_number: int) -> None:
            super().set_layer_number(layer_number)
            config = self.config
            self.router_replay = SelectionPoint(
                layer_number - 1,
                config.num_moe_experts,
                self.topk,
                "sequence",
                "TopKRouter",
                config.moe_router_num_groups or 1,
                layers=tuple(range(config.num_layers)),
                part=torch.distributed.get_rank(self.tp_group) if config.sequence_parallel else 0,
                parts=config.tensor_model_parallel_size if config.sequence_parallel else 1,
            )

    return PointRouter
