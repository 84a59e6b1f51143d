"""From a grid file to points: every fault at once, before anything is started.

    name: night                      # by default the file's name
    notebook: 07_policies            # or a path; the default
    base: {engine: hf, steps: 20}    # parameters of every point
    arms:                            # named groups of parameters
      none: {policy: none}
      margin: {policy: R3, routes: margin, budget: 0.25}
    grid:                            # every combination
      updates_per_batch: [1, 4]
    zip:                             # in step; several groups as a list
      lr: [1e-4, 3e-4]
      steps: [20, 10]
    seeds: [0, 1, 2]

A point is what one execution of the notebook computes, and its id says so: the notebook's code, its resolved parameters, the digests of
checkpoint and task, and the library version. Two combinations that compute the same (`policy: none` at two budgets) are one point.
"""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, field_validator

import rar_lib
from rar_lib.checkpoint import digest_checkpoint, resolve_checkpoint, router_header
from rar_lib.config import JobConfig, explain
from rar_lib.config_keys import FLAT_NAMES
from rar_lib.engines.session import available, resolve_engines
from rar_lib.errors import ConfigError, RarError
from rar_lib.planner import Planner
from rar_lib.runs.notebook import Notebook, find_notebook
from rar_lib.runs.result import label_of
from rar_lib.runs.store import identity, run_id, short_digest
from rar_lib.summary import settings
from rar_lib.tasks import Task

PLACES = ("runs_dir", "out_dir")  # the sweep says where a point writes
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
TYPES = {"str": str, "int": int, "float": float, "bool": bool}


