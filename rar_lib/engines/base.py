"""The two interfaces of a run: a Rollout that samples, a Trainer that scores and learns.

What passes between them is plain: token ids, log-probs, routes and named weights in Hugging Face names. A log-prob at
position t is log π(token_t | tokens before t), so it sits at the token it speaks of; the route at position t is the one
that token t took as an input, so the last token of a sequence has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from rar_lib.config import SamplingConfig
from rar_lib.errors import TraceError
from rar_lib.replay.counts import PassCounts
from rar_lib.replay.plan import ReplayPlan, full_plan
from rar_lib.replay.scores import RouteSignals, SignalRequest
from rar_lib.traces.trace import RouteTrace

# what a scoring pass keeps: nothing, the executed routes, these with their margins, or with margins and all ranked scores
Capture = bool | Literal["margins", "scores"]
NOTHING_FORCED = PassCounts()
NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded sequences of prompt and response.

    Attributes:
        tokens: `[S, T]` int64, `pad_id` after the end of each sequence.
        lengths: `[S]` int64, prompt and response.
        prompt_lengths: `[S]` int64.
        uids: one name a sequence.
        groups: `[S]` int64, index of the prompt that a sequence answers.
        shares: number of equal parts, in order, that the updates will take. Scoring passes split into micro-batches
            within each part, exactly as the updates do, so that at θ_old their log-probs are equal to the last bit.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    prompt_lengths: torch.Tensor
    uids: tuple[str, ...]
    groups: torch.Tensor
    shares: int = 1

    @classmethod
    def pack(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        uids: Sequence[str],
        groups: Sequence[int],
        pad_id: int,
        shares: int = 1,
    ) -> TokenBatch:
        """Join each prompt with its response.

        Args:
            prompts, responses: token ids, one of each a sequence.
            uids: one name a sequence.
            groups: index of the prompt that each sequence answers.
            pad_id: fills each row up to the longest, T.
            shares: see the class.
        """
        rows = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        tokens = torch.full((len(rows), max(map(len, rows))), pad_id, dtype=torch.int64)
        inside = torch.arange(tokens.shape[1])[None, :] < lengths[:, None]
        tokens[inside] = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        return cls(
            tokens,
            lengths,
            torch.tensor([len(p) for p in prompts]),
            tuple(uids),
            torch.tensor(list(groups)),
            shares,
        )

    @classmethod
    def of_trace(cls, trace: RouteTrace) -> TokenBatch:
        """The sequences of a trace; its log-probs say where each answer begins, at the first token that has one.

        Every sequence is a group of its own; the padding is token 0.

        Raises:
            TraceError: if the trace carries no token ids or log-probs.
        """
        if trace.token_ids is None or trace.logprobs is None:
            lacks = " and no ".join(
                name
                for name, values in (("token ids", trace.token_ids), ("log-probs", trace.logprobs))
                if values is None
            )
            raise TraceError(f"token batch: expected a trace with token ids and log-probs, found no {lacks}")
        prompts, answers = [], []
        for a, b in zip(trace.offsets[:-1], trace.offsets[1:], strict=True):
            scored = np.flatnonzero(np.isfinite(trace.logprobs[a:b]))
            begin = int(a) + int(scored[0]) if len(scored) else int(b)
            prompts.append(trace.token_ids[a:begin].tolist())
            answers.append(trace.token_ids[begin:b].tolist())
        return cls.pack(prompts, answers, [str(i) for i in range(len(prompts))], range(len(prompts)), 0)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def response_mask(self) -> torch.Tensor:
        """`[S, T]` bool, true on response tokens."""
        position = torch.arange(self.tokens.shape[1])[None, :]
        return (position >= self.prompt_lengths[:, None]) & (position < self.lengths[:, None])

    @property
    def token_mask(self) -> torch.Tensor:
        """`[S, T]` bool, true on prompt and response tokens."""
        return torch.arange(self.tokens.shape[1])[None, :] < self.lengths[:, None]

    def update_shares(self) -> tuple[torch.Tensor, ...]:
        """Rows `[n]` int64 of each update, in order."""
        return torch.arange(len(self)).chunk(self.shares)

    def micro_batches(self, size: int, rank: int = 0, ranks: int = 1, multiple: int = 0) -> list[torch.Tensor]:
        """Rows `[n]` int64 of each micro-batch of at most `size` sequences; none crosses a share.

        Args:
            size: sequences of a micro-batch.
            rank, ranks: which data-parallel rank asks, of how many. Each takes an equal stretch of every share, so that all
                have the same micro-batches; what is missing is filled up with -1.
            multiple: for pipelines, all micro-batches have the same size, and their number in a share is a multiple of this.
        """
        parts, shares = [], self.update_shares()
        if multiple:  # one size for all: a pipeline receives into buffers of the first
            size = min(size, max(-(-len(share) // ranks) for share in shares))
        for share in shares:
            each = -(-len(share) // ranks)
            mine = share[rank * each :][:each]
            if multiple:
                each = -(-each // (size * multiple)) * size * multiple
            parts += torch.cat([mine, mine.new_full((each - len(mine),), -1)]).split(size)
        return parts

    def inputs(self, rows: torch.Tensor) -> torch.Tensor:
        """`[n, T]` int64, what a forward of these rows is given. A filler, row -1, is token 0 throughout: the same in every pass, since
        where its tokens go changes how many an expert gets, and so how the others' sums round."""
        return self.tokens[rows] * (rows >= 0)[:, None]

    def scored(self, rows: torch.Tensor) -> torch.Tensor:
        """`[n, T]` bool, response tokens of these rows; none of a filler, row -1."""
        return self.response_mask[rows] & (rows >= 0)[:, None]

    def select(self, rows: torch.Tensor) -> TokenBatch:
        """The sequences of `rows` `[n]` int64, still padded to T, as one share."""
        return TokenBatch(
            self.tokens[rows],
            self.lengths[rows],
            self.prompt_lengths[rows],
            tuple(self.uids[i] for i in rows.tolist()),
            self.groups[rows],
        )

    def packed_token_ids(self) -> np.ndarray:
        """`[N]` int64, the tokens of all sequences one after another."""
        return self.tokens[self.token_mask].numpy()


