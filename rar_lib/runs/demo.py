"""`rar demo`: the quickstart notebook through papermill on the real engines, and where to look afterwards."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from rar_lib.engines.session import available
from rar_lib.errors import EngineError
from rar_lib.runs.notebook import NOTEBOOKS
from rar_lib.runs.registry import find

NOTEBOOK = NOTEBOOKS / "01_quickstart.ipynb"
WATCH_SECONDS = 10.0


def run_demo(out: Path, steps: int | None = None) -> Path:
    """Execute the quickstart with `engine: real` into `out`, print its table and where its products lie.

    Args:
        out: folder for the executed notebook, figures and runs.
        steps: RL steps a policy, by default the notebook's own.

    Returns:
        The executed notebook.

    Raises:
        EngineError: if vLLM, Megatron-Core or papermill is not installed.
    """
    missing = [name for name in ("vllm", "megatron") if not available(name)]
    if missing:
        raise EngineError(f"the demo runs on the real engines; not installed: {', '.join(missing)}")
    try:
        import papermill
    except ImportError:
        raise EngineError("the demo needs papermill; install the extra rar-lib[notebooks]") from None
    out.mkdir(parents=True, exist_ok=True)
    executed = out / NOTEBOOK.name
    parameters: dict[str, object] = {"engine": "real", "runs_dir": str(out.parent), "out_dir": str(out)}
    if steps is not None:
        parameters["steps"] = steps
    with watched(out.parent):
        papermill.execute_notebook(NOTEBOOK, executed, parameters, cwd=out, progress_bar=True, kernel_name="python3")
    table = pd.read_csv(out / "policies.csv", dtype=str)
    print(table.to_string(index=False))
    paired = pd.read_csv(out / "paired.csv", dtype=str)
    print(paired.to_string(index=False))
    print(f"executed notebook  {executed}")
    print(f"figures            {out}/*.png, *.svg, *.csv")
    print("run folders        " + "\n                   ".join(str(out.parent / run) for run in table["run"]))
    return executed


@contextlib.contextmanager
def watched(runs_dir: Path) -> Iterator[None]:
    """Meanwhile, a line to standard error whenever a run of the folder has moved.

    papermill's bar counts cells, and a single one of them takes most of the time.
    """
    ended = threading.Event()

    def watch() -> None:
        told = ""
        while not ended.wait(WATCH_SECONDS):
            moves = [
                f"{e.name} step {e.done}/{e.steps}" if e.done else f"{e.name} starts"
                for e in find(runs_dir)
                if e.state == "running"
            ]
            if moves and (line := ", ".join(moves)) != told:
                told = line
                tqdm.write(line, file=sys.stderr)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
