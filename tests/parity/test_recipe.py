"""The recipe's run scripts against verl's own config: every option that they set is one that verl has.

Run in verl's environment (`make parity`); without it skipped, unless RAR_REQUIRE_VERL is set.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.parity.test_verl import PYTHON

RECIPE = Path(__file__).resolve().parents[2] / "recipe" / "routing_aware_replay"
SIDE = Path(__file__).parent / "recipe_side.py"
ARMS = {
    "none": ("disabled", False), "r2": ("R2", False), "r3": ("R3", True), "fisher": ("R3", True), "uniform": ("R3", True),
    "random": ("R3", True),
}  # fmt: skip
# what Megatron's TransformerConfig takes beside the few that verl names
FREE = "actor_rollout_ref.actor.megatron.override_transformer_config."


def launch(arm: str, folder: Path, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script with an interpreter that writes down what it is handed."""
    folder.mkdir(exist_ok=True)
    writer = folder / "python"
    writer.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$(dirname "$0")/arguments"\n')
    writer.chmod(0o755)
    (folder / "scores").write_bytes(b"")
    given = {
        "MODEL_PATH": "/models/moe", "TRAIN_FILES": "/data/train.parquet", "VAL_FILES": "/data/val.parquet",
        "SCORES": str(folder / "scores"), "RUN_DIR": str(folder / "run"), "PYTHON": str(writer), "EP": "4",
    }  # fmt: skip
    command, given = ["bash", str(RECIPE / f"run_{arm}.sh"), *more], os.environ | given | variables
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False, cwd=folder)


def arguments(arm: str, folder: Path, *more: str, **variables: str) -> list[str]:
    """What a run script hands to the interpreter."""
    done = launch(arm, folder, *more, **variables)
    assert done.returncode == 0, done.stderr
    return (folder / "arguments").read_text().splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipe")


