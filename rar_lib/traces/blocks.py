"""Walking over routes of any size in pieces that fit a cache.

A trace of real size (262,144 tokens x 48 layers x 8 slots) has 100 million ids. Widening them at once would take eight
times the file; a comparison over the last axis, eight values long, is slow. So routes are taken a block of tokens at a time
and turned to slot-major order, where each comparison runs over thousands of cells.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

CELLS = 1 << 16  # of one block: eight slots of a byte take 512 KiB, which a second-level cache holds


def token_blocks(tokens: int, layers: int, cells: int = CELLS) -> Iterator[slice]:
    """Slices over the tokens whose blocks hold about `cells` (token, layer) cells; at least one token each."""
    step = max(1, cells // max(1, layers))
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def by_slot(ids: np.ndarray) -> np.ndarray:
    """`[..., K]` as contiguous `[K, cells]` of the same type."""
    return np.ascontiguousarray(ids.reshape(-1, ids.shape[-1]).T)
