"""What a plan does to the routes of a pass: how much it asks for, how much of that binds, and what it gives up.

P = units planned, M = valid recorded units, R = recorded set, N = the router's native set, S = the executed set. "Native" is
`native_local` where N is the live choice inside the replayed forward, and `native_free` where it comes from a forward without
any replay; they differ, because replay further up changes the hidden states. The caller's column names say which was given.

Ids are `[..., K]` integers; cells without a record (`known` false) are left out. What cannot be computed is None.
"""

from __future__ import annotations

import numpy as np
import torch

from rar_lib.metrics.agreement import overlap
from rar_lib.metrics.mismatch import Array, k3


def binding_share(planned: np.ndarray, recorded: np.ndarray, native: np.ndarray, known: np.ndarray) -> float | None:
    """Planned units whose route is not native anyway, over the valid units M. At most the nominal share.

    Args:
        planned: bool, `[N, L]` (a set binds if it is not the native set) or `[N, L, K]` (an expert binds if the native set
            lacks it).
        recorded, native: `[N, L, K]` ids.
        known: `[N, L]` bool, recorded on both sides.
    """
    foreign = ~(recorded[..., :, None] == native[..., None, :]).any(-1)
    if planned.ndim == 2:
        binds, valid = planned & foreign.any(-1), known
    else:
        binds, valid = planned & foreign, np.repeat(known[..., None], recorded.shape[-1], -1)
    total = int(valid.sum())
    return float((binds & valid).sum() / total) if total else None


def forced_routers(native: np.ndarray, executed: np.ndarray, known: np.ndarray) -> float | None:
    """Mean 1[S != N]: routers that executed another set than their own choice. Under full R3: router_flip(R, N).

    ids `[..., K]`, known `[...]` bool; None without a known cell.
    """
    if not known.any():
        return None
    return float((overlap(native, executed)[known] < native.shape[-1]).mean())


def fidelity(recorded: np.ndarray, executed: np.ndarray, known: np.ndarray) -> float | None:
    """Mean |S ∩ R| / K: 1 under full replay; grows along nested plans at fixed scores.

    ids `[..., K]`, known `[...]` bool; None without a known cell.
    """
    if not known.any():
        return None
    return float((overlap(recorded, executed)[known] / recorded.shape[-1]).mean())


def router_probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Ranked scores as probabilities over the experts: as they are where a row is a distribution already (routers that rank
    after a softmax), else their softmax (routers that rank logits, or biased sigmoids).

    Args:
        scores: `[..., E]`, -inf for experts that group limits exclude.

    Returns:
        `[..., E]` float64, on the same device.
    """
    wide = scores.double()
    given = (wide >= 0).all(-1, keepdim=True) & ((wide.sum(-1, keepdim=True) - 1).abs() < 1e-3)
    if wide.device.type == "cpu" and bool(given.all()):  # on a device, asking would wait for it
        return wide
    return torch.where(given, wide, wide.softmax(-1))


def regret(scores: np.ndarray, native: np.ndarray, executed: np.ndarray, known: np.ndarray) -> float | None:
    """Mean over cells of Σ_N p - Σ_S p, p the router_probabilities of the live scores: what is given up of them.

    >= 0, and 0 where S = N; grows along nested plans at fixed scores.

    Args:
        scores: `[N, L, E]`, the scores that were ranked, -inf for experts that group limits exclude.
        native, executed: `[N, L, K]` ids.
        known: `[N, L]` bool.

    Raises:
        ValueError: for an executed expert that the group limits exclude; it has no probability to compare.
    """
    if not known.any():
        return None
    chosen = np.take_along_axis(scores, executed, -1)[known]
    if np.isneginf(chosen).any():
        raise ValueError("regret: an executed expert lies outside the groups that the router allows; undefined there")
    p = router_probabilities(torch.tensor(scores)).numpy()
    given_up = np.take_along_axis(p, native, -1).sum(-1) - np.take_along_axis(p, executed, -1).sum(-1)
    return float(given_up[known].mean())


def efficiency(k3_none: float, k3_plan: float, k3_full: float, noise_floor: float) -> float | None:
    """(k3_none - k3_plan) / (k3_none - k3_R3), all in nats a token: 0 at none, 1 at R3.

    None where none and R3 differ by no more than the noise floor.
    """
    span = k3_none - k3_full
    return (k3_none - k3_plan) / span if abs(span) > noise_floor else None


def target_shift(replayed: Array, native: Array, mask: Array) -> float | None:
    """k3 of the native policy against the replayed one at the same θ, 0 for none: the bias that replay buys.

    Δ = log π_native - log π_replayed, so that it estimates KL(replayed‖native): the tokens come from the rollout, which
    the replayed policy follows. The other direction is carried by single tokens: where a flip makes a sampled token
    improbable natively, π_replayed/π_native has no bound (means of 20 nats a token were seen).

    Args:
        replayed, native: `[S, T]` log-probs of the same tokens, in nats.
        mask: `[S, T]` bool, response tokens.

    Raises:
        ValueError: if shapes differ, or a log-prob under the mask is not finite.
    """
    return k3(native, replayed, mask)


def drift(
    before: np.ndarray, after: np.ndarray, planned: np.ndarray, known: np.ndarray
) -> tuple[float | None, float | None]:
    """Share of cells whose native_free set differs between θ_old and θ: (planned cells, all other known cells).

    Replay that holds back what it forces shows here: less drift on planned cells than a random plan of the same size has.

    Args:
        before, after: `[N, L, K]` ids of forwards without replay.
        planned: bool `[N, L]`, or `[N, L, K]`, where a cell counts if any of its slots is planned.
        known: bool `[N, L]`.
    """
    cells = planned.any(-1) if planned.ndim == 3 else planned
    changed = overlap(before, after) < before.shape[-1]

    def share(where: np.ndarray) -> float | None:
        return float(changed[where].mean()) if where.any() else None

    return share(cells & known), share(~cells & known)


def verdict(
    residual: float,
    noise_floor: float,
    shift: float,
    shift_of_random: float,
    drift_planned: float | None = None,
    drift_planned_of_random: float | None = None,
) -> str:
    """What a policy is, by rule: `too weak`, `too restrictive`, both, or `neither`.

    Too weak: the mismatch that is left is above the noise floor. Too restrictive: the target shift is above that of the
    random control at the same budget, or the drift of planned cells is below it.

    Args:
        residual: k3 of rollout/old under the plan, in nats a token.
        noise_floor: k3 of an engine against itself.
        shift, shift_of_random: `target_shift` under the plan and under the control, in nats a token.
        drift_planned, drift_planned_of_random: `drift` of planned cells, as shares; not looked at where one is None.
    """
    weak = residual > noise_floor
    held = drift_planned is not None and drift_planned_of_random is not None and drift_planned < drift_planned_of_random
    restrictive = shift > shift_of_random or held
    names = [name for name, true in (("too weak", weak), ("too restrictive", restrictive)) if true]
    return " and ".join(names) or "neither"
