"""A notebook as a sweep sees it: the parameters that it takes, with their types, and a digest of what it computes.

Its outputs, its texts and the values of its parameters are no part of that: the notebook of yesterday with another sentence in it still
computes the same, so its finished points stand.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rar_lib.checkpoint import DATA_DIR
from rar_lib.errors import ConfigError

NOTEBOOKS = DATA_DIR.parent / "notebooks"


def find_notebook(name: str) -> Path:
    """A notebook given by path, or by the name of one that ships.

    Raises:
        ConfigError: names those that ship.
    """
    for path in (Path(name), NOTEBOOKS / f"{name}.ipynb"):
        if path.suffix == ".ipynb" and path.is_file():
            return path.resolve()
    shipped = ", ".join(sorted(p.stem for p in NOTEBOOKS.glob("*.ipynb")))
    raise ConfigError(f"notebook: expected a file, or one of {shipped}; found {name!r}")


@dataclass(frozen=True)
class Notebook:
    """A notebook as it was read, once."""

    path: Path
    source: str
    cells: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Notebook:
        """Read, and take the outputs away.

        Raises:
            ConfigError: for a file that is no notebook.
        """
        try:
            tree = json.loads(path.read_text())
            for cell in tree["cells"]:
                cell["source"] = "".join(cell["source"])
                tags = cell.setdefault("metadata", {}).get("tags", [])
                cell["tagged"] = cell["cell_type"] == "code" and "parameters" in tags
                if cell["cell_type"] == "code":
                    cell |= {"outputs": [], "execution_count": None}
            code = [cell for cell in tree["cells"] if cell["cell_type"] == "code"]
            tree["metadata"].pop("widgets", None)
            bare = [{k: v for k, v in cell.items() if k != "tagged"} for cell in tree["cells"]]
            return cls(path, json.dumps({**tree, "cells": bare}), code)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"notebook {path}: cannot be read: {type(error).__name__}: {error}") from None

    def parameters(self) -> dict[str, tuple[str, Any]]:
        """name -> (type, default) of the parameters cell: `name: type = value`, as papermill reads it.

        Raises:
            ConfigError: if there is no such cell, or a line of it is something else.
        """
        cells = [cell for cell in self.cells if cell["tagged"]]
        if len(cells) != 1:
            raise ConfigError(f"notebook {self.path}: expected one cell tagged 'parameters', found {len(cells)}")
        found = {}
        for line in cells[0]["source"].splitlines():
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            match = re.fullmatch(r"(\w+): (str|int|float|bool) = (.+)", line)
            try:
                if match is None:
                    raise ValueError
                found[match[1]] = (match[2], ast.literal_eval(match[3]))
            except (ValueError, SyntaxError):
                raise ConfigError(
                    f"notebook {self.path}: parameters: expected `name: type = value` with str, int, float or bool, found {line}"
                ) from None
        return found

    def digest(self) -> str:
        """Of the code but for the parameters, whose values count by themselves. Texts and outputs do not count."""
        code = [cell["source"] for cell in self.cells if not cell["tagged"]]
        return hashlib.sha256(json.dumps(code).encode()).hexdigest()
