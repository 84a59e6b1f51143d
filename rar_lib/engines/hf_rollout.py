"""The embedded rollout: batched sampling from a Transformers MoE with a KV cache, and knobs for the mismatch.

Prompts of one length form one batch, so nothing is padded. A token is drawn by inverse CDF from a uniform number keyed
by (seed, uid, position): the same prompt gets the same numbers in any batch, order or process. The knobs are the dtype,
fp8-rounded weights, noise on the router logits, and the zero-mismatch setting, in which the sample is scored again by
the trainer's own forward, so that rollout and trainer agree bit for bit.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from rar_lib.checkpoint import SpecialTokens, load_model, seeded
from rar_lib.config import RolloutConfig, SamplingConfig
from rar_lib.engines.base import Capture, NamedTensors, RolloutResult, TokenBatch, Trainer
from rar_lib.engines.hf_weights import hf_names, load_hf_weights
from rar_lib.engines.logits import response_logprobs
from rar_lib.engines.precision import at_precision
from rar_lib.errors import EngineError
from rar_lib.replay.contexts import recording
from rar_lib.replay.points import find_points
from rar_lib.seeding import derive_seed
from rar_lib.traces.trace import RouteTrace, Status


class HFRollout:
    """See `Rollout` in base.py.

    Args:
        path: checkpoint folder.
        config: dtype, precision, router noise, zero_mismatch.
        special: tokens that end and pad a response.
        trainer: whose forward re-scores the sample under `zero_mismatch`.
        shares: update shares of a batch; the re-scoring splits into micro-batches within them, as the trainer does.
        scores: keep all ranked router scores in the trace.
    """

    name = "hf"

    def __init__(
        self,
        path: Path,
        config: RolloutConfig,
        special: SpecialTokens,
        trainer: Trainer | None = None,
        shares: int = 1,
        scores: bool = False,
    ) -> None:
        self.config, self.special, self.trainer, self.model_id = config, special, trainer, path.name
        self._scores = scores
        self.model: Any = load_model(path, getattr(torch, config.dtype), config.kernels)
        self.shares, self.weight_version = shares, -1

    def check_sync(self, weights: NamedTensors) -> None:
        """See `Rollout.check_sync`; raises EngineError as it says."""
        loaded = {name: tensor.clone() for name, tensor in hf_names(self.model)}
        load_hf_weights(self.model, weights)
        moved = [name for name, tensor in hf_names(self.model) if not torch.equal(tensor, loaded[name])]
        if moved:
            raise EngineError(f"weights pushed into the rollout differ from those of its checkpoint: {moved[:5]}")

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """See `Rollout.load_weights`."""
        load_hf_weights(self.model, at_precision(weights, self.config.precision))
        self.weight_version = version

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, uids: Sequence[str], seed: int
    ) -> RolloutResult:
        """See `Rollout.generate`."""
        started = time.perf_counter()
        longest = self.model.config.get_text_config().max_position_embeddings
        for uid, prompt in zip(uids, prompts, strict=True):
            require_length(uid, len(prompt), sampling.max_new_tokens, longest)
        by_length: dict[int, list[int]] = defaultdict(list)
        for i, prompt in enumerate(prompts):
            by_length[len(prompt)].append(i)
        responses: list[tuple[int, ...]] = [()] * len(prompts)
        scores: list[tuple[float, ...]] = [()] * len(prompts)
        routes: list[np.ndarray] = [np.zeros(0)] * len(prompts)
        ranked: list[np.ndarray] | None = [np.zeros(0)] * len(prompts) if self._scores else None
        how = {"scores": True} if self._scores else {"at_the_experts": True}
        with torch.no_grad(), self._noise(seed), recording(self.model, **how) as record:
            for chosen in by_length.values():
                tokens, logp, used, seen = self._sample(
                    torch.tensor([list(prompts[i]) for i in chosen]), sampling, [uids[i] for i in chosen], seed, record
                )
                ids = used.numpy()
                for row, (i, drawn, said) in enumerate(zip(chosen, tokens.tolist(), logp.tolist(), strict=True)):
                    length = next((n + 1 for n, t in enumerate(drawn) if t in self.special.end), len(drawn))
                    responses[i], scores[i] = tuple(drawn[:length]), tuple(said[:length])
                    routes[i] = ids[row, : len(prompts[i]) + length - 1]
                    if ranked is not None:
                        ranked[i] = seen["scores"][row, : len(prompts[i]) + length - 1].float().numpy()
            header = record.header
        trace = pack_rollout(
            header.model_copy(
                update={
                    "source": "rollout",
                    "producer": self.name,
                    "model_id": self.model_id,
                    "sampling": sampling.model_dump(),
                }
            ),
            prompts,
            responses,
            scores,
            routes,
            self.weight_version,
            ranked,
        )
        result = RolloutResult(
            tuple(responses), tuple(scores), trace, self.weight_version, time.perf_counter() - started
        )
        return self._rescored(result, prompts, sampling, uids) if self.config.zero_mismatch else result

    def _sample(
        self, prompts: torch.Tensor, sampling: SamplingConfig, uids: Sequence[str], seed: int, record: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """For prompts of one length: tokens and log-probs `[n, max_new]`, routes `[n, P + max_new - 1, L, K]`, what was kept beside these."""
        uniform = np.stack(
            [np.random.default_rng(derive_seed(seed, uid)).random(sampling.max_new_tokens) for uid in uids]
        )
        draws = torch.from_numpy(uniform)
        cache, step, took = None, prompts, _Took(record)
        same: torch.Tensor | None = None
        if self.config.kernels == "fused" and self.config.router_noise == 0:
            step, same = torch.unique(prompts, dim=0, return_inverse=True)  # a prompt of many samples is read once
        tokens, logps = [], []
        done, end = torch.zeros(len(prompts), dtype=torch.bool), torch.tensor(self.special.end)
        for position in range(sampling.max_new_tokens):
            out = self.model(input_ids=step, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[:, -1]
            if position == 0 and same is not None:
                took.take(len(step), same)
                cache.reorder_cache(same)  # every kind of cache has it, and it may enlarge
                logits = logits[same]
            logp = torch.log_softmax(logits.float() / sampling.temperature, -1)
            cdf = logp.double().exp().cumsum(-1)
            drawn = torch.searchsorted(cdf, draws[:, position, None] * cdf[:, -1:], right=True)
            drawn = drawn.clamp_max(logp.shape[-1] - 1)  # u * total may round up to the total itself
            tokens.append(drawn[:, 0])
            logps.append(logp.gather(-1, drawn)[:, 0])
            done |= torch.isin(drawn[:, 0], end)
            step = drawn
            if done.all():
                break
        if same is None or len(tokens) > 1:
            took.take(len(prompts))
        return torch.stack(tokens, 1), torch.stack(logps, 1), *took.joined()

    @contextlib.contextmanager
    def _noise(self, seed: int) -> Iterator[None]:
        """Gaussian noise on the logits of every router, redrawn at each call, from a generator of its own."""
        if self.config.router_noise == 0:
            yield
            return
        with seeded(derive_seed(seed, "router-noise")), contextlib.ExitStack() as stack:
            noises = [
                stack.enter_context(noisy_linear(module, self.config.router_noise))
                for module in router_modules(self.model)
            ]
            yield
        deaf = [noise.owner for noise in noises if noise.calls == 0]
        if deaf:
            raise EngineError(f"rollout.router_noise: {deaf[0]} computes its logits without F.linear and got no noise")

    def _rescored(
        self, result: RolloutResult, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, uids: Sequence[str]
    ) -> RolloutResult:
        """The same tokens with log-probs and routes of the trainer's forward, as if it had sampled them."""
        assert self.trainer is not None
        batch = TokenBatch.pack(prompts, result.responses, uids, range(len(prompts)), self.special.pad, self.shares)
        capture: Capture = "scores" if self._scores else True
        again = self.trainer.logprobs(batch, temperature=sampling.temperature, capture=capture)
        assert again.trace is not None
        mask = batch.response_mask
        scores = tuple(tuple(again.logprobs[i][mask[i]].tolist()) for i in range(len(batch)))
        header = again.trace.header.model_copy(update={"source": "rollout", "sampling": sampling.model_dump()})
        trace = RouteTrace(
            header,
            again.trace.experts,
            again.trace.offsets,
            again.trace.status,
            token_ids=again.trace.token_ids,
            logprobs=np.where(mask[batch.token_mask], again.logprobs[batch.token_mask], np.nan).astype(np.float32),
            scores=again.trace.scores,
            policy_version=result.trace.policy_version,
        )
        return RolloutResult(result.responses, scores, trace, result.weight_version, result.seconds)

    def rescore(self, batch: TokenBatch, sampling: SamplingConfig) -> torch.Tensor:
        """See `Rollout.rescore`: `[S, T]` from one forward over whole sequences, where decoding went token by token.

        Router noise is part of the engine, so it is drawn here too, under another key than while sampling.
        """
        with torch.no_grad(), self._noise(derive_seed(self.weight_version, "rescore")):
            logits = self.model(input_ids=batch.tokens, use_cache=False).logits
        return response_logprobs(logits.float(), batch.tokens, batch.response_mask, sampling.temperature)


