"""The adapter on Megatron-Core's own RouterReplay, driven as NeMo-RL and SkyRL drive it: set_replay_data, two actions, clear."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.engines.megatron_cpu import import_megatron, start_parallel_state, stop_parallel_state, without_cuda
from rar_lib.errors import ConfigError, EngineError, ReplayError
from rar_lib.integrations import megatron as adapter
from rar_lib.integrations.policy_file import PolicyFile, ReplayPolicy
from tests.integrations.packed_model import packed_config, packed_model

LENGTHS = [[7, 5], [9, 4]]  # of two micro-batches
POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "none": {"enabled": False},
    "random": {"policy": "random_route", "unit": "slot", "budget": "2/5"},
    "sets": {"policy": "random_route", "budget": "2/5"},
    "threshold": {"policy": "threshold", "unit": "slot", "ratio": 0.5},
}


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    import_megatron()
    start_parallel_state()
    yield
    stop_parallel_state()


@pytest.fixture
def replay() -> Iterator[Any]:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    yield RouterReplay
    RouterReplay.clear_global_router_replay_instances()


def build(recompute: bool = False, on: bool = True) -> Any:
    config = packed_config(recompute)
    config.moe_enable_routing_replay = on
    with without_cuda():
        return packed_model(config)


def policy(name: str) -> ReplayPolicy:
    return ReplayPolicy(PolicyFile(**POLICIES[name]))


def batches() -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Packed token ids and the routes of each sequence, a micro-batch each."""
    rng, config = np.random.default_rng(0), packed_config()
    shape = (config.num_layers, config.num_moe_experts)
    return [
        (
            torch.from_numpy(rng.integers(0, 100, (1, sum(lengths)))),
            [torch.from_numpy(np.argsort(rng.random((n, *shape)), -1)[..., : config.moe_router_topk]) for n in lengths],
        )
        for lengths in LENGTHS
    ]


def forward(model: Any, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends, ends, ends, max(lengths), max(lengths))
    return model(input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=packed)


