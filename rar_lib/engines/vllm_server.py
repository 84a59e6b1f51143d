"""The vLLM rollout over HTTP: the engine in a process or on a machine of its own, behind vLLM's OpenAI-compatible server.

The same engine arguments, waves and seeds as in process (vllm_rollout.py), so that it draws the same tokens. What HTTP adds:
- A wave is one request to `/v1/completions` with its prompts as token ids; a scheduler of ours (vllm_worker.py) starts it
  when the last has arrived, and the worker's generator is seeded just before.
- Weights go through a file that a worker extension of ours loads. It tells a fingerprint of the parameters as they lie in
  memory. After every generation stamp and fingerprint must still be those of this client's last push, or the answers are
  refused: another client may have pushed, or the server may have been started anew.
- `check_sync` compares that fingerprint too: pushing other weights must change it, and pushing the checkpoint must give
  the parameters that loading it gave.
- What the server was told to sample by where a request says nothing (`--generation-config`) is overruled by name.
One client at a time: a second one's requests would share forward passes with the first's and take draws from it.
Not run on a GPU.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rar_lib.checkpoint import SpecialTokens, load_model_config, router_header
from rar_lib.config import RolloutConfig, SamplingConfig
from rar_lib.engines.base import NamedTensors, RolloutResult, TokenBatch
from rar_lib.engines.http import Server
from rar_lib.engines.served import (
    WEIGHTS,
    ServedRollout,
    halved,
    probe_batch,
    require_other_scores,
    require_same_scores,
    written,
)
from rar_lib.engines.vllm_capture import plan_capture
from rar_lib.engines.vllm_conditions import CaptureModel
from rar_lib.engines.vllm_rollout import require_temperature_one, waves
from rar_lib.errors import TraceError
from rar_lib.seeding import derive_seed
from rar_lib.traces.wire import vllm as wire

logger = logging.getLogger("rar")
LAUNCH = "a vLLM server started with `python -m rar_lib.engines.vllm_serve CHECKPOINT`"


class VLLMServerRollout(ServedRollout):
    """See `Rollout` in base.py.

    Args:
        path: checkpoint folder.
        config: dtype that the engine must have, and precision of the weights that are pushed.
        special: tokens that end and pad a response.
        server: where it listens.

    Raises:
        EngineError: if the server is not what `vllm_serve` starts, computes in another dtype, or cannot capture every route.
    """

    name = "vllm_server"

    def __init__(self, path: Path, config: RolloutConfig, special: SpecialTokens, server: Server) -> None:
        super().__init__(path, config, special, server)
        found = self._call("rar_describe")[0]
        self._require_fit(found)
        header = router_header(path)
        self.header = header.model_copy(
            update={
                "source": "rollout",
                "producer": "vllm",
                "producer_version": found["version"],
                "model_id": path.name,
            }
        )
        self.max_length = int(found["max_model_len"])
        self._limits = int(found["settings"]["max_num_seqs"]), int(found["settings"]["max_num_batched_tokens"])
        self._wave = itertools.count()
        self._state = self._call("rar_state")
        self._loaded = [worker["loaded"] for worker in self._state]
        self._probe = probe_batch(load_model_config(path).get_text_config().vocab_size, special.pad)
        self._fresh = None if found["stamp"] else self.rescore(self._probe, SamplingConfig())

    def _require_fit(self, found: dict[str, Any]) -> None:
        settings = found["settings"]
        wanted = {
            "dtype": self.config.dtype,
            "enable_return_routed_experts": True,
            "logprobs_mode": "processed_logprobs",
            "waves": True,
            "data_parallel_size": 1,
        }
        for name, value in wanted.items():
            if found[name] != value:
                raise self.server.error("", f"{LAUNCH}, with {name} {value}", f"{name} {found[name]}")
        plan = plan_capture(found["version"], settings, CaptureModel.of(self._path))
        for name, value in plan.arguments.items():
            if name in settings and settings[name] != value:
                raise self.server.error(
                    "", f"{name} {value}, without which routes are lost", f"{name} {settings[name]}"
                )
        for sentence in plan.sentences:
            logger.info("%s: %s", self.server.url, sentence)

    def _call(self, method: str, *args: str) -> list[dict[str, Any]]:
        """What each worker answers to a method of the extension."""
        body = {"method": method, "args": list(args)}
        return self.server.post("/collective_rpc", body, expected=f"{LAUNCH}, to answer {method}")["results"]

    # ---------------------------------------------------------------- weights

    def _push(self, weights: NamedTensors, version: int) -> None:
        stamp = self._stamps.new(version)
        with written(self._path, weights) as folder:
            self._state = self._call("rar_load", str(folder / WEIGHTS), stamp)
        done = self.server.post("/reset_prefix_cache", expected="an emptied prefix cache")
        if not done.get("success"):
            raise self.server.error(
                "/reset_prefix_cache", "an emptied prefix cache", f"{done}: is another client generating?"
            )
        self.weight_version = version

    def check_sync(self, weights: NamedTensors) -> None:
        """See `Rollout.check_sync`: parameters as they lie in the engine, and log-probs, to the last bit.

        The log-probs are compared where this client met the server before any push.
        """
        own = list(weights)
        self._push(halved(own), -1)
        for rank, (worker, loaded) in enumerate(zip(self._state, self._loaded, strict=True)):
            if worker["fingerprint"] == loaded:
                raise self.server.error(
                    "",
                    f"worker {rank} to hold other weights after a push of {self._path.name} with every tensor halved",
                    f"fingerprint {loaded:.12}, what loading it gave: pushes are acknowledged and do not arrive",
                )
        if self._fresh is not None:
            require_other_scores(self.server.url, self._fresh, self.rescore(self._probe, SamplingConfig()))
        self._push(own, -1)
        for rank, (worker, loaded) in enumerate(zip(self._state, self._loaded, strict=True)):
            if worker["fingerprint"] != loaded:
                raise self.server.error(
                    "",
                    f"worker {rank} to hold after a push of {self._path.name} what loading it gave, fingerprint {loaded:.12}",
                    f"{worker['fingerprint']:.12}: the server loaded another checkpoint, or the push does not arrive whole",
                )
        if self._fresh is not None:
            require_same_scores(self.server.url, self._fresh, self.rescore(self._probe, SamplingConfig()))

    def _require_own_weights(self) -> None:
        """The weights that answered must be those of the last push."""
        for mine, found in zip(self._state, self._call("rar_state"), strict=True):
            if found["stamp"] != mine["stamp"]:
                who = (
                    "an unpushed checkpoint: it was started anew"
                    if found["stamp"] is None
                    else f"{found['stamp']}: somebody else pushed"
                )
                raise self.server.error("", f"answers of weights {mine['stamp']}", who)
            if found["fingerprint"] != mine["fingerprint"]:
                raise self.server.error(
                    "",
                    f"answers of weights {mine['stamp']} with fingerprint {mine['fingerprint']:.12}",
                    f"{found['fingerprint']:.12}: they were changed by another way",
                )

    # ---------------------------------------------------------------- sampling and scoring

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, uids: Sequence[str], seed: int
    ) -> RolloutResult:
        """See `Rollout.generate`.

        Raises:
            EngineError: also if the server dies, answers without routes, or answers for other weights.
        """
        started = time.perf_counter()
        self._require_lengths(prompts, uids, sampling)
        body = {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "stop_token_ids": list(self.special.end),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        records = []
        for number, wave in enumerate(waves([len(p) for p in prompts], *self._limits)):
            self._call("rar_seed", str(derive_seed(seed, number)))
            records.append((f"wave {number}", self._complete([prompts[i] for i in wave], body)))
        self._require_own_weights()
        try:
            samples = wire.from_answers(records, self.server.url).samples
        except TraceError as error:
            raise self.server.error("/v1/completions", "answers in vLLM's layout", str(error)) from None
        return self._result(prompts, uids, sampling, samples, started)

    def _complete(self, prompts: Sequence[Sequence[int]], body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one wave of prompts, choices in their order."""
        wave = {"rar_wave": f"{self._stamps.client}-{next(self._wave)}/{len(prompts)}"}
        request = {**body, "prompt": [list(p) for p in prompts], "vllm_xargs": wave}
        answer = self.server.post("/v1/completions", request, expected=f"{len(prompts)} completions")
        given = answer.get("choices") or []
        ends = {choice.get("finish_reason") for choice in given}
        if [choice.get("index") for choice in given] != list(range(len(prompts))) or not ends <= {"stop", "length"}:
            found = f"{len(given)}, finished by {sorted(map(str, ends))}"
            raise self.server.error("/v1/completions", f"{len(prompts)} finished completions in order", found)
        return answer

    def rescore(self, batch: TokenBatch, sampling: SamplingConfig) -> torch.Tensor:
        """See `Rollout.rescore`: `[S, T]`. vLLM scores prompts at temperature 1 only.

        Raises:
            EngineError: at another temperature; if the server dies, answers without log-probs, or answers for other weights.
        """
        require_temperature_one("vLLM", sampling)
        body = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0}
        rows = [batch.tokens[i, : batch.lengths[i]].tolist() for i in range(len(batch))]
        scores = torch.zeros(batch.tokens.shape)
        for wave in waves([len(r) for r in rows], *self._limits):
            answer = self._complete([rows[i] for i in wave], body)
            for i, choice in zip(wave, answer["choices"], strict=True):
                given = choice.get("prompt_logprobs") or []
                if len(given) != len(rows[i]):
                    raise self.server.error(
                        "/v1/completions", f"{len(rows[i])} log-probs of prompt tokens", f"{len(given)}"
                    )
                for t in range(int(batch.prompt_lengths[i]), len(rows[i])):
                    scores[i, t] = given[t][str(rows[i][t])]["logprob"]
        self._require_own_weights()
        return scores

    def shutdown(self) -> None:
        """Leave the server; end it if this process started it."""
        self.server.close()