class _Took:
    """What a recording saw of the same rows, piece after piece along the time axis."""

    def __init__(self, record: Any) -> None:
        self._record = record
        self._ids: list[torch.Tensor] = []
        self._beside: list[dict[str, torch.Tensor]] = []

    def take(self, rows: int, order: torch.Tensor | slice = slice(None)) -> None:
        """The forwards since the last call held so many rows; `order [n]` says which of them each row of the batch is."""
        self._ids.append(self._record.take(rows)[order])
        self._beside.append({name: values[order] for name, values in self._record.last.items()})

    def joined(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Ids `[n, T, L, K]` on the CPU, and what was kept beside them, `[n, T, L, ...]`."""
        beside = {name: torch.cat([one[name] for one in self._beside], 1).cpu() for name in self._beside[0]}
        return torch.cat(self._ids, 1).cpu(), beside


def require_length(uid: str, prompt: int, new: int, longest: int) -> None:
    """Refuse a prompt that may outgrow the model; lengths in tokens.

    Raises:
        EngineError: names the prompt and the three lengths in tokens.
    """
    if prompt + new > longest:
        raise EngineError(f"prompt {uid}: {prompt} + {new} tokens exceed the model's {longest}")


def pack_rollout(
    header: Any,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    routes: Sequence[np.ndarray],
    version: int,
    scores: Sequence[np.ndarray] | None = None,
) -> RouteTrace:
    """A rollout trace from the routes of each sequence, whose last token has none.

    Args:
        header: of the trace.
        prompts, responses: token ids, P and R of them a sequence.
        logprobs: of the response tokens, in nats.
        routes: `[P + R - 1, L, K]` integers a sequence.
        version: of the weights.
        scores: `[P + R - 1, L, E]` float32 a sequence, if they are kept.

    Raises:
        EngineError: if a sequence has another number of rows; names it, its tokens T and the rows found.
    """
    for i, (prompt, response, rows) in enumerate(zip(prompts, responses, routes, strict=True)):
        total = len(prompt) + len(response)
        if rows.shape != (total - 1, header.num_layers, header.top_k):
            raise EngineError(
                f"sequence {i}: {total} tokens need routes of shape {(total - 1, header.num_layers, header.top_k)}, "
                f"found {rows.shape}"
            )
    lengths = np.array([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)])
    blank = np.full((1, header.num_layers, header.top_k), -1, dtype=np.int64)
    experts = np.concatenate([part for rows in routes for part in (rows, blank)])
    last = np.cumsum(lengths) - 1
    status = np.full(int(lengths.sum()), Status.RECORDED, dtype=np.uint8)
    status[last] = Status.LAST
    both = zip(prompts, responses, strict=True)
    tokens = np.array([token for pair in both for part in pair for token in part], dtype=np.int64)
    known = zip(prompts, logprobs, strict=True)
    logp = np.array([one for p, said in known for part in ([np.nan] * len(p), said) for one in part], dtype=np.float32)
    ranked = None
    if scores is not None:
        end = np.zeros((1, header.num_layers, header.num_experts), np.float32)
        ranked = np.concatenate([part for rows in scores for part in (rows, end)])
    return RouteTrace.from_packed(
        header,
        experts,
        lengths,
        status,
        token_ids=tokens,
        scores=ranked,
        logprobs=logp,
        policy_version=np.full(len(tokens), version, dtype=np.int64),
    )


def router_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The router modules of a Transformers model."""
    return list(getattr(find_points(model), "routers", []))


class _Noise(TorchFunctionMode):
    """Adds Gaussian noise to what `F.linear` returns."""

    def __init__(self, owner: str, scale: float) -> None:
        super().__init__()
        self.owner, self.scale, self.calls = owner, scale, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.nn.functional.linear:
            return out
        self.calls += 1
        return out + self.scale * torch.randn_like(out)


@contextlib.contextmanager
def noisy_linear(module: torch.nn.Module, scale: float) -> Iterator[_Noise]:
    """Add Gaussian noise of standard deviation `scale` (of the logits' unit) to every `F.linear` inside a module's forward."""
    inner, noise = module.forward, _Noise(type(module).__name__, scale)

    def call(*args: Any, **kwargs: Any) -> Any:
        with noise:
            return inner(*args, **kwargs)

    module.forward = call
    try:
        yield noise
    finally:
        del module.forward
