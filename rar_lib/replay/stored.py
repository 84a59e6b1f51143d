"""Small things that are kept in a safetensors file: arrays, and facts about them as JSON in the metadata. Nothing is executed on reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rar_lib.errors import RarError


def write_stored(path: Path, key: str, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Path:
    """Write beside and rename; what is there is replaced.

    Args:
        path: of the file.
        key: names the facts in the metadata.
        facts: values that JSON can hold.
        arrays: by name, each of any shape.
    """
    partial = path.with_name(path.name + ".partial")
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, partial,
              metadata={key: json.dumps(facts, sort_keys=True)})  # fmt: skip
    partial.replace(path)
    return path


def read_stored(path: Path, key: str, what: str, error: type[RarError]) -> tuple[Any, dict[str, np.ndarray]]:
    """The facts, None where the file has none under this key, and the arrays by name, each of any shape.

    Args:
        path: of the file.
        key: of the facts.
        what: is expected there, for messages.
        error: what to raise for a file that is not there or no safetensors.

    Raises:
        RarError: of the kind that was asked for.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            facts = json.loads((file.metadata() or {}).get(key, "null"))
            return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise error(f"{path}: expected {what}, found nothing there") from None
    except (SafetensorError, OSError, ValueError) as fault:
        raise error(f"{path}: expected a safetensors file, found: {fault}") from None
