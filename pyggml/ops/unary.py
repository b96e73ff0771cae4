"""Functions of one tensor, element by element, without parameters. Source: ggml_unary and its relatives.

All take F32, F16 or BF16 of any shape and layout, and give the same shape and type; they raise DTypeError for others.
NaN in, NaN out (but `step` and `sgn`). Each `_inplace` variant writes its result over `a`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..codec import Array
from ..opdef import OpDef, elementwise_cost, record
from ..tensor import Tensor
from ._common import BF16, F16, F32, inplace, same_shape

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
    "gelu_erf",
    "gelu_erf_inplace",
    "gelu_inplace",
    "gelu_quick",
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


def _define(
    name: str, doc: str, ref: Callable[[Array], Array], label: str | None = None, flops: int = 20
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
    )

    def function(a: Tensor) -> Tensor:
        return record(definition, (a,), {})

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function, inplace(definition, function)


def sigmoid_of(x: Array) -> Array:
    """1 / (1 + e^-x), the factor by which silu multiplies x."""
    return 1 / (1 + np.exp(-x))


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


silu, silu_inplace = _define(
    "silu", "a / (1 + exp(-a)), also called swish (ggml_silu).", lambda x: x / (1 + np.exp(-x))
)
gelu, gelu_inplace = _define(
    "gelu",
    "a / 2 (1 + tanh(sqrt(2/pi) (a + 0.044715 a^3))), the tanh form of GELU (ggml_gelu; Hendrycks and Gimpel 2016).\n\n"
    "ggml reads it from a table of F16 values; here every digit of F32 holds.",
    lambda x: x * gelu_factor(x),
)
gelu_quick, gelu_quick_inplace = _define(
    "gelu_quick", "a sigmoid(1.702 a) (ggml_gelu_quick).", lambda x: x * gelu_quick_factor(x)
)
gelu_erf, gelu_erf_inplace = _define(
    "gelu_erf", "a / 2 (1 + erf(a / sqrt(2))), the exact GELU (ggml_gelu_erf).", lambda x: x * gelu_erf_factor(x)
)
relu, relu_inplace = _define("relu", "max(a, 0) (ggml_relu).", lambda x: np.maximum(x, 0), flops=1)
elu, elu_inplace = _define(
    "elu", "a where it is positive, else exp(a) - 1 (ggml_elu).", lambda x: np.where(x > 0, x, np.expm1(x))
)
tanh, tanh_inplace = _define("tanh", "The hyperbolic tangent (ggml_tanh).", np.tanh)
sigmoid, sigmoid_inplace = _define("sigmoid", "1 / (1 + exp(-a)) (ggml_sigmoid).", sigmoid_of)
hardswish, hardswish_inplace = _define(
    "hardswish", "a hardsigmoid(a) (ggml_hardswish).", lambda x: x * _hardsigmoid(x), flops=1
)
hardsigmoid, hardsigmoid_inplace = _define(
    "hardsigmoid", "(a + 3) / 6, within 0..1 (ggml_hardsigmoid).", _hardsigmoid, flops=1
)
step, step_inplace = _define(
    "step", "1 where a is positive, else 0, also for NaN (ggml_step).", lambda x: np.where(x > 0, 1.0, 0.0), flops=1
)
exp, exp_inplace = _define("exp", "e to the power of a (ggml_exp).", np.exp)
expm1, expm1_inplace = _define("expm1", "exp(a) - 1, exact near 0 (ggml_expm1).", np.expm1)
log, log_inplace = _define("log", "The natural logarithm; -inf at 0, NaN below (ggml_log).", np.log)
neg, neg_inplace = _define("neg", "-a (ggml_neg).", np.negative, label="-a", flops=1)
abs, abs_inplace = _define("abs", "|a| (ggml_abs).", np.abs, label="|a|", flops=1)
softplus, softplus_inplace = _define("softplus", "log(1 + exp(a)) (ggml_softplus).", lambda x: np.logaddexp(0, x))
sqr, sqr_inplace = _define("sqr", "a squared (ggml_sqr).", np.square, label="a²", flops=1)
sqrt, sqrt_inplace = _define("sqrt", "The square root; NaN below 0 (ggml_sqrt).", np.sqrt, flops=1)
sin, sin_inplace = _define("sin", "The sine, a in radians (ggml_sin).", np.sin)
cos, cos_inplace = _define("cos", "The cosine, a in radians (ggml_cos).", np.cos)
floor, floor_inplace = _define("floor", "The largest whole number that is not above a (ggml_floor).", np.floor, flops=1)
ceil, ceil_inplace = _define("ceil", "The smallest whole number that is not below a (ggml_ceil).", np.ceil, flops=1)
round, round_inplace = _define(
    "round",
    "The nearest whole number, halves away from 0 (ggml_round; NumPy's goes to the even one).",
    lambda x: np.trunc(x + np.copysign(0.5, x)),
    flops=1,
)
trunc, trunc_inplace = _define("trunc", "a without its fraction, towards 0 (ggml_trunc).", np.trunc, flops=1)
sgn, sgn_inplace = _define(
    "sgn",
    "1 where a is positive, -1 where it is negative, else 0, also for NaN (ggml_sgn).",
    lambda x: np.where(x > 0, 1.0, np.where(x < 0, -1.0, 0.0)),
    flops=1,
)
