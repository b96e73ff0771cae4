"""`+ - * / @ **`, `abs`, `.T` and indices of tensors, as `pyggml.operators.Operand` documents them."""

from __future__ import annotations

from math import copysign, inf
from math import log as ln
from numbers import Integral, Real
from typing import Any, TypeAlias
from typing import cast as cast_type

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..errors import DTypeError, ShapeError, explain, user_site
from ..operators import Operand
from ..tensor import Context, Tensor
from ._common import can_repeat
from ._index import item
from .binary import add, div, mul, sub
from .copy import cast, cont
from .matmul import mul_mat
from .scalar import fill, scale, scale_bias
from .shape import repeat_4d
from .unary import abs as abs_
from .unary import exp, log, neg, sqr, sqrt
from .view import permute, reshape_1d, reshape_2d, reshape_3d, transpose

_TENSOR_OPS = {"+": add, "-": sub, "*": mul, "/": div}
_EXACT = 1 << 53  # integers up to here are doubles
_INTEGERS = (DType.I8, DType.I16, DType.I32, DType.I64)

Number: TypeAlias = "int | float"


class _Recorder:
    def binary(self, symbol: str, a: Any, b: Any) -> Any:
        x, y = _operand(a), _operand(b)
        if x is None or y is None:
            return NotImplemented
        if symbol == "**":
            return _power(symbol, x, y)
        if isinstance(x, int | float) or isinstance(y, int | float):
            return NotImplemented if symbol == "@" else _with_number(symbol, x, y)
        left, right = _leaf(symbol, x, y), _leaf(symbol, y, x)
        return _matmul(left, right) if symbol == "@" else _arithmetic(symbol, left, right)

    def unary(self, symbol: str, a: Tensor) -> Tensor:
        if symbol == "T":
            _check_transposable(symbol, a)
            if a.rank < 3:
                return transpose(a) if a.rank == 2 else a
            return permute(a, 2, 1, 0, 3) if a.rank == 3 else permute(a, 3, 2, 1, 0)
        if symbol == "abs":
            if a.dtype in _INTEGERS:
                rule = f"ggml has none of {a.dtype.name}; abs(gg.cast(x, gg.F32)) is one of floats"
                raise DTypeError(explain(symbol, rule, [("x", a.describe())], user_site()))
            return abs_(a)
        return _with_number("*", a, -1) if a.dtype in _INTEGERS else neg(a)

    def item(self, a: Tensor, key: Any) -> Tensor:
        return item(a, key)


