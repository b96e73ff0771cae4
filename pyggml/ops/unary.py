"""Functions of one tensor, element by element, without parameters. Source: ggml_unary and its relatives.

All take F32, F16 or BF16 of any shape and layout, and give the same shape and type; they raise DTypeError for others.
NaN in, NaN out (but `step` and `sgn`). Each `_inplace` variant writes its result over `a`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..codec import Array
from ..opdef import OpDef, elementwise_cost, record
from ..tensor import Tensor
from ._common import BF16, F16, F32, same_shape

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


_CHEAP, _COSTLY = elementwise_cost(1), elementwise_cost(20)


def _define(name: str, f: Callable[[Array], Array], label: str, costly: bool = True) -> OpDef:
    return OpDef(
        name=name,
        srcs=("a",),
        params=(),
        shape=same_shape,
        dtypes={(F32,): F32, (F16,): F16, (BF16,): BF16},
        ref=f,
        kernel=name,
        cost=_COSTLY if costly else _CHEAP,
        inplace=(0,),
        label=label,
    )


def sigmoid_of(x: Array) -> Array:
    """1 / (1 + e^-x): what silu multiplies x with."""
    return 1 / (1 + np.exp(-x))


def _hardsigmoid(x: Array) -> Array:
    return np.clip((x + 3) / 6, 0, 1)


def gelu_factor(x: Array) -> Array:
    """What gelu multiplies x with: (1 + tanh(z)) / 2 is sigmoid(2 z), which keeps its digits far below 0."""
    return sigmoid_of(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def gelu_quick_factor(x: Array) -> Array:
    """What gelu_quick multiplies x with."""
    return sigmoid_of(1.702 * x)


def gelu_erf_factor(x: Array) -> Array:
    """What gelu_erf multiplies x with: the normal distribution's integral from -inf to x."""
    return 0.5 * _erfc(-x / math.sqrt(2))


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


SILU = _define("silu", lambda x: x / (1 + np.exp(-x)), "silu(a)")
GELU = _define("gelu", lambda x: x * gelu_factor(x), "gelu(a)")
GELU_QUICK = _define("gelu_quick", lambda x: x * gelu_quick_factor(x), "gelu_quick(a)")
GELU_ERF = _define("gelu_erf", lambda x: x * gelu_erf_factor(x), "gelu_erf(a)")
RELU = _define("relu", lambda x: np.maximum(x, 0), "relu(a)", costly=False)
ELU = _define("elu", lambda x: np.where(x > 0, x, np.expm1(x)), "elu(a)")
TANH = _define("tanh", np.tanh, "tanh(a)")
SIGMOID = _define("sigmoid", sigmoid_of, "sigmoid(a)")
HARDSWISH = _define("hardswish", lambda x: x * _hardsigmoid(x), "hardswish(a)", costly=False)
HARDSIGMOID = _define("hardsigmoid", _hardsigmoid, "hardsigmoid(a)", costly=False)
STEP = _define("step", lambda x: np.where(x > 0, 1.0, 0.0), "step(a)", costly=False)
EXP = _define("exp", np.exp, "exp(a)")
EXPM1 = _define("expm1", np.expm1, "expm1(a)")
LOG = _define("log", np.log, "log(a)")
NEG = _define("neg", np.negative, "-a", costly=False)
ABS = _define("abs", np.abs, "|a|", costly=False)
SOFTPLUS = _define("softplus", lambda x: np.logaddexp(0, x), "softplus(a)")
SQR = _define("sqr", np.square, "a²", costly=False)
SQRT = _define("sqrt", np.sqrt, "sqrt(a)", costly=False)
SIN = _define("sin", np.sin, "sin(a)")
COS = _define("cos", np.cos, "cos(a)")
FLOOR = _define("floor", np.floor, "floor(a)", costly=False)
CEIL = _define("ceil", np.ceil, "ceil(a)", costly=False)
ROUND = _define("round", lambda x: np.trunc(x + np.copysign(0.5, x)), "round(a)", costly=False)
TRUNC = _define("trunc", np.trunc, "trunc(a)", costly=False)
SGN = _define("sgn", lambda x: np.where(x > 0, 1.0, np.where(x < 0, -1.0, 0.0)), "sgn(a)", costly=False)


