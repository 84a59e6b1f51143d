"""A worker: one job of this library, a step a round.

    python -m benchmarks.our_job FD '{"flat": {...}, "set": [...], "model": null, "blind": false}'

`flat` are parameters of JobConfig.from_flat, `set` overrides; `model` another checkpoint. `blind`: from the second step on nothing is
recorded, neither in the rollout nor in the old pass, which a job cannot be asked for otherwise.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.workers import Turn
from rar_lib import job
from rar_lib.checkpoint import resolve_checkpoint, router_header
from rar_lib.config import JobConfig
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.runs.store import RunStore
from rar_lib.traces.trace import RouteTrace

ENDLESS = 100_000  # steps; the other side ends the process


class _Rounds:
    """The progress display of the job: a step is over, so the round is."""

    def __init__(self, turn: Turn, blindly: contextlib.ExitStack | None, model: str) -> None:
        self.turn, self.blindly, self.model = turn, blindly, model
        self.row: dict[str, Any] = {}
        self.idle = 0.0  # seconds in which others had their turn

    def monotonic(self) -> float:
        """The clock of a run that nobody interrupts: by it the job decides when its tables are due."""
        return time.monotonic() - self.idle

    def step(self, done: int, note: str) -> None:
        if done == 1 and self.blindly is not None:
            blind(self.blindly, self.model)
        parts = {str(k).removeprefix("time/"): v for k, v in self.row.items() if str(k).startswith("time/")}
        self.turn.done(parts=parts, step=done, reward=self.row.get("reward/mean"))
        before = time.monotonic()
        self.turn.wait()
        self.idle += time.monotonic() - before

    def close(self) -> None:
        """The process has ended before."""


def blind(stack: contextlib.ExitStack, model: str) -> None:
    """From here on rollout and old pass record nothing; a trace of one token stands for what they would have seen."""
    header = router_header(resolve_checkpoint(model)).model_copy(update={"source": "rollout"})
    one = np.arange(header.top_k)[None, None].repeat(header.num_layers, 1)
    trace = RouteTrace.from_packed(header, one, [1], np.zeros(1, np.uint8))
    recorder = mock.MagicMock(header=header, last={})
    longest = torch.zeros(1, 1, header.num_layers, header.top_k, dtype=torch.int64)
    recorder.take.side_effect = lambda n: longest.expand(n, 1, -1, -1)  # nobody packs it
    scored = HFTrainer.logprobs

    def logprobs(self: HFTrainer, batch: Any, *, capture: Any = False, **more: Any) -> Any:
        return replace(scored(self, batch, capture=False, **more), trace=trace)

    rollout = "rar_lib.engines.hf_rollout"
    stack.enter_context(mock.patch(f"{rollout}.recording", return_value=contextlib.nullcontext(recorder)))
    stack.enter_context(mock.patch(f"{rollout}.pack_rollout", return_value=trace))
    stack.enter_context(mock.patch.object(HFTrainer, "logprobs", logprobs))


def main() -> None:
    """Run until told to end."""
    turn, wanted = Turn(int(sys.argv[1])), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    flat = wanted.get("flat", {}) | {"steps": ENDLESS, "checkpoint_every": 0, "eval_prompts": 0}
    model = wanted.get("model") or "tiny-moe"
    config = JobConfig.build(JobConfig.from_flat(**flat, model=model).resolved(), wanted.get("set", []))
    with contextlib.ExitStack() as stack:
        rounds = _Rounds(turn, stack if wanted.get("blind") else None, model)
        tables = RunStore.write_tables

        def written(self: RunStore, metrics: list[Any], *more: Any) -> None:
            rounds.row = metrics[-1]
            tables(self, metrics, *more)

        stack.enter_context(mock.patch.object(RunStore, "write_tables", written))
        stack.enter_context(mock.patch("rar_lib.runs.store.time", rounds))
        stack.enter_context(mock.patch.object(job, "progress", return_value=rounds))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        turn.wait()
        job.run_job(config, runs_dir=Path(folder), show="none")


if __name__ == "__main__":
    main()
