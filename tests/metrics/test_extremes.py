"""From an extreme token to its text and its routes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rar_lib.errors import TraceError
from rar_lib.metrics.agreement import agreement
from rar_lib.metrics.extremes import context_of, extreme_tokens, routes_of
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader


def text(ids: list[int]) -> str:
    return "".join(chr(97 + i) for i in ids)


def pair() -> tuple[RouteTrace, RouteTrace]:
    """Two sequences, three and two tokens; at token 1 of the first one the sets of layer 2 differ."""
    header = TraceHeader(num_experts=4, top_k=2, moe_layers=(2, 5), source="rollout")
    a = [[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 0], [0, 0]], [[1, 2], [0, 3]], [[0, 0], [0, 0]]]
    b = [[[1, 0], [2, 3]], [[0, 3], [2, 3]], [[0, 0], [0, 0]], [[1, 2], [0, 3]], [[0, 0], [0, 0]]]
    status = [Status.RECORDED, Status.RECORDED, Status.LAST, Status.RECORDED, Status.LAST]
    ids = np.array([0, 1, 2, 3, 4])
    nan = np.nan
    left = RouteTrace.from_packed(
        header, a, [3, 2], status, token_ids=ids, logprobs=np.array([nan, -1, -2, nan, -1], np.float32)
    )
    right = RouteTrace.from_packed(
        header.model_copy(update={"source": "old"}), b, [3, 2], status, token_ids=ids,
        logprobs=np.array([nan, -1.5, -1, nan, -1], np.float32), margins=np.arange(10.0).reshape(5, 2),
    )  # fmt: skip
    return left, right


def test_the_largest_come_first_with_the_flips_of_their_input() -> None:
    a, b = pair()
    table = extreme_tokens(a, b, agreement(a, b), decode=text)
    assert table["position"].tolist() == [2, 1, 1]
    assert table["sequence"].tolist() == [0, 0, 1]
    assert table["delta"].tolist() == [1.0, -0.5, 0.0]
    assert table["layers_flipped"].tolist() == [1, 0, 0]  # the route of the token before decides
    assert table["text"].tolist() == ["c", "b", "e"]
    assert len(extreme_tokens(a, b, agreement(a, b), top=1)) == 1
    only = extreme_tokens(a, b, agreement(a, b), mask=np.array([0, 0, 0, 0, 1], bool))
    assert only["sequence"].tolist() == [1]
    with pytest.raises(TraceError, match="both records need log-probs"):
        extreme_tokens(replace(a, logprobs=None), b, agreement(a, b))


def test_one_token_opened() -> None:
    a, b = pair()
    table = routes_of(a, b, 0, 1)
    assert table["layer"].tolist() == [2, 5]
    assert table["only_a"].tolist() == [[1], []]
    assert table["only_b"].tolist() == [[3], []]
    assert table["shared"].tolist() == [1, 2]
    assert table["margin_b"].tolist() == [2.0, 3.0]
    last = routes_of(a, b, 0, 2)
    assert last["experts_a"].tolist() == [None, None]
    assert context_of(a, 0, 2, text) == "ab[c]"
    assert context_of(a, 0, 2, text, before=1) == "...b[c]"
    with pytest.raises(TraceError, match="expected a position from 0 to 2, found 3"):
        routes_of(a, b, 0, 3)
