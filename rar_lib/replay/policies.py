"""Policies: which of the recorded routes are forced."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rar_lib.errors import ConfigError
from rar_lib.traces.trace import RouteTrace

# A policy looks at a record and returns the plan, `[N, L]` bool over its tokens and layers.
Policy = Callable[[RouteTrace], np.ndarray]


def full(trace: RouteTrace) -> np.ndarray:
    """Every recorded route: what R2 and R3 mean in the literature."""
    return trace.recorded.copy()


POLICIES: dict[str, Policy] = {"full": full}


def get_policy(name: str) -> Policy:
    """A policy by name.

    Raises:
        ConfigError: names the policies that there are.
    """
    if name not in POLICIES:
        raise ConfigError(f"router_replay.policy: expected one of {', '.join(POLICIES)}, found {name!r}")
    return POLICIES[name]
