"""Shapes and axes as in NumPy: reshape, permute, types, and reductions along axes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any
from typing import cast as cast_type

import numpy as np

from ..dtypes import DType, dtype_of
from ..errors import DTypeError, ShapeError
from ..opdef import OpDef, fail, record, record_view
from ..tensor import Size, Tensor
from ..var import as_size, divides, is_count
from ._common import is_number, type_of
from .copy import cast, cont
from .view import PERMUTE, RESHAPE, permute, reshape_1d, reshape_2d, reshape_3d, reshape_4d

_RESHAPES = (reshape_1d, reshape_2d, reshape_3d, reshape_4d)


def _numbers(given: Any) -> list[int] | None:
    """The whole numbers or Sizes of `given`, which were passed one by one or as one sequence; None when something else
    is among them."""
    try:
        if len(given) == 1 and hasattr(given[0], "__iter__"):
            given = given[0]
        return [as_size(n) for n in given if not isinstance(n, bool) or as_size("")]
    except TypeError:
        return None


def axes_of(op: OpDef, a: Tensor, axis: Any, keepdims: Any) -> list[int]:
    """The axes, in NumPy's order and rising, that `axis` names: a number, several numbers, or None for all axes. Raises
    ShapeError for wrong axes, and DTypeError when `keepdims` is neither True nor False."""
    if not (is_number(keepdims) and keepdims in (0, 1)):
        raise fail(op, (a,), DTypeError, f"keepdims must be True or False, not {keepdims!r:.40}")
    if axis is None:
        return [*range(a.rank)]
    axes = _numbers((axis,))
    if (
        axes is None
        or any(isinstance(i, Size) for i in axes)
        or not all(-a.rank <= i < a.rank for i in axes)
        or len({i % a.rank for i in axes}) < len(axes)
    ):
        text = f"axis must name axes of shape {a.shape}, each once, not {axis!r:.40}"
        raise fail(op, (a,), ShapeError, text)
    return sorted(i % a.rank for i in axes)


def reshaped(a: Tensor, *shape: Any) -> Tensor:
    """See `Operand.reshape`."""
    dims = _numbers(shape)
    if dims is None or len(dims) > 4 or sum(n == -1 for n in dims) > 1:
        text = f"the shape must be up to four whole numbers, of which one may be -1, not {shape!r:.60}"
        raise fail(RESHAPE, (a,), ShapeError, text)
    if -1 in dims:
        at = dims.index(-1)
        rest = prod(dims[:at] + dims[at + 1 :])
        if not is_count(rest) or not divides(rest, a.n_elements):
            raise fail(
                RESHAPE, (a,), ShapeError, f"shape {tuple(dims)} does not divide the {a.n_elements} elements of a"
            )
        dims[at] = a.n_elements // rest
    if a.shape == tuple(dims):
        return a
    if prod(dims) == a.n_elements and not a.is_contiguous:  # when the number is wrong, the op below says so
        a = cont(a)
    if dims:
        return _RESHAPES[len(dims) - 1](a, *dims[::-1])
    if a.n_elements != 1:
        raise fail(RESHAPE, (a,), ShapeError, "shape () has one element")
    return record_view(RESHAPE, a, {}, a.ne, a.nb, 0)


def permuted(a: Tensor, *axes: Any) -> Tensor:
    """See `Operand.permute`."""
    order = _numbers(axes)
    n = a.rank
    if order is None or sorted(i % n if -n <= i < n else n for i in order) != [*range(n)]:
        text = f"the axes must be those of shape {a.shape}, each once, not {axes!r:.60}"
        raise fail(PERMUTE, (a,), ShapeError, text)
    order = [i % n for i in order]
    if order == [*range(n)]:
        return a
    to = [0, 1, 2, 3]
    for new, old in enumerate(order):
        to[n - 1 - old] = n - 1 - new
    return permute(a, *to)


def transposed(a: Tensor, *axes: Any) -> Tensor:
    """See `Operand.transpose`."""
    return permuted(a, *(axes if axes and axes != (None,) else range(a.rank)[::-1]))


def astype(a: Tensor, dtype: Any) -> Tensor:
    """See `Operand.astype`."""
    t = type_of(dtype) if isinstance(dtype, str | DType) else None
    if t is None:
        with suppress(TypeError):
            t = dtype_of(np.empty(0, cast_type(Any, dtype))) if dtype is not None else None
    if t is None:
        raise DTypeError(f"astype: {dtype!r:.40} is no type of tensors")
    return cast(a, t)


def along(op: OpDef, a: Tensor, axes: Sequence[int], keepdims: bool) -> Tensor:
    """Apply `op`, which makes one element of each row, along `axes`. To that end the axes are made into one row."""
    shape, count = a.shape, prod(a.shape[i] for i in axes)
    if not axes:  # each element is a row
        return reshaped(record(op, (reshaped(a, -1, 1),), {}), *shape)
    kept = [n for i, n in enumerate(shape) if i not in axes]
    if len(axes) > 1 and a.is_contiguous and axes[-1] - axes[0] == len(axes) - 1:
        rows = reshaped(a, *shape[: axes[0]], count, *shape[axes[-1] + 1 :])
        last = [i for i in range(rows.rank) if i != axes[0]]
        rows = permuted(rows, *last, axes[0])
    else:
        rows = permuted(a, *[i for i in range(a.rank) if i not in axes], *axes)
        if len(axes) > 1:
            rows = reshaped(rows, *kept, count)
    y = record(op, (rows,), {})
    return reshaped(y, *[1 if i in axes else n for i, n in enumerate(shape)] if keepdims else kept)
