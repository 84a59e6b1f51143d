"""Weights between Hugging Face names and the parameters that a Megatron process holds of them, both ways.

A process holds the layers of its pipeline stage, the experts of its expert-parallel rank, and of some tensors a slice: rows of
column-parallel matrices, columns of row-parallel ones, rows of the embeddings. Every slice of a Megatron parameter is a slice
of each Hugging Face tensor behind it, so that a tensor is cut and put together under its Hugging Face name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rar_lib.engines.megatron_cpu import import_megatron
from rar_lib.engines.slices import Shard, join_slices
from rar_lib.errors import EngineError

PLAIN = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", 0),
    "decoder.final_layernorm.weight": ("model.norm.weight", None),
    "output_layer.weight": ("lm_head.weight", 0),
}
PLAIN_IN_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.linear_qkv.layer_norm_weight": (
        "input_layernorm.weight",
        None,
    ),  # Transformer Engine's fused module
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.router.weight": ("mlp.gate.weight", None),
}


@dataclass(frozen=True)
class Mapped:
    """A Megatron parameter and the Hugging Face tensors that it holds.

    Attributes:
        names: in the order in which they are joined.
        kind: `plain`, `qkv` (interleaved by KV group) or `gate_up`.
        dim: along which tensor parallelism cuts each of them; None where every process has the whole.
        expert: the cut is that of expert tensor parallelism.
    """

    names: tuple[str, ...]
    kind: str
    dim: int | None
    expert: bool = False


@dataclass(frozen=True)
class Place:
    """(rank, size) of this process in the groups that cut weights, and whether it speaks for its replicas."""

    tensor: tuple[int, int]
    expert_tensor: tuple[int, int]
    expert: tuple[int, int]
    first_of_dense: bool
    first_of_expert: bool

    @classmethod
    def here(cls) -> Place:
        """Of the present process groups."""
        state = import_megatron().parallel_state
        return cls(
            (state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
            (state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
            (state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
            state.get_data_parallel_rank() == 0,
            state.get_expert_data_parallel_rank() == 0,
        )

    def cut(self, mapped: Mapped) -> tuple[int, int]:
        """(index, count) of this process's slice."""
        if mapped.dim is None:
            return 0, 1
        return self.expert_tensor if mapped.expert else self.tensor


def map_name(name: str) -> Mapped:
    """The Hugging Face tensors behind a Megatron parameter, layers and experts numbered from the start of the model.

    Raises:
        EngineError: for a parameter that the map does not know.
    """
    if name in PLAIN:
        return Mapped((PLAIN[name][0],), "plain", PLAIN[name][1])
    head, _, rest = name.removeprefix("decoder.layers.").partition(".")
    base = f"model.layers.{head}"
    if rest in PLAIN_IN_LAYER:
        theirs, dim = PLAIN_IN_LAYER[rest]
        return Mapped((f"{base}.{theirs}",), "plain", dim)
    if rest == "self_attention.linear_qkv.weight":
        return Mapped(tuple(f"{base}.self_attn.{p}_proj.weight" for p in "qkv"), "qkv", 0)
    expert, _, part = rest.removeprefix("mlp.experts.local_experts.").partition(".")
    if part == "linear_fc1.weight":
        names = tuple(f"{base}.mlp.experts.{expert}.{p}_proj.weight" for p in ("gate", "up"))
        return Mapped(names, "gate_up", 0, expert=True)
    if part == "linear_fc2.weight":
        return Mapped((f"{base}.mlp.experts.{expert}.down_proj.weight",), "plain", 1, expert=True)
    raise EngineError(f"Megatron parameter {name!r}: no Hugging Face counterpart is known")


