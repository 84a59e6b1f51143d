"""Notebooks for sweeps under test: the smallest that run a job, and some that go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import yaml

PARAMETERS = """\
# what a light point takes
engine: str = "hf"
policy: str = "R3"
routes: str = "full"
budget: str = ""
lr: float = 1e-4
steps: int = 2
prompts_per_step: int = 4
group_size: int = 2
eval_prompts: int = 4
checkpoint_every: int = 1
seed: int = 0
runs_dir: str = ""
out_dir: str = ""
"""
JOB = """\
from pathlib import Path
from rar_lib.config import JobConfig
from rar_lib.job import run_job
from rar_lib.runs import compare
names = ("engine", "policy", "routes", "budget", "lr", "steps", "prompts_per_step", "group_size", "eval_prompts", "checkpoint_every", "seed")
job = JobConfig.from_flat(**{name: globals()[name] for name in names})
run = run_job(job, runs_dir=Path(runs_dir))
compare.policy_table([run]).assign(run=run.path.name).to_csv(Path(out_dir) / "policies.csv", index=False)
"""
# A point of every ending, without any engine.
ENDINGS = """\
import os, signal, time
if ending == "raises":
    raise ValueError("nothing to learn")
if ending == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if ending == "hangs":
    time.sleep(600)
print("fine")
"""


def write_notebook(path: Path, parameters: str, *code: str) -> Path:
    """A notebook of a parameters cell and code cells."""
    new = nbformat.v4
    cells = [new.new_markdown_cell("# under test"), new.new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    nbformat.write(new.new_notebook(cells=[*cells, *(new.new_code_cell(c) for c in code)]), path)
    return path


def write_grid(path: Path, **values: Any) -> Path:
    """A grid file."""
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path
