"""Integers that are bound when a graph runs, not when it is built: a `Var`, and a `Size` that follows from one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import GraphError, integer, whole

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX = 2**63 - 1  # the executor's integers


class Varies(GraphError):
    """A graph cannot run for all values of a Var: something in it does not follow the Var by a constant stride."""


class Var:
    """An integer that is bound when a graph runs, not when it is built (the cache head of a decode step).

    `stride * var + const` is a `Size`: a number of bytes that a view accepts as its offset, or a number of elements.
    `lo` and `hi` are the smallest and the largest value it may take, now and later. Raises GraphError for a `hi`
    outside 0 .. 2^63 - 1, a value outside lo .. hi, and what is no whole number.
    """

    __slots__ = ("_hi", "_lo", "_value", "name")

    def __init__(self, name: str, hi: int, value: int | None = None, lo: int = 0) -> None:
        self.name = name
        self._hi = whole(f"hi of {name}", hi, error=GraphError)
        if not 0 <= self._hi <= _MAX:
            raise GraphError(f"hi of {name} = {hi} is outside 0..{_MAX}")
        self._lo = whole(f"lo of {name}", lo, 0, self._hi, GraphError)
        self.bind(self._lo if value is None else value)

    @property
    def lo(self) -> int:
        return self._lo

    @property
    def hi(self) -> int:
        return self._hi

    @property
    def value(self) -> int:
        """What the next run takes; `bind` sets it."""
        return self._value

    def bind(self, value: int) -> None:
        """Set the value of the next run. Raises GraphError outside lo..hi."""
        value = whole(self.name, value, error=GraphError)
        if not self._lo <= value <= self._hi:
            raise GraphError(f"{self.name} = {value} is outside {self._lo}..{self._hi}")
        self._value = value

    def __mul__(self, stride: int) -> int:
        return _size(0, whole(f"the stride of {self.name}", stride, error=GraphError), self)

    __rmul__ = __mul__

    def __add__(self, other: int) -> int:
        return self * 1 + other

    __radd__ = __add__

    def __repr__(self) -> str:
        return f"<Var {self.name} = {self.value} of {self.lo}..{self.hi}>"


class Size(int):
    """`const + stride * var`: elements or bytes, as many as the Var says when the graph runs.

    `int(size)` is what it is now. A graph is planned and compiled for the largest: what reads a Size as a number
    without `int` (C, NumPy) gets its largest value.

    Sums, differences and products with numbers are Sizes again, as are quotients without a rest. A comparison holds
    when it holds for every value of the Var, and two Sizes are equal when they are for every value. Whatever has
    another answer for other values of the Var raises Varies, so that nothing in a graph is decided by one value alone.
    """

    const: int
    stride: int
    var: Var

    def __new__(cls, const: int, stride: int, var: Var) -> Self:
        size = super().__new__(cls, max(const + stride * var.lo, const + stride * var.hi))
        size.const, size.stride, size.var = const, stride, var
        return size

    def __int__(self) -> int:
        return self.const + self.stride * self.var.value

    def _parts(self) -> tuple[int, int, Var]:
        return self.const, self.stride, self.var

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self._parts() == other._parts()

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __add__(self, other: int) -> int:
        if isinstance(other, Size):
            if other.var is not self.var:
                self._refuse("+", other)
            return _size(self.const + other.const, self.stride + other.stride, self.var)
        return _size(self.const + self._number("+", other), self.stride, self.var)

    __radd__ = __add__

    def __neg__(self) -> int:
        return _size(-self.const, -self.stride, self.var)

    def __sub__(self, other: int) -> int:
        return self + -other

    def __rsub__(self, other: int) -> int:
        return -self + other

    def __mul__(self, other: int) -> int:
        n = self._number("*", other)
        return _size(self.const * n, self.stride * n, self.var)

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        n = self._divisor("//", other)
        return _size(self.const // n, self.stride // n, self.var)

    def __mod__(self, other: int) -> int:
        return 0 if self == other else self.const % self._divisor("%", other)

    def __lt__(self, other: int) -> bool:
        return self._compare(operator.lt, other)

    def __le__(self, other: int) -> bool:
        return self._compare(operator.le, other)

    def __gt__(self, other: int) -> bool:
        return self._compare(operator.gt, other)

    def __ge__(self, other: int) -> bool:
        return self._compare(operator.ge, other)

    def _compare(self, holds: Callable[[Any, Any], bool], other: int) -> bool:
        rest, to = (self - other, 0) if isinstance(other, Size) else (self, other)
        if not isinstance(rest, Size):
            return holds(rest, to)
        first, last = (holds(n, to) for n in ends(rest))
        if first is not last:
            self._refuse("compared with", other)
        return first

    def _number(self, op: str, other: object) -> int:
        """`other`, a plain integer."""
        try:
            n = integer(other)
        except TypeError:
            self._refuse(op, other)
        return self._refuse(op, other) if isinstance(n, Size) else n

    def _divisor(self, op: str, other: object) -> int:
        """`other`, a plain integer that divides the stride."""
        n = self._number(op, other)
        return self._refuse(op, other) if not n or self.stride % n else n

    def _refuse(self, op: str, other: object) -> NoReturn:
        raise Varies(f"{self!r} {op} {other!r} is no size that follows {self.var.name} by a constant stride")

    def __repr__(self) -> str:
        return f"{self.const}+{self.stride}*{self.var.name}"


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Size, other: object = "") -> NoReturn:
        self._refuse(name.strip("_"), other)  # pyright: ignore[reportPrivateUsage]

    return refuse


for _name in ("truediv", "rtruediv", "rfloordiv", "rmod", "divmod", "rdivmod", "pow", "rpow", "float", "lshift", "and"):
    setattr(Size, f"__{_name}__", _refused(f"__{_name}__"))


def _size(const: int, stride: int, var: Var) -> int:
    return Size(const, stride, var) if stride else const


def largest(n: int) -> int:
    """The largest value of `n`, which is a Size or a plain integer."""
    return max(ends(n)) if isinstance(n, Size) else n


def ends(n: int) -> tuple[int, int]:
    """The values of `n` at the smallest and the largest value of its Var; of a plain integer twice that."""
    return (n.const + n.stride * n.var.lo, n.const + n.stride * n.var.hi) if isinstance(n, Size) else (n, n)
