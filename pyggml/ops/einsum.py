"""einsum: sums of products by named axes, made of permute, mul_mat and products that repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import DTypeError, ShapeError, explain, user_site
from ..opdef import record_view
from ..tensor import Tensor
from ._axes import permuted, reshaped
from ._promote import FLOATS, as_floats, of_one_type
from .copy import cont
from .matmul import mul_mat
from .reduce import sum_axes
from .view import VIEW

__all__ = ["einsum"]


class _Refusal:
    """The errors of one call."""

    def __init__(self, subscripts: object, tensors: Sequence[Tensor]) -> None:
        self.subscripts, self.tensors = subscripts, tensors

    def __call__(self, text: str) -> NoReturn:
        named = [(f"operand {i}", f"{t.describe()}, shape {t.shape}") for i, t in enumerate(self.tensors)]
        raise ShapeError(explain("einsum", f"{self.subscripts!r:.60}: {text}", named, user_site()))


def einsum(subscripts: str, *operands: Any) -> Tensor:
    """NumPy's einsum: `"bqd,bkd->bqk"` names the axes of each operand and of the result, in NumPy's order. An axis that
    the result does not have is summed over; one that an operand names twice is its diagonal. Without `->` the result
    has the axes that are named once, in alphabetical order.

    operands: at least one tensor, and arrays beside tensors. Two are multiplied at a time, from the left. When an axis
    that both have is summed over, `mul_mat` does it, as F32 (integers too); in a block type that must be the last axis.
    A single operand keeps its type. Raises ShapeError, also for `...` and for more than four axes in the result of a
    product.
    """
    first = next((t for t in operands if isinstance(t, Tensor)), None)
    if not isinstance(subscripts, str) or first is None:  # pyright: ignore[reportUnnecessaryIsInstance]
        rule = "takes the names of axes as a string, and then tensors, of which one at least is no array"
        raise DTypeError(explain("einsum", rule, [], user_site()))
    tensors = [of_one_type("einsum", t, beside=first)[0] for t in operands]
    refuse = _Refusal(subscripts, tensors)
    names, result = _names(subscripts, tensors, refuse)
    _check_sizes(names, tensors, refuse)
    found = [_diagonal(t, axes, refuse) for t, axes in zip(tensors, names, strict=True)]
    t, axes = found[0]
    for i, (other, others) in enumerate(found[1:], 1):
        kept = {*result}.union(*(axes for _, axes in found[i + 1 :]))
        t, axes = _product(t, axes, other, others, kept, refuse)
    t, axes = _without(t, axes, {*result})
    return permuted(t, *(axes.index(name) for name in result)) if axes else t


def _names(subscripts: str, tensors: Sequence[Tensor], refuse: _Refusal) -> tuple[list[str], str]:
    """The axes of each operand, and those of the result."""
    left, arrow, result = subscripts.replace(" ", "").partition("->")
    names = left.split(",")
    if "." in subscripts:
        refuse("... has no place here: name every axis")
    if not all(name.isalpha() for name in (*left.replace(",", ""), *result)):
        refuse("axes are named by letters, operands parted by commas, and the result comes behind ->")
    if len(names) != len(tensors):
        refuse(f"names {len(names)} operands, and {len(tensors)} are given")
    if not arrow:
        result = "".join(sorted(name for name, n in Counter(left.replace(",", "")).items() if n == 1))
    if len({*result}) < len(result):
        refuse("the result names an axis twice")
    if unknown := [name for name in result if name not in left]:
        refuse(f"the result names {unknown[0]!r}, which no operand has")
    return names, result


def _check_sizes(names: Sequence[str], tensors: Sequence[Tensor], refuse: _Refusal) -> None:
    sizes: dict[str, int] = {}
    for i, (t, axes) in enumerate(zip(tensors, names, strict=True)):
        if len(axes) != t.rank:
            refuse(f"names {len(axes)} axes of operand {i}, which has {t.rank}")
        for name, n in zip(axes, t.shape, strict=True):
            if sizes.setdefault(name, n) != n:
                refuse(f"axis {name!r} has {sizes[name]} elements, and {n} in operand {i}")


def _diagonal(t: Tensor, axes: str, refuse: _Refusal) -> tuple[Tensor, str]:
    """A view of the elements whose indices along axes of one name are equal."""
    own = "".join(dict.fromkeys(axes))
    if own == axes:
        return t, axes
    if t.dtype.block_size > 1:
        refuse(f"{t.dtype.name} has no diagonals: its blocks lie along an axis")
    pairs = [*zip(axes, t.shape, t.strides, strict=True)][::-1]
    dims = [(next(n for at, n, _ in pairs if at == name), sum(nb for at, _, nb in pairs if at == name)) for name in own]
    dims = [*dims[::-1], *[(1, t.nb[3] * t.ne[3])] * (4 - len(dims))]
    (n0, b0), (n1, b1), (n2, b2), (n3, b3) = dims
    return record_view(VIEW, t, {"offset": 0}, (n0, n1, n2, n3), (b0, b1, b2, b3), len(own)), own


def _without(t: Tensor, axes: str, kept: set[str]) -> tuple[Tensor, str]:
    """Summed over the axes that are not kept."""
    lone = [i for i, name in enumerate(axes) if name not in kept]
    return (sum_axes(t, lone), "".join(name for name in axes if name in kept)) if lone else (t, axes)


def _grouped(t: Tensor, axes: str, groups: Sequence[str]) -> Tensor:
    """`t` with its axes in the order of these groups, each of which becomes one axis of the result."""
    t = permuted(t, *(axes.index(name) for group in groups for name in group)) if axes else t
    sizes, at = t.shape, 0
    dims: list[int] = []
    for group in groups:
        n = 1
        for i in range(at, at + len(group)):
            n *= sizes[i]
        at += len(group)
        dims.append(n)
    return reshaped(t, *dims)


def _product(a: Tensor, in_a: str, b: Tensor, in_b: str, kept: set[str], refuse: _Refusal) -> tuple[Tensor, str]:
    """The product of two operands, summed over the axes that neither later operands nor the result name."""
    a, in_a = _without(as_floats(a), in_a, kept | {*in_b})
    b, in_b = _without(as_floats(b), in_b, kept | {*in_a})
    if a.dtype not in FLOATS:  # mul_mat takes block types only as its first source
        a, in_a, b, in_b = b, in_b, a, in_a
    batch = "".join(name for name in in_a if name in in_b and name in kept)
    inner = "".join(name for name in in_a if name in in_b and name not in kept)
    left = "".join(name for name in in_a if name not in in_b)
    right = "".join(name for name in in_b if name not in in_a)
    axes = batch + left + right
    if len(axes) > 4:
        refuse(f"the product of {in_a!r} and {in_b!r} has {len(axes)} axes, {axes!r}; tensors have at most four")
    if not inner:
        x = _grouped(a, in_a, [*batch, *left, *[""] * len(right)])
        return x * _grouped(b, in_b, [*batch, *[""] * len(left), *right]), axes
    batches = [*batch] if len(batch) < 3 else [batch]
    columns = _grouped(a, in_a, [*batches, left, inner])
    rows = _grouped(b, in_b, [*batches, right, inner])
    rows = rows if rows.nb[0] == rows.dtype.type_size else cont(rows)
    sizes = dict(zip(in_a + in_b, a.shape + b.shape, strict=True))
    return reshaped(mul_mat(rows, columns), *[sizes[name] for name in axes]), axes
