"""Convolutions in one node, without columns in memory: for images, for each channel by itself, and for volumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .. import ops
from ..codec import Array
from ..opdef import Cost, Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, is_whole, src
from ._gradients import dense, summed
from ._sliding import check_taps, convolve, image_windows, kernel_rows, places, product_cost
from .im2col import im2col, im2col_3d, im2col_3d_back, im2col_back
from .matmul import outer_summed

__all__ = [
    "conv_2d_direct",
    "conv_2d_dw_direct",
    "conv_3d_direct",
]

_PLANE = ("s0", "s1", "p0", "p1", "d0", "d1")
_VOLUME = ("s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2")


def _2d_shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    rule(a.ne[2] == b.ne[2], f"a and b must have as many channels (ne[2]), not {a.ne[2]} and {b.ne[2]}")
    check_taps(a.ne[0] * a.ne[1] * a.ne[2])
    w, h = places(b.ne[:2], a.ne[:2], params)
    return (w, h, a.ne[3], b.ne[3])


def _2d_ref(a: Array, b: Array, **params: int) -> Array:
    return convolve(image_windows(b, a.shape[2:], params), a)


def _2d_cost(t: Tensor) -> Cost:
    a = src(t.src, 0)
    return product_cost(t, t.n_elements * a.ne[0] * a.ne[1] * a.ne[2])


def _dw_shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    rule(a.ne[2] == 1 and a.ne[3] == b.ne[2], f"a must be ne [KW, KH, 1, {b.ne[2]}], a kernel for each of b's channels")
    check_taps(a.ne[0] * a.ne[1])
    w, h = places(b.ne[:2], a.ne[:2], params)
    return (w, h, b.ne[2], b.ne[3])


def _dw_ref(a: Array, b: Array, **params: int) -> Array:
    return np.einsum("nchwij,cij->nchw", image_windows(b, a.shape[2:], params), a[:, 0])


def _dw_cost(t: Tensor) -> Cost:
    a = src(t.src, 0)
    return product_cost(t, t.n_elements * a.ne[0] * a.ne[1])


def _3d_shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    n, batch, out = params["n_channels"], params["n_batch"], params["n_channels_out"]
    ok = is_whole(n, 1) and is_whole(batch, 1) and is_whole(out, 1)
    rule(ok, f"n_channels, n_batch, n_channels_out must be whole numbers from 1, not {n}, {batch}, {out}")
    rule(a.ne[3] == n * out, f"a's ne[3] must be n_channels * n_channels_out = {n * out}, not {a.ne[3]}")
    rule(b.ne[3] == n * batch, f"b's ne[3] must be n_channels * n_batch = {n * batch}, not {b.ne[3]}")
    check_taps(a.ne[0] * a.ne[1] * a.ne[2] * n)
    w, h, d = places(b.ne[:3], a.ne[:3], params)
    return (w, h, d, int(out * batch))


def _3d_ref(a: Array, b: Array, n_channels: int, n_batch: int, n_channels_out: int, **params: int) -> Array:
    volumes = b.reshape(n_batch, n_channels, *b.shape[1:])
    return convolve(image_windows(volumes, a.shape[1:], params), a.reshape(n_channels_out, n_channels, *a.shape[1:]))


def _3d_cost(t: Tensor) -> Cost:
    a = src(t.src, 0)
    return product_cost(t, t.n_elements * a.n_elements // t.op_params["n_channels_out"])


def _plane(p: Params) -> tuple[int, int, int, int, int, int]:
    return p["s0"], p["s1"], p["p0"], p["p1"], p["d0"], p["d1"]


def _volume(p: Params) -> tuple[int, int, int, int, int, int, int, int, int]:
    return p["s0"], p["s1"], p["s2"], p["p0"], p["p1"], p["p2"], p["d0"], p["d1"], p["d2"]


def _grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """That of the product of columns and kernels, which conv_2d computes: `_product_grad`."""
    p = _plane(node.op_params)

    def columns(a: Tensor, b: Tensor) -> Tensor:
        return im2col(a, b, *p, True, F32)

    def image(a: Tensor, g: Tensor, ne: Ne) -> Tensor:
        return im2col_back(a, g, ne, *p, True)

    return _product_grad(node, gy, src(node.src, 0).ne[3], src(node.src, 1).ne[3], columns, image)


def _grad_3d(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    p, n_channels = _volume(node.op_params), node.op_params["n_channels"]

    def columns(a: Tensor, b: Tensor) -> Tensor:
        return im2col_3d(a, b, n_channels, *p, F32)

    def image(a: Tensor, g: Tensor, ne: Ne) -> Tensor:
        return im2col_3d_back(a, g, ne, n_channels, *p)

    return _product_grad(node, gy, node.op_params["n_channels_out"], node.op_params["n_batch"], columns, image)


def _product_grad(
    node: Tensor,
    gy: Tensor,
    n_out: int,
    batch: int,
    columns: Callable[[Tensor, Tensor], Tensor],
    image: Callable[[Tensor, Tensor, Ne], Tensor],
) -> Sequence[Gradient]:
    """Gradients of a convolution, as those of the product of the columns of its image [k, places, batch] with its
    kernels [k, n_out]. `columns` records those of (kernel, image), `image` the gradient of an image from (kernel,
    gradient of its columns, ne)."""
    a, b = src(node.src, 0), src(node.src, 1)
    places, (w, h) = node.n_elements // (n_out * batch), node.ne[:2]

    def of_a() -> Tensor:
        seen = columns(a, b)
        g = ops.transpose(ops.reshape_3d(dense(gy), places, n_out, batch))
        kernels = ops.reshape_2d(dense(a), seen.ne[0], n_out)
        return ops.reshape(outer_summed(ops.reshape_3d(seen, seen.ne[0], places, batch), g, kernels), a)

    def of_b() -> Tensor:
        k = a.n_elements // n_out
        g = ops.reshape_3d(dense(gy), places, n_out, batch)
        seen = ops.out_prod(ops.reshape_2d(dense(a), k, n_out), g)
        return image(a, ops.reshape_4d(seen, k, w, h, places * batch // (w * h)), b.ne)

    return of_a, of_b


def _grad_dw(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """Each channel is an image of its own, ne [W, H, 1, channels * batch], and has a kernel [k]."""
    a, b = src(node.src, 0), src(node.src, 1)
    p = _plane(node.op_params)
    (w, h, channels, batch), k, places = b.ne, a.ne[0] * a.ne[1], node.ne[0] * node.ne[1]

    def of_a() -> Tensor:
        planes = ops.reshape_4d(dense(b), w, h, 1, channels * batch)
        seen = ops.reshape_4d(im2col(a, planes, *p, True, F32), k, places, channels, batch)
        g = ops.out_prod(seen, ops.reshape_4d(dense(gy), 1, places, channels, batch))
        return ops.reshape(summed(g, (k, 1, channels, 1)), a)

    def of_b() -> Tensor:
        g = ops.reshape_4d(dense(gy), places, 1, channels, batch)
        seen = ops.out_prod(ops.reshape_4d(dense(a), k, 1, channels, 1), g)
        seen = ops.reshape_4d(seen, k, *node.ne[:2], channels * batch)
        return ops.reshape(im2col_back(a, seen, (w, h, 1, channels * batch), *p, True), b)

    return of_a, of_b


CONV_2D_DIRECT = OpDef(
    name="conv_2d_direct",
    srcs=("a", "b"),
    params=_PLANE,
    shape=_2d_shape,
    dtypes=kernel_rows(),
    ref=_2d_ref,
    kernel="conv_2d_direct",
    cost=_2d_cost,
    inplace=(),
    label="a * b",
    grad=_grad,
    ranks=(1,),
)
CONV_2D_DW_DIRECT = OpDef(
    name="conv_2d_dw_direct",
    srcs=("a", "b"),
    params=_PLANE,
    shape=_dw_shape,
    dtypes=kernel_rows(),
    ref=_dw_ref,
    kernel="conv_2d_dw_direct",
    cost=_dw_cost,
    inplace=(),
    label="a * b, by channel",
    grad=_grad_dw,
    ranks=(1,),
)
CONV_3D_DIRECT = OpDef(
    name="conv_3d_direct",
    srcs=("a", "b"),
    params=(*_VOLUME, "n_channels", "n_batch", "n_channels_out"),
    shape=_3d_shape,
    dtypes=kernel_rows(),
    ref=_3d_ref,
    kernel="conv_3d_direct",
    cost=_3d_cost,
    inplace=(),
    label="a * b",
    grad=_grad_3d,
    ranks=(1,),
)


def conv_2d_direct(a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int) -> Tensor:
    """Convolution of images in one node (ggml_conv_2d_direct): the result of `conv_2d`, without columns in memory.

    a: kernel ne [KW, KH, IC, OC], F32, F16 or BF16; b: F32 ne [W, H, IC, N]; any layouts; strides s0, s1, zeros around
    p0, p1, dilations d0, d1 along width and height. Result: F32, ne [OW, OH, OC, N],
    OW = (W + 2 p0 - d0 (KW - 1) - 1) // s0 + 1. Raises ShapeError, DTypeError.
    """
    params = {"s0": s0, "s1": s1, "p0": p0, "p1": p1, "d0": d0, "d1": d1}
    return record(CONV_2D_DIRECT, (a, b), params)


def conv_2d_dw_direct(
    a: Tensor, b: Tensor, stride0: int, stride1: int, pad0: int, pad1: int, dilation0: int, dilation1: int
) -> Tensor:
    """Convolution of each channel with a kernel of its own (ggml_conv_2d_dw_direct): `conv_2d_dw` in one node.

    a: kernel ne [KW, KH, 1, C], F32, F16 or BF16; b: F32 ne [W, H, C, N]; any layouts. (In ggml the result has the
    order of b's dimensions in memory; here it is dense.) Parameters (errors call them s0 .. d1) and sizes as
    `conv_2d_direct`. Result: F32, ne [OW, OH, C, N]. Raises ShapeError, DTypeError.
    """
    params = {"s0": stride0, "s1": stride1, "p0": pad0, "p1": pad1, "d0": dilation0, "d1": dilation1}
    return record(CONV_2D_DW_DIRECT, (a, b), params)


def conv_3d_direct(
    a: Tensor,
    b: Tensor,
    s0: int,
    s1: int,
    s2: int,
    p0: int,
    p1: int,
    p2: int,
    d0: int,
    d1: int,
    d2: int,
    n_channels: int,
    n_batch: int,
    n_channels_out: int,
) -> Tensor:
    """Convolution of volumes in one node (ggml_conv_3d_direct).

    a: kernel ne [KW, KH, KD, n_channels * n_channels_out], F32, F16 or BF16; b: F32 ne [W, H, D, n_channels * n_batch];
    any layouts; strides s0 .. s2, zeros around p0 .. p2, dilations d0 .. d2 along width, height, depth.
    Result: F32, ne [OW, OH, OD, n_channels_out * n_batch], sizes as `conv_2d_direct`. Raises ShapeError, DTypeError.
    """
    params = dict(zip(_VOLUME, (s0, s1, s2, p0, p1, p2, d0, d1, d2), strict=True))
    counts = {"n_channels": n_channels, "n_batch": n_batch, "n_channels_out": n_channels_out}
    return record(CONV_3D_DIRECT, (a, b), params | counts)
