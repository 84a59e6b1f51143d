"""The layers of the house: a lower layer never imports a higher one, and the light ones never import an engine.

An import counts wherever it stands: at the top of a module, inside a function, relative, or by a name handed to `import_module`.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
ROOT = REPO / "rar_lib"
MODULES = sorted(ROOT.rglob("*.py"))
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
HEAVY = {"vllm", "megatron", "transformers"}
OUTSIDE = {"tests", "benchmarks", "notebooks", "recipe", "routing_aware_replay"}
LAYERS = [  # low to high
    {"errors", "seeding", "progress", "child", "config", "config_keys"},
    {"traces", "metrics"},
    {"replay"},
    {"tasks", "checkpoint"},
    {"engines"},
    {"rl", "figures", "integrations"},
    {"measure", "planner", "prompts"},
    {"probe", "evaluate", "summary", "arms"},
    {
        "job",
        "runs",
        "stages",
        "frontier",
        "score_study",
        "diagnosis",
        "retrace",
        "gate_swap",
        "estimate",
        "reproduce",
        "scale_out",
        "export",
        "plan_export",
    },
    {"cli"},
    {"__main__"},
]
LIGHT = set().union(*LAYERS[: next(i for i, names in enumerate(LAYERS) if "replay" in names) + 1]) | {"figures"}
LONGEST = 400  # lines of a module; more need a reason
REASON = "\nOne file: "


def name_of(path: Path) -> str:
    """Dotted name of a module of rar_lib."""
    return ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def layer(package: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if package in names)


def imports(source: str, package: str = "") -> set[str]:
    """Dotted names of everything that a source imports; `package` is what its relative imports start from."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            (name, *_) = node.args
            assert isinstance(name, ast.Constant), f"line {node.lineno}: imports what only a run can tell"
            found.add(str(name.value))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "rar_lib" and node.attr[0] != "_":
            found.add(f"rar_lib.{node.attr}")
    return found


def imports_of(path: Path) -> set[str]:
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    return imports(path.read_text(), package)


def ours(names: set[str]) -> set[str]:
    """The packages and top-level modules of rar_lib among dotted names."""
    return {name.split(".")[1] for name in names if name.startswith("rar_lib.")}


def heavy(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names} & HEAVY


def test_every_package_has_its_layer() -> None:
    """A new one, or one that is gone, is put into LAYERS or taken out."""
    listed = sorted(name for names in LAYERS for name in names)
    assert listed == sorted({package_of(path) for path in MODULES} - {"__init__"})


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_its_own_layer_or_a_lower_one(path: Path) -> None:
    package, names = package_of(path), imports_of(path)
    if package == "__init__":
        assert ours(names) == set(), "importing rar_lib must cost nothing"
        return
    assert {name for name in ours(names) if layer(name) > layer(package)} == set()
    assert {name.split(".")[0] for name in names} & OUTSIDE == set()


@pytest.mark.parametrize("path", [path for path in MODULES if package_of(path) in LIGHT], ids=name_of)
def test_a_light_module_names_no_engine(path: Path) -> None:
    """Not even inside a function: whoever has a dump and no engine may call all of it."""
    assert heavy(imports_of(path)) == set()
    assert ours(imports_of(path)) <= LIGHT


def test_light_modules_import_no_engine() -> None:
    """Nor do the packages that they import."""
    light = [name_of(path) for path in MODULES if package_of(path) in LIGHT]
    light += ["rar_lib", "rar_lib.diagnosis", "rar_lib.retrace", "rar_lib.plan_export"]
    code = f"import sys, {', '.join(light)}; print({HEAVY!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("import rar_lib.job", {"job"}),
        ("from rar_lib import job", {"job"}),
        ("def f():\n    from rar_lib.job import run_job", {"job"}),
        ("from . import trace", {"traces"}),
        ("from ..job import run_job", {"job"}),
        ("from .. import job", {"job"}),
        ("import importlib\nimportlib.import_module('rar_lib.job')", {"job"}),
        ("__import__('rar_lib.job')", {"job"}),
        ("import rar_lib\nrar_lib.job.run_job()", {"job"}),
        ("import rar_lib\nrar_lib.__version__", set()),
    ],
)
def test_an_import_is_seen_wherever_it_stands(source: str, seen: set[str]) -> None:
    assert ours(imports(source, "rar_lib.traces")) == seen


