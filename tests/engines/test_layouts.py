"""Every layout computes what one process computes: Megatron's DP, TP with SP, EP, ETP, PP, VPP and recompute, and FSDP2.

On one fixed batch, under no replay, R3 and a Fisher plan of slots, log-probs and all gradients lie within three times the
float32 error of one process, routes are the same (no margin of the batch is near a tie), counts are exact, and what every rank
executed is what was resolved. Batch and layouts are awkward on purpose: 15 sequences of up to 13 tokens do not divide by 2 or 4.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rar_lib.checkpoint import load_tokenizer
from rar_lib.config import JobConfig, TaskConfig
from rar_lib.engines.base import Replay
from rar_lib.engines.hf_rollout import HFRollout
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.hf_weights import _to_names
from rar_lib.engines.logits import response_logprobs
from rar_lib.engines.megatron_model import require_layout
from rar_lib.errors import ConfigError, EngineError
from rar_lib.replay.contexts import replaying
from rar_lib.replay.control import wrong_routes
from rar_lib.replay.policies import make_plan
from rar_lib.replay.policy import Candidates
from rar_lib.replay.scores import expert_score
from rar_lib.tasks import Task
from tests.conftest import SPECIAL, hf_config, sample
from tests.engines.fp64 import AsFloat64, reference_model
from tests.engines.layout_ranks import SIGNALS, Pull, build, measure

ROOT = Path(__file__).resolve().parents[2]
FACTOR = 3.0
PLANS = ("none", "R3", "fisher")
TWO = (
    "tensor_parallel=1",
    "expert_parallel=2",
    "expert_parallel=2,dispatcher=alltoall",
    "tensor_parallel=2",
    "tensor_parallel=2,expert_tensor_parallel=2",
    "pipeline_parallel=2",
    "pipeline_parallel=2,virtual_pipeline=2",
    "engine=hf",
)
FOUR = (
    "expert_parallel=4,dispatcher=alltoall",
    "tensor_parallel=2,expert_parallel=2",
    "tensor_parallel=2,expert_parallel=2,expert_tensor_parallel=2",
    "pipeline_parallel=2,expert_parallel=2",
    "pipeline_parallel=2,tensor_parallel=2",
)
FULL, SELECTIVE = ",recompute=true", ",recompute=true,recompute_granularity=selective"
LAYOUTS = [
    *((2, layout + again) for layout in TWO for again in ("", FULL)),
    (2, "expert_parallel=2,dispatcher=alltoall" + SELECTIVE),
    (2, "pipeline_parallel=2" + SELECTIVE),
    *((4, layout + again) for layout in FOUR for again in ("", FULL)),
]


@pytest.fixture(scope="module")
def given(checkpoint: Path) -> dict[str, Any]:
    """The batch, its plans and wrong routes."""
    config, tokenizer = hf_config(), load_tokenizer(checkpoint)
    trainer = HFTrainer(checkpoint, config.trainer, config.algorithm)
    rollout = HFRollout(checkpoint, config.rollout, SPECIAL)
    rollout.load_weights(trainer.weights(), 0)
    sampled = sample(rollout, tokenizer, Task(TaskConfig()), 5, 3, start=105)  # no margin below 8e-4
    batch, trace = sampled.batch, sampled.result.trace
    seen = trainer.logprobs(batch, temperature=1.0, capture="margins", signals=SIGNALS)
    assert seen.trace is not None
    assert seen.signals is not None
    score = expert_score(
        seen.signals, seen.trace, "gate", "per_route", shrinkage=32.0, groups=batch.groups.numpy(), seed=0
    )
    plan = make_plan("fisher", Candidates(trace, batch.uids, 0, 0, seen.trace, score=score), "slot", "0.4")
    assert (len(batch), batch.tokens.shape[1]) == (15, 13)
    return {
        "path": checkpoint,
        "batch": batch,
        "advantages": torch.linspace(-1, 1, len(batch)),
        "replays": {"none": None, "R3": Replay.full(trace), "fisher": Replay(trace, plan)},
        "wrong": Replay.full(wrong_routes(trace)),
    }


@pytest.fixture(scope="module")
def single(given: dict[str, Any], checkpoint: Path) -> dict[str, dict[str, Any]]:
    """One process, by engine."""
    return {engine: measure(build(f"engine={engine}", checkpoint), given) for engine in ("megatron", "hf")}


@pytest.fixture(scope="module")
def errors(given: dict[str, Any], single: dict[str, Any], checkpoint: Path) -> dict[str, dict[str, float]]:
    """Largest float32 error of one process, against float64: of log-probs and of gradients, by plan."""
    trainer = build("engine=hf", checkpoint)
    exact = reference_model(checkpoint, trainer.weights())
    batch, pull, found = given["batch"], Pull(given["advantages"]), {}
    tokens = int(batch.response_mask.sum())
    for name, replay in given["replays"].items():
        exact.zero_grad()
        with AsFloat64():
            if replay is None:
                logits = exact(input_ids=batch.tokens, use_cache=False).logits
            else:
                with replaying(exact, replay.trace, replay.plan):
                    logits = exact(input_ids=batch.tokens, use_cache=False).logits
            logp = response_logprobs(logits, batch.tokens, batch.response_mask, 1.0)
            (pull(logp, torch.arange(len(batch)))[0][batch.response_mask].sum() / tokens).backward()
        true = _to_names(exact, {n: p.grad for n, p in exact.named_parameters()})
        for engine, one in single.items():
            mine = one[name]
            found[f"{engine} {name}"] = {
                "logp": float((mine["old"].logprobs - logp.detach()).abs().max()),
                "gradient": max(float((mine["gradients"][n] - true[n]).abs().max()) for n in true),
                "largest": max(float(t.abs().max()) for t in true.values()),
            }
    return found


@pytest.fixture(scope="module")
def launched(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All layouts, in one launch for each number of processes."""
    folder, found = tmp_path_factory.mktemp("layouts"), {}
    torch.save(given, folder / "given.pt")
    for size in (2, 4):
        layouts = [layout for n, layout in LAYOUTS if n == size]
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size),
            "-m", "tests.engines.layout_ranks", str(folder / "given.pt"), str(folder / f"{size}.pt"), *layouts,
        ]  # fmt: skip
        with (folder / f"{size}.log").open("wb") as log:  # not a pipe, which an orphan could keep open
            done = subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=500, check=False
            )
        assert done.returncode == 0, (folder / f"{size}.log").read_text()[-3000:]
        found |= torch.load(folder / f"{size}.pt", weights_only=False)
    return found


