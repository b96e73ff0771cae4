"""NumPy's functions of tensors that are no ufuncs: `np.concatenate([a, b])` records the nodes that compute it. This
module is imported when one of them is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any
from typing import cast as cast_type

import numpy as np

from ..errors import ShapeError, explain, integer, user_site
from ..tensor import Tensor
from ..var import Varies
from . import _ufuncs, compare
from ._axes import permuted, reshaped, transposed
from ._common import BF16, F16, F32
from ._promote import of_one_type
from .copy import cast, cont
from .einsum import einsum
from .reduce import argmax, argsort, cumsum
from .scalar import clamp
from .shape import concat, repeat_4d
from .unary import neg, sqrt

# Functions that tell what a tensor is or what its values are: they get an array of the values.
READING = {
    "allclose",
    "argwhere",
    "array2string",
    "array_equal",
    "array_equiv",
    "array_repr",
    "array_str",
    "atleast_1d",
    "can_cast",
    "copy",
    "empty_like",
    "flatnonzero",
    "full_like",
    "histogram",
    "histogram_bin_edges",
    "iscomplexobj",
    "isclose",
    "isin",
    "isrealobj",
    "may_share_memory",
    "nonzero",
    "ones_like",
    "result_type",
    "save",
    "savetxt",
    "savez",
    "savez_compressed",
    "shares_memory",
    "unique",
    "zeros_like",
}
_READING_ROOMS = ("numpy.linalg", "numpy.fft")

CURES = {  # what to write instead
    "all": "(t != 0).min()",
    "any": "(t != 0).max()",
    "average": "t.mean(axis)",
    "count_nonzero": "(t != 0).sum()",
    "inner": "gg.einsum",
    "outer": "gg.einsum",
    "pad": "gg.pad or gg.pad_ext",
    "repeat": "gg.repeat(t, like)",
    "roll": "gg.roll",
    "round": "gg.round(t), which rounds halves away from 0",
    "sort": "gg.argsort(t) or gg.top_k(t, k)",
    "split": "t[:2] and t[2:]",
    "take": "gg.get_rows(table, ids)",
    "tensordot": "gg.einsum",
    "tile": "gg.repeat(t, like)",
    "tril": "gg.tri(t, 'lower_diag')",
    "triu": "gg.tri(t, 'upper_diag')",
    "vdot": "gg.einsum",
}


def _bad(name: str, rule: str, *tensors: Tensor) -> ShapeError:
    named = [(f"array {i}", f"{t.describe()}, shape {t.shape}") for i, t in enumerate(tensors)]
    return ShapeError(explain(f"np.{name}", rule, named, user_site()))


def _axis(name: str, a: Tensor, axis: Any, rank: int) -> int:
    """`axis`, counted from the first of `rank` dimensions."""
    try:
        i = integer(axis)
    except (TypeError, Varies):
        i = rank
    if not -rank <= i < rank:
        raise _bad(name, f"axis must be a whole number from {-rank} to {rank - 1}, not {axis!r:.40}", a)
    return i % rank


def _axes(name: str, a: Tensor, axes: Any, rank: int) -> list[int]:
    several = cast_type("Iterable[Any]", axes if isinstance(axes, tuple | list) else (axes,))
    return [_axis(name, a, i, rank) for i in several]


# -- shapes -----------------------------------------------------------------------------------------------------------


def _expand_dims(a: Tensor, axis: Any) -> Tensor:
    rank = a.rank + (len(cast_type("Sequence[Any]", axis)) if isinstance(axis, tuple | list) else 1)
    new = _axes("expand_dims", a, axis, rank)
    return a[tuple([None if i in new else slice(None) for i in range(rank)])]


def _squeeze(a: Tensor, axis: Any = None) -> Tensor:
    ones = [i for i, n in enumerate(a.shape) if n == 1]
    gone = ones if axis is None else _axes("squeeze", a, axis, a.rank)
    if not {*gone} <= {*ones}:
        raise _bad("squeeze", f"axis {axis} has more than one element", a)
    return reshaped(a, *[n for i, n in enumerate(a.shape) if i not in gone])


def _moveaxis(a: Tensor, source: Any, destination: Any) -> Tensor:
    sources = _axes("moveaxis", a, source, a.rank)
    order = [i for i in range(a.rank) if i not in sources]
    for place, i in sorted(zip(_axes("moveaxis", a, destination, a.rank), sources, strict=True)):
        order.insert(place, i)
    return permuted(a, *order)


def _swapaxes(a: Tensor, axis1: int, axis2: int) -> Tensor:
    order = [*range(a.rank)]
    i, j = _axis("swapaxes", a, axis1, a.rank), _axis("swapaxes", a, axis2, a.rank)
    order[i], order[j] = j, i
    return permuted(a, *order)


def _broadcast_to(array: Tensor, shape: Any) -> Tensor:
    to = tuple(shape) if hasattr(shape, "__iter__") else (shape,)
    own = (1,) * (len(to) - array.rank) + array.shape
    if len(own) > min(len(to), 4) or any(n not in (1, m) for n, m in zip(own, to, strict=True)):
        raise _bad("broadcast_to", f"it does not broadcast to {to}", array)
    if own == to:
        return reshaped(array, *to)
    return reshaped(repeat_4d(array, *(*to[::-1], *(1,) * (4 - len(to)))), *to)


# -- several arrays ---------------------------------------------------------------------------------------------------


def _joined(name: str, tensors: list[Tensor], axis: Any) -> Tensor:
    if axis is None:
        tensors, axis = [reshaped(t, -1) for t in tensors], 0
    if len({t.rank for t in tensors}) > 1 or not tensors[0].rank:
        raise _bad(name, "arrays must have as many dimensions as each other, at least one", *tensors)
    dim = tensors[0].rank - 1 - _axis(name, tensors[0], axis, tensors[0].rank)
    if len(tensors) == 1:
        return cont(tensors[0])  # as in NumPy, a tensor of its own
    while len(tensors) > 1:  # in pairs, so that elements are copied a few times and not once for each tensor
        last = tensors[len(tensors) & ~1 :]
        tensors = [concat(a, b, dim) for a, b in zip(tensors[::2], tensors[1::2], strict=False)] + last
    return tensors[0]


def _concatenate(arrays: Sequence[Any], axis: Any = 0) -> Tensor:
    return _joined("concatenate", of_one_type("np.concatenate", *arrays), axis)


def _stack(arrays: Sequence[Any], axis: Any = 0) -> Tensor:
    return _joined("stack", [_expand_dims(t, axis) for t in of_one_type("np.stack", *arrays)], axis)


def _vstack(tup: Sequence[Any]) -> Tensor:
    return _joined("vstack", [t if t.rank > 1 else reshaped(t, 1, -1) for t in of_one_type("np.vstack", *tup)], 0)


def _hstack(tup: Sequence[Any]) -> Tensor:
    tensors = [t if t.rank else reshaped(t, 1) for t in of_one_type("np.hstack", *tup)]
    return _joined("hstack", tensors, 0 if tensors[0].rank == 1 else 1)


def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None or y is None:
        return np.where(_values(condition))
    return compare.where(condition, x, y)


def _clip(a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low, high = a_min if min is None else min, a_max if max is None else max
    if isinstance(a, Tensor) and a.dtype is F32 and isinstance(low, int | float) and isinstance(high, int | float):
        return clamp(a, low, high)
    if low is None and high is None and isinstance(a, Tensor):
        return cont(a)
    a = a if low is None else compare.maximum(a, low)
    return a if high is None else compare.minimum(a, high)


def _dot(a: Any, b: Any) -> Any:
    x, y = of_one_type("np.dot", a, b)
    if 0 in (x.rank, y.rank):
        return x * y
    if max(x.rank, y.rank) > 2:
        raise _bad("dot", "arrays of up to two dimensions; a @ b and gg.einsum take more", x, y)
    return x @ y


def _einsum(subscripts: str, *operands: Any) -> Tensor:
    return einsum(subscripts, *operands)


# -- along an axis ----------------------------------------------------------------------------------------------------


def _f32(a: Tensor) -> Tensor:
    return cast(a, F32) if a.dtype in (F16, BF16) else a


def _along(name: str, op: Callable[[Tensor], Tensor], a: Tensor, axis: Any) -> Tensor:
    """Apply `op`, which makes a row of each row, along an axis; None: to all elements in one dimension."""
    rows = _f32(reshaped(a, -1) if axis is None else _swapaxes(a, axis, -1))
    y = op(rows if rows.is_contiguous else cont(rows))
    return y if axis is None else _swapaxes(y, axis, -1)


def _argsort(a: Tensor, axis: Any = -1) -> Tensor:
    return _along("argsort", argsort, a, axis)


def _cumsum(a: Tensor, axis: Any = None) -> Tensor:
    return _along("cumsum", cumsum, a, axis)


def _argmax(a: Tensor, axis: Any = None) -> Tensor:
    if axis is None:
        return reshaped(argmax(_f32(reshaped(a, 1, -1))))
    i = _axis("argmax", a, axis, a.rank)
    rows = reshaped(_moveaxis(a, i, -1), -1, a.shape[i])
    return reshaped(argmax(_f32(rows)), *a.shape[:i], *a.shape[i + 1 :])


def _argmin(a: Tensor, axis: Any = None) -> Tensor:
    return _argmax(neg(a), axis)


def _std(a: Tensor, *args: Any, **options: Any) -> Tensor:
    return sqrt(a.var(*args, **options))


def _reshape(a: Tensor, shape: Any, order: str = "C") -> Tensor:
    return a.reshape(shape, order=order)


def _ndim(a: Tensor) -> int:
    return a.rank


def _shape(a: Tensor) -> tuple[int, ...]:
    return a.shape


def _size(a: Tensor) -> int:
    return a.n_elements


RECORDED: dict[str, Callable[..., Any]] = {
    "amax": Tensor.max,
    "amin": Tensor.min,
    "argmax": _argmax,
    "argmin": _argmin,
    "argsort": _argsort,
    "broadcast_to": _broadcast_to,
    "clip": _clip,
    "concatenate": _concatenate,
    "cumsum": _cumsum,
    "dot": _dot,
    "einsum": _einsum,
    "expand_dims": _expand_dims,
    "hstack": _hstack,
    "max": Tensor.max,
    "mean": Tensor.mean,
    "min": Tensor.min,
    "moveaxis": _moveaxis,
    "ndim": _ndim,
    "ravel": Tensor.flatten,
    "reshape": _reshape,
    "shape": _shape,
    "size": _size,
    "squeeze": _squeeze,
    "stack": _stack,
    "std": _std,
    "sum": Tensor.sum,
    "swapaxes": _swapaxes,
    "transpose": transposed,
    "var": Tensor.var,
    "vstack": _vstack,
    "where": _where,
}


def _values(x: Any) -> Any:
    """`x` with arrays in place of tensors."""
    if isinstance(x, Tensor):
        return np.asarray(x)
    if not isinstance(x, list | tuple):
        return x
    items = [_values(item) for item in cast_type("Sequence[Any]", x)]
    return items if isinstance(x, list) else tuple(items)


def call(function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Record the nodes of `np.function(*args, **options)`, or call it with the values of the tensors when it looks at
    them. Raises DTypeError when there is no op for it."""
    name = function.__name__
    if name in READING or function.__module__.startswith(_READING_ROOMS):
        return function(*_values([*args]), **{key: _values(value) for key, value in options.items()})
    if name not in RECORDED or function.__module__ != "numpy":
        _ufuncs.refuse(name, _ufuncs.not_recorded(name, CURES.get(name, "")), args)
    recorded = RECORDED[name]
    try:
        signature(recorded).bind(*args, **options)
    except TypeError as e:
        _ufuncs.refuse(name, f"{e}; a node is a new tensor, and t.astype(dtype) converts", args)
    return recorded(*args, **options)
