"""What rollouts over a server have in common: weights through files, and answers that are what was asked for.

A push is a checkpoint folder that the server reads: both must see it. It lies in the folder for temporary files, which
TMPDIR moves to a shared disk where the server runs on another machine. Each push has a stamp that no other client can
give, and an answer of a server whose weights bear another stamp is refused.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from rar_lib.checkpoint import SpecialTokens
from rar_lib.config import RolloutConfig, SamplingConfig
from rar_lib.engines.base import NamedTensors, RolloutResult, TokenBatch
from rar_lib.engines.hf_rollout import pack_rollout, require_length
from rar_lib.engines.http import Server
from rar_lib.engines.precision import at_precision
from rar_lib.errors import EngineError
from rar_lib.traces.trace import TraceHeader
from rar_lib.traces.wire.dump import Sample

WEIGHTS = "model.safetensors"


class Stamps:
    """Names of pushes: `rar-<this client>-<number of the push>-v<weight version>`; `client` is drawn anew for each."""

    def __init__(self) -> None:
        self.client, self._pushes = secrets.token_hex(4), 0

    def new(self, version: int) -> str:
        """The stamp of the next push."""
        self._pushes += 1
        return f"rar-{self.client}-{self._pushes}-v{version}"


class ServedRollout:
    """What a rollout over a server does whatever the server is; see `Rollout` in base.py.

    Args:
        path: checkpoint folder.
        config: dtype that the engine must have, and precision of the weights that are pushed.
        special: tokens that end and pad a response.
        server: where it listens.

    Attributes:
        header: of the traces that it returns.
        max_length: tokens of prompt and response at most.
    """

    header: TraceHeader
    max_length: int

    def __init__(self, path: Path, config: RolloutConfig, special: SpecialTokens, server: Server) -> None:
        self.config, self.special, self.server, self._path = config, special, server, path
        self.weight_version, self._stamps = -1, Stamps()

    def reconfigure(self, config: RolloutConfig) -> None:
        """Another precision or sampling for the same engine; the dtype is fixed when it starts.

        Raises:
            EngineError: for another dtype.
        """
        if config.dtype != self.config.dtype:
            raise EngineError(
                f"rollout.dtype: {self.server.url} computes in {self.config.dtype}, asked for {config.dtype}"
            )
        self.config = config

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """See `Rollout.load_weights`: rounds to the configured precision and pushes."""
        self._push(at_precision(weights, self.config.precision), version)

    def _push(self, weights: NamedTensors, version: int) -> None:
        """Bring weights into the server, and remember their stamp."""
        raise NotImplementedError

    def _require_lengths(self, prompts: Sequence[Sequence[int]], uids: Sequence[str], sampling: SamplingConfig) -> None:
        for uid, prompt in zip(uids, prompts, strict=True):
            require_length(uid, len(prompt), sampling.max_new_tokens, self.max_length)

    def _result(
        self,
        prompts: Sequence[Sequence[int]],
        uids: Sequence[str],
        sampling: SamplingConfig,
        samples: Sequence[Sample],
        started: float,
    ) -> RolloutResult:
        """What the answers say, checked by `unpack`; `started` is on the clock of time.perf_counter."""
        responses, scores, routes = unpack(self.server, self.header, prompts, uids, samples)
        header = self.header.model_copy(update={"sampling": sampling.model_dump()})
        trace = pack_rollout(header, prompts, responses, scores, routes, self.weight_version)
        return RolloutResult(tuple(responses), tuple(scores), trace, self.weight_version, time.perf_counter() - started)


@contextlib.contextmanager
def written(checkpoint: Path, weights: NamedTensors) -> Iterator[Path]:
    """A folder like the checkpoint's but with these weights in one safetensors file, for as long as the context is open."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="rar-push-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server may be another user's
        for file in checkpoint.iterdir():
            if file.suffix in (".json", ".txt", ".model", ".jinja", ".py") and not file.name.endswith(".index.json"):
                shutil.copy(file, folder)
        tensors = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in weights}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        (folder / WEIGHTS).chmod(0o644)
        yield folder


