"""Plugin for verl 0.9.1: a replay policy in its Megatron engine, where verl alone replays every route or none.

    actor_rollout_ref.model.external_lib=rar_lib.integrations.verl            (or the entry point of group verl.plugins)
    actor_rollout_ref.actor.megatron.router_replay.mode=R3
    actor_rollout_ref.actor.megatron.router_replay.replay_file=/path/policy.yaml   (or RAR_REPLAY_POLICY=/path/policy.yaml)

Importing this module imports nothing of verl: it waits for verl's Megatron engine to be imported and wraps five functions,
which pass through until an engine with a policy is built. An engine that cannot do what its policy file asks is not
built, and says why: verl swallows what a plugin raises at import, so nothing is refused there. What is wrapped:

    EngineRegistry.new                      refuses another backend's engine for which a policy was given
    MegatronEngine.initialize               reads the policy, checks, takes the routers of the engine's own model
    set_router_replay_data                  routes of a micro-batch, sequence by sequence: the plan is written into them
    MegatronEngine.forward_backward_batch   counts of a pass, beside verl's metrics
    MegatronEngine.disable_adapter          the reference of LoRA is the actor without it; that pass is made native

In verl's log the counts are actor/rar/old/* and actor/rar/update/*: of this rank, its layers and rows, as the rank with the
outputs reports them to verl, which averages over data parallel ranks and mini-batches. verl reports none of the old pass's own
metrics, so its counts are in those of the updates that follow. The reference model does not replay: verl switches replay off in
an engine of its own, the plugin where it is the actor without its adapter. Recording (R2) is verl's own.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from rar_lib.engines.megatron_router import refuse_unreplayable
from rar_lib.errors import EngineError, RarError
from rar_lib.integrations.pass_counts import pass_metrics
from rar_lib.integrations.policy_file import ReplayPolicy, load_policy
from rar_lib.integrations.routers import RouterState, counts_of, decoder_routers, describe, take_routers
from rar_lib.integrations.sequences import PlanCounts, SequencePlanner, require_available

VERSION = "0.9.1"
VARIABLE = "RAR_REPLAY_POLICY"
ENGINE = "verl.workers.engine.megatron.transformer_impl"
REGISTRY = "verl.workers.engine.base"
# verl's loggers stay at WARNING, and a policy that is active must show
logger = logging.getLogger(__name__)

# What is called here, and with which parameters. verl moves fast: a changed signature is refused, not guessed at.
SIGNATURES: dict[str, tuple[str, ...]] = {
    "MegatronEngine.initialize": ("self",),
    "MegatronEngine.forward_backward_batch": ("self", "data", "loss_function", "forward_only"),
    "MegatronEngine.disable_adapter": ("self",),
    "tu.assign_non_tensor": ("tensor_dict", "kwargs"),
    "tu.get_non_tensor_data": ("data", "key", "default"),
    "set_router_replay_data": (
        "layers_topk_idx", "attention_mask", "tf_config", "vp_rank", "replay_mask", "local_cp_size", "model",
    ),
    "RouterReplay.set_target_indices": ("self", "topk_indices", "replay_mask"),
    "RouterReplay.get_replay_topk": ("self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk"),
    "RouterReplay.clear_indices": ("self",),
}  # fmt: skip


class Attached:
    """A policy on the model of one engine.

    Attributes:
        policy: what is forced.
        planner: plans the sequences of a micro-batch.
        states: of the routers on this rank.
        metrics: of the last pass that replayed, by `old` (forward only) and `update`.
        is_reference: the adapter is off, and the model is the reference.
    """

    def __init__(self, model: Any, config: Any, policy: ReplayPolicy) -> None:
        refuse_unreplayable(config)
        routers = describe(config)
        self.policy, self.planner = policy, SequencePlanner(policy, routers)
        self.states: list[RouterState] = take_routers(model, config, self, policy.replay)
        self._local = [routers.moe_layers.index(state.layer) for state in self.states]
        self._planned = self._recorded = self.is_reference = False
        self.metrics: dict[str, dict[str, float]] = {}

    def require_planned(self) -> None:
        """Routes that come to the routers by another way than set_router_replay_data carry no plan.

        Raises:
            EngineError: for such routes.
        """
        if not self._planned:
            raise EngineError(
                "verl gave routes to its routers that the plugin did not see; the policy has no effect there"
            )

    @contextmanager
    def reference(self, without_adapter: AbstractContextManager[Any]) -> Iterator[None]:
        """Passes inside are of the reference model."""
        with without_adapter:
            self.is_reference = True
            try:
                yield
            finally:
                self.is_reference = False

    def require_own_record(self, has_routes: bool, forward_only: bool) -> None:
        """R2 replays what the old pass recorded, and verl records there only if the batch brings no routes.

        Raises:
            EngineError: for routes before anything was recorded: they are the rollout's, and R2 would be R3.
        """
        if self.policy.replay.mode != "R2" or self._recorded:
            return
        if has_routes:
            raise EngineError(
                "router_replay.mode=R2: expected a batch without routes before the first recording, found routed_experts, "
                "which are the rollout's; set actor_rollout_ref.rollout.enable_rollout_routing_replay=False, or mode R3"
            )
        self._recorded = forward_only

    def begin(self) -> None:
        """A new pass."""
        self.planner.counts = PlanCounts.empty(len(self.planner.routers.moe_layers))
        for state in self.states:
            state.begin()

    def finish(self, forward_only: bool) -> dict[str, list[float]]:
        """Metrics for verl, under rar/; empty for a pass without replay. A list of one each: verl joins the lists of ranks.

        Raises:
            ReplayError: if a router did not ask for its routes.
        """
        counts = counts_of(self.states)
        if not any(state.targets for state in self.states):
            return {}
        kind = "old" if forward_only else "update"
        self.metrics[kind] = pass_metrics(self.planner.counts, self._local, counts)
        shown = {"old": self.metrics["old"]} if forward_only else self.metrics
        return {f"rar/{k}/{name}": [value] for k, values in shown.items() for name, value in values.items()}

    def plan(self, routes: torch.Tensor, known: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Jagged `[B, j, L, K]` routes with their plan written in, and jagged `[B, j]` bool, rows that may replay.

        Raises:
            EngineError: for routes that are not jagged.
            ReplayError: see SequencePlanner.plan.
        """
        if not routes.is_nested:
            raise EngineError("routed_experts: expected jagged routes, a sequence each, found a padded batch")
        rows = list(routes.unbind())
        masks = (
            [torch.ones(len(r), dtype=torch.bool, device=r.device) for r in rows]
            if known is None
            else [m.to(r.device).bool() for m, r in zip(known.unbind(), rows, strict=True)]
        )
        planned = [self.planner.plan(r, m) for r, m in zip(rows, masks, strict=True)]
        jagged = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
        return jagged(planned), jagged(masks)


