"""Convolution as a matrix product: each window of an image becomes a row of a matrix. And the way back: rows are summed
into a signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..opdef import ZERO, Cost, DTypeRow, Gradient, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor, dims_of, full_ne
from ._common import F32, MAX_INT, given_ne, is_int, is_whole, src, type_of
from ._gradients import constant
from ._sliding import KERNEL_TYPES, image_windows, image_windows_back, places
from .copy import copy_cost

__all__ = [
    "col2im_1d",
    "im2col",
    "im2col_3d",
    "im2col_3d_back",
    "im2col_back",
]

MAX_SIGNAL = 2**62  # elements that int64 counts
_TYPES: dict[DTypeRow, DType] = {(a, b, y): y for a in KERNEL_TYPES for b in KERNEL_TYPES for y in KERNEL_TYPES}


def _im2col_shape(srcs: Srcs, params: Params) -> Ne:
    return _columns_of(src(srcs, 0), src(srcs, 1).ne, params, "b")


def _columns_of(a: Tensor, b: Ne, params: Params, role: str) -> Ne:
    """The ne of the columns of an image of ne `b`, which errors call `role`."""
    if params["is_2D"]:
        rule(a.ne[2] == b[2], f"a and {role} must have as many channels (ne[2]), not {a.ne[2]} and {b[2]}")
        w, h = places(b[:2], a.ne[:2], params)
        return (a.ne[0] * a.ne[1] * a.ne[2], w, h, b[3])
    rule(a.ne[1] == b[1], f"a and {role} must have as many channels (ne[1]), not {a.ne[1]} and {b[1]}")
    rule(b[3] == 1, f"{role} has at most three dimensions: ne[3] is {b[3]}")
    (w,) = places(b[:1], a.ne[:1], params)
    return (a.ne[0] * a.ne[1], w, b[2], 1)


def _rows_of(x: Array, k: Sequence[int], params: Params) -> Array:
    """x [batch, channels, *planes] -> one row [channels, *k] per batch and place."""
    seen, n = image_windows(x, k, params), len(k)
    return np.moveaxis(seen, 1, 1 + n).reshape(-1, x.shape[1] * int(np.prod(k)))


def _im2col_ref(a: Array, b: Array, is_2D: bool, dst_type: int, **params: int) -> Array:
    return _rows_of(b, a.shape[2:], params) if is_2D else _rows_of(b[0], a.shape[3:], params)


def _im2col_3d_shape(srcs: Srcs, params: Params) -> Ne:
    return _columns_of_3d(src(srcs, 0), src(srcs, 1).ne, params, "b")


def _columns_of_3d(a: Tensor, b: Ne, params: Params, role: str) -> Ne:
    n = params["IC"]
    ok = is_whole(n, 1) and a.ne[3] % n == 0 and b[3] % n == 0
    rule(ok, f"IC must be a whole number that divides a's and {role}'s ne[3], {a.ne[3]} and {b[3]}, not {n}")
    w, h, d = places(b[:3], a.ne[:3], params)
    return (a.ne[0] * a.ne[1] * a.ne[2] * n, w, h, d * (b[3] // n))


def _im2col_3d_ref(a: Array, b: Array, IC: int, dst_type: int, **params: int) -> Array:
    return _rows_of(b.reshape(-1, IC, *b.shape[1:]), a.shape[1:], params)


Columns = Callable[[Tensor, Ne, Params, str], Ne]


def _back_shape(columns: Columns) -> Callable[[Srcs, Params], Ne]:
    def shape(srcs: Srcs, params: Params) -> Ne:
        b, ne = src(srcs, 1), given_ne(params)
        want = columns(src(srcs, 0), ne, params, "the result")
        rule(b.ne == want, f"b must have the ne of the columns, {list(want)}, not {list(b.ne)}")
        return ne

    return shape


def _im2col_back_ref(a: Array, b: Array, ne0: int, ne1: int, ne2: int, ne3: int, is_2D: bool, **params: int) -> Array:
    if is_2D:
        k, planes = a.shape[2:], (ne1, ne0)
    else:
        k, planes = a.shape[3:], (ne0,)
    return _from_rows(b, (ne3, ne2) if is_2D else (ne2, ne1), planes, k, params).reshape(ne3, ne2, ne1, ne0)


def _im2col_3d_back_ref(a: Array, b: Array, ne0: int, ne1: int, ne2: int, ne3: int, IC: int, **params: int) -> Array:
    y = _from_rows(b, (ne3 // IC, IC), (ne2, ne1, ne0), a.shape[1:], params)
    return y.reshape(ne3, ne2, ne1, ne0)


def _from_rows(rows: Array, lead: tuple[int, int], planes: Sequence[int], k: Sequence[int], params: Params) -> Array:
    """The gradient of x [batch, channels, *planes] from that of `_rows_of`."""
    n = len(k)
    out = places(planes[::-1], k[::-1], params)[::-1]
    seen = rows.reshape(lead[0], *out, lead[1], *k)
    return image_windows_back(np.moveaxis(seen, 1 + n, 1), planes, params)


def _grad_im2col(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """Of the kernel only the shape matters."""
    a, b = src(node.src, 0), src(node.src, 1)
    back = IM2COL_BACK if node.op == "im2col" else IM2COL_3D_BACK
    known = {name: n for name, n in node.op_params.items() if name != "dst_type"}
    return ZERO, lambda: record(back, (a, gy), {**_ne_params(back.name, b.ne), **known}, rank=b.rank)


def _grad_back(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a = src(node.src, 0)
    op = IM2COL if node.op == "im2col_back" else IM2COL_3D
    known = {name: n for name, n in node.op_params.items() if not name.startswith("ne")}
    return ZERO, lambda: _record(op, a, gy, known, F32)


def _grad_col2im(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """The columns of the signal's gradient."""
    a, p = src(node.src, 0), node.op_params
    kernel = constant(np.zeros((p["oc"], a.ne[0] // p["oc"]), np.float32), a)
    return (lambda: im2col(kernel, gy, p["s0"], 0, p["p0"], 0, 1, 0, False, F32),)


def _back_cost(t: Tensor) -> Cost:
    return Cost(src(t.src, 1).n_elements, src(t.src, 1).nbytes, t.nbytes)


_NE = ("ne0", "ne1", "ne2", "ne3")


def _ne_params(op: str, ne: Sequence[int]) -> Params:
    return dict(zip(_NE, full_ne(dims_of(op, ne)), strict=True))


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
    grad=_grad_im2col,
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
    grad=_grad_im2col,
    ranks=(1,),
)
IM2COL_BACK = OpDef(
    name="im2col_back",
    srcs=("a", "b"),
    params=(*_NE, "s0", "s1", "p0", "p1", "d0", "d1", "is_2D"),
    shape=_back_shape(_columns_of),
    dtypes={(t, F32): F32 for t in KERNEL_TYPES},
    ref=_im2col_back_ref,
    kernel="im2col_back",
    cost=_back_cost,
    inplace=(),
    label="gradient of im2col",
    grad=_grad_back,
    ranks=(),
)
IM2COL_3D_BACK = OpDef(
    name="im2col_3d_back",
    srcs=("a", "b"),
    params=(*_NE, "IC", "s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2"),
    shape=_back_shape(_columns_of_3d),
    dtypes={(t, F32): F32 for t in KERNEL_TYPES},
    ref=_im2col_3d_back_ref,
    kernel="im2col_3d_back",
    cost=_back_cost,
    inplace=(),
    label="gradient of im2col",
    grad=_grad_back,
    ranks=(),
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
    grad=_grad_col2im,
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


def im2col_back(
    a: Tensor, b: Tensor, ne: Sequence[int], s0: int, s1: int, p0: int, p1: int, d0: int, d1: int, is_2D: bool
) -> Tensor:
    """The gradient of `im2col` by its image (ggml_im2col_back): each element of it is the sum of what the rows have of
    it.

    a: the kernel (only its shape matters), F32, F16 or BF16; b: the gradient of the rows, F32, any layout; ne: the
    image's. The others as `im2col`. Result: F32, of that ne. Raises ShapeError, DTypeError.
    """
    params = {"s0": s0, "s1": s1, "p0": p0, "p1": p1, "d0": d0, "d1": d1, "is_2D": is_2D}
    return record(IM2COL_BACK, (a, b), {**_ne_params("im2col_back", ne), **params})


def im2col_3d_back(
    a: Tensor,
    b: Tensor,
    ne: Sequence[int],
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
) -> Tensor:
    """The gradient of `im2col_3d` by its volumes. As `im2col_back`."""
    params = {"IC": IC, "s0": s0, "s1": s1, "s2": s2, "p0": p0, "p1": p1, "p2": p2, "d0": d0, "d1": d1, "d2": d2}
    return record(IM2COL_3D_BACK, (a, b), {**_ne_params("im2col_3d_back", ne), **params})


def col2im_1d(a: Tensor, s0: int, oc: int, p0: int) -> Tensor:
    """Sum columns into a signal (ggml_col2im_1d): column t of channel c is added from element t * s0 - p0 on.

    a: ne [K * oc, T], F32, F16 or BF16, any layout; result: type of `a`, ne [(T - 1) * s0 + K - 2 p0, oc]. After
    `mul_mat` of a kernel [IC, K * oc] and a signal [IC, T] it is a transposed convolution, cropped by p0 at both ends.
    Raises ShapeError, DTypeError.
    """
    return record(COL2IM_1D, (a,), {"s0": s0, "oc": oc, "p0": p0})
