"""The layers of the house: a lower layer never imports a higher one, and the light ones never import an engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "rar_lib"
HEAVY = {"vllm", "megatron", "transformers"}
LAYERS = [
    {"errors", "seeding", "config", "config_keys", "traces", "metrics", "progress", "child"},
    {"replay", "tasks", "checkpoint"},
    {"engines", "rl", "figures", "integrations"},
    {
        "measure",
        "probe",
        "evaluate",
        "planner",
        "prompts",
        "summary",
        "job",
        "runs",
        "arms",
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
    {"cli", "__main__"},
]


def layer(package: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if package in names)


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_its_own_layer_or_a_lower_one(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if package == "__init__":
        return
    used = {name.split(".")[1] for name in imports(ast.parse(path.read_text())) if name.startswith("rar_lib.")}
    above = {name for name in used if layer(name) > layer(package)}
    assert above == set()


@pytest.mark.parametrize(
    "modules",
    [
        "rar_lib",
        "rar_lib.traces, rar_lib.metrics.mismatch, rar_lib.metrics.agreement, rar_lib.replay, rar_lib.figures",
        "rar_lib.diagnosis, rar_lib.traces.wire, rar_lib.retrace, rar_lib.metrics.aliases",
    ],
)
def test_light_modules_import_no_engine(modules: str) -> None:
    code = f"import sys, {modules}; print({HEAVY!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
