"""Tiny random models of every supported family, and an independent rule from router logits to gate weights for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

Rule = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip


def softmax_all(logits: torch.Tensor, ids: torch.Tensor, config: Any) -> torch.Tensor:
    """Softmax over all experts, then gather; renormalised where the config says so."""
    weights = logits.softmax(-1).gather(-1, ids)
    return weights / weights.sum(-1, keepdim=True) if getattr(config, "norm_topk_prob", True) else weights


def softmax_selected(logits: torch.Tensor, ids: torch.Tensor, config: Any) -> torch.Tensor:
    """Softmax over the selected logits only."""
    return logits.gather(-1, ids).softmax(-1)


def sigmoid_scaled(logits: torch.Tensor, ids: torch.Tensor, config: Any) -> torch.Tensor:
    """Unbiased sigmoid scores, normalised, times a scaling factor."""
    weights = logits.sigmoid().gather(-1, ids)
    if getattr(config, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(config, "routed_scaling_factor", 1.0)


@dataclass(frozen=True)
class Family:
    """A model type with its sizes, its rule, and the MoE layers that it should have."""

    model_type: str
    sizes: dict[str, Any]
    rule: Rule
    layers: tuple[int, ...] = (0, 1, 2)


MLA = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
       "num_key_value_heads": 4}  # fmt: skip
FAMILIES = {
    "qwen3_moe": Family("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
                                      "norm_topk_prob": True, "mlp_only_layers": [1]}, softmax_all, (0, 2)),
    "olmoe": Family("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False}, softmax_all),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, softmax_all),
    "qwen2_moe": Family("qwen2_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                                      "shared_expert_intermediate_size": 16, "norm_topk_prob": False,
                                      "decoder_sparse_step": 2}, softmax_all, (1,)),
    "glm4_moe": Family("glm4_moe", {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
                                    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                                    "routed_scaling_factor": 1.5, "norm_topk_prob": True}, sigmoid_scaled, (1, 2)),
    "deepseek_v3": Family("deepseek_v3", {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                                          "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
                                          "routed_scaling_factor": 2.5, "norm_topk_prob": True, **MLA},
                          sigmoid_scaled, (1, 2)),
    "gpt_oss": Family("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16,
                                  "layer_types": ["full_attention"] * 3}, softmax_selected),
    "granitemoe": Family("granitemoe", {"num_local_experts": 8, "num_experts_per_tok": 2}, softmax_selected),
    "minimax_m2": Family("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4},
                         sigmoid_scaled),
    "ernie4_5_moe": Family("ernie4_5_moe", {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16,
                                            "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
                                            "moe_layer_end_index": -1, "moe_layer_interval": 1}, softmax_all, (1, 2)),
}  # fmt: skip


def build(family: Family, seed: int = 0, **more: Any) -> Any:
    """A random fp32 model in evaluation mode; routers and score biases are large enough to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family.model_type, **{**COMMON, **family.sizes, **more})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "e_score_correction_bias" in name:
                tensor.copy_(torch.randn_like(tensor) * 0.1)
            elif tensor.dim() >= 2:
                tensor.copy_(torch.randn_like(tensor) * (0.5 if tensor.shape[0] in (4, 8) else 0.15))
    return model


def router_logits(router: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of a router from its input, in fp32."""
    return F.linear(hidden.reshape(-1, hidden.shape[-1]).float(), router.weight.float(), getattr(router, "bias", None))
