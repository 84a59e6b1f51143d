"""Text, base64, npy: files of strangers without pickles. No size that a file claims is believed, and every failure names file and place.

JSON lines report line and byte offset; base64 and npy check the length that they claim against what is there. Pickles and torch files
are in pickles.py, msgpack in content.py.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import struct
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rar_lib.errors import TraceError

# ---------------------------------------------------------------- text


def read_bytes(path: Path) -> bytes:
    """The whole file.

    Raises:
        TraceError: if it cannot be read, or is empty.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    if not data:
        raise TraceError(f"{path}: expected a dump, found an empty file")
    return data


def parse_json(where: str, data: bytes | str, start: int = 0) -> Any:
    """A JSON value; `start` is the byte offset of `data` in its file, for the message.

    Raises:
        TraceError: with the offset of the first character that is not JSON.
    """
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: expected JSON, offset {start + error.pos}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{where}: expected UTF-8 text, offset {start + error.start}: {error.reason}") from None
    except (RecursionError, ValueError) as error:  # nested too deep, or a number of thousands of digits
        raise TraceError(f"{where}: offset {start}: JSON that is not read: {error}") from None


def parse_jsonl(path: Path, data: bytes) -> Iterator[tuple[int, Any]]:
    """Line number from 1 and value of every line that is not empty.

    Raises:
        TraceError: as `parse_json`, with the line.
    """
    start = 0
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield number, parse_json(f"{path}, line {number}", line, start)
        start += len(line) + 1


def decode_base64(where: str, text: Any) -> bytes:
    """Bytes of a standard base64 string.

    Raises:
        TraceError: if it is not one.
    """
    if not isinstance(text, str | bytes):
        raise TraceError(f"{where}: expected a base64 string, found {type(text).__name__}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TraceError(f"{where}: expected base64 ({len(text)} characters): {error}") from None


def as_array(where: str, data: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Little-endian values of a known type, of any shape that is told, without a copy.

    Raises:
        TraceError: if the bytes are not exactly as many as the shape needs.
    """
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in shape):
        raise TraceError(f"{where}: expected sizes of 0 or more, found shape {list(shape)}")
    kind = np.dtype(dtype).newbyteorder("<")
    needed = math.prod(shape) * kind.itemsize
    if needed != len(data):
        raise TraceError(f"{where}: shape {list(shape)} of {dtype} needs {needed} bytes, found {len(data)}")
    return np.frombuffer(data, kind).reshape(shape)


def parse_npy(where: str, data: bytes) -> np.ndarray:
    """Integers or floats of any shape from a `.npy` stream of version 1 or 2; object arrays are refused.

    Raises:
        TraceError: if header and payload do not fit, or the type is not a number.
    """
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a header that numpy only reads after repairing it
            shape, fortran, dtype = reader(stream)
    except (
        Warning,
        tokenize.TokenError,
        ValueError,
        KeyError,
        EOFError,
        SyntaxError,
        TypeError,
        struct.error,
        RecursionError,
        MemoryError,
    ) as error:
        raise TraceError(f"{where}: expected a .npy stream: {error}") from None
    if dtype.kind not in "iuf":
        raise TraceError(f"{where}: expected numbers in the .npy stream, found {dtype}")
    left = len(data) - stream.tell()
    needed = math.prod(shape) * dtype.itemsize
    if needed != left or any(n < 0 for n in shape):
        raise TraceError(f"{where}: .npy shape {list(shape)} of {dtype} needs {needed} bytes, found {left}")
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape, order="F" if fortran else "C")
