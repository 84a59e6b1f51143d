"""Figures again from what runs wrote: `rar figures RUN...`. No engine is started and no model is loaded.

A source is a run folder, a study (a folder with runs.parquet and steps.parquet) or a frontier (a folder with by_prompt.parquet). Each figure
is drawn if the sources have what it shows; what could not be drawn is said with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rar_lib.errors import ConfigError
from rar_lib.figures import (
    differences_by_policy,
    expert_flow,
    extreme_curve,
    flips_by_layer,
    flips_by_margin,
    frontier,
    kl_by_policy,
    layers_per_token,
    load_shift_map,
    logprob_scatter,
    reward_by_step,
    route_strip,
    routing_drift,
    save_figure,
)
from rar_lib.figures.explorer import most_different
from rar_lib.frontier import Frontier, load_frontier
from rar_lib.metrics.extremes import strip_table
from rar_lib.runs import tables
from rar_lib.runs.compare import layer_flip_table, worst_noise_floor
from rar_lib.runs.result import RunResult
from rar_lib.runs.studies import Study, comparison


@dataclass
class Sources:
    """What figures are drawn from."""

    runs: list[RunResult] = field(default_factory=list)
    studies: list[Study] = field(default_factory=list)
    frontiers: list[Frontier] = field(default_factory=list)


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read every source.

    Raises:
        ConfigError: for folders that are neither a complete run, nor a study, nor a frontier; a line each.
    """
    found, faults = Sources(), []
    for path in paths:
        if (path / "summary.json").exists():
            found.runs.append(RunResult.read(path))
        elif (path / "steps.parquet").exists():
            found.studies.append(Study.read(path))
        elif (path / "by_prompt.parquet").exists():
            found.frontiers.append(load_frontier(path))
        else:
            what = "an interrupted run (no summary.json)" if (path / "config.json").exists() else "none of them"
            faults.append(f"{path}: expected a complete run folder, a study or a frontier, found {what}")
    if faults:
        raise ConfigError("\n".join(faults))
    return found


Drawn = tuple[Figure, pd.DataFrame]


def figure_set(sources: Sources, width: float | None = None) -> Iterator[tuple[str, Drawn | str]]:
    """Name and (figure, table) of every figure that the sources allow, or why it cannot be drawn.

    Args:
        sources: what to draw.
        width: inches of every figure, by default what suits each.
    """
    size: dict[str, Any] = {} if width is None else {"width": width}
    wanted: dict[str, Callable[[], Drawn]] = {}
    if sources.runs:
        wanted |= _of_runs(sources.runs, size)
    for study in sources.studies:
        wanted |= study_figures(study, size)
    for found in sources.frontiers:
        wanted |= _of_frontier(found, size)
    for name, draw in wanted.items():
        try:
            yield name, draw()
        except ConfigError as error:
            yield name, str(error)


def draw_all(paths: Sequence[Path], out: Path, width: float | None = None) -> tuple[list[Path], dict[str, str]]:
    """Draw and save the set; returns the PNG files, and by name the reasons of what was not drawn.

    Args:
        paths: run folders, studies and frontiers.
        out: folder for PNG, SVG and CSV of each figure.
        width: inches of every figure, by default what suits each.

    Raises:
        ConfigError: for a folder that is none of these.
    """
    files, reasons = [], {}
    for name, drawn in figure_set(read_sources(paths), width):
        if isinstance(drawn, str):
            reasons[name] = drawn
        else:
            files.append(save_figure(drawn[0], out / name, drawn[1])[0])
    return files, reasons


def _of_runs(runs: list[RunResult], size: dict[str, Any]) -> dict[str, Callable[[], Drawn]]:
    """Several runs share the first figures; those of one batch are of the last run given that kept its traces, and say so."""
    exact = [run for run in runs if run.summary["computes_alike"]]
    others = [run for run in runs if not run.summary["computes_alike"]]
    one = next((run for run in reversed(others) if list((run.path / "traces").glob("step-*"))), runs[-1])

    shown = others or runs

    def named(figure: Figure) -> Figure:
        """Says which of several runs a figure is of."""
        if len(shown) > 1:
            figure.suptitle(f"{one.label}, seed {one.summary['seed']}", fontsize=8)
        return figure

    def rewards() -> Drawn:
        table = tables.reward_table(shown)
        if all(run.summary.get("evaluation_last") is None for run in shown):
            return reward_by_step(table, **size), table.assign(on="sampled batch")
        held = tables.held_out_table(shown)
        both = pd.concat([table.assign(on="sampled batch"), held.assign(on="held out")], ignore_index=True)
        return reward_by_step(table, held, **size), both

    def kl() -> Drawn:
        table = tables.kl_table(others)
        if table.empty:
            raise ConfigError("no run with a mismatch among these")
        reference = max((r.summary["k3_rollout_old"] for r in exact), default=None)
        floor = worst_noise_floor(runs)
        figure = kl_by_policy(table, noise_floor=floor, zero_mismatch=reference, **size)
        return figure, table.assign(noise_floor=floor, zero_mismatch=reference)

    def scatter() -> Drawn:
        table = tables.token_table(others or [one])
        return logprob_scatter(table, **size), table

    def extremes() -> Drawn:
        tables.require_distinct(others)
        table = tables.extreme_table(tables.token_table(others))
        return extreme_curve(table, **size), table

    def flips() -> Drawn:
        tables.require_distinct(others)
        table = layer_flip_table(others)
        return flips_by_layer(table, **size), table

    def margins() -> Drawn:
        table, auc = tables.margin_table(one)
        return named(flips_by_margin(table, auc=auc, **size)), table

    def loads() -> Drawn:
        before, after, layers = tables.load_pair(one)
        return named(load_shift_map(before, after, layers, **size)), tables.load_pair_table(before, after, layers)

    def drift() -> Drawn:
        layers, gamma = tables.drift_tables(one)
        wide = layers.pivot(index="step", columns="layer", values="value").add_prefix("drift_layer_").reset_index()
        return named(routing_drift(layers, gamma, **size)), wide.merge(gamma, on="step")

    def depth() -> Drawn:
        table, dispersion = tables.depth_table(one)
        return named(layers_per_token(table, dispersion=dispersion, **size)), table

    def flow() -> Drawn:
        _, rollout, native = tables.traces(one)
        layer, table = tables.flow_table(rollout, native)
        figure = expert_flow(table, before=f"rollout, layer {layer}", after="trainer", **size)
        return named(figure), table

    def drifted() -> Drawn:
        layer, table = tables.drift_flow(one)
        figure = expert_flow(table, before=f"start, layer {layer}", after="end", **size)
        return named(figure), table

    def strip() -> Drawn:
        _, rollout, native = tables.traces(one)
        table = strip_table(rollout, native, most_different(rollout, native))
        return named(route_strip(table, **size)), table

    return {
        "rewards": rewards, "kl_by_policy": kl, "logprobs": scatter, "extremes": extremes, "flips_by_layer": flips,
        "flips_by_margin": margins, "load_shift": loads, "routing_drift": drift, "layers_per_token": depth, "expert_flow": flow,
        "drift_flow": drifted, "route_strip": strip,
    }  # fmt: skip


