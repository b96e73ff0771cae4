"""Write a GGUF v3 file, tensor by tensor; it appears when it is whole. Source: ggml/docs/gguf.md.

`gguf.GGUFWriter` takes metadata as Python values and guesses their types; here the records of another file are passed
on as they are.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, cast

import numpy as np

from ..dtypes import DType
from ..errors import GGUFError
from .atomic_file import AtomicFile
from .read import SCALARS, GGUFValueType

TensorInfo = tuple[str, DType, tuple[int, ...]]  # name, type, ne

_MAGIC, _VERSION = b"GGUF", 3
_MAX_KEY = 65535
_WHOLE = (GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.INT64, GGUFValueType.UINT64)


def kv_record(key: str, value: Any) -> bytes:
    """A metadata record. Whole numbers are stored as the first of UINT32, INT32, INT64 and UINT64 that fits, floats as
    FLOAT64, NumPy's numbers and one-dimensional arrays as they are, lists of strings or of numbers of a kind as arrays.
    Raises GGUFError for a key that is not 1 to 65535 bytes of text, and for other values."""
    try:
        name = _string(key)
    except (AttributeError, UnicodeError):
        name = b""
    if not 0 < len(name) - 8 <= _MAX_KEY:
        raise GGUFError(f"a metadata key must be 1 to {_MAX_KEY} bytes of text, not {key!r:.80}")
    try:
        kind, data = _value(value)
    except (TypeError, ValueError, OverflowError) as e:
        raise GGUFError(f"metadata {key}: GGUF has no type for {value!r:.80}: {e}") from None
    return name + struct.pack("<I", kind) + data


def _value(value: Any) -> tuple[GGUFValueType, bytes]:
    """The type and bytes of a value."""
    if isinstance(value, str):
        return GGUFValueType.STRING, _string(value)
    if isinstance(value, list | tuple):
        items = list(cast(Sequence[Any], value))
        if items and all(isinstance(x, str) for x in items):
            text = b"".join(map(_string, items))
            return GGUFValueType.ARRAY, struct.pack("<IQ", GGUFValueType.STRING, len(items)) + text
        value = np.asarray(items, None if items else np.int32)
    array: np.ndarray[Any, np.dtype[Any]] = np.asarray(value)
    if array.ndim == 1:
        kind = _kind_of(array)
        return GGUFValueType.ARRAY, struct.pack("<IQ", kind, array.size) + array.astype(SCALARS[kind]).tobytes()
    kind = next(k for k in _WHOLE if _fits(value, k)) if type(value) is int else _kind_of(array)
    return kind, np.asarray(value, SCALARS[kind]).tobytes()


def _fits(n: int, kind: GGUFValueType) -> bool:
    info = np.iinfo(SCALARS[kind])
    if (kind is GGUFValueType.UINT64 and n > info.max) or (kind is GGUFValueType.INT64 and n < info.min):
        raise OverflowError("it takes more than 64 bits")
    return info.min <= n <= info.max


def _kind_of(a: np.ndarray[Any, np.dtype[Any]]) -> GGUFValueType:
    for kind, dtype in SCALARS.items():
        if a.dtype == dtype.newbyteorder("=") and a.ndim < 2:
            return kind
    raise TypeError(f"{a.dtype}{list(a.shape)}")


def _string(text: str) -> bytes:
    data = text.encode(errors="surrogateescape")  # as the reader
    return struct.pack("<Q", len(data)) + data


class GGUFOut:
    """A context manager that writes a GGUF file at `path`: `kv` are metadata records, `tensors` what will follow.

    Write the tensors' data in order with `write_tensor`; leaving the block without an exception makes the file appear.
    Raises GGUFError when the data of a tensor is missing, or has another size than its type and ne say.
    """

    def __init__(
        self, path: str | os.PathLike[str], kv: Sequence[bytes], tensors: Sequence[TensorInfo], alignment: int
    ) -> None:
        self._alignment = alignment
        self._left = [(name, stored_bytes(dtype, ne)) for name, dtype, ne in tensors]
        self._left.reverse()
        header = [_MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(kv)), *kv]
        offset = 0
        for name, dtype, ne in tensors:
            header += [_string(name), struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, dtype.gguf_id, offset)]
            offset += stored_bytes(dtype, ne)
            offset += -offset % alignment
        self._out = AtomicFile(path)
        try:
            size = sum(self._out.file.write(part) for part in header)
            self._pad(size)
        except BaseException:
            self._out.discard()
            raise

    def write_tensor(self, chunks: Iterable[np.ndarray[Any, np.dtype[Any]]]) -> None:
        """The data of the next tensor: contiguous arrays that follow each other."""
        name, nbytes = self._left.pop()
        size = 0
        for chunk in chunks:
            size += self._out.file.write(chunk.data)
        if size != nbytes:
            raise GGUFError(f"tensor {name}: {size} bytes were written instead of {nbytes}")
        self._pad(size)

    def _pad(self, size: int) -> None:
        self._out.file.write(b"\0" * (-size % self._alignment))

    def __enter__(self) -> GGUFOut:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                if self._left:
                    raise GGUFError(f"{len(self._left)} tensors were not written, the first is {self._left[-1][0]}")
                self._out.commit()
        finally:
            self._out.discard()


def stored_bytes(dtype: DType, ne: tuple[int, ...]) -> int:
    """Bytes of a tensor of that type and ne, stored densely."""
    rows = 1
    for n in ne[1:]:
        rows *= n
    return dtype.row_size(ne[0]) * rows
