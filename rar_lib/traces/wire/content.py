"""What kind of file it is, by its first bytes, and its content parsed once for all readers that look at it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rar_lib.errors import TraceError
from rar_lib.traces.wire.dump import Dump, ReadOptions
from rar_lib.traces.wire.files import parse_json, parse_jsonl, parse_npy, read_bytes
from rar_lib.traces.wire.pickles import load_pickle, load_torch

ContainerKind = Literal["safetensors", "torch", "pickle", "npy", "msgpack", "json", "jsonl", "text"]


FOREIGN = {
    b"\x1f\x8b": "a gzip file: unpack it first", b"\x28\xb5\x2f\xfd": "a zstandard file: unpack it first",
    b"BZh": "a bzip2 file: unpack it first", b"\xfd7zXZ": "an xz file: unpack it first", b"\x89PNG": "a PNG picture",
    b"PAR1": "a parquet file, which no producer writes routes to",
}  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """One producer's layout.

    Attributes:
        name: as `format=` takes it.
        what: the file and the layout, in a line.
        claims: why a file is of this format, or None.
        read: the samples of it.
    """

    name: str
    what: str
    claims: Callable[[Content], str | None]
    read: Callable[[Content], Dump]


class Content:
    """A file with its kind and its parsed value.

    Attributes:
        path: of the file.
        options: what the caller knows beside it.
        kind: the container, by its first bytes.

    Raises:
        TraceError: for a file that cannot be read, is empty, or is packed (gzip and the like).
    """

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path, self.options = path, options
        self.kind = self._kind()

    @cached_property
    def data(self) -> bytes:
        """The whole file, read once.

        Raises:
            TraceError: if it cannot be read.
        """
        return read_bytes(self.path)

    def _kind(self) -> ContainerKind:
        if self.path.is_dir():
            inside = sorted(p.name for p in self.path.iterdir())[:8]
            raise TraceError(
                f"{self.path}: expected a file, found a folder with {', '.join(inside) or 'nothing in it'}"
            )
        try:
            with self.path.open("rb") as file:
                head = file.read(4096)
            size = self.path.stat().st_size
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be read: {error.strerror}") from None
        if not head:
            raise TraceError(f"{self.path}: expected a dump, found an empty file")
        for magic, what in FOREIGN.items():
            if head.startswith(magic):
                raise TraceError(f"{self.path}: expected a dump, found {what}")
        if head.startswith(b"PK\x03\x04"):
            return "torch"
        if head.startswith(b"\x93NUMPY"):
            return "npy"
        if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
            return "safetensors"
        if head[0] == 0x80 and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
            return "pickle"
        if 0x90 <= head[0] <= 0x9F or head[0] in (0xDC, 0xDD):
            return "msgpack"
        start = head.lstrip()
        if start[:1] not in (b"{", b"["):
            return "text"
        return "jsonl" if self._many_lines() else "json"

    def _many_lines(self) -> bool:
        """JSON lines: the first line is a value of its own and another follows, or the name says so."""
        if self.path.suffix == ".jsonl":
            return True
        first, _, rest = self.data.strip().partition(b"\n")
        if not rest.strip():
            return False
        try:
            parse_json("", first)
        except TraceError:
            return False
        return True

    @cached_property
    def value(self) -> Any:
        """Parsed content: Python values, arrays, tensors and inert records; None for a safetensors file.

        Raises:
            UndecidedError: for a pickle without `allow_pickle`.
            TraceError: if the file is not what its first bytes promise.
        """
        where = str(self.path)
        if self.kind == "torch":
            return load_torch(where, self.path, self.options.allow_pickle)
        if self.kind == "pickle":
            return load_pickle(where, self.data, self.options.allow_pickle)
        if self.kind == "npy":
            return parse_npy(where, self.data)
        if self.kind == "json":
            return parse_json(where, self.data)
        if self.kind == "jsonl":
            return [value for _, value in parse_jsonl(self.path, self.data)]
        if self.kind == "msgpack":
            return load_msgpack(where, self.data)
        if self.kind == "text":
            try:
                return self.data.decode()
            except UnicodeDecodeError as error:
                raise TraceError(f"{where}: no known container, and no text at offset {error.start}") from None
        return None

    @cached_property
    def all_records(self) -> list[tuple[str, Any]]:
        """JSON values with their place: every line, the members of a list, or the one value there is; also lists in a torch file."""
        if self.kind == "jsonl":
            return [(f"line {n}", v) for n, v in parse_jsonl(self.path, self.data)]
        if self.kind in ("json", "torch"):
            value = self.value
            return [(f"[{i}]", v) for i, v in enumerate(value)] if isinstance(value, list) else [("the object", value)]
        return []

    @property
    def records(self) -> list[tuple[str, dict[str, Any]]]:
        """The objects among them."""
        return [(where, record) for where, record in self.all_records if isinstance(record, dict)]


def load_msgpack(where: str, data: bytes) -> Any:
    """A msgpack value; lengths are checked against the bytes that are there before anything is built.

    Raises:
        TraceError: if it is broken, or msgspec is not installed.
    """
    try:
        import msgspec
    except ImportError:
        raise TraceError(f"{where}: a msgpack file needs the package msgspec: pip install msgspec") from None
    _check_msgpack(where, data)
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError, MemoryError) as error:
        raise TraceError(f"{where}: broken msgpack: {error}") from None


# bytes that follow a type byte: those of its value, or those of its length
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
          0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17, 0xC0: 0, 0xC2: 0, 0xC3: 0}  # fmt: skip
_RAW = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4}
_MANY = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def _check_msgpack(where: str, data: bytes) -> None:
    """Walk over the values without building them: a claimed length never exceeds what is left."""
    at, wanted, size = 0, 1, len(data)
    while wanted:
        if at >= size:
            raise TraceError(f"{where}: msgpack ends at offset {at} where {wanted} more values are expected")
        kind, wanted = data[at], wanted - 1
        at += 1
        if kind <= 0x7F or kind >= 0xE0:
            continue
        if 0x80 <= kind <= 0x9F:
            wanted += (kind & 0x0F) * (2 if kind < 0x90 else 1)
        elif 0xA0 <= kind <= 0xBF:
            at += kind & 0x1F
        elif kind in _FIXED:
            at += _FIXED[kind]
        elif kind in _RAW:
            length = _RAW[kind]
            at += length + int.from_bytes(data[at : at + length], "big") + (1 if 0xC7 <= kind <= 0xC9 else 0)
        elif kind in _MANY:
            length, each = _MANY[kind]
            wanted += int.from_bytes(data[at : at + length], "big") * each
            at += length
        else:
            raise TraceError(f"{where}: no msgpack value at offset {at - 1} (byte {kind:#x})")
        if at > size or wanted > size - at:
            raise TraceError(f"{where}: msgpack claims more at offset {at} than the {size} bytes that there are")
    if at != size:
        raise TraceError(f"{where}: {size - at} bytes follow the msgpack value at offset {at}")