def silu(a: Tensor) -> Tensor:
    """a / (1 + exp(-a)), also called swish (ggml_silu)."""
    return record(SILU, (a,), {})


def silu_inplace(a: Tensor) -> Tensor:
    """`silu`, the result written over `a`."""
    return record(SILU, (a,), {}, inplace=0)


def gelu(a: Tensor) -> Tensor:
    """a / 2 (1 + tanh(sqrt(2/pi) (a + 0.044715 a^3))), the tanh form of GELU (ggml_gelu; Hendrycks and Gimpel 2016).

    ggml reads it from a table of F16 values; here every digit of F32 holds.
    """
    return record(GELU, (a,), {})


def gelu_inplace(a: Tensor) -> Tensor:
    """`gelu`, the result written over `a`."""
    return record(GELU, (a,), {}, inplace=0)


def gelu_quick(a: Tensor) -> Tensor:
    """a sigmoid(1.702 a) (ggml_gelu_quick)."""
    return record(GELU_QUICK, (a,), {})


def gelu_quick_inplace(a: Tensor) -> Tensor:
    """`gelu_quick`, the result written over `a`."""
    return record(GELU_QUICK, (a,), {}, inplace=0)


def gelu_erf(a: Tensor) -> Tensor:
    """a / 2 (1 + erf(a / sqrt(2))), the exact GELU (ggml_gelu_erf)."""
    return record(GELU_ERF, (a,), {})


def gelu_erf_inplace(a: Tensor) -> Tensor:
    """`gelu_erf`, the result written over `a`."""
    return record(GELU_ERF, (a,), {}, inplace=0)


def relu(a: Tensor) -> Tensor:
    """max(a, 0) (ggml_relu)."""
    return record(RELU, (a,), {})


def relu_inplace(a: Tensor) -> Tensor:
    """`relu`, the result written over `a`."""
    return record(RELU, (a,), {}, inplace=0)


def elu(a: Tensor) -> Tensor:
    """a where it is positive, else exp(a) - 1 (ggml_elu)."""
    return record(ELU, (a,), {})


def elu_inplace(a: Tensor) -> Tensor:
    """`elu`, the result written over `a`."""
    return record(ELU, (a,), {}, inplace=0)


def tanh(a: Tensor) -> Tensor:
    """The hyperbolic tangent (ggml_tanh)."""
    return record(TANH, (a,), {})


def tanh_inplace(a: Tensor) -> Tensor:
    """`tanh`, the result written over `a`."""
    return record(TANH, (a,), {}, inplace=0)


def sigmoid(a: Tensor) -> Tensor:
    """1 / (1 + exp(-a)) (ggml_sigmoid)."""
    return record(SIGMOID, (a,), {})


def sigmoid_inplace(a: Tensor) -> Tensor:
    """`sigmoid`, the result written over `a`."""
    return record(SIGMOID, (a,), {}, inplace=0)


def hardswish(a: Tensor) -> Tensor:
    """a hardsigmoid(a) (ggml_hardswish)."""
    return record(HARDSWISH, (a,), {})


def hardswish_inplace(a: Tensor) -> Tensor:
    """`hardswish`, the result written over `a`."""
    return record(HARDSWISH, (a,), {}, inplace=0)


def hardsigmoid(a: Tensor) -> Tensor:
    """(a + 3) / 6, within 0..1 (ggml_hardsigmoid)."""
    return record(HARDSIGMOID, (a,), {})


def hardsigmoid_inplace(a: Tensor) -> Tensor:
    """`hardsigmoid`, the result written over `a`."""
    return record(HARDSIGMOID, (a,), {}, inplace=0)


def step(a: Tensor) -> Tensor:
    """1 where a is positive, else 0, also for NaN (ggml_step)."""
    return record(STEP, (a,), {})


def step_inplace(a: Tensor) -> Tensor:
    """`step`, the result written over `a`."""
    return record(STEP, (a,), {}, inplace=0)


def exp(a: Tensor) -> Tensor:
    """e to the power of a (ggml_exp)."""
    return record(EXP, (a,), {})


def exp_inplace(a: Tensor) -> Tensor:
    """`exp`, the result written over `a`."""
    return record(EXP, (a,), {}, inplace=0)


def expm1(a: Tensor) -> Tensor:
    """exp(a) - 1, exact near 0 (ggml_expm1)."""
    return record(EXPM1, (a,), {})


