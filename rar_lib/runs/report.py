"""Many runs in one place: aligned by arm and seed, compared with a baseline, written as text, Markdown and HTML. `rar compare`

Runs that differ in something a policy's name does not say (a learning rate, a number of updates, a model) are of another setting, and
compared only within it. Differences are paired by seed: Student's interval, Holm over the arms of a setting; seeds that an arm lacks are
listed, and its comparison is of those that it shares with the baseline. `final` is the mean reward of the last quarter of the steps;
`best` is the best single step, chosen afterwards and therefore flattering: it is shown and never compared.
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rar_lib.checkpoint import DATA_DIR
from rar_lib.config import JobConfig
from rar_lib.errors import ConfigError, RunError
from rar_lib.figures.style import alt_text, described, save_figure
from rar_lib.metrics.seeds import iqm
from rar_lib.runs.figure_set import study_figures
from rar_lib.runs.files import leaves, write_text
from rar_lib.runs.registry import inspect, resolve
from rar_lib.runs.result import RunResult, label_of
from rar_lib.runs.studies import QUANTITIES, Study, comparison, values_of

STUDIES = DATA_DIR / "studies"
OF_THE_POLICY = ("router_replay.", "algorithm.objective", "algorithm.anchor", "algorithm.corrections", "algorithm.freeze_router",
                 "algorithm.clip_")  # fmt: skip
UNTOLD = ("seed", "checkpoint_every", "diagnostics.", "evaluation.every", "model.path")  # not of what is compared
AT_THE_END = ("evaluation_last", "k3_rollout_old", "extreme_fraction_tau2", "ratio_max", "grad_norm")
FORMS = {"reward": ".3f", "evaluation_last": ".3f", "k3_rollout_old": ".2e", "extreme_fraction_tau2": ".1e", "ratio_max": ".1f",
         "grad_norm": ".2f"}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Runs that differ in policy and seed only.

    Attributes:
        name: what sets it apart from the other settings, such as `lr=0.0003`; empty if there is one setting.
        study: its runs and their steps.
        baseline: policy that the others are compared with; None if it has none.
    """

    name: str
    study: Study
    baseline: str | None

    def values(self) -> pd.DataFrame:
        """A row a run, the baseline first: policy, seed, run, best, best_step, lowest, collapsed_at, diverged and the QUANTITIES, `reward`
        the final one."""
        steps = self.study.steps
        rewards = steps[["policy", "seed", "step", "reward/mean"]].dropna()
        lowest = rewards.groupby(["policy", "seed"])["reward/mean"].min().rename("lowest").reset_index()
        top = rewards.loc[rewards.groupby(["policy", "seed"], sort=False)["reward/mean"].idxmax()]
        top = top.set_axis(["policy", "seed", "best_step", "best"], axis=1)
        runs = self.study.runs[["policy", "seed", "run", "steps", "collapsed_at", "diverged"]]
        table = runs.merge(values_of(self.study), on=["policy", "seed"]).merge(top, on=["policy", "seed"], how="left")
        table = table.merge(lowest, on=["policy", "seed"], how="left")
        order = list(dict.fromkeys([*([self.baseline] if self.baseline else []), *table["policy"]]))
        return table.sort_values(
            ["policy", "seed"], key=lambda c: c.map(order.index) if c.name == "policy" else c, ignore_index=True
        )


@dataclass(frozen=True)
class Comparison:
    """What was read.

    Attributes:
        settings: each with its runs.
        left_out: what of the sources is not compared, with the reason.

    Raises:
        ConfigError: for a setting that has a policy and seed twice.
    """

    settings: Sequence[Setting]
    left_out: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for setting in self.settings:
            twice = setting.study.runs[setting.study.runs.duplicated(["policy", "seed"])]
            if len(twice):
                policy, seed = twice.iloc[0][["policy", "seed"]]
                raise ConfigError(
                    f"{setting.name or 'runs'}: expected every policy and seed once, found {policy}, seed {seed} twice"
                )


