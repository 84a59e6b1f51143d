"""The rule of collapse, by hand."""

from __future__ import annotations

import pytest

from rar_lib.metrics.collapse import collapsed_at


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.5] * 10, None),
        ([0.5] * 10 + [0.0] * 10, 12),  # running mean of 5: .4, .3, .2 -> at or below .25 from step 12
        ([0.5] * 10 + [0.0] * 5 + [0.5] * 5, None),  # made good at the end
        ([0.5] * 10 + [0.0] * 5 + [0.5] * 5 + [0.0] * 4, 22),
        ([0.0] * 5, None),  # never had anything to lose
        ([], None),
        ([0.1, 0.2, 0.4, 0.8, 1.0], None),
    ],
)
def test_collapse_by_hand(rewards: list[float], step: int | None) -> None:
    assert collapsed_at(rewards) == step


def test_window_and_share_are_settings() -> None:
    assert collapsed_at([1.0, 0.6, 0.6], window=1, share=0.5) is None
    assert collapsed_at([1.0, 0.6, 0.6], window=1, share=0.7) == 1
    assert collapsed_at([1.0, 0.5, 0.5], window=1) == 1  # half of the best is collapsed


def test_what_has_no_share_is_refused() -> None:
    for bad in ([-0.1], [float("nan")]):
        with pytest.raises(ValueError, match=r"finite rewards of 0 or more, found .* at step 0"):
            collapsed_at(bad)
