"""May two records of routes be compared at all? A certificate says so, or says which proof is missing.

A disagreement of routes means something only between records of the same tokens, the same layers and the same numbering of the
experts; and it is a *mismatch* (two engines) only at the same weights, a *drift* (one engine, before and after updates) only at
different ones. Every one of these has been mixed up in public at least once. So agreement is computed under a certificate: each check
is `proven` from the records themselves, `asserted` by the caller, `unproven`, or `failed`.

The numbering is proven by co-assignment (numbering.py). Rows must lie beside the same tokens: skewed routers agree by half with any
shift, so what counts is whether a shift agrees better.
"""

from __future__ import annotations

import html
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pandas as pd

from rar_lib.errors import TraceError
from rar_lib.metrics.agreement import overlap
from rar_lib.traces.numbering import Numbering, infer_numbering
from rar_lib.traces.trace import RouteTrace
from rar_lib.traces.verdicts import listed

ComparisonKind = Literal["mismatch", "drift"]
State = Literal["proven", "asserted", "unproven", "failed"]
ENGINES = ("hf", "megatron", "vllm", "sglang", "tensorrt-llm", "lmdeploy")
SHIFT_GAIN = 0.5  # share of the disagreement that a shift must take away to be its cause


@dataclass(frozen=True)
class Check:
    """One condition: its name, how it stands, and what was seen."""

    name: str
    state: State
    seen: str