def global_names(chunks: Iterable[Any], place: Place) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of this process, layers and experts numbered from the start of the model."""
    for chunk in chunks:
        numbers = {str(i): layer.layer_number - 1 for i, layer in enumerate(chunk.decoder.layers)}
        per_rank = chunk.config.num_moe_experts // place.expert[1]
        for name, parameter in chunk.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(numbers[parts[2]])
                if "local_experts" in parts:
                    at = parts.index("local_experts") + 1
                    parts[at] = str(int(parts[at]) + place.expert[0] * per_rank)
            yield ".".join(parts), parameter


def join(tensors: Sequence[torch.Tensor], kind: str, config: Any, parts: int = 1) -> torch.Tensor:
    """Hugging Face tensors, or slices of them, to one Megatron parameter.

    Args:
        tensors: `[out, in]` each (`[H]` of a norm), in the order of `Mapped.names`.
        kind: `plain`; `qkv`, rows interleaved by KV group (its query heads, k, v); `gate_up`, one above the other.
        config: Megatron's TransformerConfig.
        parts: slices that tensor parallelism cuts each into.
    """
    if kind == "qkv":
        groups, width = config.num_query_groups // parts, tensors[0].shape[-1]
        return torch.cat([t.reshape(groups, -1, width) for t in tensors], 1).reshape(-1, width)
    return tensors[0] if kind == "plain" else torch.cat(list(tensors))


def split(tensor: torch.Tensor, kind: str, config: Any, parts: int = 1) -> list[torch.Tensor]:
    """The inverse of `join`: `[out, in]` tensors (`[H]` of a norm) of one parameter."""
    if kind == "qkv":
        groups, size, width = config.num_query_groups // parts, config.kv_channels, tensor.shape[-1]
        per_group = config.num_attention_heads // config.num_query_groups
        pieces = tensor.reshape(groups, -1, width).split([per_group * size, size, size], 1)
        return [p.reshape(-1, width) for p in pieces]
    return [tensor] if kind == "plain" else list(tensor.chunk(2))


def load_weights(
    chunks: Sequence[Any],
    read: Callable[[str], torch.Tensor | None],
    into: Callable[[torch.nn.Parameter, torch.Tensor], Any] = torch.Tensor.copy_,
) -> set[str]:
    """Give every parameter of this process its part of Hugging Face named tensors.

    Args:
        chunks: GPTModels.
        read: a whole tensor of any shape by its name, or None.
        into: what to do with a parameter and its value, by default copy it in place; called without a graph.

    Returns:
        The names that were read.

    Raises:
        EngineError: if a tensor is missing or of another shape.
    """
    place, used = Place.here(), set()
    with torch.no_grad():
        for name, parameter in global_names(chunks, place):
            mapped = map_name(name)
            index, count = place.cut(mapped)
            found = {n: read(n) for n in mapped.names}
            missing = [n for n, tensor in found.items() if tensor is None]
            if missing:
                raise EngineError(f"Megatron parameter {name}: expected the tensors {missing}, not found")
            cut = [
                t if mapped.dim is None else t.chunk(count, mapped.dim)[index] for t in found.values() if t is not None
            ]
            value = join(cut, mapped.kind, chunks[0].config, count)
            if value.shape != parameter.shape:
                raise EngineError(
                    f"Megatron parameter {name}: expected shape {tuple(parameter.shape)}, found {tuple(value.shape)}"
                )
            into(parameter, value)
            used |= set(mapped.names)
    return used


def hf_shards(
    chunks: Sequence[Any], value: Callable[[torch.nn.Parameter], torch.Tensor] = torch.Tensor.detach
) -> Iterator[Shard]:
    """What this process has to say of every Hugging Face tensor: nothing of what a replica before it holds too.

    Args:
        chunks: GPTModels.
        value: what to take of a parameter of any shape, in that shape: itself, its gradient, its moments.

    Yields:
        Slices as views where nothing is rearranged.
    """
    place = Place.here()
    for name, parameter in global_names(chunks, place):
        mapped = map_name(name)
        if place.first_of_expert if mapped.expert else place.first_of_dense:
            index, count = place.cut(mapped)
            pieces = split(value(parameter), mapped.kind, chunks[0].config, count)
            for theirs, piece in zip(mapped.names, pieces, strict=True):
                yield Shard(theirs, piece, mapped.dim, index, count)


def put_together(shards: Iterable[Shard]) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors of any shape by name from the slices of all processes, in the order in which they first come.

    Raises:
        EngineError: if a slice is missing.
    """
    found: dict[str, dict[int, Shard]] = {}
    for shard in shards:
        found.setdefault(shard.name, {}).setdefault(shard.index, shard)
    for name, pieces in found.items():
        one = next(iter(pieces.values()))
        yield name, join_slices(name, {i: piece.tensor for i, piece in pieces.items()}, one.dim, one.count)
