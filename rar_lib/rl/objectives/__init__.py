"""Policy-gradient objectives: log-probs of a micro-batch in, a loss a token out.

OBJECTIVES names each with its mean: `token` weighs all tokens of the batch alike, `sequence` all sequences.
"""

from rar_lib.rl.objectives.gmpo import gmpo_loss
from rar_lib.rl.objectives.grpo import grpo_loss
from rar_lib.rl.objectives.gspo import gspo_loss

OBJECTIVES = {"grpo": (grpo_loss, "token"), "gspo": (gspo_loss, "sequence"), "gmpo": (gmpo_loss, "sequence")}

__all__ = ["OBJECTIVES", "gmpo_loss", "grpo_loss", "gspo_loss"]
