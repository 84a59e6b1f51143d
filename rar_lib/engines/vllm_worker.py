"""What of ours runs inside a vLLM server: the worker's side of a weight push, and a scheduler that waits for whole waves.

    vllm ... --worker-extension-cls rar_lib.engines.vllm_worker.PushedWeights
             --scheduler-cls rar_lib.engines.vllm_worker.WaveScheduler

The worker loads what a trainer wrote, packs the experts again (vllm_rollout.py says why), and tells a fingerprint of every
parameter as it lies in memory, so that weights that came by another way are noticed, whoever pushed them and how. The
scheduler starts no request of a wave before its last has arrived: over HTTP they come one by one, and which of them
share a forward pass would decide the draws and the last bits of the log-probs.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState

from rar_lib.engines.vllm_rollout import pack_experts, reload_weights
from rar_lib.engines.vllm_serve import end_with_the_session

WAVE = "rar_wave"  # key of a request's vllm_xargs: "<name of the wave>/<its requests>"


class PushedWeights:
    """Worker extension; its methods are called over `/collective_rpc`, with strings."""

    def rar_describe(self: Any) -> dict[str, Any]:
        """What the engine is and holds: version, settings that capture depends on, stamp of the last push, fingerprint."""
        import vllm

        whole = self.vllm_config
        model, cache, parallel, scheduler = (
            whole.model_config,
            whole.cache_config,
            whole.parallel_config,
            whole.scheduler_config,
        )
        connector = whole.kv_transfer_config
        return {
            "version": vllm.__version__,
            "model": str(model.model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "enable_return_routed_experts": bool(model.enable_return_routed_experts),
            "waves": whole.scheduler_config.get_scheduler_cls().__name__ == WaveScheduler.__name__,
            "data_parallel_size": parallel.data_parallel_size,
            "settings": {
                "device": "cuda" if torch.cuda.is_available() else "cpu",
                "pipeline_parallel_size": parallel.pipeline_parallel_size,
                "decode_context_parallel_size": parallel.decode_context_parallel_size,
                "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
                "kv_transfer_config": None if connector is None else connector.kv_connector,
                "speculative_config": None if whole.speculative_config is None else whole.speculative_config.method,
                "quantization": model.quantization,
                "async_scheduling": bool(scheduler.async_scheduling),
                "enable_prefix_caching": bool(cache.enable_prefix_caching),
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
                "max_num_seqs": scheduler.max_num_seqs,
                "block_size": cache.block_size,
                "num_blocks": cache.num_gpu_blocks,
            },
            **self.rar_state(),
        }

    def rar_state(self: Any) -> dict[str, str | None]:
        """Stamp of the last push (None before the first), and fingerprints of the weights at present and as first met."""
        present = fingerprint(self.model_runner.get_model())
        if not hasattr(self, "_rar_loaded"):
            self._rar_stamp, self._rar_loaded = None, present
        return {"stamp": self._rar_stamp, "fingerprint": present, "loaded": self._rar_loaded}

    def rar_load(self: Any, file: str, stamp: str) -> dict[str, str | None]:
        """Load a safetensors file with Hugging Face names over the weights."""
        from safetensors.torch import load_file

        self.rar_state()  # as loaded, before anything is pushed
        self._rar_stamp = f"{stamp}, incomplete"
        reload_weights(self, list(load_file(file).items()))
        pack_experts(self)
        self._rar_stamp = stamp
        return self.rar_state()

    def rar_seed(self: Any, seed: str) -> None:
        """Seed the generators that sampling draws from."""
        torch.manual_seed(int(seed))


def fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over the XOR of every row and of every column of every parameter and buffer."""
    sha = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if not tensor.numel():
            continue
        table = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
        for dim in (0, 1):
            sha.update(torch.hash_tensor(table, dim).cpu().numpy().tobytes())
    return sha.hexdigest()


class WaveScheduler(AsyncScheduler):
    """vLLM's scheduler, which starts the requests of a wave together and in the order of their prompts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        end_with_the_session()  # the engine is a child of the server, which may be killed
        self._wave, self._arrived = "", 0

    def add_request(self, request: Any) -> None:
        """Queue a request; hold the queue until its wave is complete."""
        super().add_request(request)
        wave = ((request.sampling_params and request.sampling_params.extra_args) or {}).get(WAVE)
        if wave is None:
            return
        if wave != self._wave:
            self._wave, self._arrived = wave, 0
        self._arrived += 1
        whole = self._arrived == int(wave.rpartition("/")[2])
        self.set_pause_state(PauseState.UNPAUSED if whole else PauseState.PAUSED_ALL)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """A wave that loses a request, because its client is gone, holds nobody else back."""
        self.set_pause_state(PauseState.UNPAUSED)
        return super().finish_requests(*args, **kwargs)
