"""The command line: `rar run`, `rar demo`, `rar base`. Results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import tyro

from rar_lib.errors import RarError


def run(
    config: Annotated[Path | None, tyro.conf.arg(help="YAML or JSON job config; every field has a default")] = None,
    set: Annotated[
        tyro.conf.UseAppendAction[list[str]], tyro.conf.arg(help="override a field: a.b=value; repeat as needed")
    ] = [],  # noqa: B006 - tyro reads the default, nobody changes it
    runs_dir: Annotated[Path | None, tyro.conf.arg(help="folder of all runs, by default data/runs")] = None,
) -> None:
    """Run a job, or continue it; the last line printed is its run folder."""
    from rar_lib.config import JobConfig
    from rar_lib.job import run_job
    from rar_lib.runs.compare import policy_table

    job = JobConfig.build({}, set) if config is None else JobConfig.from_file(config, set)
    result = run_job(job, runs_dir=runs_dir, show="log")
    print(policy_table([result]).to_string(index=False))
    print(result.path)


def demo(
    out: Annotated[Path | None, tyro.conf.arg(help="folder to write to, by default data/runs/quickstart")] = None,
    steps: Annotated[int | None, tyro.conf.arg(help="RL steps a policy, by default the notebook's own")] = None,
) -> None:
    """Execute the quickstart notebook on vLLM and Megatron-Core: none, R2 and R3 from the same start."""
    from rar_lib.runs.demo import run_demo
    from rar_lib.runs.store import RUNS_DIR

    run_demo(out or RUNS_DIR / "quickstart", steps)


def base(
    out: Annotated[Path, tyro.conf.arg(help="folder to write the checkpoint to")],
    target: Annotated[float, tyro.conf.arg(help="expected reward at which to stop")] = 0.42,
    seed: Annotated[int, tyro.conf.arg(help="of the initial weights")] = 0,
) -> None:
    """Make the small base checkpoint: build, warm-start on the default task, save."""
    from rar_lib.checkpoint import make_base

    logger = logging.getLogger("rar")

    def log(step: int, loss: float, reward: float) -> None:
        logger.info("step %d loss %.3f expected reward %.3f", step, loss, reward)

    make_base(out, target=target, seed=seed, log=log)
    print(out)


def main() -> None:
    """Entry point of `rar`. Exit status 2 on anything the user can mend."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("rar").setLevel(logging.INFO)
    try:
        tyro.extras.subcommand_cli_from_dict({"run": run, "demo": demo, "base": base}, prog="rar", description=__doc__)
    except RarError as error:
        print(f"rar: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("rar: interrupted; start it again to continue from the last checkpoint", file=sys.stderr)
        sys.exit(130)