def attached(model: Any) -> Attached | None:
    """What acts on a model (or its pipeline chunks), or None."""
    for router in decoder_routers(model):
        state = getattr(router.router_replay, "rar", None)
        return None if state is None else state.owner
    return None


def find_fault(module: Any) -> str | None:
    """Why verl's Megatron engine is not the one that this plugin knows, or None."""
    found = getattr(sys.modules.get("verl"), "__version__", None)
    if found != VERSION:
        return f"expected verl {VERSION}, found {found}"
    for name, expected in SIGNATURES.items():
        owner: Any = module
        for part in name.split("."):
            owner = getattr(owner, part, None)
        if owner is None:
            return f"expected {name} in {module.__name__}, found none"
        parameters = tuple(inspect.signature(owner).parameters)
        if parameters != expected:
            return f"{name}: expected the parameters {', '.join(expected)}, found {', '.join(parameters)}"
    return None


def policy_of(engine: Any) -> ReplayPolicy | None:
    """The policy that an engine is to act under, checked against the engine's settings, or None.

    Raises:
        RarError: for a faulty file, and for settings under which the policy would not act as it says.
    """
    config = engine.engine_config
    path = config.router_replay.replay_file or os.environ.get(VARIABLE)
    # the reference model and a critic live beside the actor and see the same variable
    if not path or config.forward_only or getattr(engine, "is_value_model", False):
        return None
    policy, mode = load_policy(Path(path)), config.router_replay.mode
    require_available(policy)
    if policy.replay.mode != mode:
        raise EngineError(
            f"{path}: mode {policy.replay.mode}, but actor.megatron.router_replay.mode is {mode}; they must agree "
            "(enabled: false keeps verl's transport and forces nothing)"
        )
    if mode == "disabled":
        return None
    if not config.use_remove_padding:
        raise EngineError(
            "use_remove_padding=False: verl 0.9.1 then replays routes onto other tokens than they were recorded for; "
            "set actor_rollout_ref.model.use_remove_padding=True"
        )
    return policy


def _asked(engine: Any) -> bool:
    replay = getattr(getattr(engine, "engine_config", None), "router_replay", None)
    return bool(getattr(replay, "replay_file", None) or os.environ.get(VARIABLE))


