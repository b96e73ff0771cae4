"""Functions of one tensor, element by element, without parameters. Source: ggml_unary and its relatives.

All take F32, F16 or BF16 of any shape and layout, and give the same shape and type; they raise DTypeError for others.
NaN in, NaN out (but `step` and `sgn`). Each `_inplace` variant writes its result over `a`. The functions called `_back`
multiply a gradient by the derivative of one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from .. import ops
from ..codec import Array
from ..opdef import Gradient, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import BF16, F16, F32, inplace, same_shape, src
from ._gradients import as_f32, steps

__all__ = [
    "abs",
    "abs_inplace",
    "ceil",
    "ceil_inplace",
    "cos",
    "cos_inplace",
    "elu",
    "elu_inplace",
    "exp",
    "exp_inplace",
    "expm1",
    "expm1_inplace",
    "floor",
    "floor_inplace",
    "gelu",
    "gelu_back",
    "gelu_erf",
    "gelu_erf_back",
    "gelu_erf_inplace",
    "gelu_inplace",
    "gelu_quick",
    "gelu_quick_back",
    "gelu_quick_inplace",
    "hardsigmoid",
    "hardsigmoid_inplace",
    "hardswish",
    "hardswish_inplace",
    "log",
    "log_inplace",
    "neg",
    "neg_inplace",
    "relu",
    "relu_inplace",
    "round",
    "round_inplace",
    "sgn",
    "sgn_inplace",
    "sigmoid",
    "sigmoid_inplace",
    "silu",
    "silu_back",
    "silu_inplace",
    "sin",
    "sin_inplace",
    "softplus",
    "softplus_inplace",
    "sqr",
    "sqr_inplace",
    "sqrt",
    "sqrt_inplace",
    "step",
    "step_inplace",
    "tanh",
    "tanh_inplace",
    "trunc",
    "trunc_inplace",
]


class Unary(Protocol):
    """A function of one tensor, element by element; `help()` of one says which."""

    def __call__(self, a: Tensor) -> Tensor: ...


class Back(Protocol):
    """The gradient of such a function; `help()` of one says of which."""

    def __call__(self, a: Tensor, b: Tensor) -> Tensor: ...


Slope = Callable[[Tensor, Tensor], Tensor]  # (gradient of the node, node) -> gradient of its source


def _x(node: Tensor) -> Tensor:
    return as_f32(src(node.src, 0))


def _y(node: Tensor) -> Tensor:
    return as_f32(node)


def _define(
    name: str,
    doc: str,
    ref: Callable[[Array], Array],
    slope: Slope | None,
    label: str | None = None,
    flops: int = 20,
) -> tuple[Unary, Unary]:
    """An op, as the function that records it and the variant that writes its result over `a`."""
    definition = OpDef(
        name=name,
        srcs=("a",),
        params=(),
        shape=same_shape,
        dtypes={(F32,): F32, (F16,): F16, (BF16,): BF16},
        ref=ref,
        kernel=name,
        cost=elementwise_cost(flops),
        inplace=(0,),
        label=label or f"{name}(a)",
        grad=steps if slope is None else lambda node, gy: (lambda: slope(gy, node),),
    )

    def function(a: Tensor) -> Tensor:
        return record(definition, (a,), {})

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function, inplace(definition, function)


def sigmoid_of(x: Array) -> Array:
    """1 / (1 + e^-x), the factor by which silu multiplies x."""
    return 1 / (1 + np.exp(-x))


def in_f32(x: Array) -> Array:
    """`x`, 0 or infinite where it is so in F32: products with NaN and infinities follow from that."""
    rounded = x.astype(np.float32)
    return np.where((rounded == 0) | np.isinf(rounded), rounded, x)


def _hardsigmoid(x: Array) -> Array:
    return np.clip((x + 3) / 6, 0, 1)


def gelu_factor(x: Array) -> Array:
    """The factor by which gelu multiplies x. (1 + tanh(z)) / 2 is computed as sigmoid(2 z), which keeps its digits far
    below 0."""
    return sigmoid_of(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def gelu_quick_factor(x: Array) -> Array:
    """The factor by which gelu_quick multiplies x."""
    return sigmoid_of(1.702 * x)


def gelu_erf_factor(x: Array) -> Array:
    """The factor by which gelu_erf multiplies x: the integral of the normal distribution from -inf to x."""
    return 0.5 * _erfc(-x / math.sqrt(2))


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


# -- their derivatives --------------------------------------------------------------------------------------------


def _swish_slope(c: float) -> Callable[[Array], Array]:
    """The derivative of x sigmoid(c x)."""

    def slope(x: Array) -> Array:
        s = sigmoid_of(c * x)
        return s + c * x * s * (1 - s)

    return slope


_GELU = 2 * math.sqrt(2 / math.pi)  # gelu is x sigmoid(u), u = _GELU (x + _CUBE x^3)
_CUBE = 0.044715


def _gelu_slope(x: Array) -> Array:
    s = gelu_factor(x)
    return s + x * s * (1 - s) * _GELU * (1 + 3 * _CUBE * x * x)


def _gelu_erf_slope(x: Array) -> Array:
    return gelu_erf_factor(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _swish_bend(c: float) -> Callable[[Tensor], Tensor]:
    """The second derivative of x sigmoid(c x): c s (1 - s) (2 + c x (1 - 2 s))."""

    def bend(x: Tensor) -> Tensor:
        s, rest = ops.sigmoid(x * c), ops.sigmoid(x * -c)
        return s * rest * (x * (rest - s) * c + 2) * c

    return bend


def _gelu_bend(x: Tensor) -> Tensor:
    """The second derivative of x sigmoid(u): s (1 - s) (2 u' + x u'' + x u'^2 (1 - 2 s))."""
    x2 = ops.sqr(x)
    u = x * (x2 * (_GELU * _CUBE) + _GELU)
    s, rest = ops.sigmoid(u), ops.sigmoid(-u)
    u1 = x2 * (3 * _GELU * _CUBE) + _GELU
    return s * rest * (u1 * 2 + x2 * (6 * _GELU * _CUBE) + x * ops.sqr(u1) * (rest - s))


def _gelu_erf_bend(x: Tensor) -> Tensor:
    """The second derivative of x phi(x): (2 - x^2) times the normal density."""
    x2 = ops.sqr(x)
    return ops.exp(x2 * -0.5) * (2 - x2) * (1 / math.sqrt(2 * math.pi))


_FAR = 1000.0  # beyond it the derivatives are those there, also at infinity
_LEAST = 2.0**-100  # a smaller derivative counts as 0, so that kernels and reference agree on infinity times it


def _back_shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    rule(a.ne == b.ne, f"a and b must have the same ne, not {list(a.ne)} and {list(b.ne)}")
    return a.ne


def _define_back(name: str, slope: Callable[[Array], Array], bend: Callable[[Tensor], Tensor]) -> Back:
    """The op that multiplies a gradient by the derivative of `name`. `bend` records the second derivative."""

    def ref(a: Array, b: Array) -> Array:
        s = in_f32(slope(np.clip(b, -_FAR, _FAR)))
        return a * np.where(np.abs(s) < _LEAST, 0.0, s)

    def grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
        a, x = src(node.src, 0), as_f32(src(node.src, 1))
        return (lambda: record(definition, (gy, x), {}), lambda: gy * a * bend(x))

    definition = OpDef(
        name=f"{name}_back",
        srcs=("a", "b"),
        params=(),
        shape=_back_shape,
        dtypes={(F32, t): F32 for t in (F32, F16, BF16)},
        ref=ref,
        kernel=f"{name}_back",
        cost=elementwise_cost(25),
        inplace=(0, 1),
        label=f"a {name}'(b)",
        grad=grad,
    )

    def function(a: Tensor, b: Tensor) -> Tensor:
        return record(definition, (a, b), {})

    function.__name__ = function.__qualname__ = definition.name
    function.__doc__ = f"""The gradient of `{name}`: `a`, that of its result, times the derivative at `b`, its source.

