"""CONTRIBUTING, CHANGELOG and LOG: what they quote is there, recipes are short and hold, and numbers stand where it is said.

Names are looked up in the source, so nothing is imported for it. A span in backticks that looks like a path or a dotted name of
this repository must be one; a bare name in a recipe must occur in a file that its line quotes.
"""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import rar_lib
from rar_lib.cli import COMMANDS
from rar_lib.config import JobConfig
from rar_lib.engines import trainers
from rar_lib.engines.session import EngineSession
from rar_lib.errors import ConfigError
from rar_lib.figures.style import POLICY_STYLE, described, house_style, new_figure, save_figure
from rar_lib.frontier import FrontierConfig
from rar_lib.planner import Planner
from rar_lib.replay import policies
from rar_lib.replay.policy import Candidates, spread
from rar_lib.runs import compare, figure_set
from rar_lib.runs.result import RunResult
from rar_lib.traces import wire
from rar_lib.traces.wire.content import Content, Reader
from rar_lib.traces.wire.dump import Dump, Sample, integers, routes
from tests.replay.families import FAMILIES
from tests.traces.writers import jsonl, make_batch

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ("CONTRIBUTING.md", "CHANGELOG.md", "LOG.md", "README.md")
RECIPES = ("policy", "reader", "metric", "figure", "engine")
LINES, LENGTH = 10, 260
VERDICTS = (
    "worse", "no difference shown", "does not hold", "holds only in part", "cannot be told", "settles nothing",
    "has nothing to do", "does not work", "wrong", "refused",
)  # fmt: skip
TOPS = {path.name for path in ROOT.iterdir()} - {".venv"}


