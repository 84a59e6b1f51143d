"""What blocks capture is refused before an engine starts; what loses routes is turned off and said; memory is counted."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rar_lib.config import JobConfig
from rar_lib.engines import vllm_capture, vllm_conditions, vllm_rollout
from rar_lib.engines.session import EngineSession
from rar_lib.engines.vllm_capture import BANDS, DEVICE, HOST, SLOT_MAP, TABLE, TRANSIT, plan_capture, plan_engine
from rar_lib.engines.vllm_conditions import CONDITIONS, FUSED_KERNELS, CaptureModel
from rar_lib.engines.vllm_rollout import KV_BLOCKS, MAX_BATCHED_TOKENS
from rar_lib.errors import EngineError
from tests.conftest import SPECIAL

MODEL = CaptureModel(layers=48, top_k=8, num_experts=128)
SIZES = {"max_num_batched_tokens": 8192, "num_blocks": 1000, "block_size": 16}
VERSIONS = ("0.14.0", "0.17.1", "0.20.2", "0.21.0", "0.22.0", "0.25.1", "0.29.0", "0.30.0", "0.31.0", "1.0.0")
OLD = [v for v in VERSIONS if v < "0.30"]


def plan(version: str = "0.30.0", model: CaptureModel = MODEL, **settings: Any) -> vllm_capture.CapturePlan:
    return plan_capture(version, {**SIZES, **settings}, model)


def refused(version: str, message: str, model: CaptureModel = MODEL, **settings: Any) -> None:
    with pytest.raises(EngineError, match=message) as error:
        plan(version, model, **settings)
    assert version in str(error.value)


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("settings", "condition", "found"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism", "pipeline_parallel_size=2"),
        ({"decode_context_parallel_size": 4}, "decode context parallelism", "decode_context_parallel_size=4"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism", "prefill_context_parallel_size=2"),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "a KV connector", "NixlConnector"),
    ],
)
def test_parallelism_and_connectors_on_every_version(
    version: str, settings: dict[str, Any], condition: str, found: str
) -> None:
    refused(version, f"with {condition}: expected .*, found .*{found}.*; ", **settings)


@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("backend", ["flashinfer_trtllm", "flashinfer-cutlass"])
def test_kernels_that_report_expert_0_for_every_token(version: str, backend: str) -> None:
    refused(version, "FlashInfer MoE kernel.*set moe_backend to triton", moe_backend=backend)
    plan("0.30.0", moe_backend=backend)


@pytest.mark.parametrize(("quantization", "choice", "kernel"), FUSED_KERNELS)
def test_kernels_that_report_nothing(quantization: str, choice: str, kernel: str) -> None:
    settings = {"device": "cpu"} if choice == "cpu" else {"device": "cuda", "moe_backend": choice}
    model = CaptureModel(layers=48, top_k=8, num_experts=128, quantization=quantization)
    refused("0.30.0", f"a fused MoE kernel: .*{kernel}", model, **settings)
    refused("0.30.0", f"a fused MoE kernel: .*{kernel}", quantization=quantization, **settings)
    plan("0.30.0", **settings)
    plan("0.30.0", model, device="cuda", moe_backend="marlin")


def test_the_table_of_kernels_is_that_of_the_installed_version() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    mute = set()
    for file in Path(spec.submodule_search_locations[0], "model_executor/layers/fused_moe/experts").glob("*.py"):
        source = file.read_text()
        if "supports_routing_replay_capture" not in source:
            mute |= set(re.findall(r"class (\w+)\([^)]*FusedMoEExpertsMonolithic\)", source))
    assert mute == {kernel for *_, kernel in FUSED_KERNELS}


@pytest.mark.parametrize("version", OLD)
def test_hash_layers_and_the_second_runner_before_0_30(version: str) -> None:
    hashed = CaptureModel(layers=43, top_k=6, num_experts=256, hash_layers=3)
    refused(version, "with hash layers: .*found 3 of 43 layers", hashed)
    refused(version, "second model runner.*unset VLLM_USE_V2_MODEL_RUNNER", use_v2_model_runner=True)
    assert any("hash layers: they are captured" in s for s in plan("0.30.0", hashed).sentences)
    assert plan("0.30.0", use_v2_model_runner=True).sentences == ()


def test_speculative_decoding() -> None:
    draft = {"method": "eagle3", "num_speculative_tokens": 3}
    refused("0.19.0", "with speculative decoding: .*eagle3", speculative_config=draft)
    assert any("speculative decoding" in s for s in plan("0.30.0", speculative_config=draft).sentences)


def test_kinds_of_attention() -> None:
    hybrid = CaptureModel(48, 8, 128, layer_types=("linear_attention", "full_attention"))
    windowed = CaptureModel(48, 8, 128, layer_types=("sliding_attention",) * 48)
    refused("0.21.0", "attention of several kinds: .*found layers of linear_attention", hybrid)
    plan("0.30.0", hybrid)
    refused("0.30.0", "no full attention: .*found layers of sliding_attention", windowed)


@pytest.mark.parametrize(("version", "message"), [("0.13.0", "expected 0.14 or newer"), ("main", "expected a number")])
def test_a_version_without_capture(version: str, message: str) -> None:
    refused(version, message)


def test_a_model_without_experts() -> None:
    refused("0.30.0", "found 48 layers, 0 experts", CaptureModel(48, 0, 0))


# ------------------------------------------------------------------ turned off, and said


@pytest.mark.parametrize(
    ("version", "off"),
    [
        ("0.14.0", {"async_scheduling"}),
        ("0.20.2", {"async_scheduling"}),
        ("0.21.0", {"async_scheduling", "enable_prefix_caching"}),
        ("0.25.1", {"enable_prefix_caching"}),
        ("0.30.0", set()),
    ],
)
@pytest.mark.parametrize("asked", [None, True, False])
def test_what_loses_routes_is_turned_off_and_said(version: str, off: set[str], asked: bool | None) -> None:
    found = plan(version, async_scheduling=asked, enable_prefix_caching=asked)
    off = set() if asked is False else off
    assert found.arguments == {"enable_return_routed_experts": True, **dict.fromkeys(off, False)}
    assert {name for name in off if any(f"{name} is turned off: " in s for s in found.sentences)} == off
    assert sum("turned off" in s for s in found.sentences) == len(off)


@pytest.mark.parametrize(("version", "tried"), [(v, v == "0.30.0") for v in VERSIONS])
def test_a_version_that_was_not_tried_is_allowed_and_said(version: str, tried: bool) -> None:
    assert any("was not tried" in s for s in plan(version).sentences) is not tried


def test_a_kernel_that_the_engine_chooses_on_a_gpu() -> None:
    model = CaptureModel(36, 4, 128, quantization="gpt_oss_mxfp4")
    assert any("set it to triton" in s for s in plan("0.22.0", device="cuda").sentences)
    assert any("may choose a kernel" in s for s in plan("0.30.0", model, device="cuda").sentences)
    assert plan("0.30.0", device="cuda").sentences == ()


def test_the_form_of_the_rows() -> None:
    assert {v: plan(v).layout for v in VERSIONS if plan(v).layout != "whole"} == {"0.21.0": "split"}


def test_bands_name_known_conditions_and_are_in_order() -> None:
    assert [band.first for band in BANDS] == sorted({band.first for band in BANDS})
    assert {name for band in BANDS for name in (*band.refused, *band.said)} - {"always"} == set(CONDITIONS)


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize(("experts", "width"), [(128, 1), (256, 1), (257, 2)])
def test_bytes_by_buffer(experts: int, width: int) -> None:
    found = plan(model=CaptureModel(48, 8, experts))
    transit = 8192 * 48 * 8 * 4
    assert found.buffers == {
        (TRANSIT, DEVICE): transit,
        (TRANSIT, HOST): transit,
        (SLOT_MAP, DEVICE): 8192 * 8,
        (SLOT_MAP, HOST): 8192 * 8,
        (TABLE, HOST): 1000 * 16 * 48 * 8 * width,
    }


def test_bytes_of_older_versions() -> None:
    assert plan("0.17.0").buffers == {
        (TRANSIT, DEVICE): 8192 * 48 * 8 * 4,
        (TABLE, HOST): 1000 * 16 * 48 * 8 * 4,
    }
    assert plan("0.21.0").buffers[TABLE, HOST] == 1000 * 16 * 48 * 8 * 2


def test_more_than_the_machine_has_is_refused_with_the_numbers() -> None:
    need = sum(plan().buffers.values())
    assert plan_capture("0.30.0", SIZES, MODEL, need).buffers == plan().buffers
    with pytest.raises(EngineError, match=f"need {need:,} bytes, but the machine has {need - 1:,}"):
        plan_capture("0.30.0", SIZES, MODEL, need - 1)
    on_device = sum(size for (_, place), size in plan().buffers.items() if place == DEVICE)
    plan_capture("0.30.0", {**SIZES, "device": "cuda"}, MODEL, need - on_device)
    with pytest.raises(EngineError, match=f"need {need - on_device:,} bytes"):
        plan_capture("0.30.0", {**SIZES, "device": "cuda"}, MODEL, need - on_device - 1)


def test_what_cannot_be_estimated_is_said() -> None:
    found = plan_capture("0.30.0", {}, MODEL, 0)
    assert found.buffers == {}
    assert [s for s in found.sentences if "was not estimated" in s] == list(found.sentences)
    assert len(found.sentences) == 2


# ------------------------------------------------------------------ this machine


def test_quantization_is_read_from_the_checkpoints_config() -> None:
    four_by_eight = {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}
    for config, expected in [
        (None, None),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": four_by_eight}}, "w4a8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4}, "input_activations": None}},
            },
            "compressed-tensors",
        ),
    ]:
        assert vllm_conditions._quantization(config) == expected


def test_the_shipped_checkpoint_needs_nothing_but_the_switch(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert CaptureModel.of(checkpoint) == CaptureModel(layers=4, top_k=2, num_experts=16)
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 8}
    with caplog.at_level(logging.INFO, logger="rar"):
        assert plan_engine("0.30.0", checkpoint, settings).arguments == {"enable_return_routed_experts": True}
        assert caplog.messages == []
        assert plan_engine("0.18.0", checkpoint, settings).arguments["async_scheduling"] is False
    assert any("async_scheduling is turned off" in message for message in caplog.messages)


def test_a_form_that_the_adapter_does_not_read_is_refused_before_the_rollout(checkpoint: Path) -> None:
    with pytest.raises(EngineError, match=r"vLLM 0\.21\.0 returns the routes of prompt and response apart"):
        plan_engine("0.21.0", checkpoint, SIZES)


def test_a_machine_with_too_little_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (vllm_capture.available_memory() or 0) > 2**20
    monkeypatch.setattr(vllm_capture, "available_memory", lambda: 1000)
    with pytest.raises(EngineError, match="but the machine has 1,000 available"):
        plan_engine("0.30.0", checkpoint, SIZES)


def test_the_adapter_plans_before_it_starts_an_engine(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    fake = SimpleNamespace(__version__="0.20.0", LLM=lambda **arguments: started.append(arguments))
    monkeypatch.setitem(sys.modules, "vllm", fake)
    vllm_rollout._create(checkpoint, "float32", 512)
    capture = {"enable_return_routed_experts": True, "async_scheduling": False, "enable_prefix_caching": False}
    assert capture.items() <= started.pop().items()
    monkeypatch.setattr(vllm_capture, "available_memory", lambda: 1000)
    with pytest.raises(EngineError, match="the machine has 1,000 available"):
        vllm_rollout._create(checkpoint, "float32", 512)
    assert started == []


def test_the_live_engine_holds_what_was_estimated(engines: EngineSession, checkpoint: Path) -> None:
    rollout, _ = engines.open(JobConfig.build({}, []), checkpoint, SPECIAL)
    settings = {"max_num_batched_tokens": MAX_BATCHED_TOKENS, "num_gpu_blocks_override": KV_BLOCKS}
    expected = plan_engine(rollout.header.producer_version, checkpoint, settings).buffers
    core = rollout.llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    assert expected == {
        (TRANSIT, DEVICE): runner.routed_experts_capturer.device_buffer.nbytes,
        (TRANSIT, HOST): runner.routed_experts_cpu.nbytes,
        (SLOT_MAP, DEVICE): runner.routed_experts_slot_mapping_device.nbytes,
        (SLOT_MAP, HOST): runner.routed_experts_slot_mapping_cpu.nbytes,
        (TABLE, HOST): core.scheduler.routed_experts_mgr.routed_experts_by_slot.nbytes,
    }
    assert not core.vllm_config.scheduler_config.async_scheduling
