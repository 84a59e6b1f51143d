"""Modes: where the record comes from, and in which passes it is replayed.

none  nothing is replayed.
R2    the trainer's old-log-prob pass is recorded and replayed in the updates: removes the drift between updates.
R3    the rollout's record is replayed in the old-log-prob pass and in the updates (arXiv 2510.11370): removes the
      mismatch between engines.

A mode is one line in the registry; the loop asks it what to replay and never what it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["rollout", "old"]


@dataclass(frozen=True)
class Mode:
    """Which record each pass replays; None means native."""

    name: str
    in_old_pass: Source | None
    in_updates: Source | None


MODES = {
    mode.name: mode
    for mode in (
        Mode("none", in_old_pass=None, in_updates=None),
        Mode("R2", in_old_pass=None, in_updates="old"),
        Mode("R3", in_old_pass="rollout", in_updates="rollout"),
    )
}
