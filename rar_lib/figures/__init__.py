"""How to show: a tidy table in, a Figure out; one colour and marker a policy everywhere."""

from rar_lib.figures.costs import route_costs
from rar_lib.figures.depth import layers_per_token
from rar_lib.figures.differences import differences_by_policy
from rar_lib.figures.drift import routing_drift
from rar_lib.figures.explorer import explorer, most_different
from rar_lib.figures.flips import flips_by_layer, flips_by_margin
from rar_lib.figures.flow import expert_flow
from rar_lib.figures.frontier import frontier
from rar_lib.figures.kl import kl_by_policy
from rar_lib.figures.logprobs import extreme_curve, logprob_scatter
from rar_lib.figures.mismatch import mismatch_by_step
from rar_lib.figures.reward import reward_by_step
from rar_lib.figures.routes import disagreement_by_layer, load_map, load_shift_map
from rar_lib.figures.scores import estimator_agreement, flip_calibration, score_map, score_stability
from rar_lib.figures.strip import route_strip
from rar_lib.figures.style import alt_text, save_figure

__all__ = [
    "alt_text",
    "differences_by_policy",
    "disagreement_by_layer",
    "estimator_agreement",
    "expert_flow",
    "explorer",
    "extreme_curve",
    "flip_calibration",
    "flips_by_layer",
    "flips_by_margin",
    "frontier",
    "kl_by_policy",
    "layers_per_token",
    "load_map",
    "load_shift_map",
    "logprob_scatter",
    "mismatch_by_step",
    "most_different",
    "reward_by_step",
    "route_costs",
    "route_strip",
    "routing_drift",
    "save_figure",
    "score_map",
    "score_stability",
]
