"""Studies made by hand: what is said of them must be what was put in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rar_lib.errors import ConfigError
from rar_lib.runs.figure_set import draw_all
from rar_lib.runs.studies import Study, claims, claims_table, comparison, comparison_table, decide, values_of


def study(
    policies: dict[str, float], seeds: int = 8, updates: tuple[int, ...] = (4,), lrs: tuple[float, ...] = (1e-4,), spread: float = 0.01, **more: Any
) -> Study:  # fmt: skip
    """Runs whose k3 is 1e-3 times a policy's factor, up to a seeded spread; the reward is 0.5 plus 0.01 log2(updates) under R3."""
    rng = np.random.default_rng(0)
    runs, steps = [], []
    for lr in lrs:
        for n in updates:
            for seed in range(seeds):
                shared = rng.normal()
                for policy, factor in policies.items():
                    noise = 0.0 if policy in more.get("quiet", ()) else spread
                    k3 = 1e-3 * factor * np.exp(0.5 * shared + noise * rng.normal())
                    gain = 0.01 * np.log2(n) if policy == "R3" else 0.0
                    broken = more.get("broken", lambda p, r, s: False)(policy, lr, seed)
                    runs.append(
                        {"policy": policy, "seed": seed, "lr": lr, "updates_per_batch": n, "steps": 4, "evaluation_first": 0.4,
                         "evaluation_last": 0.5 + 0.1 * shared, "k3_rollout_old": k3, "extreme_fraction_tau2": k3, "ratio_max": 2.0 + k3,
                         "grad_norm": 1.0 + factor, "noise_floor_rollout": 1e-9, "noise_floor_trainer": 1e-10,
                         "collapsed_at": 2.0 if broken else None, "diverged": None}
                    )  # fmt: skip
                    for step in range(4):
                        steps.append(
                            {"policy": policy, "seed": seed, "lr": lr, "updates_per_batch": n, "step": step,
                             "reward/mean": 0.5 + 0.1 * shared + gain + noise * rng.normal(), "evaluation/reward": 0.45 if step == 1 else None,
                             "mismatch/rollout_old/k3": k3, "mismatch/rollout_old/tokens": 1e4, "update/grad_norm": 1.0,
                             "paired/none/rollout_old/k3": 1e-3 * np.exp(spread * shared), "paired/R3/rollout_old/k3": 3e-4,
                             "paired/none/rollout_old/extreme_fraction_tau2": 1e-3 * np.exp(spread * shared), "paired/R3/rollout_old/extreme_fraction_tau2": 2e-4,
                             "agreement/rollout_native/dispersion": 1.5 + spread * shared}
                        )  # fmt: skip
    return Study("made", pd.DataFrame(runs), pd.DataFrame(steps))


ARMS = {"none": 1.0, "R3": 0.4, "margin 0.25": 1.0}


def test_a_factor_that_was_put_in_is_found() -> None:
    found = comparison(study(ARMS)).set_index(["quantity", "policy"])
    k3 = found.loc[("k3_rollout_old", "R3")]
    assert np.exp(k3["difference"]) == pytest.approx(0.4, rel=0.02)
    assert k3["verdict"] == "lower"
    assert found.loc[("k3_rollout_old", "margin 0.25"), "verdict"] == "does not differ"
    assert found.loc[("evaluation_last", "R3"), ["difference", "p", "verdict"]].tolist() == [0, 1, "does not differ"]


def test_the_reward_is_that_of_the_last_quarter() -> None:
    made = study(ARMS, seeds=1)
    steps = made.steps[(made.steps["policy"] == "none") & (made.steps["step"] == 3)]
    assert values_of(made).set_index("policy").loc["none", "reward"] == steps["reward/mean"].item()


def test_the_table_marks_what_differs() -> None:
    table = comparison_table(study(ARMS)).set_index("policy")
    assert table.loc["R3", "k3 rollout/old"].endswith(" ↓")
    assert not table.loc["margin 0.25", "k3 rollout/old"].endswith(("↓", "↑"))
    assert not table.loc["none", "k3 rollout/old"].endswith(("↓", "↑"))


@pytest.mark.parametrize(
    ("low", "high", "side", "verdict"),
    [
        (0.3, 0.4, "below", "holds"),
        (0.4, 0.6, "below", "cannot be told"),
        (0.6, 0.7, "below", "does not hold"),
        (1.1, 1.2, "above", "holds"),
        (0.4, 0.6, "above", "cannot be told"),
        (0.1, 0.2, "above", "does not hold"),
        (None, None, "above", "cannot be told"),
    ],
)
def test_a_verdict_needs_the_whole_interval(low: Any, high: Any, side: str, verdict: str) -> None:
    assert decide({"difference": 0, "low": low, "high": high}, 0.5, side) == verdict


