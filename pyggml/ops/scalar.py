"""Functions of one tensor and numbers, element by element: scale, scale_bias, clamp, leaky_relu, xielu, add1,
fill.

All take F32, F16 or BF16 of any shape and layout, and give the same shape and type; they raise DTypeError for others.
NaN in, NaN out (but `fill`). Each `_inplace` variant writes its result over `a`.
"""

from __future__ import annotations

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..errors import DTypeError, explain, user_site
from ..opdef import Cost, DTypeRow, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import BF16, F16, F32, inplace, is_number, same_shape, src

__all__ = [
    "add1",
    "add1_inplace",
    "clamp",
    "clamp_inplace",
    "fill",
    "fill_inplace",
    "leaky_relu",
    "scale",
    "scale_bias",
    "scale_bias_inplace",
    "scale_inplace",
    "xielu",
]


_DTYPES: dict[DTypeRow, DType] = {(F32,): F32, (F16,): F16, (BF16,): BF16}


def _scale_ref(a: Array, s: float, b: float) -> Array:
    return a * s + b


SCALE = OpDef(
    name="scale",
    srcs=("a",),
    params=("s", "b"),
    infinite=("s", "b"),
    shape=same_shape,
    dtypes=_DTYPES,
    ref=_scale_ref,
    kernel="scale",
    cost=elementwise_cost(2),
    inplace=(0,),
    label="s a + b",
)


def scale(a: Tensor, s: float) -> Tensor:
    """s a (ggml_scale)."""
    return record(SCALE, (a,), {"s": s, "b": 0.0})


def scale_inplace(a: Tensor, s: float) -> Tensor:
    """`scale`, the result written over `a`."""
    return record(SCALE, (a,), {"s": s, "b": 0.0}, inplace=0)


def scale_bias(a: Tensor, s: float, b: float) -> Tensor:
    """s a + b (ggml_scale_bias)."""
    return record(SCALE, (a,), {"s": s, "b": b})


def scale_bias_inplace(a: Tensor, s: float, b: float) -> Tensor:
    """`scale_bias`, the result written over `a`."""
    return record(SCALE, (a,), {"s": s, "b": b}, inplace=0)


def _clamp_shape(srcs: Srcs, params: Params) -> Ne:
    low, high = params["min"], params["max"]
    rule(low == low and high == high, f"min and max must be numbers, not {low} and {high}")
    return src(srcs, 0).ne


def _clamp_ref(a: Array, min: float, max: float) -> Array:
    return np.minimum(np.maximum(a, min), max)


CLAMP = OpDef(
    name="clamp",
    srcs=("a",),
    params=("min", "max"),
    infinite=("min", "max"),
    shape=_clamp_shape,
    dtypes=_DTYPES,
    ref=_clamp_ref,
    kernel="clamp",
    cost=elementwise_cost(2),
    inplace=(0,),
    label="clamp(a, min, max)",
)


def clamp(a: Tensor, min: float, max: float) -> Tensor:
    """a, but no less than `min` and no more than `max`, which wins when min > max.

    Unlike ggml_clamp it leaves `a` as it is; `clamp_inplace` is ggml's.
    """
    return record(CLAMP, (a,), {"min": min, "max": max})


clamp_inplace = inplace(CLAMP, clamp)


def _leaky_relu_ref(a: Array, negative_slope: float) -> Array:
    return np.where(a < 0, a * negative_slope, a)


LEAKY_RELU = OpDef(
    name="leaky_relu",
    srcs=("a",),
    params=("negative_slope",),
    shape=same_shape,
    dtypes=_DTYPES,
    ref=_leaky_relu_ref,
    kernel="leaky_relu",
    cost=elementwise_cost(2),
    inplace=(0,),
    label="leaky_relu(a)",
)


def leaky_relu(a: Tensor, negative_slope: float, inplace: bool = False) -> Tensor:
    """Elements of a, the negative ones times negative_slope; with `inplace` written over `a` (ggml_leaky_relu)."""
    if not (is_number(inplace) and inplace in (0, 1)):
        raise DTypeError(explain("leaky_relu", f"inplace must be True or False, not {inplace!r:.40}", [], user_site()))
    params = {"negative_slope": negative_slope}
    return record(LEAKY_RELU, (a,), params, inplace=0 if inplace else None)


def _xielu_factors(alpha_n: float, alpha_p: float, beta: float) -> tuple[float, float]:
    """softplus(alpha_p) and beta + softplus(alpha_n), in F32."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(np.logaddexp(0, alpha_p))), float(np.float32(beta + np.logaddexp(0, alpha_n)))


def _xielu_shape(srcs: Srcs, params: Params) -> Ne:
    factors = _xielu_factors(params["alpha_n"], params["alpha_p"], params["beta"])
    rule(bool(np.isfinite(factors).all()), "beta + softplus(alpha_n) must be within F32")
    return src(srcs, 0).ne


def _xielu_ref(a: Array, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Array:
    p, n = _xielu_factors(alpha_n, alpha_p, beta)
    above = p * a * a + beta * a
    return np.where(a > 0, above, (np.expm1(np.minimum(a, eps)) - a) * n + beta * a)


XIELU = OpDef(
    name="xielu",
    srcs=("a",),
    params=("alpha_n", "alpha_p", "beta", "eps"),
    shape=_xielu_shape,
    dtypes=_DTYPES,
    ref=_xielu_ref,
    kernel="xielu",
    cost=elementwise_cost(20),
    inplace=(0,),
    label="xielu(a)",
)


def xielu(a: Tensor, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Tensor:
    """The activation xIELU (ggml_xielu; arXiv 2411.13010): softplus(alpha_p) a^2 + beta a for positive elements, and
    (exp(min(a, eps)) - 1 - a) (beta + softplus(alpha_n)) + beta a for others."""
    params = {"alpha_n": alpha_n, "alpha_p": alpha_p, "beta": beta, "eps": eps}
    return record(XIELU, (a,), params)


def _fill_ref(a: Array, c: float) -> Array:
    return np.full_like(a, c)


def _fill_cost(t: Tensor) -> Cost:
    return Cost(0, 0, t.n_elements * t.dtype.type_size)


FILL = OpDef(
    name="fill",
    srcs=("a",),
    params=("c",),
    infinite=("c",),
    shape=same_shape,
    dtypes=_DTYPES,
    ref=_fill_ref,
    kernel="fill",
    cost=_fill_cost,
    inplace=(0,),
    label="c",
)


def fill(a: Tensor, c: float) -> Tensor:
    """A tensor with the shape and type of `a`, and `c` in every element (ggml_fill)."""
    return record(FILL, (a,), {"c": c})


fill_inplace = inplace(FILL, fill)


def _add1_shape(srcs: Srcs, params: Params) -> Ne:
    rule(src(srcs, 1).n_elements == 1, "b must have one element (add repeats larger ones)")
    return src(srcs, 0).ne


def _add1_ref(a: Array, b: Array) -> Array:
    return a + b.item()


ADD1 = OpDef(
    name="add1",
    srcs=("a", "b"),
    params=(),
    shape=_add1_shape,
    dtypes={(F32, F32): F32, (F16, F32): F16, (F16, F16): F16, (BF16, F32): BF16, (BF16, BF16): BF16},
    ref=_add1_ref,
    kernel="add1",
    cost=elementwise_cost(1),
    inplace=(0,),
    label="a + b",
)


def add1(a: Tensor, b: Tensor) -> Tensor:
    """a + b for `b` of one element, F32 or the type of `a` (ggml_add1). Raises ShapeError for a larger `b`."""
    return record(ADD1, (a, b), {})


add1_inplace = inplace(ADD1, add1)
