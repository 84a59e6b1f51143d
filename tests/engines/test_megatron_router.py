"""Megatron's score rules on its real router, against an independent dense reference, with and without replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rar_lib.engines.megatron_cpu import import_megatron, start_parallel_state, without_cuda
from rar_lib.engines.megatron_router import point_router
from rar_lib.errors import ReplayError

E, K, HIDDEN = 8, 2, 16
RULES: dict[str, dict[str, Any]] = {
    "softmax after": {"moe_router_pre_softmax": False},
    "softmax before": {"moe_router_pre_softmax": True},
    "softmax before, scaled": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "sigmoid with bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "sigmoid with bias, groups, scaled": {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 4,
        "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5,
    },
    "softmax before, groups": {"moe_router_pre_softmax": True, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def groups() -> None:
    start_parallel_state()


def build(**settings: Any) -> Any:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.transformer_config import TransformerConfig

    import_megatron()
    with without_cuda():
        config = TransformerConfig(
            **{
                "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_moe_experts": E, "moe_router_topk": K,
                "moe_router_load_balancing_type": "none", "use_cpu_initialization": True, "add_bias_linear": False,
                **settings,
            }
        )  # fmt: skip
        router = point_router()(config, get_default_pg_collection())
        router.set_layer_number(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(E, HIDDEN, generator=torch.Generator().manual_seed(0)) * 0.5)
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.linspace(-0.2, 0.2, E))
    return router


def hidden(n: int = 12) -> torch.Tensor:
    return torch.randn(n, 1, HIDDEN, generator=torch.Generator().manual_seed(1))


def reference(router: Any, x: torch.Tensor, ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense probs `[n, E]` and ids `[n, K]`, written from the definition and nothing else; ids None: its own choice."""
    config = router.config
    logits = x.reshape(-1, HIDDEN) @ router.weight.detach().T
    sigmoid = config.moe_router_score_function == "sigmoid"
    scores = logits.sigmoid() if sigmoid else (logits.softmax(-1) if config.moe_router_pre_softmax else logits)
    ranked = scores + router.expert_bias if router.expert_bias is not None else scores
    if ids is None:
        if config.moe_router_num_groups:
            size = E // config.moe_router_num_groups
            best = ranked.reshape(len(ranked), -1, size).topk(K // config.moe_router_group_topk, -1).values.sum(-1)
            allowed = torch.zeros_like(best, dtype=torch.bool).scatter(
                1, best.topk(config.moe_router_group_topk).indices, True
            )
            ranked = ranked.masked_fill(~allowed.repeat_interleave(size, 1), -torch.inf)
        ids = ranked.topk(K, -1).indices
    weights = scores.gather(1, ids)
    if sigmoid:
        weights = weights / weights.sum(-1, keepdim=True)
    elif not config.moe_router_pre_softmax:
        weights = weights.softmax(-1)
    weights = weights * (config.moe_router_topk_scaling_factor or 1.0)
    return torch.zeros(len(ids), E).scatter(1, ids, weights), ids


def run(router: Any, x: torch.Tensor, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's dense probs and map, with these ids forced."""
    point = router.router_replay
    selectors = [] if ids is None else [lambda point, scores, native: ids]
    point.selectors.extend(selectors)
    try:
        with without_cuda():
            return router(x)
    finally:
        point.selectors.clear()
        point.begin()


@pytest.mark.parametrize("rule", list(RULES))
def test_rules_native_own_and_foreign(rule: str) -> None:
    router, x = build(**RULES[rule]), hidden()
    expected, chosen = reference(router, x, None)
    native, routing_map = run(router, x)
    assert torch.allclose(native, expected, atol=1e-6)
    assert torch.equal(routing_map.nonzero()[:, 1].reshape(-1, K), chosen.sort(-1).values)
    assert torch.equal(run(router, x, chosen)[0], native)
    foreign = (chosen + 1 + torch.arange(len(chosen))[:, None] % 3) % E
    forced, forced_map = run(router, x, foreign)
    expected, _ = reference(router, x, foreign)
    assert torch.allclose(forced, expected, atol=1e-6)
    assert torch.equal(forced_map.nonzero()[:, 1].reshape(-1, K), foreign.sort(-1).values)
    assert (forced.gather(1, foreign) > 0).all()


@pytest.mark.parametrize("rule", list(RULES))
def test_gradient_reaches_the_router_through_forced_weights(rule: str) -> None:
    router, x = build(**RULES[rule]), hidden()
    _, chosen = reference(router, x, None)
    foreign = (chosen + 1) % E
    probs, _ = run(router, x, foreign)
    (probs * torch.arange(1.0, E + 1)).sum().backward()
    assert (router.weight.grad[foreign.unique()].abs().sum(-1) > 0).all()


def test_mass_follows_the_rule_when_routes_drift() -> None:
    """Softmax before the pick is not renormalised, so mass falls as ids drift; softmax after always sums to 1."""
    x = hidden()
    before, after = build(moe_router_pre_softmax=True), build(moe_router_pre_softmax=False)
    worst = (x.reshape(-1, HIDDEN) @ before.weight.detach().T).topk(K, -1, largest=False).indices
    assert (run(before, x, worst)[0].sum(-1) < run(before, x)[0].sum(-1)).all()
    assert torch.allclose(run(after, x, worst)[0].sum(-1), torch.ones(12), atol=1e-6)


def test_expert_bias_counts_the_executed_map() -> None:
    router, x = build(**RULES["sigmoid with bias"]), hidden()
    forced = torch.tensor([[3, 5]]).repeat(12, 1)
    run(router, x, forced)
    assert router.local_tokens_per_expert.tolist() == [0, 0, 0, 12, 0, 12, 0, 0]
    with torch.no_grad():
        run(router, x, forced)  # scoring passes do not count
    assert router.local_tokens_per_expert.sum() == 24


def test_aux_loss_looks_at_the_live_choice() -> None:
    settings = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_router_pre_softmax": True}
    x = hidden()

    def gradient(ids: torch.Tensor | None) -> torch.Tensor:
        router = build(**settings)
        router.train()
        (run(router, x, ids)[0] * 0.0).sum().backward()  # only the auxiliary loss pulls
        return router.weight.grad

    forced = torch.tensor([[3, 5]]).repeat(12, 1)
    assert gradient(None).abs().max() > 0
    assert torch.allclose(gradient(None), gradient(forced), atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type=sinkhorn"),
        ({"moe_expert_capacity_factor": 1.5}, "moe_expert_capacity_factor=1.5"),
        ({"moe_input_jitter_eps": 0.01}, "moe_input_jitter_eps=0.01"),
        ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing=True"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        build(**settings)


def test_a_fused_router_is_refused_by_name() -> None:
    router = build()
    router.config.moe_router_fusion = True
    with pytest.raises(ReplayError, match="moe_router_fusion=True cannot be replayed: the fused kernel"):
        type(router)(router.config)


def test_context_parallel_is_refused_by_name() -> None:
    router = build()
    router.config.context_parallel_size = 2
    with pytest.raises(
        ReplayError, match="context_parallel_size=2 cannot be replayed: a process then holds two stretches"
    ):
        type(router)(router.config)
