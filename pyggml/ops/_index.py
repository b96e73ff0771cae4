"""Indices of tensors: `a[...]` with whole numbers, slices, `...` and None gives a view, as NumPy's basic indexing."""

from __future__ import annotations

from typing import Any, cast

from ..errors import DTypeError, GGMLError, ShapeError
from ..opdef import fail, record_view
from ..tensor import Size, Tensor
from ..var import Varies, as_size, below_zero, divides, is_count
from .view import VIEW

Axis = tuple[int, int]  # elements, byte stride


def item(a: Tensor, key: Any) -> Tensor:
    """The view of `a` that NumPy's basic indexing gives; see `pyggml.operators.Operand`.

    A single element has shape (). A block of a quantised type cannot be cut: the last dimension can be sliced only at
    multiples of the block size, without a step.
    """
    keys = _expanded(a, key)
    axes: list[Axis] = []  # axes of the result, in NumPy's order
    offset, dim = 0, a.rank  # the dimension of `a` (ne order) before the next key
    for k in keys:
        if k is None:
            axes.append((1, 0))
            continue
        dim -= 1
        start, axis = _along(a, dim, k)
        offset += start
        axes += [] if axis is None else [axis]
    if len(axes) > 4:
        raise _refusal(a, ShapeError, f"the result would have {len(axes)} dimensions; tensors have at most four")
    ne, nb = [n for n, _ in reversed(axes)], [step for _, step in reversed(axes)]
    if a.dtype.block_size > 1 and (nb[0] != a.dtype.type_size or ne[0] % a.dtype.block_size):
        raise _refusal(a, ShapeError, f"the last dimension of {a.dtype.name} must stay: its blocks lie along it")
    rank = len(ne)
    before = a.dtype.type_size
    for i in range(4):  # dimensions of one element get the stride that they would have in a contiguous tensor
        if i >= rank:
            ne.append(1)
            nb.append(before)
        elif nb[i] == 0:
            nb[i] = before
        before = nb[i] * (ne[i] if i or a.dtype.block_size == 1 else ne[0] // a.dtype.block_size)
    n0, n1, n2, n3 = ne
    b0, b1, b2, b3 = nb
    return record_view(VIEW, a, {"offset": offset}, (n0, n1, n2, n3), (b0, b1, b2, b3), rank, offset)


def _refusal(a: Tensor, error: type[GGMLError], text: str) -> Exception:
    return fail(VIEW, (a,), error, f"index: {text}")


def _expanded(a: Tensor, key: Any) -> list[Any]:
    """One key for each dimension of `a`, and the Nones between them."""
    keys = list(cast(tuple[Any, ...], key)) if isinstance(key, tuple) else [key]
    gaps = [i for i, k in enumerate(keys) if k is Ellipsis]
    n = sum(k is not None and k is not Ellipsis for k in keys)
    if len(gaps) > 1:
        raise _refusal(a, ShapeError, "only one ... is possible")
    if n > a.rank:
        raise _refusal(a, ShapeError, f"{n} indices for the {a.rank} dimensions of shape {a.shape}")
    at = gaps[0] if gaps else len(keys)
    return [*keys[:at], *[slice(None)] * (a.rank - n), *keys[at + 1 :]]


def _along(a: Tensor, dim: int, key: Any) -> tuple[int, Axis | None]:
    """Apply `key` to dimension `dim` (ne order). Returns the byte at which the result starts, and the axis that is left
    (None when `key` is a number)."""
    n, nb, axis = a.ne[dim], a.nb[dim], a.rank - 1 - dim
    block = a.dtype.block_size if dim == 0 else 1
    if isinstance(key, slice):
        try:
            start, stop, step = key.indices(n)
            count = len(range(start, stop, step))
        except (TypeError, ValueError) as e:
            raise _refusal(a, ShapeError, f"{key}: {e}") from None
        except Varies:
            start, count, step = _sliced(a, n, axis, cast("slice[Any, Any, Any]", key))
        if step < 0:
            raise _refusal(a, ShapeError, f"the step {step} of axis {axis} is negative: no view goes backwards")
        if not count:
            raise _refusal(a, ShapeError, f"{key} leaves nothing of the {n} elements of axis {axis}")
        if block > 1 and not (divides(block, start, count) and step == 1):
            text = f"axis {axis} of {a.dtype.name} is cut at multiples of its {block} elements a block, not by {key}"
            raise _refusal(a, ShapeError, text)
        return start // block * nb, (count, nb * step)
    try:
        i = as_size(key)
    except TypeError:
        i = None
    if i is None or isinstance(key, bool):
        what = "a tensor" if isinstance(key, Tensor) else f"{key!r:.40}"
        text = f"{what} is no whole number, slice, ... or None (get_rows takes rows by a list of numbers)"
        raise _refusal(a, DTypeError, text)
    if isinstance(i, Size) or isinstance(n, Size):
        i = _within(a, i, n, n - 1, f"axis {axis}")
    elif not -n <= i < n:
        raise _refusal(a, ShapeError, f"{i} is out of range for axis {axis} with {n} elements")
    if block > 1:
        raise _refusal(a, ShapeError, f"the last dimension of {a.dtype.name} must stay: its blocks lie along it")
    return (i + n if i < 0 else i) * nb, None


def _within(a: Tensor, i: int, n: int, last: int, what: str) -> int:
    """`i`, from the end when it is negative, which must be within 0 .. last for every value of the Vars. It is not
    clipped to what there is, as NumPy's slices are."""
    at = i + n if is_count(-i) else i
    if when := below_zero(at) or below_zero(last - at):
        text = f"{i} is out of range for {what} with {n} elements"
        raise _refusal(a, ShapeError, text + f" when {when}" * isinstance(n - at, Size))
    return at


def _sliced(a: Tensor, n: int, axis: int, key: slice[Any, Any, Any]) -> tuple[int, int, int]:
    """The first element, the number of elements and the step of a slice in which Sizes have a part."""
    shown = (
        ":".join("" if end is None else f"{end!s:.40}" for end in (key.start, key.stop, key.step)).rstrip(":") or ":"
    )
    try:
        _, _, step = slice(None, None, key.step).indices(0)
        start, stop = (as_size(default if end is None else end) for default, end in ((0, key.start), (n, key.stop)))
    except (TypeError, ValueError, Varies) as e:
        raise _refusal(a, ShapeError, f"{shown}: {e}") from None
    start, stop = (_within(a, end, n, n, f"a slice of axis {axis}") for end in (start, stop))
    count = stop - start
    if step > 1:
        try:
            count = (count + step - 1) // step
        except Varies as e:
            raise _refusal(a, Varies, f"{shown}: {e}") from None
    if not is_count(count):
        when = f" when {below_zero(count - 1)}" if isinstance(count, Size) else ""
        raise _refusal(a, ShapeError, f"{shown} leaves nothing of the {n} elements of axis {axis}{when}")
    return start, count, step
