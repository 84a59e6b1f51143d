"""Make the sample dumps in data/traces: `python -m tests.traces.samples`, or only those that are named, from the rollout
that is committed, without an engine: `python -m tests.traces.samples roll/step_000001.pkl ...`.

Routes, tokens and log-probs come from the shipped checkpoint on real engines: vLLM in process and its HTTP server (bfloat16), and Megatron-Core's
own RouterReplay for the training side. The other producers' files hold the same in-process rollout, laid out by `writers.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rar_lib.checkpoint import load_model, load_tokenizer, resolve_checkpoint, special_tokens
from rar_lib.config import RolloutConfig, TaskConfig
from rar_lib.retrace import record_tokens
from rar_lib.tasks import Task
from rar_lib.traces.layers import ModelShape
from rar_lib.traces.wire import read_dump
from tests.traces import writers
from tests.traces.writers import Batch, Item

DATA = Path(__file__).resolve().parents[2] / "data" / "traces"
CHECKPOINT = resolve_checkpoint("tiny-moe")
PORT = 8471
SMALL = (4, 2)  # prompts, samples a prompt, of the samples of each layout
LARGE = (64, 4)  # of the server's dump, which the route doctor's notebook opens
WRITERS = {
    "verl/tq_batch.pt": writers.write_verl,
    "verl_v0/gen_batch.dp": writers.write_verl_v0,
    "sglang/answers.jsonl": writers.write_sglang_typed,
    "nemo_rl/answers.jsonl": writers.write_nemo,
    "nemo_rl/train_data_step1.jsonl": writers.write_nemo_log,
    "slime/rollout_data_0.pt": writers.write_slime,
    "slime/train_data_0.pt": writers.write_slime_train,
    "megatron_tracer/router_trace_rank0.jsonl": writers.write_tracer,
    "skyrl/answers.jsonl": writers.write_skyrl_http,
    "skyrl/global_step_1_training_input.pkl": writers.write_skyrl,
    "prime_rl/answers.jsonl": writers.write_prime_http,
    "prime_rl/rank_0.bin": writers.write_prime,
    "prime_rl/token_export_rank_0.jsonl": writers.write_prime_export,
    "tensorrt_llm/outputs.pt": writers.write_trtllm,
    "xtuner/debug_rollout_0.pt": writers.write_xtuner,
    "lmdeploy/answers.jsonl": writers.write_lmdeploy,
    "roll/step_000001.pkl": writers.write_roll,
}


def prompts(count: int) -> list[list[int]]:
    """Token ids of the first prompts of the default task."""
    tokenizer, task = load_tokenizer(CHECKPOINT), Task(TaskConfig())
    return [tokenizer(task.problem(i).prompt, add_special_tokens=False)["input_ids"] for i in range(count)]


def in_process() -> None:
    """Request outputs of vLLM in this process, saved as they are."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    from rar_lib.engines.vllm_rollout import VLLMRollout

    special = special_tokens(CHECKPOINT, load_tokenizer(CHECKPOINT))
    rollout = VLLMRollout(CHECKPOINT, RolloutConfig(), special)
    torch.manual_seed(0)
    params = SamplingParams(
        n=SMALL[1], temperature=1.0, max_tokens=6, logprobs=0, stop_token_ids=list(special.end), detokenize=False
    )
    outputs = rollout.llm.generate(
        [TokensPrompt(prompt_token_ids=p) for p in prompts(SMALL[0])], params, use_tqdm=False
    )
    records = [
        {"request_id": out.request_id, "prompt_token_ids": list(out.prompt_token_ids),
         "outputs": [{"index": o.index, "token_ids": list(o.token_ids), "finish_reason": o.finish_reason, "routed_experts": o.routed_experts,
                      "logprobs": [step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)]} for o in out.outputs]}
        for out in outputs
    ]  # fmt: skip
    path = DATA / "vllm" / "outputs.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(records, path)
    rollout.shutdown()


