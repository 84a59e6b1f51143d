"""Pickles and torch files of strangers: nothing is executed, and no foreign class is imported.

- Tensors (`.pt`) are loaded with torch's weights-only loading, memory-mapped. Zip archives whose entries are compressed, or add
  up to more than the file, are refused before that. A few names that dumps are known to hold (numpy arrays, TensorDict) get
  inert stand-ins; any other name ends in an error that lists it.
- Pickles are read only with `allow_pickle=True`, and even then every name outside a short list of plain containers, numpy arrays and
  tensors becomes an `Inert` record of its arguments and state.

One file: what is loaded, what stands in for a class, and what is refused before either are one rule of trust.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import pickle
import re
import struct
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from rar_lib.errors import TraceError, UndecidedError

# ---------------------------------------------------------------- inert records


class Inert:
    """A foreign object: its name, the arguments it was made with, and its state. It does nothing.

    Attributes:
        path: module and name of the foreign class.
        args: the arguments it was made with.
        state: what the pickle would have set, or None.
        items: what the pickle would have put in: members of a list, (key, value) pairs of a mapping.
    """

    path = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = object.__new__(cls)
        made.args, made.state, made.items = args, None, []
        return made

    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """What a pickled list subclass does with a member: it is kept in `items`."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """See append."""
        self.items.extend(values)

    def __repr__(self) -> str:
        return f"<{self.path}, not loaded>"


def inert(path: str) -> type[Inert]:
    """The stand-in of one foreign name."""
    return type(path.rpartition(".")[2], (Inert,), {"path": path})


class PickledType:
    """A numpy type being unpickled: kind, size and byte order, and nothing else of its state.

    numpy's own would take flags from the file, and a forged one makes pointers of the file's bytes.

    Raises:
        UnpicklingError: for anything but numbers, text or objects.
    """

    def __init__(self, name: Any = "", *flags: Any) -> None:
        if not isinstance(name, str) or re.fullmatch(r"[<>|=]?([biufSU]\d{1,9}|O8?|\?)", name) is None:
            raise pickle.UnpicklingError(f"numpy type: expected numbers, text or objects, found {name!r:.40}")
        self.plain = np.dtype(name)
        self.objects = self.plain.kind == "O"

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("numpy type: expected a state with a byte order")
        if len(state) > 3 and (state[2] is not None or state[3] is not None):
            raise pickle.UnpicklingError("numpy type: structured types are not read")
        if not self.objects:
            self.plain = self.plain.newbyteorder(state[1])


class PickledArray:
    """A numpy array being unpickled, checked before memory is taken for it.

    Attributes:
        values: the array, of any shape; None until its state has come.
    """

    values: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("numpy array: expected a state of five parts")
        _, shape, pickled, fortran, raw = state
        if (
            not isinstance(pickled, PickledType)
            or not isinstance(shape, tuple)
            or not all(isinstance(n, int) for n in shape)
        ):
            raise pickle.UnpicklingError("numpy array: expected a shape and a type")
        dtype = pickled.plain
        if pickled.objects:
            if not isinstance(raw, list) or len(raw) != math.prod(shape):
                raise pickle.UnpicklingError(f"numpy array: shape {shape} of objects does not fit its list")
            self.values = np.empty(len(raw), object)
            for i, value in enumerate(raw):
                self.values[i] = plain(value)
            self.values = self.values.reshape(shape)
            return
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        if not isinstance(raw, bytes | bytearray) or len(raw) != math.prod(shape) * dtype.itemsize:
            raise pickle.UnpicklingError(f"numpy array: shape {shape} of {dtype} does not fit its bytes")
        self.values = np.frombuffer(raw, dtype).reshape(shape, order="F" if fortran else "C")


def _reconstruct(*args: Any) -> PickledArray:
    return PickledArray()


def _frombuffer(buffer: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    if not isinstance(dtype, PickledType) or dtype.objects:
        raise pickle.UnpicklingError("numpy buffer: expected a type of numbers or text")
    return np.frombuffer(buffer, dtype=dtype.plain).reshape(tuple(shape), order="F" if order == "F" else "C")


def _scalar(dtype: Any, raw: Any = None) -> Any:
    raw = raw.encode("latin1") if isinstance(raw, str) else raw
    if (
        not isinstance(dtype, PickledType)
        or dtype.objects
        or not isinstance(raw, bytes)
        or len(raw) != dtype.plain.itemsize
    ):
        raise pickle.UnpicklingError("numpy scalar: expected a type and its bytes")
    return np.frombuffer(raw, dtype.plain)[0]


def _no_bytes(*args: Any) -> bytes:
    """Empty bytes, which old pickle protocols write as a call; with a number the call would take that much memory."""
    if args:
        raise pickle.UnpicklingError("bytes: expected no arguments")
    return b""


def plain(value: Any) -> Any:
    """Numpy arrays and tensors as arrays; everything else as it is.

    Raises:
        TraceError: for an array without content, or a tensor that `tensor_array` refuses.
    """
    if isinstance(value, PickledArray):
        if value.values is None:
            raise TraceError("numpy array: its content is missing")
        return value.values
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return tensor_array(value)
    return value


def tensor_array(tensor: torch.Tensor) -> np.ndarray:
    """A dense CPU tensor of any shape as an array without a copy (bfloat16 as float32), where its storage really
    holds it.

    Raises:
        TraceError: if strides repeat memory (a small file would become a large array), or numpy has no such type.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise TraceError(f"tensor: expected a dense one on the CPU, found {tensor.layout} on {tensor.device}")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise TraceError(
            f"tensor: shape {list(tensor.shape)} of {tensor.dtype} needs more than its "
            f"{tensor.untyped_storage().nbytes()} stored bytes"
        )
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    try:
        return tensor.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise TraceError(f"tensor of {tensor.dtype}: {error}") from None


