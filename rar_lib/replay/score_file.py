"""A stored ExpertScore: a safetensors file of `values` and `count`, each `[L, E]`, that says how and over what it was made.

A score made here ranks experts elsewhere, so the file names the transformer layers of its rows: two models of equal shape
whose MoE layers differ cannot be mistaken for each other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rar_lib.errors import ConfigError
from rar_lib.replay.scores import ExpertScore
from rar_lib.replay.stability import Stability
from rar_lib.replay.stored import read_stored, write_stored

_KEY = "rar_score"


@dataclass(frozen=True, eq=False)
class StoredScore:
    """A score and the layers that it speaks of.

    Attributes:
        score: `[L, E]`.
        moe_layers: transformer layer number (from 0) of each row.
    """

    score: ExpertScore
    moe_layers: tuple[int, ...]


def save_score(score: ExpertScore, moe_layers: tuple[int, ...], path: str | Path) -> Path:
    """Write a score.

    Args:
        score: of every cell.
        moe_layers: transformer layer numbers (from 0), as in the header of the trace that it was made on.
        path: a .safetensors file; one that is there is replaced.

    Raises:
        ConfigError: if the layers are not one a row.
    """
    path = Path(path)
    _require(score, moe_layers, path)
    facts = {name: getattr(score, name) for name in ("estimator", "aggregation", "labels", "tokens")}
    facts |= {
        "moe_layers": list(moe_layers),
        "stability": None if score.stability is None else asdict(score.stability),
    }
    arrays = {"values": np.asarray(score.values, np.float64), "count": np.asarray(score.count, np.float64)}
    return write_stored(path, _KEY, facts, arrays)


def load_score(path: str | Path) -> StoredScore:
    """Read a score.

    Raises:
        ConfigError: for a file that is not there, or holds something else, or values that no score has.
    """
    path = Path(path)
    facts, arrays = read_stored(path, _KEY, "a file of expert scores", ConfigError)
    if not isinstance(facts, dict) or set(arrays) != {"values", "count"}:
        raise ConfigError(f"{path}: expected expert scores (values and count), found {sorted(arrays)}")
    layers, stability = tuple(facts.pop("moe_layers")), facts.pop("stability")
    score = ExpertScore(
        arrays["values"], arrays["count"], **facts, stability=None if stability is None else Stability(**stability)
    )
    _require(score, layers, path)
    return StoredScore(score, layers)


def _require(score: ExpertScore, layers: tuple[int, ...], path: Path) -> None:
    shape = score.values.shape
    if len(shape) != 2 or score.count.shape != shape or len(layers) != shape[0]:
        raise ConfigError(
            f"{path}: expected values and count of shape [layers, experts], found {shape} and {score.count.shape} for "
            f"layers {list(layers)}"
        )
    bad = score.first_bad()
    if bad is not None:
        row, expert = bad
        raise ConfigError(
            f"{path}: expected scores of 0 or more (-inf: unscored), found {score.values[row, expert]} at layer "
            f"{layers[row]}, expert {expert}"
        )
