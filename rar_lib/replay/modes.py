"""Modes: where the record comes from, and in which passes it is replayed.

none  nothing is replayed.
R2    the trainer's old-log-prob pass is recorded and replayed in the updates: removes the drift between updates.
R3    the rollout's record is replayed in the old-log-prob pass and in the updates (arXiv 2510.11370): removes the
      mismatch between engines.

A mode is one line in the registry; the loop asks it what to replay and never what it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rar_lib.traces.trace import RouteTrace

Source = Literal["rollout", "old"]


@dataclass(frozen=True)
class Mode:
    """Which record each pass replays; None means native."""

    name: str
    in_old_pass: Source | None
    in_updates: Source | None

    def old_record(self, traces: Mapping[str, RouteTrace]) -> RouteTrace | None:
        """The record to replay in the old-log-prob pass."""
        return None if self.in_old_pass is None else traces[self.in_old_pass]

    def update_record(self, traces: Mapping[str, RouteTrace]) -> RouteTrace | None:
        """The record to replay in every update of the batch."""
        return None if self.in_updates is None else traces[self.in_updates]


MODES = {
    mode.name: mode
    for mode in (
        Mode("none", in_old_pass=None, in_updates=None),
        Mode("R2", in_old_pass=None, in_updates="old"),
        Mode("R3", in_old_pass="rollout", in_updates="rollout"),
    )
}
