"""Whether tensors over the same memory have bytes in common: what an op that writes through a view has to know."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..dtypes import DType
from ..tensor import Ne, last_byte
from ..var import Size, Varies, bounds, largest

_MAX_WORK = 10_000  # when the exact answer takes more work, tensors count as overlapping

Axes = list[tuple[int, int]]  # (elements, byte stride) per dimension


class Elements(Protocol):
    """A tensor, or elements of one that lie as those of a tensor."""

    @property
    def dtype(self) -> DType: ...
    @property
    def ne(self) -> Ne: ...
    @property
    def nb(self) -> Ne: ...
    @property
    def view_offs(self) -> int: ...


class _Bytes:
    """What NumPy asks of an array to find its bytes; they are never read."""

    def __init__(self, start: int, unit: int, axes: Axes) -> None:
        self.__array_interface__ = {
            "shape": tuple(n for n, _ in axes),
            "strides": tuple(stride for _, stride in axes),
            "typestr": f"|V{unit}",
            "data": (start, True),
            "version": 3,
        }


def _axes(t: Elements) -> Axes:
    ne, nb = tuple(map(largest, t.ne)), tuple(map(largest, t.nb))  # nb is a Size where ne is 1
    return [(ne[0] // t.dtype.block_size, nb[0]), (ne[1], nb[1]), (ne[2], nb[2]), (ne[3], nb[3])]


def _end(t: Elements) -> int:
    """The byte behind the last element, from the start of the root."""
    return t.view_offs + last_byte(t.dtype, t.ne, t.nb)


def overlaps_itself(t: Elements) -> bool:
    """Whether elements of `t` may share bytes (rows that repeat, or start within one another), for any value of its
    Vars."""
    filled = t.dtype.type_size
    try:
        axes = [(t.ne[0] // t.dtype.block_size, t.nb[0]), *zip(t.ne[1:], t.nb[1:], strict=True)]
        for n, stride in sorted(axes, key=lambda axis: bounds(axis[1])):
            if n != 1 and stride < filled:
                return True
            filled += (n - 1) * stride
    except Varies:
        return True
    return False


def same_elements(a: Elements, b: Elements) -> bool:
    """Whether `a` and `b` of one root are the same elements in the same order."""
    return a.ne == b.ne and a.nb == b.nb and a.dtype is b.dtype and a.view_offs == b.view_offs


def may_overlap(a: Elements, b: Elements) -> bool:
    """Whether `a` and `b` of one root have bytes in common, for any values that Vars in their offsets may take (for
    every pair of values, unless both move alike). Between strides that follow from a Var, all bytes count."""
    if any(bounds(_end(x) - y.view_offs)[1] <= 0 for x, y in ((a, b), (b, a))):
        return False
    if any(n != 1 and isinstance(stride, Size) for t in (a, b) for n, stride in zip(t.ne, t.nb, strict=True)):
        return True
    (x, axes_x), (y, axes_y) = (_range(t, start) for t, start in zip((a, b), _relative(a, b), strict=True))
    first = min(x, y) - 1  # NULL would be no address
    one, other = (_Bytes(x - first, a.dtype.type_size, axes_x), _Bytes(y - first, b.dtype.type_size, axes_y))
    try:
        return np.shares_memory(np.asarray(one), np.asarray(other), max_work=_MAX_WORK)  # pyright: ignore[reportArgumentType]
    except np.exceptions.TooHardError:
        return True


def _relative(a: Elements, b: Elements) -> tuple[int, int]:
    """The offsets of both. Vars that move both alike are left out."""
    x, y = a.view_offs, b.view_offs
    if isinstance(x, Size) and isinstance(y, Size) and x.terms == y.terms:
        return x.const, y.const
    return x, y


def _range(t: Elements, start: int) -> tuple[int, Axes]:
    """The first byte, and the axes: one more for each term of a start that moves."""
    axes = _axes(t)
    if not isinstance(start, Size):
        return start, axes
    first = start.const
    for factors, stride in start.terms.items():
        least, most = bounds(Size(0, {factors: stride}))
        first += least
        axes.append(((most - least) // abs(stride) + 1, abs(stride)))
    return first, axes
