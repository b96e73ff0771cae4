"""Other views of the same memory: reshape, view, permute, transpose. They record a node and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ..codec import Array
from ..dtypes import DType
from ..errors import DTypeError, ShapeError, explain, user_site
from ..opdef import Cost, OpDef, Params, Srcs, fail, record_view
from ..tensor import Ne, Size, Tensor, contiguous_nb, not_counts
from ..var import as_size, below_zero, bounds, divides, is_count, largest
from ._common import same_shape

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


def _define(name: str, params: tuple[str, ...], label: str) -> OpDef:
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
    )


RESHAPE = _define("reshape", (), "reshape(a)")
VIEW = _define("view", ("offset",), "view(a)")
PERMUTE = _define("permute", ("axes",), "permute(a)")
TRANSPOSE = _define("transpose", (), "transpose(a)")

_NO_PARAMS: Params = {}
_MAX_STRIDE = 2**63 - 1
_MAX_ELEMENTS = 2**53  # strides of 0 take no memory: kernels count elements, and a thread's share of them, in 63 bits


def _tensor(op: OpDef, a: Tensor) -> Srcs:
    if not isinstance(a, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DTypeError(explain(op.name, f"a must be a Tensor, not {type(a).__name__}", [], user_site()))
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
    _tensor(RESHAPE, b)
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
    end = a.view_offs + offset + n0 // dt.block_size * size + (n1 - 1) * nb1 + (n2 - 1) * nb2 + (n3 - 1) * nb3
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
