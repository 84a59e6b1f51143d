"""A Megatron-Core GPTModel for a Hugging Face MoE, on the process groups of a layout: its config and layer spec.

The layer spec is Megatron's local one, on GPUs that of Transformer Engine where it is installed (not run on a GPU), with the routers of megatron_router.py: their replay object is this library's
SelectionPoint, one a router, instead of Megatron's RouterReplay, whose process-global list mixes models and whose
backward queue leaks.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from rar_lib.checkpoint import load_model_config
from rar_lib.config import TrainerConfig
from rar_lib.engines.megatron_cpu import import_megatron
from rar_lib.engines.megatron_router import point_router
from rar_lib.engines.megatron_weights import Place, global_names, load_weights, map_name
from rar_lib.errors import EngineError

SUPPORTED = ("qwen3_moe",)


def transformer_config(hf: Any, trainer: TrainerConfig) -> Any:
    """Megatron's TransformerConfig for a Transformers config.

    Raises:
        EngineError: if Megatron-Core is not installed; see also `require_layout`.
    """
    import_megatron()
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    require_layout(hf, trainer)
    low = trainer.dtype == "bfloat16"
    dtype = torch.bfloat16 if low else torch.float32
    recompute: dict[str, Any] = {}
    if trainer.recompute:
        recompute = {"recompute_granularity": trainer.recompute_granularity} | (
            {"recompute_method": "uniform", "recompute_num_layers": 1}
            if trainer.recompute_granularity == "full"
            else {"recompute_modules": ["core_attn", "moe"]}
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
        moe_token_dispatcher_type=trainer.dispatcher,
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
        # In one batch with two stages, activations and gradients for the same peer would be matched by their order alone.
        batch_p2p_comm=trainer.virtual_pipeline == 1,
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
        virtual_pipeline_model_parallel_size=trainer.virtual_pipeline if trainer.virtual_pipeline > 1 else None,
        expert_model_parallel_size=trainer.expert_parallel,
        expert_tensor_parallel_size=trainer.expert_tensor_parallel,
        sequence_parallel=trainer.tensor_parallel > 1,
        **recompute,
    )


def require_layout(hf: Any, trainer: TrainerConfig) -> None:
    """Refuse a model that Megatron cannot build here, and a layout that does not divide it or is known to compute something else.

    Args:
        hf: Transformers config.
        trainer: sizes.

    Raises:
        EngineError: for a family whose weight map is not written, naming those that are; for a layout one line a fault: what must
            divide what, and both numbers.
    """
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
    tensor, pipeline, virtual = trainer.tensor_parallel, trainer.pipeline_parallel, trainer.virtual_pipeline
    faults = [
        f"{name} {size} must divide {what}, found {number}"
        for name, size, what, number in (
            ("tensor_parallel", tensor, "num_attention_heads", hf.num_attention_heads),
            ("tensor_parallel", tensor, "num_key_value_heads", hf.num_key_value_heads),
            ("tensor_parallel", tensor, "vocab_size", hf.vocab_size),
            ("pipeline_parallel x virtual_pipeline", pipeline * virtual, "num_hidden_layers", hf.num_hidden_layers),
            ("expert_parallel", trainer.expert_parallel, "num_experts", hf.num_experts),
            (
                "expert_tensor_parallel",
                trainer.expert_tensor_parallel,
                "moe_intermediate_size",
                hf.moe_intermediate_size,
            ),
        )
        if number % size
    ]
    if (
        trainer.dispatcher == "alltoall"
        and trainer.expert_parallel > 1
        and trainer.expert_tensor_parallel > 1
        and not torch.cuda.is_available()
    ):
        faults.append(
            f"dispatcher alltoall with expert_parallel {trainer.expert_parallel} and expert_tensor_parallel "
            f"{trainer.expert_tensor_parallel} needs collectives of unequal sizes that gloo does not have; use allgather"
        )
    if faults:
        raise EngineError("trainer: " + "\ntrainer: ".join(faults))


@functools.cache
def _norm() -> type:
    """Torch's RMSNorm, whose weight Megatron sums over tensor-parallel ranks where these hold different tokens."""

    class Norm(torch.nn.RMSNorm):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__(hidden_size, eps=eps)
            self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    return Norm


def _layer_spec(config: Any) -> tuple[Any, Any]:
    """(spec of a layer, class of the final norm)."""
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_layer_local_spec

    if torch.cuda.is_available() and HAVE_TE:
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True
        )
        spec.submodules.mlp.submodules.router = point_router()
        return spec, TENorm
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = attention.q_layernorm = attention.k_layernorm = _norm()
    layer.mlp.submodules.router = point_router()
    return spec, _norm()


def build_chunks(path: Path, trainer: TrainerConfig) -> list[Any]:
    """The GPTModels of this process (one a virtual pipeline stage) with the weights of a checkpoint. Call inside `without_cuda()`.

    Raises:
        EngineError: for a model or layout that is not supported, or a checkpoint with tensors that no parameter takes.
    """
    core = import_megatron()
    state = core.parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    hf = load_model_config(path)
    config = transformer_config(hf, trainer)
    spec, final_norm = _layer_spec(config)
    chunks = []
    for number in range(trainer.virtual_pipeline):
        stage = number if trainer.virtual_pipeline > 1 else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[spec] * get_num_layers_to_build(config, stage), layer_norm=final_norm
            ),
            vocab_size=hf.vocab_size,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            parallel_output=False,
            position_embedding_type="rope",
            rotary_base=hf.rope_parameters["rope_theta"],
            share_embeddings_and_output_weights=False,
            vp_stage=stage,
        )
        for name, parameter in global_names([chunk], Place.here()):
            dim = map_name(name).dim
            if (
                dim is not None
            ):  # Megatron says so while it initialises; the gradient norm counts what is not cut once a group
                core.tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dim, 1)
            if ".local_experts." in name and trainer.expert_tensor_parallel != trainer.tensor_parallel:
                parameter.allreduce = False  # type: ignore[attr-defined]  # with EP = 1 Megatron would sum their gradients over the wrong group
        chunks.append(chunk)
    tensors = CheckpointTensors(path)
    used = load_weights(chunks, tensors.read)
    if trainer.processes == 1 and (left := tensors.names() - used):
        raise EngineError(f"tensors that the Megatron model does not hold: {sorted(left)[:5]}")
    return chunks


def build_model(path: Path) -> Any:
    """The GPTModel of a checkpoint in one process. Call inside `without_cuda()`. Raises as `build_chunks`."""
    return build_chunks(path, TrainerConfig())[0]


class CheckpointTensors:
    """Tensors of a checkpoint folder (`*.safetensors`) by name, read when they are asked for."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        for file in sorted(path.glob("*.safetensors")):
            opened = safe_open(file, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def read(self, name: str) -> torch.Tensor | None:
        """A whole tensor of any shape, or None if there is none of this name."""
        return self._files[name].get_tensor(name) if name in self._files else None