a: F32, any layout; b: F32, F16 or BF16, of the same ne; result: F32, shape as `a`. Raises ShapeError, DTypeError."""
    return function


silu_back = _define_back("silu", _swish_slope(1.0), _swish_bend(1.0))
gelu_back = _define_back("gelu", _gelu_slope, _gelu_bend)
gelu_quick_back = _define_back("gelu_quick", _swish_slope(1.702), _swish_bend(1.702))
gelu_erf_back = _define_back("gelu_erf", _gelu_erf_slope, _gelu_erf_bend)


# -- the functions ------------------------------------------------------------------------------------------------


def _elu_slope(gy: Tensor, node: Tensor) -> Tensor:
    return gy * ops.exp(ops.clamp(_x(node), -math.inf, 0.0))


def _hardswish_slope(gy: Tensor, node: Tensor) -> Tensor:
    x = _x(node)
    return gy * ops.where(ops.abs(x) < 3, x * (1 / 3) + 0.5, ops.step(x))


silu, silu_inplace = _define(
    "silu",
    "a / (1 + exp(-a)), also called swish (ggml_silu).",
    lambda x: x / (1 + np.exp(-x)),
    lambda gy, node: silu_back(gy, src(node.src, 0)),
)
gelu, gelu_inplace = _define(
    "gelu",
    "a / 2 (1 + tanh(sqrt(2/pi) (a + 0.044715 a^3))), the tanh form of GELU (ggml_gelu; Hendrycks and Gimpel 2016).\n\n"
    "ggml reads it from a table of F16 values; here every digit of F32 holds.",
    lambda x: x * gelu_factor(x),
    lambda gy, node: gelu_back(gy, src(node.src, 0)),
)
gelu_quick, gelu_quick_inplace = _define(
    "gelu_quick",
    "a sigmoid(1.702 a) (ggml_gelu_quick).",
    lambda x: x * gelu_quick_factor(x),
    lambda gy, node: gelu_quick_back(gy, src(node.src, 0)),
)
gelu_erf, gelu_erf_inplace = _define(
    "gelu_erf",
    "a / 2 (1 + erf(a / sqrt(2))), the exact GELU (ggml_gelu_erf).",
    lambda x: x * gelu_erf_factor(x),
    lambda gy, node: gelu_erf_back(gy, src(node.src, 0)),
)
relu, relu_inplace = _define(
    "relu", "max(a, 0) (ggml_relu).", lambda x: np.maximum(x, 0), lambda gy, node: gy * ops.step(_y(node)), flops=1
)
elu, elu_inplace = _define(
    "elu", "a where it is positive, else exp(a) - 1 (ggml_elu).", lambda x: np.where(x > 0, x, np.expm1(x)), _elu_slope
)
tanh, tanh_inplace = _define(
    "tanh", "The hyperbolic tangent (ggml_tanh).", np.tanh, lambda gy, node: gy * (1 - ops.sqr(_y(node)))
)
sigmoid, sigmoid_inplace = _define(
    "sigmoid", "1 / (1 + exp(-a)) (ggml_sigmoid).", sigmoid_of, lambda gy, node: gy * (_y(node) - ops.sqr(_y(node)))
)
hardswish, hardswish_inplace = _define(
    "hardswish", "a hardsigmoid(a) (ggml_hardswish).", lambda x: x * _hardsigmoid(x), _hardswish_slope, flops=1
)
hardsigmoid, hardsigmoid_inplace = _define(
    "hardsigmoid",
    "(a + 3) / 6, within 0..1 (ggml_hardsigmoid).",
    _hardsigmoid,
    lambda gy, node: gy * (ops.abs(_x(node)) < 3) * (1 / 6),
    flops=1,
)
step, step_inplace = _define(
    "step",
    "1 where a is positive, else 0, also for NaN (ggml_step).",
    lambda x: np.where(x > 0, 1.0, 0.0),
    None,
    flops=1,
)
exp, exp_inplace = _define("exp", "e to the power of a (ggml_exp).", np.exp, lambda gy, node: gy * _y(node))
expm1, expm1_inplace = _define(
    "expm1", "exp(a) - 1, exact near 0 (ggml_expm1).", np.expm1, lambda gy, node: gy * (_y(node) + 1)
)
log, log_inplace = _define(
    "log", "The natural logarithm; -inf at 0, NaN below (ggml_log).", np.log, lambda gy, node: gy / _x(node)
)
neg, neg_inplace = _define("neg", "-a (ggml_neg).", np.negative, lambda gy, node: -gy, label="-a", flops=1)
abs, abs_inplace = _define(
    "abs", "|a| (ggml_abs).", np.abs, lambda gy, node: gy * ops.sgn(_x(node)), label="|a|", flops=1
)
softplus, softplus_inplace = _define(
    "softplus",
    "log(1 + exp(a)) (ggml_softplus).",
    lambda x: np.logaddexp(0, x),
    lambda gy, node: gy * ops.sigmoid(_x(node)),
)
sqr, sqr_inplace = _define(
    "sqr", "a squared (ggml_sqr).", np.square, lambda gy, node: gy * _x(node) * 2, label="a²", flops=1
)
sqrt, sqrt_inplace = _define(
    "sqrt", "The square root; NaN below 0 (ggml_sqrt).", np.sqrt, lambda gy, node: gy / _y(node) * 0.5, flops=1
)
sin, sin_inplace = _define("sin", "The sine, a in radians (ggml_sin).", np.sin, lambda gy, node: gy * ops.cos(_x(node)))
cos, cos_inplace = _define(
    "cos", "The cosine, a in radians (ggml_cos).", np.cos, lambda gy, node: -gy * ops.sin(_x(node))
)
floor, floor_inplace = _define(
    "floor", "The largest whole number that is not above a (ggml_floor).", np.floor, None, flops=1
)
ceil, ceil_inplace = _define(
    "ceil", "The smallest whole number that is not below a (ggml_ceil).", np.ceil, None, flops=1
)
round, round_inplace = _define(
    "round",
    "The nearest whole number, halves away from 0 (ggml_round; NumPy's goes to the even one).",
    lambda x: np.trunc(x + np.copysign(0.5, x)),
    None,
    flops=1,
)
trunc, trunc_inplace = _define("trunc", "a without its fraction, towards 0 (ggml_trunc).", np.trunc, None, flops=1)
sgn, sgn_inplace = _define(
    "sgn",
    "1 where a is positive, -1 where it is negative, else 0, also for NaN (ggml_sgn).",
    lambda x: np.where(x > 0, 1.0, np.where(x < 0, -1.0, 0.0)),
    None,
    flops=1,
)
