"""Sums and order along rows (dimension 0), and the sum of everything.

Order: -0 equals 0, and NaN counts as larger than every number (as NumPy sorts it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..errors import ShapeError
from ..opdef import DTypeRow, OpDef, Params, RuleBroken, Srcs, elementwise_cost, fail, record, rule
from ..tensor import Ne, Tensor
from ._common import BF16, F16, F32, I32, I64, is_whole, same_shape, src

__all__ = [
    "SortOrder",
    "argmax",
    "argsort",
    "argsort_top_k",
    "count_equal",
    "cumsum",
    "mean",
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
    return np.sum(a, axis=3, keepdims=True)


def _mean_ref(a: Array) -> Array:
    return np.mean(a, axis=3, keepdims=True)


def _cumsum_ref(a: Array) -> Array:
    return np.cumsum(a, axis=3)


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
    )


SUM = _define("sum", _one, {(F32,): F32, (F16,): F16, (BF16,): BF16}, _sum_ref, 1, ranks=())
SUM_ROWS = _define("sum_rows", _one_per_row, {(F32,): F32}, _sum_rows_ref, 1)
MEAN = _define("mean", _one_per_row, {(F32,): F32}, _mean_ref, 1)
CUMSUM = _define("cumsum", same_shape, {(F32,): F32}, _cumsum_ref, 1, inplace=(0,))
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


def sum(a: Tensor) -> Tensor:
    """The sum of all elements, accumulated in double (ggml_sum).

    a: any shape, F32, F16 or BF16; result: ne [1], type of `a`. Raises DTypeError.
    """
    return record(SUM, (a,), {})


def count_equal(a: Tensor, b: Tensor) -> Tensor:
    """How many elements of `a` equal those of `b` (ggml_count_equal).

    a, b: I32, the same shape; result: I64 ne [1]. Raises ShapeError, DTypeError.
    """
    return record(COUNT_EQUAL, (a, b), {})


def sum_rows(a: Tensor) -> Tensor:
    """The sum of each row, accumulated in double (ggml_sum_rows). F32 ne [n0, n1, n2, n3] -> [1, n1, n2, n3]."""
    return record(SUM_ROWS, (a,), {})


def mean(a: Tensor) -> Tensor:
    """The mean of each row, accumulated in double (ggml_mean). F32 ne [n0, n1, n2, n3] -> [1, n1, n2, n3]."""
    return record(MEAN, (a,), {})


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
    rule(is_whole(k, 1) and k <= ne[0], f"k must be within 1..{ne[0]}, the elements of a row, not {k}")
    return (k, *ne[1:])


def _top_k_ref(a: Array, k: int) -> Array:
    return _argsort_ref(a, SortOrder.DESC)[..., :k]


ARGMAX = _define("argmax", _argmax_shape, {(F32,): I32}, _argmax_ref, 0, ranks=())
ARGSORT = _define("argsort", _indices, {(F32,): I32}, _argsort_ref, 0, params=("order",), enums={"order": SortOrder})
TOP_K = _define("top_k", _top_k_shape, {(F32,): I32}, _top_k_ref, 0, params=("k",), label="top_k(a, k)")


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
    except RuleBroken as e:
        raise fail(ARGSORT, (a,), ShapeError, str(e)) from None
    return ids[..., :k]
