"""A worker: one vLLM engine in process, and the same prompts once a round.

    python -m benchmarks.vllm_rollouts FD CHECKPOINT DTYPE capture|bare SAMPLES[,SAMPLES...]

Batches of several sizes are answered one after another, each with its own seconds. `bare` has vLLM's capture of routes switched off, and
nothing is packed; `capture` is the rollout of a job, routes and log-probs packed into a trace.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.prompts import answers_of
from benchmarks.workers import Turn
from rar_lib.checkpoint import load_tokenizer, special_tokens
from rar_lib.config import JobConfig
from rar_lib.engines.vllm_rollout import VLLMRollout, starting_vllm


def main() -> None:
    """Serve rounds until told to end."""
    turn, path, dtype, kind = Turn(int(sys.argv[1])), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    sizes = [int(size) for size in sys.argv[5].split(",")]
    torch.set_num_threads(1)
    config = JobConfig.build({}, [f"rollout.dtype={dtype}", "rollout.precision=native"]).rollout
    with starting_vllm():
        import vllm
    create, tokenizer = vllm.LLM, load_tokenizer(path)

    def configured(**kwargs: Any) -> Any:
        return create(**(kwargs | {"enable_return_routed_experts": kind == "capture"}))

    turn.wait()
    with mock.patch.object(vllm, "LLM", configured):
        rollout = VLLMRollout(path, config, special_tokens(path, tokenizer))
    params = vllm.SamplingParams(
        temperature=1.0,
        max_tokens=config.sampling.max_new_tokens,
        logprobs=0,
        stop_token_ids=[1],
        detokenize=False,
        skip_clone=True,
    )
    while True:
        seconds = {}
        for size in sizes:
            prompts, uids = answers_of(tokenizer, size)
            started = time.process_time()
            if kind == "capture":
                rollout.generate(prompts, config.sampling, uids, 0)
            else:
                torch.manual_seed(0)
                outputs = rollout._run(prompts, params)
                assert outputs[0].outputs[0].routed_experts is None
            seconds[str(size)] = time.process_time() - started
        turn.done(seconds=seconds)
        turn.wait()


if __name__ == "__main__":
    main()
