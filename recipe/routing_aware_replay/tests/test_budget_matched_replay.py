"""One unit and one budget for all partial arms, met to the route, in training's own plans as in the demonstration."""

from __future__ import annotations

import runpy
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from routing_aware_replay.replay_policy import ARMS, POLICIES, PolicyFile, ReplayPolicy, arm_file, load_policy, plan_for

from rar_lib.errors import ConfigError
from rar_lib.integrations.sequences import require_available
from rar_lib.replay.fixed import executed, synthetic_world
from rar_lib.replay.score_file import StoredScore
from rar_lib.replay.scores import ExpertScore

RECIPE = Path(__file__).resolve().parents[1]
PARTIAL = ("fisher", "uniform", "random")
WORLD = synthetic_world(16, 9, layers=3)


def policy(arm: str) -> PolicyFile:
    return PolicyFile.model_validate_json(arm_file(arm).read_text())


def test_every_arm_has_a_policy_file_and_a_script() -> None:
    assert sorted(path.stem for path in POLICIES.glob("*.json")) == sorted(ARMS)
    scripts = {path.stem.removeprefix("run_") for path in RECIPE.glob("run_*.sh")}
    assert scripts == {*ARMS, "common"}


@pytest.mark.parametrize("script", sorted(RECIPE.glob("run_*.sh")), ids=lambda p: p.stem)
def test_scripts_parse_and_stop_at_the_first_fault(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert "Not run on a GPU" in text


def test_a_script_says_what_it_lacks() -> None:
    done = subprocess.run(
        ["bash", RECIPE / "run_r3.sh"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "MODEL_PATH: expected the path of a Hugging Face MoE checkpoint" in done.stderr


def test_partial_arms_differ_in_the_choice_alone() -> None:
    said = [policy(arm).model_dump(exclude={"policy", "scores"}) for arm in PARTIAL]
    assert said[0] == said[1] == said[2]
    assert (said[0]["mode"], said[0]["unit"], said[0]["budget"]) == ("R3", "slot", "1/4")
    assert len({policy(arm).policy for arm in PARTIAL}) == 3


@pytest.mark.parametrize("budget", ["0", "1/100", "1/4", "1/3", "1"])
def test_the_budget_is_met_to_the_route(budget: str) -> None:
    record = WORLD.made.rollout
    valid = int(record.recorded.sum()) * record.header.top_k
    wanted = int(Fraction(budget) * valid + Fraction(1, 2))
    masks = []
    for arm in PARTIAL:
        plan = plan_for(policy(arm).model_copy(update={"budget": budget}), WORLD.seen)
        assert plan is not None
        assert (plan.valid, plan.budget) == (valid, wanted)
        assert not (plan.planned & ~record.recorded[..., None]).any()
        masks.append(plan.planned)
    if 0 < wanted < valid:
        assert (masks[0] != masks[1]).any()
        assert (masks[1] != masks[2]).any()


def test_plans_are_nested_in_the_budget() -> None:
    for arm in PARTIAL:
        plans = [plan_for(policy(arm).model_copy(update={"budget": b}), WORLD.seen) for b in ("1/8", "1/4", "1/2")]
        for small, large in pairwise(plans):
            assert small is not None
            assert large is not None
            assert not (small.planned & ~large.planned).any()


def test_full_arms_execute_the_record_and_none_forces_nothing() -> None:
    record, native = WORLD.made.rollout, WORLD.made.native
    full = plan_for(policy("r3"), WORLD.seen)
    assert full is not None
    used = executed(full, record, native, WORLD.made.scores)
    assert np.array_equal(used[record.recorded], record.ids()[record.recorded])
    assert plan_for(policy("none"), WORLD.seen) is None
    empty = plan_for(policy("uniform").model_copy(update={"budget": "0"}), WORLD.seen)
    assert empty is not None
    assert np.array_equal(executed(empty, record, native, WORLD.made.scores), native.experts)


def test_the_keys_follow_the_seed_of_the_file() -> None:
    first, second = (plan_for(policy("random"), replace(WORLD.seen, seed=s)) for s in (0, 1))
    assert first is not None
    assert second is not None
    assert (first.planned != second.planned).any()


def test_a_policy_file_is_checked_before_a_trainer_starts(tmp_path: Path) -> None:
    for arm in ("none", "r2", "r3", "uniform", "random"):
        assert load_policy(arm_file(arm)).replay == policy(arm)
    with pytest.raises(
        ConfigError, match=r"scores\.safetensors: expected a file of expert scores, found nothing there"
    ):
        load_policy(arm_file("fisher"))
    wrong = tmp_path / "policy.json"
    wrong.write_text('{"policy": "uniform", "unit": "slot"}')
    with pytest.raises(ConfigError, match=r"policy uniform needs a share from 0 to 1, found none"):
        load_policy(wrong)


@pytest.mark.parametrize("arm", ARMS)
def test_the_plugin_has_the_policy_of_every_arm(arm: str) -> None:
    values = np.ones((2, 4))
    stored = (
        StoredScore(ExpertScore(values, values, "gate", "per_route", "rollout", 1.0), (0, 1))
        if arm == "fisher"
        else None
    )
    require_available(ReplayPolicy(policy(arm), stored))


def test_the_demonstration(tmp_path: Path) -> None:
    script = RECIPE / "examples" / "synthetic_router_replay_demo.py"
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[1:]}
    assert list(rows) == list(ARMS)
    assert done.stdout in (RECIPE / "README.md").read_text()  # the table that is printed there is this one
    assert {rows[arm][1] for arm in PARTIAL} == {"0.2500"}
    assert len({rows[arm][3] for arm in PARTIAL}) == 1
    flips = {arm: float(row[-1]) for arm, row in rows.items()}
    assert flips["r3"] == 0
    assert all(flips["r3"] < flips[arm] < flips["none"] for arm in (*PARTIAL, "r2"))


def test_a_router_that_drifts_further_agrees_less() -> None:
    demo = runpy.run_path(str(RECIPE / "examples" / "synthetic_router_replay_demo.py"))
    still, moved = (demo["table"](drift=d).set_index("arm") for d in (0.0, 0.1))
    assert still.loc["none", "router flip"] == pytest.approx(0.04, abs=1e-3)  # as the routes were made
    assert (
        still.loc["r2", "router flip"] == still.loc["none", "router flip"]
    )  # a record of the same weights changes nothing
    for arm in ("none", *PARTIAL):
        assert moved.loc[arm, "router flip"] > 2 * still.loc[arm, "router flip"]
        assert moved.loc[arm, "kept slots"] == still.loc[arm, "kept slots"]
    assert moved.loc["r2", "router flip"] == still.loc["r2", "router flip"]
