"""One record per op, from which all else derives: recording, references, kernels, tests, labels, costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import isfinite, isinf
from numbers import Integral, Real
from struct import Struct
from typing import Any

import numpy as np

from .buffers.overlap import may_overlap, overlaps_itself, same_elements
from .codec import Array
from .dtypes import DType
from .errors import DTypeError, GraphError, ShapeError, explain, integer, user_site
from .tensor import Context, Ne, Tensor, contiguous_nb, rank_of
from .var import NO_VALUE, Size, Varies, as_size

Srcs = Sequence[Tensor | None]
Params = Mapping[str, Any]
DTypeRow = tuple[DType | None, ...]  # one per source role; None: absent

Layout = tuple[DType, Ne, Ne | None, int]  # of a result: type, ne, nb (None: that of what it is written over), rank

OPS: dict[str, OpDef] = {}
_MAX_KNOWN = 4096  # layouts kept of one op


class RuleBroken(Exception):
    """Raised by `rule`; `record` turns it into a ShapeError with op, tensors and the user's line."""


def rule(holds: bool, text: str) -> None:
    """A condition that an op's sources must meet, and its text for the error message."""
    if not holds:
        raise RuleBroken(text)


@dataclass(frozen=True)
class Cost:
    """Work of one node: floating-point operations, bytes read, bytes written."""

    flops: int
    read: int
    written: int


@dataclass(frozen=True)
class OpDef:
    """One op. Making the record defines the op, in this package or in another one; a function of that package then
    records it with `record`. The module that defined an op may define it again, as a notebook does whose cell runs
    twice; two modules cannot. With its reference alone it runs on the backend `ref`. A package of its own adds a kernel
    with `register_kernel`.

    name      ggml's name
    srcs      the roles of its source tensors, in order; a trailing "?" marks a source that may be None
    params    the names of its parameters, in ggml's order. Parameters are finite numbers, except those that `infinite`
              names. `record` keeps integers exact and rounds other numbers to F32, as in ggml; the C kernel gets
              them as doubles in this order
    shape     (sources, parameters) -> ne of the result, checking with `rule`. In this package it looks at the types,
              ne, nb and ranks of the sources alone, so that one answer serves all layers
    dtypes    source types -> result type
    ref       the semantics: (*source arrays, **parameters) -> result array. Arrays are 4-d in NumPy order
              [ne3, ne2, ne1, ne0] (float64 for float and block types, integers as they are, None where absent)
    kernel    stem of the C symbols, None for ops that only make a view
    cost      node -> Cost
    inplace   indices of sources whose memory the result may take over, element by element. A result that is written
              over memory (`writes`, the `_inplace` variants) may share bytes only with these sources, and only as the
              same elements in the same order; any other overlap is refused when the op is recorded
    label     how a graph drawing shows it
    writes    index of the source that the result is a view of (cpy, set_rows); None for other ops
    enums     the parameters that are members of an enumeration; the user gives them by number or by name, in any case
    infinite  the parameters that may be infinite or NaN; `shape` refuses values that make no sense
    host      computes a node in Python, on any backend of the host: (node, its sources, ith, nth), task ith of nth.
              Such an op needs no kernel, and its parameters may be any objects
    ranks     indices of sources: the result has at least as many dimensions as each of them; one element of sources
              that are all of shape () is of that shape, too
    sizes     the parameters that may follow from a Var, because no kernel reads them: `shape` has its ne from them
    """

    name: str
    srcs: tuple[str, ...]
    params: tuple[str, ...]
    shape: Callable[[Srcs, Params], Ne]
    dtypes: Mapping[DTypeRow, DType]
    ref: Callable[..., Array]
    kernel: str | None
    cost: Callable[[Tensor], Cost]
    inplace: tuple[int, ...]
    label: str
    writes: int | None = None
    enums: Mapping[str, type[IntEnum]] = field(default_factory=dict[str, type[IntEnum]])
    ranks: tuple[int, ...] = (0,)
    infinite: tuple[str, ...] = ()
    host: Callable[[Tensor, Srcs, int, int], None] | None = None
    sizes: tuple[str, ...] = ()
    known: dict[Any, Layout] | None = field(init=False, repr=False, compare=False)  # see `_layout`; None: not kept

    def __post_init__(self) -> None:
        before = OPS.get(self.name)
        if before is not None and (_from_here(before) or before.shape.__module__ != self.shape.__module__):
            raise ValueError(f"op {self.name} is defined twice, in {before.shape.__module__} before")
        OPS[self.name] = self
        object.__setattr__(self, "known", {} if self.host is None and _from_here(self) else None)

    def role(self, i: int) -> str:
        return self.srcs[i].rstrip("?")


def _from_here(op: OpDef) -> bool:
    return (op.shape.__module__ or "").startswith("pyggml.ops")  # None: of a snippet that ran by exec


def opdef_of(t: Tensor) -> OpDef:
    """The definition of the op that computes `t` (a node). Raises KeyError for a leaf."""
    return OPS[t.op]