# ---------------------------------------------------------------- reading


def read_comparison(sources: Sequence[str | Path], runs_dir: Path, baseline: str | None = None) -> Comparison:
    """Read and align.

    Args:
        sources: run folders, names of runs, and sweeps and studies by folder or name, in any number.
        runs_dir: where names are looked for.
        baseline: policy to compare with; by default `none`, if there is one.

    Raises:
        ConfigError: for a source that is none of these, two runs of one arm and seed, or a baseline that is nowhere.
        RunError: for a run or sweep that cannot be read.
    """
    folders: dict[Path, None] = {}
    studies: dict[Path, Study] = {}
    left_out: list[str] = []
    for source in sources:
        study, sweep = _found(source, STUDIES, "steps.parquet"), _found(source, runs_dir / "sweeps", "status.json")
        if study is not None and sweep is not None:
            raise ConfigError(
                f"{source}: expected one thing of that name, found a study and a sweep; give the folder: {study} or {sweep}"
            )
        if study is not None:
            studies[study] = Study.read(study)
        elif sweep is not None:
            names, untold = _of_sweep(sweep)
            left_out += untold
            folders |= dict.fromkeys(sweep.parent.parent / name for name in names)
        else:
            try:
                folders[resolve(str(source), runs_dir)] = None
            except RunError as error:
                known = {"sweeps": (runs_dir / "sweeps", "status.json"), "studies": (STUDIES, "steps.parquet")}
                elsewhere = {
                    what: sorted(p.parent.name for p in f.glob(f"*/{file}")) for what, (f, file) in known.items()
                }
                told = "; ".join(f"{what}: {', '.join(names_of) or 'none'}" for what, names_of in elsewhere.items())
                raise RunError(f"{error}, and no sweep or study ({told})") from None
    runs = []
    for folder in folders:
        entry = inspect(folder)
        if entry.state == "complete":
            runs.append(RunResult.read(folder))
        else:
            left_out.append(f"{folder.name}: {entry.state}" + (f", {entry.note}" if entry.note else ""))
    settings = [*_settings_of_runs(runs), *(part for study in studies.values() for part in _settings_of_study(study))]
    if not settings:
        raise ConfigError("compare: expected at least one complete run\n" + "\n".join(left_out))
    found = [Setting(name, _judged(study), _baseline(study, baseline)) for name, study in settings]
    if baseline is not None and all(setting.baseline is None for setting in found):
        there = sorted({p for setting in found for p in setting.study.runs["policy"]})
        raise ConfigError(f"baseline: expected one of {', '.join(there)}; found {baseline!r}")
    return Comparison(found, tuple(left_out))


def _found(source: str | Path, folder: Path, file: str) -> Path | None:
    """A folder with that file: given by its path, else by its name among those of `folder`."""
    given = Path(source)
    named = folder / given if len(given.parts) == 1 and given.name not in ("", "..") else None
    return next((p.resolve() for p in (given, named) if p is not None and (p / file).is_file()), None)


def _judged(study: Study) -> Study:
    """Without the end of what diverged: its weights were pushed before that, and its means are over other steps than those of the others."""
    runs = study.runs.copy()
    gone = runs["diverged"].notna()
    runs[list(AT_THE_END)] = runs[list(AT_THE_END)].astype(float).mask(gone)
    return Study(study.name, runs, study.steps)


def _of_sweep(folder: Path) -> tuple[list[str], list[str]]:
    try:
        points = json.loads((folder / "status.json").read_text())["points"]
        done = [run for point in points if point["state"] == "done" for run in point["runs"]]
        untold = [
            f"{p['id']}: {p['state']}{': ' + p['cause'] if p.get('cause') else ''}"
            for p in points
            if p["state"] != "done"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"sweep {folder}: status.json cannot be read: {error}") from None
    return list(dict.fromkeys(done)), untold


