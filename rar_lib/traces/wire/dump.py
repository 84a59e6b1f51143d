"""A dump as its producer wrote it: one Sample a sequence, ids untouched, each row at its token.

A reader's work ends here. It knows its producer's keys, encoding and padding, cuts the padding off, and says at which
token the first row lies; it does not judge. The ids stay as they came (layer axis, integer type, zeros, -1), so that the
doctor sees what was written; `to_trace` (convert.py) makes a RouteTrace of what can be trusted and refuses the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.layers import ModelShape
from rar_lib.traces.verdicts import Verdict

Source = Literal["rollout", "old", "new"]


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence of T tokens, prompt and response.

    Attributes:
        name: where it lies in the file, in words: `samples[3]`, `line 4, choice 0`.
        tokens: T.
        experts: `[rows, layers, K]` integers as on the wire; None where the producer sent none.
        first: token of row 0. Rows are T - first, or one less (the last token has no route).
        recorded: `[rows]` bool where the format says itself which rows hold a route; else zeros and -1 tell.
        token_ids: `[T]` int64.
        prompt: number of prompt tokens, where known.
        response_mask: `[T]` bool, tokens that the policy sampled and is trained on.
        logprobs: by source (`rollout`, `old`, `new`), `[T]` float64 natural log-probs, NaN where there is none.
        versions: `[T]` int64, version of the weights that routed each token, -1 where it is not told.
        logprob_versions: `[T]` int64, version of the weights that scored each token.
        router_logits: `[rows, layers, E]` float, what the file calls logits.
        text: what the tokens say, where the dump has it.

    Raises:
        TraceError: for arrays of another shape or type, with the sample's name.
    """

    name: str
    tokens: int
    experts: np.ndarray | None = None
    first: int = 0
    recorded: np.ndarray | None = None
    token_ids: np.ndarray | None = None
    prompt: int | None = None
    response_mask: np.ndarray | None = None
    logprobs: Mapping[str, np.ndarray] = field(default_factory=dict)
    versions: np.ndarray | None = None
    logprob_versions: np.ndarray | None = None
    router_logits: np.ndarray | None = None
    text: str = ""

    def __post_init__(self) -> None:
        if self.experts is not None and (self.experts.ndim != 3 or self.experts.dtype.kind not in "iu"):
            raise TraceError(
                f"{self.name}: experts: expected integers [rows, layers, K], found {self.experts.dtype} "
                f"{list(self.experts.shape)}"
            )
        per_token = {
            "token_ids": self.token_ids,
            "response_mask": self.response_mask,
            "versions": self.versions,
            "logprob_versions": self.logprob_versions,
            **{f"logprobs[{name}]": values for name, values in self.logprobs.items()},
        }
        for what, values in per_token.items():
            if values is not None and values.shape != (self.tokens,):
                raise TraceError(
                    f"{self.name}: {what}: expected {self.tokens} values, one a token, found {list(values.shape)}"
                )
        if self.recorded is not None and (self.experts is None or self.recorded.shape != self.experts.shape[:1]):
            raise TraceError(f"{self.name}: recorded: expected one state a row, found {list(self.recorded.shape)}")


