"""Softmax of rows, with mask and ALiBi, and the causal mask; triangles of matrices."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from ..codec import Array
from ..opdef import Cost, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import BF16, F16, F32, inplace, is_whole, src
from ._mask import MASKS, SINKS, biased, check_mask, check_sinks, sink_scores

__all__ = [
    "TriType",
    "diag_mask_inf",
    "diag_mask_inf_inplace",
    "diag_mask_zero",
    "diag_mask_zero_inplace",
    "soft_max",
    "soft_max_ext",
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
)


def soft_max(a: Tensor) -> Tensor:
    """exp(a) / (sum of exp(a) over the row) (ggml_soft_max).

    a: F32, ne [n, ...], NumPy shape (..., n), contiguous. Result: as `a`. A row of -inf gives NaN, as in ggml.
    Raises ShapeError, DTypeError.
    """
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
)


def tri(a: Tensor, type: int | str) -> Tensor:
    """A triangle of each matrix, zeros elsewhere (ggml_tri).

    a: F32, F16 or BF16, ne [n, n, ...]; type, by number or name: 0 "upper_diag", 1 "upper" (without the diagonal),
    2 "lower_diag", 3 "lower". Result: as `a`. Raises ShapeError, DTypeError.
    """
    return record(TRI, (a,), {"type": type})
