"""What a run will take, before it runs: memory by part, disk, and time by part of a step.

Weights, optimizer, routes and disk follow from sizes. Activations and times are measured, not guessed: one micro-batch goes through the
trainer with its saved tensors counted, and a share of one batch through every part of a step, twice, the second time on the clock. The
estimate says nothing about swapping, other jobs on the machine, or answers that grow longer.

    rar run --config FILE --estimate
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import safe_open

from rar_lib.checkpoint import load_model_config, load_tokenizer, resolve_checkpoint, router_header, special_tokens
from rar_lib.config import JobConfig
from rar_lib.engines.base import Replay, TokenBatch, Trainer
from rar_lib.engines.session import EngineSession, require_fit, resolve_engines
from rar_lib.job import noise_floor_row
from rar_lib.measure import rollout_logprobs
from rar_lib.planner import Planner
from rar_lib.prompts import Prompts
from rar_lib.replay.modes import MODES
from rar_lib.rl.learning import Lesson, needs_routers
from rar_lib.runs.files import human
from rar_lib.runs.store import KEEP_CHECKPOINTS
from rar_lib.seeding import derive_seed
from rar_lib.tasks import Task
from rar_lib.traces.header import id_dtype

logger = logging.getLogger("rar")
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Attributes:
        memory: part, bytes, how.
        disk: bytes of the run folder.
        seconds: part, a_step, in_all (seconds); empty if nothing was measured.
        peak: bytes that this process held at most while measuring, libraries and the caches of their kernels included; None if nothing
            was measured. For small models it is what counts.
    """

    memory: pd.DataFrame
    disk: int
    seconds: pd.DataFrame
    peak: int | None = None

    def __str__(self) -> str:
        lines = [f"{row['part']:28} {human(row['bytes']):>10}  {row['how']}" for row in self.memory.to_dict("records")]
        lines.append(f"{'memory beside libraries':28} {human(int(self.memory['bytes'].sum())):>10}")
        if self.peak is not None:
            lines.append(
                f"{'peak while measuring':28} {human(self.peak):>10}  this process, libraries and caches of kernels included"
            )
        lines.append(f"{'disk':28} {human(self.disk):>10}  the run folder")
        for row in self.seconds.to_dict("records"):
            lines.append(f"{row['part']:28} {row['in_all']:>8.0f} s  {row['a_step']:.2f} s a step")
        if len(self.seconds):
            lines.append(
                f"{'time in all':28} {self.seconds['in_all'].sum():>8.0f} s  measured on a share of a batch, here and now"
            )
        return "\n".join(lines)


