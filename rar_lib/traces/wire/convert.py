"""From a dump to a RouteTrace: rows placed on their tokens, layers mapped by number, and nothing trusted that cannot be.

A route that is not there becomes `missing`. Whatever contradicts itself is refused with its place: a row count that is neither T nor
T - 1, a layer axis that fits neither all layers nor the MoE layers, ids that cannot be, an expert named twice. The same rules give the
doctor its verdicts; here they are errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rar_lib.errors import TraceError, UndecidedError
from rar_lib.traces.layers import ModelShape
from rar_lib.traces.scan import Cells, scan
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader
from rar_lib.traces.verdicts import Verdict, listed, verdict
from rar_lib.traces.wire.dump import Dump, Sample


def shape_of(dump: Dump, model: ModelShape | None, payload_layers: tuple[int, ...] | None = None) -> ModelShape:
    """The routers that a dump speaks of: the caller's, or what the file itself says.

    Raises:
        UndecidedError: if neither says how many experts there are and which layers are MoE layers.
    """
    if model is not None:
        return model
    layers = payload_layers or dump.payload_layers
    if dump.num_experts is not None and dump.top_k is not None and layers is not None:
        return ModelShape(dump.num_experts, dump.top_k, tuple(sorted(layers)), model_id=dump.model_id)
    raise UndecidedError(
        f"{dump.path}: {dump.format} does not say how many experts a layer has and which layers are MoE layers; give the model's "
        f"config.json (model=, --model)"
    )


def positions(
    dump: Dump, length: int, model: ModelShape, payload_layers: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Where the MoE layers lie on a layer axis of this length.

    Args:
        dump: whose producer counts all layers, MoE layers, or says nothing.
        length: of the axis.
        model: the routers.
        payload_layers: transformer layer number of each position, which decides where it is given.

    Raises:
        TraceError: if the axis does not fit what the producer writes; the message says what would.
    """
    named = payload_layers or dump.payload_layers
    moe = len(model.moe_layers)
    hint = "name them by number (payload_layers, --layers), or check that the config belongs to this dump"
    if length == moe:
        hint = f"{length} is the number of its MoE layers: if these are meant, name them (--layers {listed(model.moe_layers)}), or check that the config belongs to this dump"
    if named is not None:
        return model.axis(length, named)
    if dump.layer_axis == "all" and model.num_layers is None and length > model.moe_layers[-1]:
        return model.moe_layers
    if dump.layer_axis == "moe" and length != moe:
        raise TraceError(
            f"layer axis: {dump.format} writes MoE layers only; {length} payload layers are not the model's {moe}; {hint}"
        )
    if dump.layer_axis == "all" and model.num_layers is not None and length != model.num_layers:
        raise TraceError(
            f"layer axis: {dump.format} writes all layers; {length} payload layers are not the model's {model.num_layers}; {hint}"
        )
    return model.axis(length)


POSITIVE = 1e-3  # rounding may lift the log-prob of a certain token above 0, and not further


@dataclass(frozen=True, eq=False)
class Placed:
    """Rows of one sample on its tokens.

    Attributes:
        ids: `[T, L, K]` as written, in the producer's integer type; zeros where no row lies.
        status: `[T, L]` uint8.
        cells: what each cell of `ids` holds; flags of cells without a row are false.
        problem: a verdict that forbids to use the sample. Its rows are placed all the same for ID_WRAPPED; for any
            other there are none.
    """

    ids: np.ndarray
    status: np.ndarray
    cells: Cells
    problem: Verdict | None = None

    @property
    def bad(self) -> np.ndarray:
        """`[T, L]` bool, recorded cells that no router can have chosen."""
        cells = self.cells
        return (self.status == Status.RECORDED) & (cells.negative | cells.beyond | cells.twice)


def place(
    sample: Sample,
    index: int,
    layers: tuple[int, ...],
    top_k: int,
    num_experts: int | None,
    content_sized: bool = False,
) -> Placed:
    """Put the rows of a sample on its tokens.

    Args:
        sample: as read.
        index: its number in the dump, for the verdict.
        layers: positions of the MoE layers on its layer axis.
        top_k: K of the model.
        num_experts: E, or None where unknown.
        content_sized: see `Dump`.
    """
    tokens = sample.tokens
    status = np.full((tokens, len(layers)), Status.MISSING, np.uint8)
    if tokens:
        status[-1] = Status.LAST
    experts = sample.experts
    if experts is None:
        nothing = np.zeros((tokens, len(layers), top_k), np.uint8)
        return Placed(nothing, status, scan(nothing, None))
    rows, expected = len(experts), tokens - sample.first
    problem = None
    if experts.shape[2] != top_k:
        seen = f"{experts.shape[2]} slots, expected {top_k} experts a token"
        problem = verdict("TOPK_MISMATCH", sample.name, seen, samples=(index,))
    elif rows not in (expected, expected - 1) or (rows == 0 and expected > 1):
        seen = (
            f"{rows} rows from token {sample.first} for {tokens} tokens; expected {max(expected - 1, 0)} or {expected}"
        )
        problem = verdict("ROW_COUNT", sample.name, seen, samples=(index,), cells=rows)
    elif num_experts is not None and num_experts - 1 > np.iinfo(experts.dtype).max and not content_sized:
        seen = f"{experts.dtype} ids, which end at {np.iinfo(experts.dtype).max}, for {num_experts} experts"
        code = "ID_WRAPPED"
        problem = verdict(code, sample.name, seen, samples=(index,))
    ids = np.zeros((tokens, len(layers), top_k), experts.dtype)
    if problem is not None and problem.code != "ID_WRAPPED":
        return Placed(ids, status, scan(ids, None), problem)
    ids[sample.first : sample.first + rows] = experts[:, list(layers)]
    cells = scan(ids, num_experts)
    here = np.zeros(tokens, bool)
    here[sample.first : min(sample.first + rows, tokens - 1)] = True
    if sample.recorded is not None:
        here[sample.first : sample.first + rows] &= sample.recorded
    status[here[:, None] & ~cells.nothing] = Status.RECORDED
    return Placed(ids, status, cells, problem)


