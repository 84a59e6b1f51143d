"""What may stand in the way of vLLM's capture of routes: settings and models under which some never reach the caller.

A condition says what capture asks for, what is wrong otherwise and the way out, and finds itself in engine arguments and a model. Which
version suffers from which condition is said in vllm_capture.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rar_lib.checkpoint import load_model_config, router_header

Settings = Mapping[str, Any]
WINDOWED = {"sliding_attention", "chunked_attention", "linear_attention"}  # layers whose KV slots are reused or absent


@dataclass(frozen=True)
class CaptureModel:
    """What capture depends on in a model.

    Attributes:
        layers: decoder layers, dense ones included, since the engine's buffers have a row for each.
        top_k: experts a token.
        num_experts: routed experts a layer.
        quantization: as the checkpoint names its method (`mxfp4`, ...); `w4a8` for 4-bit weights with 8-bit activations.
        hash_layers: layers that choose experts by token id and not by a router.
        layer_types: kind of attention of each layer, where the config says so.
    """

    layers: int
    top_k: int
    num_experts: int
    quantization: str | None = None
    hash_layers: int = 0
    layer_types: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: Path) -> CaptureModel:
        """The model of a checkpoint folder.

        Raises:
            ReplayError: if it has no routers, or some that cannot be replayed.
        """
        config, header = load_model_config(path).get_text_config(), router_header(path)
        hashed = [kind == "hash_moe" for kind in getattr(config, "mlp_layer_types", None) or ()]
        return cls(
            layers=config.num_hidden_layers,
            top_k=header.top_k,
            num_experts=header.num_experts,
            quantization=_quantization(getattr(config, "quantization_config", None)),
            hash_layers=sum(hashed) or getattr(config, "num_hash_layers", None) or 0,
            layer_types=tuple(getattr(config, "layer_types", None) or ()),
        )


def _quantization(config: Any) -> str | None:
    if config is None:
        return None
    config = config if isinstance(config, Mapping) else config.to_dict()
    for group in (config.get("config_groups") or {}).values():
        bits = [(group.get(part) or {}).get("num_bits") for part in ("weights", "input_activations")]
        if bits == [4, 8]:
            return "w4a8"
    return config.get("quant_method")


@dataclass(frozen=True)
class Condition:
    """A setting or a model that capture does not survive: what is asked for, what is wrong otherwise and the way out."""

    expected: str
    why: str
    remedy: str
    found: Callable[[Settings, CaptureModel], str | None]


def _above_one(name: str) -> Callable[[Settings, CaptureModel], str | None]:
    return lambda settings, model: f"{name}={settings[name]}" if (settings.get(name) or 1) > 1 else None


def _connector(settings: Settings, model: CaptureModel) -> str | None:
    found = settings.get("kv_transfer_config")
    name = found.get("kv_connector") if isinstance(found, Mapping) else getattr(found, "kv_connector", found)
    return f"kv_transfer_config with {name}" if name else None


def _speculative(settings: Settings, model: CaptureModel) -> str | None:
    found = settings.get("speculative_config")
    return f"speculative_config={found}" if found else None


def _second_runner(settings: Settings, model: CaptureModel) -> str | None:
    return "VLLM_USE_V2_MODEL_RUNNER=1" if settings.get("use_v2_model_runner") else None


def _hash_layers(settings: Settings, model: CaptureModel) -> str | None:
    return f"{model.hash_layers} of {model.layers} layers" if model.hash_layers else None


def _windowed(settings: Settings, model: CaptureModel) -> str | None:
    found = WINDOWED & set(model.layer_types)
    return f"layers of {', '.join(sorted(found))}" if found else None


def _only_windowed(settings: Settings, model: CaptureModel) -> str | None:
    return _windowed(settings, model) if set(model.layer_types) <= WINDOWED else None


def moe_backend(settings: Settings) -> str:
    """The kernel of the experts that is asked for, in vLLM's spelling; `auto` if none is."""
    return str(settings.get("moe_backend") or "auto").lower().replace("-", "_")


