"""What vLLM needs to capture every route, decided before it starts.

A rollout whose routes turn out missing is paid for and worthless, so what is known to lose them is refused here, and
what can be turned off is turned off and said. Each range of versions has one row in `BANDS`; what may stand in the way
is one entry of `CONDITIONS` (vllm_conditions.py). Neither imports vLLM, so both are tested on any machine.

Where the rows come from: 0.30 was read and run. 0.14 to 0.29 were not run; their rows hold what vLLM's threads say:
- 28284 (0.14): one int32 array in shared memory, to be used without asynchronous scheduling, which nothing checks;
- 39917 (0.21): prompt and response apart, rows gone at preemption, zeros for prefix hits, asynchronous steps rejected;
- 39568 (0.22): the table by KV slot of today; NeMo-RL documents rows missing with prefix caching (it pins 0.25);
- 44116, 50721 (mid 2026): FlashInfer kernels returned zeros and the second model runner nothing, until some version
  below 0.30.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from rar_lib.engines.vllm_conditions import (
    CONDITIONS,
    PARALLEL,
    CaptureModel,
    Settings,
    device_of,
    effective_quantization,
    moe_backend,
)
from rar_lib.errors import EngineError

logger = logging.getLogger("rar")

Layout = Literal["whole", "split"]
BLOCK_SIZE = {"cpu": 128}  # tokens a KV block where none is set (vLLM's platforms/cpu.py); 16 elsewhere
TRANSIT, SLOT_MAP, TABLE = "routes of one step", "slots of one step", "routes by KV slot"
HOST, DEVICE = "host", "device"


@dataclass(frozen=True)
class CapturePlan:
    """How an engine is to be started so that it returns every route.

    Attributes:
        arguments: engine arguments beyond the user's, or in place of them.
        sentences: what was turned off, not checked or not tried, and why.
        buffers: bytes by name of the buffer and place, `(name, "host" or "device")`.
        layout: `whole` is one array of P + O - 1 rows and a row for each decoder layer; `split` is prompt and response
            apart, with MoE layers only.
    """

    arguments: Mapping[str, Any]
    sentences: tuple[str, ...]
    buffers: Mapping[tuple[str, str], int]
    layout: Layout


# -------------------------------------------------------------------- versions


@dataclass(frozen=True)
class Band:
    """What one range of versions does; it ends where the next begins.

    Attributes:
        first: lowest `(major, minor)`.
        refused: names of CONDITIONS.
        turned_off: engine argument that is set to False -> why.
        said: condition that is allowed, or `always` -> what to say of it.
        id_bytes: bytes of an expert id in the buffer of one step.
        host_copy: whether that buffer has a copy in host memory, with maps of slots beside it.
        table_bytes: bytes of an expert id in the table by KV slot; 0 means 1 up to 256 experts and 2 above.
    """

    first: tuple[int, int]
    refused: tuple[str, ...]
    layout: Layout = "whole"
    turned_off: Mapping[str, str] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)
    id_bytes: int = 4
    host_copy: bool = True
    table_bytes: int = 0


BANDS = (
    Band(
        (0, 14),
        (
            *PARALLEL,
            "speculative decoding",
            "the second model runner",
            "hash layers",
            "attention of several kinds",
            "a FlashInfer MoE kernel",
        ),
        turned_off={"async_scheduling": "capture was written for synchronous steps, and the engine checks nothing"},
        host_copy=False,
        table_bytes=4,
    ),
    Band(
        (0, 21),
        (
            *PARALLEL,
            "the second model runner",
            "hash layers",
            "attention of several kinds",
            "a FlashInfer MoE kernel",
        ),
        layout="split",
        turned_off={
            "async_scheduling": "the engine rejects it together with capture",
            "enable_prefix_caching": "the rows of tokens found in the prefix cache are zeros",
        },
        said={"always": "a preempted request loses its rows: give the engine KV blocks for every request at once"},
        id_bytes=2,
        table_bytes=2,
    ),
    Band(
        (0, 22),
        (*PARALLEL, "the second model runner", "hash layers", "no full attention", "a FlashInfer MoE kernel"),
        turned_off={"enable_prefix_caching": "together with chunked prefill it was seen to lose rows (0.25)"},
    ),
    Band(
        (0, 30),
        (*PARALLEL, "no full attention", "a fused MoE kernel"),
        said={
            "speculative decoding": "the routes of accepted tokens are returned; this was read, not tried",
            "hash layers": "they are captured, but follow from the token alone, so replaying them changes nothing",
        },
    ),
)
TRIED = (0, 30)


def _band(version: str) -> tuple[tuple[int, int], Band]:
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None:
        raise EngineError(f"vLLM's version: expected a number as 0.30.0, found {version!r}; install a release")
    number = (int(found[1]), int(found[2]))
    bands = [band for band in BANDS if band.first <= number]
    if not bands:
        oldest = ".".join(map(str, BANDS[0].first))
        raise EngineError(
            f"vLLM {version} cannot capture routed experts: expected {oldest} or newer, found {version}; install vLLM 0.30"
        )
    return number, bands[-1]


# -------------------------------------------------------------------- the plan


def plan_capture(
    version: str, settings: Settings, model: CaptureModel, available_bytes: int | None = None
) -> CapturePlan:
    """Decide whether and how an engine can capture every route.

    Args:
        version: vLLM's version; one newer than the newest known is judged as that one, with a sentence.
        settings: engine arguments by vLLM's names, those left out being its defaults. Beside them: `num_blocks` KV
            blocks, `device` (`cpu` unless given) and `use_v2_model_runner`, true where the environment forces it.
        model: what is to be captured.
        available_bytes: memory of the host; None leaves it unchecked.

    Raises:
        EngineError: naming what blocks capture, what was found and what to do; or the bytes that do not fit.
    """
    number, band = _band(version)
    if min(model.layers, model.top_k, model.num_experts) < 1:
        raise EngineError(
            f"vLLM {version} cannot capture routed experts: expected a model with layers, experts and a top-k, found "
            f"{model.layers} layers, {model.num_experts} experts, top-k {model.top_k}; choose a mixture-of-experts model"
        )
    for name in band.refused:
        condition = CONDITIONS[name]
        if found := condition.found(settings, model):
            raise EngineError(
                f"vLLM {version} cannot capture routed experts with {name}: expected {condition.expected}, found {found} "
                f"({condition.why}); {condition.remedy}"
            )
    off = {name: why for name, why in band.turned_off.items() if settings.get(name) is not False}
    sentences = [f"vLLM {version}: {name} is turned off: {why}" for name, why in off.items()]
    sentences += [f"vLLM {version}: {text}" for text in _said(number, band, settings, model)]
    buffers, unknown = _buffers(band, settings, model)
    sentences += [f"vLLM {version}: memory of {name} was not estimated: {why}" for name, why in unknown.items()]
    _require_memory(version, buffers, available_bytes, device_of(settings))
    arguments = {"enable_return_routed_experts": True, **dict.fromkeys(off, False)}
    return CapturePlan(MappingProxyType(arguments), tuple(sentences), MappingProxyType(buffers), band.layout)


def _said(number: tuple[int, int], band: Band, settings: Settings, model: CaptureModel) -> list[str]:
    said = [
        f"{name}: {text}" if name != "always" else text
        for name, text in band.said.items()
        if name == "always" or CONDITIONS[name].found(settings, model)
    ]
    if number > TRIED:
        said.append(
            "capture was not tried with a version above 0.30, whose rules are used; vLLM's documentation after it asks for "
            "prefix caching and the second model runner"
        )
    elif number < TRIED:
        said.append("capture was not tried with this version; its rules are those that vLLM's threads tell of")
    if moe_backend(settings) == "auto" and device_of(settings) != "cpu":
        if "a FlashInfer MoE kernel" in band.refused:
            said.append("moe_backend auto may choose a FlashInfer kernel, which returns zeros: set it to triton")
        elif effective_quantization(settings, model).endswith("mxfp4"):
            said.append(
                "moe_backend auto may choose a kernel that cannot be captured; the engine then refuses at start"
            )
    return said


def _buffers(band: Band, settings: Settings, model: CaptureModel) -> tuple[dict[tuple[str, str], int], dict[str, str]]:
    """Bytes by buffer and place, and for each buffer that cannot be estimated what is missing."""
    row = model.layers * model.top_k
    sizes: dict[tuple[str, str], int] = {}
    unknown = {}
    if tokens := settings.get("max_num_batched_tokens"):
        sizes[TRANSIT, DEVICE] = tokens * row * band.id_bytes
        if band.host_copy:
            sizes[TRANSIT, HOST] = sizes[TRANSIT, DEVICE]
            sizes |= {(SLOT_MAP, place): tokens * 8 for place in (DEVICE, HOST)}
    else:
        unknown[TRANSIT] = "max_num_batched_tokens is not given"
    if blocks := settings.get("num_blocks"):
        block_size = settings.get("block_size") or BLOCK_SIZE.get(device_of(settings), 16)
        sizes[TABLE, HOST] = blocks * block_size * row * (band.table_bytes or (1 if model.num_experts <= 256 else 2))
    else:
        unknown[TABLE] = "num_blocks is not given"
    return sizes, unknown


def _require_memory(
    version: str, buffers: Mapping[tuple[str, str], int], available_bytes: int | None, device: str
) -> None:
    """The device's buffers lie in the host's memory where the device is the CPU."""
    places = {HOST, DEVICE} if device == "cpu" else {HOST}
    parts = {f"{name} ({place})": size for (name, place), size in buffers.items() if place in places}
    total = sum(parts.values())
    if available_bytes is not None and total > available_bytes:
        listed = ", ".join(f"{name} {size:,}" for name, size in parts.items())
        raise EngineError(
            f"vLLM {version}: the buffers of captured routes need {total:,} bytes, but the machine has {available_bytes:,} "
            f"available (bytes: {listed}); lower num_gpu_blocks_override or max_num_batched_tokens"
        )


# -------------------------------------------------------------------- this machine


def plan_engine(version: str, path: Path, arguments: Settings) -> CapturePlan:
    """Plan capture for a checkpoint on this machine, and log what was turned off or is not known.

    Args:
        version: vLLM's version.
        path: checkpoint folder.
        arguments: engine arguments that `vllm.LLM` is to be called with; those left out are its defaults.

    Raises:
        EngineError: see `plan_capture`; also if the version returns routes in a form that the adapter does not read.
    """
    here = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "use_v2_model_runner": os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1",
        "num_blocks": arguments.get("num_gpu_blocks_override"),
    }
    plan = plan_capture(version, {**here, **arguments}, CaptureModel.of(path), available_memory())
    if plan.layout != "whole":
        raise EngineError(
            f"vLLM {version} returns the routes of prompt and response apart: expected one array; install vLLM 0.30"
        )
    for sentence in plan.sentences:
        logger.info(sentence)
    return plan


def available_memory() -> int | None:
    """Bytes of host memory that a process may take without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:  # counts free pages only, not those that a cache would give back
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
