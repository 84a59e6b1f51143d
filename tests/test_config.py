"""One schema, many spellings, and errors that name field, value and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rar_lib.config import JobConfig
from rar_lib.config_keys import FLAT_NAMES
from rar_lib.errors import ConfigError


def test_yaml_json_and_overrides_give_one_config(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("steps: 3\nalgorithm: {lr: 1e-3}\n")
    (tmp_path / "a.json").write_text(json.dumps({"steps": 3, "algorithm": {"lr": 1e-3}}))
    by_file = [JobConfig.from_file(tmp_path / name) for name in ("a.yaml", "a.json")]
    by_set = JobConfig.build({}, ["steps=3", "algorithm.lr=1e-3"])
    by_flat = JobConfig.from_flat(steps=3, lr=1e-3, policy="R3", engine="real")
    assert by_file[0] == by_file[1] == by_set == by_flat
    assert by_set.algorithm.lr == 1e-3


def test_a_config_survives_its_own_json() -> None:
    config = JobConfig.from_flat(policy="R2", engine="hf", steps=7)
    assert JobConfig.build(config.resolved()) == config


@pytest.mark.parametrize(
    ("values", "arm"),
    [
        ({"router_replay": {"enabled": True, "mode": "R2"}}, "R2"),
        ({"router_replay": {"enabled": False, "mode": "R3"}}, "none"),
        ({"router_replay": {"mode": "disabled"}}, "none"),
        ({"actor_rollout_ref": {"actor": {"router_replay": {"mode": "R2"}}}}, "R2"),
        ({"actor_rollout_ref.actor.megatron.router_replay.mode": "R3"}, "R3"),
        ({"actor_rollout_ref.actor.router_replay.mode": "disabled"}, "none"),
    ],
)
def test_verl_spellings(values: dict[str, Any], arm: str) -> None:
    assert JobConfig.build(values).router_replay.arm == arm


def test_contradicting_spellings_are_refused() -> None:
    values = {"router_replay": {"mode": "R3"}, "actor_rollout_ref.actor.router_replay.mode": "R2"}
    with pytest.raises(ConfigError, match="contradicts"):
        JobConfig.build(values)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"stepz": 3}, ["stepz", "no such field", "steps"]),
        ({"algorithm": {"lerning_rate": 1}}, ["algorithm.lerning_rate", "no such field", "lr"]),
        ({"algorithm": {"lr": "fast"}}, ["algorithm.lr", "number", "'fast'"]),
        ({"steps": 0}, ["steps", "greater than 0", "0"]),
        ({"router_replay": {"mode": "R4"}}, ["router_replay.mode", "'R2'", "'R4'"]),
        ({"router_replay": {"mode": False}}, ["router_replay.mode", "quotes", "False"]),
        ({"algorithm": {"prompts_per_step": 5}}, ["prompts_per_step 5", "multiple"]),
        ({"rollout": {"engine": "vllm", "router_noise": 0.1}}, ["router_noise", "hf"]),
        ({"rollout": {"engine": "hf", "zero_mismatch": True}}, ["zero_mismatch", "float32"]),
        ({"task": {"name": "file"}}, ["prompts_file"]),
        ({"algorithm": {"lr": float("nan")}}, ["algorithm.lr"]),
    ],
)
def test_faults_name_field_value_and_what_is_allowed(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        JobConfig.build(values)
    for part in parts:
        assert part in str(error.value)


def test_all_faults_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        JobConfig.build({"steps": 0, "seed": -1, "algorithm": {"lr": 0}})
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(("name", "value"), [("policy", False), ("policy", "r3"), ("engine", "gpu"), ("lrate", 1)])
def test_flat_parameters_are_checked_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}'"):
        JobConfig.from_flat(**{name: value})


def test_every_flat_name_reaches_a_field() -> None:
    values = {
        "policy": "R2",
        "engine": "hf",
        "model": "m",
        "task": "t",
        "precision": "native",
        "rollout_dtype": "float32",
    }
    values |= {"trainer_dtype": "bfloat16", "routes": "uniform", "unit": "slot", "score": "swap"}
    values |= {"objective": "gspo", "anchor": "rollout", "corrections": "opsm", "gates": "recorded"}
    values |= {"freeze_router": True, "zero_mismatch": True, "kernels": "fused"}
    values |= {
        "trainer_engine": "megatron",
        "rollout_engine": "vllm_server",
        "dispatcher": "alltoall",
        "recompute": True,
    }
    together = {  # of a layout, with what they need
        name: {"trainer_engine": "megatron", "processes": 16}
        for name in ("processes", "tensor_parallel", "pipeline_parallel", "expert_parallel", "expert_tensor_parallel")
    }
    numbers = dict.fromkeys(("router_noise", "temperature", "clip_low", "clip_high", "lr"), 0.5)
    given: dict[str, Any] = values | numbers | {n: 16 for n in FLAT_NAMES if n not in values and n not in numbers}
    hf = JobConfig.from_flat(engine="hf")
    for name, value in given.items():
        single = {"engine": "hf", **together.get(name, {}), name: value}
        if name == "task":
            single[name] = "basic_arithmetic"
        assert JobConfig.from_flat(**single) != (JobConfig() if name == "engine" else hf), name


def test_override_without_a_value() -> None:
    with pytest.raises(ConfigError, match=r"a\.b=value"):
        JobConfig.build({}, ["steps"])


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        JobConfig.from_file(tmp_path / "nowhere.yaml")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="expected a mapping, found list"):
        JobConfig.from_file(tmp_path / "list.yaml")


def test_faults_inside_a_list_are_named() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.corrections.0.tis.kap: no such field; allowed here: name, cap"):
        JobConfig.build({"algorithm": {"corrections": [{"name": "tis", "kap": 2}]}})
    with pytest.raises(ConfigError, match=r"algorithm\.objective"):
        JobConfig.build({"algorithm": {"objective": ["grpo"]}})
    hf = {"rollout": {"engine": "hf"}, "trainer": {"engine": "hf"}}
    with pytest.raises(ConfigError, match="expected unit token_layer, found slot"):
        JobConfig.build({**hf, "router_replay": {"gates": "recorded", "unit": "slot"}})


def test_kernels_are_those_of_the_hf_engines() -> None:
    both = JobConfig.from_flat(engine="hf", kernels="fused")
    assert (both.rollout.kernels, both.trainer.kernels) == ("fused", "fused")
    with pytest.raises(ConfigError, match=r"kernels 'fused' .* engine is 'vllm'.*\n.*engine is 'megatron'"):
        JobConfig.from_flat(engine="real", kernels="fused")
