"""Solve systems of equations with a triangular matrix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from .. import ops
from ..codec import Array
from ..opdef import Cost, Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, src
from ._gradients import dense_rows
from ._recurrence import check_rows, cost_of

__all__ = [
    "solve_tri",
]


def _shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    check_rows(srcs, ("a", "b"))
    rule(a.ne[0] == a.ne[1], f"a must be square, not {list(a.ne[:2])}")
    rule(a.ne[1:] == b.ne[1:], f"a and b must agree in ne[1:]: {list(a.ne[1:])} and {list(b.ne[1:])}")
    rule(params["left"] and not params["uni"], "only left, not uni is known, as in ggml")
    return b.ne


def _ref(a: Array, b: Array, left: bool, lower: bool, uni: bool) -> Array:
    x, n = np.zeros(b.shape), a.shape[2]
    for i in range(n) if lower else reversed(range(n)):
        solved = slice(0, i) if lower else slice(i + 1, n)
        known = np.einsum("mnk,mnkc->mnc", a[:, :, i, solved], x[:, :, solved])
        x[:, :, i] = (b[:, :, i] - known) / a[:, :, i, i, None]
    return x


def _cost(t: Tensor) -> Cost:
    return cost_of(t.n_elements * src(t.src, 0).ne[0], t)


def _grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """The gradient of b is the solution for the transposed matrix."""
    a, lower = src(node.src, 0), node.op_params["lower"]

    @cache
    def of_b() -> Tensor:
        return solve_tri(ops.cont(ops.transpose(a)), dense_rows(gy), lower=not lower)

    def of_a() -> Tensor:
        return ops.tri(ops.neg(ops.mul_mat(node, of_b())), "lower_diag" if lower else "upper_diag")

    return of_a, of_b


SOLVE_TRI = OpDef(
    name="solve_tri",
    srcs=("a", "b"),
    params=("left", "lower", "uni"),
    shape=_shape,
    dtypes={(F32, F32): F32},
    ref=_ref,
    kernel="solve_tri",
    cost=_cost,
    inplace=(1,),
    label="solve(a, b)",
    grad=_grad,
)


def solve_tri(a: Tensor, b: Tensor, left: bool = True, lower: bool = True, uni: bool = False) -> Tensor:
    """Solve a x = b (as NumPy's matrices) for x, with the lower triangular part of `a` (ggml_solve_tri). Chunked forms
    of linear attention compute inverses with it.

    a: F32, ne [n, n, n2, n3]; elements above its diagonal are ignored. b: F32, ne [n_columns, n, n2, n3]. Rows dense.
    lower: False for the upper part, of which gradients are solutions (ggml has none). left, uni: only the defaults, as
    in ggml. Result: as b. A zero on the diagonal gives infinities and NaN. Raises ShapeError, DTypeError.
    """
    return record(SOLVE_TRI, (a, b), {"left": left, "lower": lower, "uni": uni})
