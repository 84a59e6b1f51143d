"""Execute the notebooks in place and normalise them: `make notebooks`, or `python -m tests.notebooks.execute 01_quickstart ...`.

What is committed is what a reader needs and a reviewer can read: results, no warnings on stderr, no progress bars (they hold times), no
timings or tool state in metadata, widgets only where an output shows one. A test demands that the committed notebooks are normal.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
VIEW, STATE = "application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}


def normalise(notebook: Any) -> Any:
    """The notebook as it is committed; changed in place and returned."""
    states = notebook.metadata.get("widgets", {}).get(STATE, {}).get("state", {})
    shown: set[str] = set()
    for cell in notebook.cells:
        cell.metadata = {name: value for name, value in cell.metadata.items() if name == "tags"}
        if cell.cell_type != "code":
            continue
        kept: list[Any] = []
        for output in cell.outputs:
            view = output.get("data", {}).get(VIEW)
            if (output.output_type == "stream" and output.name == "stderr") or (
                view and is_bar(view["model_id"], states)
            ):
                continue
            if view:
                shown.add(view["model_id"])
            if output.output_type == "stream" and kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text
                continue
            if "metadata" in output:
                output.metadata = {}
            kept.append(output)
        cell.outputs = kept
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": LANGUAGE})
    if shown:
        reached = reachable(shown, states)
        widgets = {"state": {name: states[name] for name in sorted(reached)}, "version_major": 2, "version_minor": 0}
        notebook.metadata["widgets"] = {STATE: widgets}
    return notebook


def is_bar(model: str, states: dict[str, Any]) -> bool:
    """A progress bar of tqdm: a box with a FloatProgress, or one whose state was not kept."""
    reached = reachable({model}, states)
    return not reached or any(states[name]["model_name"] == "FloatProgressModel" for name in reached)


def reachable(models: set[str], states: dict[str, Any]) -> set[str]:
    """Models, and what they are made of."""
    found: set[str] = set()
    left = [m for m in models if m in states]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            text = str(states[name]["state"])
            left += [other for other in states if f"IPY_MODEL_{other}" in text]
    return found


def execute(path: Path) -> None:
    """Execute in place, in a kernel of its own, and normalise."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=3600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    nbformat.write(normalise(notebook), path)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="stems of notebooks; by default all")
    parser.add_argument("--no-execute", action="store_true", help="normalise only")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not options.names or path.stem in options.names:
            print(path.name, flush=True)
            if options.no_execute:
                nbformat.write(normalise(nbformat.read(path, as_version=4)), path)
            else:
                execute(path)


if __name__ == "__main__":
    main()
