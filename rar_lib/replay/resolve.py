"""The resolver: (recorded routes, plan, live choice) -> the experts that are executed.

Only indices are decided here. The weights are always gathered from the live scores by the model's own rule, so a
forced route still gets its gate, and the router its gradient, from the policy that is being trained.
"""

from __future__ import annotations

import torch


def resolve_token_layer(recorded: torch.Tensor, native: torch.Tensor) -> torch.Tensor:
    """Unit `token_layer`: the recorded set where a route is planned, the live choice elsewhere.

    Args:
        recorded: `[rows, K]` int64 ids, -1 in every slot of a row that is not planned or not recorded.
        native: `[rows, K]` int64 ids that the router chose by itself.

    Returns:
        `[rows, K]` int64, K distinct ids a row if both inputs have them.
    """
    return torch.where(recorded[:, :1] >= 0, recorded, native)
