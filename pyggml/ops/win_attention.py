"""Ops for the attention of Segment Anything's image encoder (arXiv 2304.02643): windows of an image, and relative
positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import ops
from ..codec import Array
from ..opdef import Gradient, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import BF16, F16, F32, MAX_INT, inplace, is_int, src
from ._gradients import dense, taken
from .copy import PLAIN_TYPES, copy_cost

__all__ = [
    "add_rel_pos",
    "add_rel_pos_inplace",
    "get_rel_pos",
    "win_part",
    "win_unpart",
]


def _part_shape(srcs: Srcs, params: Params) -> Ne:
    ne, w = src(srcs, 0).ne, params["w"]
    rule(ne[3] == 1, f"a has at most three dimensions: ne[3] is {ne[3]}")
    rule(is_int(w, 1), f"w must be a whole number from 1 to {MAX_INT}, not {w}")
    return (ne[0], int(w), int(w), -(-ne[1] // w) * -(-ne[2] // w))


def _part_ref(a: Array, w: int) -> Array:
    _, h0, w0, n = a.shape
    rows, columns = -(-h0 // w), -(-w0 // w)
    x = np.pad(a[0], [(0, rows * w - h0), (0, columns * w - w0), (0, 0)])
    return np.swapaxes(x.reshape(rows, w, columns, w, n), 1, 2)


def _unpart_shape(srcs: Srcs, params: Params) -> Ne:
    ne, w0, h0, w = src(srcs, 0).ne, params["w0"], params["h0"], params["w"]
    ok = all(is_int(n, 1) for n in (w0, h0, w))
    rule(ok, f"w0, h0 and w must be whole numbers from 1 to {MAX_INT}, not {w0}, {h0}, {w}")
    n = -(-w0 // w) * -(-h0 // w)
    rule(ne[1:] == (w, w, n), f"a must be ne [n, {w}, {w}, {n}], the windows of an image of {w0} * {h0}")
    return (ne[0], int(w0), int(h0), 1)


def _unpart_ref(a: Array, w0: int, h0: int, w: int) -> Array:
    rows, columns, n = -(-h0 // w), -(-w0 // w), a.shape[3]
    return np.swapaxes(a.reshape(rows, columns, w, w, n), 1, 2).reshape(rows * w, columns * w, n)[:h0, :w0]


def _get_shape(srcs: Srcs, params: Params) -> Ne:
    ne, qh, kh = src(srcs, 0).ne, params["qh"], params["kh"]
    rule(is_int(qh, 1) and qh == kh, f"qh and kh must be one whole number from 1, not {qh} and {kh}")
    rule(ne[1:] == (2 * qh - 1, 1, 1), f"a must be ne [n, {2 * qh - 1}], the positions -{qh - 1} .. {qh - 1}")
    return (ne[0], int(kh), int(qh), 1)


def _get_ref(a: Array, qh: int, kh: int) -> Array:
    return a[0, 0][np.arange(qh)[:, None] - np.arange(kh) + kh - 1]


def _add_shape(srcs: Srcs, params: Params) -> Ne:
    a, pw, ph = (src(srcs, i) for i in range(3))
    rule(pw.ne == ph.ne, "pw and ph must have one shape")
    n, w, h, batch = pw.ne
    ok = a.ne == (n * n, w * h, batch, 1)
    rule(ok, f"a must be ne [{n * n}, {w * h}, {batch}]: the keys, queries and batch of pw and ph")
    return a.ne


def _add_ref(a: Array, pw: Array, ph: Array) -> Array:
    batch, h, w, n = pw.shape
    return np.reshape(a.reshape(batch, h, w, n, n) + ph[..., :, None] + pw[..., None, :], a.shape)


def _grad_part(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    ne = src(node.src, 0).ne
    return (lambda: win_unpart(gy, ne[1], ne[2], node.op_params["w"]),)


def _grad_unpart(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    return (lambda: win_part(gy, node.op_params["w"]),)


def _grad_get(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    n, k, q, _ = node.ne
    of_row = np.arange(q)[:, None] - np.arange(k) + k - 1
    return (lambda: taken(ops.reshape_2d(dense(gy), n, k * q), 1, of_row.reshape(-1), 2 * k - 1),)


def _grad_add(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """Of the keys of a square, those of each column have one pw, those of each row one ph."""
    n, w, h, batch = src(node.src, 1).ne

    def summed_keys(ne: Ne) -> Tensor:
        keys = ops.reshape_4d(dense(gy), n, n, w * h, batch)
        return ops.reshape_4d(ops.repeat_back(keys, ne), n, w, h, batch)

    return gy, lambda: summed_keys((n, 1, w * h, batch)), lambda: summed_keys((1, n, w * h, batch))


WIN_PART = OpDef(
    name="win_part",
    srcs=("a",),
    params=("w",),
    shape=_part_shape,
    dtypes={(t,): t for t in PLAIN_TYPES},
    ref=_part_ref,
    kernel="win_part",
    cost=copy_cost,
    inplace=(),
    label="windows(a)",
    grad=_grad_part,
)
WIN_UNPART = OpDef(
    name="win_unpart",
    srcs=("a",),
    params=("w0", "h0", "w"),
    shape=_unpart_shape,
    dtypes={(t,): t for t in PLAIN_TYPES},
    ref=_unpart_ref,
    kernel="win_unpart",
    cost=copy_cost,
    inplace=(),
    label="image(a)",
    grad=_grad_unpart,
)
GET_REL_POS = OpDef(
    name="get_rel_pos",
    srcs=("a",),
    params=("qh", "kh"),
    shape=_get_shape,
    dtypes={(t,): t for t in (F32, F16, BF16)},
    ref=_get_ref,
    kernel="get_rel_pos",
    cost=copy_cost,
    inplace=(),
    label="a[q - k]",
    grad=_grad_get,
)
ADD_REL_POS = OpDef(
    name="add_rel_pos",
    srcs=("a", "pw", "ph"),
    params=(),
    shape=_add_shape,
    dtypes={(F32, F32, F32): F32},
    ref=_add_ref,
    kernel="add_rel_pos",
    cost=elementwise_cost(2),
    inplace=(0,),
    label="a + pw + ph",
    grad=_grad_add,
)


def win_part(a: Tensor, w: int) -> Tensor:
    """An image in windows of w * w elements, zeros beyond its ends (ggml_win_part).

    a: ne [n, W, H], any type but block types, any layout. Result: type of `a`, ne [n, w, w, ceil(W / w) * ceil(H / w)],
    the windows row by row. Raises ShapeError, DTypeError.
    """
    return record(WIN_PART, (a,), {"w": w})


def win_unpart(a: Tensor, w0: int, h0: int, w: int) -> Tensor:
    """The image of w0 * h0 elements that `win_part` cut into windows of w * w (ggml_win_unpart).

    a: ne [n, w, w, ceil(w0 / w) * ceil(h0 / w)], any type but block types, any layout. Result: type of `a`,
    ne [n, w0, h0]. Raises ShapeError, DTypeError.
    """
    return record(WIN_UNPART, (a,), {"w0": w0, "h0": h0, "w": w})


def get_rel_pos(a: Tensor, qh: int, kh: int) -> Tensor:
    """For each of qh queries and kh keys, the row of `a` for their distance (ggml_get_rel_pos).

    a: ne [n, 2 qh - 1], the distances 1 - qh .. qh - 1; F32, F16 or BF16 (ggml: F16), any layout; qh equals kh.
    Result: type of `a`, ne [n, kh, qh]: y[q, k] is a[q - k + kh - 1]. Raises ShapeError, DTypeError.
    """
    return record(GET_REL_POS, (a,), {"qh": qh, "kh": kh})


def add_rel_pos(a: Tensor, pw: Tensor, ph: Tensor) -> Tensor:
    """Add to attention scores a term for the distance along the width and one along the height (ggml_add_rel_pos).

    a: F32 ne [k * k, QW * QH, N], the keys of a square; pw, ph: F32 ne [k, QW, QH, N]; any layouts. Result: as `a`,
    y[.., kh * k + kw] = a[.., kh * k + kw] + ph[.., kh] + pw[.., kw]. Raises ShapeError, DTypeError.
    """
    return record(ADD_REL_POS, (a, pw, ph), {})


add_rel_pos_inplace = inplace(ADD_REL_POS, add_rel_pos)
