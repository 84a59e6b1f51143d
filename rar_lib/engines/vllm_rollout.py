"""The real rollout: vLLM in process, with its own capture of routed experts, and weights pushed in place.

What this adapter does beside calling vLLM, and why:
- After every weight update it packs the expert weights again. vLLM packs them while loading from disk and skips that in
  an update: the engine then computes with scrambled experts and reports no error. `check_sync` proves the update path:
  it pushes other weights and asks for other log-probs, then the weights that were loaded and the very same log-probs.
- It empties the prefix cache after an update (old keys and old routes would come back), keeps every prefill in one
  piece, and seeds the engine instead of the requests (a per-request seed with a chunked prefill kills the engine).
- It checks that every sequence brings exactly P + O - 1 rows of routes.
- One engine a process: a second would break the first. EngineSession owns it.
Not run on a GPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rar_lib.checkpoint import SpecialTokens, load_model_config, router_header, seeded
from rar_lib.config import RolloutConfig, SamplingConfig
from rar_lib.engines.base import NamedTensors, RolloutResult, TokenBatch
from rar_lib.engines.hf_rollout import pack_rollout, require_length
from rar_lib.engines.precision import at_precision
from rar_lib.engines.served import halved, probe_batch, require_other_scores, require_same_scores
from rar_lib.engines.vllm_capture import plan_engine
from rar_lib.errors import EngineError
from rar_lib.seeding import derive_seed

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
MAX_SEQUENCES = 512
MAX_BATCHED_TOKENS = 16384
KV_BLOCKS = 512
KV_BYTES = 2**30  # given as a number, so that vLLM does not ask for a share of the machine's memory


class VLLMRollout:
    """See `Rollout` in base.py.

    Args:
        path: checkpoint folder.
        config: dtype of the engine and precision of the weights that are pushed.
        special: tokens that end and pad a response.

    Raises:
        EngineError: if vLLM is missing, cannot capture routes or compute the model, or its update path does not reproduce
            its loading path.
    """

    name = "vllm"

    def __init__(self, path: Path, config: RolloutConfig, special: SpecialTokens) -> None:
        self.config, self.special = config, special
        self.header = router_header(path).model_copy(
            update={"source": "rollout", "producer": "vllm", "model_id": path.name}
        )
        self.max_length = longest_sequence(path)
        with _foreign_seeds_undone(), starting_vllm():
            self.llm = _create(path, config.dtype, self.max_length)
        import vllm

        self.header = self.header.model_copy(update={"producer_version": vllm.__version__})
        self.weight_version = -1
        self._probe = probe_batch(load_model_config(path).get_text_config().vocab_size, special.pad)
        try:
            self._fresh = self.rescore(self._probe, SamplingConfig())
        except EngineError:
            raise
        except RuntimeError as error:  # what vLLM's kernels do not take, they say at the first forward
            self.shutdown()
            raise EngineError(
                f"rollout.engine vllm: vLLM {vllm.__version__} cannot compute {path} here: {error}; rollout.engine hf can"
            ) from error

    def reconfigure(self, config: RolloutConfig) -> None:
        """Another precision or sampling for the same engine; the dtype is fixed at creation.

        Raises:
            EngineError: for another dtype.
        """
        if config.dtype != self.config.dtype:
            raise EngineError(
                f"rollout.dtype: this engine was created with {self.config.dtype}, asked for {config.dtype}"
            )
        self.config = config

    # ---------------------------------------------------------------- weights

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """See `Rollout.load_weights`: rounds to the configured precision, pushes, packs the experts, drops the prefix cache."""
        self._push(list(at_precision(weights, self.config.precision)))
        self.weight_version = version

    def _push(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.llm.collective_rpc(reload_weights, args=(weights,))
        self.llm.collective_rpc(pack_experts)
        self.llm.reset_prefix_cache()

    def check_sync(self, weights: NamedTensors) -> None:
        """Prove the update path: halved weights must give other log-probs, the checkpoint's own those of loading it.

        Args:
            weights: the checkpoint's weights as a trainer hands them over, before any update; left in the engine as
                version -1.

        Raises:
            EngineError: if none differs under the halved weights, or one under the checkpoint's.
        """
        own = list(weights)
        self.weight_version = -1
        self._push(list(halved(own)))
        require_other_scores("vLLM", self._fresh, self.rescore(self._probe, SamplingConfig()))
        self._push(own)
        require_same_scores("vLLM", self._fresh, self.rescore(self._probe, SamplingConfig()))

    # ---------------------------------------------------------------- sampling and scoring

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, uids: Sequence[str], seed: int
    ) -> RolloutResult:
        """See `Rollout.generate`."""
        from vllm import SamplingParams

        started = time.perf_counter()
        for uid, prompt in zip(uids, prompts, strict=True):
            require_length(uid, len(prompt), sampling.max_new_tokens, self.max_length)
        params = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            logprobs=0,
            stop_token_ids=list(self.special.end),
            detokenize=False,
            skip_clone=True,  # alike for all and changed by none; a deep copy a prompt took a fifth of a rollout's profile
        )
        outputs = []
        for number, wave in enumerate(waves([len(p) for p in prompts])):
            with seeded(derive_seed(seed, number)):
                outputs += self._run([prompts[i] for i in wave], params)
        responses, scores, routes = [], [], []
        for uid, prompt, out in zip(uids, prompts, outputs, strict=True):
            answer = out.outputs[0]
            tokens = tuple(answer.token_ids)
            responses.append(tokens)
            scores.append(tuple(step[token].logprob for step, token in zip(answer.logprobs, tokens, strict=True)))
            routes.append(self._routes(answer.routed_experts, uid, len(prompt) + len(tokens) - 1))
        header = self.header.model_copy(update={"sampling": sampling.model_dump()})
        trace = pack_rollout(header, prompts, responses, scores, routes, self.weight_version)
        return RolloutResult(tuple(responses), tuple(scores), trace, self.weight_version, time.perf_counter() - started)

    def _run(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        from vllm.inputs import TokensPrompt

        return self.llm.generate([TokensPrompt(prompt_token_ids=list(p)) for p in prompts], params, use_tqdm=False)

    def _routes(self, routed: Any, uid: str, rows: int) -> np.ndarray:
        if routed is None:
            raise EngineError(f"prompt {uid}: vLLM returned no routes")
        routed = np.asarray(routed)
        layers = self.header.moe_layers
        if (
            routed.ndim != 3
            or len(routed) != rows
            or routed.shape[1] <= layers[-1]
            or routed.shape[2] != self.header.top_k
        ):
            raise EngineError(
                f"prompt {uid}: expected routes [{rows}, more than {layers[-1]} layers, {self.header.top_k}], found {routed.shape}"
            )
        return routed[:, list(layers)]

    def rescore(self, batch: TokenBatch, sampling: SamplingConfig) -> torch.Tensor:
        """See `Rollout.rescore`: `[S, T]`. vLLM scores prompts at temperature 1 only.

        Raises:
            EngineError: at another temperature.
        """
        from vllm import SamplingParams

        require_temperature_one("vLLM", sampling)
        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False, skip_clone=True)
        rows = [batch.tokens[i, : batch.lengths[i]].tolist() for i in range(len(batch))]
        outputs = [out for wave in waves([len(r) for r in rows]) for out in self._run([rows[i] for i in wave], params)]
        scores = torch.zeros(batch.tokens.shape)
        for i, (row, out) in enumerate(zip(rows, outputs, strict=True)):
            for t in range(int(batch.prompt_lengths[i]), len(row)):
                scores[i, t] = out.prompt_logprobs[t][row[t]].logprob
        return scores

    def shutdown(self) -> None:
        """End the engine. This also ends torch.distributed, and any Megatron model with it."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


