"""Seeds by content instead of by generator state: H(parts) is the same in every process, order and layout.

A rollout step, a prompt or a shuffle is reseeded from what it is (seed, step, purpose), so that a resumed run draws the
tokens that the uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib
import json


def derive_seed(*parts: int | str) -> int:
    """A 31-bit seed from integers and strings, in this order: BLAKE2b over their JSON form."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33
