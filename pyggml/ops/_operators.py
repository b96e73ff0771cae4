"""Records the nodes of expressions: operators, methods, indices and NumPy's functions of tensors.
`pyggml.operators.Operand` documents what each does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from math import copysign, inf
from math import log as ln
from typing import Any, NoReturn
from typing import cast as cast_type

from ..codec import Array
from ..dtypes import DType
from ..errors import DTypeError, GGMLError, GraphError, ShapeError, explain, user_site
from ..opdef import record
from ..operators import Operand
from ..signature import check_options
from ..tensor import Ne, Tensor
from ..var import NO_VALUE, Size, Varies
from . import _ufuncs, compare
from ._axes import astype, permuted, reshaped, transposed
from ._common import BF16, F16, F32, I32, longer, repeats
from ._index import item
from ._promote import INTEGERS, Number, as_floats, common_type, leaf, operand
from .binary import add, div, mul, sub
from .copy import cast, cont
from .matmul import MUL_MAT
from .reduce import max_axes, mean_axes, min_axes, sum_axes, var_axes
from .scalar import fill, scale, scale_bias
from .shape import repeat_4d
from .unary import abs as abs_
from .unary import exp, log, neg, sqr, sqrt
from .view import transpose

_TENSOR_OPS = {"+": add, "-": sub, "*": mul, "/": div}
_COMPARED = {
    "==": compare.equal,
    "!=": compare.not_equal,
    "<": compare.less,
    "<=": compare.less_equal,
    ">": compare.greater,
    ">=": compare.greater_equal,
}
_METHODS: dict[str, Callable[..., Tensor]] = {
    "reshape": reshaped,
    "permute": permuted,
    "transpose": transposed,
    "astype": astype,
    "sum": sum_axes,
    "mean": mean_axes,
    "max": max_axes,
    "min": min_axes,
    "var": var_axes,
}
_ERRORS: dict[str, type[GGMLError]] = {"bool": GraphError, "len": ShapeError, "[] =": GraphError}
_SEVERAL: tuple[type, ...] = (list, tuple, range, set)  # what many take for arrays
_EXACT = 1 << 53  # a double can hold each integer up to here


class _Recorder:
    def binary(self, symbol: str, a: Any, b: Any) -> Any:
        if symbol in _ufuncs.CONDITIONS:
            return _ufuncs.condition(symbol, a, b)
        x, y = operand(a), operand(b)
        if x is None or y is None:
            if isinstance(a, Size) or isinstance(b, Size):
                _refuse_size(symbol, a, b)
            other: object = b if isinstance(a, Tensor) else a
            if isinstance(other, _SEVERAL):  # == would be False without a word
                text = f"a {type(other).__name__} is no array: np.array({other!r:.40}, np.float32) is one"
                self.refuse(symbol, text)
            return NotImplemented
        if symbol in _COMPARED:
            return _COMPARED[symbol](x, y)
        if symbol == "**":
            return _power(symbol, x, y)
        if isinstance(x, int | float) or isinstance(y, int | float):
            return NotImplemented if symbol == "@" else _with_number(symbol, x, y)
        left = x if isinstance(x, Tensor) else leaf(symbol, x, cast_type(Tensor, y))
        right = y if isinstance(y, Tensor) else leaf(symbol, y, left)
        return _matmul(left, right) if symbol == "@" else _arithmetic(symbol, left, right)

    def unary(self, symbol: str, a: Tensor) -> Tensor:
        if symbol == "T":
            _check_transposable(symbol, a)
            if a.rank < 3:
                return transpose(a) if a.rank == 2 else a
            return transposed(a)
        if symbol == "~":
            return _ufuncs.condition(symbol, a)
        if symbol == "abs":
            if a.dtype in INTEGERS:
                rule = f"ggml has none of {a.dtype.name}; abs(gg.cast(x, gg.F32)) is one of floats"
                raise DTypeError(explain(symbol, rule, [("x", a.describe())], user_site()))
            return abs_(a)
        return _with_number("*", a, -1) if a.dtype in INTEGERS else neg(a)

    def item(self, a: Tensor, key: Any) -> Tensor:
        return item(a, key)

    def method(self, name: str, a: Tensor, *args: Any, **unused: None) -> Tensor:
        unknown = [key for key in unused if key not in ("dtype", "out")]
        if unknown:
            check_options(f"t.{name}", unknown, [*signature(getattr(Operand, name)).parameters][1:-1])
        if any(value is not None for value in unused.values()):
            self.refuse(name, "dtype and out must be None: t.astype(dtype) converts, and a node is a new tensor")
        return _METHODS[name](a, *args)

    def refuse(self, what: str, text: str) -> NoReturn:
        raise _ERRORS.get(what, DTypeError)(explain(what, text, [], user_site()))

    def ufunc(self, name: str, method: str, inputs: Sequence[Any], options: Sequence[str]) -> Any:
        if name in _ufuncs.SYMBOLS and method == "__call__" and not options:
            return self.binary(_ufuncs.SYMBOLS[name], *inputs)
        return _ufuncs.apply(name, method, inputs, options)

    def array_function(self, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        from . import _array_functions  # few programs need it

        return _array_functions.call(function, args, options)


def _refuse_size(symbol: str, a: Any, b: Any) -> NoReturn:
    size, t, role = (b, a, "a") if isinstance(b, Size) else (a, b, "b")
    raise Varies(
        explain(symbol, f"{size} {NO_VALUE}", [(role, t.describe())] if isinstance(t, Tensor) else [], user_site())
    )


# -- + - * / ----------------------------------------------------------------------------------------------------------


def _beside(dtype: DType, result: DType) -> bool:
    """Whether ops with a result of type `result` take a second source of type `dtype`."""
    return dtype is result or (result is F32 and dtype in (F16, BF16, I32))


def _promoted(symbol: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Convert `a` to the common type of both, and `b` to a type that the ops take as second source. `a` and `b` are
    exchanged when that saves a conversion."""
    dtype = common_type(a.dtype, b.dtype)
    if dtype is None:  # the op raises the error
        return a, b
    if a.dtype is not dtype and b.dtype is dtype and symbol in "+*" and _beside(a.dtype, dtype) and repeats(a.ne, b.ne):
        return b, a
    a = a if a.dtype is dtype else cast(a, dtype)
    return a, b if _beside(b.dtype, dtype) else cast(b, dtype)


