"""Do rollout and trainer hold the same weights? Asked of the first batch, before anything is learned from it.

`Rollout.check_sync` proves to the last bit that pushed weights arrive; that both sides give them the same names shows only in log-probs.
Those differ by rounding, most of the time by little. On text that a model was not trained on, rounding alone can move a few tokens by
nats. So where the gap is wide, it is refused if the trainer knows hardly more of a token's log-prob than of another token's, or if the
trainer does not compute what the checkpoint does in float32, on the answers where the gap is widest. Else it is mismatch, and is told: a
rollout engine that computes another function with the right weights would be told too, and not refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch

from rar_lib.checkpoint import load_model
from rar_lib.engines.base import TokenBatch
from rar_lib.engines.logits import response_logprobs
from rar_lib.errors import EngineError

logger = logging.getLogger("rar")

LARGEST_GAP = 0.1  # nats a token; an fp8-rounded bf16 rollout lies near 0.01
# Of the gap between unrelated tokens. Sums, weights in place: 0.02; text that the model never saw: 0.4; two layers exchanged: 0.7.
LARGEST_SHARE = 0.5
ANSWERS = 16  # that the checkpoint itself is asked about


def checkpoint_logprobs(path: Path, batch: TokenBatch, rows: torch.Tensor, temperature: float) -> torch.Tensor:
    """`[n, T]` float32, nats: the responses of some sequences by the checkpoint itself, computed by Transformers in float32.

    Args:
        path: checkpoint folder.
        batch: the tokens.
        rows: `[n]` int64, which of its sequences.
        temperature: divides the logits.
    """
    some = batch.select(rows)
    with torch.no_grad():
        logits = load_model(path)(input_ids=some.tokens, use_cache=False).logits
    return response_logprobs(logits, some.tokens, some.response_mask, temperature)


def require_same_weights(
    rollout: torch.Tensor,
    trainer: torch.Tensor,
    mask: torch.Tensor,
    checkpoint: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Refuse a trainer whose native log-probs are not those of the rollout's weights; warn of a wide gap.

    Args:
        rollout, trainer: `[S, T]` log-probs of the same tokens, in nats.
        mask: `[S, T]` bool, the response tokens.
        checkpoint: given rows `[n]`, the log-probs `[n, T]` that both should have; asked only where the gap is wide.

    Raises:
        EngineError: names the gap, what is usual, and the gap between unrelated tokens or to the checkpoint.
    """
    apart = (trainer - rollout).abs() * mask
    gap = float(apart.sum() / mask.sum())
    if gap <= LARGEST_GAP:
        return
    mu, known = rollout[mask], trainer[mask]
    unrelated = float((known.roll(len(known) // 2) - mu).abs().mean())
    told = (
        f"rollout and trainer differ by {gap:.3f} nats a token on the first batch, where at most {LARGEST_GAP} is usual"
    )
    if not math.isfinite(gap) or not gap <= LARGEST_SHARE * unrelated:
        raise EngineError(
            f"{told}; unrelated tokens differ by {unrelated:.3f}: the weights were not pushed, or under wrong names"
        )
    widest = (apart.sum(1) / mask.sum(1).clamp_min(1)).topk(min(ANSWERS, len(apart))).indices
    off = float((trainer[widest] - checkpoint(widest)).abs()[mask[widest]].mean())
    if not off <= max(LARGEST_GAP, gap / 2):  # half of it: a bf16 trainer rounds too
        raise EngineError(
            f"{told}; where it is widest the trainer differs from the checkpoint by {off:.3f}: it does not compute what the checkpoint does"
        )
    logger.warning(
        "%s: the engines compute this text very differently; rollout.precision native and dtype float32 show how much is rounding",
        told,
    )
