"""The plugin in verl's own Megatron engine: its forward_backward_batch and forward_step, in its environment (`make parity`).

The plans are made here again, sequence by sequence, and every executed set is held against them. Without that environment
these tests are skipped, unless RAR_REQUIRE_VERL is set, as in .ci/run: there a skip is a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.checkpoint import load_model_config
from rar_lib.integrations.policy_file import load_policy
from rar_lib.integrations.sequences import Routers, SequencePlanner
from rar_lib.replay.score_file import save_score
from rar_lib.replay.scores import ExpertScore
from tests.integrations.packed_model import CHECKPOINT

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-verl" / "bin" / "python"
LENGTHS, RESPONSES = [23, 11, 17, 14], [9, 4, 0, 7]  # the third has no response, so verl replays none of it
HF = load_model_config(CHECKPOINT)
E, K, L = HF.num_experts, HF.num_experts_per_tok, HF.num_hidden_layers
MISSING = (0, slice(6, 9), 1)  # sequence, rows and layer of a block that nobody recorded

POLICIES = {
    "full": "policy: full\n",
    "none": "enabled: false\n",
    "fisher": "policy: fisher\nbudget: 0.5\nscores: scores.safetensors\n",
    "fisher_slot": "policy: fisher\nunit: slot\nbudget: 0.3\nscores: scores.safetensors\n",
    "random": "policy: random_route\nunit: slot\nbudget: 0.25\nseed: 3\n",
    "uniform": "policy: uniform\nbudget: 0.5\n",
    "threshold": "policy: threshold\nunit: slot\nratio: 0.5\n",
    "record": "mode: R2\npolicy: random_route\nbudget: 0.5\n",
}
REFUSED = {
    "margin": ("policy: margin\nbudget: 0.5\n", {}, "policy margin cannot be had inside another trainer"),
    "padded": ("policy: full\n", {"use_remove_padding": False}, "set actor_rollout_ref.model.use_remove_padding=True"),
    "other_mode": ("mode: R2\n", {}, "mode R2, but actor.megatron.router_replay.mode is R3"),
    "other_model": ("policy: fisher\nbudget: 0.5\nscores: small.safetensors\n", {}, "expected MoE layers"),
    "typo": ("budgett: 0.5\n", {}, "budgett: no such field"),
    "captured": (
        "mode: R2\npolicy: full\n",
        {"mode": "R2", "captured": True},
        "enable_rollout_routing_replay=False, or mode",
    ),
}


def routes(whole: bool = False) -> list[np.ndarray]:
    """T-1 rows a sequence, as a rollout records them; unless `whole`, a block is missing and arrives as zeros."""
    rng = np.random.default_rng(0)
    made = [np.argsort(rng.random((n - 1, L, E)), -1)[..., :K].astype(np.int16) for n in LENGTHS]
    sequence, rows, layer = MISSING
    if not whole:
        made[sequence][rows, layer] = 0
    return made


def write_inputs(folder: Path, arms: dict[str, Any], **more: Any) -> None:
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, HF.vocab_size, n) for n in LENGTHS]
    masks = [
        np.r_[np.zeros(n - r, np.float32), np.ones(r, np.float32)] for n, r in zip(LENGTHS, RESPONSES, strict=True)
    ]
    packed: dict[str, Any] = {
        "response_mask": (np.arange(max(RESPONSES)) < np.array(RESPONSES)[:, None]).astype(np.int64)
    }
    for name, parts in (("input_ids", ids), ("loss_mask", masks), ("routes", routes()), ("whole", routes(True)),
        ("whole_rows", [np.concatenate([r, r[:1]]) for r in routes(True)]),
    ):  # fmt: skip
        packed |= {name: np.concatenate(parts), f"{name}_lengths": [len(p) for p in parts]}
    np.savez(folder / "batch.npz", **packed)
    (folder / "jobs.json").write_text(json.dumps({"arms": arms, **more}))
    # the entry point as an installed package declares it
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    info = folder / "rar_entry-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rar-entry\nVersion: 0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in declared.items())
    (info / "entry_points.txt").write_text(f"[verl.plugins]\n{lines}")


def write_policies(folder: Path) -> None:
    rng = np.random.default_rng(2)
    for name, layers in (("scores", L), ("small", L - 1)):
        values = rng.random((layers, E))
        score = ExpertScore(values, np.ones_like(values), "gate", "per_route", "rollout", 1.0)
        save_score(score, tuple(range(layers)), folder / f"{name}.safetensors")
    for name, text in {**POLICIES, **{name: text for name, (text, _, _) in REFUSED.items()}}.items():
        (folder / f"{name}.yaml").write_text(text)


def in_verl(folder: Path, plugins: str = "auto") -> tuple[dict[str, Any], str]:
    if not PYTHON.exists():
        if os.environ.get("RAR_REQUIRE_VERL"):
            pytest.fail(f"{PYTHON} is not there; make parity builds it")
        pytest.skip("verl's environment is not there; make parity builds it")
    command = [str(PYTHON), "-W", "ignore", "-m", "tests.integrations.verl_side", str(folder)]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    environment |= {"VERL_USE_EXTERNAL_PLUGINS": plugins}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text()), done.stderr


@pytest.fixture(scope="module")
def verl_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, np.ndarray], str, Path]:
    folder = tmp_path_factory.mktemp("verl")
    write_policies(folder)
    arms: dict[str, Any] = {"verl_full": {}, "verl_native": {"mode": "disabled"}}
    for name in POLICIES:
        mode = {"mode": "R2"} if name == "record" else {}
        arms[name] = {"file": str(folder / f"{name}.yaml"), **mode}
        arms[f"{name}_recompute"] = {**arms[name], "recompute": True}
    arms["random_ones"] = {**arms["random"], "micro_batch": 1, "old_micro_batch": 1, "recompute": True}
    for name, (_, more, _) in REFUSED.items():
        arms[name] = {"file": str(folder / f"{name}.yaml"), **more}
    arms["verl_whole"] = {"routes": "whole"}
    arms["whole"] = {**arms["full"], **arms["verl_whole"]}
    arms["by_variable"] = {"variable": arms["random"]["file"]}
    for name, more in (
        ("reference", {"forward_only": True}),
        ("other", {"backend": "other"}),
        ("plain", {"backend": "other", "file": None}),
    ):
        arms[name] = {"file": arms["full"]["file"], "only_built": True, **more}
    arms["switched_off"] = {"file": str(folder / "none.yaml"), "mode": "disabled"}
    arms["padding"] = {"file": str(folder / "random.yaml")}
    for name in ("random", "full", "record"):
        arms[f"{name}_in_worker"] = {**arms[name], "as": "in_worker"}
    write_inputs(folder, arms)
    report, errors = in_verl(folder)
    with np.load(folder / "out.npz") as file:
        return report, dict(file), errors, folder


def plans(folder: Path, name: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Planned routes of every row of the packed batch, `[tokens, L, K]` with -1, and planned units by layer."""
    policy = load_policy(folder / f"{name}.yaml")
    planner = SequencePlanner(policy, Routers(E, K, tuple(range(L)), L))
    out = []
    for given, n, r in zip(routes(), LENGTHS, RESPONSES, strict=True):
        padded = torch.from_numpy(np.concatenate([given, np.zeros((1, L, K), np.int16)]))
        known = torch.from_numpy((np.arange(n) < n - 1) & (r > 0))
        out.append(planner.plan(padded, known).numpy())
    return out, planner.counts.planned