@dataclass(frozen=True)
class Replay:
    """Routes to force in a pass.

    Attributes:
        trace: the record.
        plan: which of its routes are forced.
        gates: `recorded` forces the gate weights of planned routes too, by the scores of the record; `live` leaves them.
    """

    trace: RouteTrace
    plan: ReplayPlan
    gates: Literal["live", "recorded"] = "live"

    @classmethod
    def full(cls, trace: RouteTrace) -> Replay:
        """Every recorded route."""
        return cls(trace, full_plan(trace))

    def select(self, sequences: torch.Tensor) -> Replay:
        """The replay of some of the sequences, `[n]` int64."""
        return Replay(*self.plan.select(self.trace, sequences.tolist()), self.gates)


@dataclass(frozen=True)
class RolloutResult:
    """What a rollout engine returns for S prompts.

    Attributes:
        responses: token ids of each response, end token included if it was drawn.
        logprobs: log-prob of each response token under the distribution that it was drawn from, in nats.
        trace: routes of prompt and response, source `rollout`; carries token ids and log-probs.
        weight_version: version of the weights that sampled.
        seconds: wall time of the generation.
    """

    responses: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    trace: RouteTrace
    weight_version: int
    seconds: float


class Rollout(Protocol):
    """An engine that samples."""

    name: str
    weight_version: int

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, uids: Sequence[str], seed: int
    ) -> RolloutResult:
        """Sample one response a prompt. The same weights, prompts, uids and seed give the same tokens.

        Args:
            prompts: token ids.
            sampling: temperature and longest response, in tokens.
            uids: name of each sequence, for messages, and for draws that do not depend on the batch where the engine can key them.
            seed: of the draws.

        Raises:
            EngineError: for a prompt that with `max_new_tokens` may outgrow the model.
        """

    def rescore(self, batch: TokenBatch, sampling: SamplingConfig) -> torch.Tensor:
        """Log-probs `[S, T]` float32 in nats of given tokens under the engine's present weights (0 outside the responses).

        Raises:
            EngineError: at a temperature at which the engine cannot score given tokens.
        """

    def check_sync(self, weights: NamedTensors) -> None:
        """Prove that pushed weights arrive: `weights`, a trainer's at the checkpoint, must leave the engine as loaded.

        An engine with a loading path of its own is first pushed other weights, or one that loads nothing would pass.

        Raises:
            EngineError: if they do not, to the last bit, or if the other weights make no difference.
        """

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Replace the weights.

        Args:
            weights: in Hugging Face names, one tensor an expert.
            version: what the engine calls them from here on; 0 are the checkpoint's.
        """


@dataclass(frozen=True)
class LogprobResult:
    """A scoring pass of a trainer.

    Attributes:
        logprobs: `[S, T]` float32 in nats, 0 outside the response.
        trace: the executed routes, if capture was asked for.
        counts: what replay forced.
        signals: back-propagated signals of the same forward, if they were asked for.
    """

    logprobs: torch.Tensor
    trace: RouteTrace | None
    counts: PassCounts = NOTHING_FORCED
    signals: RouteSignals | None = None


class Objective(Protocol):
    """What an update minimises."""

    def __call__(
        self, logp: torch.Tensor, rows: torch.Tensor, scores: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of each token of a micro-batch, and statistics.

        Args:
            logp: `[n, T]` in nats, with gradient.
            rows: `[n]` int64, the rows of the update that the micro-batch holds.
            scores: `[n, T, L, E]`, scores that the routers ranked in this forward, if the update was asked for them.

        Returns:
            Loss of each token `[n, T]`, averaged by the trainer over all response tokens of the update, and sums over tokens.
        """


