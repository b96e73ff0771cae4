"""Gated linear units: one half through an activation, times the other half. Source: ggml_glu; Shazeer 2020.

F32, F16 or BF16, any layout; the result has the type of the sources. The activation, and the factor by which it
multiplies the gate, are rounded to F32 before they are multiplied with the other half. When one of them is then 0, an
infinity in the other half gives NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .. import ops
from ..codec import Array
from ..opdef import Gradient, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import BF16, F16, F32, src
from ._gradients import as_f32, dense_rows
from .unary import gelu_erf_factor, gelu_factor, gelu_quick_factor, in_f32, sigmoid_of

__all__ = [
    "geglu",
    "geglu_erf",
    "geglu_erf_split",
    "geglu_erf_swapped",
    "geglu_quick",
    "geglu_quick_split",
    "geglu_quick_swapped",
    "geglu_split",
    "geglu_swapped",
    "reglu",
    "reglu_split",
    "reglu_swapped",
    "swiglu",
    "swiglu_clamp",
    "swiglu_oai",
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


def _limited_shape(srcs: Srcs, params: Params) -> Ne:
    rule(params["limit"] >= 0, f"limit must not be negative ({params['limit']})")
    return _shape(srcs, params)


def _gate_and_value(a: Array, b: Array | None, swapped: bool) -> tuple[Array, Array]:
    if b is not None:
        return a, b
    first, second = np.split(a, 2, axis=3)
    return (second, first) if swapped else (first, second)


# (gradient of the result, gate, value, the op's numbers) -> the gradient of the gate, or of the value
Slope = Callable[..., Tensor]


def _define(
    name: str,
    ref: Callable[..., Array],
    of_gate: Slope,
    of_value: Slope,
    label: str,
    flops: int,
    numbers: tuple[str, ...] = (),
) -> OpDef:
    def grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
        a, b = as_f32(src(node.src, 0)), node.src[1]
        given = [node.op_params[n] for n in numbers]
        if b is not None:
            b = as_f32(b)
            return lambda: of_gate(gy, a, b, *given), lambda: of_value(gy, a, b, *given)

        def of_halves() -> Tensor:
            rows, n = dense_rows(a), node.ne[0]
            first, second = (ops.view_4d(rows, *node.ne, *rows.nb[1:], i * n * 4) for i in (0, 1))
            gate, value = (second, first) if node.op_params["swapped"] else (first, second)
            g, v = of_gate(gy, gate, value, *given), of_value(gy, gate, value, *given)
            return ops.concat(v, g, 0) if node.op_params["swapped"] else ops.concat(g, v, 0)

        return of_halves, None

    return OpDef(
        name=name,
        srcs=("a", "b?"),
        params=("swapped", *numbers),
        infinite=("limit",),
        shape=_limited_shape if numbers else _shape,
        dtypes={row: t for t in (F32, F16, BF16) for row in ((t, None), (t, t))},
        ref=ref,
        kernel=name,
        cost=elementwise_cost(flops),
        inplace=(0, 1),
        label=label,
        grad=grad,
    )


def _times(factor: Callable[[Array], Array]) -> Callable[..., Array]:
    """The reference of a unit that is gate * factor(gate) * value."""

    def ref(a: Array, b: Array | None, swapped: bool) -> Array:
        gate, value = _gate_and_value(a, b, swapped)
        return in_f32(gate * in_f32(factor(gate))) * value

    return ref


def _reglu_ref(a: Array, b: Array | None, swapped: bool) -> Array:
    gate, value = _gate_and_value(a, b, swapped)
    return np.maximum(gate, 0) * value


def _swiglu_oai_ref(a: Array, b: Array | None, swapped: bool, alpha: float, limit: float) -> Array:
    gate, value = _gate_and_value(a, b, swapped)
    x = np.minimum(gate, limit)
    return in_f32(x * in_f32(sigmoid_of(alpha * x))) * (np.clip(value, -limit, limit) + 1)


def _swiglu_clamp_ref(a: Array, b: Array | None, swapped: bool, limit: float) -> Array:
    gate, value = _gate_and_value(a, b, swapped)
    x = np.minimum(gate, limit)
    return in_f32(x * in_f32(sigmoid_of(x))) * np.clip(value, -limit, limit)


def _define_times(name: str, act: str, factor: Callable[[Array], Array]) -> OpDef:
    """A unit that is act(gate) * value, where act(gate) is gate * factor(gate). `act` and its `_back` are ops."""

    def of_gate(gy: Tensor, gate: Tensor, value: Tensor) -> Tensor:
        return getattr(ops, f"{act}_back")(gy * value, gate)

    def of_value(gy: Tensor, gate: Tensor, value: Tensor) -> Tensor:
        return getattr(ops, f"{name}_split")(gate, gy)

    return _define(name, _times(factor), of_gate, of_value, f"{act}(a) * b", 20)


def _inside(value: Tensor, limit: float) -> Tensor:
    """1 where a value is within -limit .. limit: there it has a gradient."""
    return ops.abs(value) <= limit


def _oai_of_gate(gy: Tensor, gate: Tensor, value: Tensor, alpha: float, limit: float) -> Tensor:
    z = ops.clamp(gate, -np.inf, limit) * alpha
    s = ops.sigmoid(z)
    return gy * (ops.clamp(value, -limit, limit) + 1) * (s + z * s * ops.sigmoid(-z)) * (gate <= limit)


def _oai_of_value(gy: Tensor, gate: Tensor, value: Tensor, alpha: float, limit: float) -> Tensor:
    x = ops.clamp(gate, -np.inf, limit)
    return gy * x * ops.sigmoid(x * alpha) * _inside(value, limit)


def _clamp_of_gate(gy: Tensor, gate: Tensor, value: Tensor, limit: float) -> Tensor:
    return ops.silu_back(gy * ops.clamp(value, -limit, limit), gate) * (gate <= limit)


def _clamp_of_value(gy: Tensor, gate: Tensor, value: Tensor, limit: float) -> Tensor:
    return gy * ops.silu(ops.clamp(gate, -np.inf, limit)) * _inside(value, limit)


def _reglu_of_gate(gy: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    return gy * value * ops.step(gate)


def _reglu_of_value(gy: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    return reglu_split(gate, gy)


REGLU = _define("reglu", _reglu_ref, _reglu_of_gate, _reglu_of_value, "relu(a) * b", 2)
GEGLU = _define_times("geglu", "gelu", gelu_factor)
GEGLU_ERF = _define_times("geglu_erf", "gelu_erf", gelu_erf_factor)
GEGLU_QUICK = _define_times("geglu_quick", "gelu_quick", gelu_quick_factor)
SWIGLU = _define_times("swiglu", "silu", sigmoid_of)
SWIGLU_OAI = _define(
    "swiglu_oai", _swiglu_oai_ref, _oai_of_gate, _oai_of_value, "swish(a) * (b + 1)", 20, ("alpha", "limit")
)
SWIGLU_CLAMP = _define(
    "swiglu_clamp", _swiglu_clamp_ref, _clamp_of_gate, _clamp_of_value, "silu(a) * b, clamped", 20, ("limit",)
)


def reglu(a: Tensor) -> Tensor:
    """relu(first half of each row) * second half (ggml_reglu).

    a: ne [2 n, n1, n2, n3]; result: ne [n, n1, n2, n3]. Raises ShapeError when ne[0] is odd, DTypeError.
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


