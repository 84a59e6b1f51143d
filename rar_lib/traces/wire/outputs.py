"""What the answers of inference engines have in common: where the tokens, the log-probs and the routes of a choice lie.

An OpenAI-style answer has its prompt ids at the top (chat) or in the choice (completions), and the sampled ids in the choice,
where they were asked for (`return_token_ids`); without them the usage block still says how many there are. Someone who keeps
answers often keeps the request beside them: `{"request": ..., "response": ...}` is read as well as the bare answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rar_lib.errors import TraceError
from rar_lib.traces.wire.dump import Sample, at_the_end, integers, numbers


@dataclass(frozen=True)
class Choice:
    """One sampled answer of a record.

    Attributes:
        where: its place, in words.
        request, response, choice: the mappings around it; request is empty where it was not kept.
    """

    where: str
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    choice: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the choice, its message, or the answer."""
        message = self.choice.get("message")
        for mapping in (self.choice, message if isinstance(message, Mapping) else {}, self.response):
            if mapping.get(key) is not None:
                return mapping[key]
        return default


def choices(records: list[tuple[str, dict[str, Any]]]) -> Iterator[Choice]:
    """Every choice of every record that looks like an answer with `choices`."""
    for where, record in records:
        response = record.get("response", record)
        request = record.get("request", {})
        if not isinstance(response, Mapping) or not isinstance(response.get("choices"), list):
            continue
        for i, choice in enumerate(response["choices"]):
            if isinstance(choice, Mapping):
                yield Choice(f"{where}, choice {i}", request if isinstance(request, Mapping) else {}, response, choice)


def token_ids(where: str, prompt: Any, answer: Any) -> tuple[np.ndarray | None, int | None]:
    """All ids, `[T]` int64, and the number of prompt tokens; None and None where one of the two was not kept.

    Raises:
        TraceError: if they are not lists of integers.
    """
    if prompt is None or answer is None:
        return None, None
    first = integers(f"{where}: prompt token ids", prompt)
    rest = integers(f"{where}: answer token ids", answer)
    return np.concatenate([first, rest]).astype(np.int64), len(first)


def sized(choice: Choice, ids: np.ndarray | None, prompt: int | None) -> tuple[int, int | None]:
    """T and the number of prompt tokens, from the ids or from the usage block.

    Args:
        choice: the answer.
        ids, prompt: `[T]` and the number of prompt tokens, as `token_ids` gave them, or None.

    Raises:
        TraceError: if neither says them.
    """
    if ids is not None:
        return len(ids), prompt
    usage = choice.response.get("usage")
    if isinstance(usage, Mapping) and isinstance(usage.get("prompt_tokens"), int):
        answered = usage.get("completion_tokens")
        if isinstance(answered, int) and len(choice.response["choices"]) == 1:
            return usage["prompt_tokens"] + answered, usage["prompt_tokens"]
    raise TraceError(
        f"{choice.where}: expected token ids (ask for return_token_ids) or a usage block of a single choice: nothing says how "
        f"many tokens the routes belong to"
    )


def answer_logprobs(where: str, choice: Mapping[str, Any]) -> np.ndarray | None:
    """Log-probs of the sampled tokens in an OpenAI-style choice, `[tokens]` float64 in nats, or None.

    Raises:
        TraceError: if they are not numbers.
    """
    found = choice.get("logprobs")
    if isinstance(found, Mapping) and isinstance(found.get("content"), list):
        return numbers(
            where, [entry.get("logprob") if isinstance(entry, Mapping) else None for entry in found["content"]]
        )
    if isinstance(found, Mapping) and isinstance(found.get("token_logprobs"), list):
        return numbers(where, found["token_logprobs"])
    return None


def response_fields(tokens: int, prompt: int | None, logprobs: np.ndarray | None, where: str) -> dict[str, Any]:
    """`prompt`, `response_mask` and `logprobs` of a Sample whose last tokens were sampled.

    Args:
        tokens: T.
        prompt: number of prompt tokens, or None; then there is no mask.
        logprobs: `[tokens - prompt]` of the rollout, in nats, or None.
        where: place, for messages.

    Raises:
        TraceError: unless there is one log-prob a sampled token.
    """
    out: dict[str, Any] = {"prompt": prompt}
    if prompt is not None:
        out["response_mask"] = np.arange(tokens) >= prompt
    if logprobs is not None:
        if len(logprobs) != tokens - (prompt or 0):
            raise TraceError(
                f"{where}: expected {tokens - (prompt or 0)} log-probs, one a sampled token, found {len(logprobs)}"
            )
        out["logprobs"] = {"rollout": at_the_end(tokens, logprobs)}
    return out


def samples_of(
    records: list[tuple[str, dict[str, Any]]], routes: Callable[[Choice], tuple[np.ndarray | None, int]]
) -> tuple[Sample, ...]:
    """One sample a choice.

    Args:
        records: of the file.
        routes: gives a choice's `[rows, L, K]` ids (None where it has none) and the token of the first row.

    Raises:
        TraceError: if tokens, log-probs or routes of a choice do not fit each other.
    """
    out = []
    for choice in choices(records):
        where = choice.where
        ids, prompt = token_ids(where, choice.get("prompt_token_ids"), choice.get("token_ids"))
        tokens, prompt = sized(choice, ids, prompt)
        experts, first = routes(choice)
        more = response_fields(tokens, prompt, answer_logprobs(where, choice.choice), where)
        text = str(choice.choice.get("text") or "")
        out.append(Sample(where, tokens, experts, first, token_ids=ids, text=text, **more))
    return tuple(out)


def start_of(where: str, *values: Any) -> int:
    """The first of some values that is there, as a token position; 0 without any.

    Raises:
        TraceError: if it is not an integer of 0 or more.
    """
    for value in values:
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise TraceError(f"{where}: expected a start of 0 or more tokens, found {value!r}")
            return value
    return 0