def estimate(
    config: JobConfig, session: EngineSession | None = None, *, measure: bool = True, prompts: int = 16
) -> Estimate:
    """Memory and disk from sizes; with `measure` also activations and time from a share of one batch.

    Args:
        config: of the run.
        session: engines to share; by default they are started for this and shut down.
        measure: start the engines. Nothing is written and nothing is learned that outlasts the call.
        prompts: of the share, with all their samples; at least one an update.

    Raises:
        ConfigError, EngineError, ReplayError: as the run would.
    """
    config = resolve_engines(config, lambda _: None)
    path = resolve_checkpoint(config.model.path)
    planner, model, header = Planner(config.router_replay), load_model_config(path), router_header(path)
    require_fit(config, path, planner.request(0))  # what does not go together is refused before anything is started
    sizes: dict[str, int] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            sizes |= {name: int(np.prod(tensors.get_slice(name).get_shape())) for name in tensors.keys()}  # noqa: SIM118
    parameters, held = sum(sizes.values()), _held(config, sizes)
    spread = "" if config.trainer.processes == 1 else f", of all {config.trainer.processes} processes together"
    samples = config.algorithm.prompts_per_step * config.algorithm.group_size
    measured: dict[str, Any] = {}
    if measure:
        if session is not None:
            measured = _measure(config, session, prompts)
        else:
            with EngineSession() as own:
                measured = _measure(config, own, prompts)
    length = measured.get("length") or _longest(config)
    cells = samples * length * header.num_layers
    route = header.top_k * id_dtype(header.num_experts).itemsize
    scores = (
        4 * header.num_experts if needs_routers(config.algorithm) or config.router_replay.gates == "recorded" else 0
    )
    kv = 2 * model.num_hidden_layers * model.num_key_value_heads * _head_size(model) * BYTES[config.rollout.dtype]
    both = (
        config.trainer.dtype == "bfloat16" and config.trainer.engine == "megatron"
    )  # fp32 masters beside bf16 weights
    master = 6 if both else 4
    rows = [
        ("trainer weights", held * master, f"{parameters:,} parameters{spread}"),
        ("gradients", held * 4, f"fp32{spread}"),
        ("AdamW moments", held * 8, f"two in fp32{spread}"),
        ("rollout weights", parameters * BYTES[config.rollout.dtype], config.rollout.dtype),
        ("KV cache", int(samples * length * kv), "all samples of a step at once" + (" (vLLM reserves its own)" if config.rollout.engine in ("vllm", "vllm_server") else "")),
        ("routes of a step", int(cells * (2 * route + 4 + scores)), "rollout and native, with margins" + (" and scores" if scores else "")),
    ]  # fmt: skip
    if "activations" in measured:
        groups = config.trainer.data_parallel
        rows.append(
            (
                "activations",
                measured["activations"] * groups,
                f"of {measured['rows']} sequences, counted in one process{spread}",
            )
        )
    every = config.diagnostics.save_traces_every
    saved = (
        len({0, config.steps - 1, *(range(0, config.steps, every) if every else ())})
        if config.diagnostics.enabled
        else 0
    )
    probes = (1 + saved) * min(samples, config.diagnostics.probe_sequences) * length * header.num_layers
    kept = saved * cells * (2 * route + 4 + scores) + (probes * (route + 4 * header.num_experts) if saved else 0)
    disk = parameters * 12 * KEEP_CHECKPOINTS + int(kept) + config.steps * 8192
    seconds = pd.DataFrame(measured.get("seconds", []), columns=["part", "a_step", "in_all"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if measure else None
    return Estimate(pd.DataFrame(rows, columns=["part", "bytes", "how"]), disk, seconds, peak)


def alone(config: JobConfig) -> JobConfig:
    """The same run with its trainer in one process."""
    ones = dict.fromkeys(
        (
            "processes",
            "tensor_parallel",
            "pipeline_parallel",
            "virtual_pipeline",
            "expert_parallel",
            "expert_tensor_parallel",
        ),
        1,
    )
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=ones)})


def _held(config: JobConfig, sizes: dict[str, int]) -> int:
    """Parameters that all processes hold together: FSDP2 has one copy, Megatron one for each data-parallel rank, of experts and of the rest."""
    layout = config.trainer
    if layout.engine == "hf":
        return sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    copies = layout.processes // (layout.pipeline_parallel * layout.expert_parallel * layout.expert_tensor_parallel)
    return (sum(sizes.values()) - experts) * layout.data_parallel + experts * copies


