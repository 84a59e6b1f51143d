"""What each producer writes, as its own code lays it out: one writer a format, all from one batch.

The packages of the producers are not installed; where a file holds their classes, stand-ins with the same module paths and the
same pickled structure are used (they were compared once with what tensordict itself writes).
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rar_lib.traces.layers import ModelShape
from rar_lib.traces.trace import RouteTrace, Status, TraceHeader


@dataclass(frozen=True)
class Item:
    """One sequence: prompt and response ids, routes `[T - 1, L_moe, K]`, log-probs of the response."""

    prompt: list[int]
    answer: list[int]
    routes: np.ndarray
    logprobs: np.ndarray
    version: int = 3
    text: str = ""
    old: np.ndarray | None = None

    @property
    def trained(self) -> np.ndarray:
        """The trainer's log-probs of the response."""
        return self.logprobs - np.float32(0.01) if self.old is None else self.old

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer


@dataclass(frozen=True)
class Batch:
    """Sequences of one model."""

    model: ModelShape
    items: list[Item]
    extra: dict[str, Any] = field(default_factory=dict)

    def all_layers(self, item: Item) -> np.ndarray:
        """`[T - 1, L_all, K]`, zeros in dense layers."""
        out = np.zeros((len(item.routes), self.model.num_layers or 0, self.model.top_k), np.int64)
        out[:, list(self.model.moe_layers)] = item.routes
        return out

    def trace(self, source: str = "rollout") -> RouteTrace:
        """Routes and token ids that every reader must find."""
        lengths = [len(item.ids) for item in self.items]
        shape = (len(self.model.moe_layers), self.model.top_k)
        status = np.concatenate([np.r_[np.full(n - 1, Status.RECORDED), Status.LAST] for n in lengths])
        routes = [np.concatenate([item.routes, np.zeros((1, *shape), np.int64)]) for item in self.items]
        header = TraceHeader(
            num_experts=self.model.num_experts, top_k=self.model.top_k, moe_layers=self.model.moe_layers, source=source
        )
        ids = np.concatenate([item.ids for item in self.items])
        return RouteTrace.from_packed(header, np.concatenate(routes), lengths, status, token_ids=ids)


def make_batch(
    e: int, k: int, layers: int, moe: tuple[int, ...], lengths: list[tuple[int, int]], seed: int = 0, vocab: int = 50
) -> Batch:
    """Random routes; the largest id is there, so that a type too small would show."""
    rng = np.random.default_rng(seed)
    items = []
    for p, r in lengths:
        routes = np.argsort(rng.random((p + r - 1, len(moe), e)), -1)[..., :k]
        if routes.size:
            routes[0, 0] = np.arange(e - 1, e - 1 - k, -1)
        items.append(
            Item(
                rng.integers(1, vocab, p).tolist(),
                rng.integers(1, vocab, r).tolist(),
                routes,
                -rng.random(r).astype(np.float32),
            )
        )
    return Batch(ModelShape(e, k, moe, layers, "tiny"), items)


def smallest(e: int, *dtypes: str) -> str:
    """The first type that holds E - 1."""
    return next(d for d in dtypes if e - 1 <= np.iinfo(d).max)


