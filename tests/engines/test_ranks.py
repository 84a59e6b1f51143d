"""Ranks in processes of their own: runs, errors with the rank, a rank killed in mid-step, and state that moves between layouts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch

from rar_lib.config import JobConfig
from rar_lib.engines import remote_trainer, session
from rar_lib.engines.base import Replay
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.megatron_trainer import MegatronTrainer
from rar_lib.engines.remote_trainer import RankGroup, RemoteTrainer
from rar_lib.engines.session import EngineSession
from rar_lib.errors import ConfigError, DivergedError, EngineError, RarError, ReplayError
from rar_lib.job import run_job
from rar_lib.rl.learning import Lesson
from tests.conftest import Sampled
from tests.engines.layout_ranks import SIGNALS

ROOT = Path(__file__).resolve().parents[2]
RUN = [
    "rollout.engine=hf", "trainer.processes=2", "trainer.micro_batch_size=16", "steps=3", "checkpoint_every=1",
    "algorithm.prompts_per_step=8", "algorithm.group_size=4", "algorithm.updates_per_batch=2", "evaluation.prompts=8",
    "diagnostics.probe_sequences=4",
]  # fmt: skip


FISHER = ("router_replay.policy=fisher", "router_replay.unit=slot", "router_replay.budget=1/4")


def config(*overrides: str) -> JobConfig:
    return JobConfig.build({}, ["trainer.processes=2", "trainer.micro_batch_size=32", *overrides])


def ranks_of(group: RankGroup) -> dict[int, psutil.Process]:
    children = psutil.Process(group._launcher.pid).children(recursive=True)
    return {int(p.environ()["RANK"]): p for p in children if "RANK" in p.environ()}


class Failing:
    """An objective that one rank cannot compute, and which the others then wait for."""

    def __init__(self, rank: int | None, error: type[Exception] | None = ValueError) -> None:
        self.rank, self.error = rank, error

    def __call__(self, logp: torch.Tensor, rows: torch.Tensor, scores: Any = None) -> Any:
        if self.error is None:
            return logp * torch.inf, {}
        if self.rank is None or os.environ["RANK"] == str(self.rank):
            raise self.error("no loss today")
        return -logp, {}


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    made = RankGroup(2)
    yield made
    folder = made.folder
    made.close()
    assert not folder.exists()  # nothing failed, so nothing is left


@pytest.fixture
def engines(group: RankGroup) -> EngineSession:
    """A session that takes the ranks that are there; not closed, since they are not its own."""
    made = EngineSession()
    made._ranks = group
    return made


@pytest.fixture
def trainer(group: RankGroup, checkpoint: Path) -> RemoteTrainer:
    one = config("trainer.expert_parallel=2")
    return RemoteTrainer(group, checkpoint, one.trainer, one.algorithm)


def test_what_all_ranks_raise_is_raised_as_it_is_and_the_group_goes_on(
    trainer: RemoteTrainer, checkpoint: Path, sampled: Sampled
) -> None:
    before = trainer.logprobs(sampled.batch, temperature=1.0).logprobs
    half = sampled.result.trace.select([0, 1])
    with pytest.raises(ReplayError, match=r"^the batch has 128 sequences, the trace to replay 2$"):
        trainer.logprobs(sampled.batch, temperature=1.0, replay=Replay.full(half))
    with pytest.raises(DivergedError, match=r"^no loss today$"):
        trainer.update(sampled.batch, Failing(None, DivergedError), temperature=1.0)
    assert torch.equal(trainer.logprobs(sampled.batch, temperature=1.0).logprobs, before)
    with pytest.raises(EngineError, match=r"trainer, update: what is sent to the ranks must be picklable .*lambda"):
        trainer.update(sampled.batch, lambda logp, rows, scores=None: (-logp, {}), temperature=1.0)
    with pytest.raises(DivergedError, match=r"^gradient norm is (nan|inf): the update was not taken$"):
        trainer.update(sampled.batch, Failing(None, None), temperature=1.0)
    assert torch.equal(trainer.logprobs(sampled.batch, temperature=1.0).logprobs, before)
    other = config("trainer.pipeline_parallel=2", "trainer.virtual_pipeline=3")
    with pytest.raises(
        EngineError, match=r"^trainer: pipeline_parallel x virtual_pipeline 6 must divide num_hidden_layers, found 4$"
    ):
        RemoteTrainer(trainer._group, checkpoint, other.trainer, other.algorithm)
    with pytest.raises(
        EngineError, match=r"its ranks serve another trainer since"
    ):  # the one before went with its process groups
        trainer.logprobs(sampled.batch, temperature=1.0)


def test_ranks_serve_one_trainer_at_a_time(group: RankGroup, checkpoint: Path, sampled: Sampled) -> None:
    """The numbers of the second would be those of another model."""
    one = config()
    first, second = (RemoteTrainer(group, checkpoint, one.trainer, one.algorithm) for _ in range(2))
    with pytest.raises(EngineError, match=r"trainer, logprobs: its ranks serve another trainer since"):
        first.logprobs(sampled.batch, temperature=1.0)
    second.logprobs(sampled.batch, temperature=1.0)


def test_layout_after_layout_leaves_nothing_in_the_ranks(group: RankGroup, checkpoint: Path) -> None:
    """Process groups hold threads and sockets."""
    layouts = [
        "trainer.engine=hf",
        "trainer.expert_parallel=2",
        "trainer.tensor_parallel=2",
        "trainer.pipeline_parallel=2",
    ]
    held = []
    for _ in range(3):
        for layout in layouts:
            one = config(layout)
            RemoteTrainer(group, checkpoint, one.trainer, one.algorithm)
        held.append([(p.num_fds(), p.num_threads()) for p in ranks_of(group).values()])
    for before, after in zip(held[1], held[2], strict=True):
        assert after[0] <= before[0] + 4
        assert after[1] <= before[1] + 4


@pytest.mark.parametrize(
    "layout", ["pipeline_parallel=2", "pipeline_parallel=2,virtual_pipeline=2", "engine=hf", "expert_parallel=2"]
)
@pytest.mark.parametrize(("sequences", "shares"), [(10, 4), (7, 3), (8, 3), (1, 1)])
def test_shares_that_are_not_equal(
    group: RankGroup, checkpoint: Path, sampled: Sampled, layout: str, sequences: int, shares: int
) -> None:
    """Evaluation and the control of a run score any number of answers, in the parts of its updates."""
    batch = replace(sampled.batch.select(torch.arange(sequences)), shares=shares)
    many = config("trainer.micro_batch_size=3", *(f"trainer.{one}" for one in layout.split(",")))
    alone = JobConfig.build({}, [f"trainer.engine={many.trainer.engine}"])
    single = {"megatron": MegatronTrainer, "hf": HFTrainer}[many.trainer.engine](
        checkpoint, alone.trainer, alone.algorithm
    )
    one = single.logprobs(batch, temperature=1.0, capture=True)
    found = RemoteTrainer(group, checkpoint, many.trainer, many.algorithm).logprobs(
        batch, temperature=1.0, capture=True
    )
    assert float((found.logprobs - one.logprobs).abs().max()) < 2e-5
    assert one.trace is not None
    assert found.trace is not None
    assert found.trace.equals(replace(one.trace, header=found.trace.header))


@pytest.mark.parametrize("engine", ["megatron", "hf"])
def test_state_moves_between_layouts_and_to_one_process(
    group: RankGroup, checkpoint: Path, sampled: Sampled, tmp_path: Path, engine: str
) -> None:
    """Stop under EP = 2 (FSDP2), go on under PP = 2 (one process): weights bit by bit, the next step up to float summation."""
    batch, mask = sampled.batch, sampled.batch.response_mask
    first = config(f"trainer.engine={engine}", *(["trainer.expert_parallel=2"] if engine == "megatron" else []))
    trainer: Any = RemoteTrainer(group, checkpoint, first.trainer, first.algorithm)
    old = trainer.logprobs(batch, temperature=1.0).logprobs
    lesson = Lesson(first.algorithm, sampled.mu, old, torch.linspace(-1, 1, len(batch)), mask)
    objective = lesson.objective(torch.arange(len(batch)))
    for _ in range(2):
        trainer.update(batch, objective, temperature=1.0)
    for signals in (None, SIGNALS):  # passes without a backward of their own, or only part of one
        trainer.logprobs(batch, temperature=1.0, capture=True, signals=signals)
    trainer.save(tmp_path)
    saved = dict(trainer.weights())
    went_on = trainer.update(batch, objective, temperature=1.0).grad_norm, dict(trainer.weights())
    assert sorted(f.name for f in tmp_path.iterdir()) == [f"trainer-0000{i}-of-00002.safetensors" for i in (1, 2)]

    alone = JobConfig.build({}, [f"trainer.engine={engine}", "trainer.micro_batch_size=32"])
    single = {"megatron": MegatronTrainer, "hf": HFTrainer}[engine](checkpoint, alone.trainer, alone.algorithm)
    other = config("trainer.pipeline_parallel=2") if engine == "megatron" else first
    readers: list[Any] = [single, RemoteTrainer(group, checkpoint, other.trainer, other.algorithm)]
    for reader in readers:
        reader.load(tmp_path)
        for name, tensor in reader.weights():
            assert torch.equal(tensor, saved[name]), name
        norm = reader.update(batch, objective, temperature=1.0).grad_norm
        assert norm == pytest.approx(went_on[0], rel=1e-4)
        for name, tensor in reader.weights():
            assert float((tensor - went_on[1][name]).abs().max()) < 2e-6, name
    (tmp_path / "trainer-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        EngineError, match=r"expected the 2 files of a trainer's state, found \['trainer-00001-of-00002"
    ):
        single.load(tmp_path)


def test_a_rank_that_fails_alone_is_named_with_its_log(
    checkpoint: Path, sampled: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_trainer, "GRACE", 3.0)
    group = RankGroup(2)
    one = config()
    trainer = RemoteTrainer(group, checkpoint, one.trainer, one.algorithm)
    processes = ranks_of(group)
    with pytest.raises(EngineError, match=r"rank 1 of 2: ValueError: no loss today \(log: .*stderr\.log\)") as caught:
        trainer.update(sampled.batch, Failing(1), temperature=1.0)
    log = Path(str(caught.value).rpartition("log: ")[2].rstrip(")"))
    assert "ValueError: no loss today" in log.read_text()
    assert not group.alive
    with pytest.raises(EngineError, match=r"trainer, logprobs: the ranks are gone; open the engines again"):
        trainer.logprobs(sampled.batch, temperature=1.0)
    psutil.wait_procs(processes.values(), timeout=20)
    assert not any(p.is_running() for p in processes.values())


def test_a_run_whose_rank_is_killed_in_mid_step_resumes_to_the_same_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobConfig.build({}, [*RUN, "trainer.expert_parallel=2"])
    call, updates = RankGroup.call, 0
    killed: dict[int, psutil.Process] = {}

    def counted(self: RankGroup, name: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal updates
        if name == "update":
            updates += 1
            if updates == 4:  # the second of the second step
                killed.update(ranks_of(self))
                os.kill(killed[1].pid, signal.SIGKILL)
        return call(self, name, *args, **kwargs)

    monkeypatch.setattr(RankGroup, "call", counted)
    with EngineSession() as engines:
        with pytest.raises(
            EngineError, match=r"rank 1 of 2 \(process \d+\) was ended by signal 9 \(SIGKILL\); the other ranks"
        ):
            run_job(job, engines, runs_dir=tmp_path / "killed", show="off")
        psutil.wait_procs(killed.values(), timeout=20)
        assert not any(p.is_running() for p in killed.values())
        (run,) = [p for p in (tmp_path / "killed").iterdir() if p.is_dir()]
        assert not (run / "summary.json").exists()
        assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000001"]
        resumed = run_job(job, engines, runs_dir=tmp_path / "killed", show="off")
        whole = run_job(job, engines, runs_dir=tmp_path / "whole", show="off")
    tables = [r.metrics.drop(columns=[c for c in r.metrics if c.startswith("time/")]) for r in (resumed, whole)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


def test_a_run_on_several_processes_is_the_run_on_one(engines: EngineSession, tmp_path: Path) -> None:
    """The rollout and its tokens are the same until weights have moved; so is all that was measured on them."""
    first = [
        run_job(JobConfig.build({}, [*RUN, *more]), engines, runs_dir=tmp_path, show="off").metrics.iloc[0]
        for more in (["trainer.processes=1"], ["trainer.pipeline_parallel=2"])
    ]
    for name in (
        "reward/mean",
        "mismatch/rollout_old/k3",
        "update/grad_norm",
        "agreement/router_flip",
        "replay/coverage",
    ):
        if name in first[0]:
            assert first[1][name] == pytest.approx(first[0][name], rel=2e-3), name
    assert first[0]["mismatch/rollout_old/k3"] > 0


@pytest.mark.parametrize("layout", ["engine=hf", "expert_parallel=2,dispatcher=alltoall"])
def test_a_run_whose_updates_do_not_divide_by_the_ranks(engines: EngineSession, tmp_path: Path, layout: str) -> None:
    """9 answers an update on 2 ranks: fillers must round like themselves in the old pass and in the update, or new/old is not 1."""
    sizes = [
        "algorithm.prompts_per_step=6",
        "algorithm.group_size=3",
        "trainer.micro_batch_size=2",
        "evaluation.prompts=3",
    ]
    job = JobConfig.build({}, [*RUN, *sizes, *(f"trainer.{one}" for one in layout.split(","))])
    run = run_job(job, engines, runs_dir=tmp_path, show="off")
    assert len(run.metrics) == 3
    assert (run.metrics["replay/update/executed_equals_resolved"] == 1).all()


def family_of(pid: int, size: int) -> list[psutil.Process]:
    """What a process has started, as soon as it is so many."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = psutil.Process(pid).children(recursive=True)
        if len(found) + 1 >= size:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{size} processes did not start")


