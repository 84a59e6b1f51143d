"""What a docstring owes its reader: that it is there, the shapes of arrays, and the errors that the body raises.

Read from the source, so no module is imported. That a shape is named can be checked here; that it is the right one
cannot. Errors that all methods of a class raise may be named once, by the class.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rar_lib import errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rar_lib", "recipe/routing_aware_replay/routing_aware_replay")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ERRORS = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
ARRAYS = {"ndarray", "Tensor", "Array"}
COMMANDS = {"cli.py"}  # a command's docstring is its help; its errors are messages and an exit status
# `[S, T]`, `[..., E]` or `routed_experts [T - 1, L, K]`, but neither `choices[0].text` nor `list[int]`
SHAPE = re.compile(r"`[^`\n]*(?<![\w\])])\[[\w .,*+/()-]+\][^`\n]*`|\bscalars?\b|\b[Aa]ny shape\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """A public module, class, function or method, and what its docstring owes."""

    module: str
    name: str
    node: ast.Module | ast.ClassDef | Function
    inside: ast.ClassDef | None = None

    def missing(self) -> Iterator[str]:
        """What the docstring owes and does not give."""
        text = ast.get_docstring(self.node)
        if not text:
            yield "a docstring"
            return
        if passes_arrays(self.node) and not SHAPE.search(text):
            yield "a shape, as `[S, T]` in backticks, or the words scalar or any shape"
        if self.module in COMMANDS:
            return
        around = "" if self.inside is None else ast.get_docstring(self.inside) or ""
        for error in sorted(raised_by(self.node)):
            # a kind of error is named by its base too: TraceError covers UndecidedError
            names = [base.__name__ for base in ERRORS[error].__mro__ if base.__name__ in ERRORS]
            if not any(re.search(rf"\b{name}\b", text + around) for name in names):
                yield f"the error {error}, which its body raises"


def definitions(tree: ast.Module, module: str) -> Iterator[Definition]:
    """The module, its public classes and functions, and their public methods; a setter says what its getter says."""
    yield Definition(module, module, tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            yield Definition(module, node.name, node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                if isinstance(member, Function) and not member.name.startswith("_") and not is_setter(member):
                    yield Definition(module, f"{node.name}.{member.name}", member, node)


def is_setter(node: Function) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "setter" for one in node.decorator_list)


def names_in(node: ast.AST | None) -> set[str]:
    """Last parts of the names in an expression: np.ndarray is ndarray."""
    found = set()
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
    return found


def passes_arrays(node: ast.Module | ast.ClassDef | Function) -> bool:
    """True where an argument, a result or a public field is annotated as an array, or as a container of arrays."""
    if isinstance(node, Function):
        given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg)
        annotations = [*(one.annotation for one in given if one is not None), node.returns]
    elif isinstance(node, ast.ClassDef):
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        annotations = [one.annotation for one in fields if not getattr(one.target, "id", "_").startswith("_")]
    else:
        annotations = []
    return any(names_in(one) & ARRAYS for one in annotations)


def raised_by(node: ast.Module | ast.ClassDef | Function) -> set[str]:
    """The library's errors that a body raises by name, not in functions inside it. Of a class: those of making one."""
    if isinstance(node, ast.Module):
        return set()
    if isinstance(node, ast.ClassDef):
        makers = [m for m in node.body if isinstance(m, Function) and m.name in ("__init__", "__post_init__")]
        return {error for maker in makers for error in raised_by(maker)}
    found, left = set(), list[ast.AST](node.body)
    while left:
        part = left.pop()
        if isinstance(part, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(part, ast.Raise):
            found |= names_in(part.exc.func if isinstance(part.exc, ast.Call) else part.exc) & ERRORS.keys()
        left += ast.iter_child_nodes(part)
    return found


def owed(source: str, module: str = "module") -> dict[str, list[str]]:
    """Of a module's source: what each docstring misses, by the name of the definition."""
    found = {one.name: list(one.missing()) for one in definitions(ast.parse(source), module)}
    return {name: missing for name, missing in found.items() if missing}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_docstrings_give_shapes_and_errors(path: Path) -> None:
    found = [
        f"{one.name}: expected {what}"
        for one in definitions(ast.parse(path.read_text()), path.name)
        for what in one.missing()
    ]
    assert found == []


def test_what_is_missing_is_found() -> None:
    source = '''"""Module."""
class Pair:
    """Two arrays."""
    left: np.ndarray
    def __post_init__(self):
        raise TraceError("no pair")
    def bare(self): ...
    @property
    def shape(self) -> tuple[int, ...]:
        """Of the left one, `[S, T]`."""
    def _own(self, x: np.ndarray): ...
def flat(x: dict[str, torch.Tensor] | None):
    """Flatten, not `choices[0].text`, nor `list[int]`."""
def _hidden(x: Array): ...
async def read(path):
    """Read."""
    def inner():
        raise RunError("elsewhere")
    try:
        raise UndecidedError(path) from None
    except error as fault:
        raise fault
'''
    expected = {"Pair": 2, "Pair.bare": 1, "flat": 1, "read": 1}
    assert {name: len(missing) for name, missing in owed(source).items()} == expected
    assert owed("x = 1") == {"module": ["a docstring"]}


@pytest.mark.parametrize(
    "words", ["of `[S, T]`", "`x [T - 1, L, K]`", "`[..., E]` float32", "a scalar", "of any shape"]
)
def test_shapes_are_recognised(words: str) -> None:
    assert owed(f'"""M."""\ndef f(x: Array):\n    """{words}"""') == {}


@pytest.mark.parametrize("name", ["UndecidedError", "TraceError", "RarError"])
def test_an_error_is_named_by_itself_or_by_its_base(name: str) -> None:
    assert owed(f'"""M."""\ndef f():\n    """Raises {name}."""\n    raise UndecidedError("x")') == {}
    assert "f" in owed('"""M."""\ndef f():\n    """Raises RunError."""\n    raise UndecidedError("x")')


def test_a_command_is_its_help() -> None:
    source = '"""M."""\ndef f():\n    """Do it."""\n    raise RunError("x")'
    assert owed(source, "cli.py") == {}
    assert "f" in owed(source)
