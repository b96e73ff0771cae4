"""Steps of optimisers: they write new weights over the old ones, and new moments over the old moments."""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..opdef import OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, src

__all__ = [
    "opt_step_adamw",
    "opt_step_adamw8",
    "opt_step_sgd",
]


I8 = DType.I8
BLOCK8 = 256  # elements that share a scale


def _check(srcs: Srcs, n_params: int, *roles: str) -> Ne:
    a = src(srcs, 0)
    for i, role in enumerate(("a", "grad", *roles)):
        t = src(srcs, i)
        rule(t.ne == a.ne, f"{role} must have a's ne {list(a.ne)}, not {list(t.ne)}")
        rule(t.is_contiguous, f"{role} must be contiguous (cont({role}) is)")
    params = src(srcs, len(srcs) - 1)
    rule(params.ne == (n_params, 1, 1, 1), f"params must hold {n_params} numbers, not ne {list(params.ne)}")
    rule(params.is_contiguous, "params must be contiguous")
    return a.ne


def _adamw_shape(srcs: Srcs, params: Params) -> Ne:
    return _check(srcs, 7, "m", "v")


def _adamw8_shape(srcs: Srcs, params: Params) -> Ne:
    ne, scales = _check(srcs, 8, "m", "v"), src(srcs, 4)
    want = (2, (math.prod(ne) + BLOCK8 - 1) // BLOCK8, 1, 1)
    rule(
        scales.ne == want, f"scales must have a pair for each {BLOCK8} elements, ne {list(want)}, not {list(scales.ne)}"
    )
    rule(scales.is_contiguous, "scales must be contiguous")
    return ne


def _sgd_shape(srcs: Srcs, params: Params) -> Ne:
    return _check(srcs, 2)


def _adamw_ref(a: Array, grad: Array, m: Array, v: Array, params: Array) -> tuple[Array, Array, Array]:
    alpha, beta1, beta2, eps, wd, beta1h, beta2h = params.reshape(-1)
    m = m * beta1 + grad * (1 - beta1)
    v = v * beta2 + grad * grad * (1 - beta2)
    step = m * beta1h / (np.sqrt(v * beta2h) + eps)
    return a * (1 - alpha * wd) - alpha * step, m, v


def _random_shares(shape: tuple[int, ...], seed: int) -> tuple[Array, Array]:
    """Two numbers from 0 to below 1 for each element: the halves of a hash of its index and of `seed`."""
    u32 = np.uint32
    x: Array = np.arange(math.prod(shape), dtype=np.int64).reshape(shape).astype(u32)
    x = x + u32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    x = (x ^ (x >> u32(16))) * u32(0x85EBCA6B)
    x = (x ^ (x >> u32(13))) * u32(0xC2B2AE35)
    x = x ^ (x >> u32(16))
    unit = np.float32(2.0**-16)
    return (x >> u32(16)).astype(np.float32) * unit, (x & u32(0xFFFF)).astype(np.float32) * unit


def _scale8(most: Array, n: int) -> Array:
    """The scale of each block whose largest value is `most`; 0: all elements count as 0."""
    scale = (most / np.float32(n)).astype(np.float32)
    return np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)


def _adamw8_ref(
    a: Array, grad: Array, m: Array, v: Array, scales: Array, params: Array
) -> tuple[Array, Array, Array, Array]:
    """In F32, operation by operation as the kernel: a code that is the next one would be another result."""
    f32, p, n = np.float32, params.reshape(-1), a.size
    beta1, beta2, eps, beta2h = (f32(p[i]) for i in (1, 2, 3, 6))
    c1, c2, keep, rate = f32(1 - p[1]), f32(1 - p[2]), f32(1 - p[0] * p[4]), f32(p[0] * p[5])
    n_blocks = scales.size // 2

    def blocks(x: Array) -> Array:
        return np.pad(x.reshape(-1).astype(f32), (0, n_blocks * BLOCK8 - n)).reshape(n_blocks, BLOCK8)

    old = scales.reshape(n_blocks, 2).astype(f32)
    w, g, k, root = blocks(a), blocks(grad), blocks(m), blocks(v) + f32(128)
    m1 = k * np.abs(k) * old[:, :1] * beta1 + g * c1
    root = root * root * old[:, 1:]
    v1 = root * root * beta2 + g * g * c2
    new = w * keep - m1 * rate / (np.sqrt(v1 * beta2h) + eps)
    m1.reshape(-1)[n:] = v1.reshape(-1)[n:] = 0
    finite = (np.isfinite(m1) & np.isfinite(v1)).all(axis=1, keepdims=True)

    share_m, share_v = _random_shares(w.shape, int(p[7]) if 0 <= p[7] < 2**32 else 0)
    scale_m = np.where(finite, _scale8(np.abs(m1).max(axis=1, keepdims=True), 127 * 127), f32(np.nan))
    x = np.abs(m1) / scale_m
    k = np.clip(np.floor(np.sqrt(x)), f32(0), f32(126))
    code_m = k + (share_m < (x - k * k) / (k + k + f32(1)))
    scale_v = np.where(finite, _scale8(np.sqrt(v1.max(axis=1, keepdims=True)), 255 * 255), f32(np.nan))
    x = np.sqrt(v1) / scale_v
    k = np.clip(np.floor(np.sqrt(x)), f32(1), f32(254))
    low, up = k * k, (k + f32(1)) * (k + f32(1))
    code_v = k + (share_v < (x * x - low * low) / (up * up - low * low))

    def codes(x: Array, scale: Array) -> Array:
        stored: Array = np.where(scale > 0, x, f32(0)).reshape(-1)[:n].astype(np.int8)
        return cast("Array", stored.reshape(a.shape))

    return (
        cast("Array", new.reshape(-1)[:n].reshape(a.shape)),
        codes(np.copysign(code_m, m1), scale_m),
        codes(code_v - 128, scale_v),
        cast("Array", np.concatenate([scale_m, scale_v], axis=1).reshape(scales.shape)),
    )


