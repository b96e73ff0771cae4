"""Ops that overwrite a region of a tensor with another tensor, or add the other tensor to it: set and acc.

The region is like a view of `a`: it has the shape of `b`, begins `offset` bytes after the start of `a`, and its rows
are nb1, its matrices nb2 and its blocks nb3 bytes apart. `a` is contiguous; the region lies within it, on whole
elements, none of them twice. The result is a new tensor, or `a` itself for the `_inplace` variants. All raise
ShapeError and DTypeError.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import ops
from ..codec import Array
from ..opdef import Cost, Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, is_whole, src
from ._gradients import dense, zeros
from .copy import PLAIN_TYPES

__all__ = [
    "acc",
    "acc_inplace",
    "set",
    "set_1d",
    "set_1d_inplace",
    "set_2d",
    "set_2d_inplace",
    "set_inplace",
]


def _shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    size, steps, offset = params["size"], (params["nb1"], params["nb2"], params["nb3"]), params["offset"]
    rule(a.is_contiguous, "a must be contiguous (cont(a) is)")
    bytes_of = (*steps, offset)
    whole = all(is_whole(n, 0) and n % size == 0 for n in bytes_of)
    rule(whole, f"nb1, nb2, nb3 and offset must be multiples of {a.dtype.name}'s {size} bytes, not {list(bytes_of)}")
    end = size
    for step, n in sorted((s, n) for s, n in zip((size, *steps), b.ne, strict=True) if n != 1):
        rule(step >= end, f"elements of b, ne {list(b.ne)}, would fall on each other with nb {[size, *steps]}")
        end += (n - 1) * step
    rule(offset + end <= a.nbytes, f"the region ends at byte {offset + end}, outside a's {a.nbytes} bytes")
    return a.ne


def _places(b: Array, nb1: int, nb2: int, nb3: int, offset: int, size: int) -> Array:
    """For each element of b, which element of a it meets, counted in ne order."""
    n3, n2, n1, n0 = (np.arange(n, dtype=np.int64) for n in b.shape)
    rows = n1[:, None] * nb1 + n2[:, None, None] * nb2 + n3[:, None, None, None] * nb3
    return n0 + (offset + rows) // size


def _set_ref(a: Array, b: Array, **params: int) -> Array:
    y = np.array(a)
    y.reshape(-1)[_places(b, **params)] = b
    return y


def _acc_ref(a: Array, b: Array, **params: int) -> Array:
    y = np.array(a)
    y.reshape(-1)[_places(b, **params)] += b
    return y


def _cost(t: Tensor) -> Cost:
    b = src(t.src, 1)
    whole = 0 if t.view_src is not None else t.nbytes
    return Cost(b.n_elements, whole + b.nbytes, whole + b.nbytes)


def _in_gradient(node: Tensor) -> tuple[int, int, int, int]:
    """nb1, nb2, nb3 and offset of the region in a dense F32 tensor."""
    p = node.op_params
    nb1, nb2, nb3, offset = (p[name] // p["size"] * 4 for name in ("nb1", "nb2", "nb3", "offset"))
    return nb1, nb2, nb3, offset


def _grad_set(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    b = src(node.src, 1)
    return lambda: set(dense(gy), zeros(b), *_in_gradient(node)), _grad_acc(node, gy)[1]


def _grad_acc(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    b = src(node.src, 1)
    return gy, lambda: ops.view_4d(dense(gy), *b.ne, *_in_gradient(node))


_PARAMS = ("nb1", "nb2", "nb3", "offset", "size")
SET = OpDef(
    name="set",
    srcs=("a", "b"),
    params=_PARAMS,
    shape=_shape,
    dtypes={(t, t): t for t in PLAIN_TYPES},
    ref=_set_ref,
    kernel="set",
    cost=_cost,
    inplace=(0,),
    label="a[..] = b",
    grad=_grad_set,
)
ACC = OpDef(
    name="acc",
    srcs=("a", "b"),
    params=_PARAMS,
    shape=_shape,
    dtypes={(F32, F32): F32},
    ref=_acc_ref,
    kernel="acc",
    cost=_cost,
    inplace=(0,),
    label="a[..] += b",
    grad=_grad_acc,
)


def _record(op: OpDef, a: Tensor, b: Tensor, steps: Sequence[int], offset: int, inplace: int | None) -> Tensor:
    """Record the op. `steps`: nb1, nb2, ... as far as they are given; the others are a's own strides."""
    known = isinstance(a, Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]
    nb1, nb2, nb3 = (*steps, *(a.nb if known else (0, 0, 0, 0))[1 + len(steps) :])
    size = a.dtype.type_size if known else 1
    params = {"nb1": nb1, "nb2": nb2, "nb3": nb3, "offset": offset, "size": size}
    return record(op, (a, b), params, inplace=inplace)


def set(a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
    """`a`, and `b` in the region that nb1, nb2, nb3, offset (bytes) give it (ggml_set).

    a, b: one type, no block type; ggml: F32 or I32.
    """
    return _record(SET, a, b, (nb1, nb2, nb3), offset, None)


def set_inplace(a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
    """`set`, written over `a` (ggml_set_inplace)."""
    return _record(SET, a, b, (nb1, nb2, nb3), offset, 0)


def set_1d(a: Tensor, b: Tensor, offset: int) -> Tensor:
    """`a`, and `b` from `offset` bytes on, with the strides of `a` (ggml_set_1d). As `set`."""
    return _record(SET, a, b, (), offset, None)


def set_1d_inplace(a: Tensor, b: Tensor, offset: int) -> Tensor:
    """`set_1d`, written over `a` (ggml_set_1d_inplace)."""
    return _record(SET, a, b, (), offset, 0)


def set_2d(a: Tensor, b: Tensor, nb1: int, offset: int) -> Tensor:
    """`a`, and `b` from `offset` bytes on, its rows nb1 bytes apart (ggml_set_2d). As `set`."""
    return _record(SET, a, b, (nb1,), offset, None)


def set_2d_inplace(a: Tensor, b: Tensor, nb1: int, offset: int) -> Tensor:
    """`set_2d`, written over `a` (ggml_set_2d_inplace)."""
    return _record(SET, a, b, (nb1,), offset, 0)


def acc(a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
    """`a`, with `b` added in the region that nb1, nb2, nb3, offset (bytes) give it (ggml_acc). a, b: F32."""
    return _record(ACC, a, b, (nb1, nb2, nb3), offset, None)


def acc_inplace(a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
    """`acc`, written over `a` (ggml_acc_inplace)."""
    return _record(ACC, a, b, (nb1, nb2, nb3), offset, 0)
