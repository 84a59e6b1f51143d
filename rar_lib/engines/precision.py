"""Weights as a low-precision rollout engine would hold them, without its kernels.

Rounding the linear weights to float8 e4m3 and computing in bf16 reproduces the largest part of an fp8 engine's mismatch
on any machine. As in deployed fp8 checkpoints, the router, the embeddings, the head, norms and biases stay as they are.
Names are those of Hugging Face checkpoints, of any family.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from rar_lib.engines.base import NamedTensors
from rar_lib.errors import EngineError

KEPT = re.compile(r"(embed|lm_head|norm|router|shared_expert_gate)|\.gate\.weight$|bias$")
EXPERT = re.compile(r"experts|block_sparse_moe\.(input|output)_linear")
E4M3_MAX = 448.0


def round_to_fp8(weight: torch.Tensor) -> torch.Tensor:
    """Round `[..., in]` weights to e4m3 with one scale a row of the last axis (amax / 448), in the dtype that came in."""
    wide = weight.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / E4M3_MAX
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


def at_precision(weights: NamedTensors, precision: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Named weights of any shape as the engine shall hold them, in the dtype that came in: `native`, or `fp8_weights`.

    Raises:
        EngineError: if no expert weight was among those that are rounded; a rounding that misses them is none.
    """
    experts = 0
    for name, tensor in weights:
        rounded = precision == "fp8_weights" and tensor.ndim >= 2 and not KEPT.search(name)
        experts += bool(rounded and EXPERT.search(name))
        yield name, round_to_fp8(tensor) if rounded else tensor
    if precision == "fp8_weights" and not experts:
        raise EngineError(
            "rollout.precision fp8_weights: no expert weight was found among the names, nothing would be rounded"
        )
