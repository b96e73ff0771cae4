"""Convolution as a matrix product: each window of an image becomes a row of a matrix. And the way back: rows are summed
into a signal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..opdef import DTypeRow, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import MAX_INT, is_int, is_whole, src, type_of
from ._sliding import KERNEL_TYPES, image_windows, places
from .copy import copy_cost

__all__ = [
    "col2im_1d",
    "im2col",
    "im2col_3d",
]

MAX_SIGNAL = 2**62  # elements that int64 counts
_TYPES: dict[DTypeRow, DType] = {(a, b, y): y for a in KERNEL_TYPES for b in KERNEL_TYPES for y in KERNEL_TYPES}


def _im2col_shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    if params["is_2D"]:
        rule(a.ne[2] == b.ne[2], f"a and b must have as many channels (ne[2]), not {a.ne[2]} and {b.ne[2]}")
        w, h = places(b.ne[:2], a.ne[:2], params)
        return (a.ne[0] * a.ne[1] * a.ne[2], w, h, b.ne[3])
    rule(a.ne[1] == b.ne[1], f"a and b must have as many channels (ne[1]), not {a.ne[1]} and {b.ne[1]}")
    rule(b.ne[3] == 1, f"b has at most three dimensions: ne[3] is {b.ne[3]}")
    (w,) = places(b.ne[:1], a.ne[:1], params)
    return (a.ne[0] * a.ne[1], w, b.ne[2], 1)


def _rows_of(x: Array, k: Sequence[int], params: Params) -> Array:
    """x [batch, channels, *planes] -> one row [channels, *k] per batch and place."""
    seen, n = image_windows(x, k, params), len(k)
    return np.moveaxis(seen, 1, 1 + n).reshape(-1, x.shape[1] * int(np.prod(k)))


def _im2col_ref(a: Array, b: Array, is_2D: bool, dst_type: int, **params: int) -> Array:
    return _rows_of(b, a.shape[2:], params) if is_2D else _rows_of(b[0], a.shape[3:], params)


def _im2col_3d_shape(srcs: Srcs, params: Params) -> Ne:
    a, b, n = src(srcs, 0), src(srcs, 1), params["IC"]
    ok = is_whole(n, 1) and a.ne[3] % n == 0 and b.ne[3] % n == 0
    rule(ok, f"IC must be a whole number that divides a's and b's ne[3], {a.ne[3]} and {b.ne[3]}, not {n}")
    w, h, d = places(b.ne[:3], a.ne[:3], params)
    return (a.ne[0] * a.ne[1] * a.ne[2] * n, w, h, d * (b.ne[3] // n))


def _im2col_3d_ref(a: Array, b: Array, IC: int, dst_type: int, **params: int) -> Array:
    return _rows_of(b.reshape(-1, IC, *b.shape[1:]), a.shape[1:], params)


def _col2im_1d_shape(srcs: Srcs, params: Params) -> Ne:
    ne, s, oc, p = src(srcs, 0).ne, params["s0"], params["oc"], params["p0"]
    rule(ne[2] == 1 and ne[3] == 1, "a must be a matrix (ne[2] and ne[3] must be 1)")
    rule(is_int(s, 1), f"s0 must be a whole number from 1 to {MAX_INT}, not {s}")
    rule(is_whole(oc, 1) and ne[0] % oc == 0, f"oc must be a whole number that divides a's ne[0] {ne[0]}, not {oc}")
    n = (ne[1] - 1) * s + ne[0] // oc
    rule(n <= MAX_SIGNAL, f"the signal of {n} elements, before its ends are left out, is too long")
    rule(is_whole(p, 0) and 2 * p < n, f"p0 must be a whole number from 0 and leave something of {n} elements, not {p}")
    return (n - 2 * p, int(oc), 1, 1)


def _col2im_1d_ref(a: Array, s0: int, oc: int, p0: int) -> Array:
    columns = a[0, 0].reshape(a.shape[2], oc, -1)  # [T, oc, K]
    n, k = columns.shape[0], columns.shape[2]
    y = np.zeros((oc, (n - 1) * s0 + k))
    for i in range(k):
        y[:, i : i + (n - 1) * s0 + 1 : s0] += columns[:, :, i].T
    return y[:, p0 : y.shape[1] - p0]


IM2COL = OpDef(
    name="im2col",
    srcs=("a", "b"),
    params=("s0", "s1", "p0", "p1", "d0", "d1", "is_2D", "dst_type"),
    shape=_im2col_shape,
    dtypes=_TYPES,
    ref=_im2col_ref,
    kernel="im2col",
    cost=elementwise_cost(0),
    inplace=(),
    label="im2col(b)",
    ranks=(1,),
)
IM2COL_3D = OpDef(
    name="im2col_3d",
    srcs=("a", "b"),
    params=("IC", "s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2", "dst_type"),
    shape=_im2col_3d_shape,
    dtypes=_TYPES,
    ref=_im2col_3d_ref,
    kernel="im2col_3d",
    cost=elementwise_cost(0),
    inplace=(),
    label="im2col(b)",
    ranks=(1,),
)
COL2IM_1D = OpDef(
    name="col2im_1d",
    srcs=("a",),
    params=("s0", "oc", "p0"),
    shape=_col2im_1d_shape,
    dtypes={(t,): t for t in KERNEL_TYPES},
    ref=_col2im_1d_ref,
    kernel="col2im_1d",
    cost=copy_cost,
    inplace=(),
    label="col2im(a)",
)


def _record(op: OpDef, a: Tensor, b: Tensor, params: Params, dst_type: DType | int | str) -> Tensor:
    t = type_of(dst_type)  # None fits no row
    return record(op, (a, b), {**params, "dst_type": -1 if t is None else t.gguf_id}, dtype=t)


def im2col(
    a: Tensor,
    b: Tensor,
    s0: int,
    s1: int,
    p0: int,
    p1: int,
    d0: int,
    d1: int,
    is_2D: bool,
    dst_type: DType | int | str,
) -> Tensor:
    """A matrix with the elements of each window of an image as a row (ggml_im2col). Its product with kernels is their
    convolution with the image.

    a: the kernel (only its shape matters), ne [KW, KH, IC, OC] (not is_2D: [K, IC, OC]); b: ne [W, H, IC, N]
    (not is_2D: [W, IC, N]), any layout; both F32, F16 or BF16. The window moves by s0, s1 over b and p0, p1 zeros
    around it; its elements are d0, d1 apart (not is_2D: s1, p1, d1 are ignored).
    Result: `dst_type` F32, F16 or BF16 (or its number or name), ne [IC * KH * KW, OW, OH, N] (not is_2D: [IC * K, OW,
    N]), OW = (W + 2 p0 - d0 (KW - 1) - 1) // s0 + 1. Use: `conv_2d`, `conv_1d`. Raises ShapeError, DTypeError.
    """
    params = {"s0": s0, "s1": s1, "p0": p0, "p1": p1, "d0": d0, "d1": d1, "is_2D": is_2D}
    return _record(IM2COL, a, b, params, dst_type)


def im2col_3d(
    a: Tensor,
    b: Tensor,
    IC: int,
    s0: int,
    s1: int,
    s2: int,
    p0: int,
    p1: int,
    p2: int,
    d0: int,
    d1: int,
    d2: int,
    dst_type: DType | int | str,
) -> Tensor:
    """`im2col` of volumes (ggml_im2col_3d), of IC channels each.

    a: the kernel (only its shape matters), ne [KW, KH, KD, IC * OC]; b: ne [W, H, D, IC * N], any layout; both
    F32, F16 or BF16. Strides s0 .. s2, zeros around p0 .. p2, dilations d0 .. d2 along width, height, depth.
    Result: `dst_type`, ne [IC * KD * KH * KW, OW, OH, OD * N]. Use: `conv_3d`. Raises ShapeError, DTypeError.
    """
    params = {"IC": IC, "s0": s0, "s1": s1, "s2": s2, "p0": p0, "p1": p1, "p2": p2, "d0": d0, "d1": d1, "d2": d2}
    return _record(IM2COL_3D, a, b, params, dst_type)


def col2im_1d(a: Tensor, s0: int, oc: int, p0: int) -> Tensor:
    """Sum columns into a signal (ggml_col2im_1d): column t of channel c is added from element t * s0 - p0 on.

    a: ne [K * oc, T], F32, F16 or BF16, any layout; result: type of `a`, ne [(T - 1) * s0 + K - 2 p0, oc]. After
    `mul_mat` of a kernel [IC, K * oc] and a signal [IC, T] it is a transposed convolution, cropped by p0 at both ends.
    Raises ShapeError, DTypeError.
    """
    return record(COL2IM_1D, (a,), {"s0": s0, "oc": oc, "p0": p0})