def elementwise_cost(flops_per_element: int) -> Callable[[Tensor], Cost]:
    """Cost of an op that reads each source once and does so many operations per result element."""

    def cost(t: Tensor) -> Cost:
        read = sum(s.n_elements * s.dtype.type_size // s.dtype.block_size for s in t.src if s is not None)
        return Cost(flops_per_element * t.n_elements, read, t.n_elements * t.dtype.type_size // t.dtype.block_size)

    return cost


def fail(op: OpDef, srcs: Srcs, error: type[Exception], text: str) -> Exception:
    """The exception for a broken rule of `op`: names it, its tensors and the user's line."""
    named = [
        (op.role(i) if i < len(op.srcs) else "?", "None" if s is None else s.describe()) for i, s in enumerate(srcs)
    ]
    return error(explain(op.name, text, named, user_site()))


def _check_sources(op: OpDef, srcs: Srcs) -> None:
    for i, (s, role) in enumerate(zip(srcs, op.srcs, strict=False)):
        if s is None and role.endswith("?"):
            continue
        if not isinstance(s, Tensor):
            raise DTypeError(
                explain(op.name, f"{op.role(i)} must be a Tensor, not {type(s).__name__}", [], user_site())
            )


_EXACT = 1 << 53  # integers up to here are doubles
_F32 = Struct("=f")


def _number(x: object) -> bool | int | float | None:
    """`x` as Python's number. None when it is no number, an integer beyond a double, or a fraction beyond F32."""
    if type(x) is int:
        return x if -_EXACT <= x <= _EXACT else None
    if type(x) is float:
        try:
            return _F32.unpack(_F32.pack(x))[0]
        except OverflowError:
            return None
    if isinstance(x, bool) or not isinstance(x, Real):
        return x if isinstance(x, bool) else None
    if isinstance(x, Integral):
        return integer(x) if abs(int(x)) <= _EXACT else None
    try:
        exact = float(x)
    except OverflowError:
        return None
    with np.errstate(over="ignore", under="ignore"):
        n = float(np.float32(exact))
    return None if isinf(n) and not isinf(exact) else n


def _member(kind: type[IntEnum], x: object) -> int | None:
    """The number of a member that is given by number or by name; None when there is no such member."""
    if isinstance(x, str):
        member = kind.__members__.get(x.upper())
        return None if member is None else int(member)
    return next((int(m) for m in kind if isinstance(x, Real) and x == m), None)


def _numbers(op: OpDef, srcs: Srcs, params: Params) -> Params:
    """`params` as Python's numbers. Raises DTypeError when one is no number, ShapeError when one is NaN, infinite or no
    member of its enumeration."""
    out: dict[str, bool | int | float] = {}
    for name, x in params.items():
        kind = op.enums.get(name)
        n = _number(x) if kind is None else _member(kind, x)
        if n is None and isinstance(x, Size):
            if name not in op.sizes:
                raise fail(op, srcs, Varies, f"{name} = {x} {NO_VALUE}")
            out[name] = as_size(x)
            continue
        if n is None and kind is None:
            text = f"{name} must be a number (an integer up to 2^53, or a fraction within F32), not {x!r:.40}"
            raise fail(op, srcs, DTypeError, text)
        if n is None:
            members = ", ".join(f"{int(m)} ({m.name.lower()})" for m in kind or ())
            raise fail(op, srcs, ShapeError, f"{name} must be one of {members}, not {x!r:.40}")
        if not isfinite(n) and name not in op.infinite:
            raise fail(op, srcs, ShapeError, f"{name} must be a finite number, not {n}")
        out[name] = n
    return out


def _check_memory(op: OpDef, srcs: Srcs, target: int) -> None:
    """Check the rule of `OpDef.inplace` for a result that is written over source `target`."""
    base = srcs[target]
    assert base is not None
    if overlaps_itself(base):
        raise fail(op, srcs, ShapeError, f"the result is written over {op.role(target)}, whose elements share bytes")
    for i, s in enumerate(srcs):
        if i == target or s is None or s.root is not base.root or (i in op.inplace and same_elements(s, base)):
            continue
        if may_overlap(s, base):
            text = f"the result is written over {op.role(target)}, which shares bytes with {op.role(i)}"
            raise fail(op, srcs, ShapeError, f"{text}: give it cont({op.role(i)})")


def record(
    op: OpDef,
    srcs: tuple[Tensor | None, ...],
    params: Params,
    *,
    ctx: Context | None = None,
    inplace: int | None = None,
    dtype: DType | None = None,
    rank: int | None = None,
) -> Tensor:
    """Record `op` on `srcs`: check its rules, and return the (not yet computed) result.

    `inplace` names the source whose memory the result shares (the `_inplace` variants). The result belongs to `ctx`,
    else to the open context, else to the context of the first source.
    `dtype` is a result type that the user asks for (cast); the op's `dtypes` rows then end with it. `rank` is the
    number of dimensions when it does not follow from ne and `OpDef.ranks`.
    Raises DTypeError and ShapeError with the op, its tensors, the rule and the user's line.
    """
    _check_sources(op, srcs)
    params = params if op.host is not None or not params else _numbers(op, srcs, params)
    if dtype is not None and not isinstance(dtype, DType):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise fail(op, srcs, DTypeError, f"{dtype!r:.40} is no pyggml.DType")
    target = op.writes if op.writes is not None else inplace
    dtype, ne, nb, own_rank = _layout(op, srcs, params, dtype, target is None)
    if target is None:
        assert nb is not None
        return _new(op, srcs, params, ctx, dtype, ne, nb, own_rank if rank is None else rank, None, 0)
    base = srcs[target]
    assert base is not None
    if base.dtype is not dtype or base.ne != ne:
        raise fail(op, srcs, ShapeError, f"the result ({dtype.name} ne {list(ne)}) does not fit into {op.role(target)}")
    _check_memory(op, srcs, target)
    return _new(op, srcs, params, ctx, dtype, ne, base.nb, base.rank, base.root, base.view_offs)


def _layout(op: OpDef, srcs: Srcs, params: Params, asked: DType | None, own_memory: bool) -> Layout:
    """The layout of the result. Ops of this package remember the layouts for the sources that they have seen."""
    if op.known is None:
        return _new_layout(op, srcs, params, asked, own_memory)
    key: tuple[Any, ...] = (
        *[None if s is None else (s.dtype, s.ne, s.nb, s.rank) for s in srcs],
        *[(type(x), x) for x in params.values()],
        asked,
        own_memory,
    )
    known = op.known.get(key)
    if known is None:
        known = _new_layout(op, srcs, params, asked, own_memory)
        if len(op.known) >= _MAX_KNOWN:
            op.known.clear()
        op.known[key] = known
    return known


def _new_layout(op: OpDef, srcs: Srcs, params: Params, asked: DType | None, own_memory: bool) -> Layout:
    row = tuple([None if s is None else s.dtype for s in srcs])
    row = row if asked is None else (*row, asked)
    try:
        dtype = op.dtypes[row]
    except KeyError:
        raise fail(op, srcs, DTypeError, _at_fault(op, srcs, row)) from None
    try:
        ne = op.shape(srcs, params)
    except RuleBroken as e:
        raise fail(op, srcs, ShapeError, str(e)) from None
    except Varies as e:
        raise fail(op, srcs, Varies, str(e)) from None
    if not own_memory:
        return dtype, ne, None, 0
    try:
        nb = contiguous_nb(dtype, ne)
    except (ShapeError, Varies) as e:
        raise fail(op, srcs, type(e), str(e)) from None
    return dtype, ne, nb, _rank(op, srcs, ne)


def _rank(op: OpDef, srcs: Srcs, ne: Ne) -> int:
    ranks = [s.rank for i in op.ranks if i < len(srcs) and (s := srcs[i]) is not None]
    if ranks and not any(ranks) and ne == (1, 1, 1, 1):
        return 0
    return max([rank_of(ne), *ranks])


def record_view(op: OpDef, a: Tensor, params: Params, ne: Ne, nb: Ne, rank: int, offset: int = 0) -> Tensor:
    """Record a node that only looks at `a`'s memory in another shape, `offset` bytes after `a`'s start."""
    return _new(op, (a,), params, None, a.dtype, ne, nb, rank, a.root, a.view_offs + offset)


def _new(
    op: OpDef,
    srcs: tuple[Tensor | None, ...],
    params: Params,
    ctx: Context | None,
    dtype: DType,
    ne: Ne,
    nb: Ne,
    rank: int,
    view_src: Tensor | None,
    view_offs: int,
) -> Tensor:
    if ctx is not None and not isinstance(ctx, Context):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(explain(op.name, f"ctx must be a Context, not {type(ctx).__name__}", [], user_site()))
    owner = ctx or Context.current() or next((s.ctx for s in srcs if s is not None), None)
    if owner is None:
        raise GraphError(explain(op.name, "needs ctx= or an open Context", [], user_site()))
    t = Tensor(owner, dtype, ne, nb, rank, user_site())
    t.op = op.name
    t.op_params = params
    t.src = srcs
    t.view_src = view_src
    t.view_offs = view_offs
    return owner.adopt(t)


def _at_fault(op: OpDef, srcs: Srcs, row: DTypeRow) -> str:
    """For the message: the first type that does not fit those before it, and the types that would."""
    n = len(row) - 1
    while n and not any(known[:n] == row[:n] for known in op.dtypes):
        n -= 1
    fits = dict.fromkeys(known[n] for known in op.dtypes if len(known) == len(row) and known[:n] == row[:n])
    names = " or ".join(", ".join(map(_name, fits)).rsplit(", ", 1))
    if n == len(srcs):  # the type that the user asks for
        return f"the result cannot be {_name(row[n])} here; it may be {names}"
    beside = ", ".join(f"{op.role(i)} of {_name(row[i])}" for i in range(n))
    return f"{op.role(n)} cannot be {_name(row[n])}{f' beside {beside}' * bool(n)}; it may be {names}"


def _name(t: DType | None) -> str:
    return "None" if t is None else t.name
