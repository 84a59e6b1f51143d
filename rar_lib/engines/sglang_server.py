"""A rollout over an SGLang server's native endpoints, given by URL.

    python -m sglang.launch_server --model-path CHECKPOINT --dtype bfloat16 --enable-return-routed-experts \\
        --enable-deterministic-inference

Fields and endpoints as SGLang documents them (native API, deterministic inference, SGLang for RL): `/generate` with
`input_ids`, `return_logprob` and `return_routed_experts`; `/update_weights_from_disk` with a `weight_version` that every answer
then carries in `meta_info`; `/model_info` and `/server_info`, or their older names. The routes are read by traces/wire/sglang.py.

Every answer must name this client's last push as its weights. A push by another client over tensors that gives no version
leaves the name as it was: SGLang does not tell of it, so neither can this. A server with SGLANG_RETURN_ORIGINAL_LOGPROB
reports log-probs before the temperature: sample at temperature 1 from such a server. Not run against a real SGLang server:
tested against a small one that speaks this protocol.
"""

from __future__ import annotations

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
    ServedRollout,
    halved,
    probe_batch,
    require_other_scores,
    require_same_scores,
    written,
)
from rar_lib.engines.vllm_rollout import require_temperature_one
from rar_lib.errors import EngineError, TraceError
from rar_lib.seeding import derive_seed
from rar_lib.traces.layers import ModelShape
from rar_lib.traces.wire import sglang as wire
from rar_lib.traces.wire.dump import ReadOptions

logger = logging.getLogger("rar")


