"""Other spellings of a config's fields: dotted keys, the flat names of a notebook's parameters cell, verl's launch keys.

The schema (config.py) knows nested groups and no more. Papermill passes plain scalars under short names, `--set` a dotted
path, and a recipe for verl its own switch; here each of them becomes the nested form, which is then validated once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rar_lib.errors import ConfigError


def _arm(value: Any) -> dict[str, Any]:
    if value not in ("none", "R2", "R3"):
        hint = " (a bare off or no reached Python as a boolean: quote it)" if isinstance(value, bool) else ""
        raise ConfigError(f"parameter 'policy': expected 'none', 'R2' or 'R3', found {value!r}{hint}")
    return {"router_replay.enabled": value != "none", "router_replay.mode": "disabled" if value == "none" else value}


def _engine(value: Any) -> dict[str, Any]:
    pairs = {"auto": ("auto", "auto"), "hf": ("hf", "hf"), "real": ("vllm", "megatron")}
    if value not in pairs:
        raise ConfigError(f"parameter 'engine': expected one of {', '.join(pairs)}, found {value!r}")
    return {"rollout.engine": pairs[value][0], "trainer.engine": pairs[value][1]}


def _zero_mismatch(value: Any) -> dict[str, Any]:
    trainers = {"rollout.dtype": "float32", "rollout.precision": "native"}
    return {"rollout.zero_mismatch": value, **(trainers if value is True else {})}


def _to(key: str) -> Any:
    return lambda value: {key: value}


FLAT_NAMES: dict[str, Any] = {
    "policy": _arm,
    "engine": _engine,
    "rollout_engine": _to("rollout.engine"),
    "trainer_engine": _to("trainer.engine"),
    "routes": _to("router_replay.policy"),
    "unit": _to("router_replay.unit"),
    "budget": lambda value: {"router_replay.budget": None if value == "" else value},
    "score": _to("router_replay.score"),
    "ratio": _to("router_replay.ratio"),
    "model": _to("model.path"),
    "task": _to("task.name"),
    "precision": _to("rollout.precision"),
    "rollout_dtype": _to("rollout.dtype"),
    "router_noise": _to("rollout.router_noise"),
    "temperature": _to("rollout.sampling.temperature"),
    "max_new_tokens": _to("rollout.sampling.max_new_tokens"),
    "trainer_dtype": _to("trainer.dtype"),
    "kernels": lambda value: {"rollout.kernels": value, "trainer.kernels": value},
    "micro_batch_size": _to("trainer.micro_batch_size"),
    "processes": _to("trainer.processes"),
    "tensor_parallel": _to("trainer.tensor_parallel"),
    "pipeline_parallel": _to("trainer.pipeline_parallel"),
    "expert_parallel": _to("trainer.expert_parallel"),
    "expert_tensor_parallel": _to("trainer.expert_tensor_parallel"),
    "dispatcher": _to("trainer.dispatcher"),
    "recompute": _to("trainer.recompute"),
    "prompts_per_step": _to("algorithm.prompts_per_step"),
    "group_size": _to("algorithm.group_size"),
    "updates_per_batch": _to("algorithm.updates_per_batch"),
    "objective": _to("algorithm.objective"),
    "anchor": _to("algorithm.anchor"),
    "corrections": _to("algorithm.corrections"),
    "freeze_router": _to("algorithm.freeze_router"),
    "gates": _to("router_replay.gates"),
    "clip_low": _to("algorithm.clip_low"),
    "clip_high": _to("algorithm.clip_high"),
    "lr": _to("algorithm.lr"),
    "zero_mismatch": _zero_mismatch,
    "eval_prompts": _to("evaluation.prompts"),
    "eval_every": _to("evaluation.every"),
    "steps": _to("steps"),
    "seed": _to("seed"),
    "checkpoint_every": _to("checkpoint_every"),
}


def from_flat(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The nested values of flat ones, and one line for each that is none of FLAT_NAMES or no value of its own."""
    tree: dict[str, Any] = {}
    faults: list[str] = []
    for name, value in parameters.items():
        if name not in FLAT_NAMES:
            faults.append(f"parameter {name!r}: expected one of {', '.join(sorted(FLAT_NAMES))}")
            continue
        try:
            for key, part in FLAT_NAMES[name](value).items():
                put(tree, key, part)
        except ConfigError as error:
            faults.append(str(error))
    return tree, faults


VERL_KEYS = (
    "actor_rollout_ref.actor.router_replay.mode",
    "actor_rollout_ref.actor.megatron.router_replay.mode",
)


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a value in nested groups, which are made where they are not there.

    Raises:
        ConfigError: if a part of the path is a value and not a group.
    """
    *parents, last = dotted.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{dotted}: {name} is a value, not a group of settings")
    tree[last] = value


def _pop_dotted(tree: dict[str, Any], dotted: str) -> Any:
    """Remove and return a value given as one dotted key or as nested groups; None if absent."""
    if dotted in tree:
        return tree.pop(dotted)
    head, _, rest = dotted.partition(".")
    inner = tree.get(head)
    if not rest:
        return tree.pop(head, None)
    if not isinstance(inner, dict):
        return None
    value = _pop_dotted(inner, rest)
    if not inner:
        del tree[head]
    return value


def adopt_verl_keys(tree: dict[str, Any]) -> None:
    """Replace verl's launch keys by `router_replay`, in place.

    Raises:
        ConfigError: if they contradict each other, or what `router_replay` says.
    """
    found = {key: value for key in VERL_KEYS if (value := _pop_dotted(tree, key)) is not None}
    own = tree.get("router_replay") or {}
    for key, mode in found.items():
        if own.get("mode", mode) != mode or len(set(found.values())) > 1:
            raise ConfigError(
                f"{key}={mode} contradicts another setting of the replay mode: {found | {'router_replay': own}}"
            )
        tree["router_replay"] = {**own, "mode": mode, "enabled": own.get("enabled", mode != "disabled")}
