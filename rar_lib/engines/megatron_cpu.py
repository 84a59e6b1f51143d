"""What Megatron-Core 0.16 needs to run without a GPU and without Transformer Engine. Off where CUDA is present.

Megatron names the device "cuda" in schedules, buffers and the optimizer. Here those names are mapped to the CPU for the
duration of a `with without_cuda()`, and nothing outside it is touched, so that vLLM in the same process is unaffected.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rar_lib.config import TrainerConfig
from rar_lib.errors import EngineError

_NAMING = {torch.Tensor.cuda, torch.Tensor.to, torch.Tensor.type}  # what may name a device without the keyword


class _CudaNamesToCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _NAMING and not (kwargs and "device" in kwargs):  # nearly every call
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = dict(kwargs or {})
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and any(_is_cuda(a) for a in args[1:]):
            args = (args[0], *("cpu" if _is_cuda(a) else a for a in args[1:]))
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1:  # the optimizer asserts these names
            return out.replace("torch.", "torch.cuda.", 1)
        return out


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Map Megatron's device names to the CPU while it builds, computes or steps."""
    if torch.cuda.is_available():
        yield
        return
    random = import_megatron().tensor_parallel.random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    stand_ins: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "Stream", _NoStream),  # asked for by a dispatcher that then has no use for it
        (MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _splits_as_lists),
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda *_: None),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    ]
    before = [getattr(owner, name) for owner, name, _ in stand_ins]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    try:
        with _CudaNamesToCpu(), quiet():
            yield
    finally:
        for (owner, name, _), function in zip(stand_ins, before, strict=True):
            setattr(owner, name, function)


class _NoStream:
    """Stands in for torch.cuda.Stream, a class, since annotations name it while modules are imported."""


def _splits_as_lists(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """In place of copies from a device on a side stream: what the collectives take, split sizes in lists."""
    if point == "before_ep_alltoall":
        for name in ("input_splits", "output_splits"):
            value = getattr(dispatcher, name)
            setattr(dispatcher, name, value.tolist() if isinstance(value, torch.Tensor) else value)
    return tokens_per_expert


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Megatron warns a dozen times that Transformer Engine and Apex are missing; here that is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def import_megatron() -> Any:
    """The module megatron.core, with its compiled helpers left uncompiled on a CPU.

    Raises:
        EngineError: if Megatron-Core is not installed.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    try:
        with quiet():
            import megatron.core.jit as jit

            if not torch.cuda.is_available():
                jit.disable_jit_fuser()  # decorators are applied at import, so this comes before everything else
            import megatron.core
            import megatron.core.distributed
            import megatron.core.models.gpt.gpt_layer_specs
            import megatron.core.optimizer
            import megatron.core.tensor_parallel.random
    except ImportError as error:
        raise EngineError(
            f"trainer.engine megatron: Megatron-Core is not installed ({error}); install the extra rar-lib[megatron]"
        ) from None
    return megatron.core


def start_parallel_state(config: TrainerConfig | None = None) -> None:
    """Bring up torch.distributed (gloo on a CPU, NCCL on GPUs) and Megatron's process groups for a layout, by default of one process.

    A group of one process is made in memory, without a port. Groups that exist with the same sizes are kept.

    Raises:
        EngineError: if torch.distributed has another number of processes than the layout.
    """
    config = TrainerConfig() if config is None else config
    core = import_megatron()
    state = core.parallel_state
    if not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    world = torch.distributed.get_world_size()
    if world != config.processes:
        raise EngineError(f"trainer.processes: expected {config.processes}, found a process group of {world}")
    sizes = (
        config.tensor_parallel, config.pipeline_parallel, config.expert_parallel, config.expert_tensor_parallel, config.virtual_pipeline,
    )  # fmt: skip
    if state.model_parallel_is_initialized():
        present = (
            state.get_tensor_model_parallel_world_size(),
            state.get_pipeline_model_parallel_world_size(),
            state.get_expert_model_parallel_world_size(),
            state.get_expert_tensor_parallel_world_size(),
            state.get_virtual_pipeline_model_parallel_world_size() or 1,
        )
        if present == sizes:
            return
        state.destroy_model_parallel()
        present_groups = _all_groups()
        for group in _GROUPS:  # Megatron forgets most of them, and each holds threads and sockets
            if group in present_groups:
                torch.distributed.destroy_process_group(group)
        _GROUPS.clear()
    before = set(_all_groups())
    with without_cuda():
        state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
            expert_model_parallel_size=config.expert_parallel,
            expert_tensor_parallel_size=config.expert_tensor_parallel,
        )
        core.tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=not torch.cuda.is_available())
    if world > 1:
        _GROUPS.extend(group for group in _all_groups() if group not in before)


_GROUPS: list[Any] = []  # of the present layout


def _all_groups() -> list[Any]:
    return list(torch.distributed.distributed_c10d._world.pg_map)


def stop_parallel_state() -> None:
    """Forget Megatron's process groups, if there are any."""
    state = import_megatron().parallel_state
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
