"""Log-probs that a person can compare by hand: -1, -2, -3 and -4 nats on the rollout's side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.same_weights import checkpoint_logprobs, require_same_weights
from rar_lib.errors import EngineError
from tests.conftest import Sampled, hf_config


def held_against(trainer: list[float], checkpoint: torch.Tensor | None = None) -> None:
    """The four tokens, in two answers, beside a prompt token that is not looked at."""
    mask = torch.tensor([[False, True, True]] * 2)
    rollout, other = torch.zeros(2, 3), torch.full((2, 3), 9.0)
    rollout[mask] = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    other[mask] = torch.tensor(trainer)
    truth = rollout if checkpoint is None else checkpoint
    require_same_weights(rollout, other, mask, lambda rows: truth[rows])


def test_other_weights_are_refused() -> None:
    with pytest.raises(EngineError, match=r"differ by 2\.000 nats a token.*unrelated tokens differ by 0\.000"):
        held_against([-3.0, -4.0, -1.0, -2.0])
    with pytest.raises(EngineError, match="differ by nan nats"):
        held_against([-1.0, -2.0, -3.0, float("nan")])


def test_a_wide_mismatch_at_the_same_weights_is_told_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    held_against([-1.1, -2.0, -3.0, -4.0])
    assert not caplog.messages
    held_against([-1.0, -2.0, -3.0, -5.0], torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -5.0]]))
    assert "differ by 0.250 nats a token on the first batch" in caplog.text


def test_a_trainer_that_is_not_the_checkpoint_is_refused_where_it_is_wrong() -> None:
    """One answer of two is a nat off: the gap is a quarter nat, and the checkpoint agrees with the rollout."""
    with pytest.raises(EngineError, match=r"differ by 0\.250 nats.*differs from the checkpoint by 0\.250"):
        held_against([-1.0, -2.0, -3.0, -5.0])
    with pytest.raises(EngineError, match="differ by inf nats"):
        held_against([-1.0, -2.0, -3.0, -float("inf")])


def test_the_checkpoint_speaks_for_itself(checkpoint: Path, sampled: Sampled) -> None:
    config = hf_config()
    trainer = HFTrainer(checkpoint, config.trainer, config.algorithm)
    native = trainer.logprobs(sampled.batch, temperature=0.7).logprobs
    rows = torch.tensor([5, 0, 2])
    assert (checkpoint_logprobs(checkpoint, sampled.batch, rows, 0.7) - native[rows]).abs().max() < 1e-5