def b64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def npy(array: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()


# ---------------------------------------------------------------- answers of servers


def completion(item: Item, **choice: Any) -> dict[str, Any]:
    """An answer of the completions endpoint with token ids."""
    return {
        "id": "cmpl-0", "object": "text_completion", "model": "tiny",
        "choices": [{"index": 0, "text": item.text, "finish_reason": "stop", "prompt_token_ids": item.prompt, "token_ids": item.answer,
                     "logprobs": {"token_logprobs": [float(x) for x in item.logprobs]}, **choice}],
        "usage": {"prompt_tokens": len(item.prompt), "completion_tokens": len(item.answer)},
    }  # fmt: skip


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_vllm_http(batch: Batch, path: Path) -> Path:
    dtype = smallest(batch.model.num_experts, "uint8", "uint16")
    return jsonl(path, [completion(i, routed_experts=npy(batch.all_layers(i).astype(dtype))) for i in batch.items])


def write_vllm_http_chat(batch: Batch, path: Path) -> Path:
    """The chat endpoint: prompt ids at the top, log-probs in content; the request is kept and drops the first prompt row."""
    records = []
    for item in batch.items:
        start = min(1, len(item.prompt))
        answer = {
            "prompt_token_ids": item.prompt,
            "choices": [{"message": {"role": "assistant", "content": item.text}, "token_ids": item.answer,
                         "logprobs": {"content": [{"logprob": float(x)} for x in item.logprobs]},
                         "routed_experts": npy(batch.all_layers(item)[start:].astype("uint16"))}],
        }  # fmt: skip
        records.append({"request": {"routed_experts_prompt_start": start}, "response": answer})
    return jsonl(path, records)


def write_vllm_021_http(batch: Batch, path: Path) -> Path:
    records = []
    for item in batch.items:
        cut = len(item.prompt)
        record = completion(item, routed_experts=item.routes[cut:].tolist())
        records.append({**record, "prompt_routed_experts": item.routes[:cut].tolist()})
    return jsonl(path, records)


def _outputs(batch: Batch, dtype: str, every: bool) -> list[dict[str, Any]]:
    return [
        {"prompt_token_ids": item.prompt,
         "outputs": [{"token_ids": item.answer, "text": item.text, "logprobs": [float(x) for x in item.logprobs],
                      "routed_experts": (batch.all_layers(item) if every else item.routes).astype(dtype)}]}
        for item in batch.items
    ]  # fmt: skip


def write_vllm(batch: Batch, path: Path) -> Path:
    torch.save(_outputs(batch, smallest(batch.model.num_experts, "uint8", "uint16"), True), path)
    return path


def write_vllm_014(batch: Batch, path: Path) -> Path:
    torch.save(_outputs(batch, "int32", True), path)
    return path


def write_vllm_021(batch: Batch, path: Path) -> Path:
    records = _outputs(batch, "int16", False)
    for item, record in zip(batch.items, records, strict=True):
        (answer,) = record["outputs"]
        record["prompt_routed_experts"] = torch.from_numpy(answer["routed_experts"][: len(item.prompt)])
        answer["routed_experts"] = torch.from_numpy(answer["routed_experts"][len(item.prompt) :])
    torch.save(records, path)
    return path


def write_trtllm(batch: Batch, path: Path) -> Path:
    torch.save(_outputs(batch, "int16", False), path)
    return path


def _sglang(item: Item, **meta: Any) -> dict[str, Any]:
    return {
        "text": item.text, "output_ids": item.answer, "prompt_token_ids": item.prompt,
        "meta_info": {"id": "0", "prompt_tokens": len(item.prompt), "completion_tokens": len(item.answer), "weight_version": str(item.version),
                      "output_token_logprobs": [[float(x), t, None] for x, t in zip(item.logprobs, item.answer, strict=True)],
                      "finish_reason": {"type": "stop"}, **meta},
    }  # fmt: skip


def write_sglang(batch: Batch, path: Path) -> Path:
    return jsonl(path, [_sglang(i, routed_experts=b64(batch.all_layers(i).astype("<i4"))) for i in batch.items])


def write_sglang_typed(batch: Batch, path: Path) -> Path:
    """The newer form: a smaller type, named, and a start that the server honours in the first answer and ignores in the rest."""
    dtype = smallest(batch.model.num_experts, "uint8", "uint16")
    records = []
    for number, item in enumerate(batch.items):
        start = min(2, len(item.prompt), len(item.routes))
        rows = batch.all_layers(item)[start if number == 0 else 0 :]
        meta = {"routed_experts": b64(rows.astype(dtype)), "routed_experts_dtype": dtype}
        records.append({"request": {"routed_experts_start_len": start}, "response": _sglang(item, **meta)})
    return jsonl(path, records)


def write_sglang_openai(batch: Batch, path: Path) -> Path:
    return jsonl(
        path,
        [{**completion(i), "sglext": {"routed_experts": b64(batch.all_layers(i).astype("<i4"))}} for i in batch.items],
    )


def write_lmdeploy(batch: Batch, path: Path) -> Path:
    return jsonl(path, [completion(i, routed_experts=batch.all_layers(i).tolist()) for i in batch.items])


def write_skyrl_http(batch: Batch, path: Path) -> Path:
    records = []
    for item in batch.items:
        top = int(item.routes.max(initial=0))
        dtype = "uint8" if top < 256 else "int16" if top < 32768 else "int32"
        rows = batch.all_layers(item).astype(dtype)
        records.append(completion(item, routed_experts={"data": b64(rows), "shape": list(rows.shape), "dtype": dtype}))
    return jsonl(path, records)


def write_prime_http(batch: Batch, path: Path) -> Path:
    records = []
    for item in batch.items:
        start = min(1, len(item.routes))
        rows = batch.all_layers(item)[start:]
        dtype = "uint8" if rows.max(initial=0) < 256 else "uint16"
        packed = {"data": b64(rows.astype(dtype)), "shape": list(rows.shape), "start": start, "dtype": dtype}
        records.append(completion(item, routed_experts=packed))
    return jsonl(path, records)


def write_prime_http_base85(batch: Batch, path: Path) -> Path:
    records = []
    for item in batch.items:
        rows = batch.all_layers(item).astype("<i4")
        packed = {"data": base64.b85encode(rows.tobytes()).decode(), "shape": list(rows.shape)}
        records.append(completion(item, routed_experts=packed))
    return jsonl(path, records)


# ---------------------------------------------------------------- NeMo-RL


def wire(routes: np.ndarray, e: int) -> str:
    """A wire string of `[S, L, K]`."""
    dtype = smallest(e, "int8", "int16", "int32")
    return f"nrlre1:{dtype}:{'x'.join(map(str, routes.shape))}:{b64(routes.astype(dtype))}"


def filled(batch: Batch, item: Item) -> np.ndarray:
    """All T rows; the last holds 0..K-1 in every layer."""
    last = np.broadcast_to(np.arange(batch.model.top_k), (1, *item.routes.shape[1:]))
    return np.concatenate([item.routes, last])


def write_nemo(batch: Batch, path: Path) -> Path:
    records = []
    for item in batch.items:
        message = {
            "role": "assistant", "content": item.text, "prompt_token_ids": item.prompt, "generation_token_ids": item.answer,
            "generation_log_probs": [float(x) for x in item.logprobs], "routed_experts": wire(filled(batch, item), batch.model.num_experts),
        }  # fmt: skip
        records.append({"choices": [{"index": 0, "message": message}]})
    return jsonl(path, records)


def write_nemo_lists(batch: Batch, path: Path) -> Path:
    """Before the wire string: nested lists."""
    records = []
    for item in batch.items:
        message = {
            "role": "assistant", "prompt_token_ids": item.prompt, "generation_token_ids": item.answer,
            "routed_experts": filled(batch, item).tolist(),
        }  # fmt: skip
        records.append({"choices": [{"index": 0, "message": message}]})
    return jsonl(path, records)


def write_nemo_strings(batch: Batch, path: Path) -> Path:
    path.write_text("".join(wire(filled(batch, i), batch.model.num_experts) + "\n" for i in batch.items))
    return path


def write_nemo_log(batch: Batch, path: Path) -> Path:
    """train_data JSON lines: batches of one, padded to the longest."""
    width = max(len(i.ids) for i in batch.items)
    records = []
    for n, item in enumerate(batch.items):
        pad = [0] * (width - len(item.ids))
        mu = [0.0] * len(item.prompt) + [float(x) for x in item.logprobs]
        old = [0.0] * len(item.prompt) + [float(x) for x in item.trained]
        mask = [0] * len(item.prompt) + [1] * len(item.answer)
        records.append({
            "content": [item.text], "rewards": [1.0], "input_lengths": [len(item.ids)], "token_ids": [[*item.ids, *pad]],
            "token_loss_mask": [mask + pad], "sample_loss_mask": [1.0], "generation_logprobs": [mu + pad], "prev_logprobs": [old + pad],
            "idx": n,
        })  # fmt: skip
    return jsonl(path, records)


# ---------------------------------------------------------------- slime


def _slime(batch: Batch, routes: Callable[[Item], Any]) -> dict[str, Any]:
    return {
        "rollout_id": 0,
        "samples": [
            {"tokens": i.ids, "response_length": len(i.answer), "loss_mask": [1] * len(i.answer), "status": "completed",
             "rollout_log_probs": [float(x) for x in i.logprobs], "rollout_routed_experts": routes(i), "reward": 1.0,
             "weight_versions": [str(i.version)], "prompt": "", "response": i.text, "metadata": {}, "index": n}
            for n, i in enumerate(batch.items)
        ],
    }  # fmt: skip


def write_slime(batch: Batch, path: Path) -> Path:
    torch.save(_slime(batch, lambda i: torch.from_numpy(batch.all_layers(i).astype(np.int32))), path)
    return path


def write_slime_030(batch: Batch, path: Path) -> Path:
    """Up to 0.3.0: numpy arrays."""
    torch.save(_slime(batch, lambda i: batch.all_layers(i).astype(np.int32)), path)
    return path


def write_slime_020(batch: Batch, path: Path) -> Path:
    """0.2.0: int64 and a row for every token."""
    rows = {id(i): batch.all_layers(i) for i in batch.items}
    torch.save(_slime(batch, lambda i: np.concatenate([rows[id(i)], rows[id(i)][:1] * 0 if len(rows[id(i)]) else
                                                       np.zeros((1, *rows[id(i)].shape[1:]), np.int64)])), path)  # fmt: skip
    return path


def write_slime_train(batch: Batch, path: Path) -> Path:
    samples = [
        {"tokens": torch.tensor(i.ids), "response_lengths": len(i.answer), "loss_masks": torch.ones(len(i.answer), dtype=torch.int64),
         "rollout_log_probs": torch.from_numpy(i.logprobs), "log_probs": torch.from_numpy(i.trained), "rollout_position": n}
        for n, i in enumerate(batch.items)
    ]  # fmt: skip
    torch.save({"format_version": 2, "rollout_id": 0, "rank": 0, "samples": samples, "dp_shards": 1}, path)
    return path


# ---------------------------------------------------------------- foreign classes


def _make_td(*args: Any) -> Any:
    raise NotImplementedError


def _rebuild_tensordict_files_consolidated(*args: Any) -> Any:
    raise NotImplementedError


class TensorDict:
    """Pickles as tensordict's: a call of `_make_td` with the class and its state."""

    def __init__(self, fields: dict[str, Any], size: int) -> None:
        self.fields, self.size = fields, size

    def __reduce__(self) -> Any:
        state = {
            "_tensordict": self.fields,
            "_batch_size": torch.Size([self.size]),
            "_device": None,
            "_td_dim_names": None,
        }
        return _make_td, (TensorDict, state)


class NonTensorData:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __getstate__(self) -> Any:
        return {
            "tensordict": TensorDict({}, 0),
            "non_tensordict": {"data": self.data, "_metadata": None, "_is_non_tensor": True},
        }


class NonTensorStack:
    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __getstate__(self) -> Any:
        members = [NonTensorData(v) for v in self.values]
        return {"tensordicts": members, "stack_dim": 0, "_batch_size": None, "_is_locked": None}


class Consolidated:
    """Pickles as a consolidated TensorDict: one uint8 storage, byte ranges in the metadata."""

    def __init__(self, fields: dict[str, torch.Tensor], size: int) -> None:
        self.fields, self.size = fields, size

    def __reduce__(self) -> Any:
        leaves, parts, at = {}, [], 0
        for name, value in self.fields.items():
            raw = value.contiguous().view(-1).view(torch.uint8) if value.numel() else torch.zeros(0, dtype=torch.uint8)
            pad = -len(raw) % 8
            leaves[name] = (str(value.dtype), list(value.shape), at, at + len(raw) + pad, pad)
            parts += [raw, torch.zeros(pad, dtype=torch.uint8)]
            at += len(raw) + pad
        cls_metadata = {"device": None, "names": [None], "batch_size": [self.size], "is_locked": False}
        metadata = {"cls": "TensorDict", "non_tensors": {}, "leaves": leaves, "cls_metadata": cls_metadata}
        return _rebuild_tensordict_files_consolidated, (metadata, torch.cat(parts))


@contextlib.contextmanager
def tensordict_there() -> Iterator[None]:
    paths: dict[str, tuple[Any, ...]] = {
        "tensordict._reductions": (_make_td, _rebuild_tensordict_files_consolidated),
        "tensordict._td": (TensorDict,),
        "tensordict.tensorclass": (NonTensorData, NonTensorStack),
    }
    with placed(paths):
        yield


@contextlib.contextmanager
def placed(paths: dict[str, tuple[Any, ...]]) -> Iterator[None]:
    """Make classes and functions importable under foreign module paths while pickling."""
    made, before = [], []
    for path, things in paths.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            module = ".".join(parts[:depth])
            if module not in sys.modules:
                sys.modules[module] = types.ModuleType(module)
                made.append(module)
        for thing in things:
            before.append((thing, thing.__module__))
            setattr(sys.modules[path], thing.__name__, thing)
            thing.__module__ = path
    try:
        yield
    finally:
        for thing, module in before:
            thing.__module__ = module
        for module in made:
            del sys.modules[module]


def jagged(rows: list[Any]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.as_tensor(r) for r in rows], layout=torch.jagged)


