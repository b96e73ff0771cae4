"""`map_custom`: an op that a Python function computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..errors import DTypeError, GraphError, explain, user_site
from ..opdef import DTypeRow, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Context, Ne, Tensor, dims_of, full_ne
from ._common import F32, is_whole

__all__ = ["map_custom"]

_MAX_SRC = 10  # as in ggml


class _AnyTypes(Mapping[DTypeRow, DType]):
    """Sources of any types; the result has the type that the caller asks for."""

    def __getitem__(self, row: DTypeRow) -> DType:
        t = row[-1]
        if t is None:
            raise KeyError(row)
        return t

    def __iter__(self) -> Iterator[DTypeRow]:
        return iter(((F32, F32),))

    def __len__(self) -> int:
        return 1


def _shape(srcs: Srcs, params: Params) -> Ne:
    tasks = params["n_tasks"]
    rule(tasks is None or is_whole(tasks, 1), f"n_tasks must be a whole number from 1, or None, not {tasks!r:.40}")
    return params["ne"]


def _values(t: Tensor) -> Array:
    return t.elements()[(*(0,) * (4 - t.rank), ...)]


def _call(t: Tensor, srcs: Sequence[Tensor | None], ith: int, nth: int) -> None:
    """One task of a node: `fn` on arrays over the tensors' memory."""
    fn, n_tasks = t.op_params["fn"], t.op_params["n_tasks"]
    nth = nth if n_tasks is None else min(n_tasks, nth)
    if ith >= nth:
        return
    arrays = [_values(s) for s in srcs if s is not None]
    for a in arrays:
        a.flags.writeable = False
    direct = t.dtype.np_dtype is not None and t.buffer is not None and t.buffer.is_host
    dst: Array = _values(t) if direct else np.array(_values(t))
    result: Any = fn(dst, *arrays) if n_tasks == 1 else fn(dst, *arrays, ith=ith, nth=nth)
    if isinstance(result, np.ndarray) and not np.may_share_memory(cast("Array", result), dst):
        raise GraphError("fn returned an array: it writes the result into its first argument instead (dst[:] = ...)")
    if not direct:
        t.store(dst.reshape(t.layout[0][::-1]))


def _never(*arrays: Array, **params: object) -> Array:
    raise NotImplementedError("a host op is computed by OpDef.host")


MAP_CUSTOM = OpDef(
    name="map_custom",
    srcs=tuple(f"src{i}?" for i in range(_MAX_SRC)),
    params=("fn", "ne", "n_tasks"),
    shape=_shape,
    dtypes=_AnyTypes(),
    ref=_never,
    kernel="map_custom",
    cost=elementwise_cost(1),
    inplace=(),
    label="fn(..)",
    ranks=(),
    host=_call,
)


def map_custom(
    fn: Callable[..., object],
    *tensors: Tensor,
    ne: int | Sequence[int] | None = None,
    dtype: DType | None = None,
    n_tasks: int | None = 1,
    ctx: Context | None = None,
) -> Tensor:
    """A tensor that a Python function computes: `fn(dst, *sources)` writes it into `dst` (ggml_map_custom1 .. 3,
    ggml_custom_4d).

    tensors: the sources, up to ten, of any types and layouts. ne, dtype: those of the result, by default as the first
    tensor. `fn` gets NumPy arrays of `.shape`; the sources are read-only. When NumPy has the type they are views of the
    memory, otherwise float32 copies (and `dst` is encoded afterwards). The contents of `dst` are undefined
    before; a `fn` that returns another array is an error. `fn` runs whenever the graph does, holding the GIL, on one
    thread. With another `n_tasks` n (None: one per thread), it is called on up to that many threads as
    `fn(dst, *sources, ith=i, nth=n)` for each i below n, to do its share of the work; this pays when `fn` releases the
    GIL. `fn` may compute other graphs, but not the graph that it is part of. Raises ShapeError, DTypeError; an
    exception in `fn` comes out of the run as the __cause__ of a BackendError.
    """
    role = next((i for i, t in enumerate(tensors) if not isinstance(t, Tensor)), None)  # pyright: ignore[reportUnnecessaryIsInstance]
    first = tensors[0] if tensors and role != 0 else None
    dims = dims_of("map_custom", ne) if ne is not None else first.ne[: first.rank] if first is not None else None
    text = None
    if not callable(fn):
        text = f"fn must be a function, not {type(fn).__name__}"
    elif role is not None:
        text = f"src{role} must be a Tensor, not {type(tensors[role]).__name__}"
    elif len(tensors) > _MAX_SRC:
        text = f"{len(tensors)} tensors were given; at most {_MAX_SRC} are possible"
    dtype = dtype or (first.dtype if first is not None else F32)
    if n_tasks != 1 and isinstance(dtype, DType) and dtype.np_dtype is None:  # pyright: ignore[reportUnnecessaryIsInstance]
        text = f"several tasks cannot write one {dtype.name}, which NumPy does not have: n_tasks must be 1"
    if text is not None or dims is None:
        raise DTypeError(explain("map_custom", text or "needs a tensor or ne", [], user_site()))
    params = {"fn": fn, "ne": full_ne(dims), "n_tasks": n_tasks}
    return record(MAP_CUSTOM, tensors, params, ctx=ctx, dtype=dtype, rank=len(dims))
