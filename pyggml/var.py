"""Integers that are bound when a graph runs, not when it is built, and the byte offsets that depend on them."""

from __future__ import annotations

from .errors import GraphError, whole

_MAX = 2**63 - 1  # the executor's integers


class Var:
    """An integer that is bound when a graph runs, not when it is built (the cache head of a decode step).

    `stride * var + const` is an `Offset` that a view accepts; `hi` is the largest value it may take, now and later.
    Raises GraphError for a `hi` outside 0 .. 2^63 - 1, a value outside 0 .. hi, and what is no whole number.
    """

    __slots__ = ("_hi", "_value", "name")

    def __init__(self, name: str, hi: int, value: int = 0) -> None:
        self.name = name
        self._hi = whole(f"hi of {name}", hi, error=GraphError)
        if not 0 <= self._hi <= _MAX:
            raise GraphError(f"hi of {name} = {hi} is outside 0..{_MAX}")
        self.bind(value)

    @property
    def hi(self) -> int:
        return self._hi

    @property
    def value(self) -> int:
        """What the next run takes; `bind` sets it."""
        return self._value

    def bind(self, value: int) -> None:
        """Set the value of the next run. Raises GraphError outside 0..hi."""
        value = whole(self.name, value, error=GraphError)
        if not 0 <= value <= self._hi:
            raise GraphError(f"{self.name} = {value} is outside 0..{self._hi}")
        self._value = value

    def __mul__(self, stride: int) -> Offset:
        return Offset(0, whole(f"the stride of {self.name}", stride, error=GraphError), self)

    __rmul__ = __mul__

    def __add__(self, other: int) -> Offset:
        return self * 1 + other

    __radd__ = __add__

    def __repr__(self) -> str:
        return f"<Var {self.name} = {self.value} of 0..{self.hi}>"


class Offset:
    """`const + stride * var` bytes."""

    __slots__ = ("const", "stride", "var")

    def __init__(self, const: int, stride: int, var: Var) -> None:
        self.const, self.stride, self.var = const, stride, var

    def __int__(self) -> int:
        return self.const + self.stride * self.var.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offset) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def _parts(self) -> tuple[int, int, Var]:
        return self.const, self.stride, self.var

    def __add__(self, other: int) -> Offset:
        return Offset(self.const + whole(f"what is added to {self}", other, error=GraphError), self.stride, self.var)

    __radd__ = __add__

    def __mul__(self, factor: int) -> Offset:
        n = whole(f"a factor of {self}", factor, error=GraphError)
        return Offset(self.const * n, self.stride * n, self.var)

    __rmul__ = __mul__

    @property
    def hi(self) -> int:
        """What it is at the largest value of its Var."""
        return self.const + self.stride * self.var.hi

    def __repr__(self) -> str:
        return f"{self.const}+{self.stride}*{self.var.name}"
