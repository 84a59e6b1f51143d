"""Planner: from a policy's name to the plan of a batch. What a policy needs is looked at here, once, at θ_old.

The planning pass is one forward of the trainer without replay; Fisher scores and swap take its backward as well. The plan
it leads to holds for the old pass, every update and recompute of the batch. What is kept from batch to batch (sums of
scores, the histogram behind P(flip)) is small and goes into the run's checkpoints.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rar_lib.config import RouterReplayConfig
from rar_lib.engines.base import Capture, LogprobResult, Replay, TokenBatch, Trainer
from rar_lib.errors import ConfigError, ReplayError
from rar_lib.metrics.agreement import agreement
from rar_lib.replay.flip_model import FlipModel
from rar_lib.replay.policies import get_policy, make_plan, require_policy
from rar_lib.replay.policy import Candidates
from rar_lib.replay.scores import ExpertScore, ScoreSums, SignalRequest, aggregate, expert_score, score_sums
from rar_lib.seeding import derive_seed
from rar_lib.traces.trace import RouteTrace


class Planner:
    """Makes the plans of one policy.

    Args:
        config: policy, unit, budget, score.
        at_least: what a planning pass keeps of the routers even where the policy needs less.

    Raises:
        ConfigError: for parts that do not go together.

    Attributes:
        score: of the last batch that was looked at, if the policy ranks scores.
        flips: what earlier batches said of P(flip).
    """

    def __init__(self, config: RouterReplayConfig, at_least: Capture = True) -> None:
        require_policy(config.policy, config.unit, config.budget, config.ratio)
        if config.arm == "R2" and get_policy(config.policy).compares:
            raise ConfigError(
                f"router_replay.policy: {config.policy} compares the record with the trainer's own choice, and in mode R2 they "
                "are the same pass; use mode R3"
            )
        self.config, self.needs, self._at_least = config, set(get_policy(config.policy).needs), at_least
        self.score: ExpertScore | None = None
        self.flips = FlipModel.empty()
        self._sums: ScoreSums | None = None

    # ---------------------------------------------------------------- what to look at

    @property
    def looks(self) -> bool:
        """The policy needs a planning pass."""
        return bool(self.needs)

    @property
    def learns_flips(self) -> bool:
        """The policy needs a batch before the first that it plans."""
        return "flips" in self.needs

    @property
    def capture(self) -> Capture:
        """What a planning pass must keep of the routers."""
        if "scores" in self.needs or self._at_least == "scores":
            return "scores"
        return "margins" if self.needs & {"margins", "flips"} or self._at_least == "margins" else True

    def request(self, batch_number: int) -> SignalRequest | None:
        """What a planning pass must back-propagate."""
        estimators = {self.config.score.estimator} if "score" in self.needs else set()
        estimators |= {"swap"} if "signals" in self.needs else set()
        if not estimators:
            return None
        seed = derive_seed(self.config.seed, "labels", batch_number)
        return SignalRequest(frozenset(estimators), self.config.score.labels, seed)

    def look(self, trainer: Trainer, batch: TokenBatch, batch_number: int, temperature: float) -> LogprobResult:
        """The planning pass: native, at the trainer's present weights. Scores are taken from it."""
        seen = trainer.logprobs(
            batch, temperature=temperature, capture=self.capture, signals=self.request(batch_number)
        )
        self.see(seen, batch, batch_number)
        return seen

    def see(self, native: LogprobResult, batch: TokenBatch, batch_number: int) -> None:
        """Take the scores from a planning pass that was made elsewhere with this planner's `capture` and `request`.

        Args:
            native: the pass, with routes and signals.
            batch: whose groups are halved for the stability of the score.
            batch_number: of the run.
        """
        if "score" not in self.needs:
            return
        assert native.signals is not None
        assert native.trace is not None
        wanted = self.config.score
        self.score = expert_score(
            native.signals, native.trace, wanted.estimator, wanted.aggregation, shrinkage=wanted.shrinkage,
            groups=batch.groups.numpy(), seed=derive_seed(self.config.seed, "halves", batch_number),
        )  # fmt: skip
        if wanted.ema:
            new = score_sums(native.signals, native.trace, wanted.estimator, wanted.aggregation)
            self._sums = new if self._sums is None else self._sums.decayed_with(new, wanted.ema)
            self.score = ExpertScore(
                aggregate(self._sums, wanted.aggregation, wanted.shrinkage), self._sums.count, self.score.estimator,
                self.score.aggregation, self.score.labels, self._sums.tokens, self.score.stability,
            )  # fmt: skip

    def learn_flips(self, rollout: RouteTrace, native: RouteTrace) -> None:
        """Remember which decisions differed; called after the batch was planned, so that no plan sees its own flips.

        Raises:
            ReplayError: if `native` carries no margins.
        """
        if not self.learns_flips:
            return
        if native.margins is None:
            raise ReplayError("P(flip): expected a planning pass with margins, found none")
        compared = agreement(rollout, native)
        self.flips = self.flips.seen(native.margins, compared.flipped, compared.known)

    # ---------------------------------------------------------------- the plan

    def plan(self, record: RouteTrace, batch: TokenBatch, batch_number: int, native: LogprobResult | None) -> Replay:
        """The record with its plan.

        Args:
            record: routes of the batch.
            batch: names the sequences.
            batch_number: of the run.
            native: the planning pass, if the policy looks.

        Raises:
            ConfigError, ReplayError: see make_plan.
        """
        seen = Candidates(
            record, batch.uids, self.config.seed, batch_number,
            native=None if native is None else native.trace, score=self.score,
            signals=None if native is None else native.signals,
            flips=self.flips if self.learns_flips else None, ratio=self.config.ratio,
        )  # fmt: skip
        plan = make_plan(self.config.policy, seen, self.config.unit, self.config.budget)
        return Replay(record, plan, self.config.gates)

    # ---------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """What the next batch needs of those before, in JSON types; floats keep every bit."""
        sums = self._sums
        return {
            "flips": [self.flips.cells.tolist(), self.flips.flips.tolist()],
            "sums": None if sums is None else [sums.mass.tolist(), sums.count.tolist(), sums.tokens],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.flips = FlipModel(*(np.array(counts, np.int64) for counts in state["flips"]))
        if state["sums"] is not None:
            mass, count, tokens = state["sums"]
            self._sums = ScoreSums(np.array(mass), np.array(count), tokens)
