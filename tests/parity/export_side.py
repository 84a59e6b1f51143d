"""Run in verl's environment: an exported plan through verl's own alignment, mask and RouterReplay.

python export_side.py plan.pt scores.npy out.json    # scores [N, L, E]; writes executed ids, queue lengths and masks
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction
from verl.utils.megatron.router_replay_utils import align_r3_router_replay_data, build_r3_replay_mask


def main(plan: str, scores: str, out: str) -> None:
    rows = torch.load(plan, weights_only=True)["tensordict"]
    routes, mask, ids = rows["routed_experts"], rows["replay_mask"], rows["input_ids"]
    aligned = align_r3_router_replay_data(routes, ids)
    own = build_r3_replay_mask(ids, torch.nested.to_padded_tensor(rows["response_mask"], 0))
    live = torch.from_numpy(np.load(scores))
    executed = []
    for layer in range(routes.shape[2]):
        router = RouterReplay()
        router.set_target_indices(aligned.values()[:, layer].to(torch.int64), replay_mask=mask.values()[:, layer])
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        _, used = router.get_replay_topk(
            live[:, layer], routes.shape[3], default_compute_topk=lambda s, k, **_: torch.topk(s, k, dim=1)
        )
        executed.append(used)
    found = {
        "unchanged": bool(torch.equal(aligned.values(), routes.values())),
        "own_mask": own.values().tolist(),
        "executed": torch.stack(executed, 1).tolist(),
    }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
