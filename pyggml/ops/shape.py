"""Make tensors from smaller ones: repeat, concat, diag, timestep_embedding; and arange, which needs no source."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from typing import TYPE_CHECKING

import numpy as np

from .. import ops
from ..codec import Array
from ..dtypes import READABLE_BLOCKS
from ..errors import OptionError, explain, user_site
from ..opdef import Cost, Gradient, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Context, Ne, Tensor, dims_of, full_ne
from ..var import Size, is_count
from ._common import F32, MAX_INT, can_repeat, given_ne, is_int, is_number, is_whole, src
from ._gradients import constant, dense, dense_rows, spread, summed, zeros
from .copy import PLAIN_TYPES

if TYPE_CHECKING:
    from typing_extensions import Never

__all__ = [
    "arange",
    "concat",
    "diag",
    "repeat",
    "repeat_4d",
    "repeat_back",
    "timestep_embedding",
]


def _repeat_shape(srcs: Srcs, params: Params) -> Ne:
    a, ne = src(srcs, 0), given_ne(params)
    rule(can_repeat(a.ne, ne), f"each of a's ne {list(a.ne)} must divide that of the result, {list(ne)}")
    return ne


def _repeat_ref(a: Array, ne0: int, ne1: int, ne2: int, ne3: int) -> Array:
    return np.tile(a, [n // m for n, m in zip((ne3, ne2, ne1, ne0), a.shape, strict=True)])


def _grad_repeat(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a = src(node.src, 0)
    return (lambda: summed(gy, a),)


def _repeat_back_shape(srcs: Srcs, params: Params) -> Ne:
    a, ne = src(srcs, 0), given_ne(params)
    rule(can_repeat(ne, a.ne), f"each of the result's ne {list(ne)} must divide that of a, {list(a.ne)}")
    return ne


def _repeat_back_ref(a: Array, ne0: int, ne1: int, ne2: int, ne3: int) -> Array:
    ne = (ne3, ne2, ne1, ne0)
    split = [m for n, k in zip(a.shape, ne, strict=True) for m in (n // k, k)]
    return a.reshape(split).sum(axis=(0, 2, 4, 6))


def _grad_repeat_back(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a = src(node.src, 0)
    return (lambda: spread(gy, a),)


def _concat_shape(srcs: Srcs, params: Params) -> Ne:
    a, b, dim = src(srcs, 0), src(srcs, 1), params["dim"]
    rule(is_whole(dim, 0) and dim < 4, f"dim must be 0, 1, 2 or 3, not {dim}")
    n = [a.ne[i] + b.ne[i] if i == dim else a.ne[i] for i in range(4)]
    rule(all(i == dim or a.ne[i] == b.ne[i] for i in range(4)), f"a and b may differ only in dimension {dim}")
    return (n[0], n[1], n[2], n[3])


def _concat_ref(a: Array, b: Array, dim: int) -> Array:
    return np.concatenate([a, b], axis=3 - dim)


def _grad_concat(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a, b, dim = src(node.src, 0), src(node.src, 1), int(node.op_params["dim"])

    def part(s: Tensor, first: int) -> Tensor:
        g = dense_rows(gy)
        return ops.view_4d(g, *s.ne, *g.nb[1:], first * g.nb[dim])

    return lambda: part(a, 0), lambda: part(b, a.ne[dim])


def _grad_diag(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a = src(node.src, 0)

    def diagonal() -> Tensor:
        g = dense(gy)
        return ops.reshape(ops.cont(ops.view_4d(g, 1, *node.ne[1:], g.nb[0] + g.nb[1], g.nb[2], g.nb[3], 0)), a)

    return (diagonal,)


def _diag_shape(srcs: Srcs, params: Params) -> Ne:
    ne = src(srcs, 0).ne
    rule(ne[1] == 1, f"a must have one row per matrix (ne[1] must be 1, not {ne[1]})")
    return (ne[0], ne[0], ne[2], ne[3])


def _diag_ref(a: Array) -> Array:
    return np.where(np.eye(a.shape[3], dtype=bool), a, np.zeros_like(a))


def _timestep_shape(srcs: Srcs, params: Params) -> Ne:
    ne, dim, max_period = src(srcs, 0).ne, params["dim"], params["max_period"]
    rule(ne[1] == ne[2] == ne[3] == 1, "timesteps must have one dimension")
    rule(is_int(dim, 1), f"dim must be a whole number from 1 to {MAX_INT}, not {dim}")
    rule(is_number(max_period) and max_period > 0, f"max_period must be a positive number, not {max_period}")
    return (int(dim), ne[0], 1, 1)


def _timestep_ref(timesteps: Array, dim: int, max_period: float) -> Array:
    half = dim // 2
    angles = timesteps.reshape(-1, 1) * np.exp(-np.log(max_period) * np.arange(half) / max(half, 1))
    return np.concatenate([np.cos(angles), np.sin(angles), np.zeros((timesteps.size, dim % 2))], axis=1)[None, None]


def _grad_timestep(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """By each time step t the sum over frequencies f of f (cos(t f) gy_sin - sin(t f) gy_cos)."""
    t, half = src(node.src, 0), int(node.op_params["dim"]) // 2

    def of_t() -> Tensor:
        if not half:
            return zeros(t)
        f = np.exp(-np.log(node.op_params["max_period"]) * np.arange(half) / half).astype(np.float32)
        g = dense_rows(gy)
        cos, sin, g_cos, g_sin = (
            ops.view_2d(x, half, x.ne[1], x.nb[1], at * half * 4) for x in (node, g) for at in (0, 1)
        )
        return ops.reshape(ops.sum_rows((cos * g_sin - sin * g_cos) * constant(f, node)), t)

    return (of_t,)


def _arange_n(start: float, stop: float, step: float) -> int:
    if isinstance(stop, Size):
        whole = start == int(start) and step == int(step) and step > 0
        rule(whole, f"start and step must be whole numbers beside a stop of {stop}, and step positive")
        n = (stop - int(start) + int(step) - 1) // int(step)
        rule(is_count(n), f"stop {stop} must be behind start {start} for every value of its Vars")
        return n
    n = (stop - start) / step if step != 0 else 0.0
    rule(0 < n < inf, f"step {step} must lead from start {start} towards stop {stop}")
    return ceil(n)


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
    grad=_grad_repeat,
    sizes=("ne0", "ne1", "ne2", "ne3"),
)
REPEAT_BACK = OpDef(
    name="repeat_back",
    srcs=("a",),
    params=("ne0", "ne1", "ne2", "ne3"),
    shape=_repeat_back_shape,
    dtypes={(F32,): F32},
    ref=_repeat_back_ref,
    kernel="repeat_back",
    cost=elementwise_cost(1),
    inplace=(),
    label="sum of a's repeats",
    grad=_grad_repeat_back,
    sizes=("ne0", "ne1", "ne2", "ne3"),
)
CONCAT = OpDef(
    name="concat",
    srcs=("a", "b"),
    params=("dim",),
    shape=_concat_shape,
    dtypes={(t, t): t for t in (*PLAIN_TYPES, *READABLE_BLOCKS)},
    ref=_concat_ref,
    kernel="concat",
    cost=elementwise_cost(0),
    inplace=(),
    label="concat(a, b)",
    grad=_grad_concat,
    ranks=(0, 1),
)
DIAG = OpDef(
    name="diag",
    srcs=("a",),
    params=(),
    shape=_diag_shape,
    dtypes={(t,): t for t in PLAIN_TYPES},
    ref=_diag_ref,
    kernel="diag",
    cost=elementwise_cost(0),
    inplace=(),
    label="diag(a)",
    grad=_grad_diag,
)
TIMESTEP_EMBEDDING = OpDef(
    name="timestep_embedding",
    srcs=("timesteps",),
    params=("dim", "max_period"),
    shape=_timestep_shape,
    dtypes={(F32,): F32},
    ref=_timestep_ref,
    kernel="timestep_embedding",
    cost=elementwise_cost(40),
    inplace=(),
    label="embedding of timesteps",
    grad=_grad_timestep,
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
    sizes=("stop",),
)


def repeat(a: Tensor, b: Tensor) -> Tensor:
    """`a` repeated whole times to the shape of `b`; the elements of `b` do not matter (ggml_repeat).

    a: any type but block types, each ne divides b's. Result: ne of `b`, type of `a`. Raises ShapeError, DTypeError.
    """
    ne = b.ne if isinstance(b, Tensor) else (0, 0, 0, 0)  # pyright: ignore[reportUnnecessaryIsInstance]
    return _repeat(a, *ne, getattr(b, "rank", 1))


def repeat_4d(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
    """`a` repeated whole times to ne [ne0 .. ne3] (ggml_repeat_4d). As `repeat`."""
    return _repeat(a, ne0, ne1, ne2, ne3, None)


def _repeat(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, rank: int | None) -> Tensor:
    return record(REPEAT, (a,), {"ne0": ne0, "ne1": ne1, "ne2": ne2, "ne3": ne3}, rank=rank)


def repeat_back(a: Tensor, b: Tensor | Sequence[int]) -> Tensor:
    """`a` summed over its repeats of the shape of `b`: the gradient of `repeat` (ggml_repeat_back).

    a: F32, any layout; each ne of `b` divides a's. b: a tensor, whose elements do not matter, or an ne. Result: F32, ne
    of `b`, accumulated in double. Raises ShapeError, DTypeError.
    """
    ne, rank = (b.ne, b.rank) if isinstance(b, Tensor) else (full_ne(dims_of("repeat_back", b)), None)
    return record(REPEAT_BACK, (a,), dict(zip(REPEAT_BACK.params, ne, strict=True)), rank=rank)


def concat(a: Tensor, b: Tensor | None = None, dim: int | None = None, **unknown: Never) -> Tensor:
    """`a`, and `b` after it along dimension `dim` in ne order, 0 to 3 (ggml_concat).

    a, b: the same type, which may be any; ne equal except in dimension `dim`. Result: ne[dim] is the sum. Blocks are
    moved as they are.
    Raises ShapeError, DTypeError, OptionError when `dim` is missing.
    """
    if isinstance(a, list | tuple) or unknown or dim is None:  # pyright: ignore[reportUnnecessaryIsInstance]
        text = "it joins two tensors along a dimension in ne order: concat(a, b, dim)"
        how = "np.concatenate([a, b], axis) joins any number, along an axis in NumPy's order"
        raise OptionError(explain("concat", f"{text}. {how}", [], user_site()))
    return record(CONCAT, (a, b), {"dim": dim})


def diag(a: Tensor) -> Tensor:
    """Matrices with the rows of `a` on their diagonals and zeros elsewhere (ggml_diag).

    a: ne [n, 1, n2, n3], any type but block types; result: ne [n, n, n2, n3]. Raises ShapeError, DTypeError.
    """
    return record(DIAG, (a,), {})


def timestep_embedding(timesteps: Tensor, dim: int, max_period: float) -> Tensor:
    """The embedding of the time steps of a diffusion model (ggml_timestep_embedding; arXiv 2112.10741). Row i has the
    cosines, then the sines of timesteps[i] max_period^(-2 j / dim), j from 0; when `dim` is odd, its last element is 0.

    timesteps: F32 ne [n]; result: F32 ne [dim, n], NumPy shape (n, dim). Raises ShapeError, DTypeError.
    """
    return record(TIMESTEP_EMBEDDING, (timesteps,), {"dim": dim, "max_period": max_period}, rank=2)


def arange(start: float, stop: float | None = None, step: float = 1, ctx: Context | None = None) -> Tensor:
    """start, start + step ... before `stop`: ceil((stop - start) / step) elements, F32 (ggml_arange). Beside whole
    numbers, `stop` may follow from a Var. As in NumPy, `arange(n)` is `arange(0, n, 1)`.

    It belongs to `ctx`, or without one to the open context (GraphError when no context is open). Raises ShapeError.
    """
    if stop is None:
        start, stop = 0, start
    return record(ARANGE, (), {"start": start, "stop": stop, "step": step}, ctx=ctx)
