"""Held-out evaluation: what is served, and beside it what the trainer believes it has.

The reward of the rollout engine on held-out prompts is what a user of the trained weights gets; nothing is replayed there. The trainer's
own policy never samples. Natively, and under the run's own replay, its reward on the same answers is estimated by reweighting
(metrics/reweighted.py), with the effective sample size beside it; and its k3 against the rollout says how far the served policy
is from the one that is being trained.
"""

from __future__ import annotations

from rar_lib.config import JobConfig
from rar_lib.engines.base import Rollout, Trainer
from rar_lib.measure import Row, rollout_logprobs
from rar_lib.metrics.mismatch import k3
from rar_lib.metrics.reweighted import reweighted_reward
from rar_lib.planner import Planner
from rar_lib.prompts import Prompts
from rar_lib.replay.modes import MODES
from rar_lib.seeding import derive_seed


def evaluate(
    config: JobConfig,
    rollout: Rollout,
    prompts: Prompts,
    trainer: Trainer | None = None,
    planner: Planner | None = None,
) -> Row:
    """One sample a held-out prompt, with the same draws each time.

    Args:
        config: of the run.
        rollout: at the weights to judge.
        prompts: of the run.
        trainer, planner: to measure the trainer's own policy too; without them only the served reward.

    Returns:
        reward; with a trainer also reward_native, ess_native, k3_native, and, in a mode that replays the rollout's record,
        reward_replayed, ess_replayed, k3_replayed (None in other modes); k3 in nats a token. Empty without held-out prompts.
    """
    if not config.evaluation.prompts:
        return {}
    problems = prompts.held_out()
    sample, batch = prompts.sample(rollout, problems, derive_seed(config.seed, "evaluation"), group_size=1)
    rewards = prompts.rewards(sample, problems)
    row: Row = {"reward": float(rewards.double().mean())}
    if trainer is None or planner is None:
        return row
    mu, mask, temperature = rollout_logprobs(batch, sample), batch.response_mask, config.rollout.sampling.temperature
    own = Planner(config.router_replay)  # the run's planner must not learn from this batch
    own.restore(planner.state())
    native = own.look(trainer, batch, config.steps, temperature)
    scored = {"native": native.logprobs, "replayed": None}
    if MODES[config.router_replay.arm].in_old_pass == "rollout":
        replay = own.plan(sample.trace, batch, config.steps, native)
        scored["replayed"] = trainer.logprobs(batch, temperature=temperature, replay=replay).logprobs
    for name, logp in scored.items():
        reward, ess = (None, None) if logp is None else reweighted_reward(rewards, logp, mu, mask)
        row |= {
            f"reward_{name}": reward,
            f"ess_{name}": ess,
            f"k3_{name}": None if logp is None else k3(logp, mu, mask),
        }
    return row
