"""The command line: `rar run | sweep | runs | compare | reproduce | export | figures | demo | base | doctor | record | aliases`. Results go
to standard output, progress and errors to standard error.

A command is its signature, from which its help is made, and one call of the library, which is imported when the command runs.

One file: the words, units and defaults of options are kept alike by standing beside each other.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import replace
from json import dumps as to_json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rar_lib.errors import ConfigError, RarError

RunsDir = Annotated[Path | None, tyro.conf.arg(help="folder of all runs, by default data/runs")]


def run(
    config: Annotated[Path | None, tyro.conf.arg(help="YAML or JSON job config; every field has a default")] = None,
    set: Annotated[
        tyro.conf.UseAppendAction[list[str]], tyro.conf.arg(help="override a field: a.b=value; repeat as needed")
    ] = [],  # noqa: B006 - tyro reads the default, nobody changes it
    nproc: Annotated[
        int | None, tyro.conf.arg(help="processes of the trainer, under torchrun's agent: trainer.processes=N")
    ] = None,
    runs_dir: RunsDir = None,
    estimate: Annotated[
        bool, tyro.conf.arg(help="run nothing; print memory, disk and time that the run would take")
    ] = False,
) -> None:
    """Run a job, or continue it; the last line printed is its run folder."""
    from rar_lib.config import JobConfig
    from rar_lib.job import run_job
    from rar_lib.runs.compare import policy_table

    if nproc is not None:
        set = [*set, f"trainer.processes={nproc}"]
    job = JobConfig.build({}, set) if config is None else JobConfig.from_file(config, set)
    if estimate:
        from rar_lib.estimate import estimate as estimate_run

        print(estimate_run(job))
        return
    result = run_job(job, runs_dir=runs_dir, show="log")
    print(policy_table([result]).to_string(index=False))
    print(result.path)


def sweep(
    grid: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="YAML: base, arms, grid, zip, seeds, notebook")],
    executor: Annotated[
        Literal["serial", "pool", "ray"],
        tyro.conf.arg(help="one by one, processes here, or Ray tasks (RAY_ADDRESS, else embedded)"),
    ] = "pool",
    workers: Annotated[int | None, tyro.conf.arg(help="points at a time, by default one a core, or a GPU")] = None,
    memory: Annotated[
        float | None, tyro.conf.arg(help="GB that all points may take, by default 90 % of what is free")
    ] = None,
    limit: Annotated[float | None, tyro.conf.arg(help="seconds that a point may take")] = None,
    retry: Annotated[bool, tyro.conf.arg(help="execute failed points again")] = False,
    dry_run: Annotated[
        bool, tyro.conf.arg(help="list the points with the time and memory that they will take")
    ] = False,
    measure: Annotated[
        bool, tyro.conf.arg(help="a dry run measures a share of a batch where no finished point tells the time")
    ] = True,
    runs_dir: RunsDir = None,
) -> None:
    """Execute a notebook at every point of a grid; start it again to continue. Exit status: 0 all done, 1 some failed, 2 refused, 130
    interrupted."""
    from rar_lib.runs.executors import Options, gpus
    from rar_lib.runs.forecast import forecast
    from rar_lib.runs.grid import Grid
    from rar_lib.runs.store import RUNS_DIR
    from rar_lib.runs.sweep import run_sweep

    read, folder = Grid.from_file(grid), runs_dir or RUNS_DIR
    for name, value in (("workers", workers), ("memory", memory), ("limit", limit)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name}: expected a number above 0, found {value}")
    options = Options(workers, None if memory is None else int(memory * 1e9), gpus())
    if dry_run:
        if executor == "serial":
            options = replace(options, workers=1)
        print(forecast(read, folder, options, retry=retry, measure=measure))
        return
    done = run_sweep(read, runs_dir=folder, executor=executor, options=options, retry=retry, limit=limit)
    for point in done.points:
        if point.also:
            print(f"{point.id} is also {'; '.join(point.also)}")
    print(done.brief(folder).to_string(index=False, na_rep=""))
    for point in done.points:
        if point.id in done.records and done.records[point.id].state == "failed":
            print(f"failed: {done.records[point.id].cause} ({folder / 'points' / point.id})")
    print(f"{done.count('done')} done, {done.count('failed')} failed; {len(done.ran)} executed now")
    if done.count("failed"):
        print("--retry executes failed points again")
    if done.runs():
        print(f"rar compare {done.folder.name}" + (f" --runs-dir {runs_dir}" if runs_dir else ""))
    print(done.folder)
    if done.count("done") < len(done.points):
        sys.exit(1)


def runs() -> None:
    """Run folders: `rar runs list | show | rm`."""
    raise ConfigError("runs: expected list, show or rm")


def list_runs(
    state: Annotated[
        Literal["complete", "running", "interrupted", "broken", "foreign"] | None, tyro.conf.arg(help="only these")
    ] = None,
    json: Annotated[bool, tyro.conf.arg(help="print JSON")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Every run: state, steps, last reward and k3, size. Links are not followed, broken folders say why."""
    from rar_lib.runs import registry
    from rar_lib.runs.files import human
    from rar_lib.runs.store import RUNS_DIR

    entries = [e for e in registry.find(runs_dir or RUNS_DIR) if state in (None, e.state)]
    if json:
        print(to_json([registry.plain(e) for e in entries]))
        return
    if entries:
        print(registry.run_table(entries).to_string(index=False))
    print(f"{len(entries)} runs, {human(sum(e.size for e in entries))}")


