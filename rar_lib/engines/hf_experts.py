"""The experts of a Transformers MoE layer, seen from outside: what goes in, what comes out, and their weights.

Every family calls its experts as (hidden states, ids, weights) and keeps them fused in `gate_up_proj` and `down_proj`;
whether these are transposed, interleaved or biased is what the class itself says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rar_lib.engines.taps import ExpertWeights, LayerSeen
from rar_lib.errors import EngineError


class HFBlock:
    """See `Block` in taps.py.

    Args:
        experts: the experts module beside a router.
    """

    gates_of_all_experts = False

    def __init__(self, experts: Any) -> None:
        self.experts = experts

    def listen(self, seen: LayerSeen) -> Callable[[], None]:
        """See `Block.listen`."""

        def after(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            seen.x, seen.gates, seen.output = args[0].detach(), args[2], output

        return self.experts.register_forward_hook(after).remove

    def expert(self, index: int) -> ExpertWeights:
        """See `Block.expert`.

        Raises:
            EngineError: for a class of experts whose layout is not known; names it.
        """
        module = self.experts
        if not all(hasattr(module, name) for name in ("gate_up_proj", "down_proj", "_apply_gate")):
            raise EngineError(
                f"scores param and swap: {type(module).__name__} keeps its experts in a way that is not known (expected "
                "gate_up_proj, down_proj and a gate); score gate needs neither"
            )
        w1, w2 = (getattr(module, name)[index].detach().float() for name in ("gate_up_proj", "down_proj"))
        if not module.is_transposed:
            w1, w2 = w1.T, w2.T
        b1, b2 = (
            getattr(module, f"{name}_bias")[index].detach().float() if module.has_bias else None
            for name in ("gate_up_proj", "down_proj")
        )
        return ExpertWeights(w1, w2, module._apply_gate, b1, b2)