def test_the_entry_point_loads_the_plugin_and_no_engine(verl_run: Any) -> None:
    report = verl_run[0]
    assert report["light"] == {"plugin": True, "megatron": False}
    assert report["fault"] is None


SAME = ("old/log_probs", "update/log_probs", "gradient", "old/executed", "update/executed")


def test_full_is_verls_own_replay_and_none_is_native_bit_for_bit(verl_run: Any) -> None:
    _, arrays, _, _ = verl_run
    for ours, theirs in (("whole", "verl_whole"), ("none", "verl_native"), ("none_recompute", "verl_native")):
        for what in SAME:
            assert np.array_equal(arrays[f"{ours}/{what}"], arrays[f"{theirs}/{what}"]), (ours, what)
    assert not np.array_equal(arrays["whole/old/log_probs"], arrays["none/old/log_probs"])


def test_a_missing_row_stays_native_where_verl_sends_it_to_expert_0(verl_run: Any) -> None:
    _, arrays, _, _ = verl_run
    _, rows, layer = MISSING
    assert (arrays["verl_full/old/executed"][rows, layer].sum(-1) == 1).all()
    assert (arrays["full/old/executed"][rows, layer].sum(-1) == K).all()


@pytest.mark.parametrize("name", ["full", "none", "fisher", "fisher_slot", "random", "uniform"])
@pytest.mark.parametrize("which", ["old", "update"])
def test_executed_sets_are_the_planned_experts_and_the_best_live_ones(name: str, which: str, verl_run: Any) -> None:
    report, arrays, _, folder = verl_run
    planned, by_layer = plans(folder, name)
    wanted = np.concatenate(planned)
    for arm in (name, f"{name}_recompute"):
        logits, executed = arrays[f"{arm}/{which}/logits"], arrays[f"{arm}/{which}/executed"]
        for token, layer in np.ndindex(wanted.shape[:2]):
            forced = [e for e in wanted[token, layer] if e >= 0]
            rest = [e for e in np.argsort(-logits[token, layer], kind="stable") if e not in forced]
            expected = set(forced) | set(rest[: K - len(forced)])
            assert set(np.flatnonzero(executed[token, layer])) == expected, (arm, token, layer)
        found = report[arm]["metrics"][which]
        slot = "slot" in POLICIES[name]
        units = int((wanted >= 0).sum()) if slot else int((wanted >= 0).all(-1).sum())
        assert found[f"rar/{which}/forced_units"] == found[f"rar/{which}/planned"] == units == by_layer.sum()
        native = np.argsort(-logits, -1, kind="stable")[..., :K]
        changed = ~np.take_along_axis(executed, native, -1).all(-1)
        assert found[f"rar/{which}/changed_cells"] == changed.sum()
        assert found[f"rar/{which}/executed_equals_resolved"] == 1.0


