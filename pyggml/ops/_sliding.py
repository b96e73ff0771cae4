"""Windows that slide over images: in how many places a window fits, and which elements it sees in each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..opdef import Cost, Params, rule
from ..tensor import Tensor
from ._common import BF16, F16, F32, MAX_INT, is_int, src
from .copy import stored_bytes

MAX_TAPS = 2**24  # elements of a kernel for one output channel: scratch memory has 64 floats for each element
KERNEL_TYPES = (F32, F16, BF16)
AXES = ("width", "height", "depth")


def places(b: Sequence[int], a: Sequence[int], params: Params) -> list[int]:
    """Shape rule: how many places a window has in each dimension i. It has a[i] elements, d_i apart, and moves in steps
    of s_i over b[i] elements, with p_i zeros on each side."""
    out: list[int] = []
    for i, (n, k) in enumerate(zip(b, a, strict=True)):
        s, p, d = params[f"s{i}"], params[f"p{i}"], params[f"d{i}"]
        rule(is_int(s, 1) and is_int(d, 1), f"s{i} and d{i} must be whole numbers from 1 to {MAX_INT}, not {s} and {d}")
        rule(is_int(p, 0), f"p{i} must be a whole number from 0 to {MAX_INT}, not {p}")
        room = n + 2 * p - d * (k - 1) - 1
        span = f"{d * (k - 1) + 1} elements of {AXES[i]}"
        rule(room >= 0, f"b is too small: {span} do not fit into {n} and 2 * {p} zeros")
        out.append(room // s + 1)
    return out


def check_taps(n: int) -> None:
    """Check that a kernel does not have too many elements for one output channel. For a shape rule."""
    rule(n <= MAX_TAPS, f"a must have at most {MAX_TAPS} elements for each output channel, not {n}")


class Window(NamedTuple):
    """A window along one axis. It has k elements, d apart, and stands in `places` places: the first at element `first`,
    each further one s elements later."""

    places: int
    s: int
    first: int
    k: int
    d: int


def windows(x: Array, along: Sequence[Window]) -> Array:
    """The elements that the windows see: x [..., *planes] -> [..., *places, *k], all in NumPy order. Outside of x they
    see zeros."""
    lead = x.ndim - len(along)
    for axis, w in enumerate(along, lead):
        at = w.first + np.arange(w.places)[:, None] * w.s + np.arange(w.k) * w.d
        n = x.shape[axis]
        inside = ((at >= 0) & (at < n)).reshape(*at.shape, *[1] * (x.ndim - 1 - axis))
        x = np.moveaxis(np.where(inside, np.take(x, at.clip(0, n - 1), axis), 0.0), axis + 1, -1)
    return x


def image_windows(x: Array, k: Sequence[int], params: Params) -> Array:
    """As `windows`, for a kernel of `k` elements (NumPy order) and the parameters s0 .. d2 of an op."""
    planes = x.shape[x.ndim - len(k) :]
    out = places(planes[::-1], k[::-1], params)
    along = [
        Window(out[i], params[f"s{i}"], -params[f"p{i}"], k[-1 - i], params[f"d{i}"]) for i in reversed(range(len(k)))
    ]
    return windows(x, along)


def image_windows_back(seen: Array, planes: Sequence[int], params: Params) -> Array:
    """The gradient of x [batch, channels, *planes] from that of `image_windows`: each window is added where it lies."""
    n = len(planes)
    out, k = seen.shape[2 : 2 + n], seen.shape[2 + n :]
    s, p, d = ([int(params[f"{name}{i}"]) for i in reversed(range(n))] for name in "spd")
    y = np.zeros((*seen.shape[:2], *[m + 2 * q for m, q in zip(planes, p, strict=True)]))
    for at in product(*map(range, k)):
        first = [i * q for i, q in zip(at, d, strict=True)]
        there = [slice(f, f + (m - 1) * q + 1, q) for f, m, q in zip(first, out, s, strict=True)]
        y[(..., *there)] += seen[(..., *at)]
    return y[(..., *[slice(q, q + m) for m, q in zip(planes, p, strict=True)])]


def convolve(seen: Array, a: Array) -> Array:
    """Multiply windows `seen` [batch, channels, *places, *k] by kernels `a` [out, channels, *k] and sum: [batch, out,
    *places]."""
    n = a.ndim - 2
    y = np.tensordot(seen, a, axes=([1, *range(2 + n, 2 + 2 * n)], [1, *range(2, 2 + n)]))
    return np.moveaxis(y, -1, 1)


def kernel_rows() -> dict[tuple[DType | None, ...], DType]:
    """The types that an op on a kernel and an image takes: the image and the result are F32."""
    return {(t, F32): F32 for t in KERNEL_TYPES}


def product_cost(t: Tensor, products: int) -> Cost:
    """The cost of a node that computes `products` products and reads its two sources once."""
    read = stored_bytes(src(t.src, 0)) + stored_bytes(src(t.src, 1))
    return Cost(2 * products, read, stored_bytes(t))
