"""Data types: one row per GGUF tensor type. Source: the GGUF document (a test equates it with the gguf package)."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from typing import Any, cast

import numpy as np


class DType(Enum):
    """A tensor element type: (GGUF id, elements per block, bytes per block, NumPy dtype or "" if it has none)."""

    F32 = (0, 1, 4, "f4")
    F16 = (1, 1, 2, "f2")
    Q4_0 = (2, 32, 18, "")
    Q4_1 = (3, 32, 20, "")
    Q5_0 = (6, 32, 22, "")
    Q5_1 = (7, 32, 24, "")
    Q8_0 = (8, 32, 34, "")
    Q8_1 = (9, 32, 40, "")
    Q2_K = (10, 256, 84, "")
    Q3_K = (11, 256, 110, "")
    Q4_K = (12, 256, 144, "")
    Q5_K = (13, 256, 176, "")
    Q6_K = (14, 256, 210, "")
    Q8_K = (15, 256, 292, "")
    IQ2_XXS = (16, 256, 66, "")
    IQ2_XS = (17, 256, 74, "")
    IQ3_XXS = (18, 256, 98, "")
    IQ1_S = (19, 256, 50, "")
    IQ4_NL = (20, 32, 18, "")
    IQ3_S = (21, 256, 110, "")
    IQ2_S = (22, 256, 82, "")
    IQ4_XS = (23, 256, 136, "")
    I8 = (24, 1, 1, "i1")
    I16 = (25, 1, 2, "i2")
    I32 = (26, 1, 4, "i4")
    I64 = (27, 1, 8, "i8")
    F64 = (28, 1, 8, "f8")
    IQ1_M = (29, 256, 56, "")
    BF16 = (30, 1, 2, "")
    TQ1_0 = (34, 256, 54, "")
    TQ2_0 = (35, 256, 66, "")
    MXFP4 = (39, 32, 17, "")
    NVFP4 = (40, 64, 36, "")
    Q1_0 = (41, 128, 18, "")

    def __init__(self, gguf_id: int, block_size: int, type_size: int, np_name: str) -> None:
        self.gguf_id = gguf_id
        self.block_size = block_size
        self.type_size = type_size
        self.is_quantized = block_size > 1
        self.is_float = block_size == 1 and not np_name.startswith("i")
        self.np_dtype: np.dtype[Any] | None = np.dtype(np_name) if np_name else None

    __hash__ = object.__hash__  # members are themselves alone; Enum's own is slow

    def row_size(self, n: int) -> int:
        """Bytes of `n` contiguous elements. Raises ValueError when `n` is not a whole number of blocks."""
        if n % self.block_size:
            raise ValueError(f"{n} elements are not a whole number of {self.name} blocks of {self.block_size}")
        return n // self.block_size * self.type_size

    @staticmethod
    def from_gguf(gguf_id: int) -> DType:
        """The type with this GGUF id. Raises ValueError for an id that is unknown (or long removed)."""
        try:
            return _BY_ID[gguf_id]
        except KeyError:
            raise ValueError(f"unknown GGUF tensor type id {gguf_id}") from None

    def __repr__(self) -> str:
        return self.name


# Block types that kernels read: Q8_1 and Q8_K only exist inside other libraries' products, and nothing makes Q1_0.
READABLE_BLOCKS = tuple(t for t in DType if t.is_quantized and t not in (DType.Q8_1, DType.Q8_K, DType.Q1_0))
# Block types that kernels write. A block of each begins with its scale in F16.
WRITABLE_BLOCKS = (DType.Q8_0, DType.Q4_0, DType.Q4_1, DType.IQ4_NL, DType.Q5_0, DType.Q5_1)
CACHE_TYPES = (DType.F32, DType.F16, DType.BF16, *WRITABLE_BLOCKS)  # what a KV cache may store

_BY_ID = {t.gguf_id: t for t in DType}
_BY_NUMPY = {t.np_dtype: t for t in DType if t.np_dtype is not None}


def no_dtype(x: object) -> str:
    """What is wrong with an argument that should be a DType, and which one may be meant."""
    meant = DType.__members__.get(x.upper()) if isinstance(x, str) else None
    if meant is None and isinstance(x, (str, type, np.dtype)):
        with suppress(TypeError):
            meant = _BY_NUMPY.get(np.dtype(cast(Any, x)))
    return f"{x!r:.40} is no pyggml.DType" + (f" (is pyggml.{meant.name} meant?)" if meant is not None else "")


def dtype_of(array: np.ndarray[Any, Any]) -> DType | None:
    """The type that stores a NumPy array as it is, or None."""
    return _BY_NUMPY.get(array.dtype)