def engine_of(layout: str) -> str:
    return "hf" if "engine=hf" in layout else "megatron"


@pytest.fixture(params=[layout for _, layout in LAYOUTS])
def layout(request: Any) -> str:
    return request.param


def test_no_choice_of_the_batch_is_near_a_tie(
    given: dict[str, Any], single: dict[str, Any], errors: dict[str, Any]
) -> None:
    """Margins of the ranked logits against what float32 does to log-probs, which is more than it does to a router's logits."""
    for engine, one in single.items():
        trace = one["none"]["old"].trace
        assert trace.margins[trace.recorded].min() > 10 * errors[f"{engine} none"]["logp"]
    for one in errors.values():
        assert 0 < one["logp"] < 1e-4
        assert 0 < one["gradient"] < 1e-4 * one["largest"]


@pytest.mark.parametrize("plan", PLANS)
def test_log_probs_gradients_and_routes(layout: str, plan: str, launched: Any, single: Any, errors: Any) -> None:
    engine = engine_of(layout)
    one, many, error = single[engine][plan], launched[layout][plan], errors[f"{engine} {plan}"]
    assert float((many["old"].logprobs - one["old"].logprobs).abs().max()) <= FACTOR * error["logp"]
    assert torch.equal(many["update"].logprobs, many["old"].logprobs)  # before the first update the ratio is 1
    assert many["gradients"].keys() == one["gradients"].keys()
    for name, gradient in one["gradients"].items():
        assert float((many["gradients"][name] - gradient).abs().max()) <= FACTOR * error["gradient"], name
    assert many["update"].loss == pytest.approx(one["update"].loss, abs=FACTOR * error["logp"])
    assert many["update"].statistics == one["update"].statistics
    a, b = one["old"].trace, many["old"].trace
    assert b.header == a.header
    np.testing.assert_array_equal(b.experts, a.experts)
    np.testing.assert_array_equal(b.status, a.status)
    np.testing.assert_allclose(b.margins, a.margins, atol=1e-4)