NUMPY: dict[str, Callable[..., Any]] = {
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _frombuffer for core in ("core", "_core")},
    "numpy.ndarray": inert("numpy.ndarray"),
    "numpy.dtype": PickledType,
    "builtins.bytes": _no_bytes,
    "__builtin__.bytes": _no_bytes,
}
TENSORDICT = (
    "tensordict._reductions._make_td",
    "tensordict._reductions._rebuild_tensordict_files_consolidated",
    "tensordict._reductions._rebuild_tensordict_files",
    "tensordict._td.TensorDict",
    "tensordict.TensorDict",
    "tensordict._lazy.LazyStackedTensorDict",
    "tensordict.tensorclass.NonTensorStack",
    "tensordict.tensorclass.NonTensorData",
)
# constructors of plain values; nothing here reads, writes or imports
PLAIN: dict[str, Any] = {
    **NUMPY,
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "__builtin__.set": set,
    "_codecs.encode": lambda text, coding="latin1": text.encode("latin1"),
    "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
    "torch._utils._rebuild_parameter": torch._utils._rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": torch._tensor._rebuild_from_type_v2,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch.Tensor": torch.Tensor,
    "_io.BytesIO": io.BytesIO,
    "io.BytesIO": io.BytesIO,
}


_Unpickler: Any = pickle._Unpickler  # in Python, since the C one believes sizes and memo indices


class InertUnpickler(_Unpickler):
    """Reads plain values; any other name becomes an `Inert` record."""

    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def __init__(self, file: Any, **_: Any) -> None:
        self._file = file
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name in the pickle; nothing is imported but torch's own types."""
        path = f"{module}.{name}"
        if path in PLAIN:
            return PLAIN[path]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch.nested._internal.nested_tensor" and name in ("_rebuild_njt", "NestedTensor"):
            import torch.nested._internal.nested_tensor as nested

            return getattr(nested, name)
        return inert(path)

    def load_bytearray8(self) -> None:
        """A byte array: its size is checked before memory is taken for it.

        Raises:
            UnpicklingError: if it goes beyond the end.
        """
        (size,) = struct.unpack("<Q", self.read(8))
        data = self.read(size) if size < 2**48 else b""
        if len(data) != size:
            raise pickle.UnpicklingError(f"a byte array of {size} bytes goes beyond the end")
        self.append(bytearray(data))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8


def _inert_load(file: Any, **_: Any) -> Any:
    return InertUnpickler(file).load()


INERT_PICKLE: Any = types.SimpleNamespace(
    Unpickler=InertUnpickler, load=_inert_load, UnpicklingError=pickle.UnpicklingError, __name__="inert"
)
BROKEN = (
    pickle.UnpicklingError, RuntimeError, ValueError, KeyError, IndexError, AttributeError, TypeError, EOFError, OSError,
    struct.error, zipfile.BadZipFile, MemoryError, OverflowError, AssertionError, RecursionError, NotImplementedError,
    UnicodeDecodeError, ImportError,
)  # fmt: skip


def load_pickle(where: str, data: bytes, allow_pickle: bool) -> Any:
    """A pickle as plain values and inert records.

    Raises:
        UndecidedError: without `allow_pickle`.
        TraceError: if the pickle is broken.
    """
    if not allow_pickle:
        raise UndecidedError(
            f"{where}: this is a Python pickle, a format that can carry code; read it with allow_pickle=True (--allow-pickle). "
            f"Its classes are not imported even then: plain values, arrays and tensors are taken, the rest stays inert"
        )
    stream = io.BytesIO(data)
    try:
        return InertUnpickler(stream).load()
    except BROKEN as error:
        raise TraceError(f"{where}: broken pickle near offset {stream.tell()}: {_short(error)}") from None


