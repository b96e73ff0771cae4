"""Stored bytes to numbers and back, for every type. Block types go through the `gguf` package, the independent
reference that the C kernels are tested against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .buffers.buffer import Bytes
from .dtypes import WRITABLE_BLOCKS, DType, no_dtype
from .errors import DTypeError, ShapeError

Array = np.ndarray[Any, np.dtype[Any]]


# Encodes rows of the types that the gguf package reads but does not write; pyggml installs it.
quantize_rows: Callable[[Array, DType], Bytes] | None = None


def check_rows(dtype: DType, n: int) -> int:
    """Bytes of a row of `n` elements of `dtype`; ShapeError when it is not a whole number of blocks, DTypeError when
    `dtype` is no DType."""
    if not isinstance(dtype, DType):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DTypeError(no_dtype(dtype))
    try:
        return dtype.row_size(n)
    except ValueError as e:
        raise ShapeError(str(e)) from None


def as_array(what: str, values: Any) -> Array:
    """`values` as an array. Raises DTypeError when NumPy cannot make one of them (ragged lists)."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError, OverflowError) as e:
        raise DTypeError(f"{what}: {type(values).__name__} is not an array of numbers: {e}") from None


def unfit(values: Array, dtype: DType) -> str | None:
    """Say in words which of `values` the type `dtype` cannot store; None when it can store all.

    All values must be real numbers. An integer type stores no fractions, no NaN and no numbers out of its range. A
    block type stores no NaN and no infinities. Floats and block types round."""
    if values.dtype.kind not in "biuf":
        return f"values of type {values.dtype}"
    to = dtype.np_dtype
    if dtype.is_quantized:
        finite = np.isfinite(values)
        return None if finite.all() else str(values[~finite][0])
    if to is None or to.kind != "i" or np.can_cast(values.dtype, to):
        return None
    info = np.iinfo(to)
    if values.dtype.kind == "f":
        x = values.astype(np.float64)
        bad = ~((x >= info.min) & (x < float(info.max) + 1) & (np.trunc(x) == x))  # so of NaN
    else:
        bad = (values < info.min) | (values > info.max)
    first: list[Any] = values[bad].tolist()[:1]
    return str(first[0]) if first else None


def bf16_to_f32(bits: Array) -> Array:
    """BF16 bit patterns (uint16) as float32. The conversion is exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: Array) -> Array:
    """float32 to BF16 bit patterns (uint16), rounded to nearest even; a NaN stays one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def encode(array: Array, dtype: DType) -> Bytes:
    """The bytes that store `array` (its last axis is a row) as `dtype`. A block with NaN or infinities becomes NaN as a
    whole, in the types that begin with a scale in F16.

    Raises ShapeError when a row is not a whole number of blocks, DTypeError when the type cannot be written.
    """
    array = np.asarray(array)
    n = array.shape[-1] if array.ndim else 1
    check_rows(dtype, n)
    if dtype.np_dtype is not None:
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array, dtype.np_dtype).reshape(-1).view(np.uint8)
    if dtype is DType.BF16:
        return f32_to_bf16(np.asarray(array, np.float32)).reshape(-1).view(np.uint8)
    from gguf import quants  # slow to import, seldom needed

    rows = np.ascontiguousarray(array, np.float32).reshape(-1, n)
    odd = ~np.isfinite(rows).reshape(-1, dtype.block_size).all(axis=1)
    if odd.any() and dtype in WRITABLE_BLOCKS:
        stored = encode(np.where(np.repeat(odd, dtype.block_size).reshape(rows.shape), 0, rows), dtype)
        stored.reshape(-1, dtype.type_size)[odd, :2] = np.array([np.nan], np.float16).view(np.uint8)
        return stored
    try:
        with np.errstate(over="ignore"):  # scales of F16
            return quants.quantize(rows, _gguf_type(dtype)).reshape(-1)
    except (NotImplementedError, DTypeError):
        if quantize_rows is None:
            raise DTypeError(f"{dtype.name} cannot be quantised to") from None
        return quantize_rows(rows, dtype).reshape(-1)


def decode(data: Bytes, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Stored bytes as an array of `shape` (NumPy order). It has the NumPy type that is the same as `dtype`, or float32
    when there is none.

    Raises ShapeError when the byte count does not match, DTypeError when the type cannot be read.
    """
    n = shape[-1] if shape else 1
    rows = int(np.prod(shape[:-1], dtype=np.int64)) if shape else 1
    if data.nbytes != check_rows(dtype, n) * rows:
        raise ShapeError(f"{data.nbytes} bytes do not store shape {shape} of {dtype.name}")
    if dtype.np_dtype is not None:
        return data.view(dtype.np_dtype).reshape(shape)
    if dtype is DType.BF16:
        return bf16_to_f32(data.view(np.uint16)).reshape(shape)
    from gguf import quants

    try:
        return quants.dequantize(data.reshape(rows, -1), _gguf_type(dtype)).reshape(shape)
    except NotImplementedError:
        raise DTypeError(f"{dtype.name} cannot be dequantised") from None


def _gguf_type(dtype: DType) -> Any:
    """The type in the gguf package. Raises DTypeError when the version that is installed does not know it."""
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(dtype.gguf_id)
    except ValueError:
        raise DTypeError(f"{dtype.name}: the gguf package that is installed does not know this type") from None
