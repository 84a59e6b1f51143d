"""Runs in verl's environment: verl's own functions on arrays that the tests wrote. No cluster is started.

    .venv-verl/bin/python tests/parity/verl_side.py IN.npz OUT.json

Reads `old, rollout, new, mask, advantages` and the bounds; writes numbers and nested lists.
"""

import json
import sys

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.workers.config.actor import ActorConfig

data = np.load(sys.argv[1])
old, rollout, new, advantages = (torch.from_numpy(data[name]) for name in ("old", "rollout", "new", "advantages"))
mask = torch.from_numpy(data["mask"]).long()
ratio = (old - rollout) * mask
out = {}


def text(low, high):
    return f"{float(low)!r}_{float(high)!r}"


def loss(mode, mean, low, high, weights=None):
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=1e9,  # no dual clip
    )
    live = new.clone().requires_grad_()
    value, metrics = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=old,
        log_prob=live,
        advantages=advantages[:, None].expand(old.shape),
        response_mask=mask,
        loss_agg_mode=mean,
        config=config,
        rollout_is_weights=weights,
    )
    value.backward()
    return {"loss": value.item(), "gradient": live.grad.tolist(), "clipped": metrics["actor/pg_clipfrac"]}


tis, tis_metrics = compute_rollout_correction_weights(ratio, mask, "token", float(data["cap"]))
icepop, _ = compute_rollout_correction_weights(ratio, mask, "token", text(data["low"], data["high"]))
seq_mis, _ = compute_rollout_correction_weights(ratio, mask, "sequence", text(1e-8, data["cap"]))
# verl bounds -log of the mean ratio, so bounds of the ratio are given as their inverses
geo_rs, _ = compute_rollout_rejection_mask(ratio, mask, "seq_mean_k1", text(1 / data["geo_high"], 1 / data["geo_low"]))
out["weights"] = {"tis": tis.tolist(), "icepop": icepop.tolist(), "seq_mis": seq_mis.tolist()}
out["geo_rs"] = geo_rs.tolist()
out["losses"] = {
    "grpo": loss("vanilla", "token-mean", 0.2, 0.3),
    "grpo tis": loss("vanilla", "token-mean", 0.2, 0.3, tis),
    "grpo icepop": loss("vanilla", "token-mean", 0.2, 0.3, icepop),
    "gspo": loss("gspo", "seq-mean-token-mean", 0.05, 0.06),
    "gspo tis": loss("gspo", "seq-mean-token-mean", 0.05, 0.06, tis),
    "gspo icepop": loss("gspo", "seq-mean-token-mean", 0.05, 0.06, icepop),
    "gspo seq_mis": loss("gspo", "seq-mean-token-mean", 0.05, 0.06, seq_mis),
    "gmpo": loss("geo_mean", "token-mean", 0.1, 0.15),
}
_, _, every = compute_rollout_correction_and_rejection_mask(
    old, rollout, mask, rollout_is="token", rollout_is_threshold=1e6, rollout_rs=None
)
out["off_policy"] = {name: float(value) for name, value in compute_offpolicy_metrics(old, rollout, mask).items()}
out["off_policy"]["ess"] = float(every["rollout_corr/rollout_is_eff_sample_size"])
out["off_policy"]["fractions"] = float(tis_metrics["rollout_is_ratio_fraction_high"]) + float(
    tis_metrics["rollout_is_ratio_fraction_low"]
)
batch = DataProto.from_dict(
    tensors={"rollout_log_probs": rollout, "old_log_probs": old, "response_mask": mask, "responses": mask}
)
out["debug"] = {name: float(value) for name, value in calculate_debug_metrics(batch).items()}
with open(sys.argv[2], "w") as file:
    json.dump(out, file)