def _measure(config: JobConfig, session: EngineSession, wanted: int) -> dict[str, Any]:
    path, task = resolve_checkpoint(config.model.path), Task(config.task)
    tokenizer = load_tokenizer(path)
    special = special_tokens(path, tokenizer)
    started = time.perf_counter()
    logger.info("estimate: opening the engines, then every part of a step twice on a share of a batch")
    rollout, trainer = session.open(config, path, special)
    opening = time.perf_counter() - started
    algorithm, temperature = config.algorithm, config.rollout.sampling.temperature
    count = min(algorithm.prompts_per_step, -(-wanted // algorithm.updates_per_batch) * algorithm.updates_per_batch)
    prompts, planner = Prompts(config, task, tokenizer, special), Planner(config.router_replay)
    mode, routers = MODES[config.router_replay.arm], needs_routers(algorithm)
    problems = prompts.train(0)[: count * algorithm.group_size]
    scale = algorithm.prompts_per_step / count
    times: dict[str, float] = {}

    def clocked(name: str, call: Callable[[], Any], often: float = 1.0) -> Any:
        call()  # warm
        begun = time.perf_counter()
        out = call()
        times[name] = (time.perf_counter() - begun) * scale * often
        return out

    sample, batch = clocked("rollout", lambda: prompts.sample(rollout, problems, derive_seed(config.seed, "estimate")))
    native = clocked(
        "old pass", lambda: trainer.logprobs(batch, temperature=temperature, capture="scores" if routers else True)
    )
    replay = None
    if mode.in_updates is not None:
        look = (lambda: planner.look(trainer, batch, 0, temperature)) if planner.looks else (lambda: None)
        seen = clocked("planning", lambda: look() or native)
        if planner.learns_flips:
            margins = trainer.logprobs(batch, temperature=temperature, capture="margins").trace
            assert margins is not None
            planner.learn_flips(sample.trace, margins)
        replay = planner.plan(sample.trace if mode.in_updates == "rollout" else native.trace, batch, 0, seen)
    mask, mu = batch.response_mask, rollout_logprobs(batch, sample)
    if config.diagnostics.enabled:
        full, partial = Replay.full(sample.trace), config.router_replay.policy != "full"
        beside = (mode.in_old_pass is not None and not planner.looks) + (
            mode.in_old_pass is None or partial
        )  # native, R3
        clocked("paired passes", lambda: trainer.logprobs(batch, temperature=temperature, replay=full), float(beside))
        due = len({0, config.steps - 1, *range(0, config.steps, config.diagnostics.noise_floor_every)}) / config.steps
        clocked("noise floor", lambda: noise_floor_row(config, rollout, trainer, batch, mu, native), due / scale)
        few = batch.select(torch.arange(min(len(batch), max(1, config.diagnostics.probe_sequences))))
        share = config.diagnostics.probe_sequences / (scale * len(few))
        clocked("probe", lambda: trainer.logprobs(few, temperature=temperature, capture="scores"), share)
    lesson = Lesson(algorithm, mu, native.logprobs, torch.ones(len(batch)), mask, native.trace)

    def updates() -> None:
        for share in batch.update_shares():
            part = None if replay is None else replay.select(share)
            trainer.update(
                batch.select(share), lesson.objective(share), temperature=temperature, replay=part, routers=routers
            )

    rows = min(
        config.trainer.micro_batch_size,
        algorithm.prompts_per_step * algorithm.group_size // algorithm.updates_per_batch,
    )
    counted = (
        trainer if config.trainer.processes == 1 else session.trainer(alone(config), path)
    )  # ranks do not show theirs
    activations = _activations(counted, batch, rows, temperature)
    clocked("updates", updates)
    clocked("sync", lambda: rollout.load_weights(trainer.weights(), 1), 1 / scale)
    seconds = [{"part": "opening the engines", "a_step": 0.0, "in_all": opening}]
    seconds += [{"part": name, "a_step": value, "in_all": value * config.steps} for name, value in times.items()]
    if config.evaluation.prompts:
        often = 2 + ((config.steps - 1) // config.evaluation.every if config.evaluation.every else 0)
        one = (times["rollout"] + 2 * times["old pass"]) * config.evaluation.prompts / (scale * len(batch))
        seconds.append({"part": "evaluation", "a_step": one * often / config.steps, "in_all": one * often})
    length = float(batch.lengths.double().mean())
    return {"seconds": seconds, "activations": activations, "rows": rows, "length": length}


def _longest(config: JobConfig) -> float:
    """Tokens of a sequence if every answer takes all that it may: of a few prompts, since nothing was sampled."""
    path = resolve_checkpoint(config.model.path)
    tokenizer = load_tokenizer(path)
    prompts = Prompts(config, Task(config.task), tokenizer, special_tokens(path, tokenizer))
    few = {p.uid: len(tokenizer(p.prompt)["input_ids"]) for p in prompts.train(0)[: 32 * config.algorithm.group_size]}
    return float(np.mean(list(few.values()))) + config.rollout.sampling.max_new_tokens


def _activations(trainer: Trainer, batch: TokenBatch, rows: int, temperature: float) -> int:
    """Bytes that autograd keeps of the forward of a micro-batch of `rows`, each storage once; parameters are not counted."""
    size = min(len(batch), rows)
    weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}  # type: ignore[attr-defined]
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def objective(logp: torch.Tensor, rows: torch.Tensor, scores: torch.Tensor | None = None) -> Any:
        return -logp, {}

    part = batch.select(torch.arange(size))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        trainer.update(part, objective, temperature=temperature)
    return int(sum(kept.values()) * rows / size)


def _head_size(model: Any) -> int:
    return int(getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads)
