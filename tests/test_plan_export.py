"""A plan in the layout of another framework, read back by this library's reader of that layout."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.cli import main
from rar_lib.errors import ConfigError, ReplayError, TraceError
from rar_lib.plan_export import export_plan
from rar_lib.replay.plan import ReplayPlan, full_plan
from rar_lib.replay.plan_file import save_plan
from rar_lib.replay.policies import make_plan
from rar_lib.replay.policy import Candidates
from rar_lib.traces.layers import ModelShape
from rar_lib.traces.synthetic import synthetic
from rar_lib.traces.trace import RouteTrace, Status
from rar_lib.traces.wire import read_dump, read_trace

LENGTHS = [5, 1, 7, 4]
PROMPTS = [2, 1, 3, 1]


@dataclass(frozen=True)
class Case:
    """A record, a planning pass with scores, and the folder that holds both."""

    record: RouteTrace
    native: RouteTrace
    folder: Path

    def plan(self, policy: str, unit: str, budget: Any = None) -> Path:
        names = [f"s{i}" for i in range(self.record.num_sequences)]
        seen = Candidates(self.record, names, 3, native=self.native)
        return self.save(make_plan(policy, seen, unit, budget))  # type: ignore[arg-type]

    def save(self, plan: ReplayPlan) -> Path:
        return save_plan(plan, self.folder / "plan.safetensors")

    @property
    def native_file(self) -> Path:
        return self.folder / "native.safetensors"


def make_case(folder: Path, experts: int = 16, missing: bool = True) -> Case:
    made = synthetic(LENGTHS, layers=3, experts=experts, top_k=3, flip_rate=0.3, seed=1)
    n = sum(LENGTHS)
    scored = np.concatenate([np.arange(t) >= p for t, p in zip(LENGTHS, PROMPTS, strict=True)])
    more = {
        "token_ids": np.arange(n, dtype=np.int64) + 10,
        "logprobs": np.where(scored, -1, np.nan).astype(np.float32),
    }
    status = np.repeat(made.rollout.status[:, None], 3, 1)
    if missing:
        status[8, 1] = Status.MISSING
    header = made.rollout.header.model_copy(update={"moe_layers": (1, 2, 5)})
    record = RouteTrace.from_packed(header, made.rollout.ids(), LENGTHS, status, **more)
    native = RouteTrace.from_packed(
        header.model_copy(update={"source": "old"}), made.native.ids(), LENGTHS, made.native.status, scores=made.scores,
        policy_version=np.full(n, 4), **more,
    )  # fmt: skip
    record.save(folder / "rollout.safetensors")
    native.save(folder / "native.safetensors")
    return Case(record, native, folder)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case(tmp_path)


def shape(case: Case) -> ModelShape:
    header = case.record.header
    return ModelShape(header.num_experts, header.top_k, header.moe_layers)


@pytest.mark.parametrize(("experts", "dtype"), [(16, "int8"), (128, "int8"), (129, "int16"), (300, "int16")])
def test_nemo_rl_is_told_a_plan_of_whole_sets_exactly(experts: int, dtype: str, tmp_path: Path) -> None:
    case = make_case(tmp_path, experts)
    plan = case.plan("random_route", "token_layer", "1/3")
    told = export_plan(plan, "nemo-rl", tmp_path / "out")
    assert told.path == tmp_path / "out" / "nemo-rl" / "plan.mask.jsonl"
    assert f'"nrlre1:{dtype}:' in told.path.read_text().replace(" ", "")
    back = read_trace(told.path, model=shape(case))
    planned = make_plan(
        "random_route", Candidates(case.record, ["s0", "s1", "s2", "s3"], 3), "token_layer", "1/3"
    ).planned
    assert np.array_equal(back.recorded, planned)
    assert np.array_equal(back.ids()[planned], case.record.ids()[planned])
    assert back.token_digest == case.record.token_digest
    assert [s.prompt for s in read_dump(told.path).samples] == PROMPTS
    facts = json.loads(told.path.read_text().splitlines()[0])["rar_plan"]
    assert (facts["budget"], facts["requested"], facts["frozen_cells"]) == (planned.sum(), "1/3", 0)
    assert facts["trace"] == case.record.payload_sha256()
    assert facts["moe_layers"] == [1, 2, 5]
    assert "what is not forced stays with the router" in str(told)


def test_nemo_rl_rows_are_there_whole_or_not_at_all(case: Case) -> None:
    told = export_plan(
        case.plan("random_route", "slot", "1/2"), "nemo-rl", case.folder / "out", native=case.native_file
    )
    ids = np.concatenate([s.experts for s in read_dump(told.path).samples if s.experts is not None])
    assert ((ids < 0).all(-1) | (ids >= 0).all(-1)).all()


def by_hand(case: Case, planned: np.ndarray, token: int, layer: int) -> set[int]:
    """The set of a cell: recorded experts that are planned, then the best of the live ones that are not among them."""
    kept = [int(e) for e, p in zip(case.record.experts[token, layer], planned[token, layer], strict=True) if p]
    assert case.native.scores is not None
    live = sorted(case.native.experts[token, layer].tolist(), key=lambda e: -case.native.scores[token, layer, e])  # type: ignore[index]
    return {*kept, *[e for e in live if e not in kept][: 3 - len(kept)]}


@pytest.mark.parametrize("framework", ["verl", "nemo-rl"])
def test_single_slots_are_resolved_and_labelled(framework: str, case: Case) -> None:
    path = case.plan("random_route", "slot", "1/2")
    told = export_plan(path, framework, case.folder / "out", native=case.native_file)
    back = read_trace(told.path, model=shape(case))
    planned = make_plan("random_route", Candidates(case.record, ["s0", "s1", "s2", "s3"], 3), "slot", "1/2").planned
    some, whole = planned.any(-1), planned.all(-1)
    last = case.native.status == Status.LAST
    used = some if framework == "nemo-rl" else ~np.repeat(last[:, None], 3, 1)
    assert (some & ~whole).any()
    assert (whole != some).any()
    assert np.array_equal(back.recorded, used)
    for token, layer in np.argwhere(used):
        assert set(back.experts[token, layer].tolist()) == by_hand(case, planned, token, layer)
    assert told.facts["frozen_cells"] == (used & ~whole).sum()
    assert told.facts["native"] == case.native.payload_sha256()
    assert told.facts["native_versions"] == [4]
    assert (
        f"FROZEN: {(used & ~whole).sum()} of {used.sum()} cells hold native picks of recording time, trace "
        f"{case.native.payload_sha256()[:12]}… (weights 4)"
    ) in str(told)


@pytest.mark.parametrize(
    ("policy", "unit"), [("random_route", "token_layer"), ("random_route", "slot"), ("full", "slot")]
)
def test_verl_gets_recorded_ids_beside_a_mask(policy: str, unit: str, case: Case) -> None:
    budget = None if policy == "full" else "1/4"
    told = export_plan(case.plan(policy, unit, budget), "verl", case.folder / "out")
    names = ["s0", "s1", "s2", "s3"]
    planned = make_plan(policy, Candidates(case.record, names, 3), unit, budget).planned  # type: ignore[arg-type]
    back = read_trace(told.path, model=shape(case))
    assert np.array_equal(back.ids(), case.record.ids())
    assert back.token_digest == case.record.token_digest
    stored = torch.load(told.path, weights_only=True)  # as verl's users load it, and nothing is executed
    rows = stored["tensordict"]
    assert rows["routed_experts"].dtype == torch.int16
    assert [len(r) for r in rows["routed_experts"].unbind()] == LENGTHS
    assert rows["replay_mask"].dtype == torch.bool
    assert np.array_equal(torch.cat(rows["replay_mask"].unbind()).numpy(), planned)
    assert [len(r) for r in rows["prompts"].unbind()] == PROMPTS
    assert [int(r.sum()) for r in rows["response_mask"].unbind()] == [
        t - p for t, p in zip(LENGTHS, PROMPTS, strict=True)
    ]
    assert json.loads(stored["rar_plan"]) == told.facts
    assert ("give each router the column" if unit == "token_layer" else "no field of verl takes a mask of") in str(told)


def test_verl_has_no_native_cell_so_whole_sets_freeze_the_rest(case: Case) -> None:
    told = export_plan(
        case.plan("random_route", "token_layer", "1/4"), "verl", case.folder / "out", native=case.native_file
    )
    planned = make_plan(
        "random_route", Candidates(case.record, ["s0", "s1", "s2", "s3"], 3), "token_layer", "1/4"
    ).planned
    back = read_trace(told.path, model=shape(case))
    expected = np.where(planned[..., None], case.record.ids(), case.native.ids())
    assert np.array_equal(back.ids(), expected)
    assert told.facts["frozen_cells"] == (back.recorded & ~planned).sum()


def test_bias_is_resolved_or_refused(case: Case) -> None:
    path = case.plan("bias", "bias", "1/2")
    for framework in ("verl", "nemo-rl"):
        with pytest.raises(ReplayError, match="adds λ to live scores"):
            export_plan(path, framework, case.folder / "out")
        told = export_plan(path, framework, case.folder / "out", native=case.native_file)
        back = read_trace(told.path, model=shape(case))
        differ = np.sort(back.ids(), -1) != np.sort(case.native.ids(), -1)
        flipped = (np.sort(case.record.ids(), -1) != np.sort(case.native.ids(), -1)).any(-1) & case.record.recorded
        changed = differ.any(-1) & back.recorded
        assert 0 < changed.sum() < flipped.sum()
        assert told.facts["frozen_cells"] == back.recorded.sum()


def test_without_log_probs_nobody_says_where_the_prompt_ends(tmp_path: Path) -> None:
    case = make_case(tmp_path)
    header = case.record.header.model_copy(update={"source": "old"})  # a trainer scores prompts too
    own = replace(case.record, header=header).save(tmp_path / "old.safetensors")
    plan = save_plan(full_plan(RouteTrace.load(own)), tmp_path / "old-plan.safetensors")
    assert (
        "prompts" not in torch.load(export_plan(plan, "verl", tmp_path / "out").path, weights_only=True)["tensordict"]
    )
    bare = replace(case.record, logprobs=None)
    bare.save(tmp_path / "rollout.safetensors")
    case = replace(case, record=bare)
    told = export_plan(case.plan("full", "token_layer"), "verl", tmp_path / "out")
    assert set(torch.load(told.path, weights_only=True)["tensordict"]) == {"routed_experts", "replay_mask", "input_ids"}
    told = export_plan(case.plan("full", "token_layer"), "nemo-rl", tmp_path / "out")
    assert set(json.loads(told.path.read_text().splitlines()[0])["choices"][0]["message"]) == {"role", "routed_experts"}


def test_what_cannot_be_told_is_refused(case: Case, tmp_path: Path) -> None:
    out = case.folder / "out"
    slots = case.plan("random_route", "slot", "1/2")
    with pytest.raises(ReplayError, match="forces single slots, and a route is there whole or not at all"):
        export_plan(slots, "nemo-rl", out)
    bare = replace(case.native, scores=None).save(tmp_path / "bare.safetensors")
    with pytest.raises(ReplayError, match="expected router scores, by which a plan of unit slot is resolved"):
        export_plan(slots, "verl", out, native=bare)
    gone = np.where(np.arange(17) == 9, Status.MISSING, case.native.status).astype(np.uint8)
    kept = np.where((gone == Status.RECORDED)[:, None, None], case.native.experts, 0)
    holes = replace(case.native, status=gone, experts=kept)
    with pytest.raises(ReplayError, match="expected a route at sequence 2, token 3, layer 1"):
        export_plan(slots, "verl", out, native=holes.save(tmp_path / "holes.safetensors"))
    other = replace(case.native, token_ids=np.arange(17)).save(tmp_path / "other.safetensors")
    with pytest.raises(TraceError, match="two traces of other tokens"):
        export_plan(slots, "verl", out, native=other)
    with pytest.raises(ReplayError, match="plan for another trace"):
        export_plan(slots, "verl", out, trace=case.native_file)
    with pytest.raises(ConfigError, match="for: expected one of verl, nemo-rl, found 'slime'"):
        export_plan(slots, "slime", out)
    whole = case.plan("full", "token_layer")
    with pytest.raises(ReplayError, match="told exactly, so nothing is to be resolved"):
        export_plan(whole, "nemo-rl", out, native=case.native_file)
    assert not out.exists()


def test_a_run_folder_instead_of_its_plan(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"expected the file of a plan, found a folder \(no plans in it\)"):
        export_plan(case.folder, "verl", tmp_path / "out")
    plan = case.plan("full", "token_layer")
    (case.folder / "traces").mkdir()
    plan.rename(case.folder / "traces" / "step-000000-plan.safetensors")
    with pytest.raises(ReplayError, match=r"plans in it: .*/traces/step-000000-plan\.safetensors"):
        export_plan(case.folder, "verl", tmp_path / "out")


def test_the_command(case: Case, capsys: Any, monkeypatch: Any) -> None:
    plan, out = case.plan("full", "token_layer"), case.folder / "out"

    def rar(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rar", "export", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = int(str(ended.code))
        told = capsys.readouterr()
        return status, told.out, told.err

    status, told, _ = rar(plan, "--for", "nemo-rl", "--out", out)
    assert status == 0
    assert told.splitlines()[0] == str(out / "nemo-rl" / "plan.mask.jsonl")
    status, told, _ = rar(plan, "--for", "verl", "--native", case.native_file, "--out", out)
    assert "FROZEN: 1 of 39 cells" in told  # the one that the rollout did not record
    for arguments, message in (
        ((plan,), "found neither"),
        ((plan, "--for", "verl", "--to", "wandb"), "found --to wandb and --for verl"),
        ((plan, plan, "--for", "verl"), "expected one plan, found 2"),
        (("--for", "verl"), "expected the file of a plan"),
        ((plan, "--to", "wandb", "--native", plan), "--native belongs to a plan"),
        ((case.native_file, "--for", "verl"), "expected a stored plan"),
    ):
        status, _, error = rar(*arguments)
        assert (status, message in error) == (2, True), error
