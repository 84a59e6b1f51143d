"""Weights of a Transformers model under the names of its checkpoint format, out and in.

In memory Transformers fuses the experts of a layer into a few large tensors; in checkpoints, and for every other engine,
each expert has tensors of its own. Its own conversion leads from memory to names. The way back is found by sending
positions instead of weights through that conversion, once a model: each named tensor then knows where its elements
live. So both directions hold for every family that Transformers can save.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rar_lib.engines.base import NamedTensors
from rar_lib.errors import EngineError
from rar_lib.replay.points import find_points

_PLACES: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()
_ORDER: weakref.WeakKeyDictionary[torch.nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


def _to_names(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, state))


def hf_names(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of any shape under checkpoint names, one tensor an expert, detached; whole also where processes share them, which all must
    then ask."""
    yield from _to_names(model, {name: whole(tensor.detach()) for name, tensor in model.state_dict().items()}).items()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of any shape that processes share in slices (DTensor), put together on each; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _places(model: Any) -> dict[str, torch.Tensor]:
    """For each checkpoint name, where its elements lie in the model's state laid end to end."""
    if model not in _PLACES:
        state, offset = {}, 0
        for name, tensor in model.state_dict().items():
            state[name] = torch.arange(offset, offset + tensor.numel()).reshape(tensor.shape)
            offset += tensor.numel()
        _PLACES[model] = _to_names(model, state)
    return _PLACES[model]


def _order(model: Any) -> torch.Tensor:
    """For each element of the model's state laid end to end, where it lies among the named tensors laid end to end."""
    if model not in _ORDER:
        there = torch.cat([place.reshape(-1) for place in _places(model).values()])
        total = sum(tensor.numel() for tensor in model.state_dict().values())
        order = torch.full((total,), -1).scatter_(0, there, torch.arange(len(there)))
        if bool((order < 0).any()):
            raise EngineError("weights: the names of the checkpoint format do not cover the model's state")
        _ORDER[model] = order
    return _ORDER[model]


def router_names(model: Any) -> set[str]:
    """Checkpoint names of the weights of the model's routers."""
    inside = {id(p) for router in getattr(find_points(model), "routers", []) for p in router.parameters()}
    owned = {name for name, p in model.named_parameters() if id(p) in inside}
    offset, ranges = 0, []
    for name, tensor in model.state_dict().items():
        if name in owned:
            ranges.append((offset, offset + tensor.numel()))
        offset += tensor.numel()
    firsts = {name: int(place.reshape(-1)[0]) for name, place in _places(model).items()}
    return {name for name, first in firsts.items() if any(a <= first < b for a, b in ranges)}


def load_hf_weights(model: Any, weights: NamedTensors) -> None:
    """Put checkpoint-named weights into a Transformers model, in place, through float32 to the model's dtype.

    Raises:
        EngineError: if a weight of the model is missing, one is not the model's, or a shape differs; nothing is changed.
    """
    given, places, state = dict(weights), _places(model), model.state_dict()
    missing, extra = sorted(places.keys() - given.keys()), sorted(given.keys() - places.keys())
    if missing or extra:
        raise EngineError(
            f"weights: expected the model's {len(places)} names; missing {missing[:5]}, not the model's {extra[:5]}"
        )
    for name, place in places.items():
        if given[name].shape != place.shape:
            raise EngineError(f"weight {name}: expected shape {tuple(place.shape)}, found {tuple(given[name].shape)}")
    with torch.no_grad():
        flat = torch.cat([given[name].reshape(-1).float() for name in places])[_order(model)]
        for tensor, part in zip(state.values(), flat.split([t.numel() for t in state.values()]), strict=True):
            tensor.copy_(part.reshape(tensor.shape))