def _short(error: BaseException) -> str:
    """The line of a long message that says what was found."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    marks = [i for i, line in enumerate(lines) if "WeightsUnpickler error" in line]
    told = lines[marks[0] :] if marks else lines[:1]
    return f"{type(error).__name__}: {' '.join(told[:2]).rpartition('WeightsUnpickler error:')[2].strip()[:200]}"


# ---------------------------------------------------------------- torch files


def check_zip(where: str, stream: Any, size: int) -> bytes:
    """The pickle inside a torch file, after refusing archives that would unpack to more than the file.

    Raises:
        TraceError: if it is no zip, an entry is compressed, or entries claim more bytes than the file has.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
            squeezed = [
                e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED or e.file_size != e.compress_size
            ]
            if squeezed:
                raise TraceError(f"{where}: entry {squeezed[0]} is compressed; torch stores its entries as they are")
            total = sum(e.file_size for e in entries)
            if total > size:
                raise TraceError(f"{where}: entries claim {total} bytes, the file has {size}")
            content = [e for e in entries if e.filename.endswith("/data.pkl")]
            if len(content) != 1:
                raise TraceError(f"{where}: expected one data.pkl inside, found {len(content)}: no torch file")
            return archive.read(content[0])
    except TraceError:
        raise
    except BROKEN as error:
        raise TraceError(f"{where}: expected a torch file (a zip archive): {error}") from None


def load_torch(where: str, source: Path | bytes, allow_pickle: bool = False) -> Any:
    """What `torch.save` wrote, with weights-only loading; files are memory-mapped.

    Raises:
        UndecidedError: for classes that are not plain data (named), unless `allow_pickle` makes them inert records.
        TraceError: if the file is broken.
    """
    mapped = isinstance(source, Path)
    size = source.stat().st_size if isinstance(source, Path) else len(source)
    opened: Any = str(source) if isinstance(source, Path) else io.BytesIO(source)
    content = check_zip(where, source if isinstance(source, Path) else io.BytesIO(source), size)
    if b"torch._dynamo" in content:  # a mark on jagged tensors, which torch trusts once this module is there
        importlib.import_module("torch._dynamo.decorators")
    stands_in: list[tuple[Callable[..., Any], str]] = [(call, name) for name, call in NUMPY.items()]
    stands_in += [(inert(name), name) for name in TENSORDICT]
    stands_in += [(PickledArray, "rar_lib.PickledArray"), (PickledType, "rar_lib.PickledType")]
    try:
        with _only_stand_ins(stands_in):
            return torch.load(opened, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        foreign = _names(source)
        if not foreign:
            raise TraceError(f"{where}: broken torch file: {_short(error)}") from None
        if not allow_pickle:
            raise UndecidedError(
                f"{where}: weights-only loading refused it: {foreign}; read it with allow_pickle=True (--allow-pickle): foreign "
                f"classes then stay inert records, none is imported"
            ) from None
    except BROKEN as error:
        raise TraceError(f"{where}: broken torch file: {_short(error)}") from None
    if isinstance(opened, io.BytesIO):
        opened.seek(0)
    try:
        return torch.load(opened, map_location="cpu", weights_only=False, pickle_module=INERT_PICKLE, mmap=mapped)
    except BROKEN as error:
        raise TraceError(f"{where}: broken torch file: {_short(error)}") from None


@contextlib.contextmanager
def _only_stand_ins(entries: list[Any]) -> Iterator[None]:
    """Weights-only loading with these names. Where numpy's or tensordict's real ones were registered in this process (tensordict does so
    when it is imported), they are set aside meanwhile; torch's own stay."""
    before = torch.serialization.get_safe_globals()
    kept = [entry for entry in before if not _name_of(entry).startswith(("numpy", "tensordict", "builtins"))]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*kept, *entries])
    try:
        yield
    finally:
        found = (
            torch.serialization.get_safe_globals()
        )  # torch registers some of its own when they are imported while loading
        fresh = [entry for entry in found if entry not in entries and entry not in before]
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([*before, *fresh])


def _name_of(entry: Any) -> str:
    return str(entry[1]) if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _names(source: Path | bytes) -> str:
    """The foreign names in a torch file, in words."""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(
            str(source) if isinstance(source, Path) else io.BytesIO(source)
        )
    except BROKEN:
        return ""
    known = {*NUMPY, *TENSORDICT}
    names = sorted(set(found) - known)
    return f"it holds {', '.join(names[:6])}" if names else ""
