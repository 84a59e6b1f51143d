"""The rollout over a vLLM server: real servers, one started by a session and one by another process and given by URL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest
import torch

from rar_lib.config import JobConfig, SamplingConfig
from rar_lib.engines import http
from rar_lib.engines.base import TokenBatch
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.http import Server
from rar_lib.engines.served import WEIGHTS, written
from rar_lib.engines.session import EngineSession, open_server
from rar_lib.engines.vllm_server import VLLMServerRollout
from rar_lib.errors import EngineError
from rar_lib.job import run_job
from rar_lib.traces.trace import RouteTrace, Status
from tests.conftest import SPECIAL
from tests.engines.sglang_stub import SGLangStub, serving

STARTS_A_SERVER = """
import subprocess, sys, time
from pathlib import Path
from rar_lib.engines.http import OwnServer, Server
Popen, defaults = subprocess.Popen, '{"top_k": 1, "repetition_penalty": 2.0}'  # which no answer may follow
subprocess.Popen = lambda words, **how: Popen([*words, "--override-generation-config", defaults], **how)
own = OwnServer(Path(sys.argv[1]), "bfloat16")
Server(own.url, own).wait_until_up()
print(own.url, own.process.pid, flush=True)
time.sleep(600)
"""
SMALL = {"algorithm": {"prompts_per_step": 8, "group_size": 4, "updates_per_batch": 2}, "evaluation": {"prompts": 8}}
SAMPLING = SamplingConfig()


def config(engine: str = "vllm_server", trainer: str = "hf", **more: Any) -> JobConfig:
    rollout = {"engine": engine, **{key: more.pop(key) for key in ("url", "dtype") if key in more}}
    return JobConfig.build({"rollout": rollout, "trainer": {"engine": trainer}, "steps": 2, **SMALL, **more})


@pytest.fixture(scope="module")
def trainer(checkpoint: Path) -> HFTrainer:
    return HFTrainer(checkpoint, config().trainer, config().algorithm)


@pytest.fixture(scope="module")
def client(engines: EngineSession, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> VLLMServerRollout:
    """Of the session's own server."""
    with pytest.MonkeyPatch.context() as patch:  # its log, which errors name, stays
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("server")))
        made, _ = engines.open(config(), checkpoint, SPECIAL)
    assert isinstance(made, VLLMServerRollout)
    return made


@pytest.fixture(scope="module")
def elsewhere(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int, subprocess.Popen[str]]]:
    """URL and process of a server that another process started, and that process."""
    command = [sys.executable, "-c", STARTS_A_SERVER, str(checkpoint)]
    place = os.environ | {"TMPDIR": str(tmp_path_factory.mktemp("elsewhere"))}  # who is killed tidies nothing up
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=place) as starter:
        try:
            assert starter.stdout is not None
            url, process = starter.stdout.readline().split()
            yield url, int(process), starter
        finally:
            starter.kill()


