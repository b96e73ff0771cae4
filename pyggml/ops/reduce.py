"""Sums and order along rows (dimension 0), and the sum of everything.

Order: -0 equals 0, and NaN counts as larger than every number (as NumPy sorts it).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from ..codec import Array
from ..errors import ShapeError
from ..opdef import OpDef, Params, RuleBroken, Srcs, elementwise_cost, fail, record, rule
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


SUM = OpDef(
    name="sum",
    srcs=("a",),
    params=(),
    shape=_one,
    dtypes={(F32,): F32, (F16,): F16, (BF16,): BF16},
    ref=_sum_ref,
    kernel="sum",
    cost=elementwise_cost(1),
    inplace=(),
    label="sum(a)",
    ranks=(),
)
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
SUM_ROWS = OpDef(
    name="sum_rows",
    srcs=("a",),
    params=(),
    shape=_one_per_row,
    dtypes={(F32,): F32},
    ref=_sum_rows_ref,
    kernel="sum_rows",
    cost=elementwise_cost(1),
    inplace=(),
    label="sum_rows(a)",
)
MEAN = OpDef(
    name="mean",
    srcs=("a",),
    params=(),
    shape=_one_per_row,
    dtypes={(F32,): F32},
    ref=_mean_ref,
    kernel="mean",
    cost=elementwise_cost(1),
    inplace=(),
    label="mean(a)",
)
CUMSUM = OpDef(
    name="cumsum",
    srcs=("a",),
    params=(),
    shape=same_shape,
    dtypes={(F32,): F32},
    ref=_cumsum_ref,
    kernel="cumsum",
    cost=elementwise_cost(1),
    inplace=(0,),
    label="cumsum(a)",
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


ARGMAX = OpDef(
    name="argmax",
    srcs=("a",),
    params=(),
    shape=_argmax_shape,
    dtypes={(F32,): I32},
    ref=_argmax_ref,
    kernel="argmax",
    cost=elementwise_cost(0),
    inplace=(),
    label="argmax(a)",
    ranks=(),
)
ARGSORT = OpDef(
    name="argsort",
    srcs=("a",),
    params=("order",),
    shape=_indices,
    dtypes={(F32,): I32},
    ref=_argsort_ref,
    kernel="argsort",
    cost=elementwise_cost(0),
    inplace=(),
    label="argsort(a)",
    enums={"order": SortOrder},
)
TOP_K = OpDef(
    name="top_k",
    srcs=("a",),
    params=("k",),
    shape=_top_k_shape,
    dtypes={(F32,): I32},
    ref=_top_k_ref,
    kernel="top_k",
    cost=elementwise_cost(0),
    inplace=(),
    label="top_k(a, k)",
)


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
    """The indices of the `k` largest elements of each row, largest first, the first of equals first (ggml_top_k, which
    promises no order).

    a: F32 ne [n0, n1, n2, n3]; result: I32 ne [k, n1, n2, n3]. Raises ShapeError for k outside 1..n0, DTypeError.
    """
    return record(TOP_K, (a,), {"k": k})


def argsort_top_k(a: Tensor, k: int) -> Tensor:
    """`top_k`, as ggml_argsort_top_k finds it: a view of the first `k` of each row of `argsort`, descending. Two nodes
    and a whole sort; `top_k` is quicker.

    a: F32 ne [n0, n1, n2, n3]; result: I32 ne [k, n1, n2, n3]. Raises ShapeError for k outside 1..n0, DTypeError.
    """
    ids = argsort(a, SortOrder.DESC)
    try:
        _top_k_shape((a,), {"k": k})
    except RuleBroken as e:
        raise fail(ARGSORT, (a,), ShapeError, str(e)) from None
    return ids[..., :k]
