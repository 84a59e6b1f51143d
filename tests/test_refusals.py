"""Bad input: each case is refused with a message that names what, where, expected and found."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from rar_lib.checkpoint import SpecialTokens
from rar_lib.config import JobConfig
from rar_lib.engines import launcher, vllm_rollout
from rar_lib.engines.base import Replay, TokenBatch
from rar_lib.engines.hf_rollout import pack_rollout
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.session import EngineSession
from rar_lib.errors import ConfigError, EngineError, ReplayError, RunError, TraceError
from rar_lib.job import run_job
from rar_lib.runs.compare import step_table
from rar_lib.runs.result import RunResult
from rar_lib.traces.trace import RouteTrace, Status
from tests.conftest import Sampled, hf_config

TINY = ("steps=1", "algorithm.prompts_per_step=4", "algorithm.group_size=2", "evaluation.prompts=0")


def run(tmp_path: Path, *overrides: str) -> Any:
    return run_job(hf_config(*TINY, *overrides), runs_dir=tmp_path / "runs", show="none")


def save_model(folder: Path, tokenizer: Any, model_type: str, **sizes: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 2, "vocab_size": 100, "pad_token_id": 0, "eos_token_id": 1}  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**common, **sizes})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trainer(checkpoint: Path) -> HFTrainer:
    config = hf_config()
    return HFTrainer(checkpoint, config.trainer, config.algorithm)


# ------------------------------------------------------------------ config and checkpoint


def test_unknown_config_key() -> None:
    with pytest.raises(
        ConfigError,
        match=r"router_replay\.budgets: no such field; allowed here: enabled, mode, policy, unit, budget, score, ratio, gates, seed",
    ):
        JobConfig.build({"router_replay": {"budgets": 0.5}})


@pytest.mark.parametrize("field", ["mode", "policy"])
def test_a_policy_that_yaml_read_as_false(field: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"router_replay: {{{field}: off}}\n")
    with pytest.raises(ConfigError, match=rf"router_replay\.{field}: found the boolean False.*quotes"):
        JobConfig.from_file(file)


def test_an_unknown_policy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router_replay\.policy: expected one of full, uniform, .*, found 'fulll'"):
        run(tmp_path, "router_replay.policy=fulll")


def test_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.path 'nowhere': expected a Hugging Face folder with config\.json at"
    ):
        run(tmp_path, "model.path=nowhere")


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ("tokenizer*", "the weights cannot be loaded: .*no file named model.safetensors"),
        ("model*", "expected a tokenizer, found none"),
    ],
)
def test_a_checkpoint_that_lacks_half_of_its_files(tmp_path: Path, checkpoint: Path, kept: str, message: str) -> None:
    (tmp_path / "half").mkdir()
    for file in (checkpoint / "config.json", *checkpoint.glob(kept)):
        shutil.copy(file, tmp_path / "half")
    with pytest.raises(ConfigError, match=rf"model\.path {tmp_path}/half: {message}"):
        run(tmp_path, f"model.path={tmp_path}/half")


@pytest.mark.parametrize("engine", ["hf", "megatron"])
def test_a_model_without_experts(tmp_path: Path, tokenizer: Any, engine: str) -> None:
    path = save_model(tmp_path / "dense", tokenizer, "llama")
    with pytest.raises(ReplayError, match="LlamaForCausalLM: no router found"):
        run(tmp_path, f"model.path={path}", f"trainer.engine={engine}")
    assert not (tmp_path / "runs").exists()


def test_a_family_that_megatron_has_no_weight_map_for(tmp_path: Path, tokenizer: Any) -> None:
    path = save_model(tmp_path / "moe", tokenizer, "mixtral", num_local_experts=4)
    with pytest.raises(EngineError, match="no weight map for model type 'mixtral'; there is one for qwen3_moe"):
        run(tmp_path, f"model.path={path}", "trainer.engine=megatron")


@pytest.mark.parametrize(
    "change",
    [{"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}, {"hidden_act": "gelu"}],
)
def test_settings_that_the_megatron_model_does_not_follow(
    tmp_path: Path, checkpoint: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "changed"
    shutil.copytree(checkpoint, path)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(EngineError, match="expected plain rotary embeddings and silu"):
        run(tmp_path, f"model.path={path}", "trainer.engine=megatron")


def test_recompute_with_dropout_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = save_model(tmp_path / "moe", tokenizer, "mixtral", num_local_experts=4, attention_dropout=0.1)
    with pytest.raises(EngineError, match=r"attention_dropout.*would add noise"):
        run(tmp_path, f"model.path={path}", "trainer.recompute=true")


def test_a_tokenizer_of_another_model(tmp_path: Path, tokenizer: Any) -> None:
    path = save_model(tmp_path / "small", tokenizer, "mixtral", vocab_size=50, num_local_experts=4)
    with pytest.raises(ConfigError, match="the tokenizer has 100 tokens, the model only 50"):
        run(tmp_path, f"model.path={path}")


# ------------------------------------------------------------------ routes


def test_rollout_routes_of_t_minus_3_rows(sampled: Sampled) -> None:
    result, header = sampled.result, sampled.result.trace.header
    prompts = [r[:p].tolist() for r, p in zip(sampled.batch.tokens, sampled.batch.prompt_lengths, strict=True)]
    rows = [result.trace[i].experts[:-1] for i in range(len(prompts))]
    rows[3] = rows[3][:-2]
    total = int(sampled.batch.lengths[3])
    with pytest.raises(
        EngineError,
        match=rf"sequence 3: {total} tokens need routes of shape \({total - 1}, 4, 2\), found \({total - 3}, 4, 2\)",
    ):
        pack_rollout(header, prompts, result.responses, result.logprobs, rows, 0)


def test_duplicates_and_ids_out_of_range_and_wrong_layer_count(sampled: Sampled) -> None:
    trace = sampled.result.trace
    for value, message in (
        ([3, 3], "expected 2 distinct experts, found \\[3, 3\\]"),
        ([0, 16], "from 0 to 15, found \\[0, 16\\]"),
    ):
        ids = trace.ids()
        ids[2, 1] = value
        with pytest.raises(TraceError, match=f"sequence 0, token 2, layer 1: .*{message}"):
            RouteTrace.from_packed(trace.header, ids, trace.lengths, trace.status)
    with pytest.raises(TraceError, match="experts: expected shape"):
        RouteTrace.from_packed(trace.header, trace.ids()[:, :3], trace.lengths, trace.status)


def test_a_trace_of_fewer_layers_than_the_model_has_routers(trainer: HFTrainer, sampled: Sampled) -> None:
    trace = sampled.result.trace
    header = trace.header.model_copy(update={"moe_layers": (0, 1, 2)})
    short = RouteTrace.from_packed(header, trace.ids()[:, :3], trace.lengths, trace.status)
    with pytest.raises(
        ReplayError, match=r"MoE layers: expected \(0, 1, 2, 3\) \(model\), found \(0, 1, 2\) \(trace\)"
    ):
        trainer.logprobs(sampled.batch, temperature=1.0, replay=Replay.full(short))


def test_a_trace_of_other_tokens(trainer: HFTrainer, sampled: Sampled) -> None:
    trace = sampled.result.trace
    assert trace.token_ids is not None
    tokens = trace.token_ids.copy()
    tokens[int(trace.offsets[5]) + 2] += 1
    other = replace(trace, token_ids=tokens)
    with pytest.raises(ReplayError, match="sequence 5, token 2: the trace speaks of token id"):
        trainer.logprobs(sampled.batch, temperature=1.0, replay=Replay.full(other))


def test_a_batch_in_another_order(trainer: HFTrainer, sampled: Sampled) -> None:
    backwards = sampled.result.trace.select(range(len(sampled.batch) - 1, -1, -1))
    with pytest.raises(ReplayError, match="the same tokens in the same order"):
        trainer.logprobs(sampled.batch, temperature=1.0, replay=Replay.full(backwards))


def test_missing_routes_are_counted_and_stay_native(trainer: HFTrainer, sampled: Sampled) -> None:
    trace = sampled.result.trace
    status = np.repeat(trace.status[:, None], 4, 1)
    status[1, 2] = Status.MISSING
    gap = RouteTrace.from_packed(trace.header, trace.ids(), trace.lengths, status, token_ids=trace.token_ids)
    assert 0 < gap.coverage()["missing"] < 1e-3
    scored = trainer.logprobs(sampled.batch, temperature=1.0, replay=Replay.full(gap))
    assert scored.counts.forced_units == int(trace.recorded.sum()) - 1


# ------------------------------------------------------------------ run folder


def test_a_run_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(RunError, match=r"run folder .*Permission denied"):
        run(tmp_path)


def test_a_disk_that_fills_up_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = pd.DataFrame.to_parquet, 0

    def full(self: pd.DataFrame, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:  # the metrics of the second step
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *args, **kwargs)

    overrides = ("steps=3", "checkpoint_every=1")
    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.raises(RunError, match=r"No space left on device; what was written before is whole"):
        run(tmp_path, *overrides)
    monkeypatch.undo()
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(pd.read_parquet(folder / "metrics.parquet")) == 1
    resumed = run(tmp_path, *overrides)
    assert len(resumed.metrics) == 3


# ------------------------------------------------------------------ engines


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("vllm", r"vLLM is not installed.*rar-lib\[vllm\]"),
        ("megatron.core.jit", r"Megatron-Core is not installed.*rar-lib\[megatron\]"),
    ],
)
def test_an_engine_that_is_not_installed(
    module: str, message: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    start = {
        "vllm": lambda: vllm_rollout._create(checkpoint, "float32", 512),
        "megatron.core.jit": lambda: EngineSession().trainer(JobConfig(), checkpoint),
    }[module]
    with pytest.raises(EngineError, match=message):
        start()


@pytest.mark.parametrize(
    "error",
    [
        TypeError("LLM.__init__() got an unexpected keyword argument 'enable_return_routed_experts'"),
        ValueError("enable_return_routed_experts needs the second model runner"),
    ],
)
def test_a_vllm_that_cannot_capture_routes(error: Exception, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(**kwargs: Any) -> None:
        raise error

    with vllm_rollout.starting_vllm():  # other tests of this process start an engine
        import vllm

    monkeypatch.setattr(vllm, "LLM", create)
    with pytest.raises(
        EngineError,
        match=rf"vLLM {vllm.__version__} cannot be started with capture of routed experts: .*routed_experts",
    ):
        vllm_rollout._create(checkpoint, "float32", 512)


def test_a_model_that_vllm_has_no_kernel_for(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_forward(*args: Any) -> None:
        raise RuntimeError("Unsupported CPU attention configuration: head_dim=16")

    ended: list[Any] = []
    monkeypatch.setattr(vllm_rollout, "_create", lambda *args: None)
    monkeypatch.setattr(vllm_rollout.VLLMRollout, "rescore", first_forward)
    monkeypatch.setattr(vllm_rollout.VLLMRollout, "shutdown", lambda self: ended.append(self))
    with pytest.raises(EngineError, match=r"cannot compute .*tiny-moe here: Unsupported CPU.*; rollout\.engine hf can"):
        vllm_rollout.VLLMRollout(checkpoint, JobConfig().rollout, SpecialTokens((1,), 0))
    assert len(ended) == 1


def test_a_vllm_that_returns_no_routes() -> None:
    engine = object.__new__(vllm_rollout.VLLMRollout)
    with pytest.raises(EngineError, match="prompt p7: vLLM returned no routes"):
        engine._routes(None, "p7", 5)


def test_sampling_beyond_the_models_length(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="exceed the model's 512"):
        run(tmp_path, "rollout.sampling.max_new_tokens=600")


def test_a_gradient_that_is_not_finite(checkpoint: Path, sampled: Sampled) -> None:
    config = hf_config()
    for build in (HFTrainer, lambda *args: EngineSession().trainer(JobConfig(), checkpoint)):
        fresh: Any = build(checkpoint, config.trainer, config.algorithm)
        before = {name: weight.clone() for name, weight in fresh.weights()}
        with pytest.raises(EngineError, match="gradient norm is"):
            fresh.update(sampled.batch, lambda logp, rows, scores=None: (logp * torch.inf, {}), temperature=1.0)
        assert all(torch.equal(before[name], weight) for name, weight in fresh.weights())


# ------------------------------------------------------------------ what is not there


def test_a_trace_without_log_probs_is_no_batch(sampled: Sampled) -> None:
    with pytest.raises(TraceError, match=r"a trace with token ids and log-probs, found no log-probs$"):
        TokenBatch.of_trace(replace(sampled.result.trace, logprobs=None))


def test_a_quantity_that_no_run_measured_has_no_table(tmp_path: Path) -> None:
    run = RunResult(tmp_path, {}, pd.DataFrame({"step": [0]}), pd.DataFrame(), [], {})
    with pytest.raises(
        ConfigError, match=r"expected one of reward/mean among the metrics of 1 runs, found none of them"
    ):
        step_table([run], {"reward/mean": "reward"})


def test_several_machines_need_the_address_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAR_NODES", "2")
    monkeypatch.delenv("RAR_ENDPOINT", raising=False)
    assert launcher.main(tmp_path / "ranks", 4) == 2
    assert "RAR_NODES=2: expected RAR_ENDPOINT=host:port of the first machine, found none" in capsys.readouterr().err
    assert not (tmp_path / "ranks").exists()
