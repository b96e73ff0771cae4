"""Arithmetic of two tensors, the second repeated to the shape of the first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..opdef import DTypeRow, OpDef, elementwise_cost, record
from ..tensor import Tensor
from ._common import BF16, F16, F32, b_repeats_to_a

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


_DTYPES: dict[DTypeRow, DType] = {(F32, F32): F32, (F16, F32): F16, (F16, F16): F16, (BF16, F32): BF16, (F32, F16): F32}


def _repeated(f: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def ref(a: Array, b: Array) -> Array:
        reps = tuple(n // m for n, m in zip(a.shape, b.shape, strict=True))
        return f(a, np.tile(b, reps))

    return ref


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
    )


ADD = _define("add", np.add, "a + b")
SUB = _define("sub", np.subtract, "a - b")
MUL = _define("mul", np.multiply, "a * b")
DIV = _define("div", np.divide, "a / b")


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, with `b` repeated whole times to the shape of `a` (ggml_add).

    a: ne [n0, n1, n2, n3], F32, F16 or BF16; b: each ne divides a's, F32 or F16. Result: shape and type of `a`.
    Raises ShapeError, DTypeError.
    """
    return record(ADD, (a, b), {})


def add_inplace(a: Tensor, b: Tensor) -> Tensor:
    """`add`, the result written over `a`."""
    return record(ADD, (a, b), {}, inplace=0)


def sub(a: Tensor, b: Tensor) -> Tensor:
    """a - b, with `b` repeated whole times to the shape of `a` (ggml_sub). Shapes, types and errors as `add`."""
    return record(SUB, (a, b), {})


def sub_inplace(a: Tensor, b: Tensor) -> Tensor:
    """`sub`, the result written over `a`."""
    return record(SUB, (a, b), {}, inplace=0)


def mul(a: Tensor, b: Tensor) -> Tensor:
    """a * b per element, with `b` repeated whole times to the shape of `a` (ggml_mul). As `add`."""
    return record(MUL, (a, b), {})


def mul_inplace(a: Tensor, b: Tensor) -> Tensor:
    """`mul`, the result written over `a`."""
    return record(MUL, (a, b), {}, inplace=0)


def div(a: Tensor, b: Tensor) -> Tensor:
    """a / b per element, with `b` repeated whole times to the shape of `a` (ggml_div). As `add`."""
    return record(DIV, (a, b), {})


def div_inplace(a: Tensor, b: Tensor) -> Tensor:
    """`div`, the result written over `a`."""
    return record(DIV, (a, b), {}, inplace=0)