def unpack(
    server: Server,
    header: TraceHeader,
    prompts: Sequence[Sequence[int]],
    uids: Sequence[str],
    samples: Sequence[Sample],
) -> tuple[list[tuple[int, ...]], list[tuple[float, ...]], list[np.ndarray]]:
    """Responses, log-probs (nats) and routes `[P + O - 1, L, K]` of the MoE layers, one of each a prompt of P tokens and answer of O.

    Args:
        server: whose answers these are, for the error.
        header: K and MoE layers of the model.
        prompts: token ids.
        uids: one name a prompt, for the error.
        samples: the answers, in the order of the prompts.

    Raises:
        EngineError: if a sequence is not the answer to its prompt, or brings no log-probs, no routes, or another number of rows.
    """
    if len(samples) != len(prompts):
        raise server.error("", f"{len(prompts)} answers, one a prompt", f"{len(samples)}")
    responses, scores, routes = [], [], []
    for uid, prompt, sample in zip(uids, prompts, samples, strict=True):
        where = f"the answer to prompt {uid}"
        if sample.token_ids is None or sample.token_ids[: len(prompt)].tolist() != list(prompt):
            raise server.error("", f"{where} to begin with its {len(prompt)} tokens", _told(sample.token_ids))
        answered = tuple(sample.token_ids[len(prompt) :].tolist())
        given = sample.logprobs.get("rollout")
        if not answered or given is None or not np.isfinite(given[len(prompt) :]).all():
            raise server.error("", f"{where} with a log-prob of each token", "none" if given is None else f"{given}")
        rows = len(prompt) + len(answered) - 1
        if sample.experts is None:
            raise server.error(
                "", f"{where} with {rows} rows of routes", "no routes; was the server started to return them?"
            )
        ids, layers = sample.experts, header.moe_layers
        if sample.first or len(ids) != rows or ids.shape[1] <= layers[-1] or ids.shape[2] != header.top_k:
            expected = f"[{rows}, more than {layers[-1]} layers, {header.top_k}]"
            raise server.error("", f"{where} with routes {expected}", f"{list(ids.shape)} from token {sample.first}")
        responses.append(answered)
        scores.append(tuple(given[len(prompt) :].tolist()))
        routes.append(ids[:, list(layers)])
    if routes and not any(ids.any() for ids in routes):
        raise server.error(
            "", "routes", f"expert 0 in all {sum(map(len, routes))} rows, slots and layers: a dead capture"
        )
    return responses, scores, routes


def _told(ids: np.ndarray | None) -> str:
    return "no token ids" if ids is None else f"{ids[:8].tolist()}"


def probe_batch(vocabulary: int, pad: int) -> TokenBatch:
    """Eight fixed sequences of 12 random tokens, two of them the prompt, to compare an engine with itself."""
    rows = np.random.default_rng(0).integers(0, vocabulary, (8, 12)).tolist()
    return TokenBatch.pack([r[:2] for r in rows], [r[2:] for r in rows], [str(i) for i in range(8)], range(8), pad)


def halved(weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Other weights of the same names and dtypes, of any shape: every tensor halved."""
    return ((name, tensor / 2) for name, tensor in weights)


def require_other_scores(name: str, fresh: torch.Tensor, pushed: torch.Tensor) -> None:
    """Weights that were halved must not score as the checkpoint's: a push that loads nothing leaves these.

    Args:
        name: of the engine, for the error.
        fresh, pushed: `[S, T]` log-probs of the probe batch as loaded, and after the push.

    Raises:
        EngineError: if every log-prob is the same.
    """
    if torch.equal(fresh, pushed):
        raise EngineError(
            f"{name} scores a push of the checkpoint with every tensor halved as it scores the checkpoint (all log-probs "
            "the same, expected others): pushes are acknowledged and do not arrive"
        )


def require_same_scores(name: str, fresh: torch.Tensor, pushed: torch.Tensor) -> None:
    """The checkpoint's own weights must score the same after a push as after loading.

    Args:
        name: of the engine, for the error.
        fresh, pushed: `[S, T]` log-probs of the probe batch as loaded, and after the push.

    Raises:
        EngineError: if one log-prob differs.
    """
    gap = float((pushed - fresh).abs().max())
    if gap != 0:
        raise EngineError(
            f"{name} scores the checkpoint's own weights differently after an update than after loading (largest "
            f"difference {gap:.3g} nats, expected 0): the pushed names or the packing of the experts are wrong"
        )