def first_problem(sample: Sample, placed: Placed, layers: tuple[int, ...]) -> str | None:
    """What forbids to make a trace of this sample, in words, or None; `layers` are the transformer layer numbers of
    the columns.
    """
    if placed.problem is not None:
        return f"{placed.problem.code}: {placed.problem.where}: {placed.problem.seen}"
    bad = placed.bad
    if not bad.any():
        return None
    token, layer = (int(i) for i in np.argwhere(bad)[0])
    cells = placed.cells
    code = (
        "ID_NEGATIVE"
        if cells.negative[token, layer]
        else "ID_OUT_OF_RANGE"
        if cells.beyond[token, layer]
        else "DUPLICATE_EXPERTS"
    )
    return f"{code}: {sample.name}, token {token}, layer {layers[layer]}: {placed.ids[token, layer].tolist()}"


def to_trace(dump: Dump, model: ModelShape | None = None, payload_layers: tuple[int, ...] | None = None) -> RouteTrace:
    """The RouteTrace of a dump. Its layer axis holds the model's MoE layers in their order.

    Token ids, rollout log-probs and weight versions go along where every sample carries them.

    Raises:
        UndecidedError: if neither model nor dump says which layers are MoE layers.
        TraceError: if the dump holds no routes, the layers do not fit the model, or a sample cannot be trusted (named with its
            code, token and layer).
    """
    routed = dump.with_routes()
    if not routed:
        raise TraceError(f"{dump.path}: {dump.format}: expected routes, found none in {len(dump.samples)} samples")
    shape = shape_of(dump, model, payload_layers)
    parts, statuses = [], []
    for i, sample in enumerate(dump.samples):
        axis = positions(
            dump,
            sample.experts.shape[1] if sample.experts is not None else routed[0][2].shape[1],
            shape,
            payload_layers,
        )
        placed = place(sample, i, axis, shape.top_k, shape.num_experts, dump.content_sized)
        problem = first_problem(sample, placed, shape.moe_layers)
        if problem is not None:
            raise TraceError(f"{dump.path}: {problem}")
        parts.append(np.where((placed.status == Status.RECORDED)[..., None], placed.ids, 0))
        statuses.append(placed.status)
    header = TraceHeader(
        num_experts=shape.num_experts, top_k=shape.top_k, moe_layers=shape.moe_layers, source=dump.source, producer=dump.format,
        producer_version=dump.producer_version, model_id=shape.model_id or dump.model_id,
    )  # fmt: skip
    status = np.concatenate(statuses)
    held = sum(max(0, min(len(experts), sample.tokens - 1 - sample.first)) for _, sample, experts in routed)
    if held and not (status == Status.RECORDED).any():
        raise TraceError(f"{dump.path}: CAPTURE_DEAD: all {held} rows are empty or zero in every MoE layer")
    if (status == status[:, :1]).all():
        status = status[:, 0]
    lengths = [sample.tokens for sample in dump.samples]
    return RouteTrace.from_packed(header, np.concatenate(parts), lengths, status, **_beside(dump))


def _beside(dump: Dump) -> dict[str, np.ndarray]:
    """Optional arrays of a trace that every sample carries."""
    out: dict[str, np.ndarray] = {}
    samples = dump.samples
    if all(s.token_ids is not None for s in samples):
        out["token_ids"] = np.concatenate([s.token_ids for s in samples if s.token_ids is not None])
    if all(s.versions is not None for s in samples):
        out["policy_version"] = np.concatenate([s.versions for s in samples if s.versions is not None])
    if all("rollout" in s.logprobs for s in samples):
        values = np.concatenate(  # producers write 0 on tokens that nobody sampled (tools, padding)
            [
                s.logprobs["rollout"]
                if s.response_mask is None
                else np.where(s.response_mask, s.logprobs["rollout"], np.nan)
                for s in samples
            ]
        )
        wild = np.flatnonzero((values > POSITIVE) | np.isinf(values) | (values < np.finfo(np.float32).min))
        if wild.size:
            sample = int(np.searchsorted(np.cumsum([s.tokens for s in samples]), wild[0], side="right"))
            raise TraceError(
                f"{dump.path}: LOGPROBS_IMPOSSIBLE: {samples[sample].name}: a log-prob of {values[wild[0]]:.6g}"
            )
        out["logprobs"] = values.astype(np.float32)
    return out
