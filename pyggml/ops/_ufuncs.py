"""NumPy's functions (ufuncs) of tensors: `np.exp(t)` records the op that computes it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NoReturn

import numpy as np

from ..errors import DTypeError, explain, user_site
from ..tensor import FLAG_STORE, Tensor
from . import compare, unary
from ._promote import as_floats, leaf

SYMBOLS = {  # functions that are operators
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "power": "**",
    "matmul": "@",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
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


# -- & | ^ ~ ----------------------------------------------------------------------------------------------------------

CONDITIONS: dict[str, Callable[..., Tensor]] = {
    "&": compare.minimum,
    "|": compare.maximum,
    "^": compare.not_equal,
    "~": _logical_not,
}
_COMPARISONS = {"equal", "not_equal", "less", "less_equal", "greater", "greater_equal"}


def _is_condition(t: Tensor) -> bool:
    """Whether `t` is computed from comparisons by views, `&` and `|`, so that its elements are 0 or 1."""
    todo, seen = [t], {t}
    while todo:
        t = todo.pop()
        if t.op in _COMPARISONS:
            continue
        if t.op not in ("minimum", "maximum", "cont") and (t.view_src is None or t.flags & FLAG_STORE):
            return False
        if not t.src:
            return False
        more = [s for s in t.src if s is not None and s not in seen]
        seen.update(more)
        todo += more
    return True


def condition(symbol: str, *operands: Any) -> Tensor:
    """Record `&`, `|`, `^` or `~` of conditions. Raises DTypeError for other operands, of which bits would count."""
    near = next(x for x in operands if isinstance(x, Tensor))
    conditions: list[Tensor] = []
    for x in operands:
        if isinstance(x, Tensor) and _is_condition(x):
            conditions.append(x)
        elif isinstance(x, bool | np.bool_ | np.ndarray) and (array := np.asarray(x)).dtype == bool:
            numbers = array if array.ndim else int(array)
            conditions.append(compare.not_equal(leaf(symbol, numbers, near), 0))
        else:
            name = {"&": "and(a, b)", "|": "or(a, b)", "^": "xor(a, b)", "~": "not(a)"}[symbol]
            text = f"it combines comparisons; no op records bits. np.logical_{name} takes numbers, 0 for false"
            tensors = [(f"operand {i}", t.describe()) for i, t in enumerate(operands) if isinstance(t, Tensor)]
            raise DTypeError(explain(symbol, text, tensors, user_site()))
    return CONDITIONS[symbol](*conditions)


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
    "invert": partial(condition, "~"),
    "logical_not": _logical_not,
    "logical_and": _logical_and,
    "logical_or": _logical_or,
    "logical_xor": _logical_xor,
}


def refuse(name: str, text: str, inputs: Sequence[Any]) -> NoReturn:
    """Raise the DTypeError about `np.name(*inputs)`."""
    tensors = [(f"operand {i}", t.describe()) for i, t in enumerate(inputs) if isinstance(t, Tensor)]
    raise DTypeError(explain(f"np.{name}", text, tensors, user_site()))


def apply(name: str, method: str, inputs: Sequence[Any], options: Sequence[str]) -> Any:
    """Record the nodes of `np.name(*inputs)`, for functions that are no operators. Raises DTypeError when there is no
    op for it."""
    if method != "__call__":
        text = f"{method} of tensors is not recorded; reductions are methods, such as t.sum(axis) and t.max(axis)"
        refuse(f"{name}.{method}", text, inputs)
    if options:
        text = f"{', '.join(options)}= has no place in a graph: nodes are new tensors, so a = a + t instead of a += t"
        refuse(name, f"{text}, and t.astype(dtype) converts", inputs)
    if name in FLOATS:
        return FLOATS[name](as_floats(inputs[0]))
    if name in OTHERS:
        return OTHERS[name](*inputs)
    refuse(name, not_recorded(name), inputs)


def not_recorded(name: str, instead: str = "") -> str:
    """For messages: how to get `np.name` of a tensor, which no op records."""
    in_graph = f"in a graph there is {instead}" if instead else "in a graph gg.map_custom calls it"
    return f"no op records it. Of computed values it is np.{name}(t.numpy()); {in_graph}"
