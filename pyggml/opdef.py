"""One record per op, from which all else derives: recording, references, kernels, tests, labels, costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from inspect import signature
from math import isfinite, isinf
from numbers import Integral, Real
from struct import Struct
from types import FrameType, FunctionType
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from .buffers.overlap import may_overlap, overlaps_itself, same_elements
from .codec import Array
from .dtypes import DType
from .errors import DTypeError, GraphError, ShapeError, at_line, explain, integer, user_site
from .hazards import note_store, overwritten
from .tensor import (
    FLAG_AFTER,
    FLAG_INTO,
    FLAG_STORE,
    Context,
    Ne,
    Tensor,
    contiguous_nb,
    dims_of,
    full_ne,
    opened,
    rank_of,
)
from .var import NO_VALUE, Size, Varies, as_size

Srcs = Sequence[Tensor | None]
Params = Mapping[str, Any]
DTypeRow = tuple[DType | None, ...]  # one per source role; None: absent

# Of one source: the gradient itself, a part of it, or a function that records it when it is wanted; ZERO; None: it has
# none.
Gradient: TypeAlias = "Tensor | Part | Zero | Callable[[], Tensor | Part] | None"

Layout = tuple[DType, Ne, Ne | None, int]  # of a result: type, ne, nb (None: that of what it is written over), rank

OPS: dict[str, OpDef] = {}
_MAX_KNOWN = 512  # layouts kept of one op: those of the Vars of a context that is gone are never asked for again


class RuleBroken(Exception):
    """Raised by `rule`; `record` turns it into a ShapeError with op, tensors and the user's line."""


def rule(holds: bool, text: str) -> None:
    """A condition that an op's sources must meet, and its text for the error message."""
    if not holds:
        raise RuleBroken(text)


class Cost(NamedTuple):
    """Work of one node: floating-point operations, bytes read, bytes written."""

    flops: int
    read: int
    written: int


class Zero(Enum):
    """The gradient of a source on which the result does not depend, or depends in steps: nothing is recorded for it."""

    ZERO = 0


ZERO = Zero.ZERO


class Part(NamedTuple):
    """A gradient that is zero except in one region of the source, where it is `g`. The region lies in a dense tensor
    (F32, the source's ne) as that of `gg.acc` does: `offset` bytes after its start, strides nb1, nb2, nb3 in bytes."""

    g: Tensor
    nb1: int
    nb2: int
    nb3: int
    offset: int


@dataclass(frozen=True, eq=False)
class OpDef:
    """One op. Making the record defines the op, in this package or in another one; a function of that package then
    records it with `record`. The module that defined an op may define it again, as a notebook does whose cell runs
    twice; two modules cannot. With its reference alone it runs on the backend `ref`. A package of its own adds a kernel
    with `register_kernel`. Raises GraphError for fields of other types, and for an op that another module has defined.

    name      ggml's name
    srcs      the roles of its source tensors, in order; a trailing "?" marks a source that may be None
    params    the names of its parameters, in ggml's order. Parameters are finite numbers, except those that `infinite`
              names. `record` keeps integers exact and rounds other numbers to F32, as in ggml; the C kernel gets
              them as doubles in this order
    shape     (sources, parameters) -> ne of the result, one to four numbers, checking with `rule`. In this package it
              looks at the types, ne, nb and ranks of the sources alone, so that one answer serves all layers
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
    changes   indices of sources that it writes over besides, in their memory. `ref` of such an op gives a tuple: the
              result, and what these sources become
    enums     the parameters that are members of an enumeration; the user gives them by number or by name, in any case
    infinite  the parameters that may be infinite or NaN; `shape` refuses values that make no sense
    host      computes a node in Python, on any backend of the host: (node, its sources, ith, nth), task ith of nth.
              Such an op needs no kernel, and its parameters may be any objects
    ranks     indices of sources: the result has at least as many dimensions as each of them; one element of sources
              that are all of shape () is of that shape, too
    grad      records the gradients of the sources: (node, gy) -> one entry for each source. `gy` is the gradient of the
              node: F32, with the node's ne, any layout. An entry is a tensor, F32, with the source's ne in any layout;
              or a `Part` of one; or a function without arguments that records either, so that nothing is recorded for
              a source whose gradient nobody wants; or ZERO; or None for a source that has no gradient (indices). An op
              whose `grad` is None has no derivative
    sizes     the parameters that may follow from a Var, because no kernel reads them: `shape` has its ne from them
    """

    name: str
    srcs: tuple[str, ...]
    params: tuple[str, ...]
    shape: Callable[[Srcs, Params], Ne]
    dtypes: Mapping[DTypeRow, DType]
    ref: Callable[..., Array | tuple[Array, ...]]
    kernel: str | None
    cost: Callable[[Tensor], Cost]
    inplace: tuple[int, ...]
    label: str
    writes: int | None = None
    changes: tuple[int, ...] = ()
    enums: Mapping[str, type[IntEnum]] = field(default_factory=dict[str, type[IntEnum]])
    ranks: tuple[int, ...] = (0,)
    infinite: tuple[str, ...] = ()
    host: Callable[[Tensor, Srcs, int, int], None] | None = None
    grad: Callable[[Tensor, Tensor], Sequence[Gradient]] | None = None
    sizes: tuple[str, ...] = ()
    known: dict[Any, Layout] | None = field(init=False, repr=False, compare=False)  # see `_layout`; None: not kept

    def __post_init__(self) -> None:
        if not _from_here(self):
            _check_definition(self)
        before = OPS.get(self.name)
        if before is not None and (_from_here(before) or before.shape.__module__ != self.shape.__module__):
            raise GraphError(f"op {self.name} is defined twice, in {before.shape.__module__} before")
        OPS[self.name] = self
        object.__setattr__(self, "known", {} if self.host is None and _from_here(self) else None)

    def role(self, i: int) -> str:
        return self.srcs[i].rstrip("?")