def test_an_engine_is_seen_wherever_it_is_imported() -> None:
    assert heavy(imports("def f():\n    from transformers import AutoConfig")) == {"transformers"}
    with pytest.raises(AssertionError, match="only a run can tell"):
        imports("import_module(name)")


# ---------------------------------------------------------------- notebooks


def is_module(name: str) -> bool:
    path = REPO.joinpath(*name.split("."))
    return (path / "__init__.py").is_file() or path.with_suffix(".py").is_file()


@cache
def names_in(module: str) -> frozenset[str]:
    """What a module of rar_lib defines at its top; of a package also what it gathers there, and its submodules."""
    path = REPO.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = {p.stem for p in path.glob("*")}
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Assign():
                found |= {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            case ast.AnnAssign(target=ast.Name() as target):
                found.add(target.id)
            case ast.Import() | ast.ImportFrom() if path.is_dir():
                found |= {alias.asname or alias.name for alias in node.names}
    return frozenset(found)


def breaches(source: str) -> Iterator[str]:
    """What a notebook must not do: import anything but the standard library, IPython and rar_lib, or reach behind rar_lib's public names."""
    modules: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {a.name}" for a in node.names if a.name.split(".")[0] not in sys.stdlib_module_names)
        elif isinstance(node, ast.ImportFrom):
            top = (node.module or "").split(".")[0]
            if node.level or top not in {*sys.stdlib_module_names, "IPython", "rar_lib"}:
                yield ast.unparse(node)
            for alias in node.names if top == "rar_lib" else ():
                if not is_module(str(node.module)):
                    yield f"there is no {node.module}"
                elif alias.name.startswith("_") or alias.name not in names_in(str(node.module)):
                    yield f"{node.module} has no public {alias.name}"
                elif is_module(module := f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = module
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            if node.attr.startswith("_"):
                yield f"{ast.unparse(node)} is not public"
            module = modules.get(ast.unparse(node.value))
            if module is not None and node.attr not in names_in(module):
                yield f"{module} has no {node.attr}"


def code_of(notebook: Path) -> str:
    cells = json.loads(notebook.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.name)
def test_a_notebook_calls_only_what_is_public(notebook: Path) -> None:
    assert list(breaches(code_of(notebook))) == []


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import torch", "import torch"),
        ("from rar_lib.nothing import x", "there is no rar_lib.nothing"),
        ("from transformers import AutoModel", "from transformers import AutoModel"),
        ("from rar_lib.config import _Part", "rar_lib.config has no public _Part"),
        ("from rar_lib.runs.report import read_comparison", "rar_lib.runs.report has no public read_comparison"),
        ("from rar_lib.runs import report\nreport.read_comparison()", "rar_lib.runs.report has no read_comparison"),
        ("from rar_lib.runs.report import Study", "rar_lib.runs.report has no public Study"),
        ("from rar_lib import figures\nfigures.nothing()", "rar_lib.figures has no nothing"),
        ("from rar_lib.runs import compare\ncompare._number(1)", "compare._number is not public"),
    ],
)
def test_a_breach_of_a_notebook_is_seen(source: str, told: str) -> None:
    assert list(breaches(source)) == [told]


# ---------------------------------------------------------------- length


def overlong(source: str) -> int:
    """Lines of a module that has more than LONGEST and no reason for it; else 0."""
    lines = len(source.splitlines())
    return lines if lines > LONGEST and REASON not in (ast.get_docstring(ast.parse(source)) or "") else 0


PACKAGES = [*MODULES, *sorted((REPO / "benchmarks").rglob("*.py")), *sorted((REPO / "recipe").rglob("*.py"))]


@pytest.mark.parametrize("path", PACKAGES, ids=lambda p: str(p.relative_to(REPO)))
def test_a_long_module_says_why_it_is_one(path: Path) -> None:
    lines = overlong(path.read_text())
    assert not lines, (
        f"{path.relative_to(REPO)}: {lines} lines; above {LONGEST}, expected a paragraph `One file: <reason>` in its opening"
    )


def test_a_long_module_without_a_reason_is_seen() -> None:
    body = "x = 1\n" * LONGEST
    assert overlong(f'"""Numbers."""\n{body}') == LONGEST + 1
    assert overlong(f'"""Numbers.\n\nOne file: a list.\n"""\n{body}') == 0
    assert overlong(body) == 0