DRIVER = """
import time
from rar_lib.engines.remote_trainer import RankGroup
group = RankGroup(2)
print(group._launcher.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("early", [False, True])
def test_ranks_end_with_the_process_that_drives_them(early: bool) -> None:
    """Also while they still import their engines."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert driver.stdout is not None
    if early:
        processes = family_of(driver.pid, 4)
    else:
        launcher = psutil.Process(int(driver.stdout.readline()))
        processes = [launcher, *launcher.children(recursive=True)]
    assert len(processes) >= 3
    driver.kill()
    driver.wait()
    driver.stdout.close()
    until = time.monotonic() + 30
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        assert time.monotonic() < until, [p.cmdline() for p in processes if p.is_running()]
        time.sleep(0.2)


def test_ranks_that_do_not_come_up_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(EngineError, match=r"rank \d of 2 .* ended with status 1.*log: "):
        RankGroup(2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["trainer.pipeline_parallel=2", "algorithm.corrections=rspo"],
            r"rspo looks at the router scores .* pipeline_parallel 2",
        ),
        (["trainer.pipeline_parallel=2", "trainer.virtual_pipeline=3"], r"must divide num_hidden_layers, found 4"),
        (
            ["trainer.expert_parallel=2", *FISHER, "router_replay.score=swap"],
            r"score estimator swap .* expert_parallel 2",
        ),
        (
            ["trainer.engine=hf", *FISHER, "router_replay.score=param"],
            r"score estimator param .* trainer.engine hf, processes 2",
        ),
    ],
)
def test_what_a_layout_cannot_do_is_refused_before_anything_starts(
    settings: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineSession, "open", lambda *_: pytest.fail("an engine was started"))
    with pytest.raises(RarError, match=message):
        run_job(JobConfig.build({}, [*RUN, *settings]), runs_dir=tmp_path, show="off")