def test_counts_by_hand(verl_run: Any) -> None:
    report = verl_run[0]
    cells = sum(n - 1 for n, r in zip(LENGTHS, RESPONSES, strict=True) if r) * L
    found = report["random"]["metrics"]["old"]
    assert found["rar/old/missing"] == 3
    assert found["rar/old/coverage"] == (cells - 3) / cells
    assert found["rar/old/valid"] == (cells - 3) * K
    # floor(M/4 + 1/2) of each sequence's own M
    budget = sum((((n - 1) * L - missing) * K + 2) // 4 for n, missing in ((23, 3), (11, 0), (14, 0)))
    assert found["rar/old/planned"] == budget
    assert report["full"]["metrics"]["old"]["rar/old/planned_share"] == 1.0
    assert report["none"]["metrics"]["old"]["rar/old/planned"] == 0


def test_metrics_of_both_passes_stand_beside_verls_own(verl_run: Any) -> None:
    report = verl_run[0]
    metrics = report["random"]["metrics"]
    assert all(metrics["update"][name] == value for name, value in metrics["old"].items())
    assert any(name.startswith("rar/update/") for name in metrics["update"])
    recorded = report["full"]["metrics"]["old"]
    assert recorded["rar/old/missing"] == 3
    expected = recorded["rar/old/changed_cells"] / recorded["rar/old/valid"]  # a unit of full is a cell
    assert recorded["rar/old/forced_routers_native_local"] == expected


@pytest.mark.parametrize("name", ["random_in_worker", "full_in_worker", "record_in_worker"])
def test_verls_worker_takes_the_metrics_and_its_trainer_averages_them(name: str, verl_run: Any) -> None:
    """Two mini-batches of two: joined by verl's train_mini_batch, and reduced by name."""
    found = verl_run[0][name]
    assert "refused" not in found, found
    assert {n.rsplit("/", 1)[0] for n in found["lists"]} >= {"actor/rar/update"}
    assert not [n for n in found["lists"] if "min" in n or "max" in n]  # by which verl chooses np.min and np.max
    for metric, values in found["lists"].items():
        assert len(values) == 2
        assert found["logged"][metric] == pytest.approx(sum(values) / 2)
    if name == "random_in_worker":
        shares = found["lists"]["actor/rar/update/planned_share"]
        assert shares[0] != shares[1]
        planned = verl_run[0]["random"]["metrics"]["update"]["rar/update/planned"]
        assert sum(found["lists"]["actor/rar/update/planned"]) == planned


@pytest.mark.parametrize("name", ["random_in_worker", "full_in_worker", "record_in_worker"])
def test_the_reference_of_lora_is_native_and_leaves_the_old_counts(name: str, verl_run: Any) -> None:
    report, arrays, _, _ = verl_run
    assert report[name]["adapter"] == ["off", "on"]
    assert np.array_equal(arrays[f"{name}/reference"], arrays["verl_native/old/executed"])
    old, after = report[name]["kept"]
    assert old == after
    assert bool(old) == (name != "record_in_worker")
    assert not any("rar/" in name for name in report["verl_full"]["metrics"]["update"])


@pytest.mark.parametrize("name", list(POLICIES))
def test_recompute_sees_the_ids_of_the_forward(name: str, verl_run: Any) -> None:
    report, arrays, _, _ = verl_run
    again = report[f"{name}_recompute"]
    assert again["recomputed"] == L * 2  # two micro-batches
    assert again["recompute_equal"]
    for what in ("old/log_probs", "update/log_probs", "gradient"):
        assert np.array_equal(arrays[f"{name}/{what}"], arrays[f"{name}_recompute/{what}"]), what
    assert again["queued"] == [0] * L


def test_micro_batches_change_no_plan_and_do_not_mix(verl_run: Any) -> None:
    """Old pass in one micro-batch of four, updates in two of two, and in four of one: the same units everywhere."""
    report, arrays, _, _ = verl_run
    assert report["random_ones"]["recomputed"] == L * 4
    assert report["random_ones"]["recompute_equal"]
    for which in ("old", "update"):
        assert np.array_equal(arrays[f"random/{which}/executed"], arrays[f"random_ones/{which}/executed"])
    one, other = arrays["random/gradient"], arrays["random_ones/gradient"]
    assert np.linalg.norm(one - other) < 1e-5 * np.linalg.norm(one)


def test_threshold_keeps_what_the_live_scores_allow(verl_run: Any) -> None:
    report, arrays, _, folder = verl_run
    wanted, logits = np.concatenate(plans(folder, "threshold")[0]), arrays["threshold/old/logits"]
    probabilities = torch.softmax(torch.from_numpy(logits), -1).numpy()
    weakest = np.sort(probabilities, -1)[..., -K]
    executed, kept = arrays["threshold/old/executed"], 0
    for token, layer in np.ndindex(wanted.shape[:2]):
        forced = [
            e for e in wanted[token, layer] if e >= 0 and probabilities[token, layer, e] >= 0.5 * weakest[token, layer]
        ]
        kept += len(forced)
        rest = [e for e in np.argsort(-logits[token, layer], kind="stable") if e not in forced]
        assert set(np.flatnonzero(executed[token, layer])) == set(forced) | set(rest[: K - len(forced)])
    found = report["threshold"]["metrics"]["old"]
    assert found["rar/old/forced_units"] == kept
    assert 0 < kept < found["rar/old/valid"]


def test_r2_records_natively_and_replays_its_own_record(verl_run: Any) -> None:
    report, arrays, _, _ = verl_run
    assert np.array_equal(arrays["record/old/log_probs"], arrays["verl_native/old/log_probs"])
    assert report["record"]["metrics"]["old"] == {}
    recorded = arrays["record/recorded"]
    assert np.take_along_axis(arrays["record/old/executed"], recorded.astype(np.int64), -1).all()
    found = report["record"]["metrics"]["update"]
    assert found["rar/update/valid"] == sum(LENGTHS) * L  # R2 records the last row too, and verl replays it
    assert found["rar/update/forced_units"] == sum((n * L + 1) // 2 for n in LENGTHS)
    assert found["rar/update/changed_cells"] == 0  # no update was taken since


def test_refusals_name_the_reason_and_are_logged(verl_run: Any) -> None:
    report, _, errors, _ = verl_run
    for name, (_, _, message) in REFUSED.items():
        assert message in report[name]["refused"], name
        assert "rar: refused: " in errors
    assert "router_replay.mode is disabled; they must agree" in report["switched_off"]["refused"]
    assert "rar: active in verl 0.9.1: random_route at 0.25 of R3, unit slot, seed 3" in errors
    assert report["version"] == "expected verl 0.9.1, found 0.9.2"


def test_where_a_policy_comes_from_and_where_it_goes(verl_run: Any) -> None:
    report, arrays, _, _ = verl_run
    assert report["by_variable"]["metrics"] == report["random"]["metrics"]
    assert np.array_equal(arrays["by_variable/gradient"], arrays["random/gradient"])
    assert report["reference"]["policy"] is None
    assert "policy was given for engine other" in report["other"]["refused"]
    assert report["plain"]["policy"] is None


def test_padding_rows_stay_native_and_a_deaf_router_is_an_error(verl_run: Any) -> None:
    found = verl_run[0]["padding"]
    assert found["ids"][0] == [5, 3]
    assert found["ids"][1] == found["native"][1]
    assert 4 in found["ids"][2]
    assert len(set(found["ids"][2])) == 2
    assert found["gathered"]
    assert found["counts"][0] == 3
    assert found["counts"][2] == 2
    assert found["again"] == found["ids"]
    assert found["queued"] == [0, 0]
    assert "new targets before the router asked" in found["deaf"]
    assert "that the plugin did not see" in found["unseen"]
    assert "layers [0] were given routes and did not ask" in found["finish"]


def test_another_signature_is_refused_only_where_a_policy_was_asked_for(tmp_path: Path) -> None:
    """Also: loaded late, as external_lib, when verl's engines are imported already."""
    write_policies(tmp_path)
    write_inputs(
        tmp_path, {"asked": {"file": str(tmp_path / "full.yaml")}, "not_asked": {"mode": "disabled"}}, **{"break": True}
    )
    report, errors = in_verl(tmp_path, plugins="none")
    assert report["light"] == {"plugin": False, "megatron": False}
    expected = "RouterReplay.get_replay_topk: expected the parameters self, scores, topk"
    assert report["fault"].startswith(expected)
    assert f"the replay policy was refused: {expected}" in report["asked"]["refused"]
    assert f"rar: refused: the replay policy was refused: {expected}" in errors
    assert report["not_asked"]["policy"] is None
