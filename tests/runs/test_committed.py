"""What is committed can be made again from what is committed: figures, claims and the tables of the README."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from rar_lib.runs.figure_set import draw_all
from rar_lib.runs.result import RunResult
from rar_lib.runs.studies import Study, claims, claims_table, comparison_table

ROOT = Path(__file__).resolve().parents[2]
STUDIES = ROOT / "data" / "studies"
SOURCES = [
    *sorted((ROOT / "data" / "reference").iterdir()),
    STUDIES / "remedies",
    STUDIES / "real",
    *(ROOT / "data" / "frontier").iterdir(),
]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("figures")
    _, reasons = draw_all(SOURCES, out)
    assert reasons == {}
    return out


def test_reference_figures_regenerate_equal(drawn: Path) -> None:
    made = sorted(p.stem for p in drawn.glob("*.csv"))
    assert len(made) == 12 + 6 + 2
    for name in made:
        assert (drawn / f"{name}.csv").read_text() == (ROOT / "figures" / f"{name}.csv").read_text(), name
        assert all((ROOT / "figures" / f"{name}{suffix}").exists() for suffix in (".png", ".svg"))


def test_reference_runs_are_of_the_real_pair() -> None:
    runs = [RunResult.read(p) for p in SOURCES if p.parent.name == "reference"]
    assert {r.label for r in runs} == {"none", "R2", "R3", "none zero mismatch"}
    assert {(r.summary["rollout_engine"], r.summary["trainer_engine"]) for r in runs} == {("vllm", "megatron")}


def test_claims_regenerate_equal() -> None:
    table = claims_table(claims(*(Study.read(STUDIES / name) for name in ("remedies", "staleness", "rates"))))
    pd.testing.assert_frame_equal(table, pd.read_csv(STUDIES / "claims.csv", dtype=str))


def test_the_readme_says_what_the_studies_say() -> None:
    text = (ROOT / "README.md").read_text()
    for name in ("remedies", "real"):
        for row in comparison_table(Study.read(STUDIES / name)).to_numpy(str).tolist():
            assert "| " + " | ".join(row) + " |" in text, row
    for row in pd.read_csv(STUDIES / "claims.csv", dtype=str)[["claim", "found", "verdict"]].to_numpy(str).tolist():
        assert "| " + " | ".join(row) + " |" in text, row


def test_studies_are_whole() -> None:
    for name, runs in (("remedies", 80), ("real", 15), ("staleness", 48), ("rates", 24)):
        study = Study.read(STUDIES / name)
        assert len(study.runs) == runs
        assert study.steps.groupby(["policy", "seed", "updates_per_batch", "lr"]).ngroups == runs
        assert (STUDIES / name / "facts.json").exists()