def write_verl(batch: Batch, path: Path, dtype: str = "int16") -> Path:
    """Trainer V1: jagged rows, the last one zero."""
    routes = [
        np.concatenate([batch.all_layers(i), np.zeros((1, batch.model.num_layers, batch.model.top_k), np.int64)])
        for i in batch.items
    ]
    fields = {
        "prompts": jagged([np.array(i.prompt, np.int64) for i in batch.items]), "responses": jagged([np.array(i.answer, np.int64) for i in batch.items]),
        "input_ids": jagged([np.array(i.ids, np.int64) for i in batch.items]),
        "response_mask": jagged([np.ones(len(i.answer), np.int64) for i in batch.items]),
        "rollout_log_probs": jagged([i.logprobs for i in batch.items]), "routed_experts": jagged([r.astype(dtype) for r in routes]),
        "extra_fields": NonTensorStack([{} for _ in batch.items]), "num_turns": torch.full((len(batch.items),), 2),
    }  # fmt: skip
    tags = [{"status": "done", "min_global_steps": i.version, "max_global_steps": i.version} for i in batch.items]
    with tensordict_there():
        torch.save(
            {"tensordict": TensorDict(fields, len(batch.items)), "tags": tags, "keys": [f"u_{n}_0" for n in range(len(batch.items))],
             "global_steps": 3}, path,
        )  # fmt: skip
    return path


