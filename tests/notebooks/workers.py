"""A pytest plugin for notebooks in several processes: each keeps its runs in a folder of its own, since a run has one writer.

pytest -p tests.notebooks.workers -n 2 --nbval-lax notebooks/*.ipynb
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

FOLDER = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Kernels inherit the environment of the process that starts them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        config.stash[FOLDER] = Path(tempfile.mkdtemp(prefix="rar-notebooks-"))
        os.environ["RAR_RUNS_DIR"] = str(config.stash[FOLDER])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing of the runs stays."""
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)
