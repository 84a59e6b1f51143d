"""The shipped base checkpoint: its layout, its tokenizer, how good it is, and that it can be made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from rar_lib.checkpoint import digest_checkpoint, expected_reward, load_tokenizer, make_base, resolve_checkpoint
from rar_lib.errors import ConfigError
from rar_lib.job import run_job
from rar_lib.tasks import Problem
from tests.conftest import hf_config


def test_layout_and_size(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe"
    assert (config["num_hidden_layers"], config["num_local_experts"], config["num_experts_per_tok"]) == (4, 16, 2)
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        names = list(file.keys())
        parameters = sum(file.get_tensor(n).numel() for n in names)
    assert 0.4e6 < parameters < 0.6e6
    assert "model.layers.3.mlp.experts.15.down_proj.weight" in names
    assert sum(f.stat().st_size for f in checkpoint.iterdir()) < 6e6


def test_the_tokenizer_is_exact_on_characters(tokenizer: Any) -> None:
    text = "12+34=\n az~"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]


def test_the_base_can_be_made_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_base(tmp_path / name, target=0.0, batch_size=8)
    assert digest_checkpoint(tmp_path / "a") == digest_checkpoint(tmp_path / "b")
    make_base(tmp_path / "c", target=0.0, batch_size=8, seed=1)
    assert digest_checkpoint(tmp_path / "a") != digest_checkpoint(tmp_path / "c")


def test_expected_reward_is_the_probability_of_the_exact_answer() -> None:
    class Uniform(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> Any:
            return type("Out", (), {"logits": torch.zeros(*input_ids.shape, 10)})()

    class Fives:
        pad_token_id, eos_token_id = 0, 1

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [5] * len(text)}

    problems = [Problem("a", "1+1=", "2", {}), Problem("b", "9+9=", "81", {})]
    # two tokens (answer, end) and three
    expected = (10**-2 + 10**-3) / 2
    assert expected_reward(Uniform(), Fives(), problems) == pytest.approx(expected)


def test_a_target_out_of_reach_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a reward of 0\.9 within 2 steps"):
        make_base(tmp_path / "x", target=0.9, max_steps=2, batch_size=8)


def test_the_shipped_base_is_worth_an_rl_run(tmp_path: Path) -> None:
    config = hf_config("rollout.dtype=float32", "rollout.precision=native", "steps=1", "evaluation.prompts=1024",
                       "algorithm.prompts_per_step=4")  # fmt: skip
    result = run_job(config, runs_dir=tmp_path, show="none")
    assert 0.35 <= result.summary["evaluation_first"] <= 0.50


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-model"):
        resolve_checkpoint("no-such-model")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(tmp_path)