@dataclass(frozen=True, eq=False)
class Dump:
    """Samples of one file.

    Attributes:
        format: name of the reader.
        layout: what was found, in words: container, version, encoding.
        path: of the file.
        samples: in file order.
        layer_axis: what the producer says of its layer axis: `all` layers, `moe` layers only, or unknown.
        payload_layers: transformer layer number of each position, where the file names them.
        source: which pass the routes come from.
        content_sized: the producer picks the id type by the largest id that occurred, so a small type does not mean that ids
            were cut.
        routes_expected: false for logs that never hold routes.
        dense_rows: what the producer writes in layers without a router.
        num_experts, top_k: where the file says so.
        producer_version, model_id: where the file says so.
        notes: what the reader itself noticed (segments that disagree).
    """

    format: str
    layout: str
    path: str
    samples: tuple[Sample, ...]
    layer_axis: Literal["all", "moe", "unknown"] = "unknown"
    payload_layers: tuple[int, ...] | None = None
    source: Source = "rollout"
    content_sized: bool = False
    routes_expected: bool = True
    dense_rows: Literal["zeros", "anything"] = "zeros"
    num_experts: int | None = None
    top_k: int | None = None
    producer_version: str = ""
    model_id: str = ""
    notes: tuple[Verdict, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of all samples."""
        return sum(sample.tokens for sample in self.samples)

    def with_routes(self) -> list[tuple[int, Sample, np.ndarray]]:
        """Index, sample and ids `[rows, layers, K]` of the samples that carry routes."""
        return [(i, s, s.experts) for i, s in enumerate(self.samples) if s.experts is not None]

    def facts(self) -> dict[str, Any]:
        """Format, layout and sizes in reading order."""
        routed = self.with_routes()
        shapes = sorted({(e.shape[1], e.shape[2], str(e.dtype)) for _, _, e in routed})
        return {
            "format": self.format,
            "layout": self.layout,
            "samples": len(self.samples),
            "tokens": self.num_tokens,
            "routes": "; ".join(f"{layers} payload layers x top-{k}, {dtype}" for layers, k, dtype in shapes) or "none",
        }


@dataclass(frozen=True)
class ReadOptions:
    """What a reader may need that its file does not say.

    Attributes:
        model: the routers of the model; gives payloads without a shape their layers and K.
        payload_layers: transformer layer number of each position on the layer axis.
        batch_size: sequences of a forward, for records in `[sequence position, batch]` order without lengths.
        allow_pickle: read containers that only a pickle can hold. Foreign classes are still never imported.
    """

    model: ModelShape | None = None
    payload_layers: tuple[int, ...] | None = None
    batch_size: int | None = None
    allow_pickle: bool = False


def integers(name: str, values: Any, ndim: int = 1) -> np.ndarray:
    """Integers from lists, arrays or tensors; anything else is refused.

    Args:
        name: of the field, for messages.
        values: what was read.
        ndim: number of axes that it must have.

    Returns:
        `[n]`, or of any shape with `ndim` axes, in the type that it came in; int64 for lists.

    Raises:
        TraceError: on floats, ragged lists, or another number of axes.
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{name}: expected integers with {ndim} axes: {error}") from None
    if array.size == 0 and array.ndim == ndim:
        return array.astype(array.dtype if array.dtype.kind in "iu" else np.int64)
    if array.dtype.kind not in "iu" or array.ndim != ndim:
        raise TraceError(
            f"{name}: expected integers with {ndim} axes, found {array.dtype} with shape {list(array.shape)}"
        )
    return array


def routes(name: str, values: Any) -> np.ndarray | None:
    """`[rows, layers, K]` integers, or None where there are none; an empty list has no shape and counts as none.

    Raises:
        TraceError: as `integers`.
    """
    return None if values is None or (isinstance(values, list) and not values) else integers(name, values, 3)


def numbers(name: str, values: Any) -> np.ndarray:
    """`[n]` float64; None inside becomes NaN.

    Raises:
        TraceError: if it is not a list of numbers.
    """
    try:
        array = np.asarray(values, dtype=np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{name}: expected numbers: {error}") from None
    if array.ndim != 1:
        raise TraceError(f"{name}: expected a list of numbers, found shape {list(array.shape)}")
    return array


def at_the_end(tokens: int, values: np.ndarray) -> np.ndarray:
    """`[tokens]` float64 with the values at the last tokens and NaN before."""
    out = np.full(tokens, np.nan)
    if len(values):
        out[tokens - len(values) :] = values
    return out


def field_of(where: str, mapping: Any, key: str) -> Any:
    """A value that must be there.

    Raises:
        TraceError: naming the place, the key, and the keys that are there.
    """
    if not isinstance(mapping, Mapping):
        raise TraceError(f"{where}: expected a mapping with {key!r}, found {type(mapping).__name__}")
    if key not in mapping:
        raise TraceError(f"{where}: expected the key {key!r}, found {sorted(map(str, mapping))[:12]}")
    return mapping[key]
