"""Probe: the same tokens, routed again after every step, to see what training does to routing.

Between two steps of a run everything changes, the tokens included. So some answers of the first step are kept, and the trainer scores
them natively after every step: how far routing has drifted since the start, by layer, and how far in this one step (RSPO's γ,
arXiv 2510.23027, with this step's start as the old policy). Drift is not mismatch: one engine, two moments.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rar_lib.engines.base import TokenBatch, Trainer
from rar_lib.measure import Row
from rar_lib.metrics.agreement import agreement
from rar_lib.metrics.load import routing_shift, shift_summary
from rar_lib.traces.trace import RouteTrace

FILE = "probe-start.safetensors"


class Probe:
    """Answers of the first step and how they were routed at the start and one step ago.

    Args:
        trainer: at the weights of the step before.
        start: native routes at the start of the run, with token ids and scores.
        temperature: of the sampling.
    """

    def __init__(self, trainer: Trainer, start: RouteTrace, temperature: float) -> None:
        self._batch, self.start, self._temperature = TokenBatch.of_trace(start), start, temperature
        self._predicts = _predicts_response(start)
        self.latest = self._routes(trainer)

    @classmethod
    def begin(cls, trainer: Trainer, batch: TokenBatch, sequences: int, temperature: float, folder: Path) -> Probe:
        """From the first `sequences` answers of a batch, at the weights of the start; kept in `folder`, which is there."""
        some = torch.arange(min(len(batch), sequences))
        chosen = batch.select(some)
        first = trainer.logprobs(chosen, temperature=temperature, capture="scores")
        assert first.trace is not None
        response = chosen.response_mask[chosen.token_mask].numpy()
        logp = np.where(response, first.logprobs[chosen.token_mask].numpy(), np.nan).astype(np.float32)
        probe = cls(trainer, replace(first.trace, logprobs=logp), temperature)
        probe.start = replace(probe.latest, logprobs=logp)  # the very pass that later ones repeat
        probe.start.save(folder / FILE)
        return probe

    @classmethod
    def resume(cls, trainer: Trainer, temperature: float, folder: Path) -> Probe | None:
        """From what `begin` kept, at the trainer's present weights; None if nothing was kept."""
        path = folder / FILE
        return cls(trainer, RouteTrace.load(path), temperature) if path.exists() else None

    def step(self, trainer: Trainer) -> Row:
        """What this step did: `drift/start/*` since the start of the run, `drift/step/*` since the last call.

        router_flip and gate_tv (both in 0..1) over prompt and response, since the start also by layer; of the step alone γ's mean, its
        share below 0.8 and its quantiles, over the inputs that a response token is predicted from, as RSPO weighs them.
        """
        before, self.latest = self.latest, self._routes(trainer)
        row: Row = {}
        for name, since in (("start", self.start), ("step", before)):
            flips = agreement(since, self.latest)
            shift, gamma = routing_shift(since, self.latest)
            row[f"drift/{name}/router_flip"] = flips.scalars()["router_flip"]
            row[f"drift/{name}/gate_tv"] = float(np.average(shift["gate_tv"], weights=shift["cells"]))
            if name == "step":
                full = (since.recorded & self.latest.recorded).all(-1)
                summary = shift_summary(gamma[self._predicts[full]], quantiles=(0.5, 0.9, 0.99))
                row |= {"drift/step/gamma_mean": summary["mean"], "drift/step/gamma_below_0.8": summary["below_floor"]}
                for high, low in ((50, 50), (90, 10), (99, 1)):  # a high quantile of the shift is a low one of γ
                    value = summary[f"shift_p{high}"]
                    row[f"drift/step/gamma_p{low}"] = None if value is None else math.exp(-value)
                continue
            by_layer = zip(shift["layer"], flips.router_flip_by_layer(), shift["gate_tv"], strict=True)
            for layer, flip, moved in by_layer:
                row[f"drift/start/router_flip/layer_{layer}"] = None if np.isnan(flip) else float(flip)
                row[f"drift/start/gate_tv/layer_{layer}"] = None if np.isnan(moved) else float(moved)
        return row

    def _routes(self, trainer: Trainer) -> RouteTrace:
        seen = trainer.logprobs(self._batch, temperature=self._temperature, capture="scores").trace
        assert seen is not None
        return seen


def _predicts_response(trace: RouteTrace) -> np.ndarray:
    """`[N]` bool: tokens whose next token, of the same sequence, was sampled."""
    assert trace.logprobs is not None
    sampled = np.isfinite(trace.logprobs)
    following = np.r_[sampled[1:], False]
    following[trace.offsets[1:][trace.lengths > 0] - 1] = False
    return following