@pytest.fixture(scope="module")
def prompts(tokenizer: Any, task: Any) -> list[list[int]]:
    return [tokenizer(task.problem(i // 4).prompt)["input_ids"] for i in range(600)]  # two waves


UIDS = [str(i) for i in range(600)]


def test_tokens_logprobs_and_routes_are_those_of_the_engine_in_process(
    client: VLLMServerRollout, engines: EngineSession, checkpoint: Path, trainer: HFTrainer, prompts: list[list[int]]
) -> None:
    inside, _ = engines.open(config("vllm"), checkpoint, SPECIAL)
    for version in range(2):
        weights = [(name, w * (1 + version / 8) if "lm_head" in name else w) for name, w in trainer.weights()]
        for engine in (inside, client):
            engine.load_weights(weights, version)
        mine, theirs = (engine.generate(prompts, SAMPLING, UIDS, 5) for engine in (inside, client))
        assert theirs.responses == mine.responses
        assert theirs.logprobs == mine.logprobs
        assert theirs.trace.equals(mine.trace)
        assert theirs.weight_version == version
    assert client.generate(prompts, SAMPLING, UIDS, 6).responses != theirs.responses
    for i, (prompt, answer) in enumerate(zip(prompts, theirs.responses, strict=True)):
        states = theirs.trace.status[theirs.trace.offsets[i] : theirs.trace.offsets[i + 1]]
        assert (states == Status.RECORDED).sum() == len(prompt) + len(answer) - 1
    batch = TokenBatch.pack(prompts, mine.responses, UIDS, range(600), 0)
    assert torch.equal(client.rescore(batch, SAMPLING), inside.rescore(batch, SAMPLING))


def test_pushed_weights_are_those_of_loading_to_the_last_bit(client: VLLMServerRollout, trainer: HFTrainer) -> None:
    weights = dict(trainer.weights())
    client.check_sync(weights.items())
    one, two = (f"model.layers.2.mlp.experts.{expert}.up_proj.weight" for expert in (3, 4))
    with pytest.raises(EngineError, match="expected worker 0 to hold after a push of tiny-moe what loading it gave"):
        client.check_sync((weights | {one: weights[two], two: weights[one]}).items())
    client.check_sync(weights.items())


def test_a_push_that_the_server_acknowledges_and_does_not_load_is_refused(
    client: VLLMServerRollout, checkpoint: Path, trainer: HFTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = VLLMServerRollout._call

    def silent(self: Any, method: str, *args: str) -> Any:
        given = (str(checkpoint / WEIGHTS), *args[1:]) if method == "rar_load" else args  # whatever is pushed
        return call(self, method, *given)

    monkeypatch.setattr(VLLMServerRollout, "_call", silent)
    told = (
        f"{client.server.url}: expected worker 0 to hold other weights after a push of tiny-moe with .* halved, found "
    )
    with pytest.raises(EngineError, match=told):
        client.check_sync(trainer.weights())
    monkeypatch.undo()
    client.check_sync(trainer.weights())


def test_a_wave_that_loses_its_client_holds_nobody_back(client: VLLMServerRollout, prompts: list[list[int]]) -> None:
    half = {"prompt": prompts[:1], "max_tokens": 4, "vllm_xargs": {"rar_wave": "half/2"}}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{client.server.url}/v1/completions", json=half, timeout=2.0, trust_env=False)
    alone = {"prompt": prompts[:1], "max_tokens": 4}
    assert (
        httpx.post(f"{client.server.url}/v1/completions", json=alone, timeout=60.0, trust_env=False).status_code == 200
    )
    assert len(client.generate(prompts[:8], SAMPLING, UIDS[:8], 0).responses) == 8


def test_answers_without_routes_or_with_too_few_are_refused(
    client: VLLMServerRollout, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    post, change = Server.post, {}

    def changed(self: Server, path: str, *args: Any, **kwargs: Any) -> Any:
        answer = post(self, path, *args, **kwargs)
        if path == "/v1/completions":
            answer["choices"][1] |= {key: value(answer["choices"]) for key, value in change.items()}
        return answer

    monkeypatch.setattr(Server, "post", changed)
    some = [prompts[0], prompts[0] + prompts[1]]
    for key, value, told in (
        ("routed_experts", lambda _: None, r"prompt 1 with \d+ rows of routes, found no routes"),
        (
            "routed_experts",
            lambda given: given[0]["routed_experts"],
            r"prompt 1 with routes \[\d+, .*, found \[\d+, 4, 2\]",
        ),
        ("routed_experts", lambda _: "k05VTVBZ", "answers in vLLM's layout, found .*expected a .npy stream"),
        ("prompt_token_ids", lambda _: some[0], r"prompt 1 to begin with its \d+ tokens"),
        ("finish_reason", lambda _: "abort", "2 finished completions in order, found 2, finished by .*abort"),
    ):
        change.clear()
        change[key] = value
        with pytest.raises(EngineError, match=f"{client.server.url}.*{told}"):
            client.generate(some, SAMPLING, UIDS[:2], 0)


@pytest.mark.parametrize("engine", ["hf", "megatron"])
def test_a_run_over_a_server_is_the_run_in_process(engine: str, engines: EngineSession, tmp_path: Path) -> None:
    inside = run_job(config("vllm", engine), engines, runs_dir=tmp_path, show="none")
    over = run_job(config("vllm_server", engine), engines, runs_dir=tmp_path, show="none")
    assert (over.summary["rollout_engine"], over.summary["trainer_engine"]) == ("vllm_server", engine)
    assert (over.metrics["replay/coverage"] == 1).all()
    columns = [c for c in inside.metrics if not str(c).startswith("time/")]
    pd.testing.assert_frame_equal(over.metrics[columns], inside.metrics[columns], check_exact=True)


# ---------------------------------------------------------------- a server given by URL


def test_two_clients_of_one_server_notice_each_other(
    elsewhere: tuple[str, int, Any], checkpoint: Path, trainer: HFTrainer, prompts: list[list[int]]
) -> None:
    url, some = elsewhere[0], (prompts[:4], SAMPLING, UIDS[:4], 0)
    first, second = (open_server(checkpoint, config(url=url).rollout, SPECIAL) for _ in range(2))
    for client in (first, second):
        client.check_sync(trainer.weights())
        client.load_weights(trainer.weights(), 0)
    second.generate(*some)
    with pytest.raises(
        EngineError, match=rf"{url}: expected answers of weights rar-\w+-3-v0, found rar-\w+-3-v0: somebody"
    ):
        first.generate(*some)
    with written(checkpoint, [(name, w * 1.5) for name, w in trainer.weights()]) as folder:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        assert httpx.post(f"{url}/collective_rpc", json=body, trust_env=False).status_code == 200
    with pytest.raises(EngineError, match=f"{url}: expected answers of .* with fingerprint .*changed by another way"):
        second.generate(*some)
    second.load_weights(trainer.weights(), 1)
    second.generate(*some)
    first.shutdown()
    second.shutdown()


def test_nothing_of_the_sampling_is_left_to_the_defaults_of_the_server(
    elsewhere: tuple[str, int, Any], client: VLLMServerRollout, checkpoint: Path, trainer: HFTrainer, prompts: Any
) -> None:
    with_defaults = open_server(checkpoint, config(url=elsewhere[0]).rollout, SPECIAL)
    bare = {"prompt": prompts[:32], "max_tokens": 8, "return_token_ids": True}
    drawn = [httpx.post(f"{elsewhere[0]}/v1/completions", json=bare, timeout=60, trust_env=False) for _ in range(2)]
    first, second = ([choice["token_ids"] for choice in answer.json()["choices"]] for answer in drawn)
    assert first == second  # top_k 1 is what it follows where nothing is asked for
    for engine in (client, with_defaults):
        engine.load_weights(trainer.weights(), 0)
    mine, theirs = (engine.generate(prompts[:32], SAMPLING, UIDS[:32], 3) for engine in (client, with_defaults))
    assert theirs.responses == mine.responses
    assert theirs.logprobs == mine.logprobs
    with_defaults.shutdown()


def test_a_server_that_does_not_fit_is_refused_before_the_first_prompt(
    elsewhere: tuple[str, int, Any], checkpoint: Path
) -> None:
    with pytest.raises(EngineError, match=f"{elsewhere[0]}: expected .*, with dtype float32, found dtype bfloat16"):
        open_server(checkpoint, config(url=elsewhere[0], dtype="float32").rollout, SPECIAL)
    with (
        serving(SGLangStub(checkpoint)) as url,
        pytest.raises(EngineError, match=rf"{url}.*vllm_serve.*found status 404"),
    ):
        open_server(checkpoint, config(url=url).rollout, SPECIAL)


def test_a_run_resumes_when_its_server_and_whoever_started_it_were_killed(
    elsewhere: tuple[str, int, subprocess.Popen[str]],
    engines: EngineSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, process, starter = elsewhere
    whole = run_job(config(checkpoint_every=1), engines, runs_dir=tmp_path / "whole", show="none")
    load = VLLMServerRollout.load_weights

    def dies_after_the_first_step(self: Any, weights: Any, version: int) -> None:
        load(self, weights, version)
        if version == 1:
            children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
            starter.kill()
            starter.wait()
            for one in (process, *map(int, children)):  # ended by the kernel
                while alive(one):
                    time.sleep(0.05)

    monkeypatch.setattr(VLLMServerRollout, "load_weights", dies_after_the_first_step)
    with EngineSession() as session, pytest.raises(EngineError, match=f"{url}/.*found no answer"):
        run_job(config(url=url, checkpoint_every=1), session, runs_dir=tmp_path / "cut", show="none")
    monkeypatch.undo()
    assert len(pd.read_parquet(next((tmp_path / "cut").iterdir()) / "metrics.parquet")) == 1
    resumed = run_job(config(checkpoint_every=1), engines, runs_dir=tmp_path / "cut", show="none")
    last = "traces/step-000001-rollout.safetensors"
    assert RouteTrace.load(resumed.path / last).equals(RouteTrace.load(whole.path / last))
    columns = [c for c in whole.metrics if not str(c).startswith("time/")]
    pd.testing.assert_frame_equal(resumed.metrics[columns], whole.metrics[columns], rtol=1e-6)


def alive(process: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---------------------------------------------------------------- a server of one's own


def test_a_server_that_does_not_start_says_why(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = tmp_path / "python"
    fails.write_text("#!/bin/sh\necho no such engine\nexit 3\n")
    fails.chmod(0o755)
    monkeypatch.setattr(http.sys, "executable", str(fails))
    with pytest.raises(
        EngineError,
        match=r"a server that starts, found its end: no such engine; its process \d+ ended with status 3; log: ",
    ) as raised:
        open_server(checkpoint, config().rollout, SPECIAL)
    log = Path(str(raised.value).rpartition("log: ")[2])
    assert log.read_text() == "no such engine\n"  # a log that was named stays
    log.unlink()
    log.parent.rmdir()


def test_a_killed_server_is_named_with_its_end_and_its_log(checkpoint: Path, prompts: list[list[int]]) -> None:
    made = open_server(checkpoint, config().rollout, SPECIAL)
    folder = made.server.own.folder
    os.killpg(made.server.own.process.pid, signal.SIGKILL)
    with pytest.raises(
        EngineError, match=rf"{made.server.url}/collective_rpc: .*no answer .*ended with signal SIGKILL; log: {folder}"
    ):
        made.generate(prompts[:4], SAMPLING, UIDS[:4], 0)
    made.shutdown()
    (folder / "server.log").unlink()
    folder.rmdir()
