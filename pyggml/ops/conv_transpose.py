"""Transposed convolutions: every element of the image adds the kernel, times itself, to the result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from .. import ops
from ..codec import Array
from ..opdef import Cost, Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, MAX_INT, is_int, src
from ._gradients import dense
from ._sliding import check_taps, kernel_rows, product_cost
from .im2col import im2col
from .matmul import outer_summed

__all__ = [
    "conv_transpose_1d",
    "conv_transpose_2d_p0",
]


def _1d_shape(srcs: Srcs, params: Params) -> Ne:
    a, b, s = src(srcs, 0), src(srcs, 1), params["s0"]
    rule(a.ne[2] == b.ne[1], f"a's ne[2] {a.ne[2]} and b's ne[1] {b.ne[1]}, the channels, must be equal")
    rule(a.ne[3] == 1 and b.ne[3] == 1, "a and b have at most three dimensions")
    rule(is_int(s, 1), f"s0 must be a whole number from 1 to {MAX_INT}, not {s}")
    check_taps(a.ne[0] * a.ne[2])
    rule(params["p0"] == 0 and params["d0"] == 1, "p0 must be 0 and d0 must be 1, as in ggml")
    return ((b.ne[0] - 1) * s + a.ne[0], a.ne[1], b.ne[2], 1)


def _1d_ref(a: Array, b: Array, s0: int, p0: int, d0: int) -> Array:
    k, n = a.shape[3], b.shape[3]
    y = np.zeros((b.shape[1], a.shape[2], (n - 1) * s0 + k))
    for i in range(k):
        y[:, :, i : i + (n - 1) * s0 + 1 : s0] += np.einsum("bcl,co->bol", b[0], a[0, :, :, i])
    return y


def _2d_shape(srcs: Srcs, params: Params) -> Ne:
    a, b, s = src(srcs, 0), src(srcs, 1), params["stride"]
    rule(a.ne[3] == b.ne[2], f"a's ne[3] {a.ne[3]} and b's ne[2] {b.ne[2]}, the channels, must be equal")
    rule(is_int(s, 1), f"stride must be a whole number from 1 to {MAX_INT}, not {s}")
    check_taps(a.ne[0] * a.ne[1] * a.ne[3])
    return ((b.ne[0] - 1) * s + a.ne[0], (b.ne[1] - 1) * s + a.ne[1], a.ne[2], b.ne[3])


def _2d_ref(a: Array, b: Array, stride: int) -> Array:
    (_, out, kh, kw), (batch, _, h, w) = a.shape, b.shape
    y = np.zeros((batch, out, (h - 1) * stride + kh, (w - 1) * stride + kw))
    for i in range(kh):
        for j in range(kw):
            seen = y[:, :, i : i + (h - 1) * stride + 1 : stride, j : j + (w - 1) * stride + 1 : stride]
            seen += np.einsum("bchw,co->bohw", b, a[:, :, i, j])
    return y


def _cost(t: Tensor) -> Cost:
    a, b = src(t.src, 0), src(t.src, 1)
    return product_cost(t, b.n_elements * (a.n_elements // a.ne[2 if t.op == "conv_transpose_1d" else 3]))


def _grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """Each element of the image has added a kernel to a window of the result: by the columns of these windows [k,
    places, batch], with the kernels as a matrix [k, channels] and the image as [places, channels, batch]."""
    a, b = src(node.src, 0), src(node.src, 1)
    is_2d = node.op == "conv_transpose_2d_p0"
    s = node.op_params["stride" if is_2d else "s0"]
    axes = 2 if is_2d else 1
    places, channels, batch = b.ne[0] * (b.ne[1] if is_2d else 1), b.ne[axes], b.ne[axes + 1]
    k = a.n_elements // channels

    @cache
    def columns() -> Tensor:
        return ops.reshape_3d(im2col(a, gy, s, s, 0, 0, 1, 1, is_2d, F32), k, places, batch)

    def kernels() -> Tensor:
        return ops.reshape_2d(dense(a), k, channels)

    def of_a() -> Tensor:
        image = ops.transpose(ops.reshape_3d(dense(b), places, channels, batch))
        return ops.reshape(outer_summed(columns(), image, kernels()), a)

    def of_b() -> Tensor:
        g = ops.mul_mat(kernels(), columns())  # [channels, places, batch]
        if not is_2d:
            return ops.transpose(g)
        return ops.permute(ops.reshape_4d(g, channels, *b.ne[:2], batch), 2, 0, 1, 3)

    return of_a, of_b


CONV_TRANSPOSE_1D = OpDef(
    name="conv_transpose_1d",
    srcs=("a", "b"),
    params=("s0", "p0", "d0"),
    shape=_1d_shape,
    dtypes=kernel_rows(),
    ref=_1d_ref,
    kernel="conv_transpose_1d",
    cost=_cost,
    inplace=(),
    label="a *ᵀ b",
    grad=_grad,
    ranks=(1,),
)
CONV_TRANSPOSE_2D_P0 = OpDef(
    name="conv_transpose_2d_p0",
    srcs=("a", "b"),
    params=("stride",),
    shape=_2d_shape,
    dtypes=kernel_rows(),
    ref=_2d_ref,
    kernel="conv_transpose_2d_p0",
    cost=_cost,
    inplace=(),
    label="a *ᵀ b",
    grad=_grad,
    ranks=(1,),
)


def conv_transpose_1d(a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> Tensor:
    """Transposed convolution of signals with stride s0 (ggml_conv_transpose_1d).

    a: kernel ne [K, OC, IC], F32, F16 or BF16; b: F32 ne [L, IC, N] (ggml: one signal); any layouts; p0 must be 0 and
    d0 must be 1, as in ggml. Result: F32, ne [(L - 1) * s0 + K, OC, N]. Raises ShapeError, DTypeError.
    """
    return record(CONV_TRANSPOSE_1D, (a, b), {"s0": s0, "p0": p0, "d0": d0})


def conv_transpose_2d_p0(a: Tensor, b: Tensor, stride: int) -> Tensor:
    """Transposed convolution of images (ggml_conv_transpose_2d_p0), with which a U-Net enlarges them: no padding, the
    same stride along width and height.

    a: kernel ne [KW, KH, OC, IC], F32, F16 or BF16; b: F32 ne [W, H, IC, N]; any layouts.
    Result: F32, ne [(W - 1) * stride + KW, (H - 1) * stride + KH, OC, N]. A weight of NaN
    affects only the results that it is multiplied into. Raises ShapeError, DTypeError.
    """
    return record(CONV_TRANSPOSE_2D_P0, (a, b), {"stride": stride})