def _arithmetic(symbol: str, a: Tensor, b: Tensor) -> Tensor:
    if symbol == "/":
        a, b = as_floats(a), as_floats(b)
    if a.dtype is not b.dtype:
        a, b = _promoted(symbol, a, b)
    if not repeats(b.ne, a.ne):
        if symbol in "+*" and repeats(a.ne, b.ne) and a.dtype is b.dtype:
            a, b = b, a
        else:
            whole = _longer(symbol, a, b, a.ne, b.ne)
            if repeats(a.ne, whole) and repeats(b.ne, whole):  # when they do not fit, the op below says so
                a = repeat_4d(a, *whole)
    return _TENSOR_OPS[symbol](a, b)


def _longer(symbol: str, a: Tensor, b: Tensor, one: Ne, other: Ne) -> Ne:
    """The shape to which both of these may repeat."""
    try:
        n0, n1, n2, n3 = map(longer, one, other)
    except Varies as e:
        raise Varies(explain(symbol, str(e), [("a", a.describe()), ("b", b.describe())], user_site())) from None
    return n0, n1, n2, n3


def _with_number(symbol: str, a: Tensor | Array | Number, b: Tensor | Array | Number) -> Tensor:
    t, s, swapped = (b, a, True) if isinstance(b, Tensor) else (a, b, False)
    assert isinstance(t, Tensor) and isinstance(s, int | float)
    if t.dtype in INTEGERS:
        if isinstance(s, int) and symbol != "/":
            constant = leaf(symbol, s, t)
            return _arithmetic(symbol, constant, t) if swapped else _arithmetic(symbol, t, constant)
        t = as_floats(t)
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
            return exp(scale(as_floats(p), ln(a)))
        raise DTypeError(explain(symbol, f"the base must be a positive number, not {a}", [], user_site()))
    if not isinstance(a, Tensor) or not isinstance(p, int | float) or not -_EXACT <= p <= _EXACT:
        text = f"the exponent must be a number of up to 2^53, not {p if isinstance(p, float) else type(p).__name__}"
        raise DTypeError(explain(symbol, text, [], user_site()))
    t = as_floats(a)
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
    """Raise ShapeError when NumPy's matmul would not take these shapes."""
    rows = b.shape[0] if b.rank == 1 else b.shape[-2] if b.rank else 0
    rule = None
    if not a.rank or not b.rank:
        rule = "an operand of shape () is no vector; * multiplies by it"
    elif a.shape[-1] != rows:
        rule = f"the last dimension of a, {a.shape[-1]}, is not b's {'only' if b.rank == 1 else 'last but one'}, {rows}"
    elif any(n != m and 1 not in (n, m) for n, m in zip(a.ne[2:], b.ne[2:], strict=True)):
        rule = f"the dimensions before the last two, {a.shape[:-2]} and {b.shape[:-2]}, must be equal or 1"
    if rule is not None:
        tensors = [(role, f"{t.describe()}, shape {t.shape}") for role, t in (("a", a), ("b", b))]
        raise ShapeError(explain("@", rule, tensors, user_site()))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """NumPy's matmul; `a` and `b` may be vectors."""
    a, b = as_floats(a), as_floats(b)
    _check_shapes(a, b)
    _check_transposable("@", b)
    columns = b if b.rank == 1 else transpose(b)
    rows = columns if columns.nb[0] == b.dtype.type_size else cont(columns)
    whole = _longer("@", a, b, a.ne, (*a.ne[:2], *rows.ne[2:]))
    left = repeat_4d(a, *whole) if a.ne != whole and repeats(a.ne, whole) else a
    y = record(MUL_MAT, (rows, left), {}, rank=max(a.rank, b.rank))  # ne [n, m, ..]
    if b.rank > 1 and a.rank > 1:
        return y
    ne = y.ne[: max(a.rank, b.rank)]
    gone = ((0,) if b.rank == 1 else ()) + ((1,) if a.rank == 1 else ())
    return reshaped(y, *[n for i, n in enumerate(ne) if i not in gone][::-1])


Operand.recorder = _Recorder()
