"""Policy-gradient objectives: log-probs of a micro-batch in, a loss a token out."""

from rar_lib.rl.objectives.grpo import grpo_loss

__all__ = ["grpo_loss"]
