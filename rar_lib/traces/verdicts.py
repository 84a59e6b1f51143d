"""What can be wrong with a record of routes: codes, causes and what to do, and the report that carries them.

The codes are stable names: scripts and issue threads may refer to them. A verdict says where (samples, tokens, layers), what
was seen there, the known cause, and the next step. Severity decides the exit status of `rar doctor`: an `error` means that
the record must not be replayed, a `warning` that it can be, with what the verdict says in mind; a `note` changes nothing.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Kind:
    """A kind of finding: its severity, the cause that is known for it, and what to do."""

    severity: Severity
    cause: str
    do: str


KINDS: dict[str, Kind] = {
    # ---- the capture
    "CAPTURE_DEAD": Kind(
        "error",
        "the kernel that ran does not pass the capture hook (a fused or monolithic MoE kernel), or capture was off: log-probs "
        "look fine, and every route reads as expert 0",
        "switch to a kernel with capture, or record on the training side; do not replay",
    ),
    "CAPTURE_STUCK": Kind(
        "error",
        "the same row everywhere: a buffer that is written once, or filler (arange) that was never overwritten",
        "check where the buffer is written; do not replay",
    ),
    "LAYER_DEAD": Kind(
        "error",
        "this layer's router is not bound to the capture, or the layer axis counts other layers than assumed",
        "check that the config belongs to this dump (is the layer dense?); if it is MoE, capture it or leave it out of replay",
    ),
    "NO_ROUTES": Kind(
        "error",
        "the capture was never asked for (a server started without its flag, a rollout without recording), or every request was aborted",
        "start the engine with capture of routed experts; nothing here can be replayed",
    ),
    "DENSE_LAYER_HAS_ROUTES": Kind(
        "error",
        "the config is of another model, or the layer axis counts other layers than assumed (shifted, reversed, MoE layers only)",
        "check that the config belongs to this dump; name the layers of the axis by number (--layers)",
    ),
    "LAYER_STUCK": Kind(
        "warning",
        "one layer always chose the same experts: a collapsed router, or a buffer row that is not written",
        "look at the layer's load; compare with a recording on the training side",
    ),
    "LAYER_EMPTY": Kind(
        "warning",
        "without the model's config a dense layer and a dead capture look alike: both are zeros",
        "give --model config.json, so that layers are mapped by number",
    ),
    "LAYER_OUTLIER": Kind(
        "error",
        "this layer alone disagrees: another module writes under the same layer id (a draft model, an MTP head), or its weights "
        "differ",
        "turn the draft model off while capturing, or leave the layer native",
    ),
    "PROMPT_MISSING": Kind(
        "warning",
        "prompt rows were not captured: a prefix-cache hit, or a capture that starts at the response",
        "response rows are kept and prompt rows stay native; turn prefix caching off to record both",
    ),
    "ROWS_MISSING": Kind(
        "warning",
        "rows without a route in the middle: a prefix-cache hit, a preempted or aborted request, or a transport that lost a block",
        "they are marked missing and stay native, nothing is shifted",
    ),
    "SAMPLE_WITHOUT_ROUTES": Kind(
        "warning",
        "the sample was aborted, or came back without routes",
        "it is missing as a whole and stays native; the others go on",
    ),
    "ROW_COUNT": Kind(
        "error",
        "a sequence of T tokens has T - 1 routes (or T with an empty last one): rows were lost or doubled, and one cannot know where",
        "find where rows get lost (preemption, async scheduling, a stop string that was cut off); do not replay",
    ),
    "ROWS_SHIFTED": Kind(
        "error",
        "routes sit beside their tokens: an off-by-one between inputs and outputs, or padding on the other side",
        "realign by token ids; a shifted record forces wrong experts everywhere",
    ),
    "PREFIX_DISAGREES": Kind(
        "warning",
        "sequences that begin with the same tokens took other routes there: stale rows of a prefix cache, mixed weights, or rows of "
        "another request",
        "capture the same prompt twice with prefix caching on and off",
    ),
    "ROUTES_REPEATED": Kind(
        "error",
        "different tokens with the very same routes: a buffer of one request was handed out for another",
        "check slot reuse in the capture; do not replay",
    ),
    "VERSION_MIXED": Kind(
        "warning",
        "one sequence was routed under several weight versions: a partial rollout that went on after an update",
        "compare per version; each token keeps its own",
    ),
    "VERSION_SPLIT": Kind(
        "error",
        "routes were recaptured under newer weights than the log-probs (a retracted request)",
        "do not replay these tokens: record and log-probs are of two policies",
    ),
    # ---- the wire
    "ID_WRAPPED": Kind(
        "error",
        "the id type cannot hold the last expert: ids were cut to their low bits on the way",
        "send the smallest type that holds E - 1 (uint8 to 256 experts, uint16 above)",
    ),
    "ID_NEGATIVE": Kind(
        "error",
        "ids from 128 (or 32,768) on were read through a signed type that is too small, or a row is half empty",
        "read the payload as unsigned, or widen before the sign is lost",
    ),
    "ID_OUT_OF_RANGE": Kind(
        "error",
        "ids of another model, physical ids (redundant experts of a load balancer), -1 read as unsigned (255, 65535), or unwritten memory",
        "record logical ids; check that the config belongs to this dump",
    ),
    "DUPLICATE_EXPERTS": Kind(
        "error",
        "a row names an expert twice: partly written rows, ids wrapped into a smaller type, or zeros read as expert 0",
        "do not replay: a dispatcher counts K experts a token",
    ),
    "FILLER_ROWS": Kind(
        "error",
        "rows that nobody wrote hold 0..K-1, which reads like routes: padding, or filler for what was not captured",
        "read them under the producer's mask, or mark them missing",
    ),
    "EXPERTS_LOCAL": Kind(
        "warning",
        "only the first part of the ids is ever used, in every layer: ids are local to an expert-parallel rank",
        "add each rank's first expert before the ranks are joined",
    ),
    "LAYERS_MISMATCH": Kind(
        "error",
        "the axis does not count what this producer counts (MoE layers instead of all, MTP heads, a pipeline stage's shard), or the config is "
        "of another model",
        "check that the config belongs to this dump; then name the layers of the axis by number (--layers)",
    ),
    "TOPK_MISMATCH": Kind(
        "error",
        "the slot axis has another length than the model's experts per token (shared experts counted in, or another model)",
        "check that the config belongs to this dump",
    ),
    "TOKENS_MISSING": Kind(
        "note",
        "the dump carries no token ids, so nothing proves that two records speak of the same tokens",
        "dump the token ids beside the routes",
    ),
    "LOGPROBS_IMPOSSIBLE": Kind(
        "error",
        "a log-prob above 0 or infinite: probabilities in place of their logarithms, or bytes that are something else",
        "check which field was dumped; no mismatch is computed from this file",
    ),
    "LOGPROBS_MISSING": Kind(
        "warning",
        "sampled tokens without a log-prob: a server that was not asked for them, or a request that was cut short",
        "no mismatch is computed from this dump",
    ),
    "RECORDS_WITHOUT_ANSWER": Kind(
        "warning",
        "records of the file that hold no answer: errors of the server, empty lines of a client",
        "they are no samples; where positions matter, match by token ids",
    ),
    "SCORES_ARE_PROBABILITIES": Kind(
        "warning",
        "the field says logits, the rows sum to 1: a softmax was taken already",
        "do not take another softmax; treat them as probabilities",
    ),
    "SEGMENTS_DISAGREE": Kind(
        "warning",
        "two segments of a resumed generation overlap and took other routes there",
        "the first is kept: it sampled the next token",
    ),
    "ZERO_AMBIGUOUS": Kind(
        "note",
        "at K = 1 a zero row may be a route to expert 0 or no route",
        "rows are taken as routes; check the prompt and the tail by hand",
    ),
    "MODEL_UNKNOWN": Kind(
        "note",
        "without the model's config neither the number of experts nor the layer numbers can be checked",
        "give --model config.json",
    ),
    # ---- our own files, and files that cannot be read
    "PAYLOAD_CHANGED": Kind(
        "error", "the bytes of the file are not those that were written", "fetch the file again from its source"
    ),
    "TRACE_CONTRADICTS_ITSELF": Kind("error", "states, offsets or arrays do not fit each other", "write the trace again"),
    "UNREADABLE": Kind(
        "error",
        "the file is not there, truncated, corrupt, or of another format",
        "fetch it again from its source, or name its format (--format)",
    ),
    "UNDECIDED": Kind(
        "error",
        "the file can be read in more than one way, or not without something that it does not say",
        "give what is named above, and run again; nothing is known of the capture yet",
    ),
    # ---- two records side by side
    "NOT_COMPARABLE": Kind(
        "warning",
        "no certificate: the two records are not proven to be comparable, so no number is given",
        "bring the record of the same tokens where a check failed; vouch for what is unproven (--asserting) where you know it",
    ),
    "REORDERED": Kind(
        "note", "the two records hold the same sequences in another order", "they were matched by their token ids"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """One finding.

    Attributes:
        code: a key of `KINDS`.
        where: samples, tokens and layers, in words.
        seen: what was seen there.
        severity: of this finding; by default that of its kind.
        layers: transformer layer numbers concerned (positions on the axis where numbers are not known).
        samples: indices of the samples concerned.
        cells: number of (token, layer) cells or rows concerned, as `seen` says.
    """

    code: str
    where: str
    seen: str
    severity: Severity = "note"
    layers: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    cells: int = 0

    @property
    def kind(self) -> Kind:
        """Cause and remedy of its code."""
        return KINDS[self.code]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, cause and remedy included."""
        return {**asdict(self), "cause": self.kind.cause, "do": self.kind.do}

    def __str__(self) -> str:
        return f"{self.severity}: {self.code}: {self.where}: {self.seen}"


