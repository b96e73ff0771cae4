"""One record per op, from which all else derives: recording, references, kernels, tests, labels, costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .codec import Array
from .dtypes import DType
from .errors import DTypeError, GraphError, ShapeError, explain, user_site
from .tensor import Context, Ne, Offset, Tensor, contiguous_nb, rank_of

Srcs = Sequence[Tensor | None]
Params = Mapping[str, Any]
DTypeRow = tuple[DType | None, ...]  # one per source role; None: absent

OPS: dict[str, OpDef] = {}


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
    """One op.

    name      ggml's name
    srcs      the roles of its source tensors, in order; a trailing "?" marks one that may be None
    params    the names of its parameters, in ggml's order (numbers; the C kernel gets them as doubles in this order)
    shape     (sources, parameters) -> ne of the result, checking with `rule`
    dtypes    source types -> result type
    ref       the semantics: (*source arrays, **parameters) -> result array. Arrays are 4-d in NumPy order
              [ne3, ne2, ne1, ne0] (float64 for float and block types, integers as they are, None where absent)
    kernel    stem of the C symbols, None for ops that only make a view
    cost      node -> Cost
    inplace   indices of sources whose memory the result may take over
    label     how a graph drawing shows it
    writes    index of the source that the result is a view of (cpy, set_rows), None for the rest
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

    def __post_init__(self) -> None:
        if self.name in OPS:
            raise ValueError(f"op {self.name} is defined twice")
        OPS[self.name] = self

    def role(self, i: int) -> str:
        return self.srcs[i].rstrip("?")


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
    for i, role in enumerate(op.srcs):
        s = srcs[i]
        if s is None and role.endswith("?"):
            continue
        if not isinstance(s, Tensor):
            raise DTypeError(
                explain(op.name, f"{op.role(i)} must be a Tensor, not {type(s).__name__}", [], user_site())
            )


def record(
    op: OpDef,
    srcs: tuple[Tensor | None, ...],
    params: Params,
    *,
    ctx: Context | None = None,
    inplace: int | None = None,
    dtype: DType | None = None,
) -> Tensor:
    """Record `op` on `srcs`: check its rules, and return the (not yet computed) result.

    `inplace` names the source whose memory the result shares (the `_inplace` variants). The result belongs to `ctx`,
    else to the open context, else to the context of the first source.
    `dtype` is a result type that the user asks for (cast); the op's `dtypes` rows then end with it.
    Raises DTypeError and ShapeError with the op, its tensors, the rule and the user's line.
    """
    _check_sources(op, srcs)
    try:
        row = tuple([None if s is None else s.dtype for s in srcs])
        dtype = op.dtypes[row if dtype is None else (*row, dtype)]
    except KeyError:
        raise fail(op, srcs, DTypeError, "no such combination of types" + _near(op, srcs)) from None
    try:
        ne = op.shape(srcs, params)
    except RuleBroken as e:
        raise fail(op, srcs, ShapeError, str(e)) from None
    target = op.writes if op.writes is not None else inplace
    if target is None:
        try:
            nb = contiguous_nb(dtype, ne)
        except ShapeError as e:
            raise fail(op, srcs, ShapeError, str(e)) from None
        return _new(op, srcs, params, ctx, dtype, ne, nb, rank_of(ne), None, 0)
    base = srcs[target]
    assert base is not None
    if base.dtype is not dtype or base.ne != ne:
        raise fail(op, srcs, ShapeError, f"the result ({dtype.name} ne {list(ne)}) does not fit into {op.role(target)}")
    return _new(op, srcs, params, ctx, dtype, ne, base.nb, base.rank, base.root, base.view_offs)


def record_view(op: OpDef, a: Tensor, params: Params, ne: Ne, nb: Ne, rank: int, offset: int | Offset = 0) -> Tensor:
    """Record a node that only looks at `a`'s memory in another shape, `offset` bytes after `a`'s start."""
    start = a.view_offs + offset if isinstance(offset, int) else offset + _constant(op, a)
    return _new(op, (a,), params, None, a.dtype, ne, nb, rank, a.root, start)


def _constant(op: OpDef, a: Tensor) -> int:
    """The fixed offset of `a`; an offset can depend on one variable only."""
    if isinstance(a.view_offs, Offset):
        raise fail(op, (a,), GraphError, "a view with a variable offset has one already")
    return a.view_offs


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
    view_offs: int | Offset,
) -> Tensor:
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


def _near(op: OpDef, srcs: Srcs) -> str:
    """The types that would fit the first source, for the message."""
    first = srcs[0].dtype if srcs and srcs[0] is not None else None
    rows = [row for row in op.dtypes if row and row[0] is first] or list(op.dtypes)
    shown = "; ".join(", ".join("-" if t is None else t.name for t in row) for row in rows[:4])
    return f" (it takes {shown}{' ...' if len(rows) > 4 else ''})"