def _from_here(op: OpDef) -> bool:
    module: object = getattr(op.shape, "__module__", None)  # None: of a snippet that ran by exec
    return str(module).startswith("pyggml.ops")


def _check_definition(op: OpDef) -> None:
    """Raise GraphError for a definition whose fields have other types than `OpDef` says."""
    fields: dict[str, tuple[object, bool, str]] = {
        "name": (op.name, isinstance(op.name, str) and op.name != "", "a name"),  # pyright: ignore[reportUnnecessaryIsInstance]
        "srcs": (op.srcs, _are(str, op.srcs), 'a tuple of names, ("a",)'),
        "params": (op.params, _are(str, op.params), 'a tuple of names, ("eps",)'),
        "inplace": (op.inplace, _are(int, op.inplace), "a tuple of indices of sources, (0,)"),
        "changes": (
            op.changes,
            _are(int, op.changes) and (op.writes is not None or not op.changes),
            "a tuple of indices of sources, (2, 3), of an op that has `writes`",
        ),
        "grad": (op.grad, op.grad is None or callable(op.grad), "a function, or None"),
        "kernel": (op.kernel, op.kernel is None or isinstance(op.kernel, str), "the stem of C symbols"),  # pyright: ignore[reportUnnecessaryIsInstance]
        "dtypes": (op.dtypes, isinstance(op.dtypes, Mapping), "a dict of rows, {(gg.F32,): gg.F32}"),  # pyright: ignore[reportUnnecessaryIsInstance]
        **{
            name: (f, callable(f), "a function")
            for name, f in (("shape", op.shape), ("ref", op.ref), ("cost", op.cost))
        },
    }
    for name, (value, fits, what) in fields.items():
        if not fits:
            raise GraphError(f"op {op.name}: {name} must be {what}, not {value!r:.60}")
    for row, result in op.dtypes.items():
        if not (_are((DType, type(None)), row) and len(row) in (len(op.srcs), len(op.srcs) + 1)):
            roles = ", ".join(op.srcs)
            raise GraphError(
                f"op {op.name}: a row of dtypes is a tuple with a type for each of {roles}, not {row!r:.60}"
            )
        if not isinstance(result, DType):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"op {op.name}: dtypes must give a DType for {row!r:.60}, not {result!r:.60}")


def _are(kind: type | tuple[type, ...], values: object) -> bool:
    return isinstance(values, tuple) and all(isinstance(x, kind) for x in cast("tuple[object, ...]", values))


def written_by(t: Tensor) -> list[Tensor]:
    """The owners of the memory that a node writes over: those of its target and of the sources that it changes."""
    if not t.flags & FLAG_STORE:
        return []
    return [t.root, *[s.root for i in OPS[t.op].changes if (s := t.src[i]) is not None]]


