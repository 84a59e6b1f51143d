"""Runs in verl's environment: verl's own Megatron engine on a CPU, with and without the plugin.

    .venv-verl/bin/python -m tests.integrations.verl_side FOLDER

FOLDER holds batch.npz, the policy files and jobs.json; out.npz and out.json are written there. verl finds the plugin by the
entry point that the caller put on the path, or late, as an external library. What is replaced, beside packed_model.py: how
the engine builds its config and model (verl asks a bridge that needs a GPU), the optimizer, the adapter of LoRA, reports of
GPU memory, and the profiler.
"""

import contextlib
import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import verl  # loads the plugins that are declared, unless VERL_USE_EXTERNAL_PLUGINS=none

LIGHT = {"plugin": "rar_lib.integrations.verl" in sys.modules, "megatron": "megatron.core" in sys.modules}

from rar_lib.engines.megatron_cpu import import_megatron, start_parallel_state, without_cuda  # noqa: E402

import_megatron()

folder = Path(sys.argv[1])
jobs = json.loads((folder / "jobs.json").read_text())
if jobs.get("break"):
    from verl.utils.megatron.router_replay_patch import RouterReplay

    RouterReplay.get_replay_topk = lambda self, scores, k: (scores, k)  # another signature

import verl.workers.engine.megatron.transformer_impl as impl  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.import_utils import import_external_libs  # noqa: E402
from verl.utils.megatron.router_replay_utils import iter_model_routers  # noqa: E402
from verl.utils.metric import reduce_metrics  # noqa: E402
from verl.utils.py_functional import rename_dict  # noqa: E402
from verl.workers import engine_workers  # noqa: E402
from verl.workers.config.engine import EngineRouterReplayConfig, McoreEngineConfig  # noqa: E402

from rar_lib.errors import RarError  # noqa: E402
from tests.integrations.packed_model import packed_config, packed_model  # noqa: E402

import_external_libs("rar_lib.integrations.verl")  # as external_lib does: here already, or late
plugin = sys.modules["rar_lib.integrations.verl"]
impl.MegatronCheckpointManager = lambda **_: None
impl.log_gpu_memory_usage = lambda *_, **__: None
engine_workers.get_torch_device = lambda: SimpleNamespace(max_memory_allocated=lambda: 0, max_memory_reserved=lambda: 0)
for method in ("train_mini_batch", "train_batch", "infer_batch"):  # without ray's dispatch
    plain = inspect.unwrap(getattr(engine_workers.TrainingWorker, method))
    setattr(engine_workers.TrainingWorker, method, plain)
batch = np.load(folder / "batch.npz")
arrays, report = {}, {"light": LIGHT, "fault": plugin.find_fault(impl)}


class Engine(impl.MegatronEngineWithLMHead):
    """verl's engine with another way to its model."""

    recompute = is_value_model = False
    bridge = provider = peft_cls = param_dtype = share_embeddings_and_output_weights = None

    def _build_tf_config(self):
        self.tf_config = packed_config(self.recompute)
        self.tf_config.moe_enable_routing_replay = self.enable_routing_replay

    def _build_megatron_module(self):
        return [packed_model(self.tf_config)]

    def _build_optimizer(self):
        return None

    def _build_lr_scheduler(self):
        return None

    def optimizer_zero_grad(self):
        for p in self.module[0].parameters():
            p.grad = None

    def optimizer_step(self):
        return 0.0


class Other(impl.MegatronEngineWithLMHead):
    """Stands in for an engine of another backend."""

    def __init__(self, engine_config):
        self.engine_config = engine_config


impl.EngineRegistry.register("language_model", "other", ["cuda", "cpu"])(Other)


def build(job):
    os.environ.pop(plugin.VARIABLE, None)
    if "variable" in job:
        os.environ[plugin.VARIABLE] = job["variable"]
    config = McoreEngineConfig(
        router_replay=EngineRouterReplayConfig(mode=job.get("mode", "R3"), replay_file=job.get("file")),
        use_distributed_optimizer=False,
        sequence_parallel=False,
        forward_only=job.get("forward_only", False),
        use_remove_padding=job.get("use_remove_padding", True),
    )
    if "backend" in job:
        return impl.EngineRegistry.new("language_model", job["backend"], config)
    names = ["Qwen3MoeForCausalLM"]
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=names), architectures=names, mtp=SimpleNamespace(enable=False),
        local_path="", get_processor=lambda: None, tokenizer=SimpleNamespace(pad_token_id=0),
    )  # fmt: skip
    engine = Engine(model, config, SimpleNamespace(use_checkpoint_opt_param_scheduler=False), SimpleNamespace())
    engine.recompute = job.get("recompute", False)
    engine.initialize()
    return engine


