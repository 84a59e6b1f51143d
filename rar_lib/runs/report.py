"""A comparison of runs, written down: as text, Markdown and HTML, with its tables as CSV and its figures.

Differences are paired by seed: Student's interval, Holm over the arms of a setting; seeds that an arm lacks are listed, and its comparison
is of those that it shares with the baseline. `final` is the mean reward of the last quarter of the steps; `best` is the best single step,
chosen afterwards and therefore flattering: it is shown and never compared.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rar_lib.errors import ConfigError, RunError
from rar_lib.figures.style import alt_text, described, save_figure
from rar_lib.metrics.seeds import iqm
from rar_lib.runs.align import Comparison, Setting
from rar_lib.runs.figure_set import study_figures
from rar_lib.runs.files import write_text
from rar_lib.runs.studies import FORMS, QUANTITIES, Study, comparison

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