def opdef_of(t: Tensor) -> OpDef:
    """The definition of the op that computes `t` (a node). Raises KeyError for a leaf."""
    return OPS[t.op]


def cost_of(t: Tensor, value: Callable[[int], int]) -> Cost:
    """The cost of a node in numbers: `value` gives the number that is taken for a Size (`largest`, or `int` for what it
    is now). `OpDef.cost` of numbers is fast, and may compare them: which of two Sizes is larger has no answer."""
    if all(s is None or Size not in map(type, (*s.ne, *s.nb)) for s in (t, *t.src)):
        return OPS[t.op].cost(t)
    node = _in_numbers(t, value)
    node.op, node.op_params = t.op, t.op_params
    node.src = tuple([None if s is None else _in_numbers(s, value) for s in t.src])
    return OPS[t.op].cost(node)


def _in_numbers(t: Tensor, value: Callable[[int], int]) -> Tensor:
    """A tensor without memory whose layout is that of `t` in numbers."""
    n0, n1, n2, n3 = [n if type(n) is int else value(n) for n in t.ne]
    b0, b1, b2, b3 = [n if type(n) is int else value(n) for n in t.nb]
    like = Tensor(t.ctx, t.dtype, (n0, n1, n2, n3), (b0, b1, b2, b3), t.rank)
    like.view_src = t.view_src  # an op in place writes less
    return like


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


def _of_definition(op: OpDef, srcs: Srcs, params: Params) -> Params:
    """The parameters in the order of `op.params`. Raises GraphError for sources and parameters that are not those of
    the definition, which is another package's."""
    n = len(op.srcs)
    least = max((i + 1 for i, role in enumerate(op.srcs) if not role.endswith("?")), default=0)
    text = None
    if not isinstance(srcs, tuple):
        text = f"its sources are given as a tuple, (a, b), not as {type(srcs).__name__}"
    elif not least <= len(srcs) <= n:
        text = f"it has {n} sources ({', '.join(op.srcs)}), {len(srcs)} were given"
    elif {*params} != {*op.params}:
        text = f"its parameters are {', '.join(op.params) or 'none'}; given were {', '.join(params) or 'none'}"
    elif op.kernel is None:
        text = "kernel=None is for views: name a kernel (no C function needs to exist for backend='ref')"
    if text is not None:
        raise GraphError(explain(op.name, text, [], user_site()))
    return {name: params[name] for name in op.params}


def _check_sources(op: OpDef, srcs: Srcs) -> bool:
    """Raise DTypeError for a source that is no tensor. Returns whether there are stores into the memory of any."""
    stored = False
    for i, s in enumerate(srcs):
        if isinstance(s, Tensor):
            if (s if s.view_src is None else s.view_src).stores is not None:
                stored = True
        elif i < len(op.srcs) and not (s is None and op.srcs[i][-1] == "?"):
            raise no_tensor(op.name, op.role(i), s)
    return stored


def no_tensor(op: str, role: str, x: object) -> DTypeError:
    """The exception for what stands in the place of a tensor: it shows how the op's function is called."""
    text = f"{role} must be a Tensor, not {type(x).__name__}{_usage()}"
    if isinstance(x, (np.ndarray, list, tuple)):
        text += ". Context.from_numpy makes a tensor of numbers"
    return DTypeError(explain(op, text, [], user_site()))


