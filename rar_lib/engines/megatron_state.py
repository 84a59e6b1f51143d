"""A Megatron trainer's state on disk: weights (fp32 masters under bf16) and AdamW moments, exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def _optimizer_tensors(trainer: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(name, main parameter, its AdamW state) of every parameter; the main parameter is fp32, also under bf16."""
    optimizers = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    for name, parameter in trainer.model.named_parameters():
        main = getattr(parameter, "main_param", parameter)
        states = [one.optimizer.state for one in optimizers if main in one.optimizer.state]
        yield name, main, states[0][main] if states else optimizers[0].optimizer.state[main]


def save_state(trainer: Any, folder: Path) -> None:
    """Weights and moments as safetensors, under Megatron's parameter names."""
    tensors = {}
    for name, main, moments in _optimizer_tensors(trainer):
        tensors[f"model.{name}"] = main.detach().contiguous()
        for key, value in moments.items():
            tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value).contiguous()
    save_file(tensors, folder / "trainer.safetensors", metadata={"engine": trainer.name})


def load_state(trainer: Any, folder: Path) -> None:
    """Continue from a folder written by `save_state`."""
    tensors = load_file(folder / "trainer.safetensors")
    with torch.no_grad():
        parameters = dict(trainer.model.named_parameters())
        for name, main, moments in _optimizer_tensors(trainer):
            main.copy_(tensors[f"model.{name}"])
            parameters[name].copy_(main)
            moments.clear()  # a state saved before the first step has none
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"optimizer.{key}.{name}" in tensors:
                    moments[key] = tensors[f"optimizer.{key}.{name}"].clone()
