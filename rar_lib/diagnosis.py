"""One answer for someone with a dump: is the capture sound, how large is the mismatch, where did routing move, what to try.

    found = diagnose("tq_batch.pt", model="config.json", against="own.safetensors")
    print(found)

Without a second record there are the doctor's verdicts, and the mismatch of log-probs where the dump carries both. With one (the routes
of the training side, see retrace.py) come the certificate, and under it the agreement by layer and a suggested policy with its reason.
Nothing here needs an engine, a GPU or the producer's package.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from rar_lib.errors import RarError, TraceError, UndecidedError
from rar_lib.metrics.agreement import margin_auc
from rar_lib.metrics.mismatch import mismatch
from rar_lib.traces.certificate import ComparisonKind, align
from rar_lib.traces.compare import Comparison, compare
from rar_lib.traces.doctor import examine
from rar_lib.traces.layers import ModelShape
from rar_lib.traces.trace import RouteTrace
from rar_lib.traces.verdicts import Report, Verdict, verdict
from rar_lib.traces.wire import OWN, detect, read_content
from rar_lib.traces.wire.content import Content
from rar_lib.traces.wire.convert import to_trace
from rar_lib.traces.wire.dump import Dump, ReadOptions

SAMPLES = Path(__file__).resolve().parent.parent / "data" / "traces"
HEADROOM = 1.25  # of a budget over the share of routers that differ: shares move from batch to batch
SMALL = 0.25  # up to here a share of the routes is worth choosing; above, force them all


@dataclass(frozen=True)
class Suggestion:
    """What to try next.

    Attributes:
        router_replay: the keys of a job config (and of verl's), or None where nothing can be said.
        reason: why, with the numbers that it rests on.
    """

    router_replay: Mapping[str, Any] | None
    reason: str

    def __str__(self) -> str:
        if self.router_replay is None:
            return f"suggestion: none yet\n  {self.reason}"
        keys = yaml.safe_dump({"router_replay": dict(self.router_replay)}, sort_keys=False).rstrip()
        return "suggestion\n" + "\n".join(f"  {line}" for line in keys.splitlines()) + f"\n  {self.reason}"


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Everything that is known of a file.

    Attributes:
        report: the doctor's verdicts on the file, and those of the comparison.
        mismatch: log-prob statistics (metrics/mismatch.py) by name with their pair, empty without two log-probs of the same tokens.
        comparison: certificate and agreement, None without a second record.
        suggestion: what to try.
    """

    report: Report
    mismatch: Mapping[str, float | None] = field(default_factory=dict)
    comparison: Comparison | None = None
    suggestion: Suggestion | None = None

    @property
    def exit_status(self) -> int:
        """0 clean, 1 warnings, 2 must not be replayed."""
        return self.report.exit_status

    def compared(self) -> Comparison:
        """The comparison with its numbers.

        Raises:
            TraceError: without a second record, a sound capture, or a certificate; says which.
        """
        if self.exit_status == 2:
            codes = ", ".join(dict.fromkeys(v.code for v in self.report.verdicts if v.severity == "error"))
            raise TraceError(
                f"{self.report.source}: {codes}: must not be replayed, so nothing is compared; see the report"
            )
        if self.comparison is None:
            raise TraceError(f"{self.report.source}: expected a second record to compare with (against=)")
        self.comparison.certificate.require()
        return self.comparison

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        out: dict[str, Any] = {**self.report.as_dict(), "mismatch": dict(self.mismatch)}
        if self.comparison is not None:
            certificate, table = self.comparison.certificate, self.comparison.table
            out["certificate"] = {
                "kind": certificate.kind, "valid": certificate.valid,
                "checks": [{"name": c.name, "state": c.state, "seen": c.seen} for c in certificate.checks],
            }  # fmt: skip
            out["agreement"] = self.comparison.scalars()
            out["layers"] = [] if table is None else [
                {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in table.to_dict("records")
            ]  # fmt: skip
        if self.suggestion is not None:
            keys = self.suggestion.router_replay
            out["suggestion"] = {
                "router_replay": None if keys is None else dict(keys),
                "reason": self.suggestion.reason,
            }
        return out

    def to_json(self) -> str:
        """The whole diagnosis as JSON (no NaN: what cannot be computed is null)."""
        return json.dumps(self.as_dict(), indent=2, default=_plain, allow_nan=False)

    def __str__(self) -> str:
        parts = [str(self.report)]
        if self.mismatch:
            shown = (
                "k3",
                "abs_mean",
                "abs_p99",
                "abs_max",
                "extreme_fraction_tau2",
                "probs_diff_mean",
                "pearson",
                "ess",
                "tokens",
            )
            lines = [
                f"  {n}: {v:.6g}" for n, v in self.mismatch.items() if v is not None and n.rpartition("/")[2] in shown
            ]
            parts.append("log-prob mismatch\n" + "\n".join(lines))
        if self.comparison is not None:
            parts.append(str(self.comparison.certificate))
            scalars = {n: v for n, v in self.comparison.scalars().items() if v is not None}
            if scalars:
                parts.append("agreement\n" + "\n".join(f"  {n}: {v:.6g}" for n, v in scalars.items()))
            if self.comparison.table is not None:
                table = self.comparison.table.to_string(index=False, float_format="{:.4f}".format)
                parts.append("by layer\n" + "\n".join(f"  {line}" for line in table.splitlines()))
        if self.suggestion is not None:
            parts.append(str(self.suggestion))
        return "\n\n".join(parts)

    __repr__ = __str__


def numbers_table(found: Diagnosis) -> pd.DataFrame:
    """The numbers of a diagnosis with a fixed precision, as text: `number`, `value`."""
    rows = [
        ("exit status", f"{found.exit_status}"),
        ("cells without a route", f"{found.report.facts.get('missing', 0)}"),
    ]
    scalars = {} if found.comparison is None else found.comparison.scalars()
    for name, value in {**scalars, **found.mismatch}.items():
        shown = (
            "undefined" if value is None else f"{value:.0f}" if name.endswith(("tokens", "cells")) else f"{value:.3g}"
        )
        rows.append((name, shown))
    return pd.DataFrame(rows, columns=["number", "value"])


def find_dump(name: str | Path) -> Path:
    """A file given by path, or by its name among the shipped samples (data/traces); relative to the working folder.

    Raises:
        TraceError: if neither is there; names both places.
    """
    places = [Path(name), SAMPLES / name]
    for place in places:
        if place.is_file():
            return Path(os.path.relpath(place))
    raise TraceError(f"expected a dump at {' or '.join(map(str, places))}")


def find_model(name: str | Path) -> Path:
    """A model's `config.json`, a checkpoint folder, or the name of a shipped checkpoint; relative to the working folder.

    Raises:
        ConfigError: if none of these is there.
    """
    from rar_lib.checkpoint import resolve_checkpoint

    return Path(name) if Path(name).is_file() else Path(os.path.relpath(resolve_checkpoint(str(name))))


def decoder(model: Path) -> Callable[[Sequence[int]], str]:
    """Turns token ids into text with a checkpoint's tokenizer; into numbers where there is none."""
    try:
        from rar_lib.checkpoint import load_tokenizer

        decode: Callable[[Sequence[int]], str] = load_tokenizer(model).decode
    except (ImportError, OSError, ValueError, RarError):
        return lambda ids: " ".join(map(str, ids))
    return decode


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not plain")


def diagnose(
    file: str | Path, format: str = "auto", *, model: ModelShape | Mapping[str, Any] | str | Path | None = None,
    payload_layers: Sequence[int] | None = None, batch_size: int | None = None, allow_pickle: bool = False,
    against: str | Path | RouteTrace | None = None, kind: ComparisonKind = "mismatch", asserting: Collection[str] = (),
) -> Diagnosis:  # fmt: skip
    """Verdicts, mismatch, certificate, agreement and a suggestion for a file.

    Args:
        file, format, model, payload_layers, batch_size, allow_pickle: as for `read_trace`.
        against: a second record of the same tokens (a trace, or any readable dump).
        kind, asserting: as for `certify`.

    Returns:
        A Diagnosis. A file that cannot be read is one with the verdict UNREADABLE.

    Raises:
        TraceError: for a model that cannot be read.
    """
    shape = None if model is None else ModelShape.load(model)
    layers = None if payload_layers is None else tuple(payload_layers)
    options = ReadOptions(shape, layers, batch_size, allow_pickle)
    source = _open(file, format, options)
    how: dict[str, Any] = {"model": shape, "batch_size": batch_size, "allow_pickle": allow_pickle}
    report = examine(file if source is None else source, format, payload_layers=layers, name=str(file), **how)
    unfit = any(v.code.startswith("LOGPROBS_") for v in report.verdicts)
    numbers = dump_mismatch(source) if isinstance(source, Dump) and not unfit else {}
    without = Diagnosis(report, numbers, None, suggest(report, None, numbers))
    if against is None or source is None or report.exit_status == 2:
        return without
    name = "trace in memory" if isinstance(against, RouteTrace) else str(against)
    second = against if isinstance(against, RouteTrace) else _open(against, "auto", options)
    beside = examine(name if second is None else second, name=name, **how)
    found = [replace(v, where=f"second record, {v.where}") for v in beside.verdicts]
    pair, problems = _pair(source, second, shape, layers)
    found += problems
    report = Report(report.source, report.facts, (*report.verdicts, *found))
    if beside.exit_status == 2 or pair is None:
        return replace(without, report=report, suggestion=suggest(report, None, numbers))
    mine, other = pair
    compared = compare(mine, other, kind, asserting=asserting)
    report = Report(report.source, report.facts, (*report.verdicts, *compared.verdicts))
    if compared.certificate.valid and not any(v.code.startswith("LOGPROBS_") for v in report.verdicts):
        numbers = {**numbers, **trace_mismatch(mine, other)}
    auc = None
    if compared.agreement is not None and other.margins is not None:
        auc = margin_auc(other.margins, compared.agreement.flipped, compared.agreement.known)
    return Diagnosis(report, numbers, compared, suggest(report, compared, numbers, auc))


def _open(file: str | Path, format: str, options: ReadOptions) -> Dump | RouteTrace | None:
    """The dump or trace, or None where it cannot be read (the doctor says why)."""
    try:
        return _require(file, options, format)
    except TraceError:
        return None


def _require(file: str | Path, options: ReadOptions, format: str = "auto") -> Dump | RouteTrace:
    content = Content(Path(file), options)
    name = detect(content) if format == "auto" else format
    return RouteTrace.load(file) if name == OWN else read_content(content, name)


def _pair(
    source: Dump | RouteTrace,
    second: Dump | RouteTrace | None,
    shape: ModelShape | None,
    layers: tuple[int, ...] | None,
) -> tuple[tuple[RouteTrace, RouteTrace] | None, list[Verdict]]:
    """Both records as traces, the second in the order of the first; or what is in the way."""
    if second is None:
        return None, []
    traces = []
    for record, numbers, where in ((source, layers, "first record"), (second, None, "second record")):
        try:
            traces.append(record if isinstance(record, RouteTrace) else to_trace(record, shape, numbers))
        except TraceError as error:
            code = "UNDECIDED" if isinstance(error, UndecidedError) else "UNREADABLE"
            return None, [verdict(code, f"{where}, {getattr(record, 'path', '')}", str(error))]
    mine, other = traces
    same = mine.token_digest is None or other.token_digest is None or mine.token_digest == other.token_digest
    if same or mine.num_sequences != other.num_sequences:
        return (mine, other), []
    try:
        return (mine, align(mine, other)), [verdict("REORDERED", "second record", f"{other.num_sequences} sequences")]
    except TraceError:
        return (mine, other), []  # other tokens: the certificate says so


def dump_mismatch(dump: Dump) -> dict[str, float | None]:
    """Statistics of metrics/mismatch.py for a dump that carries two log-probs of its sampled tokens (NeMo-RL's log, slime's training dump,
    prime-rl's export), named `mismatch/rollout_old/...` or `mismatch/rollout_new/...`; empty without two.

    Raises:
        TraceError: if a log-prob of a sampled token is missing on one side only.
    """
    for later in ("old", "new"):
        samples = [s for s in dump.samples if "rollout" in s.logprobs and later in s.logprobs]
        if samples:
            mask = np.concatenate(
                [np.ones(s.tokens, bool) if s.response_mask is None else s.response_mask for s in samples]
            )
            mu, other = (np.concatenate([s.logprobs[name] for s in samples]) for name in ("rollout", later))
            odd = mask & ~(np.isfinite(mu) & np.isfinite(other))
            if odd.any():
                raise TraceError(f"{dump.path}: {int(odd.sum())} sampled tokens lack a finite log-prob on a side")
            return mismatch(other, mu, mask, prefix=f"mismatch/rollout_{later}/")
    return {}


def trace_mismatch(a: RouteTrace, b: RouteTrace) -> dict[str, float | None]:
    """The same for two traces with log-probs, over the tokens that both scored (a rollout scores what it sampled); empty unless `a` is a
    rollout's and `b` a trainer's."""
    if a.logprobs is None or b.logprobs is None or a.header.source != "rollout" or b.header.source == "rollout":
        return {}
    mask = np.isfinite(a.logprobs) & np.isfinite(b.logprobs)
    return mismatch(b.logprobs, a.logprobs, mask, prefix=f"mismatch/rollout_{b.header.source}/")


def suggest(
    report: Report, comparison: Comparison | None, numbers: Mapping[str, float | None], auc: float | None = None
) -> Suggestion:
    """A replay policy by rule, with its reason.

    The rules rest on what this project measured on its small model and on the formulas: a route binds only where the two sides differ, so
    a budget a little above the share of routers that differ lets `disagree` force every one of them in the old pass.

    Args:
        report: the doctor's.
        comparison: certificate and agreement, or None.
        numbers: log-prob mismatch by name, for the reason.
        auc: of small margins against flips, where margins are known.
    """
    if report.summary == "not read":
        return Suggestion(None, "the file was not read, so nothing is known of the capture")
    if report.exit_status == 2:
        return Suggestion(
            None,
            f"mend the capture first: {', '.join(dict.fromkeys(v.code for v in report.verdicts if v.severity == 'error'))}",
        )
    if comparison is None and report.facts.get("routes") == "none":
        return Suggestion(None, "this file holds log-probs and no routes; bring the dump that has them")
    if comparison is None:
        return Suggestion(
            None, "one record says nothing about disagreement: record the same tokens on the training side (rar record) and compare "
            "(--against)",
        )  # fmt: skip
    if comparison.agreement is None:
        return Suggestion(
            None,
            "without a certificate no number is trusted; see its checks, and vouch for what only you know (--asserting)",
        )
    flips = comparison.agreement.scalars()
    rate, any_flip = flips["router_flip"], flips["token_any_flip"]
    if rate is None:
        return Suggestion(None, "no cell is recorded on both sides")
    k3 = next((v for n, v in numbers.items() if n.endswith("/k3") and v is not None), None)
    told = f"{rate:.2%} of the routers differ" + (
        f", {any_flip:.1%} of the tokens in some layer" if any_flip is not None else ""
    )
    told += f", k3 is {k3:.3g} nats" if k3 is not None else ""
    known = comparison.agreement.known
    compared, missing = int(known.sum()), int(report.facts.get("missing", 0))
    gap = f" {compared} of {known.size} cells were compared." if compared < 0.75 * known.size else ""
    gap += f" {missing} cells have no route and stay native." if missing else ""
    if rate == 0:
        return Suggestion({"enabled": False}, f"no router differs: replay would change nothing.{gap}")
    if comparison.certificate.kind == "drift":
        return Suggestion(
            {"mode": "R2", "policy": "full"},
            f"{told} between the weights: this is drift within one engine, which R2 takes off; R3 is for the mismatch of two engines.{gap}",
        )
    if rate > SMALL:
        return Suggestion(
            {"mode": "R3", "policy": "full"},
            f"{told}: too many to choose among, so force every route, and look for the cause first.{gap}",
        )
    budget = min(1.0, max(0.01, math.ceil(rate * HEADROOM * 100) / 100))
    rule = f" (small margins tell flips with an AUC of {auc:.2f})" if auc is not None else ""
    return Suggestion(
        {"mode": "R3", "policy": "disagree", "unit": "token_layer", "budget": f"{budget:g}"},
        f"{told}{rule}. Forcing more than these changes nothing in the old pass: a budget of {budget:g} covers them with some to spare. "
        f"`swap` asks which of them matter and costs a backward pass more. Compare both with full R3, also after updates, where new flips "
        f"appear. Where a framework knows full replay only (verl, slime), that is mode R3.{gap}",
    )
