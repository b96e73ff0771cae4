"""Stored weights: what any bytes are as numbers, and in the layout that products are fastest with."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pyggml.backends.cpu.isa import isa_levels
from pyggml.backends.quantize import dequantize, quantize
from pyggml.dtypes import READABLE_BLOCKS, DType
from pyggml.errors import GGMLError
from pyggml.native import ffi, lib
from pyggml.native.packing import GROUP, can_unpack, matrix_size, pack_groups, unpacked

from .harness import harness

TYPES = (*READABLE_BLOCKS, DType.F16, DType.BF16)


def _blocks() -> Iterable[bytes]:
    for i, dtype in enumerate(TYPES):
        yield bytes([i]) + bytes(range(1, 250)) * 2
        if dtype.is_quantized:
            yield bytes([i]) + quantize(np.linspace(-2, 2, dtype.block_size, dtype=np.float32), dtype).tobytes()


@harness("pyggml.backends.quantize", "pyggml.codec", seeds=_blocks, allowed=())
def blocks(data: bytes) -> None:
    """The first byte chooses a type, the rest are its blocks: every instruction set reads the same numbers of them, and
    finite ones can be stored again."""
    dtype = TYPES[data[0] % len(TYPES)] if data else TYPES[0]
    n = (len(data) - 1) // dtype.type_size
    if n < 1:
        return
    raw = np.frombuffer(data, np.uint8, n * dtype.type_size, 1).copy()
    size = n * dtype.block_size
    out = [np.full(size + 16, 7, np.float32) for _ in isa_levels()]
    for level, x in zip(isa_levels().values(), out, strict=True):
        src, dst = ffi.cast("void *", raw.ctypes.data), ffi.cast("float *", x.ctypes.data)
        assert lib.pg_dequantize(level, dtype.gguf_id, src, dst, size) == lib.PG_OK
        assert (x[size:] == 7).all()
        np.testing.assert_array_equal(x, out[0])
    np.testing.assert_array_equal(dequantize(raw, dtype), out[0][:size])
    if np.isfinite(out[0]).all() and n <= 8:
        quantize(
            out[0][:size], dtype, np.abs(out[0][:size]) + 1 if data[0] & 128 and np.abs(out[0]).max() < 1e30 else None
        )


@harness("pyggml.native.packing", seeds=_blocks, allowed=GGMLError)
def r16(data: bytes) -> None:
    """The first byte chooses a type, the second a number of rows; packed and unpacked, the bytes are the same."""
    if len(data) < 3:
        return
    dtype, m = TYPES[data[0] % len(TYPES)], 1 + data[1] % 40
    k = max(1, (len(data) - 2) // (m * dtype.type_size)) * dtype.block_size
    k = -(-k // 256) * 256 if data[1] & 128 else k
    size = matrix_size(dtype, (k, m))
    if not size or not can_unpack(dtype, k):
        return
    nbytes = dtype.row_size(k) * m
    raw = np.resize(np.frombuffer(data, np.uint8, len(data) - 2, 2), nbytes)
    copy, groups = np.full(size + 64, 7, np.uint8), -(-m // GROUP)
    pack_groups(dtype, (k, m), raw.ctypes.data, copy.ctypes.data, 0, groups)
    assert (copy[size:] == 7).all()
    back = unpacked(dtype, (k, m, 1, 1), 0, nbytes, lambda start, n: copy[start : start + n])
    np.testing.assert_array_equal(back, raw)
