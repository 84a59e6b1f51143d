"""Weights as a low-precision rollout engine would hold them, without its kernels.

Rounding the linear weights to float8 e4m3 and computing in bf16 reproduces the largest part of an fp8 engine's mismatch
on any machine. As in deployed fp8 checkpoints, the router, the embeddings, the head and the norms stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from rar_lib.engines.base import NamedTensors

ROUNDED = re.compile(r"\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)\.weight$")
E4M3_MAX = 448.0


def round_to_fp8(weight: torch.Tensor) -> torch.Tensor:
    """Round `[out, in]` weights to e4m3 with one scale a row (amax / 448); returns the dtype that came in."""
    wide = weight.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / E4M3_MAX
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


def at_precision(weights: NamedTensors, precision: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Named weights as the engine shall hold them: `native`, or `fp8_weights`."""
    for name, tensor in weights:
        yield name, round_to_fp8(tensor) if precision == "fp8_weights" and ROUNDED.search(name) else tensor
