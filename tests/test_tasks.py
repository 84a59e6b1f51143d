"""Problems by index, exact-match reward, and a user's own task."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rar_lib.config import TaskConfig
from rar_lib.errors import ConfigError
from rar_lib.tasks import Task


def test_a_problem_is_made_from_its_index_alone(task: Task) -> None:
    again = Task(TaskConfig())
    for index in (0, 5, 2**28):
        assert task.problem(index) == again.problem(index)
    assert task.problem(0, "held_out").prompt != task.problem(0).prompt


def test_the_prompt_is_the_expression_and_the_answer_its_value(task: Task) -> None:
    for index in range(50):
        problem = task.problem(index)
        value = str(eval(problem.prompt.removesuffix("=")))
        assert problem.answer == value[::-1]
        assert task.score(problem.answer, problem) == 1.0
        for wrong in (
            problem.answer + "1",
            problem.answer + "0",
            problem.answer + "+",
            "0." + problem.answer,
            " " + problem.answer,
        ):
            assert task.score(wrong, problem) == 0.0
        assert task.score("", problem) == 0.0


def test_answers_can_be_written_most_significant_digit_first() -> None:
    task = Task(TaskConfig(reverse_digits=False))
    problem = task.problem(3)
    assert problem.answer == str(eval(problem.prompt.removesuffix("=")))
    assert task.score(problem.answer, problem) == 1.0


def test_ones_own_prompts_and_reward(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": p, "answer": a}) for p, a in (("a=", "1"), ("b=", "22"))))
    reward = tmp_path / "reward.py"
    reward.write_text("def near(answer, entry):\n    return 0.5 if len(answer) == len(entry['answer']) else 0\n")
    task = Task(TaskConfig(name="file", prompts_file=str(prompts), reward=f"{reward}:near"))
    assert task.problem(1).answer == "22"  # one's own text is not reversed
    assert task.evaluated_on == "train"
    held_out = Task(TaskConfig(name="file", prompts_file=str(prompts), held_out_file=str(prompts)))
    assert held_out.evaluated_on == "held_out"
    assert [task.problem(i).prompt for i in range(3)] == ["a=", "b=", "a="]
    assert task.score("33", task.problem(1)) == 0.5
    exact = Task(TaskConfig(name="file", prompts_file=str(prompts)))
    assert [exact.score(x, exact.problem(0)) for x in ("1", "2")] == [1.0, 0.0]
    before = task.digest()
    reward.write_text(reward.read_text() + "# changed\n")
    assert task.digest() != before
    reward.write_text("def near(answer, entry):\n    return float('nan')\n")
    with pytest.raises(ConfigError, match="expected a finite number for file/train/0, found nan"):
        Task(task.config).score("1", task.problem(0))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "no_such_task"}, "no_such_task"),
        ({"options": {"min_terms": 9, "max_terms": 2}}, "task.options"),
        ({"options": {"colour": "red"}}, "colour"),
        ({"reward": "nowhere.py:f"}, "nowhere.py:f"),
        ({"name": "file", "prompts_file": "nowhere.jsonl"}, "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_used_is_named(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Task(TaskConfig.model_validate(config))


def test_a_task_without_expressions_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="task.name 'file'".replace(".", r"\.")):
        Task(TaskConfig(name="letter_counting", options={})).problem(0)


def test_a_broken_prompt_file_is_named_by_line(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": 3}\n')
    with pytest.raises(ConfigError, match="line 2"):
        Task(TaskConfig(name="file", prompts_file=str(file)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "answer": 5},
            'line 1: expected the texts `prompt` and `answer`, found no text `answer` in {"prompt"',
        ),
        ({"prompt": 3}, "found no text `prompt` and `answer` in"),
        (["a", "b"], "found no text `prompt` and `answer` in"),
        ({"prompt": "a" * 200, "answer": None}, "aaa..."),
    ],
)
def test_what_a_row_lacks_is_named(tmp_path: Path, row: object, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=re.escape(message)):
        Task(TaskConfig(name="file", prompts_file=str(tmp_path / "p.jsonl")))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return entry['target']",
            "for chain_sum/train/0 and the answer 'xy', found KeyError: 'target' (reward.py, line 2)",
        ),
        ("return 'good'", "found ValueError: could not convert string to float: 'good'"),
        ("return None", "found TypeError: float() argument"),
    ],
)
def test_a_reward_function_that_fails_is_named_with_its_line(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "reward.py").write_text(f"def mine(answer, entry):\n    {body}\n")
    task = Task(TaskConfig(reward=f"{tmp_path}/reward.py:mine", reverse_digits=False))
    with pytest.raises(ConfigError, match=re.escape(message)):
        task.score("xy", task.problem(0))


@pytest.mark.parametrize(
    ("text", "message"),
    [("def mine((a):\n", "cannot be imported: SyntaxError"), ("import os\n1 / 0\n", "ZeroDivisionError: division by zero (reward.py, line 2)")],
)  # fmt: skip
def test_a_reward_file_that_cannot_be_imported_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "reward.py").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        Task(TaskConfig(reward=f"{tmp_path}/reward.py:mine"))
