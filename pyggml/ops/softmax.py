"""Softmax of rows, with mask and ALiBi, and the causal mask."""

from __future__ import annotations

import numpy as np

from ..codec import Array
from ..opdef import Cost, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, src
from ._mask import MASKS, biased, check_mask, f32

__all__ = [
    "diag_mask_inf",
    "diag_mask_inf_inplace",
    "soft_max",
    "soft_max_ext",
    "soft_max_ext_inplace",
    "soft_max_inplace",
]


def _shape(srcs: Srcs, params: Params) -> Ne:
    a = src(srcs, 0)
    rule(a.is_contiguous, "a must be contiguous (cont(a) is)")
    check_mask(srcs[1], a.ne, params["max_bias"])
    return a.ne


def _ref_soft_max(a: Array, mask: Array | None, scale: float, max_bias: float) -> Array:
    s = biased(a * scale, mask, max_bias)
    e = np.exp(s - s.max(axis=3, keepdims=True))
    return e / e.sum(axis=3, keepdims=True)


def _cost(t: Tensor) -> Cost:
    mask = t.src[1] if t.op == "soft_max" else None
    return Cost(20 * t.n_elements, 4 * t.n_elements + (0 if mask is None else mask.nbytes), 4 * t.n_elements)


SOFT_MAX = OpDef(
    name="soft_max",
    srcs=("a", "mask?"),
    params=("scale", "max_bias"),
    shape=_shape,
    dtypes={(F32, m): F32 for m in MASKS},
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
    return record(SOFT_MAX, (a, None), {"scale": 1.0, "max_bias": 0.0})


def soft_max_inplace(a: Tensor) -> Tensor:
    """`soft_max`, the result written over `a`."""
    return record(SOFT_MAX, (a, None), {"scale": 1.0, "max_bias": 0.0}, inplace=0)


def soft_max_ext(a: Tensor, mask: Tensor | None = None, scale: float = 1.0, max_bias: float = 0.0) -> Tensor:
    """Softmax over rows of scale * a + slope * mask (ggml_soft_max_ext), what attention does with its scores.

    a: F32, ne [n_kv, n_tokens, n_head, n_batch], contiguous. mask: None, or F32 or F16, ne [n_kv, n_tokens or more
    (padding), m2, m3], contiguous, m2 and m3 dividing n_head and n_batch; -inf hides a position. slope: 1, or with
    max_bias > 0 (ALiBi, arXiv 2108.12409) each head's, from 2^(-max_bias / n_head) down. Result: as `a`. A row
    that is all masked gives NaN, as in ggml. scale is rounded to f32. Raises ShapeError, DTypeError.
    """
    return record(SOFT_MAX, (a, mask), {"scale": f32(scale), "max_bias": f32(max_bias)})


def soft_max_ext_inplace(a: Tensor, mask: Tensor | None = None, scale: float = 1.0, max_bias: float = 0.0) -> Tensor:
    """`soft_max_ext`, the result written over `a`."""
    return record(SOFT_MAX, (a, mask), {"scale": f32(scale), "max_bias": f32(max_bias)}, inplace=0)


def _diag_shape(srcs: Srcs, params: Params) -> Ne:
    n_past = params["n_past"]
    rule(n_past >= 0 and n_past == int(n_past), f"n_past must be a whole number from 0, not {n_past}")
    return src(srcs, 0).ne


def _ref_diag_mask_inf(a: Array, n_past: int) -> Array:
    future = ~np.tri(a.shape[2], a.shape[3], n_past, dtype=bool)
    return np.where(future, -np.inf, a)


DIAG_MASK_INF = OpDef(
    name="diag_mask_inf",
    srcs=("a",),
    params=("n_past",),
    shape=_diag_shape,
    dtypes={(F32,): F32},
    ref=_ref_diag_mask_inf,
    kernel="diag_mask_inf",
    cost=_cost,
    inplace=(0,),
    label="causal(a)",
)


def diag_mask_inf(a: Tensor, n_past: int) -> Tensor:
    """`a` with -inf where column > n_past + row, in each matrix (ggml_diag_mask_inf): the future of each token.

    a: F32, ne [n_kv, n_tokens, ...]. Result: as `a`. Raises ShapeError for n_past < 0, DTypeError.
    """
    return record(DIAG_MASK_INF, (a,), {"n_past": n_past})


def diag_mask_inf_inplace(a: Tensor, n_past: int) -> Tensor:
    """`diag_mask_inf`, the result written over `a`."""
    return record(DIAG_MASK_INF, (a,), {"n_past": n_past}, inplace=0)
