"""The policy file and the stored score: what is written comes back, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rar_lib.errors import ConfigError
from rar_lib.integrations.policy_file import load_policy
from rar_lib.replay.score_file import load_score, save_score
from rar_lib.replay.scores import ExpertScore
from rar_lib.replay.stability import Stability


def score(values: np.ndarray) -> ExpertScore:
    return ExpertScore(values, np.ones(values.shape), "gate", "per_route", "rollout", 7.0, Stability(0.5, -0.25, 0.25))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    values = np.array([[0.0, 1.5, -np.inf], [3.0, 2.0, 1.0]])
    return save_score(score(values), (1, 3), tmp_path / "scores.safetensors")


def written(folder: Path, text: str, name: str = "policy.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_score_comes_back_as_it_was(stored: Path) -> None:
    found = load_score(stored)
    assert found.moe_layers == (1, 3)
    assert np.array_equal(found.score.values, [[0.0, 1.5, -np.inf], [3.0, 2.0, 1.0]])
    assert np.array_equal(found.score.count, np.ones((2, 3)))
    assert found.score.id == "gate/per_route/rollout"
    assert found.score.tokens == 7.0
    assert found.score.stability == Stability(0.5, -0.25, 0.25)


def test_a_score_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layers \[1\]"):
        save_score(score(np.ones((2, 3))), (1,), tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"found nan at layer 3, expert 2"):
        save_score(score(np.array([[1.0, 1, 1], [1, 1, np.nan]])), (1, 3), tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="nothing there"):
        load_score(tmp_path / "a.safetensors")
    save_file({"values": np.ones((2, 3))}, tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match=r"expected expert scores.*found \['values'\]"):
        load_score(tmp_path / "b.safetensors")
    (tmp_path / "c.safetensors").write_bytes(b"not one")
    with pytest.raises(ConfigError, match="expected a safetensors file"):
        load_score(tmp_path / "c.safetensors")


def test_a_policy_with_scores_relative_to_its_file(stored: Path) -> None:
    path = written(stored.parent, "mode: R3\npolicy: fisher\nbudget: 0.25\nscores: scores.safetensors\n")
    policy = load_policy(path)
    assert policy.replay.budget == "0.25"
    assert policy.stored is not None
    assert policy.stored.moe_layers == (1, 3)
    assert str(policy) == "fisher at 0.25 of R3, unit token_layer, seed 0"
    same = load_policy(
        written(stored.parent, '{"policy": "fisher", "budget": "0.25", "scores": "scores.safetensors"}', "p.json")
    )
    assert same.replay == policy.replay


def test_replay_switched_off_forces_nothing(tmp_path: Path) -> None:
    assert str(load_policy(written(tmp_path, "enabled: false\n"))) == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "policy: fisher\nbudget: 0.25\n",
            "scores: policy fisher ranks experts and needs a file of scores, found none",
        ),
        ("policy: full\nscores: scores.safetensors\n", "ranks no scores of experts, found gate/per_route/rollout"),
        ("policy: fischer\nbudget: 0.25\n", "expected one of full, .*found 'fischer'"),
        ("policy: uniform\n", "policy uniform needs a share from 0 to 1, found none"),
        ("polcy: uniform\n", "polcy: no such field; allowed here: .*scores"),
        ("policy: full\ngates: recorded\n", "expected live, found 'recorded'"),
        ("- full\n", "expected a mapping, found list"),
        ("policy: [\n", "policy file .*policy.yaml"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str, stored: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy(written(stored.parent, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_policy(tmp_path / "absent.yaml")