def _settings_of_runs(runs: Sequence[RunResult]) -> list[tuple[str, Study]]:
    groups: dict[tuple[tuple[str, Any], ...], list[tuple[str, RunResult]]] = {}
    for run, (policy, values) in zip(runs, arms_of(runs), strict=True):
        groups.setdefault(values, []).append((policy, run))
    found = []
    for values, members in sorted(groups.items(), key=lambda group: [_in_order(v) for _, v in group[0]]):
        setting = ", ".join(f"{name}={_plain(value)}" for name, value in values)
        seen: dict[tuple[str, int], RunResult] = {}
        for policy, run in members:
            other = seen.setdefault((policy, run.summary["seed"]), run)
            if other is not run:
                raise ConfigError(
                    f"{other.path} and {run.path} are both {policy}, seed {run.summary['seed']}: compare one of them"
                )
        found.append((setting, Study.of_runs(setting or "runs", [r for _, r in members], [p for p, _ in members])))
    return found


def _in_order(value: Any) -> tuple[bool, float, str]:
    """Sorts numbers as numbers, before all else."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (False, float(value), "") if number else (True, 0.0, str(value))


def arms_of(runs: Sequence[RunResult]) -> list[tuple[str, tuple[tuple[str, Any], ...]]]:
    """(policy, what sets its setting apart) of every run, as short as they may be to tell all runs of one seed apart."""
    flat = [_computed(run) for run in runs]
    varying = {key for key in {k for f in flat for k in f} if len({json.dumps(f.get(key)) for f in flat}) > 1}
    varying = {key for key in varying if not key.startswith(UNTOLD)}
    settings = sorted(key for key in varying if not key.startswith(OF_THE_POLICY))
    rounding = any(key.startswith("rollout.") for key in settings)
    names = [
        label_of({**r.summary, "computes_alike": False, "precision": "fp8_weights"} if rounding else r.summary)
        for r in runs
    ]
    found = []
    for name, values in zip(names, flat, strict=True):
        alike = [f for other, f in zip(names, flat, strict=True) if other == name]
        own = sorted(
            key for key in varying if key.startswith(OF_THE_POLICY) and len({json.dumps(f.get(key)) for f in alike}) > 1
        )
        policy = " ".join([name, *(f"{_short(key, own)}={_plain(values.get(key))}" for key in own)])
        found.append((policy, tuple((_short(key, settings), values.get(key)) for key in settings)))
    return found


def _computed(run: RunResult) -> dict[str, Any]:
    """What a run computes, flat, with today's defaults for settings that came later; how replay is switched off does not count."""
    values = dict(leaves(JobConfig.build(run.config).resolved()))
    if run.arm == "none":
        values = {key: value for key, value in values.items() if not key.startswith("router_replay.")}
    stored = json.loads((run.path / "config.json").read_text())
    digests = {name: str(digest)[:8] for name, digest in stored["digests"].items()}
    lists = {key: json.dumps(value) for key, value in values.items() if isinstance(value, list)}
    return values | lists | {"library": stored["version"], **digests}


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a key, with its group where another key ends in the same."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else ".".join(key.split(".")[-2:])


def _settings_of_study(study: Study) -> list[tuple[str, Study]]:
    keys = [key for key in ("lr", "updates_per_batch") if study.runs[key].nunique() > 1]
    if not keys:
        return [("" if study.name == "runs" else study.name, study)]
    found = []
    for values in study.runs[keys].drop_duplicates().sort_values(keys).to_dict("records"):
        name = ", ".join(f"{key}={_plain(value)}" for key, value in values.items())
        found.append((f"{study.name}, {name}", study.only(**{str(k): v for k, v in values.items()})))
    return found


def _baseline(study: Study, wanted: str | None) -> str | None:
    policies = list(dict.fromkeys(study.runs["policy"]))
    if wanted is not None or "none" in policies:
        return (wanted or "none") if (wanted or "none") in policies else None
    return next((policy for policy in policies if policy.split()[0] == "none"), None)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------- tables


