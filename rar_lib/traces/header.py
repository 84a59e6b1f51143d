"""What the numbers of a trace mean: its header, the states of its cells, and what names its tokens."""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rar_lib.errors import TraceError

SCHEMA_VERSION = 1


class Status(IntEnum):
    """What a cell of a trace holds."""

    MISSING = 0  # a route was taken, but nobody recorded it
    RECORDED = 1
    LAST = 2  # the last token of a sequence is never an input, so no route exists


class TraceHeader(BaseModel):
    """What the numbers of a trace mean. Frozen; unknown fields are refused.

    `source` is the pass that was recorded: the rollout, the trainer's old-log-prob pass or one inside an update.
    `sampling` holds the rollout's settings, for people.

    Raises:
        ValidationError: (pydantic's, a ValueError) for K above E, layers that do not rise, or another schema.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_experts: int = Field(gt=0, description="E, routed experts a layer")
    top_k: int = Field(gt=0, description="K, experts a token")
    moe_layers: tuple[int, ...] = Field(
        min_length=1, description="transformer layer numbers (from 0) of the layer axis"
    )
    source: Literal["rollout", "old", "new"]
    producer: str = "rar_lib"
    producer_version: str = ""
    model_id: str = ""
    sampling: dict[str, Any] = Field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @model_validator(mode="after")
    def _check(self) -> TraceHeader:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is larger than num_experts {self.num_experts}")
        if list(self.moe_layers) != sorted(set(self.moe_layers)) or self.moe_layers[0] < 0:
            raise ValueError(f"moe_layers must rise strictly from 0 or more, found {self.moe_layers}")
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version {self.schema_version} is not the one this library reads ({SCHEMA_VERSION})"
            )
        return self

    @property
    def num_layers(self) -> int:
        """L, the number of MoE layers."""
        return len(self.moe_layers)


def id_dtype(num_experts: int) -> np.dtype:
    """The smallest unsigned type that holds `num_experts - 1`.

    Raises:
        TraceError: if 32 bits do not.
    """
    for dtype in (np.uint8, np.uint16, np.uint32):
        if num_experts - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise TraceError(f"num_experts {num_experts} does not fit 32 bits")


def digest_tokens(token_ids: np.ndarray, offsets: np.ndarray) -> str:
    """SHA-256 over the offsets and ids of a packed batch, whatever integer type they are kept in.

    Args:
        token_ids: `[N]`, sequences one after another.
        offsets: `[S + 1]` where each sequence begins, and N.

    Returns:
        64 hexadecimal digits.
    """
    sha = hashlib.sha256()
    for part in (offsets, token_ids):
        sha.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
    return sha.hexdigest()
