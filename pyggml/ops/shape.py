"""New tensors made of smaller ones: repeat, concat, pad; and arange, made of none."""

from __future__ import annotations

from math import ceil, isfinite

import numpy as np

from ..codec import Array
from ..opdef import Cost, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Context, Ne, Tensor
from ._common import F32, can_repeat, given_ne, is_number, is_whole, src
from .copy import PLAIN_TYPES

__all__ = [
    "arange",
    "concat",
    "pad",
    "repeat",
    "repeat_4d",
]


def _repeat_shape(srcs: Srcs, params: Params) -> Ne:
    a, ne = src(srcs, 0), given_ne(params)
    rule(can_repeat(a.ne, ne), f"each of a's ne {list(a.ne)} must divide that of the result, {list(ne)}")
    return ne


def _repeat_ref(a: Array, ne0: int, ne1: int, ne2: int, ne3: int) -> Array:
    return np.tile(a, [n // m for n, m in zip((ne3, ne2, ne1, ne0), a.shape, strict=True)])


def _concat_shape(srcs: Srcs, params: Params) -> Ne:
    a, b, dim = src(srcs, 0), src(srcs, 1), params["dim"]
    rule(dim in (0, 1, 2, 3), f"dim must be 0, 1, 2 or 3, not {dim}")
    n = [a.ne[i] + b.ne[i] if i == dim else a.ne[i] for i in range(4)]
    rule(all(i == dim or a.ne[i] == b.ne[i] for i in range(4)), f"a and b may differ only in dimension {dim}")
    return (n[0], n[1], n[2], n[3])


def _concat_ref(a: Array, b: Array, dim: int) -> Array:
    return np.concatenate([a, b], axis=3 - dim)


def _pad_shape(srcs: Srcs, params: Params) -> Ne:
    p = tuple(params.values())
    rule(all(is_whole(n, 0) for n in p), f"p must be whole numbers from 0, not {list(p)}")
    ne = src(srcs, 0).ne
    return (ne[0] + int(p[0]), ne[1] + int(p[1]), ne[2] + int(p[2]), ne[3] + int(p[3]))


def _pad_ref(a: Array, p0: int, p1: int, p2: int, p3: int) -> Array:
    return np.pad(a, [(0, p3), (0, p2), (0, p1), (0, p0)])


def _arange_n(start: float, stop: float, step: float) -> int:
    finite = all(is_number(x) and isfinite(x) for x in (start, stop, step))
    rule(finite, f"start, stop and step must be finite numbers, not {start}, {stop}, {step}")
    rule(step != 0 and (stop - start) / step > 0, f"step {step} must lead from start {start} towards stop {stop}")
    return ceil((stop - start) / step)


def _arange_shape(srcs: Srcs, params: Params) -> Ne:
    return (_arange_n(params["start"], params["stop"], params["step"]), 1, 1, 1)


def _arange_ref(start: float, stop: float, step: float) -> Array:
    return start + step * np.arange(_arange_n(start, stop, step), dtype=np.float64)


def _write_cost(t: Tensor) -> Cost:
    return Cost(2 * t.n_elements, 0, t.nbytes)


REPEAT = OpDef(
    name="repeat",
    srcs=("a",),
    params=("ne0", "ne1", "ne2", "ne3"),
    shape=_repeat_shape,
    dtypes={(t,): t for t in PLAIN_TYPES},
    ref=_repeat_ref,
    kernel="repeat",
    cost=elementwise_cost(0),
    inplace=(),
    label="repeat(a)",
)
CONCAT = OpDef(
    name="concat",
    srcs=("a", "b"),
    params=("dim",),
    shape=_concat_shape,
    dtypes={(t, t): t for t in PLAIN_TYPES},
    ref=_concat_ref,
    kernel="concat",
    cost=elementwise_cost(0),
    inplace=(),
    label="concat(a, b)",
)
PAD = OpDef(
    name="pad",
    srcs=("a",),
    params=("p0", "p1", "p2", "p3"),
    shape=_pad_shape,
    dtypes={(F32,): F32},
    ref=_pad_ref,
    kernel="pad",
    cost=elementwise_cost(0),
    inplace=(),
    label="pad(a)",
)
ARANGE = OpDef(
    name="arange",
    srcs=(),
    params=("start", "stop", "step"),
    shape=_arange_shape,
    dtypes={(): F32},
    ref=_arange_ref,
    kernel="arange",
    cost=_write_cost,
    inplace=(),
    label="arange",
)


def repeat(a: Tensor, b: Tensor) -> Tensor:
    """`a` repeated whole times to the shape of `b`, of which only the shape matters (ggml_repeat).

    a: any type but block types, each ne divides b's. Result: ne of `b`, type of `a`. Raises ShapeError, DTypeError.
    """
    ne = b.ne if isinstance(b, Tensor) else (0, 0, 0, 0)  # pyright: ignore[reportUnnecessaryIsInstance]
    return repeat_4d(a, *ne)


def repeat_4d(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
    """`a` repeated whole times to ne [ne0 .. ne3] (ggml_repeat_4d). As `repeat`."""
    return record(REPEAT, (a,), {"ne0": ne0, "ne1": ne1, "ne2": ne2, "ne3": ne3})


def concat(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """`a`, and `b` after it along dimension `dim` in ne order, 0 to 3 (ggml_concat).

    a, b: one type, no block type; ne equal but for `dim`. Result: ne[dim] is the sum. Raises ShapeError, DTypeError.
    """
    return record(CONCAT, (a, b), {"dim": dim})


def pad(a: Tensor, p0: int, p1: int, p2: int, p3: int) -> Tensor:
    """`a` with p_i zeros at the end of dimension i (ggml_pad). a: F32. Raises ShapeError, DTypeError."""
    return record(PAD, (a,), {"p0": p0, "p1": p1, "p2": p2, "p3": p3})


def arange(start: float, stop: float, step: float, ctx: Context | None = None) -> Tensor:
    """start, start + step ... before `stop`: ceil((stop - start) / step) elements, F32 (ggml_arange).

    It belongs to `ctx`, else to the open context (GraphError where there is none). Raises ShapeError.
    """
    return record(ARANGE, (), {"start": start, "stop": stop, "step": step}, ctx=ctx)
