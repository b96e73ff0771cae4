"""Gated linear units: one half through an activation, times the other half. Source: ggml_glu; Shazeer 2020.

F32, F16 or BF16, any layout; the result has the type of the sources.
"""

from __future__ import annotations

import numpy as np

from ..codec import Array
from ..opdef import OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import BF16, F16, F32, src
from .unary import GELU, RELU, SILU

__all__ = [
    "geglu",
    "geglu_split",
    "geglu_swapped",
    "reglu",
    "reglu_split",
    "reglu_swapped",
    "swiglu",
    "swiglu_split",
    "swiglu_swapped",
]


def _shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), srcs[1]
    if b is None:
        rule(a.ne[0] % 2 == 0, f"ne[0] of a, its two halves, must be even, not {a.ne[0]}")
        return (a.ne[0] // 2, *a.ne[1:])
    rule(a.ne == b.ne, f"a and b must have the same ne, not {list(a.ne)} and {list(b.ne)}")
    return a.ne


def _define(name: str, activation: OpDef, label: str, flops: int) -> OpDef:
    def ref(a: Array, b: Array | None, swapped: bool) -> Array:
        if b is None:
            gate, value = np.split(a, 2, axis=3)
            if swapped:
                gate, value = value, gate
        else:
            gate, value = a, b
        return activation.ref(gate) * value

    return OpDef(
        name=name,
        srcs=("a", "b?"),
        params=("swapped",),
        shape=_shape,
        dtypes={row: t for t in (F32, F16, BF16) for row in ((t, None), (t, t))},
        ref=ref,
        kernel=name,
        cost=elementwise_cost(flops),
        inplace=(0, 1),
        label=label,
    )


REGLU = _define("reglu", RELU, "relu(a) * b", 2)
GEGLU = _define("geglu", GELU, "gelu(a) * b", 20)
SWIGLU = _define("swiglu", SILU, "silu(a) * b", 20)


def reglu(a: Tensor) -> Tensor:
    """relu(first half of each row) * second half (ggml_reglu).

    a: ne [2 n, n1, n2, n3]; result: ne [n, n1, n2, n3]. Raises ShapeError where ne[0] is odd, DTypeError.
    """
    return record(REGLU, (a, None), {"swapped": False})


def reglu_swapped(a: Tensor) -> Tensor:
    """First half of each row * relu(second half) (ggml_reglu_swapped). Shapes and errors as `reglu`."""
    return record(REGLU, (a, None), {"swapped": True})


def reglu_split(a: Tensor, b: Tensor) -> Tensor:
    """relu(a) * b, `a` and `b` of the same shape and type (ggml_reglu_split). Raises ShapeError, DTypeError."""
    return record(REGLU, (a, b), {"swapped": False})


def geglu(a: Tensor) -> Tensor:
    """gelu(first half of each row) * second half (ggml_geglu). Shapes and errors as `reglu`."""
    return record(GEGLU, (a, None), {"swapped": False})


def geglu_swapped(a: Tensor) -> Tensor:
    """First half of each row * gelu(second half) (ggml_geglu_swapped). Shapes and errors as `reglu`."""
    return record(GEGLU, (a, None), {"swapped": True})


def geglu_split(a: Tensor, b: Tensor) -> Tensor:
    """gelu(a) * b, `a` and `b` of the same shape and type (ggml_geglu_split). Raises ShapeError, DTypeError."""
    return record(GEGLU, (a, b), {"swapped": False})


def swiglu(a: Tensor) -> Tensor:
    """silu(first half of each row) * second half (ggml_swiglu). Shapes and errors as `reglu`."""
    return record(SWIGLU, (a, None), {"swapped": False})


def swiglu_swapped(a: Tensor) -> Tensor:
    """First half of each row * silu(second half) (ggml_swiglu_swapped). Shapes and errors as `reglu`."""
    return record(SWIGLU, (a, None), {"swapped": True})


def swiglu_split(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b, `a` and `b` of the same shape and type (ggml_swiglu_split). Raises ShapeError, DTypeError."""
    return record(SWIGLU, (a, b), {"swapped": False})
