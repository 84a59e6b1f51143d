"""Which transformer layers are MoE layers, by a model's config.

Producers write routes for all layers or for MoE layers only; families put dense layers first, in between, or nowhere.
The rule is in the config, under another name in each family; here they are in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rar_lib.errors import TraceError


def moe_layer_numbers(config: Any) -> tuple[int, ...]:
    """Transformer layer numbers (from 0) with routed experts.

    Args:
        config: a Transformers config, or the mapping of a `config.json`.

    Rules, first that applies: `mlp_layer_types` ("sparse"; GLM4-MoE-Lite), `first_k_dense_replace` (DeepSeek, GLM4-MoE),
    `moe_layer_start_index/end_index/interval` (Ernie 4.5), `mlp_only_layers` and `decoder_sparse_step` (Qwen), else
    every layer (Mixtral, OLMoE, GPT-OSS, Granite, MiniMax).

    Raises:
        TraceError: if the number of layers is not in the config.
    """

    def get(name: str, default: Any = None) -> Any:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return default if value is None else value

    total = get("num_hidden_layers")
    if total is None:
        raise TraceError("config: expected `num_hidden_layers`, not found")
    layers = range(total)
    if get("mlp_layer_types"):
        return tuple(i for i in layers if get("mlp_layer_types")[i] == "sparse")
    if get("first_k_dense_replace") is not None:
        step = get("moe_layer_freq", 1)
        return tuple(i for i in layers if i >= get("first_k_dense_replace") and i % step == 0)
    if get("moe_layer_start_index") is not None:
        last = get("moe_layer_end_index", -1)
        last = total - 1 if last == -1 else last
        step = get("moe_layer_interval", 1)
        return tuple(i for i in layers if get("moe_layer_start_index") <= i <= last and (i + 1) % step == 0)
    dense, step = get("mlp_only_layers", ()), get("decoder_sparse_step", 1)
    return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)