def arms_table(setting: Setting) -> pd.DataFrame:
    """A row a policy, as text: seeds and those that are missing, rewards (final and best, marked), k3, F(2), collapse."""
    values = setting.values()
    every = sorted(values["seed"].unique())
    rows = []
    for policy, part in values.groupby("policy", sort=False):
        missing = [str(seed) for seed in every if seed not in set(part["seed"])]
        broken = [told for row in part.to_dict("records") if (told := _broken(row))]
        rows.append(
            {
                "policy": policy,
                "seeds": str(len(part)),
                "missing seeds": f"seed {', '.join(missing)}" if missing else "none",
                "final reward, mean": _form(part["reward"].mean(), ".3f"),
                "final reward, IQM": _form(iqm(part["reward"].tolist()), ".3f"),
                "best step (chosen afterwards)": _form(part["best"].mean(), ".3f"),
                "held out, end": _form(part["evaluation_last"].mean(), ".3f"),
                "k3 rollout/old": _form(part["k3_rollout_old"].mean(), ".2e"),
                "F(2)": _form(part["extreme_fraction_tau2"].mean(), ".1e"),
                "collapsed": "; ".join(broken)
                or ("not judged: rewards below 0" if (part["lowest"] < 0).any() else "none"),
            }
        )
    return pd.DataFrame(rows)


def differences_table(setting: Setting) -> pd.DataFrame:
    """A row a quantity and policy, as text: pairs, the difference from the baseline with its 95 % interval, Holm's p, verdict.

    Quantities that differ by factors are shown as factors. Empty if the setting has no baseline, or nothing beside it.
    """
    columns = ["quantity", "policy", "pairs", "difference [95 %]", "p (Holm)", "verdict"]
    if setting.baseline is None or setting.study.runs["policy"].nunique() < 2:
        return pd.DataFrame(columns=columns)
    rows = []
    for row in comparison(setting.study, setting.baseline, missing="drop").to_dict("records"):
        form, log = ("", True) if row["log"] else (FORMS[row["quantity"]], False)
        rows.append(
            {
                "quantity": QUANTITIES[row["quantity"]][0],
                "policy": row["policy"],
                "pairs": str(row["n"]),
                "difference [95 %]": _interval(row, form, log),
                "p (Holm)": _form(row["p_holm"], ".3f"),
                "verdict": "no difference shown" if row["verdict"] == "does not differ" else row["verdict"],
            }
        )
    return pd.DataFrame(rows, columns=columns)


def runs_table(setting: Setting) -> pd.DataFrame:
    """A row a run, as text: policy, seed, run, final and best reward, k3, collapse."""
    return pd.DataFrame(
        [
            {
                "policy": row["policy"],
                "seed": str(row["seed"]),
                "run": row["run"],
                "steps": str(row["steps"]),
                "final reward": _form(row["reward"], ".3f"),
                "best step (chosen afterwards)": f"{_form(row['best'], '.3f')} at {_form(row['best_step'], '.0f')}",
                "k3 rollout/old": _form(row["k3_rollout_old"], ".2e"),
                "collapse step": "none" if pd.isna(row["collapsed_at"]) else f"{row['collapsed_at']:.0f}",
                "diverged": "no" if pd.isna(row["diverged"]) else row["diverged"],
            }
            for row in setting.values().to_dict("records")
        ]
    )


def _broken(row: Mapping[Any, Any]) -> str:
    if pd.notna(row["diverged"]):
        return f"seed {row['seed']} diverged ({row['diverged']})"
    return f"seed {row['seed']} at step {row['collapsed_at']:.0f}" if pd.notna(row["collapsed_at"]) else ""


def _form(value: Any, form: str) -> str:
    return "unknown" if value is None or pd.isna(value) else format(value, form)