def install(module: Any) -> None:
    """Wrap the functions of verl's Megatron engine module. Nothing is refused before an engine with a policy is built."""
    fault = find_fault(module)
    engine_class = getattr(module, "MegatronEngine", None)
    initialize = getattr(engine_class, "initialize", None)
    if engine_class is None or initialize is None:
        logger.error("rar: no policy can act: %s", fault)
        return

    @functools.wraps(initialize)
    def with_policy(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if fault is not None and _asked(self):
                raise EngineError(f"the replay policy was refused: {fault}")
            policy = None if fault is not None else policy_of(self)
            result = initialize(self, *args, **kwargs)
            if policy is not None:
                self.rar = Attached(self.module, self.tf_config, policy)
                layers = [state.layer for state in self.rar.states]
                logger.warning("rar: active in verl %s: %s, layers %s of this rank", VERSION, policy, layers)
        except RarError as error:
            logger.error("rar: refused: %s", error)
            raise
        return result

    engine_class.initialize = with_policy
    if fault is None:
        engine_class.forward_backward_batch = _counted(engine_class.forward_backward_batch, module.tu)
        engine_class.disable_adapter = _as_reference(engine_class.disable_adapter)
        module.set_router_replay_data = _planned(module.set_router_replay_data)


def _counted(original: Callable[..., Any], tu: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        acting: Attached | None = getattr(self, "rar", None)
        if acting is not None and acting.is_reference:
            tu.assign_non_tensor(data, enable_routing_replay=False)
        if acting is None or not tu.get_non_tensor_data(data, "enable_routing_replay", False):
            return original(self, data, loss_function, forward_only)
        try:
            acting.require_own_record(data.get("routed_experts", None) is not None, forward_only)
        except EngineError as error:
            logger.error("rar: refused: %s", error)
            raise
        acting.begin()
        output = original(self, data, loss_function, forward_only)
        found = acting.finish(forward_only)
        if "metrics" in output:  # the last pipeline stage
            output["metrics"].update(found)
        return output

    return forward_backward_batch


def _as_reference(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def disable_adapter(self: Any) -> Any:
        acting: Attached | None = getattr(self, "rar", None)
        context = original(self)
        return context if acting is None else acting.reference(context)

    return disable_adapter


def _planned(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_router_replay_data(
        layers_topk_idx: Any,
        attention_mask: Any,
        tf_config: Any,
        vp_rank: int | None = None,
        replay_mask: Any = None,
        local_cp_size: int | None = None,
        model: Any = None,
    ) -> None:
        acting = attached(model) if model is not None else None
        if acting is not None and layers_topk_idx is not None:
            layers_topk_idx, replay_mask = acting.plan(layers_topk_idx, replay_mask)
            acting._planned = True
        try:
            original(layers_topk_idx, attention_mask, tf_config, vp_rank, replay_mask, local_cp_size, model)
        finally:
            if acting is not None:
                acting._planned = False

    return set_router_replay_data


def install_registry(module: Any) -> None:
    """Other engines replay by other means or not at all: under them a policy would do nothing, without a word."""
    original = module.EngineRegistry.new.__func__

    @functools.wraps(original)
    def new(cls: Any, model_type: str, backend: str, *args: Any, **kwargs: Any) -> Any:
        engine = original(cls, model_type, backend, *args, **kwargs)
        forward_only = getattr(getattr(engine, "engine_config", None), "forward_only", False)
        if backend != "megatron" and model_type == "language_model" and not forward_only and _asked(engine):
            error = EngineError(
                f"a replay policy was given for engine {backend}; policies act in verl's Megatron engine only"
            )
            logger.error("rar: refused: %s", error)
            raise error
        return engine

    module.EngineRegistry.new = classmethod(new)


_INSTALL = {ENGINE: install, REGISTRY: install_registry}


class _WhenImported(importlib.abc.MetaPathFinder):
    """Installs the plugin in the modules of verl that it waits for, once each is imported."""

    def __init__(self) -> None:
        self.waiting = {name for name in _INSTALL if name not in sys.modules}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.waiting:
            return None
        self.waiting.remove(name)  # so that the search below goes on to the other finders
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _INSTALL[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# A module is executed once: nothing here runs twice, whether verl finds the entry point, the external library, or both.
for _name, _install in _INSTALL.items():
    if _name in sys.modules:
        _install(sys.modules[_name])
sys.meta_path.insert(0, _WhenImported())