def train(model: Any, replay: Any, acting: Any) -> tuple[list[torch.Tensor], torch.Tensor, list[Any]]:
    """Two forwards, then two backwards, as a pipeline does. Returns logits, gradients, and what each router call did."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action

    seen: list[Any] = []
    for module in model.modules():
        if getattr(module, "router_replay", None) is not None:
            module.register_forward_hook(
                lambda m, args, out: seen.append((m.layer_number, torch.nn.functional.linear(args[0], m.weight).detach()[:, 0], out[1].clone()))
            )  # fmt: skip
    losses, logits = [], []
    with without_cuda():
        for (ids, routes), lengths in zip(batches(), LENGTHS, strict=True):
            if replay is not None:
                planned = torch.cat([r if acting is None else acting.plan(r) for r in routes])
                replay.set_replay_data([t.contiguous().long() for t in planned.unbind(1)])
                replay.set_global_router_replay_action(Action.REPLAY_FORWARD)
            out = forward(model, ids, lengths)
            logits.append(out.detach().clone())
            losses.append(out.square().mean())
            if replay is not None:
                replay.set_global_router_replay_action(Action.REPLAY_BACKWARD)
        for loss in losses:
            loss.backward()
    return logits, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), seen


def test_full_is_megatrons_own_replay_and_none_is_native(replay: Any) -> None:
    own = train(build(), replay, None)
    replay.clear_global_router_replay_instances()
    native = train(build(on=False), None, None)
    assert not torch.equal(own[0][0], native[0][0])
    for name, expected in (("full", own), ("none", native)):
        replay.clear_global_router_replay_instances()
        model = build()
        found = train(model, replay, adapter.attach(model, policy(name)))
        assert all(map(torch.equal, found[0], expected[0])), name
        assert torch.equal(found[1], expected[1]), name


@pytest.mark.parametrize("name", list(POLICIES))
def test_executed_sets_counts_and_recompute(name: str, replay: Any) -> None:
    results = []
    for recompute in (False, True):
        replay.clear_global_router_replay_instances()
        model = build(recompute)
        acting = adapter.attach(model, policy(name))
        logits, gradient, seen = train(model, replay, acting)
        results.append((logits, gradient))
        config = model.config
        calls, k = 2 * config.num_layers, config.moe_router_topk
        assert len(seen) == calls * (1 + recompute)
        forced_units = changed = 0
        for micro, (_, routes) in enumerate(batches()):
            wanted = torch.cat([acting.plan(r) for r in routes])
            for layer in range(config.num_layers):
                number, scores, executed = seen[micro * config.num_layers + layer]
                assert number == layer + 1
                if name == "threshold":
                    p = scores.softmax(-1)
                    keep = p.gather(1, wanted[:, layer].long()) >= 0.5 * p.topk(k).values.amin(-1, keepdim=True)
                    wanted[:, layer] = torch.where(keep, wanted[:, layer], -1)
                for row, target in enumerate(wanted[:, layer].tolist()):
                    kept = {e for e in target if e >= 0}
                    rest = [e for e in scores[row].argsort(descending=True).tolist() if e not in kept]
                    assert set(executed[row].nonzero()[:, 0].tolist()) == kept | set(rest[: k - len(kept)])
                    changed += set(scores[row].topk(k).indices.tolist()) != set(executed[row].nonzero()[:, 0].tolist())
                forced = wanted[:, layer] >= 0
                by_slot = POLICIES[name].get("unit") == "slot"
                forced_units += int((forced if by_slot else forced.all(-1)).sum())
                if recompute:  # micro-batches backwards in the order of their forwards, layers in reverse
                    again = seen[calls + micro * config.num_layers + config.num_layers - 1 - layer]
                    assert again[0] == number
                    assert torch.equal(again[2], executed)
        assert all(s.compared == sum(map(sum, LENGTHS)) * (1 + recompute) for s in acting.states)
        metrics = acting.take_metrics()
        assert metrics["forced_units"] == forced_units
        assert metrics["changed_cells"] == changed
        assert metrics["executed_equals_resolved"] == 1.0
        queues = [len(r.replay_backward_list) for r in replay.global_router_replay_instances]
        assert queues == [0 if recompute else 2] * config.num_layers
        replay.clear_global_indices()
    (logits, gradient), (again_logits, again_gradient) = results
    assert all(map(torch.equal, logits, again_logits))
    assert torch.equal(gradient, again_gradient)


def test_what_does_not_hold_is_refused(replay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReplayError, match="found no router with a replay object"):
        adapter.attach(build(on=False), policy("full"))
    model = build()
    model.config.moe_router_fusion = True
    with pytest.raises(ReplayError, match="moe_router_fusion=True cannot be replayed"):
        adapter.attach(model, policy("full"))
    model.config.moe_router_fusion = False
    model.config.moe_router_num_groups = 4
    with pytest.raises(ReplayError, match="choose within 4 groups"):
        adapter.attach(model, policy("random"))
    model.config.moe_router_num_groups = None
    with pytest.raises(ConfigError, match="policy margin cannot be had"):
        adapter.attach(model, ReplayPolicy(PolicyFile(policy="margin", budget="1/2")))
    acting = adapter.attach(model, policy("random"))
    with pytest.raises(ReplayError, match="carries a policy already"):
        adapter.attach(model, policy("full"))
    ids, routes = batches()[0]
    unplanned = [t.contiguous() for t in torch.cat(routes).unbind(1)]
    with pytest.raises(ReplayError, match="targets were set before any routes were planned"):
        replay.set_replay_data(unplanned)
    acting.plan(routes[0])
    replay.set_replay_data([t[:-1] for t in unplanned])
    from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action

    replay.set_global_router_replay_action(Action.REPLAY_FORWARD)
    with without_cuda(), pytest.raises(ReplayError, match="layer 0: expected targets for"):
        forward(model, ids, LENGTHS[0])
    with pytest.raises(ReplayError, match=r"layers \[0, 1, 2, 3\] were given routes"):
        acting.take_metrics()
    monkeypatch.setattr(replay, "get_replay_topk", lambda self, scores, k: (scores, k))
    with pytest.raises(EngineError, match=r"RouterReplay.get_replay_topk: expected the parameters self, scores, topk"):
        adapter.require_known()
    monkeypatch.undo()
    monkeypatch.setattr(adapter.importlib.metadata, "version", lambda _: "0.17.0")
    with pytest.raises(EngineError, match=r"expected Megatron-Core 0.16.x, found 0.17.0"):
        adapter.require_known()


def test_other_models_keep_megatrons_object(replay: Any) -> None:
    first = build()
    second = build()
    adapter.attach(first, policy("none"))
    kinds = [type(r).__name__ for r in replay.global_router_replay_instances]
    layers = first.config.num_layers
    assert kinds == ["PlannedRouterReplay"] * layers + ["RouterReplay"] * layers
    assert all(isinstance(r, replay) for r in replay.global_router_replay_instances)
    assert second.config.num_layers == layers
