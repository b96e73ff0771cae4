"""Functions of one tensor and numbers, element by element: scale, scale_bias, clamp, leaky_relu, add1.

All take F32, F16 or BF16 of any shape and layout, and give the same shape and type; they raise DTypeError for others.
NaN in, NaN out. Each `_inplace` variant writes its result over `a`.
"""

from __future__ import annotations

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..opdef import DTypeRow, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import BF16, F16, F32, same_shape, src

__all__ = [
    "add1",
    "add1_inplace",
    "clamp",
    "clamp_inplace",
    "leaky_relu",
    "scale",
    "scale_bias",
    "scale_bias_inplace",
    "scale_inplace",
]


_DTYPES: dict[DTypeRow, DType] = {(F32,): F32, (F16,): F16, (BF16,): BF16}


def _scale_ref(a: Array, s: float, b: float) -> Array:
    return a * s + b


SCALE = OpDef(
    name="scale",
    srcs=("a",),
    params=("s", "b"),
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
    return record(SCALE, (a,), {"s": float(s), "b": 0.0})


def scale_inplace(a: Tensor, s: float) -> Tensor:
    """`scale`, the result written over `a`."""
    return record(SCALE, (a,), {"s": float(s), "b": 0.0}, inplace=0)


def scale_bias(a: Tensor, s: float, b: float) -> Tensor:
    """s a + b (ggml_scale_bias)."""
    return record(SCALE, (a,), {"s": float(s), "b": float(b)})


def scale_bias_inplace(a: Tensor, s: float, b: float) -> Tensor:
    """`scale_bias`, the result written over `a`."""
    return record(SCALE, (a,), {"s": float(s), "b": float(b)}, inplace=0)


def _clamp_ref(a: Array, min: float, max: float) -> Array:
    return np.minimum(np.maximum(a, min), max)


CLAMP = OpDef(
    name="clamp",
    srcs=("a",),
    params=("min", "max"),
    shape=same_shape,
    dtypes=_DTYPES,
    ref=_clamp_ref,
    kernel="clamp",
    cost=elementwise_cost(2),
    inplace=(0,),
    label="clamp(a, min, max)",
)


def clamp(a: Tensor, min: float, max: float) -> Tensor:
    """a, but no less than `min` and no more than `max` (which wins where min > max).

    Unlike ggml_clamp it leaves `a` as it is; `clamp_inplace` is ggml's.
    """
    return record(CLAMP, (a,), {"min": float(min), "max": float(max)})


def clamp_inplace(a: Tensor, min: float, max: float) -> Tensor:
    """`clamp`, the result written over `a` (ggml_clamp)."""
    return record(CLAMP, (a,), {"min": float(min), "max": float(max)}, inplace=0)


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
    """a where it is not negative, else negative_slope a; with `inplace` written over `a` (ggml_leaky_relu)."""
    params = {"negative_slope": float(negative_slope)}
    return record(LEAKY_RELU, (a,), params, inplace=0 if inplace else None)


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


def add1_inplace(a: Tensor, b: Tensor) -> Tensor:
    """`add1`, the result written over `a`."""
    return record(ADD1, (a, b), {}, inplace=0)