def study_figures(
    study: Study, size: dict[str, Any], baseline: str | None = "none", missing: Literal["refuse", "drop"] = "refuse"
) -> dict[str, Callable[[], Drawn]]:
    """What can be drawn of a study, by name: rewards, KL, and differences from a baseline if there is one (studies.comparison).

    Args:
        study: what to draw.
        size: keywords of every figure function, such as width.
        baseline, missing: as for studies.comparison.

    Returns:
        Functions that draw; each raises ConfigError where the study lacks what its figure shows.
    """
    steps = study.steps.rename(columns={"reward/mean": "value"})[["policy", "seed", "step", "value"]]

    def rewards() -> Drawn:
        _require_one_setting(study)
        held = (
            study.steps.reindex(columns=["policy", "seed", "step", "evaluation/reward"])
            .rename(columns={"evaluation/reward": "v"})
            .dropna()
        )
        ends = study.runs[["policy", "seed", "steps", "evaluation_last"]].set_axis(
            ["policy", "seed", "step", "value"], axis=1
        )
        begins = study.runs[["policy", "seed", "evaluation_first"]].set_axis(["policy", "seed", "value"], axis=1)
        middle = held.assign(step=held["step"] + 1).rename(columns={"v": "value"})
        served = pd.concat([begins.assign(step=0), middle, ends])[["policy", "seed", "step", "value"]]
        served = served.dropna().drop_duplicates(["policy", "seed", "step"])
        both = pd.concat([steps.assign(on="sampled batch"), served.assign(on="held out")], ignore_index=True)
        return reward_by_step(steps, served, **size), both

    def kl() -> Drawn:
        _require_one_setting(study)
        table = study.runs.rename(columns={"k3_rollout_old": "value"})[["policy", "seed", "value"]]
        table = table[table["value"] > 0]  # nothing else has a place on a logarithmic axis
        if table.empty:
            raise ConfigError(f"study {study.name}: k3 of every run is 0 or absent")
        floors = study.runs[["noise_floor_rollout", "noise_floor_trainer"]].to_numpy(float)
        floor = float(np.nanmax(floors)) if np.isfinite(floors).any() else None
        return kl_by_policy(table, noise_floor=floor, **size), table.assign(noise_floor=floor)

    def differences() -> Drawn:
        _require_one_setting(study)
        if baseline is None:
            raise ConfigError(f"study {study.name}: no baseline to differ from")
        table = comparison(study, baseline, missing=missing)
        labels = {
            "reward": "reward",
            "evaluation_last": "held-out reward",
            "k3_rollout_old": "k3",
            "extreme_fraction_tau2": "F(2)",
        }
        return differences_by_policy(table, labels, **size), table

    return {f"{study.name}_rewards": rewards, f"{study.name}_kl": kl, f"{study.name}_differences": differences}


def _require_one_setting(study: Study) -> None:
    if study.steps[["updates_per_batch", "lr"]].drop_duplicates().shape[0] > 1:
        raise ConfigError(f"study {study.name}: its runs differ in more than policy and seed")


def _of_frontier(found: Frontier, size: dict[str, Any]) -> dict[str, Callable[[], Drawn]]:
    def draw(unit: str) -> Callable[[], Drawn]:
        def one() -> Drawn:
            passes = {"old pass": found.of(unit, "old")[0]}
            if (found.table["pass"] == "new").any():
                passes["after updates"] = found.of(unit, "new")[0]
            every = pd.concat([t.assign(**{"pass": name}) for name, t in passes.items()], ignore_index=True)
            return frontier(passes, **size), every

        return one

    units = [u for u in ("token_layer", "slot") if (found.table["unit"] == u).any()]
    return {f"frontier_{unit}": draw(unit) for unit in units}
