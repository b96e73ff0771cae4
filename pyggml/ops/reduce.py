"""Sums and order along rows (dimension 0), the sum of everything, and what becomes of whole axes, NumPy's way.

Order: -0 equals 0, and NaN counts as larger than every number (as NumPy sorts it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from .. import ops
from ..codec import Array
from ..dtypes import DType
from ..errors import ShapeError
from ..opdef import DTypeRow, Gradient, OpDef, Params, RuleBroken, Srcs, elementwise_cost, fail, no_tensor, record, rule
from ..signature import check_options
from ..tensor import Ne, Tensor
from ..var import Size, Varies, is_count
from ._axes import along, axes_of
from ._common import BF16, F16, F32, I32, I64, is_number, is_whole, same_shape, src
from ._gradients import spread
from ._promote import INTEGERS, as_floats
from .binary import sub
from .copy import cast
from .scalar import scale
from .unary import sqr

if TYPE_CHECKING:
    from typing_extensions import Never

__all__ = [
    "SortOrder",
    "argmax",
    "argsort",
    "argsort_top_k",
    "count_equal",
    "cumsum",
    "max_rows",
    "mean",
    "min_rows",
    "sum",
    "sum_rows",
    "top_k",
]


_MAX_INDEX = 2**31 - 1  # results hold I32 indices


class SortOrder(IntEnum):
    """ggml_sort_order."""

    ASC = 0
    DESC = 1


def _one(srcs: Srcs, params: Params) -> Ne:
    return (1, 1, 1, 1)


def _one_per_row(srcs: Srcs, params: Params) -> Ne:
    return (1, *src(srcs, 0).ne[1:])


def _one_of_equal(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    rule(a.ne == b.ne, f"a and b must have the same ne, not {list(a.ne)} and {list(b.ne)}")
    return (1, 1, 1, 1)


def _count_equal_ref(a: Array, b: Array) -> Array:
    return np.sum(a == b, keepdims=True)


def _sum_ref(a: Array) -> Array:
    return np.sum(a, keepdims=True)


def _sum_rows_ref(a: Array) -> Array:
    return np.sum(a, axis=3, keepdims=True, dtype=np.int64 if a.dtype.kind == "i" else None)


def _max_rows_ref(a: Array) -> Array:
    return np.max(a, axis=3, keepdims=True)


def _min_rows_ref(a: Array) -> Array:
    return np.min(a, axis=3, keepdims=True)


def _mean_ref(a: Array) -> Array:
    return np.mean(a, axis=3, keepdims=True)


def _cumsum_ref(a: Array) -> Array:
    return np.cumsum(a, axis=3)


def _grad_sum(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a = src(node.src, 0)
    return (lambda: spread(gy, a),)


def _grad_mean(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a = src(node.src, 0)
    return (lambda: spread(gy * (1 / a.ne[0]), a),)


def _grad_cumsum(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    return (lambda: ops.sub(ops.add(gy, sum_rows(gy)), cumsum(gy)),)  # the sum from each element on


def _grad_best(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """Equal elements share the gradient."""
    a = src(node.src, 0)

    def of_a() -> Tensor:
        best = ops.cast(ops.equal(a, node), F32)
        return ops.mul(best, ops.div(gy, sum_rows(best)))

    return (of_a,)


def _define(
    name: str,
    shape: Callable[[Srcs, Params], Ne],
    dtypes: Mapping[DTypeRow, DType],
    ref: Callable[..., Array],
    flops: int,
    *,
    params: tuple[str, ...] = (),
    label: str | None = None,
    enums: Mapping[str, type[IntEnum]] | None = None,
    inplace: tuple[int, ...] = (),
    ranks: tuple[int, ...] = (0,),
    grad: Callable[[Tensor, Tensor], Sequence[Gradient]] | None = None,
    sizes: tuple[str, ...] = (),
) -> OpDef:
    return OpDef(
        name=name,
        srcs=("a",),
        params=params,
        shape=shape,
        dtypes=dtypes,
        ref=ref,
        kernel=name,
        cost=elementwise_cost(flops),
        inplace=inplace,
        label=label or f"{name}(a)",
        ranks=ranks,
        enums=enums or {},
        grad=grad,
        sizes=sizes,
    )


SUM = _define("sum", _one, {(F32,): F32, (F16,): F16, (BF16,): BF16}, _sum_ref, 1, ranks=(), grad=_grad_sum)
SUM_ROWS = _define("sum_rows", _one_per_row, {(F32,): F32, (I32,): I64, (I64,): I64}, _sum_rows_ref, 1, grad=_grad_sum)
_BEST: Mapping[DTypeRow, DType] = {(t,): t for t in (F32, F16, BF16, I32, I64)}
MAX_ROWS = _define("max_rows", _one_per_row, _BEST, _max_rows_ref, 1, grad=_grad_best)
MIN_ROWS = _define("min_rows", _one_per_row, _BEST, _min_rows_ref, 1, grad=_grad_best)
MEAN = _define("mean", _one_per_row, {(F32,): F32}, _mean_ref, 1, grad=_grad_mean)
CUMSUM = _define("cumsum", same_shape, {(F32,): F32}, _cumsum_ref, 1, inplace=(0,), grad=_grad_cumsum)
COUNT_EQUAL = OpDef(
    name="count_equal",
    srcs=("a", "b"),
    params=(),
    shape=_one_of_equal,
    dtypes={(I32, I32): I64},
    ref=_count_equal_ref,
    kernel="count_equal",
    cost=elementwise_cost(0),
    inplace=(),
    label="count of a = b",
    ranks=(),
)


def sum(a: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False, **unknown: Never) -> Tensor:
    """The sum of all elements, accumulated in double (ggml_sum).

    a: any shape, F32, F16 or BF16; result: ne [1], type of `a`. Raises DTypeError.

    With `axis` or `keepdims` it is NumPy's, `a.sum(axis, keepdims)`: axes count as in `a.shape`. See `Operand.sum`.
    """
    if unknown:
        check_options("sum", unknown, ("axis", "keepdims"))
    return record(SUM, (a,), {}) if axis is None and keepdims is False else sum_axes(_given("sum", a), axis, keepdims)


def count_equal(a: Tensor, b: Tensor) -> Tensor:
    """How many elements of `a` equal those of `b` (ggml_count_equal).

    a, b: I32, the same shape; result: I64 ne [1]. Raises ShapeError, DTypeError.
    """
    return record(COUNT_EQUAL, (a, b), {})


def sum_rows(a: Tensor) -> Tensor:
    """The sum of each row, accumulated in double (ggml_sum_rows). F32 ne [n0, n1, n2, n3] -> [1, n1, n2, n3]. I32 and
    I64 give I64, which wraps around."""
    return record(SUM_ROWS, (a,), {})


def max_rows(a: Tensor) -> Tensor:
    """The largest element of each row; NaN when the row has a NaN. Not in ggml.

    a: F32, F16, BF16, I32 or I64 ne [n0, n1, n2, n3]; result: ne [1, n1, n2, n3], type of `a`. Raises DTypeError.
    """
    return record(MAX_ROWS, (a,), {})


def min_rows(a: Tensor) -> Tensor:
    """The smallest element of each row; NaN when the row has a NaN. As `max_rows`."""
    return record(MIN_ROWS, (a,), {})


def mean(a: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False, **unknown: Never) -> Tensor:
    """The mean of each row, accumulated in double (ggml_mean). F32 ne [n0, n1, n2, n3] -> [1, n1, n2, n3].

    With `axis` it is NumPy's, `a.mean(axis, keepdims)`: axes count as in `a.shape`. Without one it stays ggml's, which
    keeps its dimensions; `a.mean()` is the mean of all elements. See `Operand.mean`.
    """
    if unknown:
        check_options("mean", unknown, ("axis", "keepdims"))
    return record(MEAN, (a,), {}) if axis is None else mean_axes(_given("mean", a), axis, keepdims)


def cumsum(a: Tensor) -> Tensor:
    """Running sums along each row, accumulated in double (ggml_cumsum). F32; shape as `a`."""
    return record(CUMSUM, (a,), {})


def _indices(srcs: Srcs, params: Params) -> Ne:
    ne = src(srcs, 0).ne
    rule(ne[0] <= _MAX_INDEX, f"rows of {ne[0]} elements are too long for I32 indices")
    return ne


def _argmax_shape(srcs: Srcs, params: Params) -> Ne:
    ne = _indices(srcs, params)
    rule(ne[2] == 1 and ne[3] == 1, "a must be a matrix (ne[2] and ne[3] must be 1)")
    return (ne[1], 1, 1, 1)


def _argmax_ref(a: Array) -> Array:
    return np.argmax(a, axis=3).reshape(1, 1, 1, -1).astype(np.int32)


def _argsort_ref(a: Array, order: int) -> Array:
    if order == SortOrder.ASC:
        return np.argsort(a, axis=3, kind="stable").astype(np.int32)
    # Ascending over the reversed row, read backwards: descending, equal elements still in their first order.
    backwards = np.argsort(a[..., ::-1], axis=3, kind="stable")[..., ::-1]
    return (a.shape[3] - 1 - backwards).astype(np.int32)


def _top_k_shape(srcs: Srcs, params: Params) -> Ne:
    ne, k = _indices(srcs, params), params["k"]
    rule(
        (is_count(k) if isinstance(k, Size) else is_whole(k, 1)) and k <= ne[0],
        f"k must be within 1..{ne[0]}, the elements of a row, not {k}",
    )
    return (k, *ne[1:])


def _top_k_ref(a: Array, k: int) -> Array:
    return _argsort_ref(a, SortOrder.DESC)[..., :k]


ARGMAX = _define("argmax", _argmax_shape, {(F32,): I32}, _argmax_ref, 0, ranks=())
ARGSORT = _define("argsort", _indices, {(F32,): I32}, _argsort_ref, 0, params=("order",), enums={"order": SortOrder})
TOP_K = _define("top_k", _top_k_shape, {(F32,): I32}, _top_k_ref, 0, params=("k",), label="top_k(a, k)", sizes=("k",))


def argmax(a: Tensor) -> Tensor:
    """The index of the largest element of each row, the first of equals (ggml_argmax gives the last).

    a: matrix ne [n0, n1], F32; result: I32 ne [n1]. Raises ShapeError, DTypeError.
    """
    return record(ARGMAX, (a,), {})


def argsort(a: Tensor, order: int | str = SortOrder.ASC) -> Tensor:
    """The indices that sort each row, 0 or "asc", 1 or "desc" (ggml_argsort); equal elements keep their order.

    a: F32; result: I32, shape as `a`. Raises ShapeError for another order, DTypeError.
    """
    return record(ARGSORT, (a,), {"order": order})


def top_k(a: Tensor, k: int) -> Tensor:
    """The indices of the `k` largest elements of each row, largest first, equal ones in their order (ggml_top_k, which
    promises no order).

    a: F32 ne [n0, n1, n2, n3]; result: I32 ne [k, n1, n2, n3]. Raises ShapeError for k outside 1..n0, DTypeError.
    """
    return record(TOP_K, (a,), {"k": k})


def argsort_top_k(a: Tensor, k: int) -> Tensor:
    """`top_k` in two nodes: `argsort` in descending order, and a view of the first `k` of each row
    (ggml_argsort_top_k). `top_k` itself is faster.

    a: F32 ne [n0, n1, n2, n3]; result: I32 ne [k, n1, n2, n3]. Raises ShapeError for k outside 1..n0, DTypeError.
    """
    ids = argsort(a, SortOrder.DESC)
    try:
        _top_k_shape((a,), {"k": k})
    except (RuleBroken, Varies) as e:
        raise fail(ARGSORT, (a,), Varies if isinstance(e, Varies) else ShapeError, str(e)) from None
    return ids[..., :k]


# -- axes, NumPy's way --------------------------------------------------------------------------------------------


def _given(op: str, a: Tensor) -> Tensor:
    if not isinstance(a, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise no_tensor(op, "a", a)
    return a


def _like(y: Tensor, a: Tensor) -> Tensor:
    """`y` in the type of `a`, where that is one of floats."""
    return cast(y, a.dtype) if a.dtype in (F16, BF16) else y


def _wide(a: Tensor) -> Tensor:
    """Floats as F32, which sums are made of."""
    return cast(a, F32) if a.dtype in (F16, BF16) else a


def sum_axes(a: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """See `Operand.sum`."""
    axes = axes_of(SUM, a, axis, keepdims)
    if a.dtype in INTEGERS:
        return along(SUM_ROWS, a if a.dtype in (I32, I64) else cast(a, I32), axes, keepdims)
    if axes and len(axes) == a.rank:
        return record(SUM, (a,), {}, rank=a.rank if keepdims else 0)
    return _like(along(SUM_ROWS, _wide(a), axes, keepdims), a)


def mean_axes(a: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """See `Operand.mean`."""
    return _like(along(MEAN, _wide(as_floats(a)), axes_of(MEAN, a, axis, keepdims), keepdims), a)


def max_axes(a: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """See `Operand.max`."""
    return along(MAX_ROWS, a, axes_of(MAX_ROWS, a, axis, keepdims), keepdims)


def min_axes(a: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """See `Operand.min`."""
    return along(MIN_ROWS, a, axes_of(MIN_ROWS, a, axis, keepdims), keepdims)


def var_axes(a: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False, ddof: float = 0) -> Tensor:
    """See `Operand.var`."""
    axes = axes_of(MEAN, a, axis, keepdims)
    n = prod(a.shape[i] for i in axes)
    if isinstance(n, Size) and (not is_number(ddof) or ddof):
        raise fail(MEAN, (a,), Varies, f"ddof must be 0 where {n} elements are summed, not {ddof!r:.40}")
    if not is_number(ddof) or not ddof < n:
        raise fail(MEAN, (a,), ShapeError, f"ddof must be a number below {n}, the elements of each, not {ddof!r:.40}")
    x = _wide(as_floats(a))
    squares = along(MEAN, sqr(sub(x, along(MEAN, x, axes, True))), axes, keepdims)
    return _like(scale(squares, n / (n - ddof)) if ddof else squares, a)