def _sgd_ref(a: Array, grad: Array, params: Array) -> Array:
    alpha, wd = params.reshape(-1)
    return a * (1 - alpha * wd) - alpha * grad


OPT_STEP_ADAMW = OpDef(
    name="opt_step_adamw",
    srcs=("a", "grad", "m", "v", "params"),
    params=(),
    shape=_adamw_shape,
    dtypes={(F32,) * 5: F32},
    ref=_adamw_ref,
    kernel="opt_step_adamw",
    cost=elementwise_cost(15),
    inplace=(0,),
    label="a - AdamW's step",
    writes=0,
    changes=(2, 3),
)
OPT_STEP_ADAMW8 = OpDef(
    name="opt_step_adamw8",
    srcs=("a", "grad", "m", "v", "scales", "params"),
    params=(),
    shape=_adamw8_shape,
    dtypes={(F32, F32, I8, I8, F32, F32): F32},
    ref=_adamw8_ref,
    kernel="opt_step_adamw8",
    cost=elementwise_cost(50),
    inplace=(0,),
    label="a - AdamW's step (8 bits)",
    writes=0,
    changes=(2, 3, 4),
)
OPT_STEP_SGD = OpDef(
    name="opt_step_sgd",
    srcs=("a", "grad", "params"),
    params=(),
    shape=_sgd_shape,
    dtypes={(F32,) * 3: F32},
    ref=_sgd_ref,
    kernel="opt_step_sgd",
    cost=elementwise_cost(4),
    inplace=(0,),
    label="a - step of SGD",
    writes=0,
)


def opt_step_adamw(a: Tensor, grad: Tensor, m: Tensor, v: Tensor, params: Tensor) -> Tensor:
    """One step of AdamW (ggml_opt_step_adamw; arXiv 1711.05101), written over the weights `a` and the moments `m`, `v`:
    m = beta1 m + (1 - beta1) grad, v = beta2 v + (1 - beta2) grad^2, a = (1 - alpha wd) a - alpha beta1h m /
    (sqrt(beta2h v) + eps).

    a, grad, m, v: F32, the same ne, contiguous. params: F32 ne [7]: alpha (the learning rate), beta1, beta2, eps, wd
    (weight decay), beta1h, beta2h; in step t, from 1 on, these two are 1 / (1 - beta1^t) and 1 / (1 - beta2^t).
    Result: a view of `a`, after the step. Raises ShapeError, DTypeError.
    """
    return record(OPT_STEP_ADAMW, (a, grad, m, v, params), {})


def opt_step_adamw8(a: Tensor, grad: Tensor, m: Tensor, v: Tensor, scales: Tensor, params: Tensor) -> Tensor:
    """One step of AdamW, see `opt_step_adamw`, whose moments are kept in 8 bits (arXiv 2110.02861; another map).

    Each block of 256 elements has a scale for `m`, the largest m / 127^2, and one for `v`, the root of the largest
    v / 255^2. A code k of m means scale * k * |k|; a code k of v means (scale * (k + 128)^2)^2. So small numbers keep
    digits, too. The step itself follows the exact moments. They are then rounded up or down by chance, with their own
    value as the mean: changes that are smaller than the distance of two codes would be lost otherwise. The chance
    follows from the index of the element and from the number of the step alone. A block with a moment that
    is not a finite number has NaN for scales.

    a, grad: F32, the same ne, contiguous. m, v: I8 of that ne, contiguous. scales: F32 ne [2, n_elements / 256, rounded
    up], of m and v. All three begin as zeros. params: F32 ne [8], those of `opt_step_adamw`, then the number of the
    step. Result: a view of `a`, after the step. Raises ShapeError, DTypeError.
    """
    return record(OPT_STEP_ADAMW8, (a, grad, m, v, scales, params), {})


def opt_step_sgd(a: Tensor, grad: Tensor, params: Tensor) -> Tensor:
    """One step of gradient descent (ggml_opt_step_sgd), written over the weights: a = (1 - alpha wd) a - alpha grad.

    a, grad: F32, the same ne, contiguous. params: F32 ne [2]: alpha (the learning rate), wd (weight decay). Result: a
    view of `a`, after the step. Raises ShapeError, DTypeError.
    """
    return record(OPT_STEP_SGD, (a, grad, params), {})
