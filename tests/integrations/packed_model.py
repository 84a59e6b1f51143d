"""A Megatron GPTModel as trainers build it, on a CPU: stock TopKRouter with a replay object, packed sequences.

Two stand-ins: the router's gate is a plain product (the stock one asks for Transformer Engine), and local attention takes
packed sequences one by one (the stock one refuses them).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rar_lib.checkpoint import load_model_config
from rar_lib.config import TrainerConfig
from rar_lib.engines.megatron_cpu import quiet
from rar_lib.engines.megatron_model import CheckpointTensors, transformer_config
from rar_lib.engines.megatron_weights import load_weights

CHECKPOINT = Path(__file__).resolve().parents[2] / "data" / "checkpoints" / "tiny-moe"


def packed_config(recompute: bool = False) -> Any:
    """TransformerConfig of the shipped checkpoint."""
    with quiet():
        config = transformer_config(load_model_config(CHECKPOINT), TrainerConfig(recompute=recompute))
    config.calculate_per_token_loss = False
    config.finalize_model_grads_func = None  # it finishes a DDP wrapper, and there is none
    return config


def packed_model(config: Any) -> Any:
    """The model with the shipped weights. Call inside `without_cuda()`, with process groups up."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe.router import TopKRouter

    class PlainGate(TopKRouter):
        def gating(self, input: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(input, self.weight)

    class OneByOne(DotProductAttention):
        def forward(
            self,
            query: Any,
            key: Any,
            value: Any,
            attention_mask: Any,
            *args: Any,
            packed_seq_params: Any = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            ends = packed_seq_params.cu_seqlens_q_padded.tolist()
            parts = [
                super(OneByOne, self)
                .forward(*(x[a:b].unsqueeze(1) for x in (query, key, value)), future(b - a))
                .squeeze(1)
                for a, b in pairwise(ends)
            ]
            return torch.cat(parts)

    def future(length: int) -> torch.Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]

    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    spec.submodules.mlp.submodules.router = PlainGate
    spec.submodules.self_attention.submodules.core_attention = OneByOne
    hf = load_model_config(CHECKPOINT)
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings, position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"], share_embeddings_and_output_weights=False,
    )  # fmt: skip
    load_weights([model], CheckpointTensors(CHECKPOINT).read)
    return model