class SGLangServerRollout(ServedRollout):
    """See `Rollout` in base.py.

    Args:
        path: checkpoint folder, the one that the server was started with.
        config: dtype that the engine must have, and precision of the weights that are pushed.
        special: tokens that end and pad a response.
        server: where it listens.

    Raises:
        EngineError: if the server does not return routes, or computes in another dtype.
    """

    name = "sglang_server"

    def __init__(self, path: Path, config: RolloutConfig, special: SpecialTokens, server: Server) -> None:
        super().__init__(path, config, special, server)
        info = self._get("server_info")
        self._require_fit(info)
        self.header = router_header(path).model_copy(
            update={
                "source": "rollout",
                "producer": "sglang",
                "producer_version": str(info.get("version", "")),
                "model_id": path.name,
            }
        )
        model = load_model_config(path).get_text_config()
        self._options = ReadOptions(ModelShape.load(path))
        self.max_length = int(model.max_position_embeddings)
        held = self._get("model_info")
        self._stamp, self._folder = str(held.get("weight_version")), str(held.get("model_path"))
        if self._stamp.startswith("rar-"):  # pushed by an earlier client: back to the checkpoint first
            self._update(path)
        self._probe = probe_batch(model.vocab_size, special.pad)
        self._fresh = self.rescore(self._probe, SamplingConfig())

    def _get(self, endpoint: str) -> dict[str, Any]:
        """What an endpoint tells, under its present name or the older one."""
        expected = f"an SGLang server that answers /{endpoint} or /get_{endpoint}"
        try:
            return self.server.get(f"/{endpoint}", expected=expected)
        except EngineError as error:
            if "status 404" not in str(error):
                raise
        return self.server.get(f"/get_{endpoint}", expected=expected)

    def _require_fit(self, info: dict[str, Any]) -> None:
        if info.get("enable_return_routed_experts") is not True:
            found = info.get("enable_return_routed_experts")
            raise self.server.error(
                "/server_info", "enable_return_routed_experts True (its launch argument)", f"{found}"
            )
        if info.get("dtype") != self.config.dtype:  # "auto" is whatever the checkpoint makes of it
            raise self.server.error(
                "/server_info", f"--dtype {self.config.dtype} (its launch argument)", f"{info.get('dtype')}"
            )
        if info.get("enable_deterministic_inference") is not True:
            logger.warning(
                "%s: without --enable-deterministic-inference SGLang ignores the seed of a request: a resumed run draws other tokens",
                self.server.url,
            )

    # ---------------------------------------------------------------- weights

    def _push(self, weights: NamedTensors, version: int) -> None:
        with written(self._path, weights) as folder:
            self._update(folder, version)

    def _update(self, folder: Path, version: int = -1) -> None:
        stamp = self._stamps.new(version)
        body = {"model_path": str(folder), "weight_version": stamp, "flush_cache": True}
        done = self.server.post("/update_weights_from_disk", body, expected=f"weights read from {folder}")
        if done.get("success") is not True:
            raise self.server.error(
                "/update_weights_from_disk", f"weights read from {folder}", f"{done.get('message', done)}"
            )
        self._stamp, self._folder, self.weight_version = stamp, str(folder), version

    def check_sync(self, weights: NamedTensors) -> None:
        """See `Rollout.check_sync`: log-probs to the last bit."""
        own = list(weights)
        self._push(halved(own), -1)
        require_other_scores(self.server.url, self._fresh, self.rescore(self._probe, SamplingConfig()))
        self._push(own, -1)
        require_same_scores(self.server.url, self._fresh, self.rescore(self._probe, SamplingConfig()))

    def _require_own_weights(self, answers: Sequence[dict[str, Any]]) -> None:
        """Every answer, and the server after it, must name the last push."""
        for i, answer in enumerate(answers):
            meta = answer["meta_info"]
            told = {str(span.get("version")) for span in meta.get("weight_versions") or []}
            if "weight_version" in meta or not told:
                told.add(str(meta.get("weight_version")))
            if told != {self._stamp}:
                found = ", ".join(sorted(told))
                raise self.server.error(
                    "/generate", f"answer {i} of weights {self._stamp}", f"weights {found}: {_whose(told)}"
                )
        held = self._get("model_info")
        if (str(held.get("weight_version")), str(held.get("model_path"))) != (self._stamp, self._folder):
            found = f"{held.get('weight_version')} from {held.get('model_path')}"
            raise self.server.error(
                "/model_info", f"weights {self._stamp} from {self._folder}", f"{found}: somebody else pushed"
            )

    # ---------------------------------------------------------------- sampling and scoring

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, uids: Sequence[str], seed: int
    ) -> RolloutResult:
        """See `Rollout.generate`. Each request has a seed of its own, so that its draws do not depend on the batch.

        Raises:
            EngineError: also if the server dies, answers without routes, or answers for other weights.
        """
        started = time.perf_counter()
        self._require_lengths(prompts, uids, sampling)
        common = {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(self.special.end),
        }
        params = [{**common, "sampling_seed": derive_seed(seed, uid)} for uid in uids]
        answers = self._answers(prompts, {"sampling_params": params, "return_routed_experts": True})
        self._require_own_weights(answers)
        records = [
            (f"answer {i}", {"request": {"input_ids": list(prompt)}, "response": answer})
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        try:
            samples = wire.from_answers(records, self.server.url, self._options).samples
        except TraceError as error:
            raise self.server.error("/generate", "answers in SGLang's layout", str(error)) from None
        return self._result(prompts, uids, sampling, samples, started)

    def _answers(self, prompts: Sequence[Sequence[int]], body: dict[str, Any]) -> list[dict[str, Any]]:
        """One finished answer a prompt."""
        request = {"input_ids": [list(p) for p in prompts], "return_logprob": True, **body}
        answers = self.server.post("/generate", request, expected=f"{len(prompts)} answers")
        if not isinstance(answers, list) or len(answers) != len(prompts):
            found = f"{len(answers)}" if isinstance(answers, list) else f"a {type(answers).__name__}"
            raise self.server.error("/generate", f"a list of {len(prompts)} answers", found)
        for i, answer in enumerate(answers):
            reason = ((answer.get("meta_info") or {}).get("finish_reason") or {}).get("type")
            if reason not in ("stop", "length"):
                raise self.server.error("/generate", f"answer {i} finished by stop or length", f"{reason}")
        return answers

    def rescore(self, batch: TokenBatch, sampling: SamplingConfig) -> torch.Tensor:
        """See `Rollout.rescore`: `[S, T]`. SGLang scores prompts at temperature 1 only.

        Raises:
            EngineError: at another temperature; if the server dies, answers without log-probs, or answers for other weights.
        """
        require_temperature_one("SGLang", sampling)
        rows = [batch.tokens[i, : batch.lengths[i]].tolist() for i in range(len(batch))]
        params = {"temperature": 1.0, "max_new_tokens": 0}
        answers = self._answers(rows, {"sampling_params": params, "logprob_start_len": 0})
        scores = torch.zeros(batch.tokens.shape)
        for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            given = answer["meta_info"].get("input_token_logprobs") or []
            if [entry[1] for entry in given] != row:
                raise self.server.error(
                    "/generate", f"answer {i} with a log-prob of each of {len(row)} prompt tokens", f"{len(given)}"
                )
            for t in range(int(batch.prompt_lengths[i]), len(row)):
                scores[i, t] = given[t][0]
        self._require_own_weights(answers)
        return scores

    def shutdown(self) -> None:
        """Leave the server."""
        self.server.close()


def _whose(told: set[str]) -> str:
    return "it does not say of which" if "None" in told else "somebody else pushed, or it was started anew"
