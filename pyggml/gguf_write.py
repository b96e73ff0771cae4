"""Write a GGUF v3 file, tensor by tensor, so that nobody ever sees half of one. Source: ggml/docs/gguf.md.

`gguf.GGUFWriter` wants metadata as Python values and guesses their types; here the records of another file are passed
on as they are.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from .atomic_file import AtomicFile
from .dtypes import DType
from .errors import GGUFError

TensorInfo = tuple[str, DType, tuple[int, ...]]  # name, type, ne

_MAGIC, _VERSION, _UINT32 = b"GGUF", 3, 4


def u32_record(key: str, value: int) -> bytes:
    """The metadata record of an unsigned 32-bit number."""
    return _string(key) + struct.pack("<II", _UINT32, value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


class GGUFOut:
    """A context manager that writes a GGUF file at `path`: `kv` are metadata records, `tensors` what will follow.

    Write the tensors' data in order with `write_tensor`; leaving the block without an exception makes the file appear.
    Raises GGUFError where data of a tensor is missing or has another size than its type and ne say.
    """

    def __init__(
        self, path: str | os.PathLike[str], kv: Sequence[bytes], tensors: Sequence[TensorInfo], alignment: int
    ) -> None:
        self._alignment = alignment
        self._left = [(name, _nbytes(dtype, ne)) for name, dtype, ne in tensors]
        self._left.reverse()
        header = [_MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(kv)), *kv]
        offset = 0
        for name, dtype, ne in tensors:
            header += [_string(name), struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, dtype.gguf_id, offset)]
            offset += _nbytes(dtype, ne)
            offset += -offset % alignment
        self._out = AtomicFile(path)
        size = 0
        for part in header:
            size += self._out.file.write(part)
        self._pad(size)

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


def _nbytes(dtype: DType, ne: tuple[int, ...]) -> int:
    rows = 1
    for n in ne[1:]:
        rows *= n
    return dtype.row_size(ne[0]) * rows
