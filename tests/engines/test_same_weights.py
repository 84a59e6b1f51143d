"""Log-probs that a person can compare by hand: -1, -2, -3 and -4 nats on the rollout's side."""

from __future__ import annotations

import pytest
import torch

from rar_lib.engines.same_weights import require_same_weights
from rar_lib.errors import EngineError


def held_against(trainer: list[float]) -> None:
    """The four tokens, in two answers, beside a prompt token that is not looked at."""
    mask = torch.tensor([[False, True, True]] * 2)
    rollout, other = torch.zeros(2, 3), torch.full((2, 3), 9.0)
    rollout[mask] = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    other[mask] = torch.tensor(trainer)
    require_same_weights(rollout, other, mask)


def test_other_weights_are_refused() -> None:
    with pytest.raises(EngineError, match=r"differ by 2\.000 nats a token.*unrelated tokens differ by 0\.000"):
        held_against([-3.0, -4.0, -1.0, -2.0])
    with pytest.raises(EngineError, match="differ by nan nats"):
        held_against([-1.0, -2.0, -3.0, float("nan")])


def test_a_wide_mismatch_at_the_same_weights_is_told_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    held_against([-1.1, -2.0, -3.0, -4.0])
    assert not caplog.messages
    held_against([-1.0, -2.0, -3.0, -5.0])
    assert "differ by 0.250 nats a token on the first batch" in caplog.text
