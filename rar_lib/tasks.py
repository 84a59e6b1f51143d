"""Verifiable tasks: a prompt, an answer, and a reward that anybody can check.

Problems come from reasoning-gym, whose items are made from `seed + index`, so each can be made again alone; the prompt
is the task's expression (`123+456=`), short enough for a character tokenizer and a half-million-parameter model. The
reward is exact match of the text, 1.0 or 0.0. reasoning-gym's own scorer is not asked: it gives full marks to `17.0`,
`1,7` and `+17` for `17`, which a policy learns to exploit. A user's own task is a file of prompts and, if exact match
does not do, a function.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rar_lib.config import TaskConfig
from rar_lib.errors import ConfigError

Split = Literal["train", "held_out"]
SPLIT_SEEDS: dict[Split, int] = {"train": 0, "held_out": 2**31}  # item i of a split is made from its seed + i


@dataclass(frozen=True)
class Problem:
    """One prompt with its answer as the model should write it; `entry` is what the reward function gets."""

    uid: str
    prompt: str
    answer: str
    entry: dict[str, Any] = field(repr=False)


class Task:
    """Problems by index, and their reward.

    Args:
        config: which task, with which options.

    Raises:
        ConfigError: if the task, its options, the prompt file or the reward function cannot be used.
    """

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        self._datasets = {} if config.name == "file" else {split: self._dataset(split) for split in SPLIT_SEEDS}
        self._rows: dict[Split, list[dict[str, Any]]] = {}
        if config.prompts_file is not None:
            self._rows["train"] = self._read_prompts("prompts_file", config.prompts_file)
        if config.held_out_file is not None:
            self._rows["held_out"] = self._read_prompts("held_out_file", config.held_out_file)
        self._reward = None if config.reward == "exact_match" else load_function(config.reward)

    def _dataset(self, split: Split) -> Any:
        import reasoning_gym

        try:
            return reasoning_gym.create_dataset(
                self.config.name, seed=SPLIT_SEEDS[split], size=1, **self.config.options
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                f"task.name {self.config.name!r} with task.options {self.config.options}: {error}"
            ) from None

    @property
    def evaluated_on(self) -> Split:
        """Which prompts an evaluation asks: a prompt file without a held-out one is evaluated on its training prompts."""
        return "held_out" if self._datasets or "held_out" in self._rows else "train"

    def _read_prompts(self, field: str, name: str) -> list[dict[str, Any]]:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"task.{field}: no file at {path}")
        rows = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"task.{field} {path}, line {number}: {error}") from None
            wrong = [
                key for key in ("prompt", "answer") if not isinstance(row, dict) or not isinstance(row.get(key), str)
            ]
            if wrong:
                told = line.strip() if len(line.strip()) <= 80 else line.strip()[:77] + "..."
                raise ConfigError(
                    f"task.{field} {path}, line {number}: expected the texts `prompt` and `answer`, "
                    f"found no text `{'` and `'.join(wrong)}` in {told}"
                )
            rows.append(row)
        if not rows:
            raise ConfigError(f"task.{field} {path}: expected at least one prompt")
        return rows

    def problem(self, index: int, split: Split = "train") -> Problem:
        """Problem `index` of a split, the same in every process. A prompt file is read in turn, again and again.

        Raises:
            ConfigError: for a task whose items carry no short expression.
        """
        if not self._datasets:
            rows = self._rows.get(split, self._rows["train"])
            row = rows[index % len(rows)]
            return Problem(f"file/{split}/{index % len(rows)}", row["prompt"], self._written(row["answer"]), row)
        entry = self._datasets[split][index]
        expression = entry["metadata"].get("expression")
        if expression is None:
            raise ConfigError(
                f"task.name {self.config.name!r}: its items carry no `expression` to make a short prompt from; "
                "write its prompts to a file and use task.name 'file'"
            )
        prompt = expression.replace(" ", "") + "="
        return Problem(f"{self.config.name}/{split}/{index}", prompt, self._written(entry["answer"]), entry)

    def _written(self, answer: str) -> str:
        return answer[::-1] if self.config.reverse_digits else answer

    def score(self, response: str, problem: Problem) -> float:
        """Reward of a decoded response (end token removed): 1.0 or 0.0 for exact match, else the user's number.

        Raises:
            ConfigError: if the user's function fails, or returns something other than a finite number.
        """
        answer = response[::-1] if self.config.reverse_digits else response
        if self._reward is None:
            return float(answer == problem.entry["answer"])
        try:
            reward = float(self._reward(answer, problem.entry))
        except Exception as error:  # whatever a user's own code may raise
            raise ConfigError(
                f"task.reward {self.config.reward!r}: expected a number for {problem.uid} and the answer {answer!r}, "
                f"found {type(error).__name__}: {error}{_place_in(self.config.reward, error)}"
            ) from error
        if not math.isfinite(reward):
            raise ConfigError(
                f"task.reward {self.config.reward!r}: expected a finite number for {problem.uid}, found {reward}"
            )
        return reward

    def digest(self) -> str:
        """SHA-256 of the task's config and of every file that it reads."""
        sha = hashlib.sha256(json.dumps(self.config.model_dump(mode="json"), sort_keys=True).encode())
        for file in (self.config.prompts_file, self.config.held_out_file):
            if file:
                sha.update(Path(file).read_bytes())
        if self._reward is not None:
            sha.update(Path(self.config.reward.rpartition(":")[0]).read_bytes())
        if self._datasets:
            import reasoning_gym

            sha.update(str(getattr(reasoning_gym, "__version__", "")).encode())
        return sha.hexdigest()


def load_function(spec: str) -> Callable[..., Any]:
    """A function given as `path/to/file.py:name`.

    Raises:
        ConfigError: if the file or the function is not there, or the file cannot be imported.
    """
    path, _, name = spec.rpartition(":")
    if not path or not Path(path).is_file():
        raise ConfigError(
            f"task.reward {spec!r}: expected 'exact_match' or 'path/to/file.py:function' of a file that exists"
        )
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's own code may raise
        raise ConfigError(
            f"task.reward {spec!r}: {path} cannot be imported: {type(error).__name__}: {error}{_place_in(spec, error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"task.reward {spec!r}: {path} has no function {name!r}")
    return function


def _place_in(spec: str, error: Exception) -> str:
    """The last line of the user's file that an error went through, as text to append; empty where it went through none."""
    path = Path(spec.rpartition(":")[0]).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
    return f" ({path.name}, line {lines[-1]})" if lines else ""
