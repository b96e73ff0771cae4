"""The largest element, or the mean, of each window of a signal or an image."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from math import floor
from typing import Any

import numpy as np

from ..codec import Array
from ..opdef import Cost, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, MAX_INT, is_int, is_number, src
from ._sliding import KERNEL_TYPES
from .copy import stored_bytes

__all__ = [
    "OpPool",
    "pool_1d",
    "pool_2d",
]


class OpPool(IntEnum):
    """ggml_op_pool."""

    MAX = 0
    AVG = 1


def _place(n: int, k: Any, s: Any, p: Any, i: int) -> int:
    """The places of a window along dimension i: the size grows by 2 p, the first window starts at -floor(p)."""
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
    enums={"op": OpPool},
)


def pool_1d(a: Tensor, op: OpPool | int | str, k0: int, s0: int, p0: int) -> Tensor:
    """The largest element ("max", 0) or the mean ("avg", 1) of each window of a signal (ggml_pool_1d).

    a: F32, F16 or BF16 ne [W, ...], any layout; k0 elements per window, which moves by s0 from p0 < k0 elements before
    the row to p0 elements after it. Places outside the row do not count, also not in the mean. NaN makes its windows
    NaN.
    Result: F32, ne [(W + 2 p0 - k0) // s0 + 1, ...]. Raises ShapeError, DTypeError.
    """
    return record(POOL_1D, (a,), {"op": op, "k0": k0, "s0": s0, "p0": p0})


def pool_2d(a: Tensor, op: OpPool | int | str, k0: int, k1: int, s0: int, s1: int, p0: float, p1: float) -> Tensor:
    """The largest element ("max", 0) or the mean ("avg", 1) of each window of an image (ggml_pool_2d).

    a: F32, F16 or BF16 ne [W, H, ...], any layout; windows of k0 * k1 elements, which move by s0 and s1. p0 and p1
    elements lie around the image (0.5: one, behind it). The maximum ignores them; in the mean they count as zeros,
    because its divisor is always k0 * k1 (`pool_1d` differs; both are as in ggml). NaN makes its windows NaN.
    Result: F32, ne [floor((W + 2 p0 - k0) / s0) + 1, the same of H, ...]. Raises ShapeError, DTypeError.
    """
    params = {"op": op, "k0": k0, "k1": k1, "s0": s0, "s1": s1, "p0": p0, "p1": p1}
    return record(POOL_2D, (a,), params)