def write_verl_r2(batch: Batch, path: Path) -> Path:
    """Routes that Megatron recorded: MoE layers only; stacks of plain rows, and int64 as up to 0.9.0."""
    rows = [np.concatenate([i.routes, np.zeros((1, *i.routes.shape[1:]), np.int64)]) for i in batch.items]
    fields = {
        "prompts": NonTensorStack([torch.tensor(i.prompt, dtype=torch.int64) for i in batch.items]),
        "responses": NonTensorStack([torch.tensor(i.answer, dtype=torch.int64) for i in batch.items]),
        "routed_experts": NonTensorStack([torch.from_numpy(r) for r in rows]),
    }
    with tensordict_there():
        torch.save(
            {"tensordict": TensorDict(fields, len(batch.items)), "tags": [], "keys": [], "global_steps": 3}, path
        )
    return path


def _padded(batch: Batch) -> tuple[dict[str, np.ndarray], int, int]:
    """verl's V0 padding: prompts left, responses right."""
    n, p, r = len(batch.items), max(len(i.prompt) for i in batch.items), max(len(i.answer) for i in batch.items)
    out = {
        "prompts": np.zeros((n, p), np.int64), "responses": np.zeros((n, r), np.int64), "response_mask": np.zeros((n, r), np.int64),
        "input_ids": np.zeros((n, p + r), np.int64), "attention_mask": np.zeros((n, p + r), np.int64),
        "rollout_log_probs": np.zeros((n, r), np.float32),
        "routed_experts": np.zeros((n, p + r, batch.model.num_layers, batch.model.top_k), np.int16),
    }  # fmt: skip
    for b, i in enumerate(batch.items):
        start, tokens = p - len(i.prompt), len(i.ids)
        out["prompts"][b, start:], out["responses"][b, : len(i.answer)] = i.prompt, i.answer
        out["response_mask"][b, : len(i.answer)] = 1
        out["input_ids"][b, start : start + tokens], out["attention_mask"][b, start : start + tokens] = i.ids, 1
        out["rollout_log_probs"][b, : len(i.answer)] = i.logprobs
        out["routed_experts"][b, start : start + tokens - 1] = batch.all_layers(i)
    return out, p, r


