"""Gate swap between two checkpoints of a run: how much of what training did sits in the routers?

The weights of the start and of the end are crossed: the end with the start's routers, and the start with the end's. All four score the
same answers, so a change that follows the routers shows in the one, and a change in the hidden states that they read shows in the
other.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pandas as pd

from rar_lib.checkpoint import resolve_checkpoint
from rar_lib.config import JobConfig, TrainerConfig
from rar_lib.engines.base import LogprobResult, TokenBatch
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.hf_weights import load_hf_weights, router_names
from rar_lib.engines.session import EngineSession
from rar_lib.errors import RunError
from rar_lib.metrics.agreement import agreement
from rar_lib.metrics.mismatch import k3
from rar_lib.runs.result import RunResult
from rar_lib.runs.tables import traces


def gate_swap(run: RunResult, session: EngineSession | None = None, *, sequences: int = 128) -> pd.DataFrame:
    """Score answers of the first step under the start, the end, and the two crossings.

    Args:
        run: a complete run that kept its traces and its last checkpoint.
        session: whose trainer reads the checkpoint; by default one for this call. Scoring is by Transformers in fp32, at the
            temperature of the run.
        sequences: answers at most.

    Returns:
        A row a set of weights: `body`, `routers` (start or end), `logp` (mean log-prob of the response tokens, nats),
        `k3_from_start` (k3 against the start, nats, on answers that the rollout sampled at the start: nearly KL(start ‖ these)), `flip_from_start`, `flip_from_end` (shares of cells that are routed otherwise).

    Raises:
        RunError: if the run kept no checkpoint.
        ConfigError: if it kept no traces of its first step.
    """
    config = JobConfig.build(json.loads((run.path / "config.json").read_text())["config"])
    kept = sorted(p for p in (run.path / "checkpoints").glob("step-*") if p.suffix != ".partial")
    if not kept:
        raise RunError(f"run folder {run.path}: no checkpoint was kept, so there is no end to compare the start with")
    _, rollout, _ = traces(run, 0)
    some = rollout.select(range(min(sequences, rollout.num_sequences)))
    batch = TokenBatch.of_trace(some)
    response = batch.response_mask
    path = resolve_checkpoint(config.model.path)
    start, end = _both_ends(config, path, kept[-1], session)
    scorer = HFTrainer(path, TrainerConfig(engine="hf"), config.algorithm)
    routers = router_names(scorer.model)
    seen = {}
    for body, gates in (("start", "start"), ("end", "end"), ("end", "start"), ("start", "end")):
        weights, of_routers = ({"start": start, "end": end}[name] for name in (body, gates))
        load_hf_weights(scorer.model, [(n, of_routers[n] if n in routers else w) for n, w in weights.items()])
        seen[body, gates] = scorer.logprobs(batch, temperature=config.rollout.sampling.temperature, capture=True)
    first, last = seen["start", "start"], seen["end", "end"]
    rows = []
    for (body, gates), scored in seen.items():
        rows.append(
            {
                "body": body,
                "routers": gates,
                "logp": float(scored.logprobs[response].double().mean()),
                "k3_from_start": k3(scored.logprobs, first.logprobs, response),
                "flip_from_start": _flips(first, scored),
                "flip_from_end": _flips(last, scored),
            }
        )
    return pd.DataFrame(rows)


def gate_swap_table(table: pd.DataFrame) -> pd.DataFrame:
    """The same as text of fixed precision."""
    return pd.DataFrame(
        {
            "body": table["body"],
            "routers": table["routers"],
            "log-prob of the answers": [f"{x:.4f}" for x in table["logp"]],
            "k3 from the start": [f"{x:.2e}" for x in table["k3_from_start"]],
            "flips from the start": [f"{x:.4f}" for x in table["flip_from_start"]],
            "flips from the end": [f"{x:.4f}" for x in table["flip_from_end"]],
        }
    )


def _flips(a: LogprobResult, b: LogprobResult) -> float | None:
    assert a.trace is not None
    assert b.trace is not None
    return agreement(a.trace, b.trace).scalars()["router_flip"]


def _both_ends(config: JobConfig, path: Path, checkpoint: Path, session: EngineSession | None) -> tuple[dict, dict]:
    """Named weights of the base checkpoint and of a trainer's checkpoint."""
    with contextlib.nullcontext(session) if session is not None else EngineSession() as engines:
        trainer = engines.trainer(config, path)
        start = {name: tensor.clone() for name, tensor in trainer.weights()}
        trainer.load(checkpoint)
        return start, {name: tensor.clone() for name, tensor in trainer.weights()}
