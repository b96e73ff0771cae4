"""Rows of a tensor by index."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from .. import ops
from ..codec import Array
from ..dtypes import READABLE_BLOCKS, WRITABLE_BLOCKS, DType
from ..opdef import Cost, DTypeRow, Gradient, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor, dims_of, full_ne
from ._common import BF16, F16, F32, I32, I64, given_ne, src
from ._gradients import constant, dense, summed
from .copy import copy_cost, stored_bytes

__all__ = [
    "add_id",
    "get_rows",
    "get_rows_back",
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


def _grad_get(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a, b = src(node.src, 0), src(node.src, 1)
    return lambda: get_rows_back(gy, b, a), None


def _back_shape(srcs: Srcs, params: Params) -> Ne:
    a, b, ne = src(srcs, 0), src(srcs, 1), given_ne(params)
    rule(a.ne[0] == ne[0], f"rows of a and of the result must be equally long, not {a.ne[0]} and {ne[0]}")
    rule(b.ne[3] == 1, "b must have at most 3 dimensions")
    rule(a.ne[1:] == b.ne[:3], f"b must have an index for each of a's rows: ne {list(a.ne[1:])}, not {list(b.ne)}")
    rule(a.ne[2:] == ne[2:], f"a and the result must agree in ne[2], ne[3], not {list(a.ne[2:])} and {list(ne[2:])}")
    return ne


def _back_ref(a: Array, b: Array, ne0: int, ne1: int, ne2: int, ne3: int) -> Array:
    _check_range(b, ne1)
    out = np.zeros((ne3, ne2, ne1, ne0))
    for i3, i2 in product(range(ne3), range(ne2)):
        np.add.at(out[i3, i2], b[0, i3, i2], a[i3, i2])
    return out


def _grad_back(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    b = src(node.src, 1)
    return lambda: get_rows(gy, b), None


def _numbers(b: Tensor) -> Tensor:
    """The numbers of b's rows, from 1 on: F32, ne [1, b.ne[1], b.ne[2], b.ne[3]]."""
    n = constant(np.arange(1, b.ne[1] + 1, dtype=np.float32)[:, None], b)
    return ops.repeat_4d(n, 1, *b.ne[1:])


def _grad_set(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """Of equal indices the last row of b stays, and the others have no gradient. Which rows stay is known by writing
    their numbers with the same indices."""
    a, b, c = src(node.src, 0), src(node.src, 1), src(node.src, 2)

    def written() -> Tensor:
        """For each row of a: the number of the row of b that it holds, or 0."""
        none = ops.repeat_4d(constant(np.zeros(1, np.float32), b), 1, *a.ne[1:])
        return set_rows(none, _numbers(b), c)

    def of_b() -> Tensor:
        ids = ops.repeat_4d(c, b.ne[1], b.ne[2], b.ne[3], 1)
        return get_rows(gy, ids) * (get_rows(written(), ids) == _numbers(b))

    return lambda: gy * (written() == 0), of_b, None


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
    grad=_grad_get,
)
GET_ROWS_BACK = OpDef(
    name="get_rows_back",
    srcs=("a", "b"),
    params=("ne0", "ne1", "ne2", "ne3"),
    shape=_back_shape,
    dtypes={(F32, i): F32 for i in (I32, I64)},
    ref=_back_ref,
    kernel="get_rows_back",
    cost=elementwise_cost(1),
    inplace=(),
    label="sum of a by b",
    grad=_grad_back,
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
    grad=_grad_set,
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


def _grad_add_id(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    b, ids = src(node.src, 1), src(node.src, 2)

    def of_b() -> Tensor:
        g = summed(gy, (*gy.ne[:3], 1))
        rows = ops.reshape_2d(dense(g), g.ne[0], g.ne[1] * g.ne[2])
        return get_rows_back(rows, ops.reshape_1d(dense(ids), ids.n_elements), b)

    return gy, of_b, None


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
    grad=_grad_add_id,
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


def get_rows_back(a: Tensor, b: Tensor, c: Tensor | Sequence[int]) -> Tensor:
    """Rows of zeros, to which the rows of `a` are added where `b` says (ggml_get_rows_back), the gradient of
    `get_rows`. In ne order result[:, b[i, j, k], j, k] is the sum over i of a[:, i, j, k].

    a: F32 ne [n, r, b2, b3], any layout; b: ne [r, b2, b3], I32 or I64, 0 <= index < m; c: a tensor of the result's
    shape, whose elements do not matter, or an ne: [n, m, b2, b3] (ggml: matrices). Result: F32, the rows of one index
    added in their order. Raises ShapeError, DTypeError; BackendError as `get_rows`.
    """
    ne, rank = (c.ne, c.rank) if isinstance(c, Tensor) else (full_ne(dims_of("get_rows_back", c)), None)
    return record(GET_ROWS_BACK, (a, b), dict(zip(GET_ROWS_BACK.params, ne, strict=True)), rank=rank)


def set_rows(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Write rows of `b` into `a` at the rows that `c` names (ggml_set_rows): a[:, c[i, j, k], j, k] = b[:, i, j, k].

    a: ne [n, m, b2, b3], F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or IQ4_NL; b: ne [n, r, b2, b3], F32; c: ne
    [r, c1, c2], I64 or I32, repeated along b2 and b3, 0 <= index < m; of equal indices the last one wins.
    Result: a view of `a`, after the writes. Raises ShapeError, also when `a` shares bytes with `b` or `c`; DTypeError;
    BackendError as `get_rows`.
    """
    return record(SET_ROWS, (a, b, c), {})
