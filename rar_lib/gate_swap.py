"""Gate swap between two checkpoints of a run: how much of what training did sits in the routers?

The weights of the start and of the end are crossed: the end with the start's routers, and the start with the end's. All four score the
same answers, so a change that follows the routers shows in the one, and a change in the hidden states that they read shows in the
other.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from rar_lib.checkpoint import load_model, resolve_checkpoint
from rar_lib.config import JobConfig
from rar_lib.engines.hf_weights import load_hf_weights, router_names
from rar_lib.engines.session import EngineSession
from rar_lib.errors import RunError
from rar_lib.metrics.agreement import agreement
from rar_lib.metrics.mismatch import k3
from rar_lib.retrace import record_tokens
from rar_lib.runs.result import RunResult
from rar_lib.runs.tables import traces


def gate_swap(run: RunResult, session: EngineSession | None = None, *, sequences: int = 128) -> pd.DataFrame:
    """Score answers of the first step under the start, the end, and the two crossings.

    Args:
        run: a complete run that kept its traces and its last checkpoint.
        session: whose trainer reads the checkpoint; by default one for this call. Scoring is by Transformers in fp32.
        sequences: answers at most.

    Returns:
        A row a set of weights: `body`, `routers` (start or end), `logp` (mean log-prob of the response tokens, nats),
        `k3_from_start` (k3 against the start, nats: KL(start ‖ these) on the start's own answers), `flip_from_start`, `flip_from_end` (shares of cells that are routed otherwise).

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
    assert some.token_ids is not None
    assert some.logprobs is not None
    tokens = [some.token_ids[a:b] for a, b in zip(some.offsets[:-1], some.offsets[1:], strict=True)]
    response = np.isfinite(some.logprobs)
    path = resolve_checkpoint(config.model.path)
    start, end = _both_ends(config, path, kept[-1], session)
    model = load_model(path)
    model.eval()
    routers = router_names(model)
    seen = {}
    for body, gates in (("start", "start"), ("end", "end"), ("end", "start"), ("start", "end")):
        weights, of_routers = ({"start": start, "end": end}[name] for name in (body, gates))
        load_hf_weights(model, [(n, of_routers[n] if n in routers else w) for n, w in weights.items()])
        seen[body, gates] = record_tokens(model, tokens, batch_size=64)
    first, last = seen["start", "start"], seen["end", "end"]
    rows = []
    for (body, gates), trace in seen.items():
        assert trace.logprobs is not None
        assert first.logprobs is not None
        rows.append(
            {
                "body": body,
                "routers": gates,
                "logp": float(np.asarray(trace.logprobs)[response].mean()),
                "k3_from_start": k3(trace.logprobs, first.logprobs, response),
                "flip_from_start": agreement(first, trace).scalars()["router_flip"],
                "flip_from_end": agreement(last, trace).scalars()["router_flip"],
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


def _both_ends(config: JobConfig, path: Path, checkpoint: Path, session: EngineSession | None) -> tuple[dict, dict]:
    """Named weights of the base checkpoint and of a trainer's checkpoint."""
    trainer = (session or EngineSession()).trainer(config, path)
    start = {name: tensor.clone() for name, tensor in trainer.weights()}
    trainer.load(checkpoint)
    return start, {name: tensor.clone() for name, tensor in trainer.weights()}