class DataProto:
    """State as verl's and ROLL's: the batch first."""

    def __init__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def __getstate__(self) -> Any:
        return self.state

    def __setstate__(self, state: Any) -> None:
        self.state = state


def write_verl_v0(batch: Batch, path: Path) -> Path:
    """DataProto whose batch is a torch file of a consolidated TensorDict."""
    fields, _, _ = _padded(batch)
    with tensordict_there(), placed({"verl.protocol": (DataProto,)}):
        stream = io.BytesIO()
        torch.save(Consolidated({k: torch.from_numpy(v) for k, v in fields.items()}, len(batch.items)), stream)
        non_tensor = {
            "uid": np.array(["a"] * len(batch.items), object),
            "__num_turns__": np.ones(len(batch.items), np.int32),
        }
        path.write_bytes(pickle.dumps(DataProto((stream.getvalue(), non_tensor, {"global_steps": 3}))))
    return path


def write_verl_v0_numpy(batch: Batch, path: Path) -> Path:
    """The numpy serialisation of DataProto."""
    fields, _, _ = _padded(batch)
    entries = {
        k: (str(torch.from_numpy(v).dtype).removeprefix("torch."), v.shape, np.frombuffer(v.tobytes(), np.uint8))
        for k, v in fields.items()
    }
    with placed({"verl.protocol": (DataProto,)}):
        path.write_bytes(pickle.dumps(DataProto((((len(batch.items),), None, entries), {}, {}))))
    return path


