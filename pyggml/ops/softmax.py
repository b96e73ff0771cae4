"""Softmax of rows, with mask and ALiBi, and the causal mask; triangles of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from .. import ops
from ..codec import Array
from ..opdef import Cost, Gradient, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..signature import check_options
from ..tensor import Ne, Tensor
from ._axes import axes_of, permuted
from ._common import BF16, F16, F32, inplace, is_whole, src
from ._gradients import constant, dense_rows, summed, summed_to_mask
from ._mask import MASKS, SINKS, alibi_slopes, biased, check_mask, check_sinks, sink_scores
from .copy import cont

if TYPE_CHECKING:
    from typing_extensions import Never

__all__ = [
    "TriType",
    "diag_mask_inf",
    "diag_mask_inf_inplace",
    "diag_mask_zero",
    "diag_mask_zero_inplace",
    "soft_max",
    "soft_max_ext",
    "soft_max_ext_back",
    "soft_max_ext_back_inplace",
    "soft_max_ext_inplace",
    "soft_max_inplace",
    "tri",
]


def _shape(srcs: Srcs, params: Params) -> Ne:
    a = src(srcs, 0)
    rule(a.is_contiguous, "a must be contiguous (cont(a) is)")
    check_mask(srcs[1], a.ne, params["max_bias"])
    check_sinks(srcs[2], a.ne[2])
    return a.ne


def _ref_soft_max(a: Array, mask: Array | None, sinks: Array | None, scale: float, max_bias: float) -> Array:
    s, sink = biased(a * scale, mask, max_bias), sink_scores(sinks)
    top = np.maximum(s.max(axis=3, keepdims=True), sink)
    e = np.exp(s - top)
    return e / (e.sum(axis=3, keepdims=True) + np.exp(sink - top))


def _cost(t: Tensor) -> Cost:
    mask = t.src[1] if t.op == "soft_max" else None
    return Cost(20 * t.n_elements, 4 * t.n_elements + (0 if mask is None else mask.nbytes), 4 * t.n_elements)


def _grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    mask, sinks = node.src[1], node.src[2]
    scale, max_bias = node.op_params["scale"], node.op_params["max_bias"]

    def of_mask() -> Tensor:
        assert mask is not None
        g = soft_max_ext_back(dense_rows(gy), node, 1.0, 0.0)
        if max_bias:
            g = g * constant(alibi_slopes(node.ne[2], max_bias).astype(np.float32).reshape(-1, 1, 1), node)
        return summed_to_mask(g, mask)

    def of_sinks() -> Tensor:
        """The sink of a head takes what its rows leave of 1, and from each of them that share of what they weigh."""
        assert sinks is not None
        left = 1 - ops.sum_rows(node)
        weighed = ops.sum_rows(dense_rows(gy * node))
        return ops.reshape(summed(-left * weighed, (1, 1, node.ne[2], 1)), sinks)

    return lambda: soft_max_ext_back(dense_rows(gy), node, scale, 0.0), of_mask, of_sinks


SOFT_MAX = OpDef(
    name="soft_max",
    srcs=("a", "mask?", "sinks?"),
    params=("scale", "max_bias"),
    shape=_shape,
    dtypes={(F32, m, s): F32 for m in MASKS for s in SINKS},
    ref=_ref_soft_max,
    kernel="soft_max",
    cost=_cost,
    inplace=(0,),
    label="softmax(a)",
    grad=_grad,
)


def _back_shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    rule(a.ne == b.ne, f"a and b must have the same ne, not {list(a.ne)} and {list(b.ne)}")
    for role, t in (("a", a), ("b", b)):
        rule(t.ne[0] == 1 or t.nb[0] == 4, f"rows of {role} must be dense (nb[0] = {t.nb[0]}, not 4)")
    rule(params["max_bias"] == 0, "max_bias must be 0: slopes of a mask do not change the gradient")
    return a.ne


def _back_ref(a: Array, b: Array, scale: float, max_bias: float) -> Array:
    return scale * b * (a - (a * b).sum(axis=3, keepdims=True))


def _grad_back(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a, b, scale = src(node.src, 0), src(node.src, 1), node.op_params["scale"]

    def of_b() -> Tensor:
        """Of scale (h b a - (h b) (a b)), both sums over the row."""
        h = dense_rows(gy)
        ab, hb = ops.sum_rows(dense_rows(a * b)), ops.sum_rows(dense_rows(h * b))
        return (h * (a - ab) - a * hb) * scale

    return lambda: soft_max_ext_back(dense_rows(gy), b, scale, 0.0), of_b


SOFT_MAX_EXT_BACK = OpDef(
    name="soft_max_ext_back",
    srcs=("a", "b"),
    params=("scale", "max_bias"),
    shape=_back_shape,
    dtypes={(F32, F32): F32},
    ref=_back_ref,
    kernel="soft_max_ext_back",
    cost=elementwise_cost(5),
    inplace=(0, 1),
    label="gradient of softmax",
    grad=_grad_back,
)


def soft_max(a: Tensor, axis: int = -1, **unknown: Never) -> Tensor:
    """exp(a) / (sum of exp(a) over the row) (ggml_soft_max).

    a: F32, ne [n, ...], NumPy shape (..., n), contiguous. Result: as `a`. A row of -inf gives NaN, as in ggml.
    axis: the axis that is summed over, in NumPy's order; for all but the last one a copy is made (`cont`), and the
    result is a view. Raises ShapeError, DTypeError, OptionError.
    """
    if unknown:
        check_options("soft_max", unknown, ("axis",))
    is_last = isinstance(axis, int) and axis == -1  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_last and isinstance(a, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        (at,) = axes_of(SOFT_MAX, a, (axis,), False)
        order = [i for i in range(a.rank) if i != at] + [at]
        if at != a.rank - 1:
            back = [order.index(i) for i in range(a.rank)]
            return permuted(soft_max(cont(permuted(a, *order))), *back)
    return record(SOFT_MAX, (a, None, None), {"scale": 1.0, "max_bias": 0.0})


def soft_max_inplace(a: Tensor) -> Tensor:
    """`soft_max`, the result written over `a`."""
    return record(SOFT_MAX, (a, None, None), {"scale": 1.0, "max_bias": 0.0}, inplace=0)


def soft_max_ext(
    a: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    max_bias: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax over rows of scale * a + slope * mask (ggml_soft_max_ext), as attention takes it of its scores.

    a: F32, ne [n_kv, n_tokens, n_head, n_batch], contiguous. mask: None, or F32 or F16, ne [n_kv, n_tokens or more
    (padding), m2, m3], contiguous, m2 and m3 dividing n_head and n_batch; -inf hides a position, whatever `a` holds
    there (even NaN). slope: 1, or with max_bias > 0 (ALiBi, arXiv 2108.12409) one for each head, from
    2^(-max_bias / n_head) down. sinks: None, or F32, ne [n_head]: one more score per head, neither scaled nor masked,
    that takes its share of every row but has no column in the result (attention sinks, arXiv 2309.17453;
    ggml_soft_max_add_sinks). Result: as `a`. A row that is masked throughout gives NaN, as in ggml; with sinks, 0.
    scale is rounded to f32. Raises ShapeError, DTypeError.
    """
    return record(SOFT_MAX, (a, mask, sinks), {"scale": scale, "max_bias": max_bias})