def test_auto_does_not_forget_what_hf_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "available", lambda engine: engine != "megatron")
    job = JobConfig.build({}, ["trainer.engine=auto", "trainer.processes=2", "trainer.tensor_parallel=2"])
    with pytest.raises(ConfigError, match=r"trainer.engine hf shards with FSDP2 .* tensor_parallel 2"):
        session.resolve_engines(job, lambda _: None)


def test_two_machines_share_the_ranks(
    checkpoint: Path, sampled: Sampled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both on this one: the driver starts the first agent, a command the second, with a rank each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    second = {**os.environ, "RAR_NODES": "2", "RAR_NODE": "1", "RAR_ENDPOINT": endpoint, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "second.log").open("wb") as log:
        other = subprocess.Popen(
            [sys.executable, "-m", "rar_lib.engines.launcher", str(tmp_path / "second"), "2"],
            env=second, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    monkeypatch.setenv("RAR_NODES", "2")
    monkeypatch.setenv("RAR_ENDPOINT", endpoint)
    try:
        group = RankGroup(2)
        assert list(ranks_of(group)) == [0]
        one = config("trainer.expert_parallel=2")
        trainer = RemoteTrainer(group, checkpoint, one.trainer, one.algorithm)
        alone = JobConfig.build({}, ["trainer.micro_batch_size=32"])
        single = MegatronTrainer(checkpoint, alone.trainer, alone.algorithm)
        gap = (
            trainer.logprobs(sampled.batch, temperature=1.0).logprobs
            - single.logprobs(sampled.batch, temperature=1.0).logprobs
        )
        assert float(gap.abs().max()) < 1e-5
        group.close()
        assert other.wait(30) == 0, (tmp_path / "second.log").read_text()[-2000:]
    finally:
        other.kill()
        other.wait()
