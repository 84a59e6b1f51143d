"""Do rollout and trainer hold the same weights? Asked of the first batch, before anything is learned from it.

`Rollout.check_sync` proves to the last bit that pushed weights arrive; that both sides give them the same names shows only in log-probs.
Those differ by rounding, most of the time by little. On text that a model was not trained on, rounding alone can move a few tokens by
nats: so a wide gap is refused only where the trainer knows hardly more of a token's log-prob than of another token's. Where it does, the
gap is the mismatch, and is told.
"""

from __future__ import annotations

import logging

import torch

from rar_lib.errors import EngineError

logger = logging.getLogger("rar")

LARGEST_GAP = 0.1  # nats a token; an fp8-rounded bf16 rollout lies near 0.01
# Of the gap between unrelated tokens. Sums, weights in place: 0.02; text that the model never saw: 0.4; two layers exchanged: 0.7.
LARGEST_SHARE = 0.5


def require_same_weights(rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor) -> None:
    """Refuse a trainer whose native log-probs are not those of the rollout's weights; warn of a wide gap.

    Args:
        rollout, trainer: `[S, T]` log-probs of the same tokens, in nats.
        mask: `[S, T]` bool, the response tokens.

    Raises:
        EngineError: names the gap, what is usual, and the gap between unrelated tokens.
    """
    rollout, trainer = rollout[mask], trainer[mask]
    gap = float((trainer - rollout).abs().mean())
    if gap <= LARGEST_GAP:
        return
    unrelated = float((trainer.roll(len(trainer) // 2) - rollout).abs().mean())
    told = (
        f"rollout and trainer differ by {gap:.3f} nats a token on the first batch, where at most {LARGEST_GAP} is usual"
    )
    if not gap <= LARGEST_SHARE * unrelated:
        raise EngineError(
            f"{told}; unrelated tokens differ by {unrelated:.3f}: the weights were not pushed, or under wrong names"
        )
    logger.warning(
        "%s: the engines compute this text very differently; rollout.precision native and dtype float32 show how much is rounding",
        told,
    )
