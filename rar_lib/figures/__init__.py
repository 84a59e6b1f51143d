"""How to show: a tidy table in, a Figure out; one colour and marker a policy everywhere."""

from rar_lib.figures.flips import flips_by_layer
from rar_lib.figures.mismatch import mismatch_by_step
from rar_lib.figures.reward import reward_by_step
from rar_lib.figures.style import save_figure

__all__ = ["flips_by_layer", "mismatch_by_step", "reward_by_step", "save_figure"]