class Grid(BaseModel):
    """What a grid file says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = Field(None, pattern=f"^{NAME}$")
    notebook: str = "07_policies"
    base: dict[str, Any] = {}
    arms: dict[str, dict[str, Any]] = {}
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    zip: list[Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)]] = []
    seeds: Annotated[list[StrictInt], Field(min_length=1)] | None = None

    @field_validator("zip", mode="before")
    @classmethod
    def _one_group(cls, value: Any) -> Any:
        return [value] if isinstance(value, dict) else value

    @field_validator("zip", mode="after")
    @classmethod
    def _in_step(cls, value: list[dict[str, list[Any]]]) -> list[dict[str, list[Any]]]:
        for i, group in enumerate(value):
            if len({len(values) for values in group.values()}) > 1:
                told = ", ".join(f"{name} has {len(values)}" for name, values in group.items())
                raise ValueError(f"expected lists of one length in group {i}, found others: {told}")
        return value

    @classmethod
    def from_file(cls, path: str | Path) -> Grid:
        """Read YAML; numbers such as 1e-4 are numbers, and `name` is by default that of the file.

        Raises:
            ConfigError: for a file that is no grid: one line a fault.
        """
        path = Path(path)
        try:
            values = yaml.load(path.read_text(), Loader=_Loader)
        except OSError as error:
            raise ConfigError(f"grid file {path}: {error.strerror}") from None
        except (ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"grid file {path}: {error}") from None
        if not isinstance(values, dict):
            found_instead = "nothing" if values is None else type(values).__name__
            raise ConfigError(f"grid file {path}: expected a mapping, found {found_instead}")
        try:
            found = cls.model_validate(values)
        except ValidationError as error:
            faults = [explain(error, cls)]
            wrong = {fault["loc"][0] for fault in error.errors() if fault["loc"]}
            try:  # what is sound is looked at too
                points_of(cls.model_validate({name: value for name, value in values.items() if name not in wrong}))
            except (ConfigError, ValidationError) as more:
                faults += [str(more)] if isinstance(more, ConfigError) else []
            raise ConfigError(f"grid file {path}:\n" + "\n".join(faults)) from None
        beside = path.parent / found.notebook
        if beside.is_file():
            found = found.model_copy(update={"notebook": str(beside.resolve())})
        if found.name is None:
            if not re.fullmatch(NAME, path.stem):
                raise ConfigError(
                    f"grid file {path}: expected a file name like night.yaml, or a `name`, found {path.name!r}"
                )
            found = found.model_copy(update={"name": path.stem})
        return found

    def text(self) -> str:
        """As YAML, from which from_file reads the same."""
        return yaml.dump(self.model_dump(exclude_defaults=True), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4 as a text, and the later of two equal keys without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys are all different."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if not key.tag.endswith(":merge")]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"{', '.join(sorted(twice))}: given twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that _Loader would read as numbers."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)$"),
        list("-+.0123456789"),
    )


@dataclass(frozen=True)
class Point:
    """One execution of the notebook.

    Attributes:
        id: name of its folder.
        notebook: file that is executed.
        source: its content without outputs, as it was when the point got its name.
        arm: name of the arm, or of what tables call its run.
        label: what tables call its run; empty for a notebook that takes no settings of a run.
        axes: what the grid's axes and arms set.
        parameters: all parameters of the notebook but the places.
        job: its run, engines resolved; None for a notebook that takes no settings of a run.
        run: name of the run's folder, as far as the parameters tell; empty without a job.
        places: of PLACES, those that the notebook takes.
        also: other combinations of the grid that compute the same.
    """

    id: str
    notebook: Path
    source: str
    arm: str
    label: str
    axes: dict[str, Any]
    parameters: dict[str, Any]
    job: JobConfig | None
    run: str = ""
    places: frozenset[str] = frozenset()
    also: tuple[str, ...] = field(default=())


def points_of(grid: Grid, is_left: Callable[[Point], bool] = lambda point: True) -> list[Point]:
    """The points of a grid, in the order of arms, axes and seeds, seeds innermost.

    Args:
        grid: as it was read.
        is_left: a point that is not left to run needs no look at its model, which takes seconds.

    Raises:
        ConfigError: one line a fault, all of them: unknown parameters, wrong types, values out of range, parts that do not go together,
            a model or engine that is not there.
    """
    notebook = find_notebook(grid.notebook)
    read = Notebook.read(notebook)
    known = read.parameters()
    faults = list(_faults_of_axes(grid, known))
    sound = _without(grid, {name for name, _ in faults})
    defaults = {name: value for name, (_, value) in known.items() if name not in PLACES}
    found: dict[str, Point] = {}
    wrong: dict[str, list[str]] = {}
    build = _Builder(read)
    for arm, axes in _combinations(sound):
        named = {**sound.base, **axes}
        typed = {name: _typed(name, value, known[name][0]) for name, value in named.items()}
        told = ", ".join(f"{n}={v!r}" for n, v in axes.items()) or "the one point"
        try:
            point = build.point(arm, {n: typed[n] for n in axes}, {**defaults, **typed})
        except (RarError, OSError) as error:
            for line in str(error).splitlines():
                wrong.setdefault(line, []).append(told)
            continue
        before = found.get(point.id)
        found[point.id] = point if before is None else replace(before, also=(*before.also, told))
    models: dict[str, list[Point]] = {}
    for point in found.values():
        if point.job is not None:
            models.setdefault(point.job.model.path, []).append(point)
    for model, users in models.items():
        if any(map(is_left, users)):
            try:
                router_header(resolve_checkpoint(model))  # a model without replayable routers is refused
            except RarError as error:
                wrong.setdefault(str(error), []).append(f"model={model!r}")
    if faults or wrong:
        lines = [
            *dict.fromkeys(line for _, line in faults),
            *(f"{line} ({_some(told)})" for line, told in wrong.items()),
        ]
        raise ConfigError("\n".join(lines))
    return list(found.values())


# ---------------------------------------------------------------- axes


def _faults_of_axes(grid: Grid, known: Mapping[str, tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """(parameter, fault) of names and types, wherever they stand."""
    parts: list[tuple[str, str, Any]] = [("base", name, value) for name, value in grid.base.items()]
    parts += [(f"arms.{arm}", name, value) for arm, values in grid.arms.items() for name, value in values.items()]
    parts += [("grid", name, value) for name, values in grid.grid.items() for value in values]
    for i, group in enumerate(grid.zip):
        parts += [(f"zip.{i}", name, value) for name, values in group.items() for value in values]
    parts += [("seeds", "seed", value) for value in grid.seeds or ()]
    allowed = [name for name in known if name not in PLACES]
    unknown: set[tuple[str, str]] = set()
    for where, name, value in parts:
        if name in PLACES:
            yield name, f"{where}.{name}: the sweep says where its points write"
        elif name not in known:
            if (where, name) not in unknown:
                near = difflib.get_close_matches(name, allowed, 1)
                hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(allowed)}"
                yield name, f"{where}.{name}: the notebook has no such parameter; {hint}"
            unknown.add((where, name))
        else:
            try:
                _typed(name, value, known[name][0])
            except ConfigError as error:
                yield name, f"{where}.{error}"
    places: dict[str, str] = {"seed": "seeds"} if grid.seeds is not None else {}
    in_arms = {name for values in grid.arms.values() for name in values}
    for where, names in [("arms", in_arms), ("grid", grid.grid), *((f"zip.{i}", g) for i, g in enumerate(grid.zip))]:
        for name in names:
            if name in places:
                yield name, f"{where}.{name}: also set by {places[name]}; one of them must go"
            places.setdefault(name, where)


def _without(grid: Grid, names: set[str]) -> Grid:
    """A grid without some parameters, so that the others are looked at too."""

    def kept(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name not in names}

    return grid.model_copy(
        update={
            "base": kept(grid.base),
            "grid": kept(grid.grid),
            "arms": {arm: kept(values) for arm, values in grid.arms.items()},
            "zip": [group for group in map(kept, grid.zip) if group],
            "seeds": None if "seed" in names else grid.seeds,
        }
    )


def _typed(name: str, value: Any, kind: str) -> Any:
    """A value of the annotated type. A whole number is a float where one is asked for, and a number a text (a budget)."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "float" and number and abs(value) <= sys.float_info.max:
        return float(value)
    if kind == "str" and number:
        return str(value)
    if type(value) is TYPES[kind] and kind != "float":
        return value
    hint = ""
    if kind == "str" and isinstance(value, bool):
        hint = "; YAML reads a bare on, off, yes or no so: write it in quotes"
    elif kind == "str" and value is None:
        hint = "; an empty text is written ''"
    told = repr(value) if len(repr(value)) < 100 else repr(value)[:100] + "..."
    raise ConfigError(
        f"{name}: expected {'a finite ' if kind == 'float' and number else ''}{kind}, found {told} ({type(value).__name__}){hint}"
    )


