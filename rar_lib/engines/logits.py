"""From logits to the log-probs of the response tokens; one function, so that every trainer scores alike."""

from __future__ import annotations

import torch


def response_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Log-probs of the masked tokens.

    Args:
        logits: `[n, T, V]`, row t predicts token t + 1.
        tokens: `[n, T]` int64.
        mask: `[n, T]` bool, the tokens to score; never true at position 0.
        temperature: divides the logits.

    Returns:
        `[n, T]` float32 (float64 for float64 logits) in nats on the CPU, 0 where the mask is false. Differentiable.
    """
    tokens, mask = tokens.to(logits.device), mask.to(logits.device)
    wide = logits[:, :-1] if logits.dtype == torch.float64 else logits[:, :-1].float()
    logp = torch.log_softmax(wide / temperature, -1).gather(-1, tokens[:, 1:, None])[..., 0]
    out = logp.new_zeros(tokens.shape)
    out[:, 1:] = torch.where(mask[:, 1:], logp, 0)
    return out.cpu()