def _interval(row: Mapping[Any, Any], form: str, log: bool) -> str:
    values = [row[name] for name in ("difference", "low", "high")]
    if values[0] is None or pd.isna(values[0]):
        return "unknown"
    if log:
        values = [None if v is None or pd.isna(v) else float(np.exp(v)) for v in values]
        told = [_form(v, ".2f") for v in values]
        return f"× {told[0]}" + ("" if told[1] == "unknown" else f" [{told[1]}, {told[2]}]")
    told = [_form(v, "+" + form) for v in values]
    return told[0] + ("" if told[1] == "unknown" else f" [{told[1]}, {told[2]}]")


# ---------------------------------------------------------------- writing

TITLES = {"arms": "Arms", "differences": "Differences", "runs": "Every run"}
READ_AS = (
    "final: mean reward of the last quarter of the steps. best step: the highest reward of a single step, chosen afterwards, so it "
    "flatters and is never compared. Differences are paired by seed over the seeds that both have; intervals are Student's, p is Holm's "
    "over the policies of a setting and quantity, which the intervals do not know of. Where no difference is shown, none may be claimed. A run that diverged has reward 0 in the "
    "steps that it no longer took; its other numbers are of another stretch and left out. What nobody knows is unknown, and its pair is left "
    "out: pairs says how many are left. Factors need positive values on both sides."
)


TABLES = {"arms": arms_table, "differences": differences_table, "runs": runs_table}


def title_of(name: str, setting: Setting) -> str:
    """Heading of a table."""
    if name != "differences":
        return TITLES[name]
    if setting.baseline is None:
        return "Differences: none, since this setting has no baseline"
    alone = setting.study.runs["policy"].nunique() < 2
    return f"Differences from {setting.baseline}" + (": none, since there is no other policy" if alone else "")


def as_text(found: Comparison) -> str:
    """For a terminal; every run has a row in the Markdown and HTML."""
    parts = []
    for setting in found.settings:
        parts.append(f"# {setting.name}" if setting.name else "")
        for name in ("arms", "differences"):
            table = TABLES[name](setting)
            parts += [title_of(name, setting), *([table.to_string(index=False)] if len(table) else []), ""]
    parts += [f"left out: {told}" for told in found.left_out]
    return "\n".join(part for i, part in enumerate(parts) if part or i).rstrip()


def as_markdown(found: Comparison, pictures: Mapping[str, str] | None = None) -> str:
    """One page of Markdown; pictures are file name -> alternative text."""
    parts = ["# Comparison of runs", "", READ_AS, ""]
    for level, title, table in _parts(found, ("arms", "differences")):
        parts += [f"{'#' * level} {title}", "", *([] if table is None else [markdown(table), ""])]
    parts += [f"![{text}]({file})\n" for file, text in (pictures or {}).items()]
    for level, title, table in _parts(found, ("runs",)):
        parts += [f"{'#' * level} {title}", "", *([] if table is None else [markdown(table), ""])]
    if found.left_out:
        parts += ["## Left out", "", *(f"- {told}" for told in found.left_out)]
    return "\n".join(parts).rstrip() + "\n"


def _parts(found: Comparison, names: Sequence[str]) -> Iterator[tuple[int, str, pd.DataFrame | None]]:
    """(level, title, table) of every heading."""
    for setting in found.settings:
        if setting.name:
            yield 2, setting.name, None
        for name in names:
            table = TABLES[name](setting)
            yield 3, title_of(name, setting), table if len(table) else None


def markdown(table: pd.DataFrame) -> str:
    """A table of text as Markdown."""
    rows = [list(map(str, table.columns)), ["---"] * table.shape[1], *table.astype(str).to_numpy().tolist()]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:.5em 0 1.5em;font-size:13px}th,td{padding:.25em .7em;text-align:right}td{white-space:nowrap}"
    "th{border-bottom:2px solid #888}tr:nth-child(even){background:#f4f4f4}td:first-child,th:first-child{text-align:left}"
    ".wide{overflow-x:auto}img{max-width:100%;margin:.5em 0 1.5em}"
)


