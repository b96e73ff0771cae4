"""Ops that add borders to tensors (zeros, their own elements again, or their mirror image), or roll the elements.

All of them take tensors of any type except block types, in any layout. The result has the same type. They raise
ShapeError and DTypeError.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import ops
from ..codec import Array
from ..opdef import Gradient, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import is_whole, src
from ._gradients import dense_rows, taken
from .copy import PLAIN_TYPES

__all__ = [
    "pad",
    "pad_circular",
    "pad_ext",
    "pad_ext_circular",
    "pad_reflect_1d",
    "roll",
]

_BORDERS = ("lp0", "rp0", "lp1", "rp1", "lp2", "rp2", "lp3", "rp3")


def _pad_shape(srcs: Srcs, params: Params) -> Ne:
    p = [params[name] for name in _BORDERS]
    rule(all(is_whole(n, 0) for n in p), f"the borders must be whole numbers from 0, not {p}")
    n = [m + int(p[2 * i]) + int(p[2 * i + 1]) for i, m in enumerate(src(srcs, 0).ne)]
    return (n[0], n[1], n[2], n[3])


def _pad_ref(a: Array, *, circular: bool, **p: int) -> Array:
    widths = [(p[f"lp{d}"], p[f"rp{d}"]) for d in (3, 2, 1, 0)]
    return np.pad(a, widths, mode="wrap" if circular else "constant")


def _grad_pad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a, p = src(node.src, 0), node.op_params

    def inside() -> Tensor:
        g = dense_rows(gy)
        return ops.view_4d(g, *a.ne, *g.nb[1:], sum(p[f"lp{i}"] * g.nb[i] for i in range(4)))

    def folded() -> Tensor:
        g = gy
        for i, n in enumerate(a.ne):
            if g.ne[i] > n:
                g = taken(g, i, (np.arange(g.ne[i]) - p[f"lp{i}"]) % n, n)
        return g

    return (folded if p["circular"] else inside,)


def _reflect_shape(srcs: Srcs, params: Params) -> Ne:
    ne, p0, p1 = src(srcs, 0).ne, params["p0"], params["p1"]
    fits = is_whole(p0, 0) and is_whole(p1, 0) and p0 < ne[0] and p1 < ne[0]
    rule(fits, f"p0 and p1 must be whole numbers within 0..{ne[0] - 1}, less than a row, not {p0} and {p1}")
    return (ne[0] + int(p0) + int(p1), ne[1], ne[2], ne[3])


def _reflect_ref(a: Array, p0: int, p1: int) -> Array:
    return np.pad(a, [(0, 0), (0, 0), (0, 0), (p0, p1)], mode="reflect")


def _grad_reflect(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    n, p = src(node.src, 0).ne[0], node.op_params
    return (lambda: taken(gy, 0, np.pad(np.arange(n), (p["p0"], p["p1"]), mode="reflect"), n),)


def _roll_shape(srcs: Srcs, params: Params) -> Ne:
    ne = src(srcs, 0).ne
    for d, (n, shift) in enumerate(zip(ne, params.values(), strict=True)):
        rule(
            is_whole(shift, 1 - n) and shift < n,
            f"shift{d} must be a whole number within {1 - n}..{n - 1}, not {shift}",
        )
    return ne


def _roll_ref(a: Array, shift0: int, shift1: int, shift2: int, shift3: int) -> Array:
    return np.roll(a, (shift3, shift2, shift1, shift0), axis=(0, 1, 2, 3))


PAD = OpDef(
    name="pad",
    srcs=("a",),
    params=(*_BORDERS, "circular"),
    shape=_pad_shape,
    dtypes={(t,): t for t in PLAIN_TYPES},
    ref=_pad_ref,
    kernel="pad",
    cost=elementwise_cost(0),
    inplace=(),
    label="pad(a)",
    grad=_grad_pad,
)
PAD_REFLECT_1D = OpDef(
    name="pad_reflect_1d",
    srcs=("a",),
    params=("p0", "p1"),
    shape=_reflect_shape,
    dtypes={(t,): t for t in PLAIN_TYPES},
    ref=_reflect_ref,
    kernel="pad_reflect_1d",
    cost=elementwise_cost(0),
    inplace=(),
    label="pad(a), reflected",
    grad=_grad_reflect,
)
ROLL = OpDef(
    name="roll",
    srcs=("a",),
    params=("shift0", "shift1", "shift2", "shift3"),
    shape=_roll_shape,
    dtypes={(t,): t for t in PLAIN_TYPES},
    ref=_roll_ref,
    kernel="roll",
    cost=elementwise_cost(0),
    inplace=(),
    label="roll(a)",
    grad=lambda node, gy: (lambda: record(ROLL, (gy,), {name: -n for name, n in node.op_params.items()}),),
)


def _pad(a: Tensor, circular: bool, *p: int) -> Tensor:
    return record(PAD, (a,), {**dict(zip(_BORDERS, p, strict=True)), "circular": circular})


def pad(a: Tensor, p0: int, p1: int, p2: int, p3: int) -> Tensor:
    """`a` with p_i zeros at the end of dimension i (ggml_pad)."""
    return _pad(a, False, 0, p0, 0, p1, 0, p2, 0, p3)


def pad_ext(a: Tensor, lp0: int, rp0: int, lp1: int, rp1: int, lp2: int, rp2: int, lp3: int, rp3: int) -> Tensor:
    """`a` with lp_i zeros before and rp_i after it along dimension i (ggml_pad_ext): ne[i] grows by lp_i + rp_i."""
    return _pad(a, False, lp0, rp0, lp1, rp1, lp2, rp2, lp3, rp3)


def pad_circular(a: Tensor, p0: int, p1: int, p2: int, p3: int) -> Tensor:
    """`pad`, with `a` from its beginning again in place of zeros (ggml_pad_circular)."""
    return _pad(a, True, 0, p0, 0, p1, 0, p2, 0, p3)


def pad_ext_circular(
    a: Tensor, lp0: int, rp0: int, lp1: int, rp1: int, lp2: int, rp2: int, lp3: int, rp3: int
) -> Tensor:
    """`pad_ext`, with `a` repeated on every side in place of zeros (ggml_pad_ext_circular)."""
    return _pad(a, True, lp0, rp0, lp1, rp1, lp2, rp2, lp3, rp3)


def pad_reflect_1d(a: Tensor, p0: int, p1: int) -> Tensor:
    """Each row with its mirror image at both ends, p0 elements before and p1 after it (ggml_pad_reflect_1d).

    The end elements stand once. a: ne [n, ...]; p0, p1 below n; result: ne [p0 + n + p1, ...].
    """
    return record(PAD_REFLECT_1D, (a,), {"p0": p0, "p1": p1})


def roll(a: Tensor, shift0: int, shift1: int, shift2: int, shift3: int) -> Tensor:
    """The elements of `a`, moved by shift_i along dimension i. Those that leave at one end enter at the other
    (ggml_roll).

    shift_i: below ne[i] either way. Result: shape as `a`.
    """
    return record(ROLL, (a,), {"shift0": shift0, "shift1": shift1, "shift2": shift2, "shift3": shift3})