def _flashinfer(settings: Settings, model: CaptureModel) -> str | None:
    backend = moe_backend(settings)
    return f"moe_backend={backend}" if backend.startswith("flashinfer") else None


# Kernels of 0.30 that choose experts inside and cannot report them: (quantization, what selects the kernel, its name).
FUSED_KERNELS = (
    ("mxfp4", "triton", "OAITritonMxfp4ExpertsMonolithic"),
    ("mxfp4", "aiter_triton_mxfp4_bf16", "AiterW4A16ExpertsMonolithic"),
    ("mxfp4", "aiter_mxfp4_fp8", "AiterW4A8ExpertsMonolithic"),
    ("w4a8", "cpu", "CPUExpertsInt4"),
)


def _fused_kernel(settings: Settings, model: CaptureModel) -> str | None:
    quantization, chosen = effective_quantization(settings, model), {moe_backend(settings), device_of(settings)}
    for method, choice, kernel in FUSED_KERNELS:
        if quantization.endswith(method) and choice in chosen:  # gpt-oss names its method gpt_oss_mxfp4
            return f"quantization {quantization} on {choice}, which runs {kernel}"
    return None


def effective_quantization(settings: Settings, model: CaptureModel) -> str:
    """The checkpoint's own comes first: an engine argument only repeats it or chooses a loader for it."""
    return model.quantization or str(settings.get("quantization") or "")


def device_of(settings: Settings) -> str:
    """Where the engine computes; `cpu` unless given."""
    return str(settings.get("device") or "cpu")


CONDITIONS: Mapping[str, Condition] = {
    "pipeline parallelism": Condition(
        "pipeline_parallel_size=1",
        "the layers of other stages never reach the scheduler",
        "use tensor or expert parallelism",
        _above_one("pipeline_parallel_size"),
    ),
    "decode context parallelism": Condition(
        "decode_context_parallel_size=1",
        "the rows of other ranks have no slot in the table",
        "set it to 1",
        _above_one("decode_context_parallel_size"),
    ),
    "prefill context parallelism": Condition(
        "prefill_context_parallel_size=1",
        "the rows of other ranks have no slot in the table",
        "set it to 1",
        _above_one("prefill_context_parallel_size"),
    ),
    "a KV connector": Condition(
        "no kv_transfer_config",
        "keys that come from elsewhere bring no routes along",
        "prefill and decode in one engine, without KV offload",
        _connector,
    ),
    "speculative decoding": Condition(
        "no speculative_config",
        "every MoE layer of the process is captured, so a draft may write over the model's rows",
        "leave it off or use vLLM 0.30",
        _speculative,
    ),
    "the second model runner": Condition(
        "the first model runner",
        "below 0.30 the second returns no routes",
        "unset VLLM_USE_V2_MODEL_RUNNER or use vLLM 0.30",
        _second_runner,
    ),
    "hash layers": Condition(
        "a router in every MoE layer",
        "that their table lookups are captured is known of 0.30 only",
        "use vLLM 0.30",
        _hash_layers,
    ),
    "attention of several kinds": Condition(
        "full attention in every layer",
        "the table is too small for several groups of KV blocks, and the engine dies in the middle of a rollout",
        "use vLLM 0.30",
        _windowed,
    ),
    "no full attention": Condition(
        "full attention in one layer at least",
        "routes are kept by the KV slots of such a layer",
        "roll out with the hf engine",
        _only_windowed,
    ),
    "a FlashInfer MoE kernel": Condition(
        "a kernel that is handed its experts",
        "it chooses experts inside and every route is returned as expert 0",
        "set moe_backend to triton or use vLLM 0.30",
        _flashinfer,
    ),
    "a fused MoE kernel": Condition(
        "a kernel that is handed its experts or reports them",
        "it chooses experts inside and reports none",
        "set moe_backend to another (marlin or triton_unfused for mxfp4), or use an unquantized checkpoint",
        _fused_kernel,
    ),
}
PARALLEL = ("pipeline parallelism", "decode context parallelism", "prefill context parallelism", "a KV connector")
