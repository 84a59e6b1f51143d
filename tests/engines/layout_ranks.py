"""What test_layouts.py runs under torchrun: every layout on one fixed batch; the first rank writes what all of them found.

    torchrun --nproc-per-node N -m tests.engines.layout_ranks IN OUT LAYOUT...

A layout is trainer settings joined by commas. The reference, one process, goes through `measure` too.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from rar_lib.config import JobConfig
from rar_lib.engines.base import Replay
from rar_lib.engines.hf_trainer import HFTrainer
from rar_lib.engines.hf_weights import _to_names, whole
from rar_lib.engines.megatron_trainer import MegatronTrainer
from rar_lib.replay.points import find_points
from rar_lib.replay.scores import SignalRequest

TRAINERS: dict[str, Any] = {"megatron": MegatronTrainer, "hf": HFTrainer}
SIGNALS = SignalRequest(frozenset({"gate"}), "rollout", 0)
# So small a rate that updates leave the weights alone, until the last one.
STILL, RATE = 1e-30, 1e-3
SETTINGS = ["trainer.micro_batch_size=8", f"algorithm.lr={STILL}", "algorithm.max_grad_norm=0.05"]


class Pull:
    """A loss whose gradient reaches every token: -A log π."""

    def __init__(self, advantages: torch.Tensor) -> None:
        self.advantages = advantages

    def __call__(self, logp: torch.Tensor, rows: torch.Tensor, scores: Any = None) -> Any:
        return -logp * self.advantages[rows][:, None], {"sequences": float(len(rows))}


def build(layout: str, path: Path, processes: int = 1) -> Any:
    settings = [f"trainer.{one}" for one in layout.split(",") if one]
    config = JobConfig.build({}, [*SETTINGS, f"trainer.processes={processes}", *settings])
    return TRAINERS[config.trainer.engine](path, config.trainer, config.algorithm)


class Watch:
    """Keeps what this process had to say of each pass before it was summed over all."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.gather, self.mine = trainer, trainer.ranks.gather, Any
        trainer.ranks.gather = self.keep

    def keep(self, mine: Any) -> Any:
        self.mine = mine
        return self.gather(mine)

    def stop(self) -> None:
        self.trainer.ranks.gather = self.gather


def left(trainer: Any) -> int:
    """What is still open, or waits for a recompute, at any router of this process."""
    models = trainer.chunks if trainer.name == "megatron" else [trainer.model]
    points = [point for model in models for point in find_points(model).points]
    return sum(p.awaited + len(p.selectors) + len(p.taps) + len(p.gates) + p.watched for p in points)


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Of the last backward, in Hugging Face names, on the first process."""
    if trainer.name == "megatron":
        return {name: tensor.clone() for name, tensor in trainer.whole(lambda p: p.main_grad)}
    return {
        k: v.clone()
        for k, v in _to_names(trainer.model, {n: whole(p.grad) for n, p in trainer.model.named_parameters()}).items()
    }


def measure(trainer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Everything that a layout must have in common with one process."""
    batch, pull = given["batch"], Pull(given["advantages"])
    watch, found, mine = Watch(trainer), {}, {"left": 0}
    step = getattr(trainer, "gradients", trainer.update)
    algorithm = trainer.algorithm
    trainer.algorithm = algorithm.model_copy(update={"max_grad_norm": 1e9})  # the hf trainer clips in place
    for name, replay in given["replays"].items():
        old = trainer.logprobs(batch, temperature=1.0, replay=replay, capture="margins", measure=True)
        mine["left"] += left(trainer)
        update = step(batch, pull, temperature=1.0, replay=replay, measure=True)
        mine[name] = watch.mine.counts
        mine["left"] += left(trainer)
        found[name] = {"old": old, "update": update, "gradients": gradients(trainer)}
    native = [found["none"]["old"].trace]
    if trainer.ranks.size > 1:
        torch.distributed.broadcast_object_list(native, src=0)
    found["own"] = trainer.logprobs(batch, temperature=1.0, replay=Replay.full(native[0]))
    found["wrong"] = trainer.logprobs(batch, temperature=1.0, replay=given["wrong"], capture=True)
    mine["wrong"] = watch.mine.counts
    found["seen"] = trainer.logprobs(batch, temperature=1.0, capture=True, signals=SIGNALS)
    mine["left"] += left(trainer)
    watch.stop()
    found["ranks"] = trainer.ranks.gather(mine)
    for group in trainer.optimizer.param_groups:
        group["lr"] = RATE
    trainer.algorithm = algorithm
    learned = trainer.update(batch, pull, temperature=1.0)
    found["grad_norm"] = learned.grad_norm
    found["weights"] = {name: tensor.clone() for name, tensor in trainer.weights()}
    return found


def main(source: Path, target: Path, layouts: list[str]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    given, found = torch.load(source, weights_only=False), {}
    for layout in layouts:
        found[layout] = measure(build(layout, given["path"], size), given)
    if rank == 0:
        torch.save(found, target)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    except BaseException:  # the others may wait in a collective, so leave at once
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
