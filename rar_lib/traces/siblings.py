"""What sequences of one record say about each other.

The route at a token depends on the tokens up to it and on nothing else, so two sequences that begin alike were routed alike there, up to
the few decisions that numerical noise flips. Sequences of one prompt (a GRPO group) are such pairs, for free. If they disagree, rows were
shifted, are of another request, or come from a prefix cache of other weights. The other way round, different tokens with the very same
routes mean that a buffer was handed out twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rar_lib.metrics.agreement import overlap
from rar_lib.traces.verdicts import Verdict, verdict

MAX_PAIRS = 1024
MAX_TOKENS = 64  # of a common beginning
TOLERATED = 0.25  # share of routers that may flip between two passes over the same tokens; published rates are near 0.1
SHIFT_GAIN = 0.5  # share of the disagreement that a shift must take away to be its cause
MIN_TOKENS = 4
MIN_OTHER = 8  # tokens in which two sequences must differ before equal routes are no coincidence
KEY_ROWS = 8  # rows that tell one request's routes from another's


@dataclass(frozen=True, eq=False)
class Member:
    """One sequence of a record.

    Attributes:
        name: of the sequence.
        tokens: `[T]` token ids, integers.
        ids: `[T, L, K]` routes, integers.
        known: `[T, L]` bool, recorded.
        versions: `[T]` weight versions, or None.
    """

    name: str
    tokens: np.ndarray
    ids: np.ndarray
    known: np.ndarray
    versions: np.ndarray | None = None


def _common(a: Member, b: Member) -> int:
    """Rows of the common beginning under the same weights; the last token of a sequence has none."""
    n = max(0, min(len(a.tokens), len(b.tokens), MAX_TOKENS + 1) - 1)  # a sequence may be empty
    same = a.tokens[:n] == b.tokens[:n]
    if a.versions is not None and b.versions is not None:
        same &= a.versions[:n] == b.versions[:n]
    differs = np.flatnonzero(~same)
    return int(differs[0]) if differs.size else n


def _pairs(members: Sequence[Member]) -> list[tuple[Member, Member, int]]:
    """Pairs that begin with the same tokens, and for how many rows: neighbours in sorted order share the longest beginnings.

    Of more than `MAX_PAIRS`, as many evenly spread ones.
    """
    order = sorted(range(len(members)), key=lambda i: members[i].tokens[:32].tolist())
    out = []
    for i, j in pairwise(order):
        rows = _common(members[i], members[j])
        if rows >= MIN_TOKENS:
            out.append((members[i], members[j], rows))
    if len(out) <= MAX_PAIRS:
        return out
    return [out[i] for i in np.linspace(0, len(out) - 1, MAX_PAIRS).astype(int)]


def prefix_verdicts(members: Sequence[Member]) -> list[Verdict]:
    """Do sequences that begin alike agree there? A disagreement that a shift by a row or two explains is named as one.

    A pair disagrees if more of its routers differ than flips at a rate of `TOLERATED` could explain (binomial, p < 1e-6).
    """
    from scipy.stats import binom

    pairs = 0
    shifted: list[tuple[str, int, int]] = []
    apart: list[tuple[str, int, int]] = []
    for a, b, rows in _pairs(members):
        known = a.known[:rows] & b.known[:rows]
        cells = int(known.sum())
        if cells < MIN_TOKENS:
            continue
        pairs += 1
        bad = int((overlap(a.ids[:rows], b.ids[:rows])[known] < a.ids.shape[-1]).sum())
        if binom.sf(bad - 1, cells, TOLERATED) < 1e-6:
            told = (f"{a.name} and {b.name}, first {rows} rows", bad, cells)
            (shifted if _explained_by_shift(a, b, rows) else apart).append(told)
    out = []
    for code, found, why in (
        ("ROWS_SHIFTED", shifted, "agree better when one is moved by a row or two"),
        ("PREFIX_DISAGREES", apart, "disagree on the same tokens"),
    ):
        if found:
            where, bad, cells = max(found, key=lambda told: told[1] / told[2])
            seen = f"{len(found)} of {pairs} pairs of sequences {why}, the worst in {bad} of {cells} routers"
            out.append(verdict(code, where, seen, cells=sum(told[1] for told in found)))
    return out


def _explained_by_shift(a: Member, b: Member, rows: int) -> bool:
    def share(left: slice, right: slice) -> float:
        known = a.known[left] & b.known[right]
        return float(overlap(a.ids[left], b.ids[right])[known].mean()) / a.ids.shape[-1] if known.any() else 0.0

    here = share(slice(0, rows), slice(0, rows))
    for step in (1, 2):
        if rows > step + 2:
            first, second = slice(step, rows), slice(0, rows - step)
            there = max(share(first, second), share(second, first))
            if there - here > SHIFT_GAIN * (1 - here):
                return True
    return False


def repeated_verdicts(members: Sequence[Member]) -> list[Verdict]:
    """Different tokens with the very same routes, as sets, over the rows that both recorded.

    In a small model another digit may well be routed like the one it replaces, so only sequences count that differ in half of their tokens
    and in `MIN_OTHER` at least.
    """
    holders: dict[bytes, int] = {}
    twice: dict[int, int] = {}
    for i, member in enumerate(members):
        for start in (0, KEY_ROWS):
            rows = slice(start, start + KEY_ROWS)
            if len(member.tokens) <= start + KEY_ROWS or not member.known[rows].all():
                continue
            routes = np.sort(member.ids[rows].astype(np.int32), -1)
            if (routes == routes[0]).all():
                continue  # always the same: another verdict's matter
            digest = hashlib.blake2b(bytes([start]) + routes.tobytes(), digest_size=16).digest()
            j = holders.setdefault(digest, i)
            if j != i and _same_routes_other_tokens(members[j], member):
                twice.setdefault(i, j)
    if not twice:
        return []
    i, j = next(iter(twice.items()))
    seen = f"{len(twice)} sequences hold another one's routes"
    return [verdict("ROUTES_REPEATED", f"{members[j].name} and {members[i].name}", seen, samples=tuple(twice))]


def _same_routes_other_tokens(a: Member, b: Member) -> bool:
    rows = min(len(a.tokens), len(b.tokens)) - 1
    other = a.tokens[:rows] != b.tokens[:rows]
    if other.sum() < max(MIN_OTHER, rows / 2) or a.ids.shape[1] * a.ids.shape[2] < 4:
        return False
    known = a.known[:rows] & b.known[:rows] & other[:, None]
    return bool(known.any() and (overlap(a.ids[:rows], b.ids[:rows])[known] == a.ids.shape[-1]).mean() > 0.99)