def _combinations(grid: Grid) -> Iterator[tuple[str | None, dict[str, Any]]]:
    axes: list[list[dict[str, Any]]] = [[{name: v} for v in values] for name, values in grid.grid.items()]
    for group in grid.zip:
        rows = zip(*group.values(), strict=True)
        axes.append([dict(zip(group, row, strict=True)) for row in rows])
    axes.append([{"seed": seed} for seed in grid.seeds] if grid.seeds is not None else [{}])
    for arm, values in grid.arms.items() if grid.arms else [(None, {})]:
        for parts in itertools.product(*axes):
            yield arm, {**values, **{name: value for part in parts for name, value in part.items()}}


# ---------------------------------------------------------------- points


class _Builder:
    """Makes points; what is slow to find out is found out once."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook, self._code = notebook, notebook.digest()
        names = set(notebook.parameters())
        self._flat = names & set(FLAT_NAMES) if "engine" in names else set[str]()  # it runs jobs, or it does not
        self._places = frozenset(names & set(PLACES))
        self._seen: dict[str, Any] = {}

    def point(self, arm: str | None, axes: dict[str, Any], parameters: dict[str, Any]) -> Point:
        """One point.

        Raises:
            RarError: for what the run would refuse at its start.
        """
        own = {name: value for name, value in parameters.items() if name not in self._flat}
        content: dict[str, Any] = {"notebook": self._code, "own": own, "version": rar_lib.__version__}
        job, label, run = None, "", ""
        if self._flat:
            job = resolve_engines(
                JobConfig.from_flat(**{name: parameters[name] for name in sorted(self._flat)}), lambda _: None
            )
            digests = self._check(job)
            content["job"], run = identity(job, digests), run_id(job, digests)
            label = label_of(settings(job))
            alike = {("hf", "hf"): "hf", ("vllm", "megatron"): "real"}.get((job.rollout.engine, job.trainer.engine))
            if parameters.get("engine") == "auto" and alike:  # another machine may have other engines
                parameters = {**parameters, "engine": alike}
        digest = short_digest(content)
        stem = self._notebook.path.stem
        parts = [label or stem, f"seed{parameters['seed']}" if "seed" in parameters else "", digest]
        folder = "-".join(re.sub(r"[^A-Za-z0-9+_.]+|\.{2,}", "-", part).strip("-.")[:60] for part in parts if part)
        return Point(
            folder,
            self._notebook.path,
            self._notebook.source,
            arm or label or stem,
            label,
            axes,
            parameters,
            job,
            run,
            self._places,
        )

    def _check(self, job: JobConfig) -> dict[str, str]:
        """What is refused before a run starts is refused here; the digests of its checkpoint and task."""
        faults: list[str] = []
        found: dict[str, str] = {}

        def look(name: str, call: Callable[[], str]) -> None:
            try:
                found[name] = call()
            except (RarError, OSError) as error:
                faults.append(str(error))

        look("plan", lambda: str(Planner(job.router_replay).needs))
        missing = [e for e in (job.rollout.engine, job.trainer.engine) if not available(e)]
        if missing:
            faults.append(f"engine: {' and '.join(missing)} not installed")
        checkpoint, task = job.model.path, job.task.model_dump_json()
        look("checkpoint", lambda: self._once(checkpoint, lambda: digest_checkpoint(resolve_checkpoint(checkpoint))))
        look("task", lambda: self._once(task, lambda: Task(job.task).digest()))
        if faults:
            raise ConfigError("\n".join(faults))
        return {name: found[name] for name in ("checkpoint", "task")}

    def _once(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._seen:
            self._seen[key] = make()
        return self._seen[key]


def _some(told: list[str]) -> str:
    told = list(dict.fromkeys(told))
    return "; ".join(told[:2]) + (f"; and {len(told) - 2} more points" if len(told) > 2 else "")
