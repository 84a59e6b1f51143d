"""A worker: the hf rollout, or Transformers' `generate`, and the same prompts once a round.

python -m benchmarks.hf_rollouts FD CHECKPOINT DTYPE eager|fused|generate SAMPLES[,SAMPLES...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.prompts import answers_of
from benchmarks.workers import Turn
from rar_lib.checkpoint import load_tokenizer, special_tokens
from rar_lib.config import JobConfig
from rar_lib.engines.hf_rollout import HFRollout


def generating(path: Path, dtype: str, tokenizer: Any, new: int) -> Callable[[list[list[int]], list[str]], Any]:
    """Transformers' own sampling, with the log-prob of each token."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], uids: list[str]) -> Any:
        torch.manual_seed(0)
        padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            out = model.generate(
                **padded, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new, eos_token_id=1, pad_token_id=0,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        tokens = out.sequences[:, padded["input_ids"].shape[1] :]
        logp = torch.log_softmax(torch.stack(out.logits, 1).float(), -1).gather(-1, tokens[..., None])[..., 0]
        return tokens.tolist(), logp.tolist()

    return generate


def main() -> None:
    """Serve rounds until told to end."""
    turn, path, dtype, kind = Turn(int(sys.argv[1])), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    sizes = [int(size) for size in sys.argv[5].split(",")]
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(path)
    sampling = JobConfig().rollout.sampling
    turn.wait()
    work: Callable[[list[list[int]], list[str]], Any]
    if kind == "generate":
        work = generating(path, dtype, tokenizer, sampling.max_new_tokens)
    else:
        overrides = [f"rollout.dtype={dtype}", "rollout.precision=native", f"rollout.kernels={kind}"]
        config = JobConfig.build({"rollout": {"engine": "hf"}, "trainer": {"engine": "hf"}}, overrides).rollout
        rollout = HFRollout(path, config, special_tokens(path, tokenizer))

        def work(prompts: list[list[int]], uids: list[str]) -> Any:
            return rollout.generate(prompts, sampling, uids, 0)

    while True:
        seconds = {}
        for size in sizes:
            prompts, uids = answers_of(tokenizer, size)
            started = time.process_time()
            work(prompts, uids)
            seconds[str(size)] = time.process_time() - started
        turn.done(seconds=seconds)
        turn.wait()


if __name__ == "__main__":
    main()
