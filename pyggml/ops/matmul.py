"""Matrix products. ggml's order: the first source holds the weights, and both are summed over their dimension 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import ops
from ..codec import Array
from ..dtypes import READABLE_BLOCKS
from ..opdef import Cost, Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ..var import largest
from ._common import BF16, F16, F32, I32, MAX_INT, is_int, src
from ._gradients import dense, dense_rows, summed

__all__ = [
    "mul_mat",
    "mul_mat_id",
    "mul_mat_id_back_as",
    "mul_mat_id_back_b",
    "out_prod",
]


WEIGHT_TYPES = (F32, F16, BF16, *READABLE_BLOCKS)


def _dense_rows(a: Tensor, role: str) -> None:
    rule(
        a.nb[0] == a.dtype.type_size or a.ne[0] == 1,
        f"the rows of {role} must be dense: nb[0] is {a.nb[0]}, not {a.dtype.type_size} (transposed? use cont)",
    )


def _broadcast(a: Tensor, b: Tensor) -> None:
    rule(
        b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0,
        f"a repeats along dimensions 2 and 3: a's ne {list(a.ne[2:])} must divide b's {list(b.ne[2:])}",
    )


def _cost(t: Tensor, n_sums: int, a_read: int) -> Cost:
    others = sum(s.n_elements * s.dtype.type_size // s.dtype.block_size for s in t.src[1:] if s is not None)
    return Cost(2 * t.n_elements * n_sums, a_read + others, t.n_elements * 4)


def _stored(a: Tensor) -> int:
    return a.n_elements * a.dtype.type_size // a.dtype.block_size


# -- mul_mat


def _mul_mat_shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    if a.ne[0] != b.ne[0]:
        x, y = ("a", "b") if a.ne[0] == b.ne[1] else ("b", "a")  # NumPy's x @ y is meant
        fits = a.ne[0] == b.ne[1] or a.ne[1] == b.ne[0]
        meant = f". As in NumPy they fit: {x} @ {y}, which is mul_mat(cont(transpose({y})), {x})" if fits else ""
        rule(False, f"a and b are summed over dimension 0: {a.ne[0]} is not {b.ne[0]}{meant}")
    _dense_rows(a, "a")
    _broadcast(a, b)
    return (a.ne[1], b.ne[1], b.ne[2], b.ne[3])


def _repeated(a: Array, b: Array) -> Array:
    """`a` with each matrix repeated for the matrices of `b` that it meets."""
    return np.repeat(np.repeat(a, b.shape[1] // a.shape[1], axis=1), b.shape[0] // a.shape[0], axis=0)


def _mul_mat_ref(a: Array, b: Array) -> Array:
    return np.matmul(b, np.swapaxes(_repeated(a, b), 2, 3))


def _mul_mat_cost(t: Tensor) -> Cost:
    a = src(t.src, 0)
    return _cost(t, a.ne[0], _stored(a))


def outer_summed(x: Tensor, gy: Tensor, a: Tensor) -> Tensor:
    """The sum of outer products of the columns of `x` and of `gy`, in the shape of `a`, whose matrices repeat along
    dimensions 2 and 3: matrix i2 of `a` meets consecutive ones of `x`, whose columns are then those of one matrix."""
    r2, r3 = x.ne[2] // a.ne[2], x.ne[3] // a.ne[3]
    if r3 > 1 and (a.ne[2] > 1 or a.ne[3] > 1):  # matrices that meet one of `a` lie apart
        full = ops.out_prod(dense_rows(x), gy)
        if r2 > 1:
            full = ops.repeat_back(
                ops.reshape_4d(full, a.ne[0] * a.ne[1], r2, a.ne[2], x.ne[3]), (a.ne[0] * a.ne[1], 1, a.ne[2], x.ne[3])
            )
        n = a.ne[0] * a.ne[1] * a.ne[2]
        return ops.reshape(ops.repeat_back(ops.reshape_3d(full, n, r3, a.ne[3]), (n, 1, a.ne[3])), a)
    if r2 > 1 or r3 > 1:
        n = x.ne[1] * r2 * r3
        x = ops.reshape_4d(dense(x), x.ne[0], n, a.ne[2], a.ne[3])
        gy = ops.reshape_4d(dense(gy), gy.ne[0], n, a.ne[2], a.ne[3])
    return ops.out_prod(dense_rows(x), gy)


def _grad_mul_mat(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a, b = src(node.src, 0), src(node.src, 1)
    return lambda: outer_summed(b, gy, a), lambda: ops.out_prod(a, ops.transpose(gy))


MUL_MAT = OpDef(
    name="mul_mat",
    srcs=("a", "b"),
    params=(),
    shape=_mul_mat_shape,
    dtypes={(a, b): F32 for a in WEIGHT_TYPES for b in (F32, F16, BF16)},
    ref=_mul_mat_ref,
    kernel="mul_mat",
    cost=_mul_mat_cost,
    inplace=(),
    label="a·b",
    grad=_grad_mul_mat,
    ranks=(1,),
)


def mul_mat(a: Tensor, b: Tensor) -> Tensor:
    """b times a transposed, as ggml_mul_mat: y[i, j] is the sum over k of a[k, i] * b[k, j].

    a: ne [k, m, a2, a3], any float or block type, dense rows; b: ne [k, n, b2, b3], F32, F16 or BF16, any layout;
    a2 divides b2 and a3 divides b3: matrix (i2, i3) of b meets matrix (i2 // (b2 / a2), i3 // (b3 / a3)) of a.
    Result: F32, ne [m, n, b2, b3]. In NumPy's order, `b @ a.T` of [n, k] and [m, k].
    Raises ShapeError, DTypeError.
    """
    return record(MUL_MAT, (a, b), {})


# -- mul_mat_id

PRODUCTS = ("mul_mat", "mul_mat_id")
WITH_WEIGHTS = (*PRODUCTS, "out_prod")  # ops that may read weights; loops over all nodes ask this first, for speed


def weights_of(node: Tensor) -> Tensor | None:
    """The weights that a product reads, and whose form it follows: a matrix, or a stack with one for each expert
    (mul_mat_id) or each place (mul_mat). None for out_prod of a stack, and for all other ops."""
    a = node.src[0] if node.op in WITH_WEIGHTS else None
    return None if a is None or (node.op == "out_prod" and a.ne[2] != 1) else a


def _mul_mat_id_shape(srcs: Srcs, params: Params) -> Ne:
    a, b, ids = src(srcs, 0), src(srcs, 1), src(srcs, 2)
    rule(a.ne[0] == b.ne[0], f"as and b are summed over dimension 0: {a.ne[0]} is not {b.ne[0]}")
    _dense_rows(a, "as")
    rule(a.ne[3] == 1 and b.ne[3] == 1, "as and b have at most three dimensions")
    rule(ids.ne[2] == 1 and ids.ne[3] == 1, "ids is a matrix: ne [n_used, n_tokens]")
    rule(ids.ne[1] == b.ne[2], f"one row of ids per token: ids has {ids.ne[1]}, b has {b.ne[2]} tokens")
    rule(ids.n_elements <= MAX_INT, f"ids may have at most {MAX_INT} elements, not {ids.n_elements}")
    rule(ids.ne[0] % b.ne[1] == 0, f"b's ne[1] = {b.ne[1]} must divide the {ids.ne[0]} experts used per token")
    return (a.ne[1], ids.ne[0], b.ne[2], 1)


def _mul_mat_id_ref(a: Array, b: Array, ids: Array) -> Array:
    experts, columns, chosen = a[0], b[0], ids[0, 0]  # [n_expert, m, k], [n_tokens, n_b, k], [n_tokens, n_used]
    out_of_range = chosen[(chosen < 0) | (chosen >= len(experts))]
    if out_of_range.size:
        raise IndexError(f"row index {out_of_range[0]} is out of range")
    repeats = chosen.shape[1] // columns.shape[1]
    per_use = np.tile(columns, (1, repeats, 1))  # [n_tokens, n_used, k]
    y = np.empty((*chosen.shape, experts.shape[1]))
    for e in np.unique(chosen):
        y[chosen == e] = per_use[chosen == e] @ experts[e].T
    return y[None]


def _mul_mat_id_cost(t: Tensor) -> Cost:
    a = src(t.src, 0)
    used = min(largest(a.ne[2]), largest(t.ne[1] * t.ne[2]))  # the most experts that can be read
    return _cost(t, a.ne[0], _stored(a) // a.ne[2] * used)


def _grad_mul_mat_id(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    as_, b, ids = src(node.src, 0), src(node.src, 1), src(node.src, 2)

    def of_b() -> Tensor:
        return summed(mul_mat_id_back_b(as_, gy, ids), b)

    return lambda: mul_mat_id_back_as(dense_rows(b), gy, ids, as_.ne[2]), of_b, None


MUL_MAT_ID = OpDef(
    name="mul_mat_id",
    srcs=("as", "b", "ids"),
    params=(),
    shape=_mul_mat_id_shape,
    dtypes={(a, F32, I32): F32 for a in WEIGHT_TYPES},
    ref=_mul_mat_id_ref,
    kernel="mul_mat_id",
    cost=_mul_mat_id_cost,
    inplace=(),
    label="as[ids]·b",
    grad=_grad_mul_mat_id,
    ranks=(1,),
)


def mul_mat_id(as_: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """`mul_mat` with a matrix chosen per column, as ggml_mul_mat_id (mixture of experts).

    as_: ne [k, m, n_expert], any float or block type, dense rows; b: ne [k, n_b, n_tokens], F32, any layout, where n_b
    divides n_used; ids: ne [n_used, n_tokens], I32. Result: F32, ne [m, n_used, n_tokens]: column (u, t) is matrix
    ids[u, t] times column (u % n_b, t) of b.
    Raises ShapeError, DTypeError; computing raises BackendError for an id outside 0..n_expert - 1.
    """
    return record(MUL_MAT_ID, (as_, b, ids), {})


def _back_ids(b: Tensor, ids: Tensor) -> None:
    rule(ids.ne[2] == 1 and ids.ne[3] == 1, "ids is a matrix: ne [n_used, n_tokens]")
    rule(b.ne[3] == 1, "there are at most three dimensions")
    rule(b.ne[1:3] == ids.ne[:2], f"b must have a column for each of ids: {list(ids.ne[:2])}, not {list(b.ne[1:3])}")
    rule(ids.n_elements <= MAX_INT, f"ids may have at most {MAX_INT} elements, not {ids.n_elements}")


def _check_ids(ids: Array, n_expert: int) -> Array:
    bad = ids[(ids < 0) | (ids >= n_expert)]
    if bad.size:
        raise IndexError(f"row index {bad[0]} is out of range")
    return ids[0, 0]


def _back_b_shape(srcs: Srcs, params: Params) -> Ne:
    a, b, ids = src(srcs, 0), src(srcs, 1), src(srcs, 2)
    rule(a.ne[1] == b.ne[0], f"rows of as and b's dimension 0 are summed over: {a.ne[1]} is not {b.ne[0]}")
    rule(a.ne[3] == 1, "as has at most three dimensions")
    _dense_rows(a, "as")
    _back_ids(b, ids)
    return (a.ne[0], *b.ne[1:])


def _back_b_ref(a: Array, b: Array, ids: Array) -> Array:
    chosen = _check_ids(ids, a.shape[1])
    y = np.empty((1, *b.shape[1:3], a.shape[3]))
    for e in np.unique(chosen):
        y[0, chosen == e] = b[0, chosen == e] @ a[0, e]
    return y


def _grad_back_b(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """y[k, u, t] is the sum over m of as[k, m, e] b[m, u, t], e = ids[u, t]."""
    a, b, ids = src(node.src, 0), src(node.src, 1), src(node.src, 2)
    return lambda: mul_mat_id_back_as(dense_rows(gy), b, ids, a.ne[2]), lambda: mul_mat_id(a, gy, ids), None


def _back_as_shape(srcs: Srcs, params: Params) -> Ne:
    a, b, ids, n = src(srcs, 0), src(srcs, 1), src(srcs, 2), params["n_expert"]
    rule(is_int(n, 1), f"n_expert must be a whole number from 1 to {MAX_INT}, not {n}")
    _dense_rows(a, "a")
    _back_ids(b, ids)
    rule(a.ne[3] == 1 and a.ne[2] == b.ne[2], f"a and b must have as many tokens, not {a.ne[2]} and {b.ne[2]}")
    rule(ids.ne[0] % a.ne[1] == 0, f"a's ne[1] = {a.ne[1]} must divide the {ids.ne[0]} experts used per token")
    return (a.ne[0], b.ne[0], n, 1)


def _back_as_ref(a: Array, b: Array, ids: Array, n_expert: int) -> Array:
    chosen = _check_ids(ids, n_expert)
    per_use = np.tile(a[0], (1, chosen.shape[1] // a.shape[2], 1))  # [n_tokens, n_used, k]
    return np.stack([b[0, chosen == e].T @ per_use[chosen == e] for e in range(n_expert)])[None]


def _grad_back_as(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """y[k, m, e] is the sum over the columns (u, t) of e of a[k, u, t] b[m, u, t]."""
    a, b, ids = src(node.src, 0), src(node.src, 1), src(node.src, 2)

    def of_a() -> Tensor:
        return summed(mul_mat_id_back_b(dense_rows(gy), b, ids), a)

    return of_a, lambda: mul_mat_id(dense_rows(gy), a, ids), None


def _back_cost(t: Tensor) -> Cost:
    a, b = src(t.src, 0), src(t.src, 1)
    return Cost(2 * a.ne[0] * b.n_elements, _stored(a) + 4 * b.n_elements, 4 * t.n_elements)


MUL_MAT_ID_BACK_B = OpDef(
    name="mul_mat_id_back_b",
    srcs=("as", "b", "ids"),
    params=(),
    shape=_back_b_shape,
    dtypes={(a, F32, I32): F32 for a in WEIGHT_TYPES},
    ref=_back_b_ref,
    kernel="mul_mat_id_back_b",
    cost=_back_cost,
    inplace=(),
    label="b·as[ids]",
    ranks=(1,),
    grad=_grad_back_b,
)
MUL_MAT_ID_BACK_AS = OpDef(
    name="mul_mat_id_back_as",
    srcs=("a", "b", "ids"),
    params=("n_expert",),
    shape=_back_as_shape,
    dtypes={(F32, F32, I32): F32},
    ref=_back_as_ref,
    kernel="mul_mat_id_back_as",
    cost=_back_cost,
    inplace=(),
    label="Σ a⊗b by ids",
    ranks=(0,),
    grad=_grad_back_as,
)


def mul_mat_id_back_b(as_: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """The gradient of `mul_mat_id` by its columns: y[k, u, t] is the sum over m of as_[k, m, ids[u, t]] * b[m, u, t].

    as_: ne [k, m, n_expert], any float or block type, dense rows; b: the gradient of the result, F32, ne [m, n_used,
    n_tokens], any layout; ids: I32, ne [n_used, n_tokens]. Result: F32, ne [k, n_used, n_tokens].
    Raises ShapeError, DTypeError; BackendError as `mul_mat_id`.
    """
    return record(MUL_MAT_ID_BACK_B, (as_, b, ids), {})


def mul_mat_id_back_as(a: Tensor, b: Tensor, ids: Tensor, n_expert: int) -> Tensor:
    """The gradient of `mul_mat_id` by its matrices: y[k, m, e] is the sum over all (u, t) with ids[u, t] = e of
    a[k, u % n_b, t] * b[m, u, t].

    a: the columns, F32, ne [k, n_b, n_tokens], dense rows; b: the gradient of the result, F32, ne [m, n_used,
    n_tokens], any layout; ids: I32, ne [n_used, n_tokens]. Result: F32, ne [k, m, n_expert].
    Raises ShapeError, DTypeError; BackendError as `mul_mat_id`.
    """
    return record(MUL_MAT_ID_BACK_AS, (a, b, ids), {"n_expert": n_expert})


# -- out_prod


def _out_prod_shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    rule(a.ne[1] == b.ne[1], f"a and b are summed over dimension 1: {a.ne[1]} is not {b.ne[1]}")
    _dense_rows(a, "a")
    _broadcast(a, b)
    return (a.ne[0], b.ne[0], b.ne[2], b.ne[3])


def _out_prod_ref(a: Array, b: Array) -> Array:
    return np.matmul(np.swapaxes(b, 2, 3), _repeated(a, b))


def _out_prod_cost(t: Tensor) -> Cost:
    a = src(t.src, 0)
    return _cost(t, a.ne[1], _stored(a))


def _grad_out_prod(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a, b = src(node.src, 0), src(node.src, 1)

    def of_a() -> Tensor:
        return outer_summed(gy, ops.transpose(b), a)

    return of_a, lambda: ops.transpose(mul_mat(a, gy))


OUT_PROD = OpDef(
    name="out_prod",
    srcs=("a", "b"),
    params=(),
    shape=_out_prod_shape,
    dtypes={(a, F32): F32 for a in WEIGHT_TYPES},
    ref=_out_prod_ref,
    kernel="out_prod",
    cost=_out_prod_cost,
    inplace=(),
    label="Σ a⊗b",
    grad=_grad_out_prod,
)


def out_prod(a: Tensor, b: Tensor) -> Tensor:
    """Sum of outer products, as ggml_out_prod: y[i, j] is the sum over k of a[i, k] * b[j, k].

    a: ne [m, k, a2, a3], any float or block type, dense rows; b: ne [n, k, b2, b3], F32, any layout; a2 divides b2 and
    a3 divides b3. Result: F32, ne [m, n, b2, b3]. In NumPy's order, `b.T @ a` of [k, n] and [k, m].
    Raises ShapeError, DTypeError.
    """
    return record(OUT_PROD, (a, b), {})