@dataclass(frozen=True, repr=False)
class Certificate:
    """The checks of a pair.

    Attributes:
        kind: mismatch (same weights) or drift (different ones).
        checks: one a condition.
        numbering: one a layer; empty where tokens or layers differ.
    """

    kind: ComparisonKind
    checks: tuple[Check, ...]
    numbering: tuple[Numbering, ...] = ()

    @property
    def valid(self) -> bool:
        """True if every check is proven or asserted."""
        return all(check.state in ("proven", "asserted") for check in self.checks)

    def require(self) -> None:
        """Go on only with a valid certificate.

        Raises:
            TraceError: naming every check that is missing, and how to assert what only the caller knows.
        """
        missing = [f"{c.name} {c.state} ({c.seen})" for c in self.checks if c.state in ("unproven", "failed")]
        if missing:
            raise TraceError(
                f"no certificate of {self.kind}: {'; '.join(missing)}. What is unproven can be vouched for with asserting=(...); what "
                f"failed cannot"
            )

    def table(self) -> pd.DataFrame:
        """Checks as a table: `check`, `state`, `seen`."""
        return pd.DataFrame([(c.name, c.state, c.seen) for c in self.checks], columns=["check", "state", "seen"])

    def __str__(self) -> str:
        head = f"certificate of {self.kind}: {'valid' if self.valid else 'not given'}"
        return "\n".join([head, *(f"  {c.state:9} {c.name}: {c.seen}" for c in self.checks)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{c.name}</th><td>{c.state}</td><td>{html.escape(c.seen)}</td></tr>" for c in self.checks
        )
        return f"<table><caption>certificate of {self.kind}: {'valid' if self.valid else 'not given'}</caption>{rows}</table>"


def certify(
    a: RouteTrace, b: RouteTrace, kind: ComparisonKind, *, asserting: Collection[str] = (), tokens: int = 8192
) -> Certificate:
    """What two records prove about each other.

    Args:
        a, b: for a mismatch the rollout's and the trainer's routes; for a drift before and after.
        kind: `mismatch` or `drift`.
        asserting: checks among `tokens`, `numbering`, `weights`, `engines` that the caller vouches for; used only where the records leave
            them unproven, never against what they say.
        tokens: of this many, evenly spread, the numbering is inferred.

    Returns:
        A Certificate; see `valid` and `require()`.

    Raises:
        TraceError: on an unknown kind or check.
    """
    if kind not in get_args(ComparisonKind):
        raise TraceError(f"kind: expected one of {', '.join(get_args(ComparisonKind))}, found {kind!r}")
    unknown = set(asserting) - {"tokens", "numbering", "weights", "engines"}
    if unknown:
        raise TraceError(f"asserting: expected some of tokens, numbering, weights, engines, found {sorted(unknown)}")
    same_sizes = np.array_equal(a.lengths, b.lengths)
    checks = [_tokens(a, b), _layers(a, b, same_sizes)]
    numbering: tuple[Numbering, ...] = ()
    if checks[1].state == "proven" and same_sizes:
        numbering = infer_numbering(a, b, tokens)
        checks += [_rows(a, b), _numbering(numbering, a.header.top_k / a.header.num_experts)]
    else:
        checks.append(Check("numbering", "unproven", "not looked at: other layers or lengths"))
    checks += [_weights(a, b, kind), _engines(a, b, kind)]
    vouched = tuple(
        Check(c.name, "asserted", f"by the caller; the records: {c.seen}")
        if c.state == "unproven" and c.name in asserting
        else c
        for c in checks
    )
    return Certificate(kind, vouched, numbering)


def _tokens(a: RouteTrace, b: RouteTrace) -> Check:
    if not np.array_equal(a.lengths, b.lengths):
        if sorted(a.lengths.tolist()) == sorted(b.lengths.tolist()):
            return Check(
                "tokens",
                "failed",
                "the same lengths in another order; match them by token ids first (traces.certificate.align)",
            )
        return Check(
            "tokens",
            "failed",
            f"{a.num_sequences} sequences of {a.num_tokens} tokens against {b.num_sequences} of {b.num_tokens}",
        )
    if a.token_digest is None or b.token_digest is None:
        return Check("tokens", "unproven", "equal lengths, but a side carries no token ids")
    if a.token_digest != b.token_digest:
        assert a.token_ids is not None
        assert b.token_ids is not None
        first = int(np.flatnonzero(a.token_ids != b.token_ids)[0])
        return Check(
            "tokens",
            "failed",
            f"equal lengths, other ids from {a.place_of(first)}: {a.token_ids[first]} against {b.token_ids[first]}",
        )
    return Check("tokens", "proven", f"digest {a.token_digest[:12]} of {a.num_tokens} tokens on both sides")


def _layers(a: RouteTrace, b: RouteTrace, same_sizes: bool) -> Check:
    left, right = a.header, b.header
    for name, x, y in (
        ("MoE layers", listed(left.moe_layers), listed(right.moe_layers)),
        ("experts", left.num_experts, right.num_experts),
        ("top-k", left.top_k, right.top_k),
    ):
        if x != y:
            return Check("layers", "failed", f"{name}: {x} against {y}")
    moved = _moved_layers(a, b) if same_sizes else {}
    if moved:
        told = ", ".join(f"{left.moe_layers[i]} is {left.moe_layers[j]}" for i, j in list(moved.items())[:4])
        return Check("layers", "failed", f"the layer axis is in another order: the second record's layer {told}")
    return Check(
        "layers",
        "proven",
        f"layers {listed(left.moe_layers)}, top-{left.top_k} of {left.num_experts}, each agrees best with itself",
    )


def _moved_layers(a: RouteTrace, b: RouteTrace, tokens: int = 512) -> dict[int, int]:
    """Layers of A that agree far better with another layer of B, by position."""
    both = np.flatnonzero(a.recorded.all(-1) & b.recorded.all(-1))
    rows = both[np.unique(np.linspace(0, max(len(both) - 1, 0), min(tokens, len(both))).astype(int))]
    if len(rows) < 16:
        return {}
    ids_a, ids_b, k, layers = a.experts[rows], b.experts[rows], a.header.top_k, a.header.num_layers
    out = {}
    for i in range(layers):
        here = overlap(ids_a[:, i], ids_b[:, i]).mean() / k
        if here > 0.9:
            continue
        others = np.array([overlap(ids_a[:, i], ids_b[:, j]).mean() / k for j in range(layers)])
        best = int(others.argmax())
        if best != i and others[best] - here > SHIFT_GAIN * (1 - here):
            out[i] = best
    return out


def _numbering(layers: tuple[Numbering, ...], chance: float) -> Check:
    known = [n for n in layers if n.cells]
    if not known:
        return Check("numbering", "unproven", "no cell is recorded on both sides")
    ambiguous = sum(len(n.ambiguous) for n in known)
    told = (
        f"; {ambiguous} of {sum(len(n.mapping) for n in known)} experts cannot be told apart (unused, or always together)"
        if ambiguous
        else ""
    )
    related = chance + 0.5 * (1 - chance)
    relabelled = [n for n in known if n.moved and n.matched >= related]
    if relabelled:
        n = max(relabelled, key=lambda n: n.matched - n.overlap)
        pairs = ", ".join(f"{e} is {int(n.mapping[e])}" for e in n.moved[:4])
        return Check(
            "numbering", "failed",
            f"layers {listed(x.layer for x in relabelled)} agree better under another numbering ({n.matched:.3f} against {n.overlap:.3f} in layer "
            f"{n.layer}: {pairs}{' and more' if len(n.moved) > 4 else ''}){told}",
        )  # fmt: skip
    loose = [n for n in known if n.overlap < related]
    if loose:
        return Check(
            "numbering", "unproven",
            f"layers {listed(n.layer for n in loose)} have too little in common to tell (overlap {loose[0].overlap:.2f} in layer "
            f"{loose[0].layer}, chance {chance:.2f}){told}",
        )  # fmt: skip
    thin = [n for n in known if n.told < 0.5]
    if thin:
        return Check(
            "numbering", "unproven",
            f"in layers {listed(n.layer for n in thin)} only {thin[0].told:.0%} of the routes go to experts that can be told apart{told}",
        )  # fmt: skip
    empty = len(layers) - len(known)
    rest = f"; {empty} layers hold nothing on a side" if empty else ""
    return Check(
        "numbering",
        "proven",
        f"no other numbering matches better (overlap {min(n.overlap for n in known):.3f} or more){told}{rest}",
    )


def _rows(a: RouteTrace, b: RouteTrace) -> Check:
    """Do rows lie beside the same tokens? A record that agrees better after a shift does not."""
    rows = np.arange(min(a.num_tokens, 65536))
    sequence = np.searchsorted(a.offsets, rows, side="right")

    def share(step: int) -> float | None:
        other = rows + step
        inside = (other >= 0) & (other < len(rows))
        left, right = rows[inside], other[inside]
        same = sequence[left] == sequence[right]
        left, right = left[same], right[same]
        known = a.recorded[left] & b.recorded[right]
        return (
            float(overlap(a.experts[left], b.experts[right])[known].mean() / a.header.top_k)
            if known.sum() >= 16
            else None
        )

    here = share(0)
    if here is None:
        return Check("rows", "proven", "too few cells are recorded on both sides for a shift to show")
    for step in (1, -1, 2, -2):
        there = share(step)
        if there is not None and there - here > SHIFT_GAIN * (1 - here) and there > here:
            plural = "s" if abs(step) > 1 else ""
            return Check(
                "rows",
                "failed",
                f"overlap is {here:.2f} in place and {there:.2f} with the second record moved by {step} row{plural}",
            )
    return Check("rows", "proven", f"no shift by a row or two agrees better (overlap {here:.3f} in place)")


def _weights(a: RouteTrace, b: RouteTrace, kind: ComparisonKind) -> Check:
    left, right = a.policy_version, b.policy_version
    names = {header.model_id for header in (a.header, b.header) if header.model_id}
    if left is None or right is None:
        sides = " and ".join(name for name, side in (("first", left), ("second", right)) if side is None)
        return Check(
            "weights",
            "unproven",
            f"no weight versions in the {sides} record (rar record --version gives them to your own)",
        )
    if left.shape != right.shape:
        return Check("weights", "unproven", "not looked at: other lengths")
    equal = left == right
    if kind == "mismatch" and not equal.all():
        return Check(
            "weights",
            "failed",
            f"{int((~equal).sum())} of {len(equal)} tokens were routed under other versions: this is drift",
        )
    if kind == "drift" and equal.any():
        return Check(
            "weights",
            "failed",
            f"{int(equal.sum())} of {len(equal)} tokens were routed under the same version: no drift there",
        )
    if left.min(initial=0) < 0 or right.min(initial=0) < 0:
        return Check("weights", "unproven", "a side does not know the version of some tokens (-1)")
    if len(names) > 1:
        return Check(
            "weights", "unproven", f"equal version numbers, but of models called {' and '.join(sorted(names))}"
        )
    if kind == "mismatch" and "new" in (a.header.source, b.header.source):
        return Check(
            "weights", "unproven", "equal version numbers, but a side says that it is `new`: routed after updates"
        )
    versions = f"{listed(np.unique(left).tolist())} and {listed(np.unique(right).tolist())}"
    return Check(
        "weights", "proven", f"versions {versions}, {'equal' if kind == 'mismatch' else 'different'} at every token"
    )


def _engines(a: RouteTrace, b: RouteTrace, kind: ComparisonKind) -> Check:
    left, right = (header.producer.removesuffix("-http").removesuffix("-tracer") for header in (a.header, b.header))
    if kind == "mismatch":
        return Check(
            "engines",
            "proven",
            f"{left} and {right}{' (one engine: this is its noise floor)' if left == right else ''}",
        )
    if left in ENGINES and right in ENGINES and left != right:
        return Check(
            "engines",
            "failed",
            f"{left} against {right}: a drift is measured within one engine, or the mismatch counts too",
        )
    if left != right or left not in ENGINES:
        return Check("engines", "unproven", f"{left} and {right}: which engine computed them is not told")
    if a.header.producer_version != b.header.producer_version:
        told = f"{a.header.producer_version or 'not told'} against {b.header.producer_version or 'not told'}"
        return Check("engines", "unproven", f"one engine, of version or arithmetic {told}")
    return Check("engines", "proven", f"{left} on both sides")


def align(a: RouteTrace, b: RouteTrace) -> RouteTrace:
    """The sequences of B in the order of A, found by their token ids. Equal sequences are taken in their order.

    Raises:
        TraceError: if a side has no token ids, or a sequence of A is not in B.
    """
    if a.token_ids is None or b.token_ids is None:
        raise TraceError("align: both records need token ids")
    places: dict[bytes, list[int]] = {}
    for i in range(b.num_sequences):
        places.setdefault(_sequence(b, i), []).append(i)
    order = []
    for i in range(a.num_sequences):
        found = places.get(_sequence(a, i))
        if not found:
            raise TraceError(f"align: sequence {i} of the first record is not in the second (or less often)")
        order.append(found.pop(0))
    return b.select(order)


def _sequence(trace: RouteTrace, i: int) -> bytes:
    assert trace.token_ids is not None
    return np.ascontiguousarray(trace.token_ids[trace.offsets[i] : trace.offsets[i + 1]], dtype="<i8").tobytes()