def write_roll(batch: Batch, path: Path) -> Path:
    """ROLL: everything padded right, the torch file behind a BytesIO, four items of state."""
    n, s = len(batch.items), max(len(i.ids) for i in batch.items) + 2
    fields = {
        "input_ids": np.zeros((n, s), np.int64), "attention_mask": np.zeros((n, s), np.int64), "prompt_mask": np.zeros((n, s), np.int64),
        "response_mask": np.zeros((n, s), np.int64), "infer_logprobs": np.zeros((n, s - 1), np.float32),
        "routed_experts": np.zeros((n, s, batch.model.num_layers, batch.model.top_k), smallest(batch.model.num_experts, "uint8", "int16")),
    }  # fmt: skip
    for b, i in enumerate(batch.items):
        tokens, p = len(i.ids), len(i.prompt)
        fields["input_ids"][b, :tokens], fields["attention_mask"][b, :tokens] = i.ids, 1
        fields["prompt_mask"][b, :p], fields["response_mask"][b, p:tokens] = 1, 1
        fields["infer_logprobs"][b, p - 1 : tokens - 1] = i.logprobs
        fields["routed_experts"][b, : tokens - 1] = batch.all_layers(i)
    with tensordict_there(), placed({"roll.distributed.scheduler.protocol": (DataProto,)}):
        stream = io.BytesIO()
        torch.save(Consolidated({k: torch.from_numpy(v) for k, v in fields.items()}, n), stream)
        path.write_bytes(pickle.dumps(DataProto((stream, {}, None, {})), pickle.HIGHEST_PROTOCOL))
    return path


def _rebuild_tensor_batch(*args: Any) -> Any:
    raise NotImplementedError


class TrainingInputBatch:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return _rebuild_tensor_batch, (TrainingInputBatch, self.state)


def write_skyrl(batch: Batch, path: Path) -> Path:
    """SkyRL: padded left; cells without a route hold arange(K) and are masked."""
    n, s, r = len(batch.items), max(len(i.ids) for i in batch.items) + 1, max(len(i.answer) for i in batch.items)
    k = batch.model.top_k
    fields = {
        "sequences": np.zeros((n, s), np.int64), "attention_mask": np.zeros((n, s), np.int64), "response_mask": np.zeros((n, r), np.int64),
        "loss_mask": np.zeros((n, r), np.float32), "rollout_logprobs": np.zeros((n, r), np.float32), "router_padding_mask": np.ones((n, s), bool),
        "rollout_expert_indices": np.tile(np.arange(k), (n, s, batch.model.num_layers or 0, 1)).astype(smallest(batch.model.num_experts, "uint8", "int16")),
    }  # fmt: skip
    for b, i in enumerate(batch.items):
        tokens, answered = len(i.ids), len(i.answer)
        fields["sequences"][b, s - tokens :], fields["attention_mask"][b, s - tokens :] = i.ids, 1
        for key, value in (("response_mask", 1), ("loss_mask", 1), ("rollout_logprobs", i.logprobs)):
            fields[key][b, r - answered :] = value
        fields["rollout_expert_indices"][b, s - tokens : s - 1] = batch.all_layers(i)
        fields["router_padding_mask"][b, s - tokens : s - 1] = False
    packed = {
        k: {"format": "numpy", "data": v.tobytes(), "shape": v.shape, "dtype": str(v.dtype)} for k, v in fields.items()
    }
    state = {
        "batch_dict": {**packed, "action_log_probs": None},
        "batch_size": n,
        "device": None,
        "metadata": {"pad_size": 0},
    }
    with placed({"skyrl.backends.skyrl_train.training_batch": (TrainingInputBatch, _rebuild_tensor_batch)}):
        path.write_bytes(pickle.dumps(TrainingInputBatch(state)))
    return path


