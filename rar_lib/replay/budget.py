"""Budgets: how many units, and which, without a generator and without favour for an index.

A budget is one integer for every matched policy: B = floor(β M + 1/2), β a fraction of the M valid recorded units. Every
choice and every tie is decided by a key H(seed, policy, sample, position, layer, expert): a hash and no generator state, so
that a plan does not depend on batch order, slot order, sharding or padding, and prefixes of one order are nested in β.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from rar_lib.errors import ConfigError, ReplayError
from rar_lib.traces.trace import RouteTrace

U64 = np.uint64
_GOLDEN, _MIX_1, _MIX_2 = U64(0x9E3779B97F4A7C15), U64(0xBF58476D1CE4E5B9), U64(0x94D049BB133111EB)


def as_fraction(share: float | str | Fraction) -> Fraction:
    """β as an exact fraction: 0.1 means 1/10, not its nearest double.

    Raises:
        ConfigError: outside [0, 1].
    """
    try:
        fraction = share if isinstance(share, Fraction) else Fraction(str(share))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"budget: expected a share from 0 to 1, found {share!r}") from None
    if not 0 <= fraction <= 1:
        raise ConfigError(f"budget: expected a share from 0 to 1, found {share!r}")
    return fraction


def integer_budget(share: Fraction, valid: int) -> int:
    """floor(β M + 1/2) units, exactly: `share` is β, `valid` is M."""
    return int((share * valid + Fraction(1, 2)) // 1)


def mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea, Flood 2014) of uint64 of any shape: a bijection that scatters neighbours."""
    with np.errstate(over="ignore"):
        z = values + _GOLDEN
        z = (z ^ (z >> U64(30))) * _MIX_1
        z = (z ^ (z >> U64(27))) * _MIX_2
    return z ^ (z >> U64(31))


def hash_text(*parts: str | int) -> np.uint64:
    """64 bits of BLAKE2b over the parts, which are kept apart: ("a", "bc") is not ("ab", "c")."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return U64(int.from_bytes(digest, "big"))


def unit_keys(trace: RouteTrace, uids: Sequence[str], seed: int, policy: str, per_slot: bool) -> np.ndarray:
    """Keys of the units of a trace.

    Args:
        trace: the record.
        uids: name of each sequence.
        seed, policy: of the choice.
        per_slot: a key for each expert of a cell, else one for the cell.

    Returns:
        `[N, L, K]` or `[N, L]` uint64. The key of a slot follows its expert, not its place in the row.

    Raises:
        ReplayError: if the names are not one a sequence, all different.
    """
    if len(uids) != trace.num_sequences or len(set(uids)) != len(uids):
        raise ReplayError(
            f"uids: expected {trace.num_sequences} different names, found {len(set(uids))} of {len(uids)}"
        )
    start = hash_text(seed, policy)
    names = np.array([hash_text(uid) for uid in uids], dtype=U64)
    tokens = np.repeat(mix(names ^ start), trace.lengths)
    positions = np.arange(trace.num_tokens, dtype=np.int64) - np.repeat(trace.offsets[:-1], trace.lengths)
    tokens = mix(tokens ^ positions.astype(U64))
    layers = np.array(trace.header.moe_layers, dtype=U64)
    cells = mix(tokens[:, None] ^ (layers[None, :] << U64(32)))
    return mix(cells[..., None] ^ trace.experts.astype(U64)) if per_slot else cells


def uniform_from(keys: np.ndarray) -> np.ndarray:
    """Numbers in (0, 1), float64, from uint64 keys of any shape."""
    return ((keys >> U64(11)).astype(np.float64) + 0.5) / 2.0**53


def take_smallest(priority: np.ndarray, keys: np.ndarray, valid: np.ndarray, budget: int) -> np.ndarray:
    """The `budget` valid units of smallest priority; ties go to the smaller key.

    Args:
        priority: float of any shape, smaller first; NaN is refused.
        keys: uint64, same shape.
        valid: bool, same shape.
        budget: at most the number of valid units.

    Returns:
        bool of the same shape with exactly `budget` true.

    Raises:
        ReplayError: for NaN, or a budget above the valid units.
    """
    where = np.flatnonzero(valid)
    if not 0 <= budget <= where.size:
        raise ReplayError(f"budget: expected at most the {where.size} valid units, found {budget}")
    chosen = np.zeros(priority.size, dtype=bool)
    if budget:
        values = priority.reshape(-1)[where]
        if np.isnan(values).any():
            raise ReplayError(f"priority: found NaN in {int(np.isnan(values).sum())} of {where.size} valid units")
        threshold = np.partition(values, budget - 1)[budget - 1]
        below = values < threshold
        chosen[where[below]] = True
        tied = where[values == threshold]
        left = budget - int(below.sum())
        order = np.argpartition(keys.reshape(-1)[tied], left - 1) if left < tied.size else np.arange(tied.size)
        chosen[tied[order[:left]]] = True
    return chosen.reshape(priority.shape)


def _order(groups: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Order by group, then key: one sort of group, leading bits of the key and index packed into 64 bits.

    Sorting values is two to three times as fast as sorting indices. Units whose leading bits meet are put right after.
    """
    group_bits, index_bits = int(groups.max(initial=0)).bit_length(), len(groups).bit_length()
    key_bits = 64 - group_bits - index_bits
    if key_bits < 16:
        return np.lexsort((keys, groups))
    packed = (keys >> U64(64 - key_bits)) << U64(index_bits)
    if group_bits:
        packed |= groups.astype(U64) << U64(64 - group_bits)
    packed |= np.arange(len(groups), dtype=U64)
    packed.sort()
    order = (packed & U64((1 << index_bits) - 1)).astype(np.int64)
    packed >>= U64(index_bits)
    same = packed[1:] == packed[:-1]
    if same.any():
        met = np.flatnonzero(np.r_[same, False] | np.r_[False, same])
        units = order[met]
        order[met] = units[np.lexsort((keys[units], groups[units]))]
    return order


def rank_in_groups(groups: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rank of each unit within its group by key, from 0, and the size of its group; each `[n]` int64.

    Args:
        groups: `[n]` int64, 0 or more.
        keys: `[n]` uint64.
    """
    order = _order(groups, keys)
    ordered = groups[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]] if ordered.size else np.zeros(0, bool)
    starts = np.flatnonzero(first)
    sizes = np.diff(np.r_[starts, ordered.size])
    rank, size = np.empty(groups.size, np.int64), np.empty(groups.size, np.int64)
    rank[order] = np.arange(ordered.size) - np.repeat(starts, sizes)
    size[order] = np.repeat(sizes, sizes)
    return rank, size
