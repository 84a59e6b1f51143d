"""The file that tells a trainer which routes to force: the fields of `router_replay`, and a stored score if the policy ranks one.

    # fisher.yaml
    mode: R3                      # must be the trainer's own mode; enabled: false keeps its transport and forces nothing
    policy: fisher
    unit: token_layer             # or slot
    budget: 0.25                  # share of the recorded routes; none for policies full and threshold
    seed: 0
    scores: scores.safetensors    # replay/score_file.py; relative to this file

YAML or JSON by suffix. What is written here is checked before a trainer starts; a field that is unknown, missing or without
effect is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from rar_lib.config import RouterReplayConfig, explain, read_values
from rar_lib.errors import ConfigError
from rar_lib.replay.policies import get_policy, require_policy
from rar_lib.replay.score_file import StoredScore, load_score


class PolicyFile(RouterReplayConfig):
    """What a policy file may say."""

    scores: str | None = Field(None, description="file of expert scores, relative to the policy file")


@dataclass(frozen=True, eq=False)
class ReplayPolicy:
    """A checked policy file.

    Attributes:
        replay: which routes are forced.
        stored: the score that the policy ranks, if it ranks one.
        path: where it came from.

    Raises:
        ConfigError: for fields that do not go together, scores that are missing or have no effect, or recorded gates.
    """

    replay: PolicyFile
    stored: StoredScore | None = None
    path: Path | None = None

    def __post_init__(self) -> None:
        replay = self.replay
        if replay.arm == "none":
            return
        require_policy(replay.policy, replay.unit, replay.budget, replay.ratio)
        needs_score = "score" in get_policy(replay.policy).needs
        if needs_score != (self.stored is not None):
            raise ConfigError(
                f"scores: policy {replay.policy} "
                + ("ranks experts and needs a file of scores" if needs_score else "ranks no scores of experts")
                + f", found {'none' if self.stored is None else self.stored.score.id}"
            )
        if replay.gates != "live":
            raise ConfigError(f"gates: other trainers replay ids only; expected live, found {replay.gates!r}")

    def __str__(self) -> str:
        replay = self.replay
        if replay.arm == "none":
            return "none"
        share = f" at {replay.budget}" if replay.budget is not None else ""
        share = f" at ratio {replay.ratio}" if replay.ratio is not None else share
        return f"{replay.policy}{share} of {replay.mode}, unit {replay.unit}, seed {replay.seed}"


def load_policy(path: str | Path) -> ReplayPolicy:
    """Read and check a policy file, and the scores that it names.

    Raises:
        ConfigError: names the file, the field, what is allowed and what was found.
    """
    path = Path(path)
    values = read_values(path, "policy")
    if not isinstance(values, dict):
        raise ConfigError(f"policy file {path}: expected a mapping, found {type(values).__name__}")
    try:
        replay = PolicyFile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"policy file {path}: {explain(error, PolicyFile)}") from None
    stored = None if replay.scores is None else load_score(path.parent / replay.scores)
    try:
        return ReplayPolicy(replay, stored, path)
    except ConfigError as error:
        raise ConfigError(f"policy file {path}: {error}") from None
