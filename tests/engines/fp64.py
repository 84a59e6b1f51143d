"""A float64 reference of a Transformers model: a fp32 engine's own error is the yardstick for comparing engines.

Absolute thresholds mislead: a trained four-layer model has a float32 error near 5e-5 in its logits. Transformers casts to
float32 inside norms, softmax and rotary embeddings, so a float64 model alone is none; here these casts are lifted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rar_lib.checkpoint import load_model
from rar_lib.engines.base import NamedTensors
from rar_lib.engines.hf_weights import load_hf_weights


class AsFloat64(TorchFunctionMode):
    """Every cast to float32 goes to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        swap = {torch.float32: torch.float64}
        args = tuple(swap.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: swap.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs) if func is not torch.Tensor.float else args[0].double()


def reference_model(path: Path, weights: NamedTensors) -> Any:
    """A float64 model with the given weights."""
    with AsFloat64():
        model = load_model(path, dtype=torch.float64)
    load_hf_weights(model, weights)
    inverse = model.model.rotary_emb
    head = model.config.head_dim
    inverse.inv_freq = 1.0 / model.config.rope_parameters["rope_theta"] ** (torch.arange(0, head, 2).double() / head)
    return model