def show_run(
    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="folder, name, or the beginning or end of the name")],
    metrics: Annotated[bool, tyro.conf.arg(help="print the table of steps as CSV, also while the run goes on")] = False,
    json: Annotated[bool, tyro.conf.arg(help="print JSON")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """One run: what it is, how far it is, what it computed, where and with what."""
    from rar_lib.runs import registry
    from rar_lib.runs.store import RUNS_DIR

    entry = registry.inspect(registry.resolve(run, runs_dir or RUNS_DIR))
    if metrics:
        print(entry.metrics().to_csv(index=False), end="")
    elif json:
        print(to_json(registry.plain(entry) | registry.details(entry)))
    else:
        print(registry.describe(entry))


def remove_runs(
    runs: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(help="folders, names, or their beginnings or ends")
    ],
    checkpoints: Annotated[bool, tyro.conf.arg(help="only the trainer states of complete runs; results stay")] = False,
    yes: Annotated[bool, tyro.conf.arg(help="do it; without it, say what would be removed")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Remove runs. A run that a process holds, a link, and a folder that is no run are refused."""
    from rar_lib.runs import registry
    from rar_lib.runs.files import human
    from rar_lib.runs.store import RUNS_DIR

    if not runs:
        raise ConfigError("runs rm: expected at least one run")
    paths = list(dict.fromkeys(registry.resolve(name, runs_dir or RUNS_DIR) for name in runs))
    freed = registry.remove(paths, checkpoints_only=checkpoints, dry=not yes)
    for path in paths:
        print(path)
    what = "trainer states of these" if checkpoints else "these"
    print(f"{human(freed)} freed" if yes else f"nothing was removed; --yes removes {what}: {human(freed)}")


def compare(
    sources: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(help="runs, sweeps and studies, each by folder or name, in any number"),
    ],
    baseline: Annotated[str | None, tyro.conf.arg(help="policy to compare with, by default none")] = None,
    out: Annotated[
        Path | None,
        tyro.conf.arg(
            help="folder for compare.html, compare.md, CSV and figures, by default data/runs/compared/SOURCE"
        ),
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Runs aligned by policy and seed: paired differences, best and final, collapse, missing seeds; as text, Markdown and HTML."""
    from rar_lib.runs.align import read_comparison
    from rar_lib.runs.report import as_text, write_comparison
    from rar_lib.runs.store import RUNS_DIR

    if not sources:
        raise ConfigError("compare: expected at least one run, sweep or study")
    folder = runs_dir or RUNS_DIR
    found = read_comparison(sources, folder, baseline)
    print(as_text(found))
    name = "+".join(Path(source).name or "here" for source in sources)
    place = out or folder / "compared" / (name if len(name) <= 80 else f"{len(sources)}-sources")
    for page in write_comparison(found, place):
        print(page)


def reproduce(
    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="folder, name, or the beginning or end of the name")],
    out: Annotated[
        Path | None,
        tyro.conf.arg(help="folder to run it in, by default data/runs/reproduced; emptied of this run first"),
    ] = None,
    json: Annotated[bool, tyro.conf.arg(help="print JSON")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Run a complete run again and report every difference. Exit status: 0 none, 1 some."""
    from rar_lib.reproduce import reproduce as run_again
    from rar_lib.runs.registry import resolve
    from rar_lib.runs.store import RUNS_DIR

    folder = runs_dir or RUNS_DIR
    found = run_again(resolve(run, folder), out or folder / "reproduced", show="log")
    print(to_json(found.plain()) if json else found)
    if not found.equal:
        sys.exit(1)


def export(
    sources: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(
            name="runs", help="runs by folder, name, or its beginning or end; with --for the file of one plan"
        ),
    ],
    to: Annotated[
        Literal["tensorboard", "wandb"] | None, tyro.conf.arg(help="a tracker: event files, or an offline run")
    ] = None,
    framework: Annotated[
        Literal["verl", "nemo-rl"] | None, tyro.conf.arg(name="for", help="a trainer that shall replay the plan")
    ] = None,
    trace: Annotated[
        Path | None, tyro.conf.arg(help="record of the plan, by default the trace beside it that it was made for")
    ] = None,
    native: Annotated[
        Path | None,
        tyro.conf.arg(help="trace of the planning pass with scores: resolve the plan to ids, which freezes its picks"),
    ] = None,
    out: Annotated[Path | None, tyro.conf.arg(help="folder to write into, by default data/runs/exported")] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Write runs for a tracker (every number at its step, the config, the summary), or a stored replay plan for a trainer (ids, and
    what of them is forced). Nothing leaves the machine. Prints what was written."""
    from rar_lib.runs.store import RUNS_DIR

    folder = runs_dir or RUNS_DIR
    if (to is None) == (framework is None):
        found = "neither" if to is None else f"--to {to} and --for {framework}"
        raise ConfigError(
            f"export: expected either --to tensorboard|wandb for runs or --for verl|nemo-rl for a plan, found {found}"
        )
    if not sources:
        raise ConfigError(f"export: expected {'at least one run' if framework is None else 'the file of a plan'}")
    if framework is None:
        for name, given in (("trace", trace), ("native", native)):
            if given is not None:
                raise ConfigError(f"export: --{name} belongs to a plan (--for), found it with --to {to}")
        from rar_lib.export import export as write
        from rar_lib.runs.registry import resolve

        assert to is not None
        for path in write([resolve(name, folder) for name in sources], to, out or folder / "exported"):
            print(path)
        return
    if len(sources) > 1:
        raise ConfigError(f"export --for: expected one plan, found {len(sources)}: {', '.join(sources)}")
    from rar_lib.plan_export import export_plan

    print(export_plan(sources[0], framework, out or folder / "exported", trace, native))


def figures(
    sources: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(help="run folders, studies and frontiers, in any number")
    ],
    out: Annotated[
        Path | None, tyro.conf.arg(help="folder to write PNG, SVG and CSV to, by default data/runs/figures")
    ] = None,
    width: Annotated[
        float | None, tyro.conf.arg(help="inches: 3.5 a column, 7 a page; by default what suits each figure")
    ] = None,
) -> None:
    """Draw the figures of runs again from their folders; no engine is started. Prints a line a figure, drawn or not and why."""
    from rar_lib.runs.figure_set import draw_all
    from rar_lib.runs.store import RUNS_DIR

    if not sources:
        raise ConfigError("figures: expected at least one run folder, study or frontier")
    files, reasons = draw_all(sources, out or RUNS_DIR / "figures", width)
    for path in files:
        print(path)
    for name, reason in reasons.items():
        print(f"not drawn: {name}: {reason}")


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


def doctor(
    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="a dump of any known producer, or a trace")],
    format: Annotated[str, tyro.conf.arg(help="auto, or a name that the README lists")] = "auto",
    model: Annotated[
        Path | None, tyro.conf.arg(help="config.json, or a checkpoint folder: layers and experts to check against")
    ] = None,
    layers: Annotated[
        tuple[int, ...] | None,
        tyro.conf.arg(help="transformer layer number of each position on the producer's layer axis"),
    ] = None,
    batch_size: Annotated[int | None, tyro.conf.arg(help="sequences of a forward, for Megatron's tracer")] = None,
    allow_pickle: Annotated[bool, tyro.conf.arg(help="read pickles; their classes are not imported even then")] = False,
    against: Annotated[
        Path | None, tyro.conf.arg(help="a second record of the same tokens: certificate and agreement by layer")
    ] = None,
    kind: Annotated[
        Literal["mismatch", "drift"],
        tyro.conf.arg(help="what the comparison is: two engines, or one engine before and after"),
    ] = "mismatch",
    asserting: Annotated[
        tuple[Literal["tokens", "numbering", "weights", "engines"], ...],
        tyro.conf.arg(help="checks that you vouch for where the records prove nothing"),
    ] = (),
    json: Annotated[bool, tyro.conf.arg(help="print JSON")] = False,
) -> None:
    """Is this record of routes sound? Exit status: 0 clean, 1 warnings, 2 must not be replayed."""
    from rar_lib.diagnosis import diagnose

    try:
        found = diagnose(
            file, format, model=model, payload_layers=layers, batch_size=batch_size, allow_pickle=allow_pickle, against=against, kind=kind,
            asserting=asserting,
        )  # fmt: skip
    except RarError as error:
        if not json:
            raise
        print(to_json({"source": str(file), "status": 2, "summary": "not read", "error": str(error)}))
        sys.exit(2)
    print(found.to_json() if json else found)
    sys.exit(found.exit_status)