@pytest.fixture(scope="module")
def composed(folder: Path) -> dict[str, Any]:
    """What hydra makes of every arm, and of an option that is not there."""
    if not PYTHON.exists():
        if os.environ.get("RAR_REQUIRE_VERL"):
            pytest.fail(f"{PYTHON} is not there; make parity builds it")
        pytest.skip("verl's environment is not there; make parity builds it")
    asked = {arm: arguments(arm, folder / arm) for arm in ARMS}
    asked["old place"] = arguments("r3", folder / "old", "actor_rollout_ref.actor.router_replay.mode=R3")
    assert all(given[:2] == ["-m", "verl.trainer.main_ppo"] for given in asked.values())
    (folder / "in.json").write_text(json.dumps({name: given[2:] for name, given in asked.items()}))
    command = [PYTHON, SIDE, folder / "in.json", folder / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    return json.loads((folder / "out.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("arm", ARMS)
def test_verl_has_every_option_of_an_arm(arm: str, composed: dict[str, Any], folder: Path) -> None:
    found = composed[arm]
    assert "error" not in found, found["error"]
    free = [name for name in found["unknown"] if name.startswith(FREE)]
    assert found["unknown"] == free == [f"{FREE}moe_router_dtype", f"{FREE}moe_router_fusion"]
    mode, capture = ARMS[arm]
    roles = found["config"]["actor_rollout_ref"]
    actor = roles["actor"]["megatron"]
    assert roles["actor"]["strategy"] == "megatron"
    assert actor["router_replay"]["mode"] == mode
    assert roles["rollout"]["enable_rollout_routing_replay"] is capture
    assert roles["model"]["use_remove_padding"] is True
    assert actor["expert_model_parallel_size"] == roles["ref"]["megatron"]["expert_model_parallel_size"] == 4
    assert found["config"]["algorithm"]["rollout_correction"]["bypass_mode"] is False
    policy = folder / arm / "run" / "policy.json"
    if arm == "none":
        assert roles["model"]["external_lib"] is actor["router_replay"]["replay_file"] is None
        assert not policy.exists()
    else:
        assert roles["model"]["external_lib"] == "rar_lib.integrations.verl"
        assert actor["router_replay"]["replay_file"] == str(policy)
        assert json.loads(policy.read_text())["mode"] == mode
        assert policy.with_name("scores.safetensors").exists() == (arm == "fisher")


def test_an_option_that_verl_has_not_is_refused(composed: dict[str, Any]) -> None:
    """The place of the switch before 0.9."""
    assert "Could not override 'actor_rollout_ref.actor.router_replay.mode'" in composed["old place"]["error"]


def test_verls_own_entry_point_takes_the_script(composed: dict[str, Any], tmp_path: Path) -> None:
    """The script with verl's interpreter and hydra's --cfg, which prints the job instead of running it."""
    given = {
        "MODEL_PATH": "/m",
        "TRAIN_FILES": "/t",
        "VAL_FILES": "/v",
        "RUN_DIR": str(tmp_path),
        "PYTHON": str(PYTHON),
    }
    command = ["bash", RECIPE / "run_r3.sh", "trainer.total_training_steps=3", "--cfg", "job"]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    job = yaml.safe_load(done.stdout[done.stdout.index("actor_rollout_ref:") :])
    assert job["trainer"]["total_training_steps"] == 3
    actor = job["actor_rollout_ref"]["actor"]["megatron"]
    assert actor["router_replay"]["replay_file"] == str(tmp_path / "policy.json")
    assert actor["override_transformer_config"]["moe_router_fusion"] is False


def test_arms_differ_in_the_replay_alone(tmp_path: Path) -> None:
    own = (
        "router_replay.",
        "enable_rollout_routing_replay=",
        "external_lib=",
        "experiment_name=",
        "default_local_dir=",
    )
    seen = set()
    for arm in ARMS:
        given = arguments(arm, tmp_path / arm)
        seen.add(tuple(a for a in given if not any(part in a for part in own)))
    assert len(seen) == 1


def test_a_run_folder_belongs_to_one_arm_and_policy(tmp_path: Path) -> None:
    """verl would continue from whatever checkpoint lies there."""
    run = tmp_path / "run"
    for arm, others in (("uniform", ("fisher", "none")), ("none", ("r3",))):
        assert arguments(arm, tmp_path) == arguments(arm, tmp_path)
        for other in others:
            refused = launch(other, tmp_path)
            assert refused.returncode == 1
            assert f"{run}: expected a run of arm {other}, found one of arm {arm}" in refused.stderr
        assert (run / "arm").read_text() == f"{arm}\n"
        shutil.rmtree(run)
    arguments("random", tmp_path)
    (run / "policy.json").write_text('{"mode": "R3", "policy": "full"}')
    assert "found another in policy.json" in launch("random", tmp_path).stderr
    shutil.rmtree(run)
    (run / "global_step_50").mkdir(parents=True)
    assert "found a checkpoint and no file arm" in launch("r2", tmp_path).stderr


def test_a_rerun_takes_the_scores_of_its_own_folder_and_a_relative_one_is_made_absolute(tmp_path: Path) -> None:
    first = arguments("fisher", tmp_path)
    assert arguments("fisher", tmp_path, SCORES=str(tmp_path / "run" / "scores.safetensors")) == first
    assert arguments("fisher", tmp_path, RUN_DIR="run") == first
    file = "actor_rollout_ref.actor.megatron.router_replay.replay_file"
    assert f"{file}={tmp_path / 'run' / 'policy.json'}" in first


def test_the_commands_of_the_readme_name_a_run_folder_each() -> None:
    lines = [line for line in (RECIPE / "README.md").read_text().splitlines() if "bash recipe/" in line]
    folders = [line.split("RUN_DIR=")[1].split()[0] for line in lines if line.startswith("RUN_DIR=")]
    assert len(set(folders)) == len(lines) == 2
    assert "export" not in "".join(lines)
