"""The rollout over an SGLang server, against a small server that speaks its protocol with real numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest
import torch

from rar_lib.config import JobConfig, SamplingConfig
from rar_lib.engines.base import TokenBatch
from rar_lib.engines.hf_rollout import HFRollout
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.session import EngineSession, open_server
from rar_lib.engines.sglang_server import SGLangServerRollout
from rar_lib.errors import ConfigError, EngineError
from rar_lib.job import run_job
from rar_lib.runs.store import run_id
from rar_lib.seeding import derive_seed
from rar_lib.traces.trace import RouteTrace, Status
from tests.conftest import SPECIAL
from tests.engines.sglang_stub import SGLangStub, serving


def config(url: str, *overrides: str) -> JobConfig:
    rollout = {"engine": "sglang_server", "url": url, "dtype": "float32", "precision": "native"}
    small = {
        "algorithm": {"prompts_per_step": 4, "group_size": 4, "updates_per_batch": 2},
        "evaluation": {"prompts": 8},
    }
    return JobConfig.build({"rollout": rollout, "trainer": {"engine": "hf"}, "steps": 2, **small}, overrides)


@pytest.fixture
def stub(checkpoint: Path) -> Iterator[tuple[SGLangStub, str]]:
    state = SGLangStub(checkpoint)
    with serving(state) as url:
        yield state, url


@pytest.fixture
def trainer(checkpoint: Path) -> HFTrainer:
    made = config("http://none")
    return HFTrainer(checkpoint, made.trainer, made.algorithm)


@pytest.fixture
def client(stub: tuple[SGLangStub, str], checkpoint: Path, trainer: HFTrainer) -> Iterator[SGLangServerRollout]:
    made = open_server(checkpoint, config(stub[1]).rollout, SPECIAL)
    made.check_sync(trainer.weights())
    made.load_weights(trainer.weights(), 0)
    yield made
    made.shutdown()


@pytest.fixture
def prompts(tokenizer: Any, task: Any) -> list[list[int]]:
    return [tokenizer(task.problem(i).prompt)["input_ids"] for i in range(12)]


UIDS = [str(i) for i in range(12)]
SAMPLING = SamplingConfig(temperature=0.8)


def test_the_client_returns_what_the_engine_behind_the_server_computed(
    client: SGLangServerRollout, checkpoint: Path, trainer: HFTrainer, prompts: list[list[int]]
) -> None:
    engine = HFRollout(checkpoint, config("http://none").rollout, SPECIAL)
    engine.load_weights(trainer.weights(), 0)
    mine = engine.generate(prompts, SAMPLING, [str(derive_seed(7, uid)) for uid in UIDS], 0)
    theirs = client.generate(prompts, SAMPLING, UIDS, 7)
    assert theirs.responses == mine.responses
    assert theirs.logprobs == mine.logprobs
    assert (theirs.trace.experts == mine.trace.experts).all()
    assert (theirs.trace.header.producer, theirs.trace.header.producer_version) == ("sglang", "0.5.10")
    for i, (prompt, answer) in enumerate(zip(prompts, theirs.responses, strict=True)):
        states = theirs.trace.status[theirs.trace.offsets[i] : theirs.trace.offsets[i + 1]]
        assert (states == Status.RECORDED).sum() == len(prompt) + len(answer) - 1
    batch = TokenBatch.pack(prompts, mine.responses, UIDS, range(12), 0)
    assert torch.equal(client.rescore(batch, SamplingConfig()), engine.rescore(batch, SamplingConfig()))
    with pytest.raises(EngineError, match="temperature 1 only"):
        client.rescore(batch, SAMPLING)


def test_pushed_weights_are_the_ones_that_answer(
    client: SGLangServerRollout, trainer: HFTrainer, prompts: list[list[int]]
) -> None:
    before = client.generate(prompts, SAMPLING, UIDS, 7)
    client.load_weights([(name, w * 1.5 if "lm_head" in name else w) for name, w in trainer.weights()], 3)
    after = client.generate(prompts, SAMPLING, UIDS, 7)
    assert after.logprobs != before.logprobs
    assert (after.weight_version, set(after.trace.policy_version.tolist())) == (3, {3})  # type: ignore[union-attr]


def test_a_push_that_does_not_arrive_is_noticed(
    stub: tuple[SGLangStub, str], checkpoint: Path, trainer: HFTrainer
) -> None:
    state, url = stub
    other = [(name, w * 1.5 if "lm_head" in name else w) for name, w in trainer.weights()]
    state.engine.load_weights(other, 0)  # the server was started with something else
    made = open_server(checkpoint, config(url).rollout, SPECIAL)
    with pytest.raises(EngineError, match=f"{url} scores the checkpoint's own weights differently"):
        made.check_sync(trainer.weights())
    made.shutdown()
    state.faults.add("silent")  # it holds the checkpoint, acknowledges every push, and loads none
    state.engine.load_weights(trainer.weights(), 0)
    made = open_server(checkpoint, config(url).rollout, SPECIAL)
    with pytest.raises(EngineError, match=f"{url} scores .* halved as it scores the checkpoint .*do not arrive"):
        made.check_sync(trainer.weights())
    made.shutdown()


def test_nothing_of_the_sampling_is_left_to_the_defaults_of_the_server(
    client: SGLangServerRollout, stub: tuple[SGLangStub, str], prompts: list[list[int]]
) -> None:
    client.generate(prompts, SAMPLING, UIDS, 7)
    off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert all(off.items() <= params.items() for params in stub[0].params)
    assert len(stub[0].params) == len(prompts)


FAULTS = {
    "no_routes": r"/?: expected the answer to prompt 0 with \d+ rows of routes, found no routes",
    "short_routes": r"expected the answer to prompt 0 with routes \[(\d+), more than 3 layers, 2\], found \[\d+, 4, 2\]",
    "no_version": r"/generate: expected answer 0 of weights rar-\w+-3-v0, found weights None: it does not say of which",
    "null_version": r"/generate: expected answer 0 of weights rar-\w+-3-v0, found weights None: it does not say of which",
    "dies": r"/generate: expected 12 answers, found no answer \(RemoteProtocolError",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_server_gets_wrong_is_named_with_its_url(
    fault: str, client: SGLangServerRollout, stub: tuple[SGLangStub, str], prompts: list[list[int]]
) -> None:
    stub[0].faults.add(fault)
    with pytest.raises(EngineError, match=stub[1] + ".*" + FAULTS[fault]):
        client.generate(prompts, SAMPLING, UIDS, 7)


@pytest.mark.parametrize("version", [None, "rar-another-1-v0"])
def test_weights_that_somebody_else_pushed_are_refused(
    version: str | None,
    client: SGLangServerRollout,
    stub: tuple[SGLangStub, str],
    checkpoint: Path,
    prompts: list[list[int]],
) -> None:
    body = {"model_path": str(checkpoint)} | ({} if version is None else {"weight_version": version})
    assert httpx.post(f"{stub[1]}/update_weights_from_disk", json=body, trust_env=False).json()["success"]
    with pytest.raises(EngineError, match=r"expected .*weights rar-\w+-3-v0.*, found .*: somebody else pushed"):
        client.generate(prompts, SAMPLING, UIDS, 7)


def test_a_server_that_cannot_serve_is_refused_before_the_first_prompt(
    stub: tuple[SGLangStub, str], checkpoint: Path
) -> None:
    state, url = stub
    state.info["enable_return_routed_experts"] = False
    with pytest.raises(
        EngineError, match=f"{url}/server_info: expected enable_return_routed_experts True .*, found False"
    ):
        open_server(checkpoint, config(url).rollout, SPECIAL)
    state.info["enable_return_routed_experts"] = True
    for dtype in ("bfloat16", "auto"):  # auto may be any
        state.info["dtype"] = dtype
        with pytest.raises(EngineError, match=f"expected --dtype float32 .*, found {dtype}"):
            open_server(checkpoint, config(url).rollout, SPECIAL)
    with pytest.raises(
        EngineError, match=r"http://127.0.0.1:9/server_info: expected .*, found no answer \(ConnectError"
    ):
        open_server(checkpoint, config("http://127.0.0.1:9").rollout, SPECIAL)


def test_a_seed_that_the_server_ignores_is_said(
    stub: tuple[SGLangStub, str], checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stub[0].info["enable_deterministic_inference"] = False
    open_server(checkpoint, config(stub[1]).rollout, SPECIAL).shutdown()
    assert "ignores the seed of a request" in caplog.text


def test_a_run_over_the_server_completes_stops_with_it_and_resumes_elsewhere(
    stub: tuple[SGLangStub, str], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, url = stub
    job = config(url, "checkpoint_every=1")
    with EngineSession() as session:
        whole = run_job(job, session, runs_dir=tmp_path / "whole", show="none")
        assert whole.summary["rollout_engine"] == "sglang_server"
        assert (whole.metrics["replay/coverage"] == 1).all()
        assert whole.metrics["mismatch/rollout_old/k3"].max() < 1e-8

        load = SGLangServerRollout.load_weights

        def dies_after_the_first_step(self: Any, weights: Any, version: int) -> None:
            load(self, weights, version)
            if version == 1:
                state.faults.add("dies")

        monkeypatch.setattr(SGLangServerRollout, "load_weights", dies_after_the_first_step)
        with pytest.raises(EngineError, match=f"{url}/generate: expected .*, found no answer"):
            run_job(job, session, runs_dir=tmp_path / "cut", show="none")
    cut = next((tmp_path / "cut").iterdir())
    assert len(pd.read_parquet(cut / "metrics.parquet")) == 1  # nothing was learned after it died
    monkeypatch.undo()
    state.faults.clear()
    with serving(SGLangStub(checkpoint)) as moved:  # the server comes back somewhere else: still the same run
        assert run_id(config(moved), {}) == run_id(config(url), {})
        resumed = run_job(config(moved, "checkpoint_every=1"), runs_dir=tmp_path / "cut", show="none")
    last = "traces/step-000001-rollout.safetensors"
    assert RouteTrace.load(resumed.path / last).equals(RouteTrace.load(whole.path / last))
    columns = [c for c in whole.metrics if not str(c).startswith("time/")]
    pd.testing.assert_frame_equal(resumed.metrics[columns], whole.metrics[columns], rtol=1e-6)


def test_the_url_goes_with_a_server() -> None:
    with pytest.raises(ConfigError, match=r"engine 'sglang_server' needs the url of a running server; found none"):
        JobConfig.build({"rollout": {"engine": "sglang_server"}})
    with pytest.raises(ConfigError, match=r"url is the http address .*; found 'http://127.0.0.1:1' with engine 'vllm'"):
        JobConfig.build({"rollout": {"url": "http://127.0.0.1:1"}})
    with pytest.raises(ConfigError, match=r"found '127.0.0.1:1' with engine 'sglang_server'"):
        JobConfig.build({"rollout": {"engine": "sglang_server", "url": "127.0.0.1:1"}})
