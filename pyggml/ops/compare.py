"""Comparisons, maximum and minimum of two tensors, where, isnan: element by element, as NumPy has them.

Operands are tensors, NumPy arrays and numbers; types and shapes as in `pyggml.operators.Operand`. Not in ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from .. import ops
from ..codec import Array
from ..dtypes import DType
from ..opdef import DTypeRow, Gradient, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import BF16, F16, F32, I32, I64, can_repeat, longer, src
from ._gradients import summed
from ._promote import of_one_type, operand
from .copy import PLAIN_TYPES

__all__ = [
    "equal",
    "greater",
    "greater_equal",
    "isnan",
    "less",
    "less_equal",
    "maximum",
    "minimum",
    "not_equal",
    "where",
]

_ORDERED = (F32, F16, BF16, I32, I64)
_PICKED: Mapping[DTypeRow, DType] = {(t, t): t for t in _ORDERED}
_COMPARED: Mapping[DTypeRow, DType] = {(t, t): I32 for t in _ORDERED}
_CHOSEN: Mapping[DTypeRow, DType] = {(I32, t, t): t for t in PLAIN_TYPES}


def _all_repeat(srcs: Srcs, params: Params) -> Ne:
    """Shape rule: every source is repeated to the shape of the largest in each dimension."""
    shapes = [s.ne for s in srcs if s is not None]
    if all(ne == shapes[0] for ne in shapes):
        return shapes[0]
    n0, n1, n2, n3 = (reduce(longer, ns) for ns in zip(*shapes, strict=True))
    ne = (n0, n1, n2, n3)
    for given in shapes:
        rule(can_repeat(given, ne), f"ne {list(given)} cannot repeat to {list(ne)}: each must divide it")
    return ne


def _repeated(f: Callable[..., Array]) -> Callable[..., Array]:
    def ref(*sources: Array) -> Array:
        shape = [max(ns) for ns in zip(*[a.shape for a in sources], strict=True)]
        return f(*[np.tile(a, [n // m for n, m in zip(shape, a.shape, strict=True)]) for a in sources])

    return ref


def _grad_best(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """Equal elements share the gradient."""
    a, b = src(node.src, 0), src(node.src, 1)

    def of(x: Tensor) -> Tensor:
        share = ops.cast(equal(x, node), F32) - ops.cast(equal(a, b), F32) * 0.5
        return summed(gy * share, x)

    return lambda: of(a), lambda: of(b)


def _grad_where(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    c, a, b = src(node.src, 0), src(node.src, 1), src(node.src, 2)
    return None, lambda: summed(where(c, gy, 0.0), a), lambda: summed(where(c, 0.0, gy), b)


def _define(
    name: str,
    ref: Callable[..., Array],
    dtypes: Mapping[DTypeRow, DType],
    label: str,
    inplace: tuple[int, ...] = (),
    srcs: tuple[str, ...] = ("a", "b"),
    grad: Callable[[Tensor, Tensor], Sequence[Gradient]] | None = None,
) -> OpDef:
    return OpDef(
        name=name,
        srcs=srcs,
        params=(),
        shape=_all_repeat,
        dtypes=dtypes,
        ref=_repeated(ref),
        kernel=name,
        cost=elementwise_cost(1),
        inplace=inplace,
        label=label,
        ranks=tuple(range(len(srcs))),
        grad=grad,
    )


EQUAL = _define("equal", np.equal, _COMPARED, "a = b")
NOT_EQUAL = _define("not_equal", np.not_equal, _COMPARED, "a ≠ b")
LESS = _define("less", np.less, _COMPARED, "a < b")
LESS_EQUAL = _define("less_equal", np.less_equal, _COMPARED, "a ≤ b")
GREATER = _define("greater", np.greater, _COMPARED, "a > b")
GREATER_EQUAL = _define("greater_equal", np.greater_equal, _COMPARED, "a ≥ b")
MAXIMUM = _define("maximum", np.maximum, _PICKED, "max(a, b)", (0, 1), grad=_grad_best)
MINIMUM = _define("minimum", np.minimum, _PICKED, "min(a, b)", (0, 1), grad=_grad_best)
WHERE = _define("where", np.where, _CHOSEN, "c ? a : b", (1, 2), ("c", "a", "b"), _grad_where)


def _pair(op: OpDef, a: Any, b: Any) -> Tensor:
    x, y = of_one_type(op.name, a, b)
    return record(op, (x, y), {})


def equal(a: Any, b: Any) -> Tensor:
    """1 where `a` equals `b`, else 0 (also for NaN): a == b.

    a, b: F32, F16, BF16, I8, I16, I32 or I64. One of them is a tensor; the other may be an array or a number. They are
    promoted to one type, and each repeats to the larger shape. Result: I32. Raises ShapeError, DTypeError.
    """
    return _pair(EQUAL, a, b)


def not_equal(a: Any, b: Any) -> Tensor:
    """1 where `a` does not equal `b` (also for NaN), else 0: a != b. As `equal`."""
    return _pair(NOT_EQUAL, a, b)


def less(a: Any, b: Any) -> Tensor:
    """1 where a < b, else 0 (also for NaN). As `equal`."""
    return _pair(LESS, a, b)


def less_equal(a: Any, b: Any) -> Tensor:
    """1 where a <= b, else 0 (also for NaN). As `equal`."""
    return _pair(LESS_EQUAL, a, b)


def greater(a: Any, b: Any) -> Tensor:
    """1 where a > b, else 0 (also for NaN). As `equal`."""
    return _pair(GREATER, a, b)


def greater_equal(a: Any, b: Any) -> Tensor:
    """1 where a >= b, else 0 (also for NaN). As `equal`."""
    return _pair(GREATER_EQUAL, a, b)


def maximum(a: Any, b: Any) -> Tensor:
    """The larger one of `a` and `b`, NaN where one of them is. Operands as `equal`; result: their common type."""
    return _pair(MAXIMUM, a, b)


def minimum(a: Any, b: Any) -> Tensor:
    """The smaller one of `a` and `b`, NaN where one of them is. As `maximum`."""
    return _pair(MINIMUM, a, b)


def isnan(a: Tensor) -> Tensor:
    """1 where `a` is NaN, else 0: a != a. I32."""
    return not_equal(a, a)


def where(c: Any, a: Any, b: Any) -> Tensor:
    """`a` where `c` is not 0, else `b`.

    One of c, a and b is a tensor; the others may be arrays and numbers. `a` and `b` are promoted to one type, which may
    be any except a block type. `c` is a comparison (I32), or anything that can be compared with 0. Each repeats to the
    larger shape. Result: the type of `a` and `b`. Raises ShapeError, DTypeError.
    """
    first = next((t for t in (c, a, b) if isinstance(t, Tensor)), None)
    x, y = of_one_type("where", a, b, beside=first)
    given = operand(c)
    mask = of_one_type("where", c if isinstance(given, Tensor | None) else np.not_equal(given, 0), beside=first)[0]
    return record(WHERE, (mask if mask.dtype is I32 else not_equal(mask, 0), x, y), {})
