"""Integers that are bound when a graph runs, not when it is built: a `Var`, and a `Size` that follows from Vars."""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, count, product
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from .errors import GraphError, in_pyggml, integer, whole
from .operators import Operand

if TYPE_CHECKING:
    from typing_extensions import Self

    _Number = int  # so that type checkers take a Size wherever they take a size
else:
    _Number = object

_MAX = 2**63 - 1  # the executor's integers
_MANY = 4096  # values of Vars up to which all are tried that matter

Product = tuple["Var", ...]  # of Vars, in the order of their numbers
NO_VALUE = "follows from a Var: shapes, slices and offsets do, but no numbers to compute with"
_UFUNCS: Mapping[str, Any] = {  # what NumPy's numbers do beside a Size
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
}


class Varies(GraphError):
    """What was asked depends on the value of a Var. A graph is built once for all values, so that it has no answer."""


_for_all = ContextVar("pyggml_for_all_values", default=False)


@contextmanager
def for_all_values() -> Generator[None]:
    """A `with` block in which others record a graph that must serve all values of its Vars: in code outside of pyggml
    `int(size)` raises Varies, because the graph would keep what the size is now."""
    token = _for_all.set(True)
    try:
        yield
    finally:
        _for_all.reset(token)


class Size(_Number):
    """A sum of Vars and products of Vars, each times a whole number, and a whole number: `4 * n * k + 16`. It counts
    elements or bytes, as many as the Vars say when the graph runs.

    Sums, differences and products are Sizes again, as are quotients without a rest (`8 * n // 4`, `n * k // k`). A
    comparison holds when it holds for every value of the Vars, and two Sizes are equal when they are for every value.
    Whatever has another answer for other values raises Varies, so that nothing in a graph is decided by one value.

    `int(size)` is what it is now; to builders of models it raises Varies, see `for_all_values`. To what needs a number
    before the graph runs (`range`, NumPy) it is none, and raises Varies. Type checkers see an `int`.
    """

    __slots__ = ("_hash", "between", "const", "terms")

    between: tuple[int, int, int] | None  # `bounds`, and `Var.risen` when they were found
    const: int
    terms: Mapping[Product, int]  # never empty, and no factor is 0

    def __new__(cls, const: int, terms: Mapping[Product, int]) -> Self:
        size = object.__new__(cls)  # not super(): sizes are made often
        size.const, size.terms, size.between = const, terms, None
        return size

    def __reduce__(self) -> tuple[object, ...]:
        return Size, (self.const, self.terms)

    @property
    def vars(self) -> Product:
        """The Vars that it follows from."""
        return tuple(dict.fromkeys(chain.from_iterable(self.terms)))

    def unit(self) -> tuple[int, Size]:
        """A stride and what it is multiplied with: the Size is its constant and stride * unit. Sizes that differ in
        their strides have one unit."""
        if len(self.terms) > 1:
            return 1, Size(0, self.terms)
        ((factors, stride),) = self.terms.items()
        return stride, factors[0] if len(factors) == 1 else Size(0, {factors: 1})

    def __int__(self) -> int:
        if _for_all.get() and not in_pyggml(sys._getframe(1)):  # pyright: ignore[reportPrivateUsage]
            self.__index__()
        total = self.const
        for factors, n in self.terms.items():
            for var in factors:
                n *= int(var)
            total += n
        return total

    def __bool__(self) -> bool:
        least, most = bounds(self)
        return True if least > 0 or most < 0 else self._undecided(f"whether {self} is 0")

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            var = _lone(self)
            self._hash = hash((self.const, frozenset(self.terms.items())) if var is None else var)
            return self._hash

    # -- arithmetic -----------------------------------------------------------------------------------------------

    def __add__(self, other: int) -> int:
        if type(other) is int:
            return Size(self.const + other, self.terms)
        if isinstance(other, Operand):
            return NotImplemented
        n = self._operand("+", other)
        if not isinstance(n, Size):
            return Size(self.const + n, self.terms)
        return _summed((*self.terms.items(), *n.terms.items()), self.const + n.const)

    __radd__ = __add__

    def __neg__(self) -> int:
        return self * -1

    def __sub__(self, other: int) -> int:
        return NotImplemented if isinstance(other, Operand) else self + -self._operand("-", other)

    def __rsub__(self, other: int) -> int:
        return -self + other

    def __mul__(self, other: int) -> int:
        if type(other) is int:
            return self._scaled(other)
        if isinstance(other, Operand):
            return NotImplemented
        by = self._operand("*", other)
        if not isinstance(by, Size):
            return self._scaled(by)
        return _summed((_times(a, b), n * m) for a, n in _all_of(self).items() for b, m in _all_of(by).items())

    __rmul__ = __mul__

    def _scaled(self, by: int) -> int:
        if by == 1 and type(self) is Size:  # most dimensions are 1
            return self
        return Size(self.const * by, {factors: n * by for factors, n in self.terms.items()}) if by else 0

    def __floordiv__(self, other: int) -> int:
        if type(other) is int and other == 1 and type(self) is Size:  # most types have blocks of one element
            return self
        return divmod(self, other)[0]

    def __mod__(self, other: int) -> int:
        if type(other) is int and other and not any(n % other for n in self.terms.values()):
            return self.const % other
        try:
            return divmod(self, other)[1]
        except Varies:
            self._undecided(f"whether {other!s:.40} divides {self}", other)

    def __rmod__(self, other: int) -> NoReturn:
        self._undecided(f"whether {self} divides {other!s:.40}", other)

    def __divmod__(self, other: int) -> tuple[int, int]:
        """The quotient and the rest, where the quotient is a Size, and the rest is the same for every value."""
        by = self._operand("//", other)
        if isinstance(by, Size):
            quotient = _quotient(self, by)
            return self._no_size("//", other) if quotient is None else (quotient, 0)
        if not by or any(n % by for n in self.terms.values()):
            self._no_size("//", other)
        return Size(self.const // by, {factors: n // by for factors, n in self.terms.items()}), self.const % by

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Operators beside NumPy's numbers are Python's."""
        if any(isinstance(x, Operand) for x in inputs):
            return NotImplemented
        function = _UFUNCS.get(ufunc.__name__)
        if function is None or method != "__call__" or options or any(np.ndim(x) for x in inputs):
            raise Varies(f"np.{ufunc.__name__} of {self}: {self} {NO_VALUE}")
        return function(*[x.item() if hasattr(x, "item") else x for x in inputs])

    def bind(self, value: int) -> None:
        """Raises GraphError: the Vars that a Size follows from are bound, see `Var.bind`."""
        own = ", ".join(f"{var.name}.bind(..)" for var in self.vars)
        raise GraphError(f"{self} cannot be bound to {value!r:.40}: it follows from what is bound, {own}")

    def _operand(self, op: str, other: int) -> int:
        """`other`, a Size or a plain integer."""
        if isinstance(other, Size):
            return other
        try:
            return integer(other)
        except TypeError:
            self._no_size(op, other)

    # -- comparisons ----------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Size):
            return self is other or (self.const == other.const and self.terms == other.terms)
        return NotImplemented if isinstance(other, Operand) else False

    def __ne__(self, other: object) -> bool:
        return NotImplemented if isinstance(other, Operand) else not self == other

    def __lt__(self, other: int) -> bool:
        return self._compare("<", operator.lt, other)

    def __le__(self, other: int) -> bool:
        return self._compare("<=", operator.le, other)

    def __gt__(self, other: int) -> bool:
        return self._compare(">", operator.gt, other)

    def __ge__(self, other: int) -> bool:
        return self._compare(">=", operator.ge, other)

    def _compare(self, op: str, holds: Callable[[Any, Any], bool], other: int) -> bool:
        if isinstance(other, Operand):
            return NotImplemented
        rest, to = (self - other, 0) if isinstance(other, Size) else (self, other)
        first, last = (holds(n, to) for n in bounds(rest))
        return first if first is last else self._undecided(f"whether {self} {op} {other}", other)

    # -- what has no answer ---------------------------------------------------------------------------------------

    def _undecided(self, what: str, other: object = None) -> NoReturn:
        raise Varies(f"{what} depends on {_ranges(self, other)}, and a graph is built for all values")

    def _no_size(self, op: str, other: object, *, swapped: bool = False) -> NoReturn:
        one, two = (f"({x})" if isinstance(x, Size) and _lone(x) is None else f"{x!s:.40}" for x in (self, other))
        expression = f"{two} {op} {one}" if swapped else f"{one} {op} {two}"
        rule = "sizes are sums of whole numbers, Vars, and products of these"
        raise Varies(f"{expression} is no size that follows from {_ranges(self, other)}: {rule}")

    def __index__(self) -> int:
        raise Varies(f"{self} is no number before the graph runs: {_ranges(self)}. int(size) is what it is now")

    __float__ = __index__

    # -- text -----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        parts = [(n, "*".join(var.name for var in factors)) for factors, n in self.terms.items()]
        parts = sorted([*parts, (self.const, "")] if self.const else parts, key=lambda part: part[0] < 0)
        text = ""
        for n, name in parts:
            sign = " - " if n < 0 else " + "
            number = [str(abs(n))] if abs(n) != 1 or not name else []
            text += (sign if text else sign.strip(" +")) + "*".join([*number, *[name] * bool(name)])
        return text

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        if spec and spec[-1] in "bcdoxXeEfFgGn%":
            now = f"f'{{int({self}):{spec}}}' shows what it is now, f'{{{self}}}' its name"
            raise Varies(f"format: {self} is no number before the graph runs: {now}")
        return format(str(self), spec)


def _refused(op: str, swapped: bool) -> Callable[..., NoReturn]:
    def refuse(self: Size, other: object = "") -> NoReturn:
        self._no_size(op, other, swapped=swapped)  # pyright: ignore[reportPrivateUsage]

    return refuse


for _name, _op in {"truediv": "/", "pow": "**", "lshift": "<<", "rshift": ">>", "and": "&", "or": "|"}.items():
    setattr(Size, f"__{_name}__", _refused(_op, False))
    setattr(Size, f"__r{_name}__", _refused(_op, True))
for _name in ("floordiv", "divmod"):
    setattr(Size, f"__r{_name}__", _refused("//", True))


def as_size(value: Any) -> int:
    """A Size, or a plain integer. Raises TypeError for what is neither."""
    if type(value) is int:
        return value
    if isinstance(value, Var):
        return value + 0
    return value if isinstance(value, Size) else integer(value)


class Var(Size):
    """An integer that is bound when a graph runs, not when it is built: how many rows a batch has, or where the next
    one goes in a cache. It is taken as a number of elements (`ctx.new_tensor(gg.F32, (64, n))`, `t.reshape(n, -1)`), in
    slices and indices of tensors (`cache[:n]`, `cache[head]`), and in offsets of views; so are Sizes, which its sums
    and products are (`cache[head : head + 4]`).

    `lo` and `hi` are the smallest and the largest value it may take, now and later. Without `lo` the smallest one is 0,
    and 1 as soon as a tensor has so many elements: none has 0. `value` is the first one (default: the smallest). `hi`
    may follow from Vars that are bound before (`gg.Var("head", hi=512 - n)`): then `head + n` is never above 512.
    Raises GraphError for a `hi` outside 0 .. 2^63 - 1, a value outside lo .. hi, and what is no whole number.

    A Var has one value at a time. Threads that bind it by the inputs of `pyggml.eval` take turns by themselves; those
    that call `bind` hold a lock of the program from there until they have read the results.
    """

    __slots__ = ("__weakref__", "_hi", "_is_open", "_lo", "_value", "name", "number", "room")

    _numbers = count()
    _rises = count(1)
    risen: ClassVar[int] = 0  # another number whenever the smallest value of any Var has changed
    name: str
    number: int
    _hi: int
    _lo: int
    _value: int
    _is_open: bool
    room: Size | None  # the largest value where that follows from other Vars

    def __new__(cls, name: str, hi: int | None = None, value: int | None = None, lo: int | None = None) -> Self:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"the name of a Var must be a string, not {name!r:.40}")
        if hi is None:
            raise GraphError(f"a Var needs hi, the largest value that it may take: Var({name!r:.40}, hi=512)")
        var = super().__new__(cls, 0, {})
        var.terms = {(var,): 1}
        var.name, var.number = name, next(cls._numbers)
        var.room = hi if isinstance(hi, Size) else None
        var._hi = whole(f"hi of {name}", largest(hi), error=GraphError)
        if not 0 <= var._hi <= _MAX:
            raise GraphError(f"hi of {name} = {hi} is outside 0..{_MAX}")
        var._lo = 0 if lo is None else whole(f"lo of {name}", lo, 0, var._hi, GraphError)
        var._is_open, var._value = lo is None, var._lo
        if value is not None:
            var.bind(value)
        return var

    __hash__ = object.__hash__  # two Vars are two, whatever their names

    def __reduce__(self) -> tuple[object, ...]:
        hi = self._hi if self.room is None else self.room
        return Var, (self.name, hi, self._value, None if self._is_open else self._lo)

    @property
    def lo(self) -> int:
        """The smallest value."""
        return self._lo

    @property
    def hi(self) -> int:
        """The largest value."""
        return self._hi

    @property
    def value(self) -> int:
        """What the next run takes; `bind` sets it."""
        return self._value

    def bind(self, value: int) -> None:
        """Set the value of the next run. Raises GraphError outside lo..hi."""
        value = whole(self.name, value, error=GraphError)
        hi = self._hi if self.room is None else int(self.room)
        if not self._lo <= value <= hi:
            raise GraphError(f"{self.name} = {value} is outside {self._lo}..{hi}")
        self._value = value
        self._is_open = self._is_open and value > 0

    def __int__(self) -> int:
        if self.room is not None and self._value > (room := int(self.room)):
            raise GraphError(f"{self.name} = {self._value} is above {self.room} = {room}, which was bound later")
        return self._value

    @property
    def may_rise(self) -> bool:
        """Whether its smallest value is 0 for want of a `lo`, and was not bound to that."""
        return self._is_open and self._lo == 0 < self._hi

    def rise(self) -> None:
        """From now on, its smallest value is 1: a tensor has as many elements."""
        self._lo, self._value = 1, max(self._value, 1)
        Var.risen = next(Var._rises)

    def __repr__(self) -> str:
        return f"<Var {self.name} = {self.value} of {self.lo}..{self.hi}>"


# -- sums of products -------------------------------------------------------------------------------------------------


def _lone(n: Size) -> Var | None:
    """The Var that `n` is equal to, if it is equal to one."""
    (factors, times), *rest = n.terms.items()
    return factors[0] if not rest and times == len(factors) == 1 and n.const == 0 else None


def _times(a: Product, b: Product) -> Product:
    return tuple(sorted((*a, *b), key=operator.attrgetter("number")))


def _all_of(n: Size) -> dict[Product, int]:
    """Its terms, with its constant as that of no factors."""
    return {**n.terms, (): n.const} if n.const else {**n.terms}


def _summed(terms: Iterable[tuple[Product, int]], const: int = 0) -> int:
    total: dict[Product, int] = {(): const}
    for factors, n in terms:
        total[factors] = total.get(factors, 0) + n
    const = total.pop(())
    total = {factors: n for factors, n in total.items() if n}
    return Size(const, total) if total else const


def _quotient(n: Size, by: Size) -> int | None:
    """n / by, where that is a Size or a number: the division of polynomials."""

    def rank(factors: Product) -> tuple[int, list[int]]:
        return len(factors), [var.number for var in factors]

    rest, divisor = _all_of(n), _all_of(by)
    lead = max(divisor, key=rank)
    quotient: dict[Product, int] = {}
    while rest:
        top = max(rest, key=rank)
        left = Counter(top)
        left.subtract(lead)
        if min(left.values(), default=0) < 0 or rest[top] % divisor[lead]:
            return None
        factors, times = tuple(left.elements()), rest[top] // divisor[lead]
        quotient[factors] = times
        for other, m in divisor.items():
            at = _times(factors, other)
            rest[at] = rest.get(at, 0) - times * m
            if not rest[at]:
                del rest[at]
    return _summed(quotient.items())


# -- values -----------------------------------------------------------------------------------------------------------


def bounds(n: int) -> tuple[int, int]:
    """The least and the largest value of `n`; a plain integer is both. No value is outside of them; they are exact but
    for powers of a Var of many values."""
    if not isinstance(n, Size):
        return n, n
    risen, known = Var.risen, n.between
    if known is None or known[2] != risen:
        n.between = known = *_bounds(n), risen
    return known[0], known[1]


def _bounds(n: Size) -> tuple[int, int]:
    if len(n.terms) == 1:  # most Sizes are a multiple of one Var
        ((factors, times),) = n.terms.items()
        least = most = times
        for var in factors:
            hi = var.hi if var.room is None or len(factors) > 1 else bounds(var.room)[1]
            least, most = least * var.lo, most * hi
        return (n.const + least, n.const + most) if least <= most else (n.const + most, n.const + least)
    if any(var.room is not None for factors in n.terms for var in factors):
        return bounds(_at_end(n, 0))[0], bounds(_at_end(n, 1))[1]
    found = [at for at, _ in _tried(n)]
    if found:
        return min(found), max(found)
    shared = [var for var in n.vars if n.const == 0 and all(var in factors for factors in n.terms)]
    if shared:
        rest = _quotient(n, shared[0])
        assert rest is not None
        ends = [a * b for a in bounds(shared[0]) for b in bounds(rest)]
        return min(ends), max(ends)
    parts = [bounds(Size(0, {factors: times})) for factors, times in n.terms.items()]
    return n.const + sum(least for least, _ in parts), n.const + sum(most for _, most in parts)


def _at_end(n: Size, end: int) -> int:
    """`n` with each Var whose largest value follows from other Vars at the end of its range that makes `n` least (0),
    or largest (1). In products of Vars it has its own bounds."""
    total: int = n.const
    for factors, times in n.terms.items():
        var, term = factors[0], Size(0, {factors: times})
        if var.room is not None and len(factors) == 1:
            term = (var.room if (times > 0) == (end == 1) else var.lo) * times
        elif any(v.room is not None for v in factors):
            ends = [times * prod(at) for at in product(*((v.lo, v.hi) for v in factors))]
            term = max(ends) if end else min(ends)
        total = total + term
    return total


def largest(n: int) -> int:
    """The largest value of `n`, which is a Size or a plain integer."""
    return bounds(n)[1] if isinstance(n, Size) else n


def _tried(n: Size) -> Iterator[tuple[int, Mapping[Var, int]]]:
    """What `n` is for those values of its Vars that decide its bounds, and these values: the smallest and the largest
    one of a Var; of one that is multiplied with itself all. None when they are too many."""
    own = n.vars
    powers = {var for factors in n.terms for var in factors if factors.count(var) > 1}
    steps = {var: 1 if var in powers else max(var.hi - var.lo, 1) for var in own}
    every = [range(var.lo, var.hi + 1, step) for var, step in steps.items()]
    many = prod((var.hi - var.lo) // step + 1 for var, step in steps.items()) > _MANY
    for values in () if many else product(*every):
        at = dict(zip(own, values, strict=True))
        yield n.const + sum(times * prod(at[var] for var in factors) for factors, times in n.terms.items()), at


def below_zero(n: int) -> str:
    """For which values of its Vars `n` is less than 0, such as "head = 509"; "" when it never is."""
    if not isinstance(n, Size):
        return "every value" if n < 0 else ""
    if bounds(n)[0] >= 0:
        return ""
    found = next((values for at, values in _tried(n) if at < 0), None)
    return _ranges(n) if found is None else ", ".join(f"{var.name} = {value}" for var, value in found.items())


def is_count(n: int) -> bool:
    """Whether `n` is at least 1 for every value of its Vars. Where only 0 is in the way, a Var without `lo` is never 0
    from then on."""
    if not isinstance(n, Size) or bounds(n)[0] >= 1:
        return n >= 1
    rising = {var: Var(var.name, var.hi, lo=1) for var in n.vars if var.may_rise}
    risen = _summed((tuple(rising.get(var, var) for var in factors), times) for factors, times in _all_of(n).items())
    if not rising or bounds(risen)[0] < 1:
        return bounds(n)[0] >= 1  # another thread may have let it rise meanwhile
    for var in rising:
        var.rise()
    return True


def divides(by: int, *numbers: int) -> bool:
    """Whether all numbers are multiples of `by` for every value of their Vars."""
    try:
        return not any(n % by for n in numbers)
    except Varies:
        return False


def vars_of(*numbers: object) -> Product:
    """The Vars that the Sizes among these numbers follow from."""
    return tuple(dict.fromkeys(var for n in numbers if isinstance(n, Size) for var in n.vars))


def _ranges(*numbers: object) -> str:
    """Their Vars and the values that these may have, for messages."""
    return ", ".join(f"{var.name} ({var.lo}..{var.hi})" for var in vars_of(*numbers))