def as_html(found: Comparison, figures: Mapping[str, Figure]) -> str:
    """One page of HTML that needs no other file: figures are inside."""
    parts = [f"<p>{html.escape(READ_AS)}</p>"]
    for level, title, table in _parts(found, ("arms", "differences")):
        parts.append(f"<h{level}>{html.escape(title)}</h{level}>" + _html(table))
    for figure in figures.values():
        data = io.BytesIO()
        figure.savefig(data, format="png")
        picture = base64.b64encode(data.getvalue()).decode()
        parts.append(f'<img alt="{html.escape(alt_text(figure), quote=True)}" src="data:image/png;base64,{picture}">')
    for level, title, table in _parts(found, ("runs",)):
        parts.append(f"<h{level}>{html.escape(title)}</h{level}>" + _html(table))
    if found.left_out:
        told = "".join(f"<li>{html.escape(one)}</li>" for one in found.left_out)
        parts.append(f"<h2>Left out</h2><ul>{told}</ul>")
    head = f'<meta charset="utf-8"><title>Comparison of runs</title><style>{STYLE}</style>'
    body = "\n".join(["<h1>Comparison of runs</h1>", *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _html(table: pd.DataFrame | None) -> str:
    if table is None:
        return ""
    page = table.to_html(index=False, border=0, escape=True)
    for verdict in ("higher", "lower"):
        page = page.replace(f"<td>{verdict}</td>", f"<td><b>{verdict}</b></td>")
    return f'<div class="wide">{page}</div>'


def figures_of(found: Comparison) -> Iterator[tuple[str, tuple[Figure, pd.DataFrame] | str]]:
    """Name and (figure, table) of what can be drawn, or why it cannot."""
    for number, setting in enumerate(found.settings):
        study = Study(
            f"setting{number}" if len(found.settings) > 1 else "runs", setting.study.runs, setting.study.steps
        )
        for name, draw in study_figures(study, {}, setting.baseline, missing="drop").items():
            try:
                figure, table = draw()
                if setting.name:
                    figure.suptitle(setting.name, fontsize=8)
                    described(figure, f"{setting.name}: {alt_text(figure)}")
                yield name, (figure, table)
            except ConfigError as error:
                yield name, f"{setting.name or 'all runs'}: {error}".replace(f"study {study.name}: ", "")


def write_comparison(found: Comparison, out: Path) -> list[Path]:
    """Write compare.md, compare.html, tables as CSV and figures into a folder; returns the two pages.

    What an earlier comparison wrote there, and this one does not, is removed (compare.files lists it); other files stay.

    Raises:
        RunError: if the folder cannot be written.
    """
    try:
        return _write(found, out)
    except OSError as error:
        raise RunError(f"comparison {out}: {error.strerror or error}") from None


def _write(found: Comparison, out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    listed = out / "compare.files"
    for name in listed.read_text().split() if listed.exists() else ():
        (out / Path(name).name).unlink(missing_ok=True)
    figures: dict[str, Figure] = {}
    files: list[Path] = []
    undrawn = []
    for name, drawn in figures_of(found):
        if isinstance(drawn, str):
            undrawn.append(f"figure {name}: {drawn}")
        else:
            figures[name] = drawn[0]
            files += [
                p.with_suffix(s)
                for p in save_figure(drawn[0], out / name, drawn[1])[:1]
                for s in (".png", ".svg", ".csv")
            ]
    for number, setting in enumerate(found.settings):
        for name, make in TABLES.items():
            files.append(out / (f"{name}.csv" if len(found.settings) == 1 else f"{name}{number}.csv"))
            make(setting).to_csv(files[-1], index=False)
    whole = Comparison(found.settings, (*found.left_out, *undrawn))
    pages = [out / "compare.md", out / "compare.html"]
    write_text(pages[0], as_markdown(whole, {f"{name}.png": alt_text(figure) for name, figure in figures.items()}))
    write_text(pages[1], as_html(whole, figures))
    write_text(listed, "\n".join(sorted({p.name for p in [*files, *pages]})) + "\n")
    return pages
