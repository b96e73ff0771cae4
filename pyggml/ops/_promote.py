"""Makes tensors of the operands of an expression (tensors, arrays, numbers), and finds the type that two of them have
in common."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, TypeAlias
from typing import cast as cast_type

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..errors import DTypeError, explain, user_site
from ..tensor import Context, Tensor
from ..var import NO_VALUE, Size, Varies
from ._common import BF16, F16, F32, I32, I64
from .copy import cast

INTEGERS = (DType.I8, DType.I16, I32, I64)
FLOATS = (F32, F16, BF16)

Number: TypeAlias = "int | float"


def operand(x: Any) -> Tensor | Array | Number | None:
    """Returns a tensor or an array as it is, and a number as int or float; None for anything else."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, np.generic) or type(x) is np.ndarray:
        array = cast_type(Array, x)
        if array.ndim:
            return array
        x = array.item()
    if isinstance(x, Integral):
        return int(x)
    try:
        return float(x) if isinstance(x, Real) else None
    except OverflowError:
        return None


def leaf(op: str, x: Tensor | Array | Number, other: Tensor) -> Tensor:
    """Makes a constant leaf of an array or a number that stands beside the tensor `other`.

    It gets the type of `other` when both are integers, or when it is a number and `other` has floats. Otherwise an
    array of float16 gives F16, and all else gives F32."""
    if isinstance(x, Tensor):
        return x
    ctx = Context.current() or other.ctx
    if isinstance(x, int | float):
        whole = isinstance(x, int) and other.dtype in INTEGERS
        dtype = other.dtype if whole or other.dtype in FLOATS else F32
        try:
            values = np.array(x, np.float64 if not whole else np.int64 if -(1 << 63) <= x < 1 << 63 else object)
        except OverflowError:
            text = f"{x!r:.40} is beyond the numbers of {dtype.name}"
            raise DTypeError(explain(op, text, [("beside", other.describe())], user_site())) from None
        number = ctx.constant(values, dtype)
        number.rank = 0
        return number
    if x.dtype.kind not in "biuf":
        raise DTypeError(explain(op, f"an array of {x.dtype} has no real numbers", [], user_site()))
    whole = x.dtype.kind in "biu" and other.dtype in INTEGERS
    return ctx.constant(x, other.dtype if whole else F16 if x.dtype == np.float16 else F32)


def as_floats(t: Tensor) -> Tensor:
    """Converts integers to F32; returns other tensors as they are."""
    return cast(t, F32) if t.dtype in INTEGERS else t


def common_type(a: DType, b: DType) -> DType | None:
    """The type that can hold the values of both, as NumPy promotes types: the larger of two integer types, and F32 for
    two types of floats or for integers beside floats. None when expressions do not take one of the two."""
    if a is b:
        return a
    if a in INTEGERS and b in INTEGERS:
        return a if a.type_size > b.type_size else b
    known = (*INTEGERS, *FLOATS)
    return F32 if a in known and b in known else None


def of_one_type(op: str, *xs: Any, beside: Tensor | None = None) -> list[Tensor]:
    """Makes the operands `xs` tensors of their common type. One of them must be a tensor, unless they stand `beside`
    one. Raises DTypeError for anything but tensors, arrays and numbers."""
    operands = [operand(x) for x in xs]
    if (bad := next((i for i, x in enumerate(operands) if x is None), None)) is not None:
        if isinstance(xs[bad], Size):
            raise Varies(explain(op, f"{xs[bad]} {NO_VALUE}", [], user_site()))
        text = f"{xs[bad]!r:.40} ({type(xs[bad]).__name__}) is no tensor, array or number"
        raise DTypeError(explain(op, text, [], user_site()))
    first = next((x for x in operands if isinstance(x, Tensor)), beside)
    if first is None:
        raise DTypeError(explain(op, "needs a tensor among its operands", [], user_site()))
    tensors = [leaf(op, x, first) for x in operands if x is not None]
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = common_type(dtype, t.dtype) or dtype
    return [t if t.dtype is dtype or common_type(t.dtype, dtype) is None else cast(t, dtype) for t in tensors]
