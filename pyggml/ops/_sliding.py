"""Windows that slide over the planes of images: how many places there are, and what each window sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..opdef import Cost, Params, rule
from ..tensor import Tensor
from ._common import BF16, F16, F32, is_whole, src
from .copy import stored_bytes

KERNEL_TYPES = (F32, F16, BF16)
AXES = ("width", "height", "depth")


def places(b: Sequence[int], a: Sequence[int], params: Params) -> list[int]:
    """Shape rule: per dimension i, the places of a window of a[i] elements, d_i apart, that moves by s_i over b[i]
    elements between p_i zeros on each side."""
    out: list[int] = []
    for i, (n, k) in enumerate(zip(b, a, strict=True)):
        s, p, d = params[f"s{i}"], params[f"p{i}"], params[f"d{i}"]
        rule(is_whole(s, 1) and is_whole(d, 1), f"s{i} and d{i} must be whole numbers from 1, not {s} and {d}")
        rule(is_whole(p, 0), f"p{i} must be a whole number from 0, not {p}")
        room = n + 2 * p - d * (k - 1) - 1
        span = f"{d * (k - 1) + 1} elements of {AXES[i]}"
        rule(room >= 0, f"b is too small: {span} do not fit into {n} and 2 * {p} zeros")
        out.append(int(room // s + 1))
    return out


def windows(
    x: Array, k: Sequence[int], s: Sequence[int], p: Sequence[tuple[int, int]], d: Sequence[int], fill: float = 0.0
) -> Array:
    """What the windows see: x [..., *planes] -> [..., *places, *k], all in NumPy order; `p`: elements of `fill` before
    and after."""
    lead = x.ndim - len(k)
    x = np.pad(x, [(0, 0)] * lead + list(p), constant_values=fill)
    span = [(n - 1) * step + 1 for n, step in zip(k, d, strict=True)]
    v = np.lib.stride_tricks.sliding_window_view(x, span, axis=tuple(range(lead, x.ndim)))
    return v[(..., *[slice(None, None, step) for step in (*s, *d)])]


def image_windows(x: Array, k: Sequence[int], params: Params) -> Array:
    """`windows` by the parameters s0 .. d2 of an op, zeros around."""

    def of(name: str) -> list[int]:
        return [int(params[f"{name}{i}"]) for i in reversed(range(len(k)))]

    return windows(x, k, of("s"), [(n, n) for n in of("p")], of("d"))


def convolve(seen: Array, a: Array) -> Array:
    """Windows [batch, channels, *places, *k] times kernels a [out, channels, *k] -> [batch, out, *places]."""
    n = a.ndim - 2
    y = np.tensordot(seen, a, axes=([1, *range(2 + n, 2 + 2 * n)], [1, *range(2, 2 + n)]))
    return np.moveaxis(y, -1, 1)


def kernel_rows(kernels: Sequence[DType] = KERNEL_TYPES) -> dict[tuple[DType | None, ...], DType]:
    """The types of an op on a kernel and an image: the image and the result are F32."""
    return {(t, F32): F32 for t in kernels}


def product_cost(t: Tensor, products: int) -> Cost:
    """Cost of a node of so many products that reads its two sources once."""
    read = stored_bytes(src(t.src, 0)) + stored_bytes(src(t.src, 1))
    return Cost(2 * products, read, stored_bytes(t))
