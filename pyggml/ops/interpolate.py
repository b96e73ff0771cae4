"""Resize images: nearest, bilinear, bicubic. Every mode takes weighted sums of a few elements, first along the height,
then along the width; `taps` says which elements, with which weights."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from ..codec import Array
from ..opdef import Cost, Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, MAX_INT, given_ne, is_whole, ne_of, src
from .copy import stored_bytes

__all__ = [
    "ScaleFlag",
    "ScaleMode",
    "interpolate",
    "upscale",
    "upscale_back",
    "upscale_ext",
]


class ScaleMode(IntEnum):
    """ggml_scale_mode."""

    NEAREST = 0
    BILINEAR = 1
    BICUBIC = 2


class ScaleFlag(IntEnum):
    """ggml_scale_flag: added to a mode."""

    ALIGN_CORNERS = 256
    ANTIALIAS = 512


_MODES = IntEnum(
    "_MODES",
    {
        "NEAREST": 0,
        "BILINEAR": 1,
        "BICUBIC": 2,
        "NEAREST|ALIGN_CORNERS": 256,
        "BILINEAR|ALIGN_CORNERS": 257,
        "BICUBIC|ALIGN_CORNERS": 258,
        "BILINEAR|ANTIALIAS": 513,
        "BILINEAR|ALIGN_CORNERS|ANTIALIAS": 769,
    },
)
_SHARPNESS = -0.75  # of bicubic weights, as in ggml and PyTorch


def _shape(srcs: Srcs, params: Params) -> Ne:
    ne = given_ne(params)
    rule(
        all(n <= MAX_INT for n in (*ne, *src(srcs, 0).ne)),
        f"no dimension of a or of the result may have more than {MAX_INT} elements",
    )
    return ne


def _nearest(n_in: int, n_out: int, align: bool) -> tuple[Array, Array]:
    i = np.arange(n_out)
    at = i * (n_in - 1) // (n_out - 1) if align else i * n_in // n_out
    return at[:, None], np.ones((n_out, 1))


def _antialias(x: Array, n_in: int, step: float, half: float) -> tuple[Array, Array]:
    """The weights of a triangle as wide as the step. `x`: its centres, counted from the edge of element 0 (half = 0:
    from the middle of element 0)."""
    support = max(1.0, step)
    first = np.maximum(np.floor(x - support + half), 0)[:, None]
    last = np.minimum(np.floor(x + support + half), n_in)[:, None]
    at = first + np.arange(int((last - first).max()))
    w = np.where(at < last, np.maximum(1 - np.abs((at - x[:, None] + half) * (1 / support)), 0), 0)
    return at, w / w.sum(axis=1, keepdims=True)


def _cubic(d: Array) -> Array:
    """Bicubic weights for a place at distance d after an element: the weight of the element before that element, its
    own, and those of the two elements after it."""
    a, near, far = _SHARPNESS, np.stack([d, 1 - d], 1), np.stack([1 + d, 2 - d], 1)
    near, far = ((a + 2) * near - (a + 3)) * near**2 + 1, ((a * far - 5 * a) * far + 8 * a) * far - 4 * a
    return np.stack([far[:, 0], near[:, 0], near[:, 1], far[:, 1]], axis=1)


def taps(n_in: int, n_out: int, mode: int) -> tuple[Array, Array]:
    """For each element of the result along one axis, the source elements that it sums and their weights: both arrays
    are [n_out, n_taps]."""
    align = bool(mode & ScaleFlag.ALIGN_CORNERS) and n_in > 1 and n_out > 1
    if mode & 255 == ScaleMode.NEAREST:
        return _nearest(n_in, n_out, align)
    half = 0.0 if mode & ScaleFlag.ALIGN_CORNERS else 0.5
    step = (n_in - 1) / (n_out - 1) if align else n_in / n_out
    x = (np.arange(n_out) + half) * step
    if mode & ScaleFlag.ANTIALIAS:
        at, w = _antialias(x, n_in, step, half)
    elif mode & 255 == ScaleMode.BILINEAR:
        at = np.floor(x - half)[:, None] + [0, 1]
        d = np.clip(x - half - np.maximum(at[:, 0], 0), 0, 1)
        w = np.stack([1 - d, d], axis=1)
    else:
        at = np.floor(x - half)[:, None] + [-1, 0, 1, 2]
        w = _cubic(x - half - at[:, 1])
    return np.clip(at, 0, n_in - 1).astype(np.int64), w


def _along(a: Array, axis: int, n_out: int, mode: int) -> Array:
    """`a` with another size along `axis`. An element with weight 0 does not count, even when it is NaN."""
    at, w = taps(a.shape[axis], n_out, mode)
    shape = [-1 if i == axis else 1 for i in range(a.ndim)]
    y = np.zeros([n_out if i == axis else n for i, n in enumerate(a.shape)])
    for i in range(at.shape[1]):
        w_i = w[:, i].reshape(shape)
        y += np.where(w_i != 0, np.take(a, at[:, i], axis) * w_i, 0)
    return y


def _ref(a: Array, ne0: int, ne1: int, ne2: int, ne3: int, mode: int) -> Array:
    a = _along(_along(a, 0, ne3, ScaleMode.NEAREST), 1, ne2, ScaleMode.NEAREST)
    return _along(_along(a, 2, ne1, mode), 3, ne0, mode)


def _along_back(g: Array, axis: int, n_in: int, mode: int) -> Array:
    """The gradient of `_along`."""
    at, w = taps(n_in, g.shape[axis], mode)
    shape = [-1 if i == axis else 1 for i in range(g.ndim)]
    y = np.zeros([n_in if i == axis else n for i, n in enumerate(g.shape)])
    into = np.moveaxis(y, axis, 0)
    for i in range(at.shape[1]):
        w_i = w[:, i].reshape(shape)
        np.add.at(into, at[:, i], np.moveaxis(np.where(w_i != 0, g * w_i, 0), axis, 0))
    return y


def _back_ref(a: Array, ne0: int, ne1: int, ne2: int, ne3: int, mode: int) -> Array:
    a = _along_back(_along_back(a, 3, ne0, mode), 2, ne1, mode)
    return _along_back(_along_back(a, 1, ne2, ScaleMode.NEAREST), 0, ne3, ScaleMode.NEAREST)


def _cost(t: Tensor) -> Cost:
    return Cost(8 * max(t.n_elements, src(t.src, 0).n_elements), stored_bytes(src(t.src, 0)), stored_bytes(t))


def _grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a = src(node.src, 0)
    return (lambda: upscale_back(gy, *a.ne, node.op_params["mode"]),)


def _grad_back(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a = src(node.src, 0)
    return (lambda: interpolate(gy, *a.ne, node.op_params["mode"]),)


UPSCALE = OpDef(
    name="upscale",
    srcs=("a",),
    params=("ne0", "ne1", "ne2", "ne3", "mode"),
    shape=_shape,
    dtypes={(F32,): F32},
    ref=_ref,
    kernel="upscale",
    sizes=("ne0", "ne1", "ne2", "ne3"),
    cost=_cost,
    inplace=(),
    label="interpolate(a)",
    grad=_grad,
    enums={"mode": _MODES},
)
UPSCALE_BACK = OpDef(
    name="upscale_back",
    srcs=("a",),
    params=("ne0", "ne1", "ne2", "ne3", "mode"),
    shape=_shape,
    dtypes={(F32,): F32},
    ref=_back_ref,
    kernel="upscale_back",
    cost=_cost,
    inplace=(),
    label="gradient of interpolate",
    grad=_grad_back,
    enums={"mode": _MODES},
)


def interpolate(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, mode: int | str) -> Tensor:
    """`a` in another size (ggml_interpolate): dimensions 0 and 1 by `mode`, 2 and 3 by the nearest element.

    a: F32, any layout. Result: F32, ne [ne0 .. ne3], larger or smaller. mode: a `ScaleMode` by number or name
    ("nearest" 0, "bilinear" 1, "bicubic" 2), plus flags ("bilinear|align_corners" 257; "bilinear|antialias" 513, for
    smaller sizes). Pixels are areas whose middles are compared, as in PyTorch; align_corners compares the outermost
    middles. Nearest takes element i * n_in // n_out exactly (ggml divides in F32, which in 1 of 40 pairs of sizes takes
    a neighbour once). Raises ShapeError, DTypeError.
    """
    return record(UPSCALE, (a,), {"ne0": ne0, "ne1": ne1, "ne2": ne2, "ne3": ne3, "mode": mode})


def upscale_ext(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, mode: int | str) -> Tensor:
    """`interpolate` by the name it had before (ggml_upscale_ext)."""
    return interpolate(a, ne0, ne1, ne2, ne3, mode)


def upscale(a: Tensor, scale_factor: int, mode: int | str) -> Tensor:
    """`interpolate` with ne[0] and ne[1] `scale_factor` times as large, a whole number (ggml_upscale)."""
    ne = ne_of(a)
    times = int(scale_factor) if is_whole(scale_factor, 1) else 0  # interpolate refuses a 0
    return interpolate(a, ne[0] * times, ne[1] * times, ne[2], ne[3], mode)


def upscale_back(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, mode: int | str) -> Tensor:
    """The gradient of `interpolate`: each element of the result is added to those that it was made of, by their
    weights.

    a: the gradient of the result, F32, any layout; ne0 .. ne3: the ne of what was interpolated; mode as there. Result:
    F32, of that ne. Raises ShapeError, DTypeError.
    """
    return record(UPSCALE_BACK, (a,), {"ne0": ne0, "ne1": ne1, "ne2": ne2, "ne3": ne3, "mode": mode})
