"""Which transformer layers are MoE layers, by a model's config.

Producers write routes for all layers or for MoE layers only; families put dense layers first, in between, or nowhere.
The rule is in the config, under another name in each family; here they are in one place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rar_lib.errors import TraceError

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "experts_per_token",
    "top_k_experts",
)


def moe_layer_numbers(config: Any) -> tuple[int, ...]:
    """Transformer layer numbers (from 0) with routed experts.

    Args:
        config: a Transformers config, or the mapping of a `config.json`.

    Rules, first that applies: `mlp_layer_types` ("sparse"; GLM4-MoE-Lite), a list `moe_layer_freq`, `first_k_dense_replace`
    (DeepSeek, GLM4-MoE) or `num_dense_layers` (AFMoE, LFM2), `moe_layer_start_index/end_index/interval` (Ernie 4.5),
    `expert_layer_period/offset` (Jamba), `moe_layers` or `interleave_moe_layer_step` (Llama 4), `mlp_only_layers` and
    `decoder_sparse_step` (Qwen), else every layer (Mixtral, OLMoE, GPT-OSS, Granite, MiniMax).

    Raises:
        TraceError: if the number of layers is not in the config, or its rule for MoE layers is not one of these.
    """

    def get(name: str, default: Any = None) -> Any:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return default if value is None else value

    total = get("num_hidden_layers")
    if total is None:
        raise TraceError("config: expected `num_hidden_layers`, not found")
    if not isinstance(total, int):
        raise TraceError(f"config: num_hidden_layers: expected an integer, found {total!r:.60}")
    layers = range(total)
    kinds = get("mlp_layer_types")
    if kinds:
        strange = sorted(set(kinds) - {"dense", "sparse", "moe"})
        if strange or len(kinds) != total:
            raise TraceError(
                f"config: mlp_layer_types: expected {total} of dense, sparse or moe, found {len(kinds)} with {strange}"
            )
        return tuple(i for i in layers if kinds[i] != "dense")
    unknown = [
        key for key in ("hybrid_override_pattern", "layers_block_type", "moe_layers_enum") if get(key) is not None
    ]
    if unknown:
        raise TraceError(
            f"config: which layers are MoE layers lies in {unknown[0]}, which is not read; name them (payload_layers)"
        )
    frequency = get("moe_layer_freq", 1)
    if isinstance(frequency, Sequence):
        if len(frequency) != total:
            raise TraceError(f"config: moe_layer_freq: expected {total} values, found {len(frequency)}")
        return tuple(i for i in layers if frequency[i])
    for key in ("first_k_dense_replace", "num_dense_layers"):
        if get(key) is not None:
            return tuple(i for i in layers if i >= get(key) and i % frequency == 0)
    if get("moe_layer_start_index") is not None:
        last = get("moe_layer_end_index", -1)
        last = total - 1 if last == -1 else last
        step = get("moe_layer_interval", 1)
        return tuple(i for i in layers if get("moe_layer_start_index") <= i <= last and (i + 1) % step == 0)
    if get("expert_layer_period") is not None:
        return tuple(i for i in layers if i % get("expert_layer_period") == get("expert_layer_offset", 0))
    if get("moe_layers"):
        return tuple(sorted(int(i) for i in get("moe_layers")))
    if get("interleave_moe_layer_step") is not None:
        return tuple(i for i in layers if (i + 1) % get("interleave_moe_layer_step") == 0)
    dense, step = get("mlp_only_layers", ()), get("decoder_sparse_step", 1)
    return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)


@dataclass(frozen=True)
class ModelShape:
    """What a model's config says of its routers.

    Attributes:
        num_experts: E, routed experts a layer.
        top_k: K, experts a token.
        moe_layers: transformer layer numbers (from 0) of the MoE layers.
        num_layers: all transformer layers; None where only the MoE layers are known.
        model_id: a name to show.

    Raises:
        TraceError: for K outside 1..E, or layer numbers that do not rise or lie beyond `num_layers`.
    """

    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]
    num_layers: int | None = None
    model_id: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.num_experts:
            raise TraceError(f"model: expected 0 < K <= E, found K {self.top_k} and E {self.num_experts}")
        if not self.moe_layers or list(self.moe_layers) != sorted(set(self.moe_layers)) or self.moe_layers[0] < 0:
            raise TraceError(f"model: expected MoE layer numbers that rise from 0 or more, found {self.moe_layers}")
        if self.num_layers is not None and self.moe_layers[-1] >= self.num_layers:
            raise TraceError(f"model: MoE layer {self.moe_layers[-1]} is not among {self.num_layers} layers")

    @classmethod
    def from_config(cls, config: Any, model_id: str = "") -> ModelShape:
        """From a Transformers config or the mapping of a `config.json`; a `text_config` inside is looked into.

        Raises:
            TraceError: if experts, experts per token or layers are not in it.
        """
        config = config if isinstance(config, Mapping) else config.to_dict()
        if isinstance(config.get("text_config"), Mapping) and config.get("num_hidden_layers") is None:
            config = config["text_config"]
        found = []
        for what, keys in (("the number of routed experts", EXPERT_KEYS), ("the experts per token", TOP_K_KEYS)):
            told = [(key, config[key]) for key in keys if config.get(key) is not None]
            if not told:
                raise TraceError(f"config: expected {what} under one of {', '.join(keys)}, found none of them")
            key, value = told[0]
            if isinstance(value, list | tuple) and len(set(map(str, value))) == 1:  # one a layer, all equal
                value = value[0]
            if not isinstance(value, int) or isinstance(value, bool):
                raise TraceError(f"config: {key}: expected one integer for all layers, found {value!r:.60}")
            found.append(value)
        return cls(found[0], found[1], moe_layer_numbers(config), int(config["num_hidden_layers"]), model_id)

    @classmethod
    def load(cls, source: ModelShape | Mapping[str, Any] | str | Path) -> ModelShape:
        """From a shape, a config's mapping, a `config.json`, or the folder of a checkpoint.

        Raises:
            TraceError: if there is no such file, or it is not a model's config.
        """
        if isinstance(source, ModelShape):
            return source
        if isinstance(source, Mapping):
            return cls.from_config(source)
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_bytes())
        except OSError as error:
            raise TraceError(f"{path}: expected a model's config.json: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}: expected JSON: {error}") from None
        if not isinstance(config, dict):
            raise TraceError(f"{path}: expected a JSON object, found {type(config).__name__}")
        try:
            return cls.from_config(config, model_id=path.parent.name)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None

    def axis(self, length: int, payload_layers: Sequence[int] | None = None) -> tuple[int, ...]:
        """Positions on a producer's layer axis that hold the MoE layers, in their order.

        Args:
            length: of the axis.
            payload_layers: transformer layer number of each position; without it, an axis as long as all layers is
                taken as all of them, one as long as the MoE layers as these.

        Raises:
            TraceError: if the axis fits neither, or lacks a MoE layer.
        """
        if payload_layers is not None:
            numbers = list(payload_layers)
            if len(numbers) != length or len(set(numbers)) != length:
                raise TraceError(f"payload_layers: expected {length} different layer numbers, found {numbers}")
            absent = sorted(set(self.moe_layers) - set(numbers))
            if absent:
                raise TraceError(f"payload_layers: MoE layers {absent} are not on the axis {numbers}")
            return tuple(numbers.index(layer) for layer in self.moe_layers)
        if length == self.num_layers:
            return self.moe_layers
        if length == len(self.moe_layers):
            return tuple(range(length))
        every = f"{self.num_layers} layers" if self.num_layers is not None else "an unknown number of layers"
        raise TraceError(
            f"layer axis: {length} payload layers fit neither {every} nor the {len(self.moe_layers)} MoE layers; name them by "
            f"number (payload_layers, --layers)"
        )
