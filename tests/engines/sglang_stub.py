"""A small server that speaks SGLang's native protocol, so that its client can be tested where SGLang cannot be installed.

Its numbers are real: an hf rollout samples, scores and routes. A request is drawn by its own `sampling_seed`, as under
SGLang's deterministic inference. `faults` make it misbehave as servers do.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from rar_lib.config import RolloutConfig, SamplingConfig
from rar_lib.engines.base import TokenBatch
from rar_lib.engines.hf_rollout import HFRollout
from tests.conftest import SPECIAL


class SGLangStub:
    """State of the server.

    Attributes:
        faults: `no_routes`, `no_version`, `null_version` (a span of none), `short_routes`, `dies`, `silent` (pushes are
            acknowledged and not loaded).
        requests: paths asked for, in order.
        params: sampling parameters of the last `/generate` that sampled.
    """

    def __init__(self, checkpoint: Path, dtype: str = "float32") -> None:
        config = RolloutConfig(engine="hf", dtype=dtype, precision="native")
        self.engine = HFRollout(checkpoint, config, SPECIAL)
        self.info = {
            "version": "0.5.10",
            "dtype": dtype,
            "enable_return_routed_experts": True,
            "enable_deterministic_inference": True,
        }
        self.held = {"model_path": str(checkpoint), "weight_version": "default"}
        self.faults: set[str] = set()
        self.requests: list[str] = []
        self.params: list[dict[str, Any]] = []

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in ("/server_info", "/model_info"):
            return 200, self.info if path == "/server_info" else self.held
        if path == "/update_weights_from_disk":
            return self._update(body)
        if path == "/generate":
            return 200, self._score(body) if body.get("logprob_start_len") == 0 else self._sample(body)
        return 404, {"detail": "Not Found"}

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            return 400, {"success": False, "message": "no weights there", "num_paused_requests": 0}
        if "silent" not in self.faults:
            weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
            self.engine.load_weights(weights.items(), 0)
        self.held["model_path"] = body["model_path"]
        if body.get("weight_version") is not None:
            self.held["weight_version"] = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _meta(self, prompt: int, answered: int) -> dict[str, Any]:
        version: dict[str, Any] = {"weight_version": self.held["weight_version"]}
        if "no_version" in self.faults:
            version = {}
        if "null_version" in self.faults:
            version = {"weight_versions": [{"version": None, "start": 0, "end": answered}]}
        return {
            "finish_reason": {"type": "length", "length": answered},
            "prompt_tokens": prompt,
            "completion_tokens": answered,
        } | version

    def _sample(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        params, prompts = body["sampling_params"], body["input_ids"]
        self.params = params
        sampling = SamplingConfig(temperature=params[0]["temperature"], max_new_tokens=params[0]["max_new_tokens"])
        drawn = self.engine.generate(prompts, sampling, [str(p["sampling_seed"]) for p in params], 0)
        answers = []
        for i, prompt in enumerate(prompts):
            begin, end = drawn.trace.offsets[i : i + 2]
            rows = drawn.trace.experts[begin : end - 1].astype(np.int32)  # every layer of this model has a router
            meta = self._meta(len(prompt), len(drawn.responses[i]))
            steps = zip(drawn.logprobs[i], drawn.responses[i], strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in steps]
            if "no_routes" not in self.faults and body.get("return_routed_experts"):
                rows = rows[:-2] if "short_routes" in self.faults else rows
                meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
            answers.append({"text": "", "output_ids": list(drawn.responses[i]), "meta_info": meta})
        return answers

    def _score(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        rows = body["input_ids"]
        batch = TokenBatch.pack(
            [r[:1] for r in rows], [r[1:] for r in rows], [str(i) for i in range(len(rows))], range(len(rows)), 0
        )
        scores = self.engine.rescore(batch, SamplingConfig())
        answers = []
        for i, row in enumerate(rows):
            meta = self._meta(len(row), 0)
            given = [None, *scores[i, 1 : len(row)].tolist()]
            meta["input_token_logprobs"] = [[logprob, token, None] for logprob, token in zip(given, row, strict=True)]
            answers.append({"text": "", "output_ids": [], "meta_info": meta})
        return answers


@contextmanager
def serving(stub: SGLangStub) -> Iterator[str]:
    """Serve on 127.0.0.1; gives the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            stub.requests.append(self.path)
            if "dies" in stub.faults and self.path == "/generate":
                self.close_connection = True
                return
            with torch.no_grad():
                status, answer = stub.answer(self.path, json.loads(body or b"{}"))
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _respond

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