def record(
    file: Annotated[
        tyro.conf.Positional[Path], tyro.conf.arg(help="a trace, a dump with token ids, or JSON lines of token_ids")
    ],
    model: Annotated[Path, tyro.conf.arg(help="folder of a Hugging Face MoE checkpoint")],
    out: Annotated[Path, tyro.conf.arg(help="trace file to write (.safetensors)")],
    engine: Annotated[Literal["hf", "megatron"], tyro.conf.arg(help="what computes")] = "hf",
    dtype: Annotated[Literal["float32", "bfloat16"], tyro.conf.arg(help="of the forward")] = "float32",
    source: Annotated[
        Literal["old", "new"], tyro.conf.arg(help="old: the weights that sampled; new: later ones")
    ] = "old",
    version: Annotated[int | None, tyro.conf.arg(help="of the weights, where the dump has versions too")] = None,
    format: Annotated[str, tyro.conf.arg(help="of the file")] = "auto",
    batch_size: Annotated[int, tyro.conf.arg(help="sequences a forward")] = 16,
    scores: Annotated[bool, tyro.conf.arg(help="keep all ranked scores, E values a cell")] = False,
    allow_pickle: Annotated[bool, tyro.conf.arg(help="read pickles; their classes are not imported even then")] = False,
) -> None:
    """Route the tokens of a file through your own model: the training side of a comparison."""
    from rar_lib.retrace import record_file

    if out.suffix != ".safetensors" or out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"out: expected a .safetensors file in a folder that is there, found {out}")
    if not model.is_dir():
        raise ConfigError(f"model: expected the folder of a checkpoint, whose weights are run, found {model}")
    trace = record_file(
        file, model, engine=engine, dtype=dtype, format=format, allow_pickle=allow_pickle, source=source, version=version,
        batch_size=batch_size, scores=scores,
    )  # fmt: skip
    trace.save(out)
    print(out)


