"""A stored plan comes back as it was, finds its record, and is refused where it is no plan."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rar_lib.errors import ReplayError
from rar_lib.replay.fixed import synthetic_world
from rar_lib.replay.plan_file import find_trace, load_plan, save_plan
from rar_lib.replay.policies import make_plan

WORLD = synthetic_world(6, 5)


@pytest.mark.parametrize(
    ("policy", "unit", "budget"),
    [
        ("fisher", "slot", "1/3"),
        ("random_route", "token_layer", "0.1"),
        ("full", "token_layer", None),
        ("bias", "bias", 1),
    ],
)
def test_a_plan_comes_back_as_it_was(policy: str, unit: str, budget: str | None, tmp_path: Path) -> None:
    plan = make_plan(policy, WORLD.seen, unit, budget)  # type: ignore[arg-type]
    read = load_plan(save_plan(plan, tmp_path / "plan.safetensors"))
    for field in fields(plan):
        mine, theirs = getattr(plan, field.name), getattr(read, field.name)
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs, field.name
    read.require(WORLD.made.rollout)


def test_its_record_is_found_by_its_payload(tmp_path: Path) -> None:
    plan = make_plan("full", WORLD.seen, "slot")
    path = save_plan(plan, tmp_path / "plan.safetensors")
    WORLD.made.native.save(tmp_path / "a.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ReplayError, match=rf"payload {plan.trace_digest[:12]}…; found none among 3 safetensors files"):
        find_trace(plan, path)
    WORLD.made.rollout.save(tmp_path / "z.safetensors")
    assert find_trace(plan, path).equals(WORLD.made.rollout)


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="found nothing there"):
        load_plan(tmp_path / "absent.safetensors")
    (tmp_path / "a.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ReplayError, match="expected a safetensors file"):
        load_plan(tmp_path / "a.safetensors")
    save_file({"planned": np.ones((2, 3), bool)}, tmp_path / "b.safetensors")
    with pytest.raises(ReplayError, match=r"expected a stored plan .* found \['planned'\]"):
        load_plan(tmp_path / "b.safetensors")
    with pytest.raises(ReplayError, match=r"expected a stored plan .* found \['experts', 'offsets', 'status'\]"):
        load_plan(WORLD.made.rollout.save(tmp_path / "c.safetensors"))
