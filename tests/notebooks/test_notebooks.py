"""House rules for notebooks, and papermill at smoke size on the real engines. nbval runs from `make test`."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest

from rar_lib.config_keys import FLAT_NAMES
from tests.notebooks.execute import STATE, normalise

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PARAMETER = re.compile(r"^[a-z_]+: (str|int|float|bool) = .+$")
PATHS = re.compile(r"/(home|root|work|tmp|usr|Users)/|127\.0\.0\.1|0x[0-9a-f]{8,}")


def faults(notebook: Any) -> list[str]:
    """Every breach of the house rules, with the cell's number."""
    found = []
    code = [(i, cell) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    tagged = [cell for _, cell in code if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        found.append(f"expected one parameters cell, found {len(tagged)}")
    for cell in tagged:
        for line in cell.source.splitlines():
            if line.startswith("#"):
                if "=" in line:
                    found.append(f"parameters: papermill reads an equals sign in a comment: {line}")
            elif line.strip() and not PARAMETER.match(line):
                found.append(f"parameters: expected `name: type = value`, found {line}")
    if not notebook.cells or notebook.cells[0].cell_type != "markdown":
        found.append("expected an opening text")
    if not code or "_table(" not in code[-1][1].source:
        found.append("expected the numbers in a table at the end")
    for i, cell in code:
        lines = [line for line in cell.source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        if cell.execution_count is None:
            found.append(f"cell {i}: not executed; strict nbval would pass it vacuously")
        if len(lines) > 12 and cell not in tagged:  # parameters are a list: papermill wants them in one cell
            found.append(f"cell {i}: {len(lines)} lines of code, expected at most 12")
        if any(line.lstrip().startswith(("%", "!")) for line in lines):
            found.append(f"cell {i}: magic or shell line")
        if lines and lines[-1].rstrip().endswith(";"):
            found.append(f"cell {i}: trailing semicolon")
        if len([line for line in lines if line.startswith(("def ", "class "))]) > 1:
            found.append(f"cell {i}: definitions belong into the library")
        for output in cell.outputs:
            text = str({k: v for k, v in output.items() if k != "data"}) + "".join(
                str(v) for k, v in output.get("data", {}).items() if k.startswith("text/")
            )
            if output.output_type == "error":
                found.append(f"cell {i}: error output")
            if PATHS.search(text):
                found.append(f"cell {i}: a path or address in an output")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_house_rules(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert faults(notebook) == []


def test_make_test_runs_every_notebook_once() -> None:
    """Strictly or laxly, by name in the Makefile."""
    lines = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(("DETERMINISTIC", "LAX"))]
    named = [word for line in lines for word in re.findall(r"\b\d\d_[a-z_]+", line)]
    assert sorted(named) == [path.stem for path in NOTEBOOKS]


def test_the_linter_finds_each_breach() -> None:
    """A check must be able to fail."""
    new = nbformat.v4
    notebook = new.new_notebook(
        cells=[
            new.new_code_cell("# a = b\nsteps = 3", metadata={"tags": ["parameters"]}),
            new.new_code_cell("%time\nx;", execution_count=1),
            new.new_code_cell("\n".join("x" for _ in range(13)), execution_count=2),
            new.new_code_cell("def f(): ...\ndef g(): ...", execution_count=3),
            new.new_code_cell("p", execution_count=4, outputs=[new.new_output("stream", text="/tmp/x")]),
            new.new_code_cell(
                "q", execution_count=5, outputs=[new.new_output("error", ename="E", evalue="", traceback=[])]
            ),
        ]
    )
    text = "\n".join(faults(notebook))
    for breach in ("equals sign", "name: type", "opening text", "table at the end", "not executed", "13 lines", "magic",
                   "semicolon", "definitions", "path or address", "error output"):  # fmt: skip
        assert breach in text


OWN_PARAMETERS = {
    "01_quickstart": {"native_steps", "runs_dir", "out_dir"},
    "02_mismatch": {"runs_dir", "out_dir"},
    "03_fisher_scores": {"runs_dir", "out_dir"},
    "04_budget_frontier": {"rollouts", "budgets", "runs_dir", "out_dir"},
    "05_routing_shift": {"runs_dir", "out_dir"},
    "07_policies": {"runs_dir", "out_dir"},
    "09_scale_out": {"layouts", "batch_sequences", "batch_length", "runs_dir", "out_dir"},
    "08_compare_runs": {"sources", "baseline", "runs_dir", "out_dir"},
    "06_route_doctor": {
        "dump",
        "format",
        "record",
        "kind",
        "vouch_for",
        "allow_pickle",
        "layers",
        "batch_size",
        "top",
        "out_dir",
    },
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_parameters_are_names_of_the_config(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    (cell,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    names = {line.partition(":")[0] for line in cell.source.splitlines() if not line.startswith("#")}
    assert names - set(FLAT_NAMES) == OWN_PARAMETERS[path.stem]


SMALL = {"engine": "real", "steps": 2, "checkpoint_every": 1, "prompts_per_step": 16, "group_size": 4}


def executed(name: str, out: Path, parameters: dict[str, Any]) -> Any:
    """A notebook through papermill, its result in a folder."""
    import papermill

    source = ROOT / "notebooks" / f"{name}.ipynb"
    papermill.execute_notebook(source, out / "done.ipynb", parameters, progress_bar=False, kernel_name="python3")
    return nbformat.read(out / "done.ipynb", as_version=4)


def smoke(name: str, folder: Path, parameters: dict[str, Any]) -> Any:
    """A notebook on the real engines at the smallest size that shows something."""
    out = folder / name
    out.mkdir()
    given = SMALL | parameters | {"runs_dir": str(folder), "out_dir": str(out)}
    given = {name: value for name, value in given.items() if value is not None}
    return executed(name, out, given)


def test_mismatch_through_papermill(tmp_path: Path) -> None:
    done = smoke("02_mismatch", tmp_path, {"engine": "hf", "steps": None, "checkpoint_every": None})
    assert images(done) == 7
    numbers = pd.read_csv(tmp_path / "02_mismatch" / "numbers.csv", index_col="number")
    assert float(numbers.loc["k3", "this pair, none"]) > 1e-5
    assert float(numbers.loc["k3", "fp32 on both sides, none"]) < 1e-9
    for name in (
        "logprobs",
        "extremes",
        "flips_by_layer",
        "flips_by_margin",
        "layers_per_token",
        "expert_flow",
        "route_strip",
    ):
        assert (tmp_path / "02_mismatch" / f"{name}.svg").exists()


def test_scale_out_through_papermill(tmp_path: Path) -> None:
    """Two layouts at the smallest size; `make test` runs the notebook itself with all of its own."""
    layouts = {
        "layouts": "1 process, FSDP 2",
        "engine": "hf",
        "unit": "slot",
        "routes": "margin",
        "budget": "1/4",
        "recompute": True,
    }
    done = smoke("09_scale_out", tmp_path, {**layouts, "steps": None, "checkpoint_every": None})
    assert images(done) == 1
    table = pd.read_csv(tmp_path / "09_scale_out" / "layouts.csv", index_col="layout")
    assert (table["largest |Δ log-prob|"] < 1e-4).all()
    assert (table["routes differ"] == 0).all()
    assert (table["executed = resolved"] == 1).all()
    assert table["planned"].nunique() == 1


def test_routing_shift_through_papermill(tmp_path: Path) -> None:
    done = smoke("05_routing_shift", tmp_path, {"engine": "hf"})
    assert images(done) == 3
    swapped = pd.read_csv(tmp_path / "05_routing_shift" / "gate_swap.csv")
    assert swapped[["body", "routers"]].to_numpy().tolist() == [
        ["start", "start"],
        ["end", "end"],
        ["end", "start"],
        ["start", "end"],
    ]


def test_policies_through_papermill_on_the_real_engines(tmp_path: Path) -> None:
    done = smoke(
        "07_policies", tmp_path,
        {"routes": "margin", "budget": "0.25", "eval_prompts": 16, "eval_every": 1, "corrections": "tis"},
    )  # fmt: skip
    assert images(done) == 5
    assert "margin+tis 0.25 on vllm + megatron, 2 steps" in printed(done)
    served = pd.read_csv(tmp_path / "07_policies" / "served.csv", dtype=str)
    assert served[["collapsed", "diverged"]].to_numpy().tolist() == [["no", "no"]]
    inside = pd.read_csv(tmp_path / "07_policies" / "replay.csv", index_col="number", dtype=str)
    assert inside.loc["executed = resolved"].tolist() == ["1.0000"] * 3
    assert inside.loc["nominal share", "mean"] == "0.2500"


def test_comparison_through_papermill(tmp_path: Path) -> None:
    done = smoke("08_compare_runs", tmp_path, {**dict.fromkeys(SMALL), "sources": "real staleness"})
    assert images(done) == 3 + 4 * 3
    assert "63 runs in 5 settings" in printed(done)
    assert (tmp_path / "08_compare_runs" / "compare.html").stat().st_size > 100_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_committed_notebooks_are_normal(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert normalise(deepcopy(notebook)) == notebook


def test_normalising_keeps_results_and_drops_what_passes() -> None:
    new = nbformat.v4
    view = "application/vnd.jupyter.widget-view+json"

    def shows(model: str) -> Any:
        return new.new_output("display_data", {view: {"model_id": model}, "text/plain": model})

    outputs = [
        new.new_output("stream", name="stderr", text="warning"), new.new_output("stream", name="stdout", text="a"),
        shows("bar"), shows("lost"), new.new_output("stream", name="stdout", text="b"), shows("box"),
        new.new_output("execute_result", {"text/plain": "3"}, execution_count=1, metadata={"took": 3}),
    ]  # fmt: skip
    cell = new.new_code_cell(
        "x", execution_count=1, outputs=outputs, metadata={"tags": ["t"], "execution": {"iopub.status.busy": "then"}}
    )
    states = {
        "bar": {"model_name": "HBoxModel", "state": {"children": ["IPY_MODEL_progress"]}},
        "progress": {"model_name": "FloatProgressModel", "state": {}},
        "box": {"model_name": "VBoxModel", "state": {"children": ["IPY_MODEL_slider"]}},
        "slider": {"model_name": "IntSliderModel", "state": {}},
    }
    notebook = new.new_notebook(
        cells=[cell],
        metadata={"widgets": {STATE: {"state": states}}, "language_info": {"name": "python", "version": "3.0"}},
    )
    done = normalise(notebook)
    (cell,) = done.cells
    assert cell.metadata == {"tags": ["t"]}
    assert [o.get("text") or o["data"]["text/plain"] for o in cell.outputs] == ["ab", "box", "3"]
    assert cell.outputs[2].metadata == {}
    assert "version" not in done.metadata.language_info
    assert set(done.metadata.widgets[STATE]["state"]) == {"box", "slider"}
    assert normalise(deepcopy(done)) == done


def images(notebook: Any) -> int:
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    return sum("image/png" in o.get("data", {}) for o in outputs)


def printed(notebook: Any) -> str:
    return "".join(
        o.text for c in notebook.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "stream"
    )


def test_scores_and_frontier_through_papermill_on_the_real_engines(tmp_path: Path) -> None:
    scores = smoke("03_fisher_scores", tmp_path, {})
    assert images(scores) == 4
    assert "vllm + megatron step 0 step 1 step 2" in printed(scores)
    table = pd.read_csv(tmp_path / "03_fisher_scores" / "scores.csv")
    assert table["estimator"].tolist() == ["gate", "param", "param_exact", "swap"]
    frontier = smoke("04_budget_frontier", tmp_path, {"rollouts": 1, "budgets": "0.25"})
    assert images(frontier) == 3
    assert "vllm + megatron: step 0, step 1, step 2; 1 batches at each" in printed(frontier)
    out = tmp_path / "04_budget_frontier"
    contrasts = pd.read_csv(out / "contrasts_nominal.csv")["contrast"].tolist()
    for name in ("replay at all: random 0.25 - none", "choice: fisher - random", "left: R3 - swap", "fisher - margin",
                 "swap - disagree", "fisher - permuted_fisher"):  # fmt: skip
        assert name in contrasts
    assert len(pd.read_csv(out / "contrasts_binding.csv")) == 10
    assert set(pd.read_csv(out / "verdicts.csv")["policy"]) >= {"fisher", "swap", "margin", "disagree", "uniform"}


@pytest.mark.parametrize("dump", ["vllm_http/answers.jsonl", "xtuner/debug_rollout_0.pt"])
def test_route_doctor_through_papermill(tmp_path: Path, dump: str) -> None:
    given = {"dump": dump, "allow_pickle": dump.startswith("xtuner"), "out_dir": str(tmp_path)}
    notebook = executed("06_route_doctor", tmp_path, given)
    assert images(notebook) == 2
    assert "router_replay:" in printed(notebook)
    numbers = pd.read_csv(tmp_path / "numbers.csv", index_col="number")["value"]
    assert float(numbers["exit status"]) == 0
    if dump.startswith("vllm"):
        assert 0.001 < float(numbers["router_flip"]) < 0.05  # bf16 against fp32 on a real server's answers
        extreme = pd.read_csv(tmp_path / "extreme_tokens.csv")
        assert (extreme["delta"].abs().diff().dropna() <= 0).all()


def test_route_doctor_stops_at_a_dead_capture(tmp_path: Path) -> None:
    import papermill

    lines = (ROOT / "data" / "traces" / "lmdeploy" / "answers.jsonl").read_text().splitlines()
    dead = [
        re.sub(r'("routed_experts": )\[\[.*?\]\]\]', lambda m: m[1] + re.sub(r"\d+", "0", m[0][len(m[1]) :]), line)
        for line in lines
    ]
    (tmp_path / "dead.jsonl").write_text("\n".join(dead))
    with pytest.raises(
        papermill.PapermillExecutionError, match="CAPTURE_DEAD: must not be replayed, so nothing is compared"
    ):
        executed("06_route_doctor", tmp_path, {"dump": str(tmp_path / "dead.jsonl"), "out_dir": str(tmp_path)})


def test_quickstart_through_papermill_on_the_real_engines(tmp_path: Path) -> None:
    out = tmp_path / "quickstart"
    out.mkdir()
    parameters = {"engine": "real", "steps": 2, "native_steps": 1, "prompts_per_step": 16, "runs_dir": str(tmp_path),
                  "out_dir": str(out)}  # fmt: skip
    assert images(executed("01_quickstart", out, parameters)) == 3
    for name in ("reward", "k3", "flips"):
        assert all((out / name).with_suffix(suffix).stat().st_size > 100 for suffix in (".png", ".svg", ".csv"))
    table = pd.read_csv(out / "policies.csv", dtype=str)
    assert table["policy"].tolist() == ["none", "R2", "R3"]
    assert (table["coverage"] == "1.0000").all()
    for run in table["run"]:
        summary = pd.read_json(tmp_path / run / "summary.json", typ="series")
        assert (summary["rollout_engine"], summary["trainer_engine"]) == ("vllm", "megatron")
    assert pd.read_csv(out / "paired.csv")["rollout"].tolist() == ["fp8_weights", "native (bf16 only)"]