def aliases(
    framework: Annotated[
        str | None, tyro.conf.arg(help="verl, nemo-rl, slime, prime-rl, areal, ...; by default all")
    ] = None,
    name: Annotated[str | None, tyro.conf.arg(help="a metric's name, theirs or ours")] = None,
) -> None:
    """Metric names of other frameworks and what they are here."""
    from rar_lib.metrics.aliases import alias_table, find

    table = alias_table(framework)
    if name is not None:
        named = {(a.framework, a.theirs) for a in find(name)}
        table = table[[pair in named for pair in zip(table["framework"], table["theirs"], strict=True)]]
        if table.empty:
            raise ConfigError(f"name: no alias is known for {name!r}" + (f" in {framework}" if framework else ""))
    for row in table.to_dict("records"):
        print(f"{row['framework']:9} {row['theirs']}\n{'':9} {row['relation']}: {row['ours'] or 'no counterpart'}")
        if row["note"]:
            print(f"{'':9} {row['note']}")


COMMANDS: dict[str, Any] = {
    "run": run,
    "sweep": sweep,
    "runs": runs,
    "compare": compare,
    "reproduce": reproduce,
    "export": export,
    "figures": figures,
    "demo": demo,
    "base": base,
    "doctor": doctor,
    "record": record,
    "aliases": aliases,
}


# Packages that a command may miss where only `pip install .` was done, and the extra that brings them.
EXTRAS = {
    **dict.fromkeys(("httpx", "reasoning_gym", "tokenizers", "transformers"), "hf"),
    **dict.fromkeys(("IPython", "ipywidgets", "nbclient", "nbformat", "papermill", "psutil"), "notebooks"),
}
RUNS: dict[str, Any] = {"list": list_runs, "show": show_run, "rm": remove_runs}


def main() -> None:
    """Entry point of `rar`. Exit status 2 on anything the user can mend."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("rar").setLevel(logging.INFO)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.default_int_handler)
    try:
        if sys.argv[1:2] == ["runs"]:
            tyro.extras.subcommand_cli_from_dict(RUNS, prog="rar runs", description=runs.__doc__, args=sys.argv[2:])
        else:
            tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="rar", description=(__doc__ or "").partition("\n\n")[0])
    except RarError as error:
        print(f"rar: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"rar: {error.name} is not installed; install the extra rar-lib[{extra}]", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of a pipe had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:  # Ctrl-C, or a signal that asks to end
        print("rar: interrupted; start it again to continue from the last checkpoint", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":  # or `python -m rar_lib.cli` would say nothing and succeed
    main()
