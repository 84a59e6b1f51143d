"""Lesson: what the updates of one batch learn from, and the loss that comes of it.

    loss of a token = weight * objective(γ * exp(new - anchor), A) * kept,  averaged as the objective says

The objective forms and clips ratios, the corrections give weights and masks. What looks at old and rollout alone is fixed for all
updates of the batch; what looks at the live policy (OPSM, RSPO) is computed inside each. Only Geo-RS changes the normaliser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rar_lib.config import AlgorithmConfig
from rar_lib.engines.base import Objective
from rar_lib.errors import ConfigError
from rar_lib.metrics.replay import router_probabilities
from rar_lib.rl.corrections import (
    geo_rs_keep,
    icepop_weights,
    opsm_keep,
    router_shift_weights,
    seq_mis_weights,
    tis_weights,
)
from rar_lib.rl.objectives import OBJECTIVES
from rar_lib.traces.trace import RouteTrace


def needs_routers(algorithm: AlgorithmConfig) -> bool:
    """Whether the objective looks at router scores, in the old pass and in every update."""
    return any(one.name == "rspo" for one in algorithm.corrections)


@dataclass(frozen=True)
class Lesson:
    """One batch, scored and rewarded.

    Attributes:
        algorithm: objective, anchor, corrections.
        logp_rollout, logp_old: `[S, T]` float32 in nats, 0 outside the mask.
        advantages: `[S]` float32.
        mask: `[S, T]` bool, response tokens.
        old_routes: routes that the old pass executed, with scores; only for corrections that look at routers.
    """

    algorithm: AlgorithmConfig
    logp_rollout: torch.Tensor
    logp_old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    old_routes: RouteTrace | None = None

    def objective(self, share: torch.Tensor) -> Objective:
        """The loss of the rows of one update; picklable, since it may travel to the ranks of a trainer.

        Args:
            share: `[n]` int64, rows of the batch.

        Raises:
            ConfigError: if a correction looks at routers and the old pass kept no scores.
        """
        algorithm, mask = self.algorithm, self.mask[share]
        mu, old = self.logp_rollout[share], self.logp_old[share]
        chosen: dict[str, Any] = {one.name: one for one in algorithm.corrections}
        kept = mask
        if "geo_rs" in chosen:
            kept = geo_rs_keep(old, mu, mask, chosen["geo_rs"].low, chosen["geo_rs"].high)
        return ShareObjective(
            algorithm, mask, self.advantages[share], mu, mu if algorithm.anchor == "rollout" else old,
            _weights(chosen, old, mu, mask), kept, _scale(OBJECTIVES[algorithm.objective][1], mask, kept),
            self._old_routers(share) if "rspo" in chosen else None,
        )  # fmt: skip

    def _old_routers(self, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Probabilities `[n, T, L, E]`, ids `[n, T, L, K]` and whether a token was routed in every layer `[n, T]`."""
        trace = self.old_routes
        if trace is None or trace.scores is None:
            raise ConfigError("correction rspo: the old pass kept no router scores to compare with")
        part = trace.select(share.tolist())
        assert part.scores is not None
        width = self.mask.shape[1]
        inside = np.arange(width)[None, :] < part.lengths[:, None]
        r = np.full((*inside.shape, *part.scores.shape[1:]), 1.0)
        ids = np.zeros((*inside.shape, *part.experts.shape[1:]), np.int64)
        known = np.zeros(inside.shape, bool)
        r[inside], ids[inside] = router_probabilities(np.asarray(part.scores)), part.experts
        known[inside] = part.recorded.all(-1)
        return torch.from_numpy(r), torch.from_numpy(ids), torch.from_numpy(known)


@dataclass(frozen=True)
class ShareObjective:
    """See `Objective` in engines/base.py: the loss of the n rows of one update, with all that is fixed for it.

    Attributes:
        algorithm: objective and corrections.
        mask, kept: `[n, T]` bool, response tokens, and those that rejection left.
        advantages: `[n]`.
        logp_rollout, anchor: `[n, T]` in nats.
        weight: `[n, T]` importance weights, or None.
        scale: `[n, T]`, turns the mean over all response tokens of the update into the objective's own mean.
        routers: of the old pass: probabilities `[n, T, L, E]` float64, executed ids `[n, T, L, K]` int64, and whether
            a token was routed in every layer `[n, T]` bool; None without RSPO.
    """

    algorithm: AlgorithmConfig
    mask: torch.Tensor
    advantages: torch.Tensor
    logp_rollout: torch.Tensor
    anchor: torch.Tensor
    weight: torch.Tensor | None
    kept: torch.Tensor
    scale: torch.Tensor
    routers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    def __call__(
        self, logp: torch.Tensor, rows: torch.Tensor, scores: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See `Objective`."""
        algorithm, here, gamma = self.algorithm, self.mask[rows], None
        chosen: dict[str, Any] = {one.name: one for one in algorithm.corrections}
        if self.routers is not None:
            assert scores is not None
            r_old, ids, known = (x[rows] for x in self.routers)
            gamma = router_shift_weights(r_old, _probabilities(scores), ids, known, chosen["rspo"].floor)
        stays, a = self.kept[rows], self.advantages[rows]
        if "opsm" in chosen:
            stays = stays & opsm_keep(logp, self.logp_rollout[rows], a, here, chosen["opsm"].delta)
        # What is dropped is whole answers, so the ratios of those that stay are those under the full mask.
        loss, _ = OBJECTIVES[algorithm.objective]
        terms, sums = loss(logp, self.anchor[rows], a, stays, algorithm.clip_low, algorithm.clip_high, gamma)
        terms = terms * self.scale[rows]
        weight = None if self.weight is None else self.weight[rows]
        sums["kept"] = float((stays & (weight != 0)).sum() if weight is not None else stays.sum())
        if weight is not None:
            terms = terms * weight
            sums["weight"] = float(weight[here].sum())
        if gamma is not None:
            sums["gamma"] = float(gamma[here].sum())
        return terms, sums


def _weights(chosen: dict[str, Any], old: torch.Tensor, mu: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
    """Importance weights `[n, T]` of the one correction that gives them; None without one."""
    if "tis" in chosen:
        return tis_weights(old, mu, mask, chosen["tis"].cap)
    if "icepop" in chosen:
        return icepop_weights(old, mu, mask, chosen["icepop"].low, chosen["icepop"].high)
    if "seq_mis" in chosen:
        return seq_mis_weights(old, mu, mask, chosen["seq_mis"].cap)
    return None


def _scale(mean: str, mask: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """`[n, T]`: what turns the trainer's mean over all response tokens of the update into the objective's own mean."""
    tokens = mask.sum()
    if mean == "token":
        return (tokens / kept.sum().clamp_min(1)).expand(mask.shape)
    lengths = kept.sum(-1, keepdim=True)
    return (tokens / ((lengths > 0).sum().clamp_min(1) * lengths.clamp_min(1))).expand(mask.shape)


def _probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Ranked scores `[n, T, L, E]` as probabilities, float64."""
    return torch.from_numpy(router_probabilities(scores.detach().float().cpu().numpy()))