def test_claims_by_their_rules() -> None:
    remedies = study(ARMS)
    on_policy = study(
        {"none": 1, "R2": 1, "R3": 0.4}, seeds=4, updates=(1, 2, 4, 8), spread=0.001, quiet=("none", "R2")
    )
    rates = study(
        {"none": 1, "R3": 0.4},
        seeds=3,
        lrs=(1e-3, 2e-3),
        broken=lambda policy, lr, seed: policy == "none" and lr > 1e-3,
    )
    found = claims(remedies, on_policy, rates)
    verdicts = {c.text.partition(" (")[0]: c.verdict for c in found}
    assert verdicts == {
        "R3 halves k3 on the same tokens": "holds",
        "R3 halves k3 of a run": "holds",
        "F(2) falls tenfold on the same tokens": "does not hold",  # a fifth was put in
        "flips cluster on tokens": "holds",
        "R2 does nothing on-policy": "holds",
        "R3's gain over none grows with the updates a batch": "holds",
        "at some learning rate none collapses and R3 does not": "holds",
    }
    values = {c.text: c.value for c in found}
    assert values["R3 halves k3 on the same tokens"] == pytest.approx(0.3, rel=0.02)
    assert values["R3's gain over none grows with the updates a batch"] == pytest.approx(0.01, rel=0.2)
    assert found[-1].value == 2e-3
    assert "0.002: 100% and 0%" in found[-1].text
    assert len(claims_table(found)) == 7


def test_claims_that_fail() -> None:
    remedies = study(ARMS)
    moved = study({"none": 1, "R2": 1.01, "R3": 0.4}, seeds=4, updates=(1, 2))
    calm = study({"none": 1, "R3": 0.4}, seeds=3, lrs=(1e-3, 2e-3))
    verdicts = [c.verdict for c in claims(remedies, moved, calm)]
    assert verdicts[4] == "does not hold"  # R2 moved something at one update
    assert verdicts[6] == "cannot be told"  # nothing broke at any rate
    some = study(
        {"none": 1, "R3": 0.4}, seeds=3, lrs=(1e-3, 2e-3, 3e-3),
        broken=lambda policy, lr, seed: lr > 2e-3 or (policy == "none" and lr > 1e-3 and seed == 0),
    )  # fmt: skip
    assert (
        claims(remedies, moved, some)[6].verdict == "does not hold"
    )  # one broken seed of three is no collapse of none


def test_a_study_is_read_and_drawn(tmp_path: Path) -> None:
    made, folder = study(ARMS), tmp_path / "made"
    folder.mkdir()
    made.runs.to_parquet(folder / "runs.parquet")
    made.steps.to_parquet(folder / "steps.parquet")
    assert len(Study.read(folder).runs) == 24
    files, reasons = draw_all([folder], tmp_path / "out")
    assert [f.stem for f in files] == ["made_rewards", "made_kl", "made_differences"]
    assert reasons == {}
    served = pd.read_csv(tmp_path / "out" / "made_rewards.csv").query("on == 'held out'")
    assert sorted(served["step"].unique()) == [0, 2, 4]
    with pytest.raises(ConfigError, match=r"expected runs\.parquet and steps"):
        Study.read(tmp_path)


def test_settings_that_differ_are_not_drawn_together(tmp_path: Path) -> None:
    made, folder = study(ARMS, updates=(1, 2)), tmp_path / "made"
    folder.mkdir()
    made.runs.to_parquet(folder / "runs.parquet")
    made.steps.to_parquet(folder / "steps.parquet")
    _, reasons = draw_all([folder], tmp_path / "out")
    assert set(reasons) == {"made_rewards", "made_kl", "made_differences"}
    assert "differ in more than policy and seed" in reasons["made_kl"]


def test_a_run_that_diverged_counts_the_steps_it_lost_as_nothing() -> None:
    made = study(ARMS, seeds=3)
    cut = (made.steps["policy"] == "R3") & (made.steps["seed"] == 1) & (made.steps["step"] >= 2)
    unknown = values_of(Study("made", made.runs, made.steps[~cut])).set_index(["policy", "seed"])
    assert np.isnan(unknown.loc[("R3", 1), "reward"])  # nobody knows why it lacks them
    lost = (made.runs["policy"] == "R3") & (made.runs["seed"] == 1)
    made = Study("made", made.runs.assign(diverged=np.where(lost, "step 2", None)), made.steps)
    found = values_of(Study("made", made.runs, made.steps[~cut])).set_index(["policy", "seed"])
    assert found.loc[("R3", 1), "reward"] == 0
    below = made.steps.assign(**{"reward/mean": made.steps["reward/mean"] - 1})  # there 0 would be a good reward
    unknown = values_of(Study("made", made.runs, below[~cut])).set_index(["policy", "seed"])
    assert np.isnan(unknown.loc[("R3", 1), "reward"])
    assert found.loc[("R3", 0), "reward"] > 0.2
    comparison(Study("made", made.runs, made.steps[~cut]))


def test_a_seed_that_is_missing_is_named(tmp_path: Path) -> None:
    made = study(ARMS, seeds=3)
    short = made.runs[~((made.runs["policy"] == "R3") & (made.runs["seed"] == 1))]
    with pytest.raises(ConfigError, match="study made: reward: against: expected 'none' among the policies"):
        comparison(Study("made", short, made.steps))


def test_no_extreme_token_under_r3_is_a_ratio_too() -> None:
    made = study(ARMS)
    steps = made.steps.assign(**{"paired/R3/rollout_old/extreme_fraction_tau2": 0.0})
    calm, rates = study({"none": 1, "R2": 1, "R3": 1}, seeds=2, updates=(1, 2)), study({"none": 1, "R3": 1}, seeds=2)
    for tokens, verdict in ((1e2, "cannot be told"), (1e4, "holds")):  # 0.4 and 40 extreme tokens a seed without replay
        counted = Study("made", made.runs, steps.assign(**{"mismatch/rollout_old/tokens": tokens}))
        assert claims(counted, calm, rates)[2].verdict == verdict