def sections(paper: str) -> dict[str, str]:
    """Text below each heading of the second level."""
    parts = re.split(r"^## (.+)$", (ROOT / paper).read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def quoted(text: str) -> list[str]:
    """Words of all spans in backticks, and targets of links; code blocks are left out."""
    bare = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    words = [word for span in re.findall(r"`([^`\n]+)`", bare) for word in span.split()]
    return [*words, *(link for link in re.findall(r"\]\(([^)#\s]+)\)", bare) if "://" not in link)]


def is_path(word: str) -> bool:
    """A path below the repository, not a placeholder such as FOLDER/FILE or runs/<name>."""
    return word in TOPS or ("/" in word and word.split("/")[0] in TOPS and "<" not in word)


@cache
def names_of(path: Path) -> dict[str, set[str]]:
    """Names that a module defines at its top, with those of its classes."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            inside = node.body if isinstance(node, ast.ClassDef) else []
            found[node.name] = {n.name for n in inside if isinstance(n, ast.FunctionDef)} | {
                n.target.id for n in inside if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            }
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {t.id: set() for t in targets if isinstance(t, ast.Name)}
    return found


def module_of(dotted: str) -> tuple[Path, list[str]] | None:
    """The file of a dotted name and what is left of the name behind it; None if there is none."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        for path in (ROOT.joinpath(*parts[:n]).with_suffix(".py"), ROOT.joinpath(*parts[:n], "__init__.py")):
            if path.is_file():
                return path, parts[n:]
    return None


def dotted_is_there(dotted: str) -> bool:
    """Whether a module, a name at its top, or an attribute of a class exists."""
    found = module_of(dotted)
    if found is None:
        return False
    path, rest = found
    top = names_of(path)
    return not rest or (rest[0] in top and (len(rest) == 1 or (len(rest) == 2 and rest[1] in top[rest[0]])))


def is_dotted(word: str) -> bool:
    """A dotted name of this repository's packages, not a placeholder such as benchmarks.NAME."""
    return "NAME" not in word.split(".") and re.fullmatch(r"(rar_lib|tests|benchmarks)(\.\w+)+", word) is not None


def faults(text: str) -> list[str]:
    """Quoted paths and dotted names that are not there, and make targets and commands that do not exist."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    found = []
    for word in quoted(text):
        word = word.rstrip(",.:;")
        name = word.split("(")[0]
        if is_dotted(name):
            found += [] if dotted_is_there(name) else [name]
        elif is_path(word):
            there = any(ROOT.glob(word)) if "*" in word else (ROOT / word).exists()
            found += [] if there else [word]
    found += [f"make {t}" for t in re.findall(r"`make (\w+)", text) if t not in targets]
    return found + [f"rar {c}" for c in re.findall(r"`rar (\w+)", text) if c not in COMMANDS]


@pytest.mark.parametrize("paper", PAPERS)
def test_what_a_paper_quotes_is_there(paper: str) -> None:
    text = (ROOT / paper).read_text()
    assert faults(text) == []
    assert paper == "CHANGELOG.md" or len([w for w in quoted(text) if is_path(w) or is_dotted(w)]) > 20


def test_a_quote_of_nothing_is_found() -> None:
    """A check must be able to fail."""
    text = "`rar_lib/nothing.py` `rar_lib.replay.policies.NOTHING` `rar_lib.nothing` `make nothing` `rar nothing` [x](data/nothing) `tests/*/nothing*`"
    assert len(faults(text)) == 7
    good = (
        "`rar_lib/cli.py` `rar_lib.replay.policy.Policy` `rar_lib.replay.policy.Policy.units` `make test` `FOLDER/FILE`"
    )
    assert faults(good) == []


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_is_short_and_its_names_stand_in_the_files_that_it_quotes(kind: str) -> None:
    article = "an" if kind[0] in "aeiou" else "a"
    lines = [line for line in sections("CONTRIBUTING.md")[f"Add {article} {kind}"].splitlines() if line.strip()]
    assert 1 <= len(lines) <= LINES
    for number, line in enumerate(lines, 1):
        assert line.startswith(f"{number}. ")
        assert len(line) <= LENGTH
        words = quoted(line)
        files = [ROOT / w for w in words if is_path(w) and (ROOT / w).is_file()]
        files += [found[0] for w in words if is_dotted(w.split("(")[0]) and (found := module_of(w.split("(")[0]))]
        text = "\n".join(path.read_text() for path in files)
        commands = any(w.split(".")[0] in ("python", "rar") for w in words)
        bare = [w for w in words if re.fullmatch(r"[A-Za-z_]+", w) and not commands]
        assert [w for w in bare if not re.search(rf"\b{w}\b", text) and w not in ("READERS",)] == [], line


# ------------------------------------------------------------------ the changelog


NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen",
           "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty")  # fmt: skip


def test_the_changelog_is_short_and_says_what_there_is() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text.splitlines()) <= 80
    assert f"\n## [{rar_lib.__version__}] - " in text
    everything = " ".join(text.lower().split())
    assert f"{len(wire.READERS) - 1} formats" in everything  # `tokens` is this library's own
    for number, what in (
        (len(policies.POLICIES), ": full"),
        (len(FAMILIES), " families are tested"),
        (len(list((ROOT / "notebooks").glob("*.ipynb"))), " notebooks"),
    ):
        assert NUMBERS[number] + what in everything
    for command in COMMANDS:
        assert f"rar {command}" in everything or command == "demo"


# ------------------------------------------------------------------ the log


ENTRIES = list(sections("LOG.md").items())
TRIPLE = re.compile(r"(-?\d[\d.]*(?:e-?\d+)?) \[(-?[\d.]+), (-?[\d.]+)\]")


@pytest.mark.parametrize(("heading", "text"), ENTRIES, ids=[heading for heading, _ in ENTRIES])
def test_an_entry_of_the_log_has_a_verdict_and_its_intervals_stand_in_its_sources(heading: str, text: str) -> None:
    topic, _, verdict = heading.rpartition(": ")
    assert topic
    assert any(word in verdict for word in VERDICTS)
    body, named, sources = text.rpartition("\nSource")
    assert named
    found = [ROOT / word.rstrip(".,") for word in quoted(sources) if is_path(word.rstrip(".,"))]
    assert found or any(is_dotted(word.rstrip(".,")) for word in quoted(sources))
    for quote in TRIPLE.findall(body):
        assert any(stands_in(quote, path) for path in found if path.is_file()), quote


def stands_in(quote: tuple[str, str, str], path: Path) -> bool:
    """Whether a number with its interval stands in a file: as text, or as a row or mapping that rounds to it."""
    if path.suffix in (".csv", ".json") and any(rounds_to(row, quote) for row in rows_of(path)):
        return True
    value, low, high = quote
    return f"{value} [{low}, {high}]" in text_of(path)


def rounds_to(row: tuple[list[float], float, float], quote: tuple[str, str, str]) -> bool:
    """Whether low and high, and one of the values beside them, are the quoted ones at the digits that are quoted."""
    values, *ends = row

    def equal(value: float, text: str) -> bool:
        return abs(value - float(text)) <= 0.5000001 * 10.0 ** -len(text.partition(".")[2])

    return all(map(equal, ends, quote[1:])) and any(equal(value, quote[0]) for value in values)


@cache
def rows_of(path: Path) -> list[tuple[list[float], float, float]]:
    """Numbers of everything in a CSV or JSON file that has an interval, and the interval."""
    if path.suffix == ".csv":
        table = pd.read_csv(path)
        if not {"low", "high"} <= set(table):
            return []
        numbers = table.select_dtypes("number").drop(columns=["low", "high"])
        return [
            (row, low, high)
            for row, low, high in zip(numbers.to_numpy(float).tolist(), table["low"], table["high"], strict=True)
        ]
    found = []
    left: list[Any] = [json.loads(path.read_text())]
    while left:
        here = left.pop()
        left += here.values() if isinstance(here, dict) else here if isinstance(here, list) else []
        if isinstance(here, dict):
            ends = here.get("interval") or here.get("quartiles") or [here.get("low"), here.get("high")]
            if isinstance(ends, list) and None not in ends:
                found.append(([v for v in here.values() if isinstance(v, float)], *map(float, ends)))
    return found


@cache
def text_of(path: Path) -> str:
    """The text of a file; of a notebook what its outputs say, with blanks as single ones."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return " ".join("".join(output.get("data", {}).get("text/plain", [])) for output in outputs)


def test_a_number_that_stands_nowhere_is_found() -> None:
    """A check must be able to fail."""
    path = ROOT / "figures" / "remedies_differences.csv"
    assert stands_in(("0.0014", "-0.0031", "0.0059"), path)
    assert not stands_in(("0.0014", "-0.0031", "0.0060"), path)
    assert not stands_in(("0.0024", "-0.0031", "0.0059"), path)
    assert stands_in(("0.412", "0.338", "0.503"), ROOT / "data" / "studies" / "claims.csv")


# ------------------------------------------------------------------ the recipes, followed


@pytest.fixture(scope="module")
def run() -> RunResult:
    return RunResult.read(next((ROOT / "data" / "reference").glob("R3-*")))


def test_a_new_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class that stands in the opening of policies.py, taken from there."""
    opening = policies.__doc__ or ""
    code = "\n".join(line[4:] for line in opening.split("POLICIES:\n\n")[1].split("\n\n")[0].splitlines())
    scope: dict[str, Any] = {"np": np, "spread": spread, "Candidates": Candidates, "Unit": str}
    exec(code, scope)
    with pytest.raises(ConfigError, match="expected one of full, uniform"):
        policies.get_policy("early")
    monkeypatch.setitem(policies.POLICIES, "early", scope["Early"])
    trace = make_batch(8, 2, 3, (0, 1, 2), [(2, 3), (1, 2)]).trace()
    plan = policies.make_plan("early", Candidates(trace, ["a", "b"], 0), "token_layer", "1/2")
    assert plan.planned.sum() == plan.budget == 9  # half of 4 + 2 tokens in three layers
    assert plan.planned[0].all()
    assert plan.planned[5].all()
    assert not plan.planned[3:5].any()
    job = JobConfig.from_flat(policy="R3", routes="early", budget="0.5", engine="hf")
    assert not Planner(job.router_replay).looks
    assert "early 0.5 token_layer" in [
        arm.name for arm in FrontierConfig(job=job, policies=("early",), budgets=("0.5",)).arms()
    ]
    with pytest.raises(ConfigError, match=r"random_route, .*early"):
        policies.get_policy("late")


def test_a_new_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def claims(content: Content) -> str | None:
        return (
            "mine on every line" if content.kind == "jsonl" and all("mine" in r for _, r in content.records) else None
        )

    def read(content: Content) -> Dump:
        samples = []
        for where, record in content.records:
            ids = integers(f"{where}: mine", record["mine"]).astype(np.int64)
            samples.append(Sample(where, len(ids), routes(f"{where}: routes", record["routes"]), token_ids=ids))
        return Dump("mine", "nested lists, all layers", str(content.path), tuple(samples), "all")

    monkeypatch.setitem(wire.READERS, "mine", Reader("mine", "mine, JSON lines", claims, read))
    batch = make_batch(8, 2, 4, (1, 3), [(3, 4), (1, 2)])
    lines = [{"mine": item.ids, "routes": batch.all_layers(item).tolist()} for item in batch.items]
    trace = wire.read_trace(jsonl(tmp_path / "mine.jsonl", lines), model=batch.model)
    assert trace.header.producer == "mine"
    assert np.array_equal(trace.ids(), batch.trace().ids())


def test_a_new_metric(monkeypatch: pytest.MonkeyPatch, run: RunResult) -> None:
    table = run.metrics.assign(**{"mismatch/rollout_old/mine": 0.25})
    monkeypatch.setitem(compare.REPLAY_SHOWN, "mismatch/rollout_old/mine", ("mine", ".2f"))
    shown = compare.depth_of_run_table(SimpleNamespace(metrics=table))  # type: ignore[arg-type]
    assert shown.iloc[-1].tolist() == ["mine", "0.25", "0.25", "0.25"]


def test_a_new_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: RunResult) -> None:
    def mine(table: pd.DataFrame) -> Any:
        with house_style():
            figure, axes = new_figure()
            axes.plot(table["step"], table["value"], color=POLICY_STYLE["R3"][0])
        return described(figure, f"Mine by step; at the last {table['value'].iloc[-1]:.3g}.")

    def of_runs(runs: list[RunResult], size: dict[str, Any]) -> Any:
        table = runs[0].metrics[["step", "reward/mean"]].set_axis(["step", "value"], axis=1)
        return {"mine": lambda: (mine(table), table)}

    monkeypatch.setattr(figure_set, "_of_runs", of_runs)
    ((name, drawn),) = figure_set.figure_set(figure_set.Sources(runs=[run]))
    assert not isinstance(drawn, str)
    files = save_figure(drawn[0], tmp_path / name, drawn[1])
    assert [path.name for path in files] == ["mine.png", "mine.svg", "mine.csv"]
    assert "Mine by step; at the last" in files[1].read_text()


def test_a_new_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(name="mine")
    monkeypatch.setitem(trainers.TRAINERS, "hf", lambda path, config, algorithm: made)
    assert EngineSession().trainer(JobConfig.from_flat(engine="hf"), Path()) is made  # type: ignore[comparison-overlap]
