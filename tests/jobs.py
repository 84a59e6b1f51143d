"""Small jobs on the hf engines, jobs that are cut short, and what of two runs must be equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rar_lib.config import JobConfig
from rar_lib.engines.session import EngineSession
from rar_lib.job import run_job
from tests.conftest import hf_config

SMALL = (
    "steps=4",
    "algorithm.prompts_per_step=16",
    "algorithm.group_size=4",
    "evaluation.prompts=16",
    "trainer.micro_batch_size=16",
)


def small(arm: str, *overrides: str) -> JobConfig:
    mode = ["router_replay.enabled=false"] if arm == "none" else [f"router_replay.mode={arm}"]
    return hf_config(*SMALL, *mode, *overrides)


def numbers(table: pd.DataFrame) -> pd.DataFrame:
    """Everything but the clock."""
    return table[[c for c in table if not str(c).startswith("time/")]]


def interrupt(
    config: JobConfig,
    runs_dir: Path,
    engine: type,
    method: str,
    when: Callable[..., bool],
    session: EngineSession | None = None,
) -> None:
    """Run a job up to the call of an engine's method that is interrupted: `when(number of the call, *arguments)` from 1."""
    calls, whole = 0, getattr(engine, method)

    def dies(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if when(calls, *args):
            raise KeyboardInterrupt
        return whole(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, method, dies)
        with pytest.raises(KeyboardInterrupt):
            run_job(config, session, runs_dir=runs_dir, show="none")