def waves(
    lengths: Sequence[int], sequences: int = MAX_SEQUENCES, tokens: int = MAX_BATCHED_TOKENS
) -> Iterator[list[int]]:
    """Split requests so that one wave is prefilled in one piece.

    Args:
        lengths: prompt tokens of each request.
        sequences, tokens: that the engine takes in a forward at most.

    Yields:
        Indices of the requests of a wave, in order. A request of more than `tokens` is a wave of its own.
    """
    wave: list[int] = []
    total = 0
    for i, length in enumerate(lengths):
        if wave and (len(wave) == sequences or total + length > tokens):
            yield wave
            wave, total = [], 0
        wave.append(i)
        total += length
    if wave:
        yield wave


def require_temperature_one(engine: str, sampling: SamplingConfig) -> None:
    """Refuse to score given tokens at another temperature, which the engine would ignore.

    Raises:
        EngineError: names engine and temperature.
    """
    if sampling.temperature != 1.0:
        raise EngineError(
            f"{engine} scores given tokens at temperature 1 only; sampling.temperature is {sampling.temperature}"
        )


def _create(path: Path, dtype: str, max_length: int) -> Any:
    try:
        import vllm
    except ImportError as error:
        raise EngineError(
            f"rollout.engine vllm: vLLM is not installed ({error}); install the extra rar-lib[vllm]"
        ) from None
    arguments = engine_arguments(vllm.__version__, path, dtype, max_length)
    try:
        return vllm.LLM(model=str(path), disable_log_stats=True, use_tqdm_on_load=False, **arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise EngineError(
            f"rollout.engine vllm: vLLM {vllm.__version__} cannot be started with capture of routed experts: {error}"
        ) from error


def engine_arguments(version: str, path: Path, dtype: str, max_length: int) -> dict[str, Any]:
    """Engine arguments by vLLM's names, for an engine in process and for a server alike.

    Args:
        version: of vLLM.
        path: checkpoint folder.
        dtype: of the engine's arithmetic.
        max_length: tokens of prompt and response at most.

    Raises:
        EngineError: if this version cannot capture the routes of this checkpoint.
    """
    settings = {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "num_gpu_blocks_override": KV_BLOCKS,
    }
    plan = plan_engine(version, path, settings)
    return {
        "dtype": dtype,
        "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # no sampling defaults or end tokens of the checkpoint behind our back
        "kv_cache_memory_bytes": KV_BYTES,
        "max_model_len": max_length,
        "max_num_seqs": MAX_SEQUENCES,
        **settings,
        **plan.arguments,
    }


def longest_sequence(path: Path) -> int:
    """Tokens of prompt and response at most: what the model takes, prefilled in one piece."""
    return min(int(load_model_config(path).max_position_embeddings), MAX_BATCHED_TOKENS)


def reload_weights(worker: Any, weights: list[tuple[str, torch.Tensor]]) -> None:
    """In a vLLM worker: load weights of any shape, in Hugging Face names, over the present ones."""
    worker.model_runner.reload_weights(weights_iterator=iter(weights))


def pack_experts(worker: Any) -> None:
    """In a vLLM worker: pack the expert weights as loading from disk does."""
    if not torch.cuda.is_available():  # only the CPU kernels keep packed expert weights
        for module in worker.model_runner.get_model().modules():
            if hasattr(module, "w13_weight"):
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


@contextlib.contextmanager
def _foreign_seeds_undone() -> Iterator[None]:
    """Creating an engine seeds every global generator; leave the caller's as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


@contextlib.contextmanager
def starting_vllm() -> Iterator[None]:
    """vLLM reads its environment when it is imported; what it and its parts warn of while starting is not ours."""
    if "vllm" not in sys.modules:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # no Triton on a CPU, which is meant
    with warnings.catch_warnings(), contextlib.redirect_stdout(_stdout_with_descriptor()):
        warnings.simplefilter("ignore")
        yield


def _stdout_with_descriptor() -> Any:
    """Standard output, or the process's own where a notebook's stand-in has no file descriptor: vLLM asks for one."""
    try:
        sys.stdout.fileno()
    except (OSError, AttributeError):
        return sys.__stdout__
    return sys.stdout