def _usage() -> str:
    """For messages: the arguments of the function of `pyggml.ops` that was called, if it was one."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    function = None
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("pyggml.ops."):
        function = frame.f_globals.get(frame.f_code.co_name)
        frame = frame.f_back
    if not isinstance(function, FunctionType):
        return ""
    shown = signature(function)
    plain = [p.replace(annotation=p.empty) for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
    return f"; it is called as {function.__name__}{shown.replace(parameters=plain, return_annotation=shown.empty)}"


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
            number = "a number (an integer up to 2^53, or a fraction within F32)"
            given = f"a Tensor{_usage()}" if isinstance(x, Tensor) else f"{x!r:.40}"
            raise fail(op, srcs, DTypeError, f"{name} must be {number}, not {given}")
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
    Raises DTypeError and ShapeError with the op, its tensors, the rule and the user's line; GraphError when a source
    was overwritten by an `_inplace` op (`pyggml.hazards`).
    """
    if op.known is None:
        params = _of_definition(op, srcs, params)
    stored = _check_sources(op, srcs)
    params = params if op.host is not None or not params else _numbers(op, srcs, params)
    if dtype is not None and not isinstance(dtype, DType):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise fail(op, srcs, DTypeError, f"{dtype!r:.40} is no pyggml.DType")
    target = op.writes if op.writes is not None else inplace
    dtype, ne, nb, own_rank = _layout(op, srcs, params, dtype, target is None)
    if target is None:
        assert nb is not None
        t = _new(op, srcs, params, ctx, dtype, ne, nb, own_rank if rank is None else rank, None, 0)
        if stored:
            _check_reads(op, t)
        return t
    base = srcs[target]
    assert base is not None
    if base.dtype is not dtype or base.ne != ne:
        raise fail(op, srcs, ShapeError, f"the result ({dtype.name} ne {list(ne)}) does not fit into {op.role(target)}")
    for i in (target, *op.changes):
        _check_memory(op, srcs, i)
    t = _new(op, srcs, params, ctx, dtype, ne, base.nb, base.rank, base.root, base.view_offs)
    t.flags = FLAG_STORE if op.writes is None else FLAG_STORE | FLAG_INTO
    if stored:
        _check_reads(op, t)
    note_store(t)
    return t


def _check_reads(op: OpDef, t: Tensor) -> None:
    """Raise GraphError when the new node `t` reads what an `_inplace` op has overwritten before, see `hazards`."""
    t.flags |= FLAG_AFTER
    found = overwritten(t)
    if found is not None:
        role, by = op.role(found[0]), found[1]
        text = (
            f"{role} was overwritten by the {by.op} in place{at_line(by.site)} ({by.describe()}): read the result of "
            f"that, or make a copy before it (gg.dup({role})), or put it into a graph before (build_forward_expand)"
        )
        raise fail(op, t.src, GraphError, text)


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
    row = _row(srcs, asked)
    try:
        dtype = op.dtypes[row]
    except KeyError:
        text = f"{_at_fault(op, srcs, row)}{_exchanged(op, srcs, params, asked)}"
        raise fail(op, srcs, DTypeError, text) from None
    try:
        ne = op.shape(srcs, params)
    except RuleBroken as e:
        raise fail(op, srcs, ShapeError, f"{e}{_exchanged(op, srcs, params, asked)}") from None
    except Varies as e:
        raise fail(op, srcs, Varies, str(e)) from None
    if op.known is None:
        ne = full_ne(dims_of(op.name, ne))
    if not own_memory:
        return dtype, ne, None, 0
    try:
        nb = contiguous_nb(dtype, ne)
    except (ShapeError, Varies) as e:
        raise fail(op, srcs, type(e), str(e)) from None
    return dtype, ne, nb, _rank(op, srcs, ne)


def _row(srcs: Srcs, asked: DType | None) -> DTypeRow:
    row = tuple([None if s is None else s.dtype for s in srcs])
    return row if asked is None else (*row, asked)


def _exchanged(op: OpDef, srcs: Srcs, params: Params, asked: DType | None) -> str:
    """For messages: that the first two sources fit in the other order, if they do."""
    a, b, *rest = *srcs, None, None
    other = (b, a, *rest[: len(srcs) - 2])
    if a is None or b is None or _row(other, asked) not in op.dtypes:
        return ""
    with suppress(Exception):  # whatever the rule of another package's op raises
        op.shape(other, params)
        return f". Exchanged they fit: {op.name}({op.role(1)}, {op.role(0)})"
    return ""


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
    owner = ctx
    if owner is None:
        innermost = opened()
        owner = _context_of(op, srcs) if innermost is None else innermost[0]
    t = Tensor(owner, dtype, ne, nb, rank, user_site())
    t.op = op.name
    t.op_params = params
    t.src = srcs
    t.view_src = view_src
    t.view_offs = view_offs
    return owner.note(t)


def _context_of(op: OpDef, srcs: Srcs) -> Context:
    """The context of the first source."""
    for s in srcs:
        if s is not None:
            return s.ctx
    raise GraphError(explain(op.name, "needs ctx= or an open Context", [], user_site()))


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
