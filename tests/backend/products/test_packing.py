"""Repacking weights, and the way back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pyggml.native import ffi, lib
from pyggml.native.packing import can_unpack, matrix_size, pack_groups, unpacked
from pyggml.testing.harness import FILL, gaussian

from .test_repack import TYPES, source


def test_memory_outside_is_untouched() -> None:
    """Packing writes its own bytes only."""
    for dtype in TYPES:
        w = source(dtype, gaussian(np.random.default_rng(1), (21, 512)))
        size = lib.pg_r16_bytes(dtype.gguf_id, 512, 21)
        out = np.full(size + 128, FILL, np.uint8)
        address: Callable[[int], object] = lambda at, out=out: ffi.cast("void *", out.ctypes.data + at)  # noqa: E731
        lib.pg_r16_pack(dtype.gguf_id, ffi.cast("void *", w.data), w.nb[1], 512, 21, address(64), 0, 2)
        assert (out[:64] == FILL).all() and (out[64 + size :] == FILL).all()


def test_packed_rows_come_back() -> None:
    """Of any bytes, by any range of them, where a type has a way back."""
    rng = np.random.default_rng(2)
    back = [dtype for dtype in TYPES if can_unpack(dtype, 512)]
    assert len(back) == 14
    for dtype in back:
        ne = (512, 37, 2, 1)
        rows = rng.integers(0, 256, (2, 37, dtype.row_size(512)), dtype=np.uint8)
        copy = np.full((2, matrix_size(dtype, ne)), FILL, np.uint8)
        for matrix in range(2):
            pack_groups(dtype, ne, rows[matrix].ctypes.data, copy[matrix].ctypes.data, 0, 3)
        stored, flat = rows.reshape(-1), copy.reshape(-1)
        for start, n in ((0, stored.size), (5, 1), (36 * rows.shape[2] + 3, 2 * rows.shape[2])):
            got = unpacked(dtype, ne, start, n, lambda at, n, flat=flat: flat[at : at + n])
            assert np.array_equal(got, stored[start : start + n]), dtype
