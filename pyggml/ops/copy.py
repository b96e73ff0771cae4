"""Copies: the elements of a tensor, in ne order, go into another one, and are converted when the types differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import ops
from ..codec import Array
from ..dtypes import READABLE_BLOCKS, WRITABLE_BLOCKS, DType
from ..opdef import ZERO, Cost, DTypeRow, Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import BF16, F16, F32, I32, I64, given_ne, ne_of, same_shape, src
from ._gradients import as_f32, in_shape, passed

__all__ = [
    "cast",
    "cont",
    "cont_1d",
    "cont_2d",
    "cont_3d",
    "cont_4d",
    "cpy",
    "dup",
    "dup_inplace",
]


PLAIN_TYPES = (F32, F16, BF16, DType.F64, DType.I8, DType.I16, I32, I64)


def _conversions() -> Mapping[DTypeRow, DType]:
    """(from, to) -> to."""
    rows: dict[DTypeRow, DType] = {(a, b): b for a in PLAIN_TYPES for b in PLAIN_TYPES}
    rows |= {(t, t): t for t in READABLE_BLOCKS}
    rows |= {(a, t): t for a in (F32, F16) for t in WRITABLE_BLOCKS}
    rows |= {(t, F32): F32 for t in READABLE_BLOCKS}
    return rows


_CONVERSIONS = _conversions()


def stored_bytes(t: Tensor) -> int:
    """Bytes of the elements of `t` without gaps between them."""
    return t.n_elements // t.dtype.block_size * t.dtype.type_size


def copy_cost(t: Tensor) -> Cost:
    """Cost of an op that moves or converts its first source."""
    a = src(t.src, 0)
    return Cost(0 if a.dtype is t.dtype else t.n_elements, stored_bytes(a), stored_bytes(t))


def _to_integer(a: Array, to: np.dtype[Any]) -> Array:
    """`a` truncated to the integer type `to`. Numbers beyond its range become its least or largest; NaN becomes 0."""
    ends = np.iinfo(to)
    if a.dtype.kind == "i":
        return np.clip(a.astype(np.int64), ends.min, ends.max)
    above, below = a >= 2.0 ** (ends.bits - 1), a <= float(ends.min)
    inside = np.where(above | below | np.isnan(a), 0, a).astype(np.int64)
    return np.where(above, ends.max, np.where(below, ends.min, inside))


def _into_b(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    rule(a.n_elements == b.n_elements, f"a and b must have as many elements, not {a.n_elements} and {b.n_elements}")
    if params["limit"]:
        rule(params["limit"] > 0, f"limit must be positive, or 0, not {params['limit']}")
        fits = a.dtype in (F32, F16, BF16) and b.dtype is not DType.F64
        rule(fits, f"a limit is for F32, F16 and BF16, not {a.dtype.name} to {b.dtype.name}")
    return b.ne


def _cpy_ref(a: Array, b: Array, limit: float) -> Array:
    if limit:
        a = np.clip(np.nan_to_num(a), -limit, limit)
    return np.reshape(_to_integer(a, b.dtype) if b.dtype.kind == "i" else a, b.shape)


def _cast_ref(a: Array, type: int) -> Array:
    np_dtype = DType.from_gguf(type).np_dtype
    return _to_integer(a, np_dtype) if np_dtype is not None and np_dtype.kind == "i" else a


def _new_ne(srcs: Srcs, params: Params) -> Ne:
    ne, n = given_ne(params), src(srcs, 0).n_elements
    rule(ne[0] * ne[1] * ne[2] * ne[3] == n, f"ne {list(ne)} must have as many elements as a, {n}")
    return ne


def _cont_ref(a: Array, ne0: int, ne1: int, ne2: int, ne3: int) -> Array:
    return a.reshape(ne3, ne2, ne1, -1)  # ne0 elements, or the bytes of as many in blocks


def _dup_ref(a: Array) -> Array:
    return a


def _grad_cpy(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a, limit = src(node.src, 0), node.op_params["limit"]

    def of_a() -> Tensor:
        g = in_shape(gy, a)
        return g * (ops.abs(as_f32(a)) <= limit) if limit else g

    return of_a, ZERO


_SAME: Mapping[DTypeRow, DType] = {(t,): t for t in (*PLAIN_TYPES, *READABLE_BLOCKS)}

CPY = OpDef(
    name="cpy",
    srcs=("a", "b"),
    params=("limit",),
    shape=_into_b,
    dtypes=_CONVERSIONS,
    ref=_cpy_ref,
    kernel="cpy",
    cost=copy_cost,
    inplace=(0,),
    label="a -> b",
    writes=1,
    grad=_grad_cpy,
)
CAST = OpDef(
    name="cast",
    srcs=("a",),
    params=("type",),
    shape=same_shape,
    dtypes=_CONVERSIONS,
    ref=_cast_ref,
    kernel="cpy",
    cost=copy_cost,
    inplace=(),
    label="cast(a)",
    grad=passed,
)
CONT = OpDef(
    name="cont",
    srcs=("a",),
    params=("ne0", "ne1", "ne2", "ne3"),
    shape=_new_ne,
    dtypes=_SAME,
    ref=_cont_ref,
    kernel="cpy",
    cost=copy_cost,
    inplace=(),
    label="cont(a)",
    grad=passed,
    sizes=("ne0", "ne1", "ne2", "ne3"),
)
DUP = OpDef(
    name="dup",
    srcs=("a",),
    params=(),
    shape=same_shape,
    dtypes=_SAME,
    ref=_dup_ref,
    kernel="cpy",
    cost=copy_cost,
    inplace=(),
    label="dup(a)",
    grad=passed,
)


def cpy(a: Tensor, b: Tensor, limit: float = 0.0) -> Tensor:
    """Copy the elements of `a` into `b`, in ne order, converted to the type of `b` (ggml_cpy). With a `limit`, floats
    are made finite first: NaN becomes 0, and numbers are clamped to -limit .. limit (limit rounded to f32).

    a, b: equally many elements, any shapes and strides. Types: equal ones; or any two of F32, F16, BF16, F64, I8, I16,
    I32, I64; or F32 or F16 to Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL; or a block type to F32. Conversion to an integer
    truncates and clamps to the type's range; NaN becomes 0. F64 to BF16 is rounded to F32 first. A block with NaN or
    infinities becomes NaN as a whole, here and in `set_rows`.
    Result: a view of `b`, after the copy. Raises ShapeError, also when `a` and `b` share bytes but are not the same
    elements, and DTypeError.
    """
    return record(CPY, (a, b), {"limit": limit})


def cast(a: Tensor, type: DType) -> Tensor:
    """`a` as a new dense tensor of `type`, same shape (ggml_cast). Types as `cpy`. Raises ShapeError, DTypeError."""
    return record(CAST, (a,), {"type": getattr(type, "gguf_id", -1)}, dtype=type)


def _cont(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, rank: int | None = None) -> Tensor:
    return record(CONT, (a,), {"ne0": ne0, "ne1": ne1, "ne2": ne2, "ne3": ne3}, rank=rank)


def cont(a: Tensor) -> Tensor:
    """The elements of `a` lying densely, shape and type of `a` (ggml_cont). Raises DTypeError."""
    return _cont(a, *ne_of(a))


def cont_1d(a: Tensor, ne0: int) -> Tensor:
    """The elements of `a`, in ne order, densely as ne [ne0] (ggml_cont_1d). Raises ShapeError, DTypeError."""
    return _cont(a, ne0, 1, 1, 1, 1)


def cont_2d(a: Tensor, ne0: int, ne1: int) -> Tensor:
    """The elements of `a`, in ne order, densely as ne [ne0, ne1] (ggml_cont_2d). Raises ShapeError, DTypeError."""
    return _cont(a, ne0, ne1, 1, 1, 2)


def cont_3d(a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
    """The elements of `a`, in ne order, densely as ne [ne0, ne1, ne2] (ggml_cont_3d). Raises as `cont_2d`."""
    return _cont(a, ne0, ne1, ne2, 1, 3)


def cont_4d(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
    """The elements of `a`, in ne order, densely as ne [ne0 .. ne3] (ggml_cont_4d). Raises as `cont_2d`."""
    return _cont(a, ne0, ne1, ne2, ne3, 4)


def dup(a: Tensor) -> Tensor:
    """A dense copy of `a` (ggml_dup). Raises DTypeError."""
    return record(DUP, (a,), {})


def dup_inplace(a: Tensor) -> Tensor:
    """`a` itself, as a node (ggml_dup_inplace). Raises DTypeError."""
    return record(DUP, (a,), {}, inplace=0)