def geglu_erf(a: Tensor) -> Tensor:
    """gelu_erf(first half of each row) * second half (ggml_geglu_erf). Shapes and errors as `reglu`."""
    return record(GEGLU_ERF, (a, None), {"swapped": False})


def geglu_erf_swapped(a: Tensor) -> Tensor:
    """First half of each row * gelu_erf(second half) (ggml_geglu_erf_swapped). Shapes and errors as `reglu`."""
    return record(GEGLU_ERF, (a, None), {"swapped": True})


def geglu_erf_split(a: Tensor, b: Tensor) -> Tensor:
    """gelu_erf(a) * b, `a` and `b` of the same shape and type (ggml_geglu_erf_split). Raises ShapeError, DTypeError."""
    return record(GEGLU_ERF, (a, b), {"swapped": False})


def geglu_quick(a: Tensor) -> Tensor:
    """gelu_quick(first half of each row) * second half (ggml_geglu_quick). Shapes and errors as `reglu`."""
    return record(GEGLU_QUICK, (a, None), {"swapped": False})


def geglu_quick_swapped(a: Tensor) -> Tensor:
    """First half of each row * gelu_quick(second half) (ggml_geglu_quick_swapped). Shapes and errors as `reglu`."""
    return record(GEGLU_QUICK, (a, None), {"swapped": True})


def geglu_quick_split(a: Tensor, b: Tensor) -> Tensor:
    """gelu_quick(a) * b, `a` and `b` of the same shape and type (ggml_geglu_quick_split). Raises as `reglu_split`."""
    return record(GEGLU_QUICK, (a, b), {"swapped": False})


def swiglu_oai(a: Tensor, b: Tensor | None, alpha: float, limit: float) -> Tensor:
    """x sigmoid(alpha x) (y + 1), where x = min(a, limit) and y is b within -limit .. limit (ggml_swiglu_oai; gpt-oss).

    a, b: the same shape and type; without `b` they are the halves of each row of `a`. Raises ShapeError, DTypeError.
    """
    return record(SWIGLU_OAI, (a, b), {"swapped": False, "alpha": alpha, "limit": limit})


def swiglu_clamp(a: Tensor, b: Tensor | None, limit: float) -> Tensor:
    """silu(min(a, limit)) * b, b within -limit .. limit (ggml_swiglu_clamp). Shapes and errors as `swiglu_oai`."""
    return record(SWIGLU_CLAMP, (a, b), {"swapped": False, "limit": limit})
