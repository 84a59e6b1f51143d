"""A plan of one sequence: exact share, the same whatever is planned beside it, and what is wrong with routes named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.errors import ConfigError, ReplayError
from rar_lib.integrations.policy_file import PolicyFile, ReplayPolicy
from rar_lib.integrations.sequences import NO_ROUTE, REFUSED, Routers, SequencePlanner
from rar_lib.replay.policies import POLICIES
from rar_lib.replay.score_file import StoredScore
from rar_lib.replay.scores import ExpertScore

E, K = 8, 2
ROUTERS = Routers(E, K, (1, 3), 4)  # layers 0 and 2 are dense


def planner(**fields: Any) -> SequencePlanner:
    stored = None
    if "fisher" in fields.get("policy", ""):
        values = np.arange(2.0 * E).reshape(2, E)
        stored = StoredScore(ExpertScore(values, np.ones_like(values), "gate", "per_route", "rollout", 1.0), (1, 3))
    return SequencePlanner(ReplayPolicy(PolicyFile(**fields), stored), ROUTERS)


def routes(tokens: int, seed: int = 0, layers: int = 2) -> torch.Tensor:
    made = np.argsort(np.random.default_rng(seed).random((tokens, layers, E)), -1)[..., :K]
    return torch.from_numpy(made.astype(np.uint8))


def every(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, dtype=torch.bool)


MATCHED = [
    {"policy": name, "unit": unit, "budget": "3/10"}
    for name in ("uniform", "random_route", "random_cell", "fisher", "permuted_fisher", "inverse_fisher")
    for unit in ("token_layer", "slot")
    if unit in POLICIES[name]().units
]


@pytest.mark.parametrize("fields", MATCHED, ids=lambda f: f"{f['policy']}-{f['unit']}")
def test_the_share_is_met_in_every_sequence_whatever_stands_beside_it(fields: dict[str, str]) -> None:
    one, other = planner(**fields), planner(**fields)
    sequences = [routes(n, seed) for seed, n in enumerate((13, 7, 1))]
    first = [one.plan(s, every(len(s))) for s in sequences]
    again = [other.plan(s, every(len(s))) for s in reversed(sequences)][::-1]
    for given, a, b in zip(sequences, first, again, strict=True):
        assert torch.equal(a, b)
        forced = a >= 0
        assert torch.equal(a[forced].int(), given[forced].int())
        units, total = (forced, given.numel()) if fields["unit"] == "slot" else (forced.all(-1), len(given) * 2)
        assert int(units.sum()) == (3 * total + 5) // 10
        assert fields["unit"] == "slot" or torch.equal(forced.any(-1), forced.all(-1))
    assert one.counts.planned.sum() == other.counts.planned.sum() == sum((3 * len(s) * 2 * (K if fields["unit"] == "slot" else 1) + 5) // 10 for s in sequences)  # fmt: skip


def test_seeds_and_sequences_draw_differently() -> None:
    given = routes(40)
    plans = [planner(policy="random_route", budget="1/2", seed=s).plan(given, every(40)) for s in (0, 0, 1)]
    assert torch.equal(plans[0], plans[1])
    assert not torch.equal(plans[0], plans[2])


def test_uniform_rounds_up_another_cell_in_every_sequence() -> None:
    """One token, two layers, one of the two cells: the same layer for all sequences would be a choice of layers."""
    half = planner(policy="uniform", budget="1/2")
    taken = torch.stack([(half.plan(routes(1, s), every(1)) >= 0).all(-1)[0] for s in range(40)])
    assert (taken.sum(1) == 1).all()
    assert 10 < int(taken[:, 0].sum()) < 30


def test_fisher_takes_the_cells_of_highest_score() -> None:
    given = torch.tensor([[[0, 7], [0, 1]], [[2, 3], [7, 6]]])
    found = planner(policy="fisher", unit="slot", budget="1/2").plan(given, every(2))
    assert found.tolist() == [[[-1, -1], [0, 1]], [[-1, -1], [7, 6]]]  # layer 3 scores 8 to 15, layer 1 0 to 7
    whole = planner(policy="fisher", budget="1/4").plan(given, every(2))
    assert whole.tolist() == [[[-1, -1], [-1, -1]], [[-1, -1], [7, 6]]]


def test_dense_layers_unknown_rows_and_missing_cells_stay_native() -> None:
    given = routes(5, layers=4)
    given[1, 3] = 0
    known = torch.tensor([True, True, True, True, False])
    full = planner(policy="full")
    found = full.plan(given, known)
    assert (found[:, [0, 2]] == NO_ROUTE).all()
    assert (found[4] == NO_ROUTE).all()
    assert (found[1, 3] == NO_ROUTE).all()
    assert torch.equal(found[:4, 1], given[:4, 1].short())
    assert full.counts.expected.tolist() == [4, 4]
    assert full.counts.recorded.tolist() == [4, 3]
    nothing = planner(enabled=False)
    native = nothing.plan(given, known)
    assert torch.equal(native == NO_ROUTE, found == NO_ROUTE)
    assert (native[native != NO_ROUTE] == -1).all()
    assert nothing.counts.recorded.tolist() == [4, 3]


def test_one_expert_a_token_is_expert_0_and_not_missing() -> None:
    single = SequencePlanner(ReplayPolicy(PolicyFile()), Routers(E, 1, (0,), 1))
    assert single.plan(torch.zeros(3, 1, 1, dtype=torch.int16), every(3)).tolist() == [[[0]]] * 3


def test_many_experts_keep_their_numbers() -> None:
    wide = SequencePlanner(ReplayPolicy(PolicyFile()), Routers(300, 2, (0,), 1))
    assert wide.plan(torch.tensor([[[255, 299]]]), every(1)).tolist() == [[[255, 299]]]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ([3, 3], r"expected 2 different experts, found \[3, 3\] at token 2, layer 3"),
        ([8, 1], r"expected ids from 0 to 7, found \[8, 1\] at token 2, layer 3"),
        ([-1, 1], r"expected ids from 0 to 7, found \[-1, 1\] at token 2, layer 3"),
    ],
)
def test_faulty_routes_are_named(cell: list[int], message: str) -> None:
    given = routes(4).short()
    given[2, 1] = torch.tensor(cell)
    with pytest.raises(ReplayError, match=message):
        planner(policy="full").plan(given, every(4))
    rows = every(4)
    rows[2] = False
    planner(policy="full").plan(given, rows)  # nobody asks for that row


def test_faulty_shapes_are_named() -> None:
    with pytest.raises(ReplayError, match="expected 4 layers, or the 2 MoE layers"):
        planner(policy="full").plan(routes(4, layers=3), every(4))
    with pytest.raises(ReplayError, match=r"expected \(5, 2, 2\)"):
        planner(policy="full").plan(routes(4), every(5))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_needs_more_than_a_sequence_is_refused_by_name(name: str) -> None:
    unit = "bias" if name == "bias" else "slot"
    with pytest.raises(ConfigError, match=f"policy {name} cannot be had inside another trainer"):
        planner(policy=name, unit=unit, budget="1/2")


def test_every_policy_is_either_had_or_refused() -> None:
    had = {f["policy"] for f in MATCHED} | {"full", "threshold"}
    assert had | set(REFUSED) == set(POLICIES)
    assert not had & set(REFUSED)


def test_scores_of_another_model_are_refused() -> None:
    values = np.ones((2, E))
    stored = StoredScore(ExpertScore(values, values, "gate", "per_route", "rollout", 1.0), (0, 1))
    policy = ReplayPolicy(PolicyFile(policy="fisher", budget="1/2"), stored)
    with pytest.raises(ConfigError, match=r"expected MoE layers \(1, 3\).*found \(0, 1\)"):
        SequencePlanner(policy, ROUTERS)
