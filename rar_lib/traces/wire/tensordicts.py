"""Columns of a TensorDict, read without tensordict.

A saved TensorDict is one of: `_make_td(class, state)` with its columns in `state["_tensordict"]`; a consolidated one, whose columns
are byte ranges of a single uint8 storage with types and shapes in its metadata; or verl's numpy form, `(batch size, device,
{name: (dtype, shape, bytes)})`. Columns are dense, nested (jagged or strided: one row a sequence), or stacks of plain values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rar_lib.errors import TraceError
from rar_lib.traces.wire.pickles import Inert, plain, tensor_array

Column = Any  # an array [B, ...], or a list of one value a row


def columns(where: str, value: Any) -> dict[str, Column]:
    """Name to column: dense ones as arrays, nested ones as a list of arrays, others as a list of values.

    Raises:
        TraceError: if it is none of the forms above, or a byte range does not fit its type and shape.
    """
    if value is None:
        return {}
    if isinstance(value, Inert) and type(value).path.endswith("_make_td"):
        state = value.args[1] if len(value.args) == 2 else None
        found = state.get("_tensordict") if isinstance(state, Mapping) else None
        if isinstance(found, Mapping):
            return {str(name): _column(f"{where}: {name}", column) for name, column in found.items()}
    elif isinstance(value, Inert) and type(value).path.endswith("_rebuild_tensordict_files_consolidated"):
        if len(value.args) == 2 and isinstance(value.args[0], Mapping):
            return _consolidated(where, value.args[0], value.args[1])
    elif isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], Mapping):
        return {str(name): _numpy_form(f"{where}: {name}", entry) for name, entry in value[2].items()}
    elif isinstance(value, Mapping):
        return {str(name): _column(f"{where}: {name}", column) for name, column in value.items()}
    raise TraceError(f"{where}: expected a TensorDict, found {value!r:.80}")


def _column(where: str, column: Any) -> Column:
    if isinstance(column, torch.Tensor) and column.is_nested:
        try:
            return [tensor_array(row) for row in column.unbind()]
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            raise TraceError(f"{where}: broken nested tensor: {str(error)[:160]}") from None
    if isinstance(column, Inert):
        return _stack(column)
    return plain(column)


def _stack(stack: Inert) -> list[Any]:
    """Values of a NonTensorStack, or rows of a lazy stack."""
    state = stack.state
    if isinstance(state, Mapping) and isinstance(state.get("tensordicts"), Sequence):
        out = []
        for member in state["tensordicts"]:
            inner = member.state.get("non_tensordict") if isinstance(getattr(member, "state", None), Mapping) else None
            out.append(plain(inner.get("data")) if isinstance(inner, Mapping) else member)
        return out
    inner = state.get("non_tensordict") if isinstance(state, Mapping) else None
    if isinstance(inner, Mapping) and "data" in inner:
        return [plain(inner["data"])]
    return [stack]


def _consolidated(where: str, metadata: Mapping[str, Any], storage: Any) -> dict[str, Column]:
    raw = plain(storage)
    leaves = metadata.get("leaves")
    if not isinstance(raw, np.ndarray) or raw.dtype != np.uint8 or raw.ndim != 1 or not isinstance(leaves, Mapping):
        raise TraceError(f"{where}: expected leaves and one uint8 storage in a consolidated TensorDict")
    flat: dict[str, np.ndarray] = {}
    for name, leaf in leaves.items():
        if not isinstance(leaf, tuple | list) or len(leaf) < 4:
            raise TraceError(f"{where}: {name}: expected (type, shape, start, stop), found {leaf!r:.60}")
        kind, shape, start, stop = leaf[:4]
        dtype = getattr(torch, str(kind).removeprefix("torch."), None)
        sizes_ok = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop))
        if not isinstance(dtype, torch.dtype) or not sizes_ok or stop > len(raw):
            raise TraceError(f"{where}: {name}: bytes {start} to {stop} of {kind} lie outside the {len(raw)} stored")
        size = math.prod(shape) * dtype.itemsize
        if not size <= stop - start < size + 8:  # the range ends with padding to eight bytes
            raise TraceError(f"{where}: {name}: shape {list(shape)} of {kind} does not fit bytes {start} to {stop}")
        piece = torch.from_numpy(np.frombuffer(raw[start : start + size].tobytes(), np.uint8).copy())
        flat[str(name)] = tensor_array(
            (piece.view(dtype) if piece.numel() else torch.empty(0, dtype=dtype)).reshape(shape)
        )
    return _rejoin(where, flat)


def _rejoin(where: str, flat: dict[str, np.ndarray]) -> dict[str, Column]:
    """Jagged columns are stored as values and offsets under marked names."""
    out: dict[str, Column] = {}
    for name, values in flat.items():
        if name.startswith("<NJT_VALUES>"):
            bare = name.removeprefix("<NJT_VALUES>")
            offsets = flat.get(f"<NJT_OFFSETS>{bare}")
            if offsets is None or offsets.ndim != 1 or (np.diff(offsets) < 0).any() or offsets[-1:] != len(values):
                raise TraceError(f"{where}: {bare}: expected offsets that rise to {len(values)}")
            out[bare] = np.split(values, offsets[1:-1])
        elif not name.startswith("<NJT_"):
            out[name] = values
    return out


def _numpy_form(where: str, entry: Any) -> Column:
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], list):
        return [_numpy_form(f"{where}[{i}]", part) for i, part in enumerate(entry[1])]
    if not isinstance(entry, tuple) or len(entry) != 3:
        raise TraceError(f"{where}: expected (type, shape, bytes), found {entry!r:.60}")
    kind, shape, raw = entry[0], tuple(entry[1]), plain(entry[2])
    dtype = getattr(torch, str(kind), None)
    if not isinstance(dtype, torch.dtype) or not isinstance(raw, np.ndarray):
        raise TraceError(f"{where}: expected a torch type and bytes, found {kind!r:.40}")
    if math.prod(shape) * dtype.itemsize != raw.nbytes:
        raise TraceError(f"{where}: shape {list(shape)} of {kind} does not fit {raw.nbytes} bytes")
    piece = torch.from_numpy(np.frombuffer(raw.tobytes(), np.uint8).copy())
    return tensor_array((piece.view(dtype) if piece.numel() else torch.empty(0, dtype=dtype)).reshape(shape))


def row(where: str, column: Column, i: int) -> Any:
    """Row i of a column.

    Raises:
        TraceError: if there are fewer rows.
    """
    if i >= len(column):
        raise TraceError(f"{where}: expected at least {i + 1} rows, found {len(column)}")
    return column[i]
