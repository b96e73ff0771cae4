"""Importance matrices: how much each column of a weight matrix matters, as llama.cpp's imatrix tool measures it."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import GGUFError
from pyggml.gguf_io.read import GGUFFile, open_gguf

Floats = np.ndarray[Any, np.dtype[np.float32]]
Imatrix = Mapping[str, Floats]

_SUMS, _COUNTS = ".in_sum2", ".counts"


def load_imatrix(path: str | os.PathLike[str]) -> dict[str, Floats]:
    """Tensor name -> mean squares of its inputs, float32 [matrices of the tensor, columns].

    Reads llama.cpp's GGUF files (sums and counts per matrix; a matrix that got no input counts evenly) and the `.dat`
    files of its older versions. Raises GGUFError for a file that is neither, or whose values are not finite.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as f:
            start = f.read(4)
            data = b"" if start == b"GGUF" else start + f.read()
    except OSError as e:
        raise GGUFError(f"{name}: cannot be read: {e.strerror}") from e
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
        found = _from_dat(name, data) if data else _from_gguf(open_gguf(path))
    if not found:
        raise GGUFError(f"{name}: holds no importance matrix")
    for tensor, values in found.items():
        if not np.isfinite(values).all():
            raise GGUFError(f"{name}: the importance matrix of {tensor} holds values that are not finite")
    return found


def _from_gguf(file: GGUFFile) -> dict[str, Floats]:
    found: dict[str, Floats] = {}
    for name, sums in file.tensors.items():
        if not name.endswith(_SUMS):
            continue
        tensor = name.removesuffix(_SUMS)
        counts = file.tensors.get(tensor + _COUNTS)
        if counts is None or sums.dtype is not DType.F32 or counts.dtype is not DType.F32 or counts.ne[1] != sums.ne[1]:
            raise GGUFError(f"{file.path}: {name} has no matching {tensor}{_COUNTS} of F32")
        total = file.tensor_bytes(name).view(np.float32).reshape(sums.ne[1], sums.ne[0])
        count = file.tensor_bytes(counts.name).view(np.float32).reshape(counts.ne[1], counts.ne[0])[:, :1]
        found[tensor] = np.where(count > 0, total / np.maximum(count, 1e-30), 1.0).astype(np.float32)
    return found


def _from_dat(path: str, data: bytes) -> dict[str, Floats]:
    """The entries of a .dat file: number of entries, then length and name, number of calls, length and values."""
    found: dict[str, Floats] = {}
    pos = 0

    def i32() -> int:
        nonlocal pos
        (value,) = struct.unpack_from("<i", data, pos)
        pos += 4
        return int(value)

    try:
        for _ in range(i32()):
            n = i32()
            name = data[pos : pos + n].decode()
            pos += n
            n_call, n_values = i32(), i32()
            if n < 1 or n_values < 1:
                raise ValueError
            values = np.frombuffer(data, "<f4", n_values, pos)
            pos += values.nbytes
            found[name] = (values / max(n_call, 1)).astype(np.float32)[None]
    except (struct.error, ValueError):
        raise GGUFError(f"{path}: neither a GGUF file nor an importance matrix of older llama.cpp versions") from None
    return found
