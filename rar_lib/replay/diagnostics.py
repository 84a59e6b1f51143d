"""What a step says about replay: one versioned record, validated when it is written and when it is read.

    python -m rar_lib.replay.diagnostics    # writes the JSON schema to data/schema/

A number whose meaning changes gets another name, and the version rises; a field that cannot be computed is null and not 0.
"native_local" is the live choice inside a replayed forward, "native_free" that of a forward without any replay.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rar_lib.errors import ReplayError

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).resolve().parents[2] / "data" / "schema" / f"replay_diagnostics.v{SCHEMA_VERSION}.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PassDiagnostics(_Record):
    """One pass: the old-log-prob pass, or all updates of a batch together."""

    nominal: float = Field(0.0, ge=0, le=1, description="units given to routers over the valid units of the record")
    forced_routers_native_local: float | None = Field(
        None, ge=0, le=1, description="cells that executed another set than their own live choice, over recorded cells"
    )
    fidelity: float | None = Field(None, ge=0, le=1, description="mean |S and R| / K over recorded cells")
    regret: float | None = Field(
        None, description="mean router probability given up, over recorded cells; null outside a router's groups"
    )
    executed_equals_resolved: float | None = Field(
        None, ge=0, le=1, description="rows whose experts were those that were resolved, recompute included; must be 1"
    )
    router_gradient_forced: float | None = Field(
        None, ge=0, description="RMS of dloss/dlogit of forced executed experts"
    )
    router_gradient_free: float | None = Field(None, ge=0, description="the same of all other executed experts")


class ScoreDiagnostics(_Record):
    """The score that a plan ranked."""

    id: str
    unscored: int = Field(ge=0, description="cells without a route, ranked last")
    tokens: float = Field(ge=0)
    spearman: float | None = Field(None, ge=-1, le=1, description="of the rankings of two halves of the prompts")
    null_low: float | None = Field(None, description="2.5 % of the same under permutation within layers")
    null_high: float | None = Field(None, description="97.5 %")


class ReplayDiagnostics(_Record):
    """One step."""

    schema_version: Literal[1] = 1
    step: int = Field(ge=0)
    mode: Literal["none", "R2", "R3"]
    policy: str | None = Field(description="null when nothing is replayed")
    unit: Literal["token_layer", "slot", "bias"] | None
    seed: int = Field(ge=0)
    requested: str | None = Field(None, description="share that was asked for, as an exact fraction")
    valid: int = Field(ge=0, description="M: recorded units that could be planned")
    budget: int = Field(ge=0, description="planned units")
    nominal: float = Field(ge=0, le=1, description="budget over valid")
    binding: float | None = Field(
        None, ge=0, le=1, description="planned units whose route is not in the native_free set, over valid"
    )
    missing: int = Field(ge=0, description="cells of the rollout's record that no route was recorded for")
    trace_digest: str | None = None
    bias: float | None = Field(None, ge=0, description="largest lambda, for unit bias")
    score: ScoreDiagnostics | None = None
    planned_by_layer: list[int] | None = None
    binding_by_layer: list[float | None] | None = None
    old: PassDiagnostics
    update: PassDiagnostics
    target_shift: float | None = Field(
        None,
        ge=0,
        description="k3 of the native against the replayed policy (an estimate of KL(replayed||native)) at the weights that sampled",
    )
    drift_planned: float | None = Field(
        None, ge=0, le=1, description="planned cells whose native_free set changed over the updates of the batch"
    )
    drift_unplanned: float | None = Field(None, ge=0, le=1, description="the same on all other recorded cells")

    @model_validator(mode="after")
    def _consistent(self) -> ReplayDiagnostics:
        if self.budget > self.valid:
            raise ValueError(f"budget {self.budget} is above the valid units {self.valid}")
        nominal = self.budget / self.valid if self.valid else 0.0
        if abs(nominal - self.nominal) > 1e-12:
            raise ValueError(f"nominal {self.nominal} is not budget over valid, {nominal}")
        if self.binding is not None and self.binding > self.nominal + 1e-12:
            raise ValueError(f"binding {self.binding} is above nominal {self.nominal}")
        if (self.policy is None) != (self.mode == "none") or (self.unit is None) != (self.policy is None):
            raise ValueError(f"mode {self.mode} goes with policy {self.policy} and unit {self.unit}")
        if self.planned_by_layer is not None and sum(self.planned_by_layer) != self.budget:
            raise ValueError(f"planned_by_layer sums to {sum(self.planned_by_layer)}, budget is {self.budget}")
        if self.requested is not None:
            Fraction(self.requested)
        return self

    def columns(self, prefix: str = "replay/") -> dict[str, Any]:
        """The numbers as the columns of a step's row."""
        row: dict[str, Any] = {}
        for name in ("valid", "budget", "nominal", "binding", "missing", "bias", "target_shift",
                     "drift_planned", "drift_unplanned"):  # fmt: skip
            row[prefix + name] = getattr(self, name)
        for name in ("old", "update"):
            row |= {f"{prefix}{name}/{key}": value for key, value in getattr(self, name).model_dump().items()}
        if self.score is not None:
            values = self.score.model_dump(exclude={"id"})
            row |= {f"{prefix}score/{key}": value for key, value in values.items()}
        return row


def to_lines(records: Iterable[ReplayDiagnostics]) -> str:
    """JSON lines."""
    return "".join(record.model_dump_json() + "\n" for record in records)


def from_lines(text: str, name: str = "replay diagnostics") -> list[ReplayDiagnostics]:
    """Read JSON lines.

    Raises:
        ReplayError: names the line, the field and what was found.
    """
    out = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            out.append(ReplayDiagnostics.model_validate_json(line))
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, f['loc'])) or 'record'}: {f['msg']}" for f in error.errors(include_url=False)
            )
            raise ReplayError(f"{name}, line {number}: {faults}") from None
    return out


def schema() -> str:
    """The JSON schema of a line."""
    return json.dumps(ReplayDiagnostics.model_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.parent.mkdir(parents=True, exist_ok=True)
    SCHEMA_FILE.write_text(schema())
    sys.stdout.write(f"{SCHEMA_FILE}\n")