class RolloutState:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getstate__(self) -> Any:
        return {"__dict__": dict(self.__dict__), "__pydantic_fields_set__": set(), "__pydantic_extra__": None}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state["__dict__"])


def write_xtuner(batch: Batch, path: Path) -> Path:
    """XTuner: classes in a torch file; layers without a router hold 65535."""
    states = []
    for i in batch.items:
        rows = np.full((len(i.routes), batch.model.num_layers or 0, batch.model.top_k), 65535, np.uint16)
        rows[:, list(batch.model.moe_layers)] = i.routes
        states.append(RolloutState(
            prompt_ids=i.prompt, response_ids=i.answer, response=i.text, logprobs=[float(x) for x in i.logprobs], routed_experts=rows,
            response_mask=[1] * len(i.answer), response_model_steps=[i.version] * len(i.answer), message=[],
        ))  # fmt: skip
    with placed({"xtuner.v1.data_proto.rl_data": (RolloutState,)}):
        torch.save([states], path)
    return path


def write_prime(batch: Batch, path: Path) -> Path:
    """prime-rl's transport: sequences packed, the last row repeated, a padded tail of two tokens on the last length."""
    import msgspec

    ids, mask, logp, names, rows, lengths = [], [], [], [], [], []
    dtype = smallest(batch.model.num_experts, "uint8", "uint16")
    for i in batch.items:
        ids += i.ids
        mask += [False] * len(i.prompt) + [True] * len(i.answer)
        logp += [0.0] * len(i.prompt) + [float(x) for x in i.logprobs]
        names += ["env"] * len(i.ids)
        routes = batch.all_layers(i)
        rows.append(
            np.concatenate([routes, routes[-1:] if len(routes) else np.zeros((1, *routes.shape[1:]), np.int64)])
        )
        lengths.append(len(i.ids))
    lengths[-1] += 2
    rows.append(np.zeros((2, *rows[0].shape[1:]), np.int64))
    packed = np.concatenate(rows).astype(dtype)
    tail = [*ids, 1, 1]
    micro = [
        tail, [*mask, False, False], [0.0] * len(tail), [*logp, 0.0, 0.0], list(range(len(tail))), lengths, [1.0] * len(tail), [*names, "", ""],
        lengths, None, [packed.tobytes(), list(packed.shape), dtype], None, None, None, None, None,
    ]  # fmt: skip
    path.write_bytes(msgspec.msgpack.encode([micro]))
    return path


def write_prime_export(batch: Batch, path: Path) -> Path:
    return jsonl(path, [
        {"schema_version": 1, "token_ids": i.ids, "loss_mask": [False] * len(i.prompt) + [True] * len(i.answer),
         "inference_logprobs": [0.0] * len(i.prompt) + [float(x) for x in i.logprobs],
         "trainer_logprobs": [0.0] * len(i.prompt) + [float(x) for x in i.trained]}
        for i in batch.items
    ])  # fmt: skip


# ---------------------------------------------------------------- Megatron