def expm1_inplace(a: Tensor) -> Tensor:
    """`expm1`, the result written over `a`."""
    return record(EXPM1, (a,), {}, inplace=0)


def log(a: Tensor) -> Tensor:
    """The natural logarithm; -inf at 0, NaN below (ggml_log)."""
    return record(LOG, (a,), {})


def log_inplace(a: Tensor) -> Tensor:
    """`log`, the result written over `a`."""
    return record(LOG, (a,), {}, inplace=0)


def neg(a: Tensor) -> Tensor:
    """-a (ggml_neg)."""
    return record(NEG, (a,), {})


def neg_inplace(a: Tensor) -> Tensor:
    """`neg`, the result written over `a`."""
    return record(NEG, (a,), {}, inplace=0)


def abs(a: Tensor) -> Tensor:
    """|a| (ggml_abs)."""
    return record(ABS, (a,), {})


def abs_inplace(a: Tensor) -> Tensor:
    """`abs`, the result written over `a`."""
    return record(ABS, (a,), {}, inplace=0)


def softplus(a: Tensor) -> Tensor:
    """log(1 + exp(a)) (ggml_softplus)."""
    return record(SOFTPLUS, (a,), {})


def softplus_inplace(a: Tensor) -> Tensor:
    """`softplus`, the result written over `a`."""
    return record(SOFTPLUS, (a,), {}, inplace=0)


def sqr(a: Tensor) -> Tensor:
    """a squared (ggml_sqr)."""
    return record(SQR, (a,), {})


def sqr_inplace(a: Tensor) -> Tensor:
    """`sqr`, the result written over `a`."""
    return record(SQR, (a,), {}, inplace=0)


def sqrt(a: Tensor) -> Tensor:
    """The square root; NaN below 0 (ggml_sqrt)."""
    return record(SQRT, (a,), {})


def sqrt_inplace(a: Tensor) -> Tensor:
    """`sqrt`, the result written over `a`."""
    return record(SQRT, (a,), {}, inplace=0)


def sin(a: Tensor) -> Tensor:
    """The sine, a in radians (ggml_sin)."""
    return record(SIN, (a,), {})


def sin_inplace(a: Tensor) -> Tensor:
    """`sin`, the result written over `a`."""
    return record(SIN, (a,), {}, inplace=0)


def cos(a: Tensor) -> Tensor:
    """The cosine, a in radians (ggml_cos)."""
    return record(COS, (a,), {})


def cos_inplace(a: Tensor) -> Tensor:
    """`cos`, the result written over `a`."""
    return record(COS, (a,), {}, inplace=0)


def floor(a: Tensor) -> Tensor:
    """The largest whole number that is not above a (ggml_floor)."""
    return record(FLOOR, (a,), {})


def floor_inplace(a: Tensor) -> Tensor:
    """`floor`, the result written over `a`."""
    return record(FLOOR, (a,), {}, inplace=0)


def ceil(a: Tensor) -> Tensor:
    """The smallest whole number that is not below a (ggml_ceil)."""
    return record(CEIL, (a,), {})


def ceil_inplace(a: Tensor) -> Tensor:
    """`ceil`, the result written over `a`."""
    return record(CEIL, (a,), {}, inplace=0)


def round(a: Tensor) -> Tensor:
    """The nearest whole number, halves away from 0 (ggml_round; NumPy's goes to the even one)."""
    return record(ROUND, (a,), {})


def round_inplace(a: Tensor) -> Tensor:
    """`round`, the result written over `a`."""
    return record(ROUND, (a,), {}, inplace=0)


def trunc(a: Tensor) -> Tensor:
    """a without its fraction, towards 0 (ggml_trunc)."""
    return record(TRUNC, (a,), {})


def trunc_inplace(a: Tensor) -> Tensor:
    """`trunc`, the result written over `a`."""
    return record(TRUNC, (a,), {}, inplace=0)


def sgn(a: Tensor) -> Tensor:
    """1 where a is positive, -1 where it is negative, else 0, also for NaN (ggml_sgn)."""
    return record(SGN, (a,), {})


def sgn_inplace(a: Tensor) -> Tensor:
    """`sgn`, the result written over `a`."""
    return record(SGN, (a,), {}, inplace=0)