def kept() -> Batch:
    """The saved request outputs as a batch for the writers, with the trainer's log-probs of the same tokens."""
    shape, tokenizer = ModelShape.load(CHECKPOINT), load_tokenizer(CHECKPOINT)
    items = []
    for sample in read_dump(DATA / "vllm" / "outputs.pt").samples:
        assert sample.experts is not None
        assert sample.token_ids is not None
        ids, p = sample.token_ids.tolist(), sample.prompt or 0
        logp = sample.logprobs["rollout"][p:].astype(np.float32)
        items.append(Item(ids[:p], ids[p:], sample.experts.astype(np.int64), logp, 0, tokenizer.decode(ids[p:])))
    trained = record_tokens(load_model(CHECKPOINT), [item.ids for item in items])
    assert trained.logprobs is not None
    old = np.split(trained.logprobs, trained.offsets[1:-1])
    items = [replace(item, old=logp[len(item.prompt) :]) for item, logp in zip(items, old, strict=True)]
    return Batch(shape, items)


def recorded(batch: Batch) -> None:
    """The same tokens through Megatron-Core, recorded by its own RouterReplay."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from rar_lib.engines.megatron_cpu import start_parallel_state, without_cuda
    from rar_lib.engines.megatron_model import build_model
    from rar_lib.retrace import _megatron_logits

    start_parallel_state()
    with without_cuda():
        model = build_model(CHECKPOINT).eval()
    RouterReplay.global_router_replay_instances.clear()
    for layer in model.decoder.layers:
        layer.mlp.router.router_replay = _theirs(RouterReplay())
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    ids, _, lengths = writers.grid(batch)
    with torch.no_grad():
        _megatron_logits(model, torch.from_numpy(ids))
    path = DATA / "megatron" / "recorded.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"recorded": [[part.clone() for part in RouterReplay.get_recorded_data()]], "token_ids": torch.from_numpy(ids),
         "lengths": torch.from_numpy(lengths), "layer_numbers": list(batch.model.moe_layers), "tensor_parallel": 1, "context_parallel": 1},
        path,
    )  # fmt: skip


def _theirs(replay: Any) -> Any:
    """Megatron's replay object in the place of this library's, which also says whether anyone listens."""
    replay.taps = replay.watched = ()
    return replay


def served() -> None:
    """Answers of vLLM's HTTP server on 127.0.0.1, one JSON line a request."""
    tokenizer = load_tokenizer(CHECKPOINT)
    special = special_tokens(CHECKPOINT, tokenizer)
    from rar_lib.engines.vllm_rollout import ENVIRONMENT

    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(CHECKPOINT), "--served-model-name", "tiny-moe", "--host", "127.0.0.1",
        "--port", str(PORT), "--dtype", "bfloat16", "--enforce-eager", "--enable-return-routed-experts", "--logprobs-mode", "processed_logprobs",
        "--no-enable-prefix-caching", "--generation-config", "vllm", "--num-gpu-blocks-override", "512", "--max-model-len", "512", "--seed", "0",
        "--kv-cache-memory-bytes", str(2**30),
    ]  # fmt: skip
    server = subprocess.Popen(
        command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait(server)
        lines = []
        for ids in prompts(LARGE[0]):
            lines.append(_ask(ids, special.end, LARGE[1], tokenizer.decode(ids)))
    finally:
        server.terminate()
        server.wait(30)
    path = DATA / "vllm_http" / "answers.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def _wait(server: subprocess.Popen[bytes]) -> None:
    for _ in range(180):
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise RuntimeError("the server did not come up")


def _ask(ids: list[int], end: tuple[int, ...], n: int, text: str) -> dict[str, Any]:
    body = {"model": "tiny-moe", "prompt": ids, "n": n, "max_tokens": 6, "temperature": 1.0, "logprobs": 1, "return_token_ids": True,
            "stop_token_ids": list(end)}  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    for choice in found["choices"]:
        choice["logprobs"] = {
            "token_logprobs": choice["logprobs"]["token_logprobs"],
            "tokens": choice["logprobs"]["tokens"],
        }
    return {**found, "prompt_text": text}


def laid_out(batch: Batch, names: Iterable[str]) -> None:
    """The batch in the layouts of other producers."""
    for name in names:
        path = DATA / name
        path.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[name](replace(batch), path)


def make() -> None:
    """Write every sample."""
    in_process()
    batch = kept()
    laid_out(batch, WRITERS)
    batch.trace().save(DATA / "rollout.safetensors")
    writers.write_nemo_strings(batch, DATA / "nemo_rl" / "routes.txt")
    recorded(batch)
    served()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a key of WRITERS; by default every sample")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - WRITERS.keys()):
        parser.error(f"expected names of {', '.join(WRITERS)}; found {', '.join(unknown)}")
    if options.names:
        laid_out(kept(), options.names)
    else:
        make()


if __name__ == "__main__":
    main()
