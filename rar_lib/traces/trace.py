"""RouteTrace: which experts a router chose, for a batch of sequences, packed and never padded.

Every producer writes routes in another shape (padded or flat, all layers or MoE layers, a zero row for the last token
or none), and most of the known accidents come from a row that is not a route but looks like one: a zero row reads as
"expert 0". Here a cell that holds no route says so in `status`, the layer axis holds MoE layers only and names them,
and the ids keep the smallest unsigned type that holds E-1. Files are safetensors: memory-mapped, nothing is executed.

One file: what a record may hold, its padded and packed forms and its file are one contract, each an exact inverse of another.
"""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rar_lib.errors import TraceError
from rar_lib.traces.header import Status, TraceHeader, digest_tokens, id_dtype

ROUTE_AXES = ("scores", "margins")  # optional arrays that carry a layer axis
TOKEN_ARRAYS = ("token_ids", "logprobs", "policy_version")  # optional arrays with one value a token


def _per_layer(status: np.ndarray, layers: int) -> np.ndarray:
    """`[N, L]` status from `[N]` or `[N, L]`."""
    return status if status.ndim == 2 else np.broadcast_to(status[:, None], (len(status), layers))


def _integers(name: str, values: Any) -> np.ndarray:
    """int64 from integers of any width; floats and booleans are refused, not rounded."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise TraceError(f"{name}: expected integers, found {array.dtype}")
    return array.astype(np.int64)


def _states(values: Any) -> np.ndarray:
    """uint8 states, checked before they are narrowed."""
    wide = _integers("status", values)
    bad = np.flatnonzero((wide < 0) | (wide > max(Status)))
    if bad.size:
        raise TraceError(f"status: expected one of {[s.value for s in Status]}, found {wide.flat[bad[0]]}")
    return wide.astype(np.uint8)


@dataclass(frozen=True, eq=False)
class RouteTrace:
    """The routes of S sequences with N tokens in all, over L MoE layers of K slots.

    Attributes:
        header: what the numbers mean.
        experts: `[N, L, K]` ids, `id_dtype(E)`. Cells whose status is not RECORDED hold zeros, which mean nothing.
        offsets: `[S + 1]` int64; sequence i is rows `offsets[i]:offsets[i + 1]`.
        status: `[N]` or `[N, L]` uint8 of `Status`.
        token_ids: `[N]` int64, optional.
        logprobs: `[N]` float32, optional; log-prob of each token given those before it, NaN where nobody scored it.
        scores: `[N, L, E]` float, optional; the scores that were ranked.
        margins: `[N, L]` float, optional; s_(K) - s_(K+1) of the ranked scores.
        policy_version: `[N]` int64, optional; version of the weights that routed each token.

    Raises:
        TraceError: if shapes, ids or states contradict each other; the message names sequence, token and layer.
    """

    header: TraceHeader
    experts: np.ndarray
    offsets: np.ndarray
    status: np.ndarray
    token_ids: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    scores: np.ndarray | None = None
    margins: np.ndarray | None = None
    policy_version: np.ndarray | None = None
    _stored_sha256: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_shapes()
        if self._stored_sha256 is None:  # files are checked by verify(), so that opening a large one costs nothing
            self._check_values()

    # ---------------------------------------------------------------- shape and content

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """N, all sequences together."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> np.ndarray:
        """`[S]` int64 tokens of each sequence."""
        return np.diff(self.offsets)

    @property
    def recorded(self) -> np.ndarray:
        """`[N, L]` bool, true where a route was recorded; a read-only view where the states are one a token."""
        return _per_layer(self.status == Status.RECORDED, self.header.num_layers)

    @property
    def token_digest(self) -> str | None:
        """SHA-256 of lengths and token ids, or None without token ids."""
        return None if self.token_ids is None else digest_tokens(self.token_ids, self.offsets)

    def coverage(self) -> dict[str, float | None]:
        """Shares of the (token, layer) cells that could hold a route: `recorded` and `missing`; they sum to 1.

        The last token of a sequence has no route and does not count; without any other cell both are None.
        """
        possible = self.num_tokens * self.header.num_layers
        status = _per_layer(self.status, self.header.num_layers)
        possible -= int((status == Status.LAST).sum())
        recorded = int((status == Status.RECORDED).sum())
        if possible == 0:
            return {"recorded": None, "missing": None}
        return {"recorded": recorded / possible, "missing": 1 - recorded / possible}

    def place_of(self, token: int) -> str:
        """Sequence and position of a packed token, in words."""
        sequence = int(np.searchsorted(self.offsets, token, side="right")) - 1
        return f"sequence {sequence}, token {token - int(self.offsets[sequence])}"

    def _check_shapes(self) -> None:
        header, offsets = self.header, self.offsets
        if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or bool((np.diff(offsets) < 0).any()):
            raise TraceError(f"offsets must start at 0 and not fall, found {offsets[:8]}")
        n, layers, k = self.num_tokens, header.num_layers, header.top_k
        expected: dict[str, list[tuple[int, ...]]] = {
            "experts": [(n, layers, k)],
            "status": [(n,), (n, layers)],
            "scores": [(n, layers, header.num_experts)],
            "margins": [(n, layers)],
            **{name: [(n,)] for name in TOKEN_ARRAYS},
        }
        for name, shapes in expected.items():
            array = getattr(self, name)
            if array is not None and array.shape not in shapes:
                raise TraceError(
                    f"{name}: expected shape {' or '.join(map(str, shapes))} for {n} tokens, {layers} MoE layers and "
                    f"top-{k}, found {array.shape}"
                )
        kinds = {
            "offsets": "i",
            "status": "u",
            "token_ids": "iu",
            "policy_version": "iu",
            "logprobs": "f",
            "scores": "f",
            "margins": "f",
        }
        for name, allowed in kinds.items():
            array = getattr(self, name)
            if array is not None and array.size and array.dtype.kind not in allowed:
                what = "floats" if allowed == "f" else "integers"
                raise TraceError(f"{name}: expected {what}, found {array.dtype}")
        if self.experts.dtype != id_dtype(header.num_experts):
            raise TraceError(
                f"experts: expected dtype {id_dtype(header.num_experts)} for {header.num_experts} experts, "
                f"found {self.experts.dtype}; build traces from other types with RouteTrace.from_packed"
            )

    def _check_values(self) -> None:
        _states(self.status)
        if self.token_ids is not None:
            _integers("token_ids", self.token_ids)
        ids, known = self.experts.astype(np.int64), self.recorded
        out = known & (ids >= self.header.num_experts).any(-1)
        if out.any():
            token, layer = np.argwhere(out)[0]
            raise TraceError(
                f"experts: {self.place_of(token)}, layer {self.header.moe_layers[layer]}: expected ids below "
                f"{self.header.num_experts}, found {ids[token, layer].tolist()}"
            )
        ordered = np.sort(ids, axis=-1)
        twice = known & (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        if twice.any():
            token, layer = np.argwhere(twice)[0]
            raise TraceError(
                f"experts: {self.place_of(token)}, layer {self.header.moe_layers[layer]}: expected "
                f"{self.header.top_k} distinct experts, found {ids[token, layer].tolist()}"
            )
        if (ids[~known] != 0).any():
            token, layer = np.argwhere(~known & (ids != 0).any(-1))[0]
            raise TraceError(
                f"experts: {self.place_of(token)}, layer {self.header.moe_layers[layer]} is not recorded and must hold "
                f"zeros, found {ids[token, layer].tolist()}"
            )

    # ---------------------------------------------------------------- building

    @classmethod
    def from_packed(
        cls, header: TraceHeader, experts: Any, lengths: Sequence[int] | np.ndarray, status: Any, **optional: Any
    ) -> RouteTrace:
        """Build a trace from integers of any width.

        Args:
            header: what the numbers mean.
            experts: `[N, L, K]` integers; -1 in every slot of a cell means that no route is there.
            lengths: `[S]` tokens of each sequence.
            status: `[N]` or `[N, L]` of `Status`.
            optional: any of token_ids, logprobs, scores, margins, policy_version.

        Raises:
            TraceError: on ids that do not fit (they are never wrapped), or a recorded cell that holds -1.
        """
        offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))])
        wide = _integers("experts", experts)
        status = _states(status)
        if wide.ndim == 3 and status.shape[:1] == wide.shape[:1] and wide.shape[0] == offsets[-1]:
            known = _per_layer(status, wide.shape[1]) == Status.RECORDED
            out = known & ((wide < 0) | (wide >= header.num_experts)).any(-1)
            if out.any():
                token, layer = np.argwhere(out)[0]
                sequence = int(np.searchsorted(offsets, token, side="right")) - 1
                raise TraceError(
                    f"experts: sequence {sequence}, token {token - offsets[sequence]}, layer "
                    f"{header.moe_layers[layer]}: expected ids from 0 to {header.num_experts - 1}, "
                    f"found {wide[token, layer].tolist()}"
                )
            wide = np.where(known[..., None], wide, 0)
        return cls(header, wide.astype(id_dtype(header.num_experts)), offsets, status, **optional)

    @classmethod
    def from_padded(
        cls, header: TraceHeader, experts: Any, lengths: Sequence[int] | np.ndarray, status: Any = None, **optional: Any
    ) -> RouteTrace:
        """Pack right-padded routes. The exact inverse of `to_padded`.

        Args:
            header: what the numbers mean.
            experts: `[S, T, L, K]` integers, -1 in every slot where there is no route.
            lengths: `[S]` tokens of each sequence, at most T.
            status: `[S, T]` or `[S, T, L]` of `Status`; by default LAST for the last token of a sequence, else
                RECORDED where ids are given and MISSING where they are -1.
            optional: right-padded `[S, T, ...]` forms of the optional arrays.
        """
        experts = _integers("experts", experts)
        lengths = np.asarray(lengths, dtype=np.int64)
        if experts.ndim != 4 or len(lengths) != experts.shape[0] or (lengths > experts.shape[1]).any():
            raise TraceError(
                f"experts: expected [sequences, T, layers, K] with T >= {lengths.max(initial=0)} for {len(lengths)} "
                f"sequences, found {experts.shape}"
            )
        position = np.arange(experts.shape[1])[None, :]
        inside = position < lengths[:, None]
        if status is None:
            status = np.where((experts >= 0).any(-1), Status.RECORDED, Status.MISSING).astype(np.uint8)
            status[position == lengths[:, None] - 1] = Status.LAST
        packed = {name: np.asarray(value)[inside] for name, value in optional.items()}
        return cls.from_packed(header, experts[inside], lengths, np.asarray(status)[inside], **packed)

    def to_padded(self, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Right-padded routes.

        Args:
            length: T of the result; by default the longest sequence.

        Returns:
            `experts [S, T, L, K]` int64 with -1 wherever no route is recorded (padding included), and `status` of shape
            `[S, T]` or `[S, T, L]`, MISSING in the padding.

        Raises:
            TraceError: for a length below that of the longest sequence.
        """
        longest = int(self.lengths.max(initial=0))
        length = longest if length is None else length
        if length < longest:
            raise TraceError(f"length: expected at least the longest sequence, {longest}, found {length}")
        inside = np.arange(length)[None, :] < self.lengths[:, None]
        experts = np.full((self.num_sequences, length, *self.experts.shape[1:]), -1, dtype=np.int64)
        experts[inside] = self.ids()
        status = np.full((self.num_sequences, length, *self.status.shape[1:]), Status.MISSING, dtype=np.uint8)
        status[inside] = self.status
        return experts, status

    def ids(self) -> np.ndarray:
        """`[N, L, K]` int64 ids, -1 in every slot of a cell that holds no route."""
        return np.where(self.recorded[..., None], self.experts.astype(np.int64), -1)

    # ---------------------------------------------------------------- slicing and joining

    def select(self, sequences: Iterable[int] | slice) -> RouteTrace:
        """The trace of some of the sequences, in the given order."""
        every = np.arange(self.num_sequences)
        chosen = every[sequences] if isinstance(sequences, slice) else every[np.fromiter(sequences, dtype=np.int64)]
        rows = np.concatenate(
            [np.arange(self.offsets[i], self.offsets[i + 1]) for i in chosen] or [np.zeros(0, np.int64)]
        )
        optional = {n: getattr(self, n)[rows] for n in self._optional_names()}
        offsets = np.concatenate([[0], np.cumsum(self.lengths[chosen])]).astype(np.int64)
        return RouteTrace(self.header, self.experts[rows], offsets, self.status[rows], **optional)

    def __getitem__(self, index: int | slice) -> RouteTrace:
        return self.select(index if isinstance(index, slice) else [index])

    def _optional_names(self) -> list[str]:
        return [name for name in (*TOKEN_ARRAYS, *ROUTE_AXES) if getattr(self, name) is not None]

    @classmethod
    def concatenate(cls, traces: Sequence[RouteTrace]) -> RouteTrace:
        """Join traces along the sequences.

        Raises:
            TraceError: for no trace at all, or traces whose headers or optional arrays differ.
        """
        if not traces:
            raise TraceError("traces: expected at least one trace to join, found none")
        first = traces[0]
        for i, trace in enumerate(traces):
            if trace.header != first.header:
                raise TraceError(
                    f"traces: the header of trace {i} differs: {trace.header!r}, expected {first.header!r}"
                )
            if trace._optional_names() != first._optional_names():
                raise TraceError(
                    f"traces: trace {i} carries {trace._optional_names()}, expected {first._optional_names()}"
                )
        if any(t.status.ndim == 2 for t in traces):
            status = np.concatenate([_per_layer(t.status, t.header.num_layers) for t in traces])
        else:
            status = np.concatenate([t.status for t in traces])
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([t.lengths for t in traces]))]).astype(np.int64)
        optional = {n: np.concatenate([getattr(t, n) for t in traces]) for n in first._optional_names()}
        experts = np.concatenate([t.experts for t in traces])
        return cls(first.header, experts, offsets, status, **optional)

    # ---------------------------------------------------------------- files

    def payload_sha256(self) -> str:
        """SHA-256 over header and arrays, in a fixed order."""
        sha = hashlib.sha256(self.header.model_dump_json().encode())
        for name, array in sorted(self._arrays().items()):
            sha.update(f"{name}:{array.dtype.str}:{array.shape}".encode())
            sha.update(np.ascontiguousarray(array).data)
        return sha.hexdigest()

    def _arrays(self) -> dict[str, np.ndarray]:
        names = ("experts", "offsets", "status", *self._optional_names())
        return {name: getattr(self, name) for name in names}

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file whose metadata carries header, token digest and payload SHA-256."""
        path = Path(path)
        metadata = {"rar_trace": self.header.model_dump_json(), "payload_sha256": self.payload_sha256()}
        if self.token_digest is not None:
            metadata["token_digest"] = self.token_digest
        partial = path.with_name(path.name + ".partial")
        save_file({n: np.ascontiguousarray(a) for n, a in self._arrays().items()}, partial, metadata=metadata)
        partial.replace(path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> RouteTrace:
        """Map a trace file into memory; the arrays are read when they are used. `verify()` checks the payload.

        Raises:
            TraceError: for a file that is not there, is no trace, or holds arrays of other shapes than its header says.
        """
        path = Path(path)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                arrays = {name: _as_numpy(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise TraceError(f"{path}: expected a trace file, found nothing there") from None
        except (SafetensorError, OSError) as error:
            raise TraceError(f"{path}: expected a safetensors file, found: {error}") from error
        if "rar_trace" not in metadata or "payload_sha256" not in metadata:
            raise TraceError(f"{path}: expected the metadata of a route trace, found keys {sorted(metadata)}")
        try:
            header = TraceHeader.model_validate_json(metadata["rar_trace"])
        except ValidationError as error:
            raise TraceError(f"{path}: header: {error}") from error
        allowed = {"experts", "offsets", "status", *TOKEN_ARRAYS, *ROUTE_AXES}
        if not {"experts", "offsets", "status"} <= set(arrays) <= allowed:
            raise TraceError(
                f"{path}: expected arrays experts, offsets, status and some of {sorted(allowed)}, found {sorted(arrays)}"
            )
        return cls(header, **arrays, _stored_sha256=metadata["payload_sha256"])

    def is_intact(self) -> bool:
        """False if the payload is not the one whose SHA-256 the file carries; True for traces made in memory."""
        return self._stored_sha256 is None or self.payload_sha256() == self._stored_sha256

    def verify(self) -> None:
        """Check every value, and the payload against the SHA-256 that the file carries.

        Raises:
            TraceError: if a byte of the payload changed since it was written, or the content contradicts itself.
        """
        if not self.is_intact():
            raise TraceError(f"payload: expected SHA-256 {self._stored_sha256}, found {self.payload_sha256()}")
        self._check_values()

    def equals(self, other: RouteTrace) -> bool:
        """True if header and every array are equal, bit for bit (NaN equals NaN)."""
        mine, theirs = self._arrays(), other._arrays()
        return (
            self.header == other.header
            and mine.keys() == theirs.keys()
            and all(
                a.dtype == theirs[n].dtype and a.shape == theirs[n].shape and a.tobytes() == theirs[n].tobytes()
                for n, a in mine.items()
            )
        )

    # ---------------------------------------------------------------- showing

    def _facts(self) -> list[tuple[str, str]]:
        header, coverage = self.header, self.coverage()
        layers = header.moe_layers
        shown = f"{layers[0]}..{layers[-1]}" if layers == tuple(range(layers[0], layers[-1] + 1)) else str(list(layers))
        return [
            ("source", header.source),
            ("producer", f"{header.producer} {header.producer_version}".strip()),
            ("model", header.model_id or "not named"),
            ("sequences", f"{self.num_sequences}"),
            ("tokens", f"{self.num_tokens}"),
            ("MoE layers", f"{header.num_layers} ({shown})"),
            ("experts", f"top-{header.top_k} of {header.num_experts} ({self.experts.dtype})"),
            *((name, "no cell" if share is None else f"{share:.4f}") for name, share in coverage.items()),
            ("also carries", ", ".join(self._optional_names()) or "nothing"),
        ]

    def __repr__(self) -> str:
        return "RouteTrace(" + ", ".join(f"{name}={value}" for name, value in self._facts()) + ")"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(v)}</td></tr>" for n, v in self._facts())
        return f"<table><caption>RouteTrace</caption><tbody>{rows}</tbody></table>"

    def summary(self) -> dict[str, Any]:
        """The header and sizes as plain values, for a JSON file."""
        return {**json.loads(self.header.model_dump_json()), "tokens": self.num_tokens, **self.coverage()}


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    try:
        return tensor.numpy()
    except TypeError as error:
        raise TraceError(f"expected arrays of numpy's types, found {tensor.dtype}: {error}") from None
