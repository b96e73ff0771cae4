"""The layout R16 (csrc/products/r16/r16.h), which the CPU's products are fastest with: its sizes, packing, unpacking.

A copy in this layout holds the matrices of a tensor one after the other. A matrix is packed in groups of 16 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pyggml.buffers.buffer import ALIGNMENT, Bytes
from pyggml.dtypes import DType

from . import ffi, lib

GROUP = 16  # rows that are packed together


def matrix_size(dtype: DType, ne: Sequence[int]) -> int:
    """Bytes of one matrix of ne[:2] in a copy; 0 when the layout has no such type, or no rows of this length."""
    return int(lib.pg_r16_bytes(dtype.gguf_id, ne[0], ne[1]))


def copy_size(dtype: DType, ne: Sequence[int]) -> int:
    """Bytes of a copy of a tensor, in whole cache lines."""
    size = matrix_size(dtype, ne) * ne[2]
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack_groups(dtype: DType, ne: Sequence[int], rows: int, copy: int, first: int, last: int) -> None:
    """Pack the groups of 16 rows `first` to `last` of a matrix of ne[:2].

    `rows` and `copy` are the addresses of the matrix's first row, stored densely, and of its first group in the copy.
    """
    src, dst = ffi.cast("void *", rows), ffi.cast("void *", copy)
    lib.pg_r16_pack(dtype.gguf_id, src, dtype.row_size(ne[0]), ne[0], ne[1], dst, first, last)


def can_unpack(dtype: DType, n: int) -> bool:
    """Whether rows of `n` elements can be packed, and come back bit for bit."""
    known = lib.pg_r16_unpack(dtype.gguf_id, ffi.NULL, 0, 0, ffi.NULL, 0, 0, 0) == lib.PG_OK
    return known and n % dtype.block_size == 0


def unpacked(dtype: DType, ne: Sequence[int], start: int, n: int, read: Callable[[int, int], Bytes]) -> Bytes:
    """Bytes `start` to `start + n`, uint8, of a tensor in its own format, made from its repacked copy. `read(first, n)`
    gives `n` bytes of the copy."""
    row_size, size, m = dtype.row_size(ne[0]), matrix_size(dtype, ne), ne[1]
    group_size = size // -(-m // GROUP)
    row, end = start // row_size, -(-(start + n) // row_size)
    skipped = start - row * row_size
    pieces: list[Bytes] = []
    while row < end:
        matrix, at = divmod(row, m)
        to = min(end - matrix * m, m)
        first, last = at // GROUP, -(-to // GROUP)
        packed = read(matrix * size + first * group_size, (last - first) * group_size)
        rows = np.empty((min(last * GROUP, m) - first * GROUP) * row_size, np.uint8)
        src, dst = ffi.cast("void *", packed.ctypes.data), ffi.cast("void *", rows.ctypes.data)
        n_rows = m - first * GROUP
        lib.pg_r16_unpack(dtype.gguf_id, src, ne[0], n_rows, dst, row_size, 0, last - first)
        pieces.append(rows[(at - first * GROUP) * row_size : (to - first * GROUP) * row_size])
        row = matrix * m + to
    return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces))[skipped : skipped + n]
