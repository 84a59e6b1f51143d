"""How to show: a tidy table in, a Figure out; one colour and marker a policy everywhere."""

from rar_lib.figures.flips import flips_by_layer
from rar_lib.figures.frontier import frontier
from rar_lib.figures.mismatch import mismatch_by_step
from rar_lib.figures.reward import reward_by_step
from rar_lib.figures.routes import disagreement_by_layer, load_map
from rar_lib.figures.scores import estimator_agreement, flip_calibration, score_map, score_stability
from rar_lib.figures.style import save_figure

__all__ = [
    "disagreement_by_layer",
    "estimator_agreement",
    "flip_calibration",
    "flips_by_layer",
    "frontier",
    "load_map",
    "mismatch_by_step",
    "reward_by_step",
    "save_figure",
    "score_map",
    "score_stability",
]