def verdict(code: str, where: str, seen: str, *, severity: Severity | None = None, **more: Any) -> Verdict:
    """A verdict with the severity of its kind, unless another is given; `more` are other attributes of `Verdict`."""
    return Verdict(code, where, seen, KINDS[code].severity if severity is None else severity, **more)


def merged(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """One verdict a code and severity for findings that come once a sample: the first one's place and sight, and how many there are."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for found in verdicts:
        groups.setdefault((found.code, found.severity), []).append(found)
    out = []
    for group in groups.values():
        first = group[0]
        if len(group) > 1:
            samples = tuple(dict.fromkeys(i for v in group for i in v.samples))
            layers = tuple(sorted({i for v in group for i in v.layers}))
            first = replace(
                first,
                where=f"{first.where}, and {len(group) - 1} more",
                samples=samples,
                layers=layers,
                cells=sum(v.cells for v in group),
            )
        out.append(first)
    return out


def listed(values: Iterable[int], shown: int = 6) -> str:
    """Numbers in words: runs as `3-7`, the rest cut after a few."""
    numbers = sorted(set(values))
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(words[:shown]) + (f" and {len(words) - shown} more" if len(words) > shown else "")


@dataclass(frozen=True, repr=False)
class Report:
    """What the doctor found.

    Attributes:
        source: file or object that was looked at.
        facts: format and layout as detected, sizes, coverage; plain values in reading order.
        verdicts: findings, errors first.
    """

    source: str
    facts: dict[str, Any] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()

    def __post_init__(self) -> None:
        ranked = sorted(self.verdicts, key=lambda v: ORDER.index(v.severity))
        object.__setattr__(self, "verdicts", tuple(ranked))

    @property
    def exit_status(self) -> int:
        """0 clean, 1 warnings, 2 must not be replayed."""
        severities = {v.severity for v in self.verdicts}
        return 2 if "error" in severities else 1 if "warning" in severities else 0

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of warnings and errors, in order."""
        return tuple(v.code for v in self.verdicts if v.severity != "note")

    @property
    def summary(self) -> str:
        """The conclusion in one line."""
        if {"UNREADABLE", "UNDECIDED"} & {v.code for v in self.verdicts if not v.where.startswith("second record")}:
            return "not read"
        return ("clean", "usable, with warnings", "must not be replayed")[self.exit_status]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "source": self.source,
            "status": self.exit_status,
            "summary": self.summary,
            "facts": self.facts,
            "verdicts": [v.as_dict() for v in self.verdicts],
        }

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.summary}"]
        lines += [f"  {name}: {value}" for name, value in self.facts.items()]
        for v in self.verdicts:
            lines += [f"{v.severity.upper()} {v.code}", f"  where  {v.where}", f"  seen   {v.seen}"]
            lines += [f"  cause  {v.kind.cause}", f"  do     {v.kind.do}"]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        facts = "".join(
            f"<tr><th>{html.escape(str(n))}</th><td colspan=4>{html.escape(str(v))}</td></tr>"
            for n, v in self.facts.items()
        )
        rows = "".join(
            "<tr>"
            + "".join(f"<td>{html.escape(x)}</td>" for x in (v.severity, v.code, v.where, v.seen, v.kind.do))
            + "</tr>"
            for v in self.verdicts
        )
        head = "<tr><th>severity</th><th>code</th><th>where</th><th>seen</th><th>do</th></tr>" if rows else ""
        return f"<table><caption>{html.escape(self.source)}: {self.summary}</caption><tbody>{facts}{head}{rows}</tbody></table>"
