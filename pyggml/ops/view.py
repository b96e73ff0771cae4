"""Other views of the same memory: reshape, view, permute, transpose. They record a node and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from .. import ops
from ..codec import Array
from ..dtypes import DType
from ..errors import GraphError, ShapeError, explain
from ..opdef import Cost, Gradient, OpDef, Params, Part, Srcs, fail, no_tensor, record_view
from ..tensor import Ne, Size, Tensor, contiguous_nb, not_counts
from ..var import as_size, below_zero, bounds, divides, is_count, largest
from ._common import same_shape, src
from ._gradients import constant, dense, passed

__all__ = [
    "permute",
    "reshape",
    "reshape_1d",
    "reshape_2d",
    "reshape_3d",
    "reshape_4d",
    "transpose",
    "view_1d",
    "view_2d",
    "view_3d",
    "view_4d",
]


def _unused(a: Array, **params: object) -> Array:
    """Never called: a backend finds the values of a view in its memory."""
    return a


def _nothing(t: Tensor) -> Cost:
    return Cost(0, 0, 0)


def _grad_permuted(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    axes: Sequence[int] = node.op_params.get("axes", (1, 0, 2, 3))
    back = [axes.index(i) for i in range(4)]  # gy's dimension axes[i] becomes dimension i
    return (lambda: permute(gy, *back),)


def _grad_view(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    return (lambda: _placed(node, gy, src(node.src, 0)),)


def _placed(node: Tensor, gy: Tensor, a: Tensor) -> Part | Tensor:
    """The gradient `gy` of a view of `a`, at its place in `a`. Elements that the view has more than once are added."""
    if isinstance(node.view_offs, Size) or isinstance(a.view_offs, Size):
        raise fail(VIEW, (a,), GraphError, "a view at an offset with a Var has no gradient")
    size, start, steps = a.dtype.type_size, node.view_offs - a.view_offs, list(node.nb)
    if any(n > 1 and step == 0 for n, step in zip(node.ne, steps, strict=True)):
        ne = [n if step else 1 for n, step in zip(node.ne, steps, strict=True)]
        gy = ops.repeat_back(gy, ne)
    # A region has no stride along dimension 0: that is the densest one, or one of one element.
    long = sorted((i for i in range(4) if gy.ne[i] > 1), key=lambda i: steps[i])
    short = [i for i in range(4) if gy.ne[i] == 1]
    order = [*long, *short] if long and steps[long[0]] == size else [*short[:1], *long, *short[1:]]
    ends = [size, *[gy.ne[i] * steps[i] for i in long]]
    apart = all(steps[i] >= end for i, end in zip(long, ends, strict=False))
    inside = a.is_contiguous and start >= 0 and start + node.nbytes <= a.nbytes
    if inside and apart and (gy.ne[order[0]] == 1 or steps[order[0]] == size):
        g = gy if order == [0, 1, 2, 3] else permute(gy, *[order.index(i) for i in range(4)])
        nb1, nb2, nb3 = (steps[i] // size * 4 for i in order[1:])
        return Part(g, nb1, nb2, nb3, start // size * 4)
    places = _places(node, a, steps, gy.ne)
    g = ops.get_rows_back(reshape_2d(dense(gy), 1, gy.n_elements), constant(places, a), (1, a.n_elements, 1, 1))
    return reshape(g, a)


def _places(node: Tensor, a: Tensor, steps: Sequence[int], ne: Ne) -> Array:
    """For each element of a view, which element of `a` it is, counted in ne order."""

    def addresses(ne: Ne, nb: Sequence[int], offset: int) -> Array:
        at = [np.arange(n, dtype=np.int64) * step for n, step in zip(ne, nb, strict=True)]
        return (offset + at[3][:, None, None, None] + at[2][:, None, None] + at[1][:, None] + at[0]).reshape(-1)

    known, index = np.unique(addresses(a.ne, a.nb, a.view_offs), return_index=True)
    wanted = addresses(ne, steps, node.view_offs)
    at = np.searchsorted(known, wanted).clip(max=len(known) - 1)
    if not np.array_equal(known[at], wanted):
        text = "the view has elements that are none of a's, which have no gradient here: view a dense tensor"
        raise GraphError(explain(VIEW.name, text, [("view", node.describe()), ("a", a.describe())], node.site))
    return index[at].astype(np.int32)


def _define(
    name: str, params: tuple[str, ...], label: str, grad: Callable[[Tensor, Tensor], Sequence[Gradient]]
) -> OpDef:
    return OpDef(
        name=name,
        srcs=("a",),
        params=params,
        shape=same_shape,  # not called: the functions below find shape and strides themselves
        dtypes={(t,): t for t in DType},
        ref=_unused,
        kernel=None,
        cost=_nothing,
        inplace=(),
        label=label,
        grad=grad,
    )


RESHAPE = _define("reshape", (), "reshape(a)", passed)
VIEW = _define("view", ("offset",), "view(a)", _grad_view)
PERMUTE = _define("permute", ("axes",), "permute(a)", _grad_permuted)
TRANSPOSE = _define("transpose", (), "transpose(a)", _grad_permuted)

_NO_PARAMS: Params = {}
_MAX_STRIDE = 2**63 - 1
_MAX_ELEMENTS = 2**53  # strides of 0 take no memory: kernels count elements, and a thread's share of them, in 63 bits


def _tensor(op: OpDef, a: Tensor, role: str = "a") -> Srcs:
    if not isinstance(a, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise no_tensor(op.name, role, a)
    return (a,)


def _whole(op: OpDef, a: Tensor, what: str, numbers: Sequence[int], least: int) -> tuple[int, ...]:
    """`numbers` as a tuple of ints of at least `least` (0 or 1)."""
    t: tuple[int, ...] = tuple(numbers)
    if {*map(type, t)} == {int} and min(t) >= least:
        return t
    with suppress(TypeError):
        t = tuple(map(as_size, t))
        if all(map(is_count, t)) if least else all(bounds(n)[0] >= 0 for n in t):
            return t
    negative = [(n, below_zero(n)) for n in t if not least and isinstance(n, Size)]
    why = (not_counts(t) if least else "") + "".join(f" ({n} is negative for {when})" for n, when in negative if when)
    raise fail(op, (a,), ShapeError, f"{what} must be whole numbers from {least}, not {list(numbers)!r:.60}{why}")


# -- reshape ------------------------------------------------------------------------------------------------------


def _reshape(a: Tensor, dims: tuple[int, ...]) -> Tensor:
    srcs = _tensor(RESHAPE, a)
    n0, n1, n2, n3 = (*_whole(RESHAPE, a, "ne", dims, 1), 1, 1, 1, 1)[:4]
    ne: Ne = (n0, n1, n2, n3)
    if n0 * n1 * n2 * n3 != a.n_elements:
        raise fail(RESHAPE, srcs, ShapeError, f"ne {list(ne)} must have as many elements as a")
    if not a.is_contiguous:
        raise fail(RESHAPE, srcs, ShapeError, "a must be contiguous (cont(a) is)")
    try:
        nb = contiguous_nb(a.dtype, ne)
    except ShapeError as e:
        raise fail(RESHAPE, srcs, ShapeError, str(e)) from None
    return record_view(RESHAPE, a, _NO_PARAMS, ne, nb, len(dims))


def reshape(a: Tensor, b: Tensor) -> Tensor:
    """The elements of `a` in the shape of `b` (ggml_reshape); only the shape of `b` matters.

    a: contiguous, as many elements as `b`, any type. Result: ne of `b`, a view of `a`.
    Raises ShapeError.
    """
    _tensor(RESHAPE, b, "b")
    return _reshape(a, b.ne[: b.rank])


def reshape_1d(a: Tensor, ne0: int) -> Tensor:
    """The elements of `a` as ne [ne0] (ggml_reshape_1d). As `reshape`; ne0 must be their number."""
    return _reshape(a, (ne0,))


def reshape_2d(a: Tensor, ne0: int, ne1: int) -> Tensor:
    """The elements of `a` as ne [ne0, ne1], NumPy shape (ne1, ne0) (ggml_reshape_2d). As `reshape`."""
    return _reshape(a, (ne0, ne1))


def reshape_3d(a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
    """The elements of `a` as ne [ne0, ne1, ne2], NumPy shape (ne2, ne1, ne0) (ggml_reshape_3d). As `reshape`."""
    return _reshape(a, (ne0, ne1, ne2))


def reshape_4d(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
    """The elements of `a` as ne [ne0 .. ne3], NumPy shape (ne3, ne2, ne1, ne0) (ggml_reshape_4d). As `reshape`."""
    return _reshape(a, (ne0, ne1, ne2, ne3))


# -- view ---------------------------------------------------------------------------------------------------------


def _view(a: Tensor, dims: tuple[int, ...], steps: tuple[int, ...], offset: int) -> Tensor:
    """A view of `a`. `steps`: nb[1], nb[2], ... as far as they are given; the others follow from these and `dims`."""
    srcs = _tensor(VIEW, a)
    dt = a.dtype
    n0, n1, n2, n3 = (*_whole(VIEW, a, "ne", dims, 1), 1, 1, 1)[:4]
    ne: Ne = (n0, n1, n2, n3)
    if largest(n0 * n1 * n2 * n3) > _MAX_ELEMENTS:
        raise fail(VIEW, srcs, ShapeError, f"ne {list(ne)} has more than 2^53 elements")
    if not divides(dt.block_size, n0):
        raise fail(VIEW, srcs, ShapeError, f"ne0 = {n0} is not a whole number of {dt.name} blocks of {dt.block_size}")
    size = dt.type_size
    given = _whole(VIEW, a, "nb", steps, 0) if steps else ()
    nb1 = given[0] if given else n0 // dt.block_size * size
    nb2 = given[1] if len(given) > 1 else nb1 * n1
    nb3 = given[2] if len(given) > 2 else nb2 * n2
    nb: Ne = (size, nb1, nb2, nb3)
    if max(map(largest, nb)) > _MAX_STRIDE:
        raise fail(VIEW, srcs, ShapeError, f"nb {list(nb)} must be at most 2^63 - 1")
    (offset,) = _whole(VIEW, a, "offset", (offset,), 0)
    if not divides(size, offset, nb1, nb2, nb3):
        raise fail(VIEW, srcs, ShapeError, f"offset {offset} and nb {nb} must be multiples of {dt.name}'s {size} bytes")
    row = n0 // dt.block_size * size
    end = a.view_offs + offset + (row + (n1 - 1) * nb1 + (n2 - 1) * nb2 + (n3 - 1) * nb3)
    if below_zero(rest := a.root.nbytes - end):
        text = f"ne {list(ne)} nb {list(nb)} ends at byte {end}, outside the {a.root.nbytes} bytes of "
        when = f" for {below_zero(rest)}" if isinstance(rest, Size) else ""
        raise fail(VIEW, srcs, ShapeError, text + a.root.describe() + when)
    return record_view(VIEW, a, {"offset": offset}, ne, nb, len(dims), offset)


def view_1d(a: Tensor, ne0: int, offset: int) -> Tensor:
    """`ne0` consecutive elements that start `offset` bytes after the start of `a` (ggml_view_1d).

    The view is of memory: the strides of `a` do not matter. It must lie within the bytes of the tensor that owns the
    memory, on whole elements or blocks. Elements, strides and the offset may follow from Vars; all this must then hold
    for every value of these. Result: ne [ne0].
    Raises ShapeError.
    """
    return _view(a, (ne0,), (), offset)


def view_2d(a: Tensor, ne0: int, ne1: int, nb1: int, offset: int) -> Tensor:
    """ne [ne0, ne1] at `offset` bytes from the start of `a`, rows `nb1` bytes apart (ggml_view_2d). As `view_1d`."""
    return _view(a, (ne0, ne1), (nb1,), offset)


def view_3d(a: Tensor, ne0: int, ne1: int, ne2: int, nb1: int, nb2: int, offset: int) -> Tensor:
    """ne [ne0, ne1, ne2] at `offset` bytes from the start of `a`, strides `nb1`, `nb2` bytes (ggml_view_3d).

    As `view_1d`.
    """
    return _view(a, (ne0, ne1, ne2), (nb1, nb2), offset)


def view_4d(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
    """ne [ne0 .. ne3] at `offset` bytes from the start of `a`, strides `nb1`, `nb2`, `nb3` bytes (ggml_view_4d).

    As `view_1d`.
    """
    return _view(a, (ne0, ne1, ne2, ne3), (nb1, nb2, nb3), offset)


# -- permute ------------------------------------------------------------------------------------------------------


def _permuted(op: OpDef, a: Tensor, axes: tuple[int, ...], params: Params, rank: int) -> Tensor:
    if a.dtype.block_size > 1 and axes[0] != 0:
        raise fail(op, (a,), ShapeError, f"dimension 0 of {a.dtype.name} must stay: its blocks lie along it")
    ne, nb = [0, 0, 0, 0], [0, 0, 0, 0]
    for i, axis in enumerate(axes):
        ne[axis], nb[axis] = a.ne[i], a.nb[i]
    return record_view(op, a, params, (ne[0], ne[1], ne[2], ne[3]), (nb[0], nb[1], nb[2], nb[3]), rank)


def permute(a: Tensor, axis0: int, axis1: int, axis2: int, axis3: int) -> Tensor:
    """Dimension i of `a` becomes dimension axis_i of the result (ggml_permute): result.ne[axis_i] = a.ne[i].

    a: any strides; dimension 0 of a block type stays where it is. Result: a view of `a`.
    Raises ShapeError when the axes are not 0, 1, 2, 3 in some order.
    """
    srcs = _tensor(PERMUTE, a)
    axes = _whole(PERMUTE, a, "axes", (axis0, axis1, axis2, axis3), 0)
    if {*axes} != {0, 1, 2, 3}:
        raise fail(PERMUTE, srcs, ShapeError, f"the axes must be 0, 1, 2, 3 in some order, not {list(axes)}")
    return _permuted(PERMUTE, a, axes, {"axes": axes}, max(axes[: a.rank], default=-1) + 1)


def transpose(a: Tensor) -> Tensor:
    """`a` with dimensions 0 and 1 exchanged (ggml_transpose): result.ne [a.ne[1], a.ne[0], a.ne[2], a.ne[3]], a view.

    Raises ShapeError for block types.
    """
    _tensor(TRANSPOSE, a)
    return _permuted(TRANSPOSE, a, (1, 0, 2, 3), _NO_PARAMS, max(a.rank, 2))
