"""Objectives, corrections and mismatch numbers against verl's own functions, run in an environment of their own (`make parity`).

Without that environment these tests are skipped, unless RAR_REQUIRE_VERL is set, as in .ci/run: there a skip is a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.config import AlgorithmConfig
from rar_lib.metrics.mismatch import mismatch, sequence_log_ratios
from rar_lib.rl.corrections import geo_rs_keep, icepop_weights, seq_mis_weights, tis_weights
from rar_lib.rl.learning import Lesson

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-verl" / "bin" / "python"
BOUNDS = {"cap": 2.0, "low": 0.5, "high": 5.0, "geo_low": 0.98, "geo_high": 1.03}


@pytest.fixture(scope="module", params=[(0, 0.05), (1, 0.8)], ids=["close", "far"])
def sides(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Arrays, and what verl makes of them. `far` has ratios beyond every bound."""
    if not PYTHON.exists():
        if os.environ.get("RAR_REQUIRE_VERL"):
            pytest.fail(f"{PYTHON} is not there; make parity builds it")
        pytest.skip("verl's environment is not there; make parity builds it")
    seed, spread = request.param
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, 40)
    mask = np.arange(12)[None] < lengths[:, None]
    rollout = np.where(mask, -rng.exponential(1.0, mask.shape), 0)
    old = np.where(mask, rollout + spread * rng.standard_t(4, mask.shape), 0)
    new = np.where(mask, old + 0.3 * rng.normal(size=mask.shape), 0)
    arrays = {"old": old, "rollout": rollout, "new": new, "advantages": rng.normal(size=40)}
    given = {name: value.astype(np.float32) for name, value in arrays.items()} | {"mask": mask}
    folder = tmp_path_factory.mktemp("verl")
    np.savez(folder / "in.npz", **given, **BOUNDS)
    command = [str(PYTHON), str(HERE / "verl_side.py"), str(folder / "in.npz"), str(folder / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: torch.from_numpy(value) for name, value in given.items()}, json.loads(
        (folder / "out.json").read_text()
    )


def test_weights(sides: Any) -> None:
    ours, theirs = sides
    pair = (ours["old"], ours["rollout"], ours["mask"])
    found = {
        "tis": tis_weights(*pair, BOUNDS["cap"]),
        "icepop": icepop_weights(*pair, BOUNDS["low"], BOUNDS["high"]),
        "seq_mis": seq_mis_weights(*pair, BOUNDS["cap"]),
    }
    for name, weights in found.items():
        np.testing.assert_allclose(weights.numpy(), np.array(theirs["weights"][name]), rtol=1e-5, err_msg=name)


def test_geometric_rejection(sides: Any) -> None:
    ours, theirs = sides
    kept = geo_rs_keep(ours["old"], ours["rollout"], ours["mask"], BOUNDS["geo_low"], BOUNDS["geo_high"])
    assert np.array_equal(kept.numpy(), np.array(theirs["geo_rs"]).astype(bool))
    assert 0 < kept.sum() < ours["mask"].sum()


SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.3},
    "grpo tis": {"clip_low": 0.2, "clip_high": 0.3, "corrections": "tis"},
    "grpo icepop": {"clip_low": 0.2, "clip_high": 0.3, "corrections": "icepop"},
    "gspo": {"objective": "gspo", "clip_low": 0.05, "clip_high": 0.06},
    "gspo tis": {"objective": "gspo", "clip_low": 0.05, "clip_high": 0.06, "corrections": "tis"},
    "gspo icepop": {"objective": "gspo", "clip_low": 0.05, "clip_high": 0.06, "corrections": "icepop"},
    "gspo seq_mis": {"objective": "gspo", "clip_low": 0.05, "clip_high": 0.06, "corrections": "seq_mis"},
    "gmpo": {"objective": "gmpo", "clip_low": 0.1, "clip_high": 0.15},
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_losses_and_gradients(name: str, sides: Any) -> None:
    ours, theirs = sides
    lesson = Lesson(AlgorithmConfig(**SETTINGS[name]), ours["rollout"], ours["old"], ours["advantages"], ours["mask"])
    new, rows = ours["new"].clone().requires_grad_(), torch.arange(40)
    terms, sums = lesson.objective(rows)(new, rows)
    loss = terms[ours["mask"]].sum() / ours["mask"].sum()  # what a trainer does
    loss.backward()
    expected = theirs["losses"][name]
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
    assert new.grad is not None
    np.testing.assert_allclose(new.grad.numpy(), np.array(expected["gradient"]), rtol=1e-4, atol=1e-7)
    if not name.startswith("gmpo"):  # theirs counts tokens with A > 0 only under this name
        assert sums["clipped"] / int(ours["mask"].sum()) == pytest.approx(expected["clipped"], abs=1e-6)


def test_probability_differences_and_correlation(sides: Any) -> None:
    ours, theirs = sides
    found = mismatch(ours["old"], ours["rollout"], ours["mask"])
    for name, value in (
        ("rollout_probs_diff_mean", found["probs_diff_mean"]),
        ("rollout_probs_diff_max", found["probs_diff_max"]),
        ("rollout_probs_diff_std", found["probs_diff_std"]),
        ("rollout_actor_probs_pearson_corr", found["pearson"]),
    ):
        assert value == pytest.approx(theirs["debug"][f"training/{name}"], rel=1e-4), name


def test_rollout_correction_metrics(sides: Any) -> None:
    ours, theirs = sides
    found, off = mismatch(ours["old"], ours["rollout"], ours["mask"]), theirs["off_policy"]
    assert found["k1"] == pytest.approx(off["kl"], rel=1e-4, abs=1e-6)
    assert found["k3"] == pytest.approx(off["k3_kl"], rel=1e-3)
    assert found["ess"] == pytest.approx(off["ess"], rel=1e-3)
    assert found["extreme_fraction_tau2"] == pytest.approx(off["fractions"], abs=1e-6)
    total, mean = sequence_log_ratios(ours["old"], ours["rollout"], ours["mask"])
    assert off["log_ppl_diff"] == pytest.approx(-mean.mean(), rel=1e-3, abs=1e-6)
    assert off["log_ppl_abs_diff"] == pytest.approx(np.abs(mean).mean(), rel=1e-3)
    assert off["ppl_ratio"] == pytest.approx(np.exp(-mean).mean(), rel=1e-3)
    assert off["chi2_seq"] == pytest.approx(np.exp(2 * np.clip(total, -20, 20)).mean() - 1, rel=1e-3)
