"""Arrays to stored blocks and back, in C: every block type, several rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from pyggml.native import ffi, lib
from pyggml.native.threads import thread_count

from .. import codec
from ..buffers.buffer import Bytes
from ..codec import Array, as_array, check_rows
from ..dtypes import DType
from ..errors import BackendError, DTypeError, ShapeError, integer
from ..tensor import Tensor
from .cpu.isa import isa_levels, isa_name

_CHUNK = 1 << 16  # elements that are worth a thread's while


def _pointer(kind: str, array: Array, offset: int = 0) -> Any:
    return ffi.cast(kind, array.__array_interface__["data"][0] + offset)


def _in_threads(run: Callable[[int, int], int], n_rows: int, n: int, n_threads: int | None, dtype: DType) -> None:
    """`run(first, count)` over all rows of `n` elements in chunks; C code without the GIL, so plain threads do."""
    step = max(1, _CHUNK // max(n, 1))
    chunks = [(first, min(step, n_rows - first)) for first in range(0, n_rows, step)]
    workers = min(len(chunks), thread_count(n_threads))
    if workers <= 1:
        status = run(0, n_rows)
    else:
        from pyggml.native.thread_pool import ThreadPool  # it takes 2 ms, which programs that quantise nothing save

        with ThreadPool(workers) as pool:
            status = max(pool.map(run, *zip(*chunks, strict=True)))
    if status:
        raise DTypeError(f"{dtype.name} has no converter to or from F32")


def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    try:
        t = tuple(map(integer, shape))
    except TypeError:
        t = (-1,)
    if min(t, default=0) < 0:
        raise ShapeError(f"a shape is a tuple of whole numbers from 0, not {shape!r:.60}")
    return t


def _column_weights(imatrix: Array, n: int) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    w = as_array("imatrix", imatrix)
    if w.dtype.kind not in "fiub":
        raise DTypeError(f"imatrix must hold real numbers, not {w.dtype}")
    w = w.astype(np.float64)
    if w.shape != (n,):
        raise ShapeError(f"imatrix of shape {w.shape} does not weigh rows of {n} elements: ({n},) does")
    if not np.all(np.isfinite(w)) or w.min(initial=0) < 0:
        raise BackendError("imatrix holds values that are negative or not finite")
    largest = w.max(initial=0)
    if largest == 0:
        return None
    w = w / largest  # first, so that no sum overflows
    return np.maximum(w / w.mean(), 1e-6).astype(np.float32)  # a column that was never used is still stored


def quantize(array: Array, dtype: DType, imatrix: Array | None = None, n_threads: int | None = None) -> Bytes:
    """`array`, whose last axis is a row, as stored rows of `dtype`: uint8, shape (..., bytes of a row).

    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TQ1_0, TQ2_0, MXFP4 and NVFP4 give the bytes of the reference quantisers; the other
    block types search for the codes of least squared error. `imatrix`, shape (row length,), says how much the squared
    error of each column counts (llama.cpp's importance matrix: the mean square of its activations). With it the types
    up to Q5_1 search too; Q8_0, TQ* and the FP4 types ignore it. Any finite numbers are valid. F32, F16 and BF16 also
    store NaN and infinities; block types cannot. The same bytes come out at every `PYGGML_ISA` and thread count.

    Raises ShapeError when a row is not a whole number of blocks or `imatrix` does not fit, DTypeError when `dtype`
    is not a float or block type, or has no number for NaN or an infinity, BackendError for a bad `imatrix` or
    `n_threads`.
    """
    if isinstance(array, DType):
        raise DTypeError(f"the array comes before the type: quantize(array, {array.name})")
    array = as_array("quantize", array)
    if array.dtype.kind not in "fiub":
        raise DTypeError(f"cannot quantise an array of {array.dtype}")
    x = np.atleast_1d(np.ascontiguousarray(array, np.float32))
    n = x.shape[-1]
    row_bytes = check_rows(dtype, n)
    if (why := codec.unfit(x, dtype)) is not None:
        raise DTypeError(f"{dtype.name} has no number for {why}")
    out = np.zeros((*x.shape[:-1], row_bytes), np.uint8)
    weights = None if imatrix is None else _column_weights(imatrix, n)
    w = ffi.NULL if weights is None else _pointer("float *", weights)
    level = isa_levels()[isa_name()]

    def run(first: int, count: int) -> int:
        src = _pointer("float *", x, first * n * 4)
        dst = _pointer("void *", out, first * row_bytes)
        return lib.pg_quantize(level, dtype.gguf_id, src, w, dst, count, n, row_bytes)

    _in_threads(run, x.size // n if n else 0, n, n_threads, dtype)
    return out


def dequantize(
    data: Array | bytes, dtype: DType, shape: tuple[int, ...] | None = None, n_threads: int | None = None
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Stored rows of `dtype` as float32, exactly as the format defines them.

    `data`: bytes, or an array whose last axis holds whole rows' bytes, as `quantize` returns it. The result has
    `shape` (NumPy order) if given, else that of `data` with the last axis counted in elements.

    Raises ShapeError when the byte count does not fit, DTypeError when `dtype` is not a float or block type.
    """
    if isinstance(data, DType):
        raise DTypeError(f"the data comes before the type: dequantize(data, {data.name})")
    if isinstance(data, Tensor):  # NumPy would read its values
        raise DTypeError("dequantize takes bytes, not a Tensor: t.numpy() has its values, t.tobytes() its bytes")
    raw = np.frombuffer(data, np.uint8) if isinstance(data, (bytes, bytearray, memoryview)) else as_array("data", data)
    check_rows(dtype, 0)
    if raw.dtype.kind not in "iub" and (dtype.np_dtype is None or raw.dtype != dtype.np_dtype):
        raise DTypeError(f"dequantize takes bytes of {dtype.name}, not {raw.dtype}")
    raw = np.atleast_1d(np.ascontiguousarray(raw)).view(np.uint8)
    if raw.shape[-1] % dtype.type_size:
        raise ShapeError(f"{raw.shape[-1]} bytes are not a whole number of {dtype.name} blocks of {dtype.type_size}")
    per_row = raw.shape[-1] // dtype.type_size * dtype.block_size
    out = np.empty((*raw.shape[:-1], per_row), np.float32)
    if shape is not None:
        shape = _shape(shape)
        check_rows(dtype, shape[-1] if shape else 1)
        if prod(shape) != out.size:
            raise ShapeError(f"{raw.nbytes} bytes of {dtype.name} hold {out.size} elements, not shape {shape}")
    level = isa_levels()[isa_name()]
    n = min(per_row, _CHUNK // dtype.block_size * dtype.block_size)  # rows lie end to end: any length will do
    bytes_of_n = dtype.row_size(n)

    def run(first: int, count: int) -> int:
        src = _pointer("void *", raw, first * bytes_of_n)
        dst = _pointer("float *", out, first * n * 4)
        return lib.pg_dequantize(level, dtype.gguf_id, src, dst, min(count * n, out.size - first * n))

    _in_threads(run, -(-out.size // n) if n else 0, n, n_threads, dtype)
    return out if shape is None else out.reshape(shape)
