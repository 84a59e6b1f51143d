"""From a grid to points: which, in what order, under which names; and every fault at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rar_lib
from rar_lib.errors import ConfigError
from rar_lib.runs.grid import Grid, points_of
from rar_lib.runs.notebook import NOTEBOOKS, Notebook
from tests.runs.notebooks import JOB, PARAMETERS, write_grid, write_notebook


@pytest.fixture
def light(tmp_path: Path) -> str:
    return str(write_notebook(tmp_path / "light.ipynb", PARAMETERS, JOB))


def grid(text: str, folder: Path) -> Grid:
    (folder / "night.yaml").write_text(text)
    return Grid.from_file(folder / "night.yaml")


def test_every_combination_in_order_seeds_innermost(light: str, tmp_path: Path) -> None:
    found = points_of(
        grid(
            f"""
            notebook: {light}
            base: {{steps: 3}}
            arms: {{none: {{policy: none}}, mine: {{policy: R3, routes: margin, budget: 0.25}}}}
            grid: {{prompts_per_step: [4, 8]}}
            zip: {{lr: [1e-4, 3e-4], group_size: [2, 4]}}
            seeds: [0, 1, 2]
            """,
            tmp_path,
        )
    )
    assert len(found) == len({p.id for p in found}) == 2 * 2 * 2 * 3
    told = [(p.arm, p.axes["prompts_per_step"], p.axes["lr"], p.axes["group_size"], p.axes["seed"]) for p in found]
    assert told[:4] == [
        ("none", 4, 1e-4, 2, 0),
        ("none", 4, 1e-4, 2, 1),
        ("none", 4, 1e-4, 2, 2),
        ("none", 4, 3e-4, 4, 0),
    ]
    assert told[-1] == ("mine", 8, 3e-4, 4, 2)
    assert {p.parameters["steps"] for p in found} == {3}
    assert found[-1].label == "margin 0.25"
    assert found[-1].id.startswith("margin-0.25-seed2-")
    assert found[-1].job is not None
    assert found[-1].job.router_replay.budget == "0.25"


def test_combinations_that_compute_the_same_are_one_point(light: str, tmp_path: Path) -> None:
    found = points_of(
        grid(
            f"{{notebook: {light}, grid: {{policy: [none, R3], budget: [0.25, 0.5]}}, base: {{routes: margin}}}}",
            tmp_path,
        )
    )
    assert [p.label for p in found] == ["none", "margin 0.25", "margin 0.5"]
    assert found[0].also == ("policy='none', budget=0.5",)


def test_a_point_is_named_by_what_it_computes(light: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names(path: str = light, **values: Any) -> list[str]:
        return [p.id for p in points_of(Grid(notebook=path, **values))]

    assert names() == names(base={"lr": 1e-4}) == names(base={"engine": "hf"})
    assert names() != names(base={"lr": 2e-4})
    texts = write_notebook(tmp_path / "texts.ipynb", PARAMETERS.replace("# what", "# which"), JOB)
    assert names() == names(str(texts))  # the file's name, comments and outputs do not count
    code = write_notebook(tmp_path / "code.ipynb", PARAMETERS, JOB + "\nprint(1)")
    assert names() != names(str(code))
    own = write_notebook(tmp_path / "own.ipynb", PARAMETERS + "native: int = 1\n", JOB)
    assert names(str(own), base={"native": 1}) != names(str(own), base={"native": 2})
    plain = str(write_notebook(tmp_path / "plain.ipynb", "seed: int = 0\n", "print(seed)"))
    before = [*names(), *names(plain)]
    monkeypatch.setattr(rar_lib, "__version__", "9.9.9")
    assert not set(before) & {*names(), *names(plain)}


def test_the_name_of_an_arm_is_none_of_what_is_computed(light: str, tmp_path: Path) -> None:
    found = points_of(
        grid(f"{{notebook: {light}, arms: {{a: {{policy: none}}, b: {{policy: none}}}}, seeds: [0]}}", tmp_path)
    )
    assert [(p.arm, p.also) for p in found] == [("a", ("policy='none', seed=0",))]
    (renamed,) = points_of(Grid(notebook=light, arms={"c/../../é" + "x" * 300: {"policy": "none"}}, seeds=[0]))
    assert renamed.id == found[0].id


def test_an_engine_that_is_chosen_here_is_the_one_everywhere(light: str) -> None:
    """Another node of a cluster may have other engines installed."""
    auto, real = (points_of(Grid(notebook=light, base={"engine": engine}))[0] for engine in ("auto", "real"))
    assert auto.parameters["engine"] == "real"
    assert auto.id == real.id


def test_a_name_of_a_folder_is_a_name(tmp_path: Path) -> None:
    own = write_notebook(tmp_path / "a b.ipynb", 'seed: str = "x"\nout_dir: str = ""\n', "print(seed)")
    (point,) = points_of(Grid(notebook=str(own), base={"seed": "../../up"}))
    assert "/" not in point.id
    assert ".." not in point.id
    assert point.id.startswith("a-b-seed")


def test_the_notebook_is_read_once(light: str) -> None:
    (point,) = points_of(Grid(notebook=light))
    Path(light).write_text("{}")
    assert "run_job(job" in point.source


def test_a_grid_is_written_as_it_is_read(tmp_path: Path) -> None:
    first = grid(
        "{base: {a: '1e-4', b: 1e-4, c: '3', d: 'off', e: ''}, arms: {x: &x {f: 1}, y: {<<: *x, g: 2}}}", tmp_path
    )
    assert first.arms == {"x": {"f": 1}, "y": {"f": 1, "g": 2}}
    assert grid(first.text(), tmp_path) == first


def test_a_notebook_beside_the_grid_is_found_from_anywhere(
    light: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    assert points_of(grid("{notebook: light.ipynb}", tmp_path))[0].notebook == Path(light)


def test_one_fault_does_not_hide_another(light: str, tmp_path: Path) -> None:
    for text, expected in (
        ("{base: {nope: 1, lr: -1.0, policy: wrong}}", ("base.nope", "algorithm.lr", "parameter 'policy'")),
        ("{base: {policy: R9, lr: -1.0, steps: 0}}", ("parameter 'policy'", "algorithm.lr", "steps")),
        ("{base: {routes: nonsense, engine: vlm}}", ("parameter 'engine'",)),
        ("{base: {lr: .inf}}", ("base.lr: expected a finite float, found inf",)),
        ("{base: {lr: .nan}}", ("base.lr: expected a finite float, found nan",)),
        (f"{{base: {{lr: 1{'0' * 400}}}}}", ("base.lr: expected a finite float, found 1000",)),
    ):
        with pytest.raises(ConfigError) as caught:
            points_of(grid(text, tmp_path).model_copy(update={"notebook": light}))
        assert all(part in str(caught.value) for part in expected), str(caught.value)


def test_every_fault_at_once(light: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        points_of(
            grid(
                f"""
                notebook: {light}
                base: {{stepps: 3, lr: fast, out_dir: here}}
                arms: {{a: {{policy: off}}, b: {{budget: 0.5, steps: 2.5}}}}
                grid: {{budget: [0.1], group_size: [true]}}
                zip: [{{lr: [1e-4], steps: [1]}}]
                """,
                tmp_path,
            )
        )
    lines = str(caught.value).splitlines()
    for expected in (
        "base.stepps: the notebook has no such parameter; did you mean steps?",
        "base.lr: expected float, found 'fast' (str)",
        "base.out_dir: the sweep says where its points write",
        "arms.a.policy: expected str, found False (bool); YAML reads a bare on, off, yes or no so: write it in quotes",
        "arms.b.steps: expected int, found 2.5 (float)",
        "grid.group_size: expected int, found True (bool)",
        "grid.budget: also set by arms; one of them must go",
        "zip.0.steps: also set by arms; one of them must go",
    ):
        assert expected in lines
    assert len(lines) == 8


def test_values_that_the_run_would_refuse_are_refused_with_their_points(light: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        points_of(
            grid(
                f"""
                notebook: {light}
                arms: {{a: {{policy: R3, routes: margin}}, b: {{policy: R3, routes: nonsense}}}}
                grid: {{lr: [1e-4, -1.0]}}
                seeds: [0, 1]
                """,
                tmp_path,
            )
        )
    text = str(caught.value)
    assert (
        "algorithm.lr: Input should be greater than 0; found -1.0 (policy='R3', routes='margin', lr=-1.0, seed=0; "
        in text
    )
    assert "and 2 more points)" in text
    assert "margin" in text
    assert "budget" in text
    assert "nonsense" in text


def test_a_model_that_is_not_there_is_refused_before_any_kernel(light: str, tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "m.ipynb", PARAMETERS + 'model: str = "tiny-moe"\n', JOB)
    with pytest.raises(ConfigError, match="no-such-model"):
        points_of(Grid(notebook=str(notebook), base={"model": "no-such-model"}))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- 1", "expected a mapping, found list"),
        ("{seeds: []}", "seeds: List should have at least 1 item"),
        ("{seeds: [0.5]}", "seeds.0: Input should be a valid integer; found 0.5"),
        ("{sedes: [0]}", "sedes: no such field; allowed here: name, notebook, base, arms, grid, zip, seeds"),
        ("{grid: {lr: 1e-4}}", "grid.lr: Input should be a valid list; found 0.0001"),
        ("{base: {lr: 1e-4, lr: 2e-4}}", "lr: given twice"),
        ("{name: ../up}", "name: String should match pattern"),
        ("{base: [", "while parsing"),
        (
            "{zip: {lr: [1, 2], steps: [1]}, sedes: [0], base: {nope: 1}}",
            "in group 0, found others: lr has 2, steps has 1",
        ),
        (
            "{zip: {lr: [1, 2], steps: [1]}, sedes: [0], base: {nope: 1}}",
            "base.nope: the notebook has no such parameter",
        ),
        ("", "expected a mapping, found nothing"),
        ("{zip: {}}", "zip.0: Dictionary should have at least 1 item"),
        ("{zip: [{lr: []}]}", "zip.0.lr: List should have at least 1 item"),
    ],
)
def test_a_file_that_is_no_grid(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="grid file") as caught:
        grid(text, tmp_path)
    assert told in str(caught.value)


def test_a_file_without_a_name(tmp_path: Path) -> None:
    (tmp_path / "...yaml").write_text("{seeds: [0]}")
    with pytest.raises(ConfigError, match=r"expected a file name like night.yaml"):
        Grid.from_file(tmp_path / "...yaml")


@pytest.mark.parametrize("text", ["", "[]", '{"cells": 3}', '{"cells": [{}]}', '{"cells": [], "metadata": 3}'])
def test_a_file_that_is_no_notebook(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.ipynb").write_text(text)
    with pytest.raises(ConfigError, match=r"notebook .*x.ipynb: (cannot be read|expected one cell)"):
        points_of(Grid(notebook=str(tmp_path / "x.ipynb")))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Grid.from_file(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match=r"one of 01_quickstart, .*; found 'nope'"):
        points_of(Grid(notebook="nope"))


def test_numbers_and_names_of_a_grid(light: str, tmp_path: Path) -> None:
    found = grid("{base: {lr: 1e-4, a: 1E+3, b: 3, c: '1e-4', d: .5, e: 1.}}", tmp_path)
    assert found.base == {"lr": 1e-4, "a": 1000.0, "b": 3, "c": "1e-4", "d": 0.5, "e": 1.0}
    assert found.name == "night"
    assert grid("{name: other}", tmp_path).name == "other"
    assert Grid.from_file(write_grid(tmp_path / "w.yaml", seeds=[3])).seeds == [3]


def test_the_parameters_of_a_notebook(light: str, tmp_path: Path) -> None:
    found = Notebook.read(Path(light)).parameters()
    assert found["lr"] == ("float", 1e-4)
    assert found["engine"] == ("str", "hf")
    for cell, told in (
        ("steps = 3", "found steps = 3"),
        ("steps: int = f(3)", "found steps: int = f"),
        ("x: list = []", "found x"),
    ):
        broken = write_notebook(tmp_path / "broken.ipynb", cell)
        with pytest.raises(ConfigError, match=told):
            Notebook.read(broken).parameters()
    values = json.loads(Path(light).read_text())
    values["cells"][1]["metadata"] = {}
    (tmp_path / "none.ipynb").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="one cell tagged 'parameters', found 0"):
        Notebook.read(tmp_path / "none.ipynb").parameters()


def test_the_grid_that_ships_is_sound() -> None:
    found = points_of(Grid.from_file(NOTEBOOKS.parent / "data" / "grids" / "night.yaml"))
    assert len(found) == 20
    assert {(p.arm, p.label) for p in found} == {
        ("none", "none"), ("R2", "R2"), ("R3", "R3"), ("margin", "margin 0.25"), ("swap", "swap 0.05"),
    }  # fmt: skip


def test_every_shipped_notebook_has_parameters_that_a_grid_can_set() -> None:
    """The default is one point of 07_policies, and each other notebook with settings of a run is checked as one."""
    (point,) = points_of(Grid())
    assert point.label == "R3"
    for name in (
        "01_quickstart",
        "02_mismatch",
        "03_fisher_scores",
        "04_budget_frontier",
        "05_routing_shift",
        "06_route_doctor",
    ):
        assert len(points_of(Grid(notebook=name))) == 1
