"""A Megatron-Core GPTModel for a Hugging Face MoE: its config, layer spec and the weight map, both ways.

The layer spec is Megatron's local one, with the routers of megatron_router.py: their replay object is this library's
SelectionPoint, one a router, instead of Megatron's RouterReplay, whose process-global list mixes models and whose
backward queue leaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rar_lib.checkpoint import load_model_config
from rar_lib.config import TrainerConfig
from rar_lib.engines.base import NamedTensors
from rar_lib.engines.megatron_cpu import import_megatron
from rar_lib.engines.megatron_router import point_router
from rar_lib.errors import EngineError

SUPPORTED = ("qwen3_moe",)


def transformer_config(hf: Any, trainer: TrainerConfig) -> Any:
    """Megatron's TransformerConfig for a Transformers config.

    Raises:
        EngineError: for a family whose weight map is not written, naming those that are.
    """
    import_megatron()
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    if hf.model_type not in SUPPORTED:
        raise EngineError(
            f"trainer.engine megatron: no weight map for model type {hf.model_type!r}; there is one for "
            f"{', '.join(SUPPORTED)}; the hf trainer takes any Transformers MoE"
        )
    dense = [
        i for i in range(hf.num_hidden_layers) if i in (hf.mlp_only_layers or []) or (i + 1) % hf.decoder_sparse_step
    ]
    if dense or hf.attention_bias or hf.tie_word_embeddings or hf.use_sliding_window:
        raise EngineError(
            "trainer.engine megatron: expected MoE in every layer, no attention bias, untied embeddings and no sliding "
            f"window; found dense layers {dense}, attention_bias {hf.attention_bias}, tie_word_embeddings "
            f"{hf.tie_word_embeddings}, use_sliding_window {hf.use_sliding_window}"
        )
    rope = hf.rope_parameters
    if (
        rope.get("rope_type", "default") != "default"
        or rope.get("partial_rotary_factor", 1.0) != 1.0
        or hf.hidden_act != "silu"
    ):
        raise EngineError(
            f"trainer.engine megatron: expected plain rotary embeddings and silu, found {rope} and {hf.hidden_act!r}"
        )
    low = trainer.dtype == "bfloat16"
    dtype = torch.bfloat16 if low else torch.float32
    recompute = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if trainer.recompute
        else {}
    )
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        ffn_hidden_size=hf.intermediate_size,
        num_moe_experts=hf.num_experts,
        moe_router_topk=hf.num_experts_per_tok,
        moe_ffn_hidden_size=hf.moe_intermediate_size,
        moe_router_pre_softmax=not hf.norm_topk_prob,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="allgather",
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        bf16=low,
        pipeline_dtype=dtype,
        batch_p2p_sync=False,
        use_cpu_initialization=True,
        perform_initialization=False,  # every weight is loaded, and a forgotten one is an error
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        moe_permute_fusion=False,
        moe_router_fusion=False,
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        expert_model_parallel_size=trainer.expert_parallel,
        expert_tensor_parallel_size=trainer.expert_tensor_parallel,
        sequence_parallel=trainer.tensor_parallel > 1,
        **recompute,
    )


def build_model(path: Path, trainer: TrainerConfig) -> Any:
    """A GPTModel on the present process groups with the weights of a checkpoint folder. Call inside `without_cuda()`."""
    import_megatron()
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    hf = load_model_config(path)
    config = transformer_config(hf, trainer)

    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    spec.submodules.mlp.submodules.router = point_router()
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=False,
    )
    load_hf_weights(model, _checkpoint_tensors(path))
    return model


def _checkpoint_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


# ---------------------------------------------------------------- weight map

PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
PLAIN_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


@dataclass(frozen=True)
class Mapped:
    """A Megatron parameter and the Hugging Face tensors that it holds, in the order in which they are joined."""

    names: tuple[str, ...]
    kind: str  # "plain", "qkv" or "gate_up"


def map_name(name: str) -> Mapped:
    """The Hugging Face tensors behind a Megatron parameter (layers numbered from the start of the model).

    Raises:
        EngineError: for a parameter that the map does not know.
    """
    if name in PLAIN:
        return Mapped((PLAIN[name],), "plain")
    head, _, rest = name.removeprefix("decoder.layers.").partition(".")
    base = f"model.layers.{head}"
    if rest in PLAIN_IN_LAYER:
        return Mapped((f"{base}.{PLAIN_IN_LAYER[rest]}",), "plain")
    if rest == "self_attention.linear_qkv.weight":
        return Mapped(tuple(f"{base}.self_attn.{p}_proj.weight" for p in "qkv"), "qkv")
    expert, _, part = rest.removeprefix("mlp.experts.local_experts.").partition(".")
    if part == "linear_fc1.weight":
        return Mapped(tuple(f"{base}.mlp.experts.{expert}.{p}_proj.weight" for p in ("gate", "up")), "gate_up")
    if part == "linear_fc2.weight":
        return Mapped((f"{base}.mlp.experts.{expert}.down_proj.weight",), "plain")
    raise EngineError(f"Megatron parameter {name!r}: no Hugging Face counterpart is known")


def join(tensors: list[torch.Tensor], kind: str, config: Any) -> torch.Tensor:
    """Hugging Face tensors to one Megatron parameter; qkv is interleaved by KV group: [its query heads; k; v]."""
    if kind == "qkv":
        groups, width = config.num_query_groups, tensors[0].shape[-1]
        parts = [t.reshape(groups, -1, width) for t in tensors]
        return torch.cat(parts, 1).reshape(-1, width)
    return tensors[0] if kind == "plain" else torch.cat(tensors)


def split(tensor: torch.Tensor, kind: str, config: Any) -> list[torch.Tensor]:
    """The inverse of `join`."""
    if kind == "qkv":
        groups, size, width = config.num_query_groups, config.kv_channels, tensor.shape[-1]
        per_group = config.num_attention_heads // groups
        parts = tensor.reshape(groups, -1, width).split([per_group * size, size, size], 1)
        return [p.reshape(-1, width) for p in parts]
    return [tensor] if kind == "plain" else list(tensor.chunk(2))


def load_hf_weights(model: Any, weights: NamedTensors) -> None:
    """Put Hugging Face named weights into a Megatron model, in place.

    Raises:
        EngineError: if a tensor is missing, left over, or of another shape.
    """
    given = dict(weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mapped = map_name(name)
            missing = [n for n in mapped.names if n not in given]
            if missing:
                raise EngineError(f"Megatron parameter {name}: expected the tensors {missing}, not found")
            value = join([given.pop(n) for n in mapped.names], mapped.kind, model.config)
            if value.shape != parameter.shape:
                raise EngineError(
                    f"Megatron parameter {name}: expected shape {tuple(parameter.shape)}, found {tuple(value.shape)}"
                )
            parameter.copy_(value)
    if given:
        raise EngineError(f"tensors that the Megatron model does not hold: {sorted(given)[:5]}")


def hf_weights(named_parameters: NamedTensors, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Megatron parameters as Hugging Face tensors."""
    for name, parameter in named_parameters:
        mapped = map_name(name)
        yield from zip(mapped.names, split(parameter.detach(), mapped.kind, config), strict=True)