@dataclass(frozen=True)
class UpdateResult:
    """An optimizer step.

    Attributes:
        loss: mean over the response tokens of the update.
        grad_norm: global L2 norm before clipping.
        logprobs: `[S, T]` float32, the log-probs of the forward that gave the gradient (`new`, before the step).
        statistics: sums over tokens that the objective reported.
        counts: what replay forced, backward included.
    """

    loss: float
    grad_norm: float
    logprobs: torch.Tensor
    statistics: dict[str, float]
    counts: PassCounts = NOTHING_FORCED


class Trainer(Protocol):
    """An engine that scores and learns."""

    name: str

    def logprobs(
        self,
        batch: TokenBatch,
        *,
        temperature: float,
        replay: Replay | None = None,
        capture: Capture = False,
        micro_batch_size: int | None = None,
        signals: SignalRequest | None = None,
        measure: bool = False,
    ) -> LogprobResult:
        """Score the responses at the present weights; nothing is learned.

        Args:
            batch: the tokens.
            temperature: divides the logits.
            replay: routes to force.
            capture: return the executed routes, and what else of the routers.
            micro_batch_size: instead of the trainer's own.
            signals: back-propagate the log-likelihood of each sequence to the routers too; needs `capture`.
            measure: count fidelity and regret of the replay.

        Raises:
            EngineError: for signals without capture, or that this layout of processes cannot give.
            ReplayError: for a replay of another number of sequences, or one that does not fit the routers.
        """

    def update(
        self,
        batch: TokenBatch,
        objective: Objective,
        *,
        temperature: float,
        replay: Replay | None = None,
        measure: bool = False,
        routers: bool = False,
    ) -> UpdateResult:
        """One optimizer step on the token mean of the objective over the batch.

        Args:
            batch: the tokens.
            objective: loss of each token.
            temperature: divides the logits.
            replay: routes to force.
            measure: count fidelity, regret and router gradients of the replay.
            routers: hand the router scores of each forward to the objective.

        Raises:
            DivergedError: if the gradient is not finite; nothing was learned.
        """

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Present weights of any shape in Hugging Face names, one tensor an expert, detached."""

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state so that `load` continues exactly."""

    def load(self, folder: Path) -> None:
        """Continue from a folder written by `save`.

        Raises:
            EngineError: if it is not whole, or another engine's.
        """