def grid(batch: Batch, multiple: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`[b, s]` ids, `[b, s, L_moe, K]` routes (the padding routes too, as in a real forward) and lengths."""
    b, s = len(batch.items), max(len(i.ids) for i in batch.items)
    s += -s % multiple
    ids, routes = (
        np.zeros((b, s), np.int64),
        np.tile(np.arange(batch.model.top_k), (b, s, len(batch.model.moe_layers), 1)),
    )
    for n, i in enumerate(batch.items):
        ids[n, : len(i.ids)], routes[n, : len(i.ids) - 1] = i.ids, i.routes
    return ids, routes, np.array([len(i.ids) for i in batch.items])


def shards(routes: np.ndarray, tp: int, cp: int) -> list[list[torch.Tensor]]:
    """What each rank's routers recorded: `[s, b]` order, zigzag over context ranks, consecutive over tensor ranks."""
    rows = routes.transpose(1, 0, 2, 3)  # [s, b, L, K]
    chunks = np.split(rows, 2 * cp) if cp > 1 else [rows]
    out = []
    for rank in range(cp):
        local = np.concatenate([chunks[rank], chunks[2 * cp - 1 - rank]]) if cp > 1 else rows
        for part in np.split(local, tp):
            flat = part.reshape(-1, *part.shape[2:])
            out.append([torch.from_numpy(np.ascontiguousarray(flat[:, layer])) for layer in range(flat.shape[1])])
    return out


def write_megatron(batch: Batch, path: Path, tp: int = 2, cp: int = 2) -> Path:
    ids, routes, lengths = grid(batch, 2 * tp * cp)
    torch.save(
        {"recorded": shards(routes, tp, cp), "token_ids": torch.from_numpy(ids), "lengths": torch.from_numpy(lengths),
         "layer_numbers": list(batch.model.moe_layers), "tensor_parallel": tp, "context_parallel": cp}, path,
    )  # fmt: skip
    return path


def write_tracer(batch: Batch, path: Path, first: int = 0) -> Path:
    """The router tracer, every sequence a micro-batch of its own, since lengths differ; `first` is the number of layer 0."""
    records = []
    for item in batch.items:
        rows = np.concatenate([item.routes, np.tile(np.arange(batch.model.top_k), (1, len(batch.model.moe_layers), 1))])
        for n, layer in enumerate(batch.model.moe_layers):
            records.append({"step": 1, "stage": "pre_dispatch", "block": "decoder", "layer": layer + first, "rank": 0, "num_tokens": len(rows),
                            "topk": batch.model.top_k, "top_indices": np.sort(rows[:, n]).tolist()})  # fmt: skip
        records.append(
            {"step": 1, "block": "mtp", "layer": 0, "rank": 0, "num_tokens": 1, "topk": 1, "top_indices": [[0]]}
        )
    return jsonl(path, records)


@dataclass(frozen=True)
class Layout:
    """A writer, the reader that must recognise it, and what that reader needs beside the file."""

    write: Callable[[Batch, Path], Path]
    format: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    most: int = 65535  # experts that the layout's ids can hold
    ids: bool = True  # carries token ids
    ordered: bool = True  # keeps the order of slots
    first: int = 0  # rows that are dropped on purpose, at most


PICKLE = {"allow_pickle": True}
LAYOUTS: dict[str, Layout] = {
    layout.write.__name__.removeprefix("write_"): layout
    for layout in (
        Layout(write_verl, "verl", "tq_batch.pt", most=32768),
        Layout(write_verl_r2, "verl", "tq_batch.pt"),
        Layout(write_verl_v0, "verl-v0", "gen_batch.dp", PICKLE, 32768),
        Layout(write_verl_v0_numpy, "verl-v0", "gen_batch.dp", PICKLE, 32768),
        Layout(write_vllm, "vllm", "outputs.pt"),
        Layout(write_vllm_014, "vllm", "outputs.pt"),
        Layout(write_vllm_021, "vllm", "outputs.pt", most=32768),
        Layout(write_vllm_http, "vllm-http", "answers.jsonl"),
        Layout(write_vllm_http_chat, "vllm-http", "answers.jsonl", first=1),
        Layout(write_vllm_021_http, "vllm-http", "answers.jsonl"),
        Layout(write_sglang, "sglang", "answers.jsonl"),
        Layout(write_sglang_typed, "sglang", "answers.jsonl", first=2),
        Layout(write_sglang_openai, "sglang", "answers.jsonl"),
        Layout(write_nemo, "nemo-rl", "answers.jsonl"),
        Layout(write_nemo_lists, "nemo-rl", "answers.jsonl"),
        Layout(write_nemo_strings, "nemo-rl", "routes.txt", ids=False),
        Layout(write_slime, "slime", "0.pt"),
        Layout(write_slime_030, "slime", "0.pt"),
        Layout(write_slime_020, "slime", "0.pt"),
        Layout(write_megatron, "megatron", "recorded.pt"),
        Layout(
            write_tracer, "megatron-tracer", "router_trace_rank0.jsonl", {"batch_size": 1}, ids=False, ordered=False
        ),
        Layout(write_skyrl_http, "skyrl-http", "answers.jsonl"),
        Layout(write_skyrl, "skyrl", "global_step_1_training_input.pkl", PICKLE, 32768),
        Layout(write_prime_http, "prime-rl-http", "answers.jsonl", first=1),
        Layout(write_prime_http_base85, "prime-rl-http", "answers.jsonl"),
        Layout(write_prime, "prime-rl", "rank_0.bin"),
        Layout(write_trtllm, "tensorrt-llm", "outputs.pt", most=32768),
        Layout(write_xtuner, "xtuner", "debug_rollout_0.pt", PICKLE),
        Layout(write_lmdeploy, "lmdeploy", "answers.jsonl"),
        Layout(write_roll, "roll", "step_000001.pkl", PICKLE, 32768),
    )
}