def soft_max_ext_inplace(
    a: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    max_bias: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`soft_max_ext`, the result written over `a`."""
    return record(SOFT_MAX, (a, mask, sinks), {"scale": scale, "max_bias": max_bias}, inplace=0)


def soft_max_ext_back(a: Tensor, b: Tensor, scale: float, max_bias: float) -> Tensor:
    """The gradient of `soft_max_ext` by its scores (ggml_soft_max_ext_back): scale b (a - the sum of a b over the row).

    a: the gradient of the result, b: the result itself; F32, the same ne, dense rows. max_bias: 0, as in ggml. Result:
    F32, as `a`. Raises ShapeError, DTypeError.
    """
    return record(SOFT_MAX_EXT_BACK, (a, b), {"scale": scale, "max_bias": max_bias})


soft_max_ext_back_inplace = inplace(SOFT_MAX_EXT_BACK, soft_max_ext_back)


def _diag_shape(srcs: Srcs, params: Params) -> Ne:
    n_past = params["n_past"]
    rule(is_whole(n_past, 0), f"n_past must be a whole number from 0, not {n_past}")
    return src(srcs, 0).ne


def _define_mask(name: str, value: float, label: str) -> OpDef:
    def ref(a: Array, n_past: int) -> Array:
        return np.where(np.tri(a.shape[2], a.shape[3], n_past, dtype=bool), a, value)

    return OpDef(
        name=name,
        srcs=("a",),
        params=("n_past",),
        shape=_diag_shape,
        dtypes={(F32,): F32},
        ref=ref,
        kernel=name,
        cost=_cost,
        inplace=(0,),
        label=label,
        grad=lambda node, gy: (lambda: diag_mask_zero(gy, node.op_params["n_past"]),),
    )


DIAG_MASK_INF = _define_mask("diag_mask_inf", -np.inf, "causal(a)")
DIAG_MASK_ZERO = _define_mask("diag_mask_zero", 0.0, "a, the future 0")


def diag_mask_inf(a: Tensor, n_past: int) -> Tensor:
    """`a` with -inf in columns > n_past + row of each matrix (ggml_diag_mask_inf): each token's future is hidden.

    a: F32, ne [n_kv, n_tokens, ...]. Result: as `a`. Raises ShapeError for n_past < 0, DTypeError.
    """
    return record(DIAG_MASK_INF, (a,), {"n_past": n_past})


diag_mask_inf_inplace = inplace(DIAG_MASK_INF, diag_mask_inf)


def diag_mask_zero(a: Tensor, n_past: int) -> Tensor:
    """`a` with 0 in columns > n_past + row of each matrix (ggml_diag_mask_zero). As `diag_mask_inf`."""
    return record(DIAG_MASK_ZERO, (a,), {"n_past": n_past})


diag_mask_zero_inplace = inplace(DIAG_MASK_ZERO, diag_mask_zero)


class TriType(IntEnum):
    """ggml_tri_type."""

    UPPER_DIAG = 0
    UPPER = 1
    LOWER_DIAG = 2
    LOWER = 3


def _tri_shape(srcs: Srcs, params: Params) -> Ne:
    ne = src(srcs, 0).ne
    rule(ne[0] == ne[1], f"a must hold square matrices, not ne {list(ne)}")
    return ne


def _tri_ref(a: Array, type: int) -> Array:
    if type in (TriType.UPPER_DIAG, TriType.UPPER):
        return np.triu(a, int(type == TriType.UPPER))
    return np.tril(a, -int(type == TriType.LOWER))


TRI = OpDef(
    name="tri",
    srcs=("a",),
    params=("type",),
    shape=_tri_shape,
    dtypes={(t,): t for t in (F32, F16, BF16)},
    ref=_tri_ref,
    kernel="tri",
    cost=elementwise_cost(0),
    inplace=(0,),
    label="triangle of a",
    enums={"type": TriType},
    grad=lambda node, gy: (lambda: tri(gy, node.op_params["type"]),),
)


def tri(a: Tensor, type: int | str) -> Tensor:
    """A triangle of each matrix, zeros elsewhere (ggml_tri).

    a: F32, F16 or BF16, ne [n, n, ...]; type, by number or name: 0 "upper_diag", 1 "upper" (without the diagonal),
    2 "lower_diag", 3 "lower". Result: as `a`. Raises ShapeError, DTypeError.
    """
    return record(TRI, (a,), {"type": type})
