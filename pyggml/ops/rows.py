"""Rows of a tensor by index."""

from __future__ import annotations

from itertools import product

import numpy as np

from ..codec import Array
from ..dtypes import READABLE_BLOCKS, WRITABLE_BLOCKS, DType
from ..opdef import Cost, DTypeRow, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import BF16, F16, F32, I32, I64, src
from .copy import copy_cost, stored_bytes

__all__ = [
    "add_id",
    "get_rows",
    "set_rows",
]


def _check_range(ids: Array, n: int) -> None:
    bad = ids[(ids < 0) | (ids >= n)]
    if bad.size:
        raise IndexError(f"row index {bad.flat[0]} is out of range")


def _get_shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    rule(b.ne[3] == 1, "b must have at most 3 dimensions")
    rule(a.ne[2:] == b.ne[1:3], f"a's ne[2], ne[3] {list(a.ne[2:])} must be b's ne[1], ne[2] {list(b.ne[1:3])}")
    return (a.ne[0], b.ne[0], b.ne[1], b.ne[2])


def _get_ref(a: Array, b: Array) -> Array:
    ids = b[0]  # [n3, n2, rows]
    _check_range(ids, a.shape[2])
    return np.take_along_axis(a, ids[..., None].astype(np.int64), axis=2)


def _get_cost(t: Tensor) -> Cost:
    read = stored_bytes(src(t.src, 0)) // src(t.src, 0).n_rows * t.n_rows
    return Cost(t.n_elements, read, stored_bytes(t))


def _get_dtypes() -> dict[DTypeRow, DType]:
    rows = dict.fromkeys((F32, F16, BF16, *READABLE_BLOCKS), F32) | {t: t for t in (DType.I16, I32)}
    return {(a, i): y for a, y in rows.items() for i in (I32, I64)}


def _set_shape(srcs: Srcs, params: Params) -> Ne:
    a, b, c = src(srcs, 0), src(srcs, 1), src(srcs, 2)
    rule(a.ne[0] == b.ne[0], f"rows of a and b must be equally long, not {a.ne[0]} and {b.ne[0]}")
    rule(a.ne[2:] == b.ne[2:], f"a and b must agree in ne[2] and ne[3], not {list(a.ne[2:])} and {list(b.ne[2:])}")
    rule(b.ne[1] == c.ne[0], f"c must have an index for each of b's {b.ne[1]} rows, not {c.ne[0]}")
    rule(b.ne[2] % c.ne[1] == 0 and b.ne[3] % c.ne[2] == 0, "c's ne[1], ne[2] must divide b's ne[2], ne[3]")
    rule(c.ne[3] == 1, "c must have at most 3 dimensions")
    return a.ne


def _set_ref(a: Array, b: Array, c: Array) -> Array:
    _check_range(c, a.shape[2])
    out = np.array(a)
    n3, n2, n1 = b.shape[:3]
    for i3, i2, i1 in product(range(n3), range(n2), range(n1)):
        out[i3, i2, c[0, i3 % c.shape[1], i2 % c.shape[2], i1]] = b[i3, i2, i1]
    return out


def _set_cost(t: Tensor) -> Cost:
    b = copy_cost(t).written // t.n_rows * src(t.src, 1).n_rows
    return Cost(src(t.src, 1).n_elements, stored_bytes(src(t.src, 1)), b)


GET_ROWS = OpDef(
    name="get_rows",
    srcs=("a", "b"),
    params=(),
    shape=_get_shape,
    dtypes=_get_dtypes(),
    ref=_get_ref,
    kernel="get_rows",
    cost=_get_cost,
    inplace=(),
    label="a[b]",
)
SET_ROWS = OpDef(
    name="set_rows",
    srcs=("a", "b", "c"),
    params=(),
    shape=_set_shape,
    dtypes={(a, F32, i): a for a in (F32, F16, BF16, *WRITABLE_BLOCKS) for i in (I64, I32)},
    ref=_set_ref,
    kernel="set_rows",
    cost=_set_cost,
    inplace=(),
    label="a[c] = b",
    writes=0,
)


def _add_shape(srcs: Srcs, params: Params) -> Ne:
    a, b, ids = src(srcs, 0), src(srcs, 1), src(srcs, 2)
    rule(a.ne[0] == b.ne[0], f"rows of a and b must be equally long, not {a.ne[0]} and {b.ne[0]}")
    rule(b.ne[2] == b.ne[3] == 1, "b must be a matrix (ne[2] and ne[3] must be 1)")
    want = (a.ne[1], a.ne[2], 1, 1)
    rule(ids.ne == want, f"ids must have an index for each of a's rows: ne {list(want)}, not {list(ids.ne)}")
    return a.ne


def _add_ref(a: Array, b: Array, ids: Array) -> Array:
    _check_range(ids, b.shape[2])
    return a + b[0, 0][ids[0, 0]]


ADD_ID = OpDef(
    name="add_id",
    srcs=("a", "b", "ids"),
    params=(),
    shape=_add_shape,
    dtypes={(F32, F32, I32): F32},
    ref=_add_ref,
    kernel="add_id",
    cost=elementwise_cost(1),
    inplace=(0,),
    label="a + b[ids]",
)


def add_id(a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """`a` plus the rows of `b` that `ids` names (ggml_add_id), as the bias of `mul_mat_id`'s experts: in ne order
    result[:, i, j, k] = a[:, i, j, k] + b[:, ids[i, j]].

    a: F32 ne [n, n_used, n_tokens, n3]; b: F32 ne [n, n_expert]; ids: I32 ne [n_used, n_tokens], 0 <= index < n_expert.
    Result: as `a`. Raises ShapeError, DTypeError; BackendError as `get_rows`.
    """
    return record(ADD_ID, (a, b, ids), {})


def get_rows(a: Tensor, b: Tensor) -> Tensor:
    """The rows of `a` that `b` names, as F32 (ggml_get_rows): result[:, i, j, k] = a[:, b[i, j, k], j, k] in ne order.

    a: ne [n, m, b2, b3], F32, F16, BF16, I32, I16 or a block type; b: ne [r, b2, b3], I32 or I64, 0 <= index < m.
    Result: ne [n, r, b2, b3], F32 (integers stay as they are). Raises ShapeError, DTypeError; computing it with an
    index out of range raises BackendError.
    """
    return record(GET_ROWS, (a, b), {})


def set_rows(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Write rows of `b` into `a` at the rows that `c` names (ggml_set_rows): a[:, c[i, j, k], j, k] = b[:, i, j, k].

    a: ne [n, m, b2, b3], F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or IQ4_NL; b: ne [n, r, b2, b3], F32; c: ne
    [r, c1, c2], I64 or I32, repeated along b2 and b3, 0 <= index < m; of equal indices the last one wins.
    Result: a view of `a`, after the writes. Raises ShapeError, also when `a` shares bytes with `b` or `c`; DTypeError;
    BackendError as `get_rows`.
    """
    return record(SET_ROWS, (a, b, c), {})
