"""The experts of a Megatron-Core MoE layer, seen from outside: what goes in, what comes out, and their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rar_lib.engines.taps import ExpertWeights, LayerSeen


def _swiglu(pre: torch.Tensor) -> torch.Tensor:
    gate, up = pre.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class MegatronBlock:
    """See `Block` in taps.py.

    Args:
        layer: a MoELayer whose experts all live in this process (SequentialMLP, no biases, SwiGLU: what
            megatron_model.py builds).
    """

    gates_of_all_experts = True

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def listen(self, seen: LayerSeen) -> Callable[[], None]:
        """See `Block.listen`."""

        def routed(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen.gates = output[0]

        def after(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen.x, seen.output = args[0].detach(), output[0]

        handles = [self.layer.router.register_forward_hook(routed), self.layer.register_forward_hook(after)]

        def stop() -> None:
            for handle in handles:
                handle.remove()

        return stop

    def expert(self, index: int) -> ExpertWeights:
        """See `Block.expert`."""
        mlp = self.layer.experts.local_experts[index]
        w1, w2 = (module.weight.detach().float().T for module in (mlp.linear_fc1, mlp.linear_fc2))
        return ExpertWeights(w1, w2, _swiglu)
