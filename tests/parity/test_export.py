"""A plan that was exported for verl, through verl's own functions: it executes what the plan says."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rar_lib.plan_export import export_plan
from rar_lib.replay.fixed import executed
from rar_lib.replay.plan_file import save_plan
from rar_lib.replay.policies import make_plan
from rar_lib.replay.policy import Candidates
from tests.parity.test_verl import PYTHON
from tests.test_plan_export import LENGTHS, make_case

SIDE = Path(__file__).parent / "export_side.py"


def test_verls_routers_execute_the_plan(tmp_path: Path) -> None:
    if not PYTHON.exists():
        if os.environ.get("RAR_REQUIRE_VERL"):
            pytest.fail(f"{PYTHON} is not there; make parity builds it")
        pytest.skip("verl's environment is not there; make parity builds it")
    case = make_case(tmp_path)
    plan = make_plan("random_route", Candidates(case.record, [f"s{i}" for i in range(4)], 0), "token_layer", "1/3")
    told = export_plan(save_plan(plan, tmp_path / "plan.safetensors"), "verl", tmp_path / "out")
    assert case.native.scores is not None
    np.save(tmp_path / "scores.npy", case.native.scores)
    command = [PYTHON, SIDE, told.path, tmp_path / "scores.npy", tmp_path / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["unchanged"]  # as many rows as tokens, so verl appends none
    # verl replays all rows but the last of a sequence that has a response, and a plan never asks for others
    inside = np.array(found["own_mask"])
    expected = np.concatenate([np.r_[np.ones(t - 1, bool), False] for t in LENGTHS])
    assert np.array_equal(inside, expected)
    assert not (plan.planned.any(-1) & ~inside).any()
    best = np.argsort(-case.native.scores, -1, kind="stable")[..., :3]
    live = replace(case.native, experts=np.where(case.native.recorded[..., None], best, 0).astype(np.uint8))
    wanted = executed(plan, case.record, live, case.native.scores)
    used = np.array(found["executed"])
    assert np.array_equal(used[inside], wanted[inside])
    assert (np.sort(wanted[inside], -1) != np.sort(best[inside], -1)).any()
