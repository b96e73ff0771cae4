"""Helpers for several families of ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from typing import ParamSpec

from ..dtypes import DType
from ..opdef import OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor, not_counts
from ..var import Size, Varies, as_size, is_count

F32, F16, BF16, I32, I64 = DType.F32, DType.F16, DType.BF16, DType.I32, DType.I64
MAX_INT, MAX_F32 = 2**31 - 1, (2 - 2**-23) * 2.0**127

P = ParamSpec("P")


def inplace(op: OpDef, function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """The `_inplace` variant of a function that records `op`: it writes its result over the op's first source.

    The function's arguments must be the op's sources and then its parameters, in the op's order.
    """
    name, order, n = function.__name__, signature(function), len(op.srcs)

    @wraps(function)
    def variant(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        given = order.bind(*args, **kwargs).args
        return record(op, given[:n], dict(zip(op.params, given[n:], strict=True)), inplace=0)

    variant.__name__ = variant.__qualname__ = f"{name}_inplace"
    variant.__doc__ = f"`{name}`, the result written over `{op.role(0)}`."
    return variant


def src(srcs: Srcs, i: int) -> Tensor:
    """Source `i`, which the op requires (record() has checked that it is there)."""
    t = srcs[i]
    assert t is not None
    return t


def ne_of(a: Tensor) -> Ne:
    """The ne of `a`. Ones when `a` is no tensor: the op that is then recorded on it raises the error."""
    return a.ne if isinstance(a, Tensor) else (1, 1, 1, 1)  # pyright: ignore[reportUnnecessaryIsInstance]


def type_of(value: DType | int | str) -> DType | None:
    """The type for a DType, a GGUF number or a name; None when there is no such type."""
    if isinstance(value, str):
        return DType.__members__.get(value.upper())
    return next((t for t in DType if value is t or (isinstance(value, Integral) and value == t.gguf_id)), None)


def same_shape(srcs: Srcs, params: Params) -> Ne:
    """Shape rule: the result has the shape of the first source."""
    return src(srcs, 0).ne


def can_repeat(a: Ne, b: Ne) -> bool:
    """True when `a` repeated whole times gives `b`."""
    return b[0] % a[0] == 0 and b[1] % a[1] == 0 and b[2] % a[2] == 0 and b[3] % a[3] == 0


def b_repeats_to_a(srcs: Srcs, params: Params) -> Ne:
    """Shape rule: the second source is repeated to the shape of the first."""
    a, b = src(srcs, 0), src(srcs, 1)
    if a.ne != b.ne:
        rule(can_repeat(b.ne, a.ne), f"b must repeat to a: each of b's ne {list(b.ne)} must divide a's {list(a.ne)}")
    return a.ne


def repeats(a: Ne, b: Ne) -> bool:
    """True when `a` repeated whole times gives `b`, for every value of their Vars."""
    try:
        return can_repeat(a, b)
    except Varies:
        return False


def longer(a: int, b: int) -> int:
    """The number of elements to which `a` and `b` of them may repeat: that one of the two which is not 1, else the
    larger one. Raises Varies when which one is larger depends on a Var."""
    return a if b == 1 or a == b else b if a == 1 else max(a, b)


def is_whole(n: object, least: int) -> bool:
    """True for an integer (Python's or NumPy's) of at least `least`."""
    return isinstance(n, Integral) and n >= least  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]


def is_int(n: object, least: int) -> bool:
    """True for an integer from `least` to what ggml's int holds: sums and products of a few of them fit 63 bits."""
    return is_whole(n, least) and n <= MAX_INT  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]


def is_number(x: object) -> bool:
    """True for a real number (Python's or NumPy's)."""
    return isinstance(x, Real)


def given_ne(params: Params) -> Ne:
    """The shape that the user gives as parameters ne0 .. ne3 (`OpDef.sizes`), for a shape rule."""
    ne = (params["ne0"], params["ne1"], params["ne2"], params["ne3"])
    fits = all(is_count(n) if isinstance(n, Size) else is_whole(n, 1) for n in ne)
    rule(fits, f"ne must be whole numbers from 1, not {list(ne)}{not_counts(ne)}")
    return (as_size(ne[0]), as_size(ne[1]), as_size(ne[2]), as_size(ne[3]))
