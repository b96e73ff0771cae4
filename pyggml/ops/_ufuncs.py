"""NumPy's functions (ufuncs) of tensors: `np.exp(t)` records the op that computes it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NoReturn

import numpy as np

from ..errors import DTypeError, explain, user_site
from ..tensor import Tensor
from . import compare, unary
from ._promote import as_floats

SYMBOLS = {  # functions that are operators
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "power": "**",
    "matmul": "@",
    "equal": "==",
    "not_equal": "!=",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}


def _truth(x: Any) -> Any:
    return compare.not_equal(x, 0) if isinstance(x, Tensor) else np.not_equal(x, 0)


def _sign(x: Tensor) -> Tensor:
    return compare.where(compare.isnan(x), x, unary.sgn(x))


def _same(x: Tensor) -> Tensor:
    return x


def _square(x: Tensor) -> Tensor:
    return x * x


def _logical_not(x: Tensor) -> Tensor:
    return compare.equal(x, 0)


def _logical_and(a: Any, b: Any) -> Tensor:
    return compare.minimum(_truth(a), _truth(b))


def _logical_or(a: Any, b: Any) -> Tensor:
    return compare.maximum(_truth(a), _truth(b))


def _logical_xor(a: Any, b: Any) -> Tensor:
    return compare.not_equal(_truth(a), _truth(b))


FLOATS: dict[str, Callable[[Tensor], Tensor]] = {  # integers are converted to F32 first
    "exp": unary.exp,
    "expm1": unary.expm1,
    "log": unary.log,
    "sqrt": unary.sqrt,
    "sin": unary.sin,
    "cos": unary.cos,
    "tanh": unary.tanh,
    "floor": unary.floor,
    "ceil": unary.ceil,
    "trunc": unary.trunc,
    "fabs": unary.abs,
    "sign": _sign,
    "reciprocal": lambda x: 1 / x,
    "isinf": lambda x: compare.equal(unary.abs(x), inf),
    "isfinite": lambda x: compare.less(unary.abs(x), inf),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "maximum": compare.maximum,
    "minimum": compare.minimum,
    "isnan": compare.isnan,
    "negative": operator.neg,
    "positive": _same,
    "absolute": abs,
    "square": _square,
    "logical_not": _logical_not,
    "logical_and": _logical_and,
    "logical_or": _logical_or,
    "logical_xor": _logical_xor,
}


def _refuse(name: str, text: str, inputs: Sequence[Any]) -> NoReturn:
    tensors = [(f"operand {i}", t.describe()) for i, t in enumerate(inputs) if isinstance(t, Tensor)]
    raise DTypeError(explain(f"np.{name}", text, tensors, user_site()))


def apply(name: str, method: str, inputs: Sequence[Any], options: Sequence[str]) -> Any:
    """Record the nodes of `np.name(*inputs)`, for functions that are no operators. Raises DTypeError when there is no
    op for it."""
    if method != "__call__":
        text = f"{method} of tensors is not recorded; reductions are methods, such as t.sum(axis) and t.max(axis)"
        _refuse(f"{name}.{method}", text, inputs)
    if options:
        text = f"{', '.join(options)}= has no place in a graph: nodes are new tensors, so a = a + t instead of a += t"
        _refuse(name, f"{text}, and t.astype(dtype) converts", inputs)
    if name in FLOATS:
        return FLOATS[name](as_floats(inputs[0]))
    if name in OTHERS:
        return OTHERS[name](*inputs)
    text = f"no op records it. Of computed values it is np.{name}(t.numpy()); in a graph gg.map_custom calls it"
    _refuse(name, text, inputs)