@pytest.mark.parametrize("plan", PLANS)
def test_counts_are_those_of_one_process_and_exact_on_every_rank(
    layout: str, plan: str, launched: Any, single: Any
) -> None:
    engine = engine_of(layout)
    one, many = (found[plan]["update"].counts for found in (single[engine], launched[layout]))
    for field in fields(one):
        if field.name in ("compared",):  # recompute and padding included
            continue
        assert getattr(many, field.name) == pytest.approx(getattr(one, field.name), rel=1e-3, abs=1e-7), field.name
    for rank in launched[layout]["ranks"]:
        if plan != "none":
            assert rank[plan].compared > 0
            assert rank[plan].differing == 0  # executed == resolved
            assert rank[plan].forced_units > 0
        assert rank["left"] == 0


def test_own_routes_are_a_no_op_and_wrong_ones_move_every_rank(layout: str, launched: Any, given: Any) -> None:
    found, mask = launched[layout], given["batch"].response_mask
    native = found["none"]["old"].logprobs
    assert torch.equal(found["own"].logprobs, native)
    moved = (found["wrong"].logprobs - native).abs().where(mask, 0).amax(-1)
    assert (moved > 1e-3).all()  # every sequence
    np.testing.assert_array_equal(
        found["wrong"].trace.experts[found["wrong"].trace.recorded],
        given["wrong"].trace.experts[given["wrong"].trace.recorded],
    )
    for rank in found["ranks"]:
        assert rank["wrong"].changed_cells == rank["wrong"].forced_units > 0
        assert rank["wrong"].differing == 0


def test_signals_for_scores(layout: str, launched: Any, single: Any, errors: Any) -> None:
    one, many = (found["seen"] for found in (single[engine_of(layout)], launched[layout]))
    for name in ("gates", "logit_grad", "gate_grad"):
        a, b = getattr(one.signals, name), getattr(many.signals, name)
        np.testing.assert_allclose(b, a, atol=3e-5 * np.abs(a).max(), err_msg=name)
    assert torch.equal(many.logprobs, launched[layout]["none"]["old"].logprobs)


def test_the_step_and_its_clipping(layout: str, launched: Any, single: Any) -> None:
    """The gradient norm counts every parameter once; then AdamW moves each weight as one process does."""
    one, many = single[engine_of(layout)], launched[layout]
    assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert one["grad_norm"] > 0.05  # so that it was clipped
    for name, weight in one["weights"].items():
        assert float((many["weights"][name] - weight).abs().max()) < 2e-5, name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["processes=2", "tensor_parallel=4"],
            r"processes 2 must be a multiple of tensor_parallel 4 x pipeline_parallel 1",
        ),
        (
            ["processes=2", "expert_parallel=4"],
            r"expert_parallel 4 x expert_tensor_parallel 1 must divide the 2 processes",
        ),
        (["virtual_pipeline=2"], r"virtual_pipeline 2 needs pipeline_parallel above 1"),
        (["engine=hf", "processes=2", "tensor_parallel=2"], r"hf shards with FSDP2 .* tensor_parallel 2"),
        (["context_parallel=2"], r"no such field"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig.build({}, [f"trainer.{one}" for one in settings])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("processes=4,tensor_parallel=4", r"tensor_parallel 4 must divide num_key_value_heads, found 2"),
        (
            "processes=3,pipeline_parallel=3",
            r"pipeline_parallel x virtual_pipeline 3 must divide num_hidden_layers, found 4",
        ),
        ("processes=3,expert_parallel=3", r"expert_parallel 3 must divide num_experts, found 16"),
        (
            "processes=4,tensor_parallel=2,expert_parallel=2,expert_tensor_parallel=2,dispatcher=alltoall",
            r"alltoall with expert_parallel 2 and expert_tensor_parallel 2 needs collectives .* gloo does not have",
        ),
    ],
)
def test_layouts_that_do_not_fit_the_model_are_refused(settings: str, message: str, checkpoint: Path) -> None:
    from rar_lib.checkpoint import load_model_config

    config = JobConfig.build({}, [f"trainer.{one}" for one in settings.split(",")])
    with pytest.raises(EngineError, match=message):
        require_layout(load_model_config(checkpoint), config.trainer)