def jagged(name):
    parts = np.split(batch[name], np.cumsum(batch[f"{name}_lengths"])[:-1])
    return torch.nested.as_nested_tensor([torch.from_numpy(p) for p in parts], layout=torch.jagged)


def unwrapped(metrics):
    """Values of verl's lists of one."""
    assert all(len(v) == 1 for k, v in metrics.items() if "rar/" in k)
    return {k: v[0] if "rar/" in k else v for k, v in metrics.items()}


def data(micro_batch, replay, routes):
    tensors = {name: jagged(name) for name in ("input_ids", "loss_mask")}
    tensors |= {
        "response_mask": torch.from_numpy(batch["response_mask"]),
        "temperature": torch.ones(len(batch["response_mask"])),
    }
    if routes is not None:
        tensors["routed_experts"] = routes
    out = TensorDict(tensors, batch_size=[len(batch["response_mask"])])
    tu.assign_non_tensor(out, use_dynamic_bsz=False, micro_batch_size_per_gpu=micro_batch, enable_routing_replay=replay)
    return out


def loss(model_output, data, dp_group):
    # row t predicts token t + 1; verl's label of a sequence's last row is a token of another sequence
    weights = torch.cat(
        [mask.roll(-1).index_fill(0, torch.tensor(len(mask) - 1), 0) for mask in data["loss_mask"].unbind()]
    )
    return -(model_output["log_probs"].values() * weights).sum() / 10, {}


def listen(engine):
    """Logits and executed map of every router call, forward and recompute, by layer."""
    seen = []

    def heard(router, args, output):
        logits = torch.nn.functional.linear(args[0].detach(), router.weight.detach()).flatten(0, 1)
        seen.append((router.layer_number - 1, torch.is_grad_enabled(), logits, output[1].clone()))

    for module in engine.module[0].modules():
        if hasattr(module, "router_replay"):
            module.register_forward_hook(heard)
    return seen


def keep(name, seen, layers, micro_batches):
    """[tokens, L, E] of the first forwards; whether every later call (recompute) executed the same maps."""
    first = seen if len(seen) == layers * micro_batches else []
    again = []
    if (
        not first
    ):  # with recompute: forwards without a graph come first, a micro-batch's recompute runs in reverse order
        first = [s for s in seen if not s[1]]
        again = [s for s in seen if s[1]]
    for kind, i in (("logits", 2), ("executed", 3)):
        by_layer = [torch.cat([s[i] for s in first if s[0] == layer]) for layer in range(layers)]
        arrays[f"{name}/{kind}"] = torch.stack(by_layer, 1).numpy()
    same = [
        all(torch.equal(a[3], b[3]) for a, b in zip(
            [s for s in first if s[0] == layer], [s for s in again if s[0] == layer], strict=True))
        for layer in range(layers)
    ] if again else []  # fmt: skip
    return {"recomputed": len(again), "recompute_equal": all(same)}


