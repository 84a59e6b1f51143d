"""Corrections of the mismatch between the policy that sampled and the one that learns: weights and masks of tokens.

Weights (TIS, IcePop, Seq-MIS) and Geo-RS look at ρ = old/rollout and are fixed before the first update of a batch; OPSM and RSPO look
at the policy inside the update. rl/learning.py puts them together.
"""

from rar_lib.rl.corrections.geo_rs import geo_rs_keep
from rar_lib.rl.corrections.icepop import icepop_weights
from rar_lib.rl.corrections.opsm import opsm_keep
from rar_lib.rl.corrections.rspo import router_shift_weights
from rar_lib.rl.corrections.seq_mis import seq_mis_weights
from rar_lib.rl.corrections.tis import tis_weights

__all__ = ["geo_rs_keep", "icepop_weights", "opsm_keep", "router_shift_weights", "seq_mis_weights", "tis_weights"]
