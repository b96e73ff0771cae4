"""Arithmetic of two tensors, the second repeated to the shape of the first.

The result has the type of `a`: F32, F16 or BF16 with any of these or I32 (which counts as F32), or I32 with I32 and I64
with I64, which wrap around; their quotients are truncated, and 0 where b is 0. ggml knows equal types and F16 or BF16
with F32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..opdef import DTypeRow, OpDef, elementwise_cost, record
from ..tensor import Tensor
from ._common import BF16, F16, F32, I32, I64, b_repeats_to_a, inplace

__all__ = [
    "add",
    "add_inplace",
    "div",
    "div_inplace",
    "mul",
    "mul_inplace",
    "sub",
    "sub_inplace",
]


_DTYPES: dict[DTypeRow, DType] = {(a, b): a for a in (F32, F16, BF16) for b in (F32, F16, BF16, I32)}
_DTYPES[I32, I32] = I32
_DTYPES[I64, I64] = I64


def _repeated(f: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def ref(a: Array, b: Array) -> Array:
        reps = tuple(n // m for n, m in zip(a.shape, b.shape, strict=True))
        if b.dtype.kind == "i" and a.dtype.kind != "i":
            b = b.astype(np.float32)
        return f(a, np.tile(b, reps))

    return ref


def _quotient(a: Array, b: Array) -> Array:
    if a.dtype.kind != "i":
        return a / b
    divisor = np.where(b == 0, 1, b)
    down = np.floor_divide(a, divisor)
    return np.where(b == 0, 0, down + ((down * divisor != a) & ((a < 0) != (b < 0))))


def _define(name: str, f: Callable[[Array, Array], Array], label: str) -> OpDef:
    return OpDef(
        name=name,
        srcs=("a", "b"),
        params=(),
        shape=b_repeats_to_a,
        dtypes=_DTYPES,
        ref=_repeated(f),
        kernel=name,
        cost=elementwise_cost(1),
        inplace=(0, 1),
        label=label,
        ranks=(0, 1),
    )


ADD = _define("add", np.add, "a + b")
SUB = _define("sub", np.subtract, "a - b")
MUL = _define("mul", np.multiply, "a * b")
DIV = _define("div", _quotient, "a / b")


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, with `b` repeated whole times to the shape of `a` (ggml_add).

    a: ne [n0, n1, n2, n3], F32, F16, BF16, I32 or I64. b: each ne divides a's; it has a float type or I32, or the type
    of `a` when that has integers. Result: shape and type of `a`. Raises ShapeError, DTypeError.
    """
    return record(ADD, (a, b), {})


add_inplace = inplace(ADD, add)


def sub(a: Tensor, b: Tensor) -> Tensor:
    """a - b, with `b` repeated whole times to the shape of `a` (ggml_sub). Shapes, types and errors as `add`."""
    return record(SUB, (a, b), {})


sub_inplace = inplace(SUB, sub)


def mul(a: Tensor, b: Tensor) -> Tensor:
    """a * b per element, with `b` repeated whole times to the shape of `a` (ggml_mul). As `add`."""
    return record(MUL, (a, b), {})


mul_inplace = inplace(MUL, mul)


def div(a: Tensor, b: Tensor) -> Tensor:
    """a / b per element, with `b` repeated whole times to the shape of `a` (ggml_div). As `add`."""
    return record(DIV, (a, b), {})


div_inplace = inplace(DIV, div)
