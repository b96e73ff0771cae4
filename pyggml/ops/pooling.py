"""The largest element, or the mean, of each window of a signal or an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from math import floor
from typing import Any, cast

import numpy as np

from ..codec import Array
from ..opdef import ZERO, Cost, Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, MAX_INT, is_int, is_number, src
from ._sliding import KERNEL_TYPES
from .copy import stored_bytes

__all__ = [
    "OpPool",
    "pool_1d",
    "pool_1d_back",
    "pool_2d",
    "pool_2d_back",
]


class OpPool(IntEnum):
    """ggml_op_pool."""

    MAX = 0
    AVG = 1


def _place(n: int, k: Any, s: Any, p: Any, i: int) -> int:
    """How many places a window has along dimension i. The size grows by 2 p; the first window starts at -floor(p)."""
    rule(is_int(k, 1) and is_int(s, 1), f"k{i} and s{i} must be whole numbers from 1 to {MAX_INT}, not {k} and {s}")
    rule(is_number(p) and 0 <= p < k, f"p{i} must be a number from 0 and below k{i} = {k}, not {p}")
    rule(n + 2 * p >= k, f"a is too small: {k} elements do not fit into {n} and 2 * {p}")
    p = int(p) if p == int(p) else p
    out = (n + 2 * p - k) // s + 1 if isinstance(p, int) else floor((n + 2 * p - k) / s) + 1
    last = (out - 1) * s - floor(p)
    rule(last < n, f"the last window, from element {last} on, sees nothing of {n} elements")
    return out


def _1d_shape(srcs: Srcs, params: Params) -> Ne:
    a = src(srcs, 0)
    rule(is_int(params["p0"], 0), f"p0 must be a whole number from 0, not {params['p0']}")
    return (_place(a.ne[0], params["k0"], params["s0"], params["p0"], 0), *a.ne[1:])


def _2d_shape(srcs: Srcs, params: Params) -> Ne:
    a = src(srcs, 0)
    w, h = (_place(a.ne[i], params[f"k{i}"], params[f"s{i}"], params[f"p{i}"], i) for i in (0, 1))
    return (w, h, a.ne[2], a.ne[3])


def _pooled(a: Array, i: int, params: Params, f: Callable[..., Array]) -> Array:
    """`f` of the elements of `a` in each window along dimension i."""
    axis, (k, s, p) = 3 - i, (params[f"{name}{i}"] for name in "ksp")
    n, first = a.shape[axis], -floor(p)
    ends = [(max(0, at), min(n, at + k)) for at in range(first, first + _place(n, k, s, p, i) * s, s)]
    return np.stack([f(a.take(range(*end), axis), axis=axis) for end in ends], axis)


def _1d_ref(a: Array, op: int, **params: int) -> Array:
    return _pooled(a, 0, params, np.max if op == OpPool.MAX else np.mean)


def _2d_ref(a: Array, op: int, **params: float) -> Array:
    f = np.max if op == OpPool.MAX else np.sum
    y = _pooled(_pooled(a, 1, params, f), 0, params, f)
    return y if op == OpPool.MAX else y / (params["k0"] * params["k1"])


def _cost(t: Tensor) -> Cost:
    a = src(t.src, 0)
    return Cost(a.n_elements + t.n_elements, stored_bytes(a), stored_bytes(t))


def _grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a = src(node.src, 0)
    return (lambda: record(POOL_1D_BACK if node.op == "pool_1d" else POOL_2D_BACK, (gy, a), node.op_params),)


def _grad_back(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """Means are linear. Which element is the largest does not change with small changes."""
    op = POOL_1D if node.op == "pool_1d_back" else POOL_2D
    return None if node.op_params["op"] == OpPool.MAX else lambda: record(op, (gy,), node.op_params), ZERO


def _back_shape(shape: Callable[[Srcs, Params], Ne]) -> Callable[[Srcs, Params], Ne]:
    def back(srcs: Srcs, params: Params) -> Ne:
        a, af = src(srcs, 0), src(srcs, 1)
        want = shape((af,), params)
        rule(a.ne == want, f"a must have the ne of the pooled af, {list(want)}, not {list(a.ne)}")
        return af.ne

    return back


def _1d_back_ref(a: Array, af: Array, op: int, **p: int) -> Array:
    return _back_ref(a, af, op, p | {"k1": 1, "s1": 1, "p1": 0}, clipped=True)


def _2d_back_ref(a: Array, af: Array, op: int, **p: float) -> Array:
    return _back_ref(a, af, op, p, clipped=False)


def _back_ref(a: Array, af: Array, op: int, p: Params, clipped: bool) -> Array:
    """Tap by tap: of all windows, the element of `af` at one place in them."""
    y = np.zeros(af.shape)
    batch, channels = np.ogrid[: af.shape[0], : af.shape[1]]
    batch, channels = batch[..., None, None], channels[..., None, None]
    first_w, first_h = (cast("Array", np.arange(a.shape[3 - i])) * int(p[f"s{i}"]) - floor(p[f"p{i}"]) for i in (0, 1))
    taps: list[tuple[Array, Array, Array]] = []  # rows, columns, and whether they are inside
    for i in range(p["k1"]):
        for j in range(p["k0"]):
            h, w = (first_h + i)[:, None], (first_w + j)[None, :]
            inside = (h >= 0) & (h < af.shape[2]) & (w >= 0) & (w < af.shape[3])
            taps.append((h.clip(0, af.shape[2] - 1), w.clip(0, af.shape[3] - 1), inside))
    if op == OpPool.AVG:
        g = a / (sum(inside for _, _, inside in taps) if clipped else p["k0"] * p["k1"])
        for h, w, inside in taps:
            np.add.at(y, (batch, channels, h, w), np.where(inside, g, 0.0))
        return y
    best, h_best, w_best = np.zeros(a.shape), np.full(a.shape, -1), np.full(a.shape, -1)
    for h, w, inside in taps:  # the first of the largest, or the first NaN
        x = af[batch, channels, h, w]
        more = inside & ((h_best < 0) | (x > best) | (np.isnan(x) & ~np.isnan(best)))
        best, h_best, w_best = (np.where(more, new, old) for new, old in ((x, best), (h, h_best), (w, w_best)))
    np.add.at(y, (batch, channels, h_best, w_best), a)
    return y


def _back_cost(t: Tensor) -> Cost:
    return Cost(2 * t.n_elements, stored_bytes(src(t.src, 0)) + stored_bytes(src(t.src, 1)), t.nbytes)


POOL_1D = OpDef(
    name="pool_1d",
    srcs=("a",),
    params=("op", "k0", "s0", "p0"),
    shape=_1d_shape,
    dtypes={(t,): F32 for t in KERNEL_TYPES},
    ref=_1d_ref,
    kernel="pool_1d",
    cost=_cost,
    inplace=(),
    label="pool(a)",
    grad=_grad,
    enums={"op": OpPool},
)
POOL_2D = OpDef(
    name="pool_2d",
    srcs=("a",),
    params=("op", "k0", "k1", "s0", "s1", "p0", "p1"),
    shape=_2d_shape,
    dtypes={(t,): F32 for t in KERNEL_TYPES},
    ref=_2d_ref,
    kernel="pool_2d",
    cost=_cost,
    inplace=(),
    label="pool(a)",
    grad=_grad,
    enums={"op": OpPool},
)


def _define_back(forward: OpDef, ref: Callable[..., Array]) -> OpDef:
    """The op that gives the gradient of `forward` by its source: `a` is the gradient of the result, `af` the source."""
    return OpDef(
        name=f"{forward.name}_back",
        srcs=("a", "af"),
        params=forward.params,
        shape=_back_shape(forward.shape),
        dtypes={(F32, t): F32 for t in KERNEL_TYPES},
        ref=ref,
        kernel=f"{forward.name}_back",
        cost=_back_cost,
        inplace=(),
        label="gradient of pool",
        grad=_grad_back,
        enums={"op": OpPool},
        ranks=(1,),
    )


POOL_1D_BACK, POOL_2D_BACK = _define_back(POOL_1D, _1d_back_ref), _define_back(POOL_2D, _2d_back_ref)


def pool_1d(a: Tensor, op: OpPool | int | str, k0: int, s0: int, p0: int) -> Tensor:
    """The largest element ("max", 0) or the mean ("avg", 1) of each window of a signal (ggml_pool_1d).

    a: F32, F16 or BF16 ne [W, ...], any layout. A window has k0 elements. It starts p0 < k0 elements before the row,
    moves by s0, and ends at most p0 elements after the row. Elements outside the row do not count, not even in the
    mean. A window with NaN gives NaN.
    Result: F32, ne [(W + 2 p0 - k0) // s0 + 1, ...]. Raises ShapeError, DTypeError.
    """
    return record(POOL_1D, (a,), {"op": op, "k0": k0, "s0": s0, "p0": p0})


def pool_2d(a: Tensor, op: OpPool | int | str, k0: int, k1: int, s0: int, s1: int, p0: float, p1: float) -> Tensor:
    """The largest element ("max", 0) or the mean ("avg", 1) of each window of an image (ggml_pool_2d).

    a: F32, F16 or BF16 ne [W, H, ...], any layout. A window has k0 * k1 elements and moves by s0 and s1. It may reach
    p0 and p1 elements beyond the image on each side (0.5: one element, at the end only). The maximum ignores elements
    outside; in the mean they count as zeros, because its divisor is always k0 * k1 (`pool_1d` differs; both are as in
    ggml). A window with NaN gives NaN.
    Result: F32, ne [floor((W + 2 p0 - k0) / s0) + 1, the same of H, ...]. Raises ShapeError, DTypeError.
    """
    params = {"op": op, "k0": k0, "k1": k1, "s0": s0, "s1": s1, "p0": p0, "p1": p1}
    return record(POOL_2D, (a,), params)


def pool_1d_back(a: Tensor, af: Tensor, op: OpPool | int | str, k0: int, s0: int, p0: int) -> Tensor:
    """The gradient of `pool_1d`. As `pool_2d_back`, by its rules."""
    return record(POOL_1D_BACK, (a, af), {"op": op, "k0": k0, "s0": s0, "p0": p0})


def pool_2d_back(
    a: Tensor, af: Tensor, op: OpPool | int | str, k0: int, k1: int, s0: int, s1: int, p0: float, p1: float
) -> Tensor:
    """The gradient of `pool_2d` (ggml_pool_2d_back). That of a mean is shared by all elements of the window; that of a
    maximum goes to the first of the largest elements, or to the first NaN.

    a: the gradient of the result, F32, any layout; af: what was pooled, F32, F16 or BF16, any layout; the others as
    there. Result: F32, ne of `af`. Raises ShapeError, DTypeError.
    """
    params = {"op": op, "k0": k0, "k1": k1, "s0": s0, "s1": s1, "p0": p0, "p1": p1}
    return record(POOL_2D_BACK, (a, af), params)
