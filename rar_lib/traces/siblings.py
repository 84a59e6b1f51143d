"""What sequences of one record say about each other.

The route at a token depends on the tokens up to it and on nothing else, so two sequences that begin alike were routed alike there, up to
the few decisions that numerical noise flips. Sequences of one prompt (a GRPO group) are such pairs, for free. If they disagree, rows were
shifted, are of another request, or come from a prefix cache of other weights. The other way round, different tokens with the very same
routes mean that a buffer was handed out twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy.stats import binom

from rar_lib.traces.verdicts import Verdict, verdict

Member = tuple[str, np.ndarray, np.ndarray, np.ndarray]  # name, token ids [T], routes [T, L, K], recorded [T, L]
MAX_PAIRS = 64
TOLERATED = 0.1  # share of routers that may flip between two passes over the same tokens
ALIGNED = 0.9  # overlap that a shift must reach to be the explanation
MIN_TOKENS = 4
MIN_OTHER = 8  # tokens in which two sequences must differ before equal routes are no coincidence


def _overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Share of common ids of `[n, L, K]` pairs: `[n, L]`."""
    return (a[..., :, None] == b[..., None, :]).any(-1).mean(-1)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


def _pairs(members: Sequence[Member]) -> list[tuple[int, int, int]]:
    """Pairs that begin with the same tokens, and for how many: neighbours in sorted order share the longest beginnings."""
    if len(members) < 2:
        return []
    order = sorted(range(len(members)), key=lambda i: members[i][1][:32].tolist())
    out = []
    for i, j in pairwise(order):
        length = _common(members[i][1], members[j][1])
        if length >= MIN_TOKENS:
            out.append((i, j, length))
    return out[:MAX_PAIRS]


def prefix_verdicts(members: Sequence[Member]) -> list[Verdict]:
    """Do sequences that begin alike agree there? A disagreement that a shift by a row or two explains is named as one.

    A pair disagrees if more of its routers differ than flips at a rate of `TOLERATED` could explain (binomial, p < 1e-6).
    """
    pairs = 0
    shifted: list[tuple[str, int, int]] = []
    apart: list[tuple[str, int, int]] = []
    for i, j, length in _pairs(members):
        (name_a, _, ids_a, known_a), (name_b, _, ids_b, known_b) = members[i], members[j]
        rows = slice(0, min(length, len(ids_a) - 1, len(ids_b) - 1))
        known = known_a[rows] & known_b[rows]
        cells = int(known.sum())
        if cells < MIN_TOKENS:
            continue
        pairs += 1
        bad = int((_overlap(ids_a[rows], ids_b[rows])[known] < 1).sum())
        if binom.sf(bad - 1, cells, TOLERATED) < 1e-6:
            told = (f"{name_a} and {name_b}, first {rows.stop} tokens", bad, cells)
            (shifted if _explained_by_shift(ids_a[rows], ids_b[rows], known) else apart).append(told)
    out = []
    for code, found, why in (
        ("ROWS_SHIFTED", shifted, "agree only when one is moved by a row or two"),
        ("PREFIX_DISAGREES", apart, "disagree on the same tokens"),
    ):
        if found:
            where, bad, cells = max(found, key=lambda told: told[1] / told[2])
            seen = f"{len(found)} of {pairs} pairs of sequences {why}, the worst in {bad} of {cells} routers"
            out.append(verdict(code, where, seen, cells=sum(told[1] for told in found)))
    return out


def _explained_by_shift(a: np.ndarray, b: np.ndarray, known: np.ndarray) -> bool:
    for step in (1, 2):
        if len(a) <= step + 2:
            continue
        for left, right, mask in (
            (a[step:], b[:-step], known[step:] & known[:-step]),
            (a[:-step], b[step:], known[step:] & known[:-step]),
        ):
            if mask.any() and _overlap(left, right)[mask].mean() >= ALIGNED:
                return True
    return False


def repeated_verdicts(members: Sequence[Member]) -> list[Verdict]:
    """Different tokens with the very same routes, row for row.

    In a small model another digit may well be routed like the one it replaces, so only sequences count that differ in half of their tokens
    and in `MIN_OTHER` at least.
    """
    seen: dict[bytes, int] = {}
    twice: list[tuple[int, int]] = []
    for i, (_, tokens, ids, known) in enumerate(members):
        rows = len(tokens) - 1
        if rows < 8 or ids.shape[1] * ids.shape[2] < 4 or not known[:rows].all() or (ids[:rows] == ids[0]).all():
            continue
        digest = hashlib.blake2b(np.ascontiguousarray(ids[:rows]).tobytes(), digest_size=16).digest()
        j = seen.setdefault(digest, i)
        if j != i and int((members[j][1][:rows] != tokens[:rows]).sum()) >= max(MIN_OTHER, rows / 2):
            twice.append((j, i))
    if not twice:
        return []
    first, second = (members[i][0] for i in twice[0])
    samples = tuple(i for _, i in twice)
    return [
        verdict(
            "ROUTES_REPEATED",
            f"{first} and {second}",
            f"{len(twice)} sequences hold another one's routes",
            samples=samples,
        )
    ]
