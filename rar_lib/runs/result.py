"""A complete run, as its folder holds it. Reading one needs no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rar_lib.errors import RunError
from rar_lib.replay.diagnostics import ReplayDiagnostics, from_lines
from rar_lib.runs.files import read_table
from rar_lib.runs.store import require_schema

NEEDED = ("arm", "policy", "budget", "seed", "corrections", "objective", "anchor", "router", "gates", "computes_alike", "precision",
          "collapsed_at", "diverged")  # fmt: skip


@dataclass(frozen=True)
class RunResult:
    """A complete run, as its folder holds it."""

    path: Path
    summary: dict[str, Any]
    metrics: pd.DataFrame
    paired: pd.DataFrame
    replay: list[ReplayDiagnostics]
    config: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> RunResult:
        """Read a complete run folder.

        Raises:
            RunError: if the folder holds no complete run.
            ReplayError: for a replay record that the schema refuses.
        """
        try:
            summary = json.loads((path / "summary.json").read_text())
            config = json.loads((path / "config.json").read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise RunError(
                f"run folder {path}: expected a complete run, whose summary.json and config.json can be read: {error}"
            ) from None
        require_schema(path, config)
        missing = [name for name in NEEDED if name not in summary]
        if missing:
            raise RunError(
                f"run folder {path}: written by an earlier version of the library (no {', '.join(missing)}): run it again"
            )
        lines = path / "replay.jsonl"
        records = from_lines(lines.read_text(), str(lines)) if lines.exists() else []
        metrics, paired = (read_table(path / f"{name}.parquet") for name in ("metrics", "paired"))
        return cls(path, summary, metrics, paired, records, config["config"])

    def tokens(self) -> pd.DataFrame:
        """Single tokens of the kept steps (measure.token_table); empty if none were kept."""
        return read_table(self.path / "tokens.parquet")

    @property
    def arm(self) -> str:
        """'none', 'R2' or 'R3'."""
        return self.summary["arm"]

    @property
    def label(self) -> str:
        """What tables and figures call the run (label_of)."""
        return label_of(self.summary)

    def __repr__(self) -> str:
        engines = f"{self.summary['rollout_engine']} + {self.summary['trainer_engine']}"
        return f"RunResult({self.path.name}: {self.summary['steps']} steps on {engines})"


def label_of(summary: Mapping[str, Any]) -> str:
    """What a run is called: its arm, or the policy and its budget where not all routes are forced, joined with the corrections; a
    correction without replay stands alone. What else is not the default follows.

    Args:
        summary: of a run, or its `settings` (rar_lib.summary) before there is a run.
    """
    arm, policy, corrections = summary["arm"], summary["policy"], summary["corrections"]
    partial = arm != "none" and policy != "full"
    heads = [policy if partial else arm, corrections]
    if arm == "none" and corrections:
        heads = [corrections]
    parts = [
        "+".join(part for part in heads if part),
        summary["budget"] if partial else None,
        arm if partial and arm != "R3" else None,
        summary["objective"] if summary["objective"] != "grpo" else None,
        "anchor rollout" if summary["anchor"] == "rollout" else None,
        "frozen router" if summary["router"] == "frozen" else None,
        "recorded gates" if summary["gates"] == "recorded" else None,
        "zero mismatch" if summary["computes_alike"] else "unrounded" if summary["precision"] == "native" else None,
    ]
    return " ".join(part for part in parts if part)
