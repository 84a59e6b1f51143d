"""Two records side by side: the certificate first, and numbers only under it.

What is looked for beyond the rates: a layer that disagrees alone (a draft model or another module writes under its id), and a record
that agrees only after a shift by a row.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rar_lib.metrics.agreement import Agreement, agreement
from rar_lib.metrics.load import load_shift
from rar_lib.traces.certificate import Certificate, ComparisonKind, certify
from rar_lib.traces.trace import RouteTrace
from rar_lib.traces.verdicts import Verdict, verdict

OUTLIER_RATE = 0.2  # how far above the other layers' median a layer's flip rate must lie
OUTLIER_FACTOR = 5.0


@dataclass(frozen=True)
class Comparison:
    """Two records side by side.

    Attributes:
        certificate: whether the numbers mean anything.
        agreement: cell by cell, or None without a valid certificate.
        verdicts: what stands out.
        table: one row a layer, or None: `layer`, `cells`, `overlap`, `router_flip`, `js` (of the loads, nats), `tv`.
    """

    certificate: Certificate
    agreement: Agreement | None
    verdicts: tuple[Verdict, ...]
    table: pd.DataFrame | None

    def scalars(self) -> dict[str, float | None]:
        """The scalars of the agreement; empty without a certificate."""
        return {} if self.agreement is None else self.agreement.scalars()


def compare(
    a: RouteTrace, b: RouteTrace, kind: ComparisonKind = "mismatch", *, asserting: Collection[str] = ()
) -> Comparison:
    """Certify a pair, and compare it under the certificate.

    Args:
        a, b, kind, asserting: as for `certify`.

    Returns:
        A Comparison; without a valid certificate it holds the reasons (NOT_COMPARABLE) and no numbers.

    Raises:
        TraceError: on an unknown kind or check.
    """
    certificate = certify(a, b, kind, asserting=asserting)
    comparable = {c.name: c.state for c in certificate.checks}
    found: list[Verdict] = []
    result = None
    if comparable["tokens"] != "failed" and comparable["layers"] == "proven":
        result = agreement(a, b)
        shifted = [c for c in certificate.checks if c.name == "rows" and c.state == "failed"]
        found += [verdict("ROWS_SHIFTED", "the pair", c.seen) for c in shifted] or _outliers(a, result)
    if not certificate.valid:
        missing = [c for c in certificate.checks if c.state in ("unproven", "failed")]
        seen = "; ".join(f"{c.name} {c.state}: {c.seen}" for c in missing)
        found.insert(0, verdict("NOT_COMPARABLE", f"certificate of {kind}", seen))
        return Comparison(certificate, None, tuple(found), None)
    assert result is not None
    return Comparison(certificate, result, tuple(found), _by_layer(a, b, result))


def _by_layer(a: RouteTrace, b: RouteTrace, result: Agreement) -> pd.DataFrame:
    shift = load_shift(a, b)
    cells = result.known.sum(0)
    share = [
        result.shared[result.known[:, i], i].mean() / result.top_k if cells[i] else np.nan for i in range(len(cells))
    ]
    return pd.DataFrame(
        {"layer": a.header.moe_layers, "cells": cells, "overlap": share, "router_flip": result.router_flip_by_layer(), "js": shift["js"],
         "tv": shift["tv"]}
    )  # fmt: skip


def _outliers(a: RouteTrace, result: Agreement) -> list[Verdict]:
    """Layers that differ far more than the others, or agree no more than chance while the others do."""
    rates = result.router_flip_by_layer()
    if len(rates) < 2 or np.isnan(rates).all():
        return []
    k = result.top_k
    common = np.array(
        [
            result.shared[result.known[:, i], i].mean() / k if result.known[:, i].any() else np.nan
            for i in range(len(rates))
        ]
    )
    chance = k / a.header.num_experts
    out = []
    for i, rate in enumerate(rates):
        rest, shared = float(np.nanmedian(np.delete(rates, i))), float(np.nanmedian(np.delete(common, i)))
        foreign = common[i] - chance < 0.25 * (shared - chance) and shared > chance + 0.5 * (1 - chance)
        if rate > rest + OUTLIER_RATE and (rate > OUTLIER_FACTOR * rest or foreign):
            layer = a.header.moe_layers[i]
            seen = f"{rate:.1%} of its routers differ (overlap {common[i]:.2f}, chance {chance:.2f}), the median of the others is {rest:.1%}"
            out.append(verdict("LAYER_OUTLIER", f"layer {layer}", seen, layers=(layer,)))
    return out
