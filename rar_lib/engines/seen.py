"""What one process saw of a pass, and the pass as a whole, put together at the first process."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rar_lib.config import TrainerConfig
from rar_lib.engines.base import Objective, TokenBatch
from rar_lib.engines.capture import RoutePart
from rar_lib.engines.ranks import Ranks
from rar_lib.engines.taps import SignalPart
from rar_lib.errors import EngineError
from rar_lib.replay.counts import PassCounts
from rar_lib.replay.scores import SignalRequest

INSIDE_EXPERTS = {"swap", "param", "param_exact"}  # score estimators that compute experts again


def require_experts(config: TrainerConfig, signals: SignalRequest | None) -> None:
    """Estimators that compute experts again need all of them, whole, in the process.

    Raises:
        EngineError: on a layout that spreads them.
    """
    wanted = sorted(INSIDE_EXPERTS & set(signals.estimators)) if signals is not None else []
    sizes = (config.tensor_parallel, config.expert_parallel, config.expert_tensor_parallel)
    if wanted and (sizes != (1, 1, 1) or (config.engine == "hf" and config.processes > 1)):
        raise EngineError(
            f"score estimator {', '.join(wanted)} computes experts again and needs them whole in one process; found trainer.engine "
            f"{config.engine}, processes {config.processes}, tensor_parallel {sizes[0]}, expert_parallel {sizes[1]}, "
            f"expert_tensor_parallel {sizes[2]}; estimator gate works on every layout"
        )


def not_taken(norm: float, loss: float, ranks: Ranks) -> str:
    """Why an update was not taken, in the same words on every rank, which know only their own part of the loss."""
    told = "" if ranks.size > 1 else f" at a loss of {loss}"
    return f"gradient norm is {norm}{told}: the update was not taken"


@dataclass
class Seen:
    """Sums and rows of one process.

    Attributes:
        rows, logprobs: `[n]` and `[n, T]` float32 of each micro-batch.
        loss: this process's part of the sum.
        statistics: sums over tokens that the objective reported.
        counts: what replay forced.
        routes, signals: with their places in the batch.
    """

    rows: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    loss: float = 0.0
    statistics: dict[str, float] = field(default_factory=dict)
    counts: PassCounts = field(default_factory=PassCounts)
    routes: list[RoutePart] = field(default_factory=list)
    signals: list[SignalPart] = field(default_factory=list)

    def scored(self, rows: torch.Tensor, logp: torch.Tensor) -> None:
        """Keep the log-probs `[n, T]` of a micro-batch, which holds the rows `[n]` int64 of the batch."""
        self.rows.append(rows)
        self.logprobs.append(logp.detach().float().cpu())

    def learned(
        self,
        batch: TokenBatch,
        objective: Objective,
        rows: torch.Tensor,
        logp: torch.Tensor,
        scores: torch.Tensor | None,
    ) -> torch.Tensor:
        """The summed loss of a micro-batch, a scalar with gradient, of which fillers (row -1) are no part.

        Args:
            batch: the tokens of the update.
            objective: loss of each token.
            rows: `[n]` int64, of the batch.
            logp: `[n, T]` in nats, with gradient.
            scores: `[n, T, L, E]`, what the routers ranked, if the objective looks at it.
        """
        self.scored(rows, logp)
        real = rows >= 0
        if not real.any():
            return (logp * 0).sum()
        if not real.all():
            rows, logp, scores = rows[real], logp[real], None if scores is None else scores[real]
        terms, sums = objective(logp, rows, scores)
        for name, value in sums.items():
            self.statistics[name] = self.statistics.get(name, 0.0) + value
        return terms[batch.scored(rows)].sum()

    def gather(self, ranks: Ranks, batch: TokenBatch) -> tuple[torch.Tensor, Seen]:
        """Log-probs `[S, T]` float32 and everything of all processes, at the first; at the others what is their own."""
        everyone = ranks.gather(self) or [self]
        out, whole = torch.zeros(batch.tokens.shape, dtype=torch.float32), Seen()
        for one in everyone:
            for rows, logp in zip(one.rows, one.logprobs, strict=True):
                out[rows[rows >= 0]] = logp[rows >= 0]
            for name, value in one.statistics.items():
                whole.statistics[name] = whole.statistics.get(name, 0.0) + value
            whole.loss, whole.counts = whole.loss + one.loss, whole.counts + one.counts
            whole.routes += one.routes
            whole.signals += one.signals
        return out, whole
