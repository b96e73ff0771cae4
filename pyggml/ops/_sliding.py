"""Windows that slide over the planes of images: how many places there are, and what each window sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..opdef import Cost, Params, rule
from ..tensor import Tensor
from ._common import BF16, F16, F32, MAX_INT, is_int, src
from .copy import stored_bytes

MAX_TAPS = 2**24  # elements of a kernel for one output: scratch memory has 64 floats for each
KERNEL_TYPES = (F32, F16, BF16)
AXES = ("width", "height", "depth")


def places(b: Sequence[int], a: Sequence[int], params: Params) -> list[int]:
    """Shape rule: per dimension i, the places of a window of a[i] elements, d_i apart, that moves by s_i over b[i]
    elements between p_i zeros on each side."""
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
    """The rule that limits how many elements a kernel has for one output."""
    rule(n <= MAX_TAPS, f"a must have at most {MAX_TAPS} elements for each output channel, not {n}")


class Window(NamedTuple):
    """A window along one axis: `places` of it, s elements apart from element `first` on, of k elements, d apart."""

    places: int
    s: int
    first: int
    k: int
    d: int


def windows(x: Array, along: Sequence[Window]) -> Array:
    """What the windows see: x [..., *planes] -> [..., *places, *k], all in NumPy order; zeros outside of x."""
    lead = x.ndim - len(along)
    for axis, w in enumerate(along, lead):
        at = w.first + np.arange(w.places)[:, None] * w.s + np.arange(w.k) * w.d
        n = x.shape[axis]
        inside = ((at >= 0) & (at < n)).reshape(*at.shape, *[1] * (x.ndim - 1 - axis))
        x = np.moveaxis(np.where(inside, np.take(x, at.clip(0, n - 1), axis), 0.0), axis + 1, -1)
    return x


def image_windows(x: Array, k: Sequence[int], params: Params) -> Array:
    """`windows` by the parameters s0 .. d2 of an op, zeros around."""
    planes = x.shape[x.ndim - len(k) :]
    out = places(planes[::-1], k[::-1], params)
    along = [
        Window(out[i], params[f"s{i}"], -params[f"p{i}"], k[-1 - i], params[f"d{i}"]) for i in reversed(range(len(k)))
    ]
    return windows(x, along)


def convolve(seen: Array, a: Array) -> Array:
    """Windows [batch, channels, *places, *k] times kernels a [out, channels, *k] -> [batch, out, *places]."""
    n = a.ndim - 2
    y = np.tensordot(seen, a, axes=([1, *range(2 + n, 2 + 2 * n)], [1, *range(2, 2 + n)]))
    return np.moveaxis(y, -1, 1)


def kernel_rows(kernels: Sequence[DType] = KERNEL_TYPES) -> dict[tuple[DType | None, ...], DType]:
    """The types of an op on a kernel and an image: the image and the result are F32."""
    return {(t, F32): F32 for t in kernels}


def product_cost(t: Tensor, products: int) -> Cost:
    """The cost of a node that computes `products` products and reads its two sources once."""
    read = stored_bytes(src(t.src, 0)) + stored_bytes(src(t.src, 1))
    return Cost(2 * products, read, stored_bytes(t))