def _operand(x: Any) -> Tensor | Array | Number | None:
    """A tensor or an array as it is, a number as Python's; None for a value that cannot stand in an expression."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, np.generic) or type(x) is np.ndarray:
        array = cast_type(Array, x)
        if array.ndim:
            return array
        x = array.item()
    if isinstance(x, Integral):
        return int(x)
    try:
        return float(x) if isinstance(x, Real) else None
    except OverflowError:
        return None


def _leaf(symbol: str, x: Tensor | Array, other: Tensor | Array) -> Tensor:
    """An array as a constant in an expression with the tensor `other`: I32 when both are integers, else F32."""
    if isinstance(x, Tensor):
        return x
    assert isinstance(other, Tensor)
    if x.dtype.kind not in "biuf":
        raise DTypeError(explain(symbol, f"an array of {x.dtype} has no real numbers", [], user_site()))
    whole = x.dtype.kind in "iu" and other.dtype in _INTEGERS
    return (Context.current() or other.ctx).from_numpy(x, other.dtype if whole else DType.F32)


def _as_floats(t: Tensor) -> Tensor:
    return cast(t, DType.F32) if t.dtype in _INTEGERS else t


# -- + - * / ----------------------------------------------------------------------------------------------------------


def _arithmetic(symbol: str, a: Tensor, b: Tensor) -> Tensor:
    if symbol == "/" or (a.dtype in _INTEGERS) != (b.dtype in _INTEGERS):
        a, b = _as_floats(a), _as_floats(b)
    if not can_repeat(b.ne, a.ne):
        if symbol in "+*" and can_repeat(a.ne, b.ne) and a.dtype is b.dtype:
            a, b = b, a
        else:
            ne = [max(n, m) for n, m in zip(a.ne, b.ne, strict=True)]
            whole = (ne[0], ne[1], ne[2], ne[3])
            if can_repeat(a.ne, whole) and can_repeat(b.ne, whole):  # else the op says what does not fit
                a = repeat_4d(a, *whole)
    return _TENSOR_OPS[symbol](a, b)


def _with_number(symbol: str, a: Tensor | Array | Number, b: Tensor | Array | Number) -> Tensor:
    t, s, swapped = (b, a, True) if isinstance(b, Tensor) else (a, b, False)
    assert isinstance(t, Tensor) and isinstance(s, int | float)
    if t.dtype in _INTEGERS:
        if isinstance(s, int) and symbol != "/":
            constant = _leaf(symbol, np.full(1, s, object if abs(s) >> 63 else np.int64), t)
            return _arithmetic(symbol, constant, t) if swapped else _arithmetic(symbol, t, constant)
        t = _as_floats(t)
    if symbol == "*":
        return scale(t, s)
    if symbol == "/":
        return div(fill(t, s), t) if swapped else scale(t, 1 / s if s else copysign(inf, s))
    if symbol == "-":
        return scale_bias(t, -1.0, s) if swapped else scale_bias(t, 1.0, -s)
    return scale_bias(t, 1.0, s)


# -- ** ---------------------------------------------------------------------------------------------------------------


def _power(symbol: str, a: Tensor | Array | Number, p: Tensor | Array | Number) -> Tensor:
    if isinstance(p, Tensor) and isinstance(a, int | float):
        if 0 < a < inf:
            return exp(scale(_as_floats(p), ln(a)))
        raise DTypeError(explain(symbol, f"the base must be a positive number, not {a}", [], user_site()))
    if not isinstance(a, Tensor) or not isinstance(p, int | float) or not -_EXACT <= p <= _EXACT:
        text = f"the exponent must be a number of up to 2^53, not {p if isinstance(p, float) else type(p).__name__}"
        raise DTypeError(explain(symbol, text, [], user_site()))
    t = _as_floats(a)
    if p < 0:
        return _with_number("/", 1, _power(symbol, t, -p))
    if p == 0:
        return fill(t, 1.0)
    whole, half = divmod(p, 1)
    if half not in (0, 0.5):
        return exp(scale(log(t), p))
    factors = [sqrt(t)] * (half == 0.5)
    n = int(whole)
    while n:
        if n & 1:
            factors.append(t)
        n >>= 1
        if n:
            t = sqr(t)
    result = factors.pop(0)
    for factor in factors:
        result = mul(result, factor)
    return scale(result, 1.0) if result is a else result


# -- @ ----------------------------------------------------------------------------------------------------------------


def _check_transposable(symbol: str, x: Tensor) -> None:
    if x.dtype.block_size > 1 and x.rank > 1:
        rule = f"the blocks of {x.dtype.name} lie along the last of NumPy's dimensions, which must stay"
        rule += "; a product with such weights is gg.mul_mat(w, x), NumPy's x @ w.T"
        raise ShapeError(explain(symbol, rule, [("x", f"{x.describe()}, shape {x.shape}")], user_site()))


def _check_shapes(a: Tensor, b: Tensor) -> None:
    """What NumPy's matmul asks of shapes, in NumPy's terms."""
    rows = b.shape[0] if b.rank == 1 else b.shape[-2]
    rule = None
    if a.shape[-1] != rows:
        rule = f"the last dimension of a, {a.shape[-1]}, is not b's {'only' if b.rank == 1 else 'last but one'}, {rows}"
    elif any(n != m and 1 not in (n, m) for n, m in zip(a.ne[2:], b.ne[2:], strict=True)):
        rule = f"the dimensions before the last two, {a.shape[:-2]} and {b.shape[:-2]}, must be equal or 1"
    if rule is not None:
        tensors = [(role, f"{t.describe()}, shape {t.shape}") for role, t in (("a", a), ("b", b))]
        raise ShapeError(explain("@", rule, tensors, user_site()))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """NumPy's matmul, vectors included."""
    a, b = _as_floats(a), _as_floats(b)
    _check_shapes(a, b)
    _check_transposable("@", b)
    columns = b if b.rank == 1 else transpose(b)
    rows = columns if columns.nb[0] == b.dtype.type_size else cont(columns)
    ne = [max(n, m) for n, m in zip(a.ne[2:], rows.ne[2:], strict=True)]
    left = a if [*a.ne[2:]] == ne or not can_repeat(a.ne, (*a.ne[:2], ne[0], ne[1])) else repeat_4d(a, *a.ne[:2], *ne)
    y = mul_mat(rows, left)  # ne [n, m, ..]
    if b.rank > 1 and a.rank > 1:
        return y
    dims = [n for i, n in enumerate(y.ne[: max(a.rank, b.rank)]) if i != (0 if b.rank == 1 else 1)] or [1]
    if a.rank == b.rank == 1 or len(dims) == 1:
        return reshape_1d(y, dims[0])
    return reshape_2d(y, dims[0], dims[1]) if len(dims) == 2 else reshape_3d(y, dims[0], dims[1], dims[2])


Operand.recorder = _Recorder()