def run(name, job):
    engine = build(job)
    facts = {"policy": str(engine.rar.policy) if getattr(engine, "rar", None) else None}
    if job.get("only_built"):
        return facts
    seen, layers = listen(engine), engine.tf_config.num_layers
    replay = engine.enable_routing_replay
    size, count = job.get("micro_batch", 2), len(batch["response_mask"])
    brings = job.get("mode", "R3") == "R3" or job.get("captured")
    routes = jagged(job.get("routes", "routes")) if brings else None
    old = engine.forward_backward_batch(data(job.get("old_micro_batch", 4), replay, routes), None, forward_only=True)
    keep(f"{name}/old", seen, layers, count // job.get("old_micro_batch", 4))
    arrays[f"{name}/old/log_probs"] = old["model_output"]["log_probs"].values().numpy()
    if job.get("mode") == "R2":
        routes = old["model_output"]["routed_experts"]
        arrays[f"{name}/recorded"] = routes.values().numpy()
    seen.clear()
    new = engine.forward_backward_batch(data(size, replay, routes), loss, forward_only=False)
    facts |= keep(f"{name}/update", seen, layers, count // size)
    arrays[f"{name}/update/log_probs"] = new["model_output"]["log_probs"].values().numpy()
    gradients = [p.grad.flatten() for p in engine.module[0].parameters() if p.grad is not None]
    arrays[f"{name}/gradient"] = torch.cat(gradients).numpy()
    routers = [router for _, router in iter_model_routers(engine.module)]
    facts["queued"] = [len(r.replay_backward_list) + len(r.replay_backward_mask_list) for r in routers]
    facts["metrics"] = {"old": unwrapped(old["metrics"]), "update": unwrapped(new["metrics"])}
    return facts


class Silent:
    """Stands in for the profiler."""

    rank = 0

    def __getattr__(self, name):
        return lambda *_, **__: False


def worker_of(engine):
    """verl's TrainingWorker on an engine: what its constructor would take from ray and from a GPU is set here."""
    worker = object.__new__(engine_workers.TrainingWorker)
    worker.engine, worker.device_name, worker.flops_counter = engine, "cpu", None
    worker.profiler, worker.loss_fn, worker.model_config = Silent(), loss, {"use_remove_padding": True}
    worker.engine_config = SimpleNamespace(
        use_dynamic_bsz=False, micro_batch_size_per_gpu=2, infer_micro_batch_size_per_gpu=2, use_fused_kernels=False,
        max_token_len_per_gpu=None, infer_max_token_len_per_gpu=None, forward_only=False,
    )  # fmt: skip
    return worker


def in_worker(name, job):
    """A step as verl's worker makes it: old pass, LoRA's reference on the actor, updates in two mini-batches."""
    engine = build(job)
    engine.lr_scheduler_step = lambda: 1e-6
    adapter = []

    @contextlib.contextmanager
    def off(module):
        adapter.append("off")
        yield
        adapter.append("on")

    engine.peft_cls = SimpleNamespace(disable_adapter=off)
    worker, seen = worker_of(engine), listen(engine)
    routes = jagged("routes") if job.get("mode", "R3") == "R3" else None
    given = data(2, True, routes)
    worker.infer_batch(given)
    facts = {"kept": [dict(engine.rar.metrics.get("old", {}))]}
    old = torch.cat([s[3] for s in seen]).numpy()
    if routes is None:
        given["routed_experts"] = jagged("whole_rows")  # of R2's own old pass: all T rows
    seen.clear()
    tu.assign_non_tensor(given, no_lora_adapter=True)
    worker.infer_batch(given)
    facts["kept"].append(dict(engine.rar.metrics.get("old", {})))
    layers = engine.tf_config.num_layers
    reference = torch.stack([torch.cat([s[3] for s in seen if s[0] == i]) for i in range(layers)], 1).numpy()
    arrays[f"{name}/reference"], arrays[f"{name}/old"] = reference, old
    tu.assign_non_tensor(given, enable_routing_replay=True, mini_batch_size=2)  # verl sets it anew for every call
    metrics = tu.get(worker.train_mini_batch(given), "metrics")
    # as the trainer does with a worker's metrics
    metrics = rename_dict(metrics, "actor/")
    facts["lists"] = {k: list(v) for k, v in metrics.items() if "rar/" in k}
    facts["logged"] = {k: float(v) for k, v in reduce_metrics(metrics).items() if "rar/" in k}
    facts["adapter"] = adapter
    return facts


def padding(name, job):
    """verl's packing pads with rows of zeros and a mask of False: one router, asked directly."""
    engine = build(job)
    routers = [router for _, router in iter_model_routers(engine.module)]
    router, generator = routers[0], torch.Generator().manual_seed(0)
    scores = torch.rand(3, engine.tf_config.num_moe_experts, generator=generator)
    router.rar.owner._planned = True
    router.set_target_indices(torch.tensor([[5, 3], [0, 0], [-1, 4]]), torch.tensor([True, False, True]))
    router.set_router_replay_action(impl.RouterReplayAction.REPLAY_FORWARD)
    ask = lambda: router.get_replay_topk(scores, 2, default_compute_topk=lambda s, k, **_: torch.topk(s, k))  # noqa: E731
    values, ids = ask()
    facts = {"ids": ids.tolist(), "native": torch.topk(scores, 2).indices.tolist(), "gathered": bool((values == scores.gather(1, ids)).all())}  # fmt: skip
    facts["counts"] = [int(router.rar.forced), int(router.rar.changed), int(router.rar.cells)]
    router.set_router_replay_action(impl.RouterReplayAction.REPLAY_BACKWARD)
    facts["again"] = ask()[1].tolist()
    facts["queued"] = [len(router.replay_backward_list), len(router.replay_backward_mask_list)]
    router.set_target_indices(torch.tensor([[5, 3]] * 3), None)
    for key, call in (
        ("deaf", lambda: router.set_target_indices(torch.tensor([[5, 3]] * 3), None)),
        ("unseen", lambda: (setattr(router.rar.owner, "_planned", False), routers[1].set_target_indices(torch.tensor([[5, 3]] * 3)))),
        ("finish", lambda: router.rar.owner.finish(True)),
    ):  # fmt: skip
        try:
            call()
        except RarError as error:
            facts[key] = str(error)
    return facts


start_parallel_state()
with without_cuda():
    for name, job in jobs["arms"].items():
        try:
            report[name] = {"padding": padding, "in_worker": in_worker}.get(job.get("as", name), run)(name, job)
        except RarError as error:
            report[name] = {"refused": f"{type(error).__name__}: {error}"}
np.savez(folder / "out.npz", **arrays)
known = verl.__version__
verl.__version__ = "0.9.2"
report["version"] = plugin.find_fault(impl)
verl.__version__ = known
(folder / "out.json").write_text(json.dumps(report))
