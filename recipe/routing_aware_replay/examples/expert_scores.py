"""Fisher scores of a model's experts, for run_fisher.sh: one forward and backward over the answers of a rollout dump.

    python recipe/routing_aware_replay/examples/expert_scores.py MODEL DUMP OUT.safetensors

MODEL is the folder of a Hugging Face MoE checkpoint, DUMP a file of sampled answers with token ids (verl's tq_batch.pt, or any
other that `rar doctor` reads). Needs rar-lib[hf] and runs on a CPU in fp32: 4 bytes a parameter, and as much again for the
gradients. Scores hold for the weights that they were made at.
"""

from __future__ import annotations

import sys
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(RECIPE), str(RECIPE.parents[1])]

from routing_aware_replay.fisher_mask import expert_score, save_score  # noqa: E402

from rar_lib.checkpoint import resolve_checkpoint  # noqa: E402
from rar_lib.config import JobConfig  # noqa: E402
from rar_lib.engines.base import TokenBatch  # noqa: E402
from rar_lib.engines.hf_trainer import HFTrainer  # noqa: E402
from rar_lib.errors import RarError, TraceError  # noqa: E402
from rar_lib.replay.scores import SignalRequest  # noqa: E402
from rar_lib.traces.wire import read_dump  # noqa: E402


def batch_of(dump: str) -> TokenBatch:
    """The prompts and answers of a dump; answers to one prompt are a group.

    Raises:
        TraceError: if a sample does not say its token ids, or where its prompt ends.
    """
    prompts, answers = [], []
    for sample in read_dump(dump).samples:
        if sample.token_ids is None or sample.prompt is None:
            raise TraceError(f"{dump}: {sample.name}: expected token ids and the length of the prompt, found none")
        ids = sample.token_ids.tolist()
        prompts.append(ids[: sample.prompt])
        answers.append(ids[sample.prompt :])
    first = {tuple(p): i for i, p in reversed(list(enumerate(prompts)))}
    names = [str(i) for i in range(len(prompts))]
    return TokenBatch.pack(prompts, answers, names, [first[tuple(p)] for p in prompts], 0)


def main(model: str, dump: str, out: str) -> None:
    """Score and write.

    Raises:
        RarError: for a model or dump that is not there, or not what is expected.
    """
    path = resolve_checkpoint(model)
    job, batch = JobConfig(), batch_of(dump)
    trainer = HFTrainer(path, job.trainer, job.algorithm)
    seen = trainer.logprobs(batch, temperature=1.0, capture=True, signals=SignalRequest(frozenset({"gate"})))
    assert seen.signals is not None
    assert seen.trace is not None
    score = expert_score(seen.signals, seen.trace, groups=batch.groups.numpy())
    print(save_score(score, seen.trace.header.moe_layers, out))
    found = score.stability
    if found is not None and found.spearman is not None:
        print(f"{score.id}: {score.tokens:.0f} tokens, {score.unscored} cells unscored, rank agreement of two halves of the "
              f"prompts {found.spearman:.2f} (permuted: {found.null_low:.2f} to {found.null_high:.2f})")  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("expected MODEL DUMP OUT.safetensors")
    try:
        main(*sys.argv[1:])
    except RarError as error:
        sys.exit(str(error))
