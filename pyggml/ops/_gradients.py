"""What the gradients of several families of ops are made of.

Gradients are recorded with ops of all families. Those are looked up in the package when a gradient is recorded (`from
.. import ops`), as families need each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import numpy as np

from .. import ops
from ..codec import Array
from ..opdef import ZERO, Gradient, Srcs
from ..tensor import Context, Ne, Tensor
from ._common import F32


def as_f32(t: Tensor) -> Tensor:
    """`t` in F32, the type of gradients and of what they are computed from."""
    return t if t.dtype is F32 else ops.cast(t, F32)


def dense(t: Tensor) -> Tensor:
    """`t` itself where it is contiguous, else a copy."""
    return t if t.is_contiguous else ops.cont(t)


def dense_rows(t: Tensor) -> Tensor:
    """`t` itself where its rows are dense, else a copy."""
    return t if t.ne[0] == 1 or t.nb[0] == t.dtype.type_size else ops.cont(t)


def in_shape(g: Tensor, a: Tensor) -> Tensor:
    """The elements of `g` in the shape of `a`."""
    return g if g.ne == a.ne else ops.reshape(dense(g), a)


def summed(g: Tensor, a: Tensor | Ne) -> Tensor:
    """`g` summed to the shape of `a`, which was repeated to that of `g`."""
    return g if g.ne == (a.ne if isinstance(a, Tensor) else a) else ops.repeat_back(g, a)


def summed_to_mask(g: Tensor, mask: Tensor) -> Tensor:
    """The gradient `g` of scores as that of the mask that was added to them, which repeats and may have more rows."""
    from .pad import pad  # which imports this module

    m, rows = mask.ne, g.ne[1]
    g = summed(g, (m[0], rows, m[2], m[3]))
    return g if m[1] == rows else pad(g, 0, m[1] - rows, 0, 0)


def spread(g: Tensor, a: Tensor) -> Tensor:
    """`g` repeated to the shape of `a`."""
    return g if g.ne == a.ne else ops.repeat(g, a)


def constant(values: object, beside: Tensor) -> Tensor:
    """A leaf with these values, in the context of the nodes that are recorded next."""
    return (Context.current() or beside.ctx).from_numpy(np.asarray(values))


def zeros(a: Tensor) -> Tensor:
    """Zeros in the shape of `a`, in F32."""
    return ops.repeat_4d(constant(np.zeros(1, np.float32), a), *a.ne)


def steps(node: Tensor, gy: Tensor) -> tuple[Gradient, ...]:
    """The gradients of an op whose result changes in steps: 0."""
    return tuple(None if s is None else ZERO for s in node.src)


def passed(node: Tensor, gy: Tensor) -> tuple[Gradient, ...]:
    """The gradient of an op that moves its only source, in order, to where it is dense or of another shape or type."""
    a = node.src[0]
    assert a is not None
    return (lambda: in_shape(gy, a),)


def taken(g: Tensor, dim: int, index: Array, n: int) -> Tensor:
    """The gradient of a tensor with `n` elements along `dim`, from which an op has taken those with these indices, any
    of them more than once."""
    below, above = prod(g.ne[:dim]), prod(g.ne[dim + 1 :])
    rows = ops.reshape_3d(dense(g), below, g.ne[dim], above)
    ids = ops.repeat_4d(constant(index.astype(np.int32), g), g.ne[dim], above, 1, 1)
    y = ops.get_rows_back(rows, ids, (below, n, above))
    return ops.reshape_4d(y, *(n if i == dim else m for i, m in enumerate(g.ne)))


def part(row: Tensor, like: Tensor, first: int) -> Tensor:
    """The elements of a row from `first` on, in the shape of `like`."""
    n0, n1, n2, _ = like.ne
    return ops.view_4d(row, *like.ne, 4 * n0, 4 * n0 * n1, 4 * n0 * n1 * n2, 4 * first)


def packed(compute: Callable[[], Tensor], sources: Srcs) -> Sequence[Gradient]:
    """The gradients of all F32 sources, parts of one row in which they are one after the other. `compute` records that
    row, when the first of them is wanted."""
    row: list[Tensor] = []

    def of(s: Tensor, first: int) -> Tensor:
        if not row:
            row.append(compute())
        return part(row[0], s, first)

    gradients: list[Gradient] = []
    first = 0
    for s in sources:
        if s is None or s.dtype is not F32:
            gradients.append(None)
        else:
            gradients.append(partial(of, s, first))
            first += s.n_elements
    return gradients
