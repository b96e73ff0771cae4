"""Normalisation of rows, or of groups of channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import ops
from ..codec import Array
from ..opdef import Cost, Gradient, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, inplace, is_whole, src
from ._gradients import dense_rows

__all__ = [
    "group_norm",
    "group_norm_back",
    "group_norm_inplace",
    "l2_norm",
    "l2_norm_back",
    "l2_norm_inplace",
    "norm",
    "norm_back",
    "norm_inplace",
    "rms_norm",
    "rms_norm_back",
    "rms_norm_inplace",
]


def _rows(srcs: Srcs, params: Params) -> Ne:
    a = src(srcs, 0)
    rule(a.ne[0] == 1 or a.nb[0] == 4, f"rows of a must be dense (nb[0] = {a.nb[0]}, not 4); cont(a) is")
    rule(params["eps"] >= 0, f"eps must not be negative ({params['eps']})")
    return a.ne


def _groups(srcs: Srcs, params: Params) -> Ne:
    ne, n_groups = _rows(srcs, params), params["n_groups"]
    rule(
        is_whole(n_groups, 1) and n_groups <= ne[2],
        f"n_groups must be a whole number from 1 to a's ne[2] = {ne[2]}, not {n_groups}",
    )
    return ne


def _cost(t: Tensor) -> Cost:
    return Cost(6 * t.n_elements, 4 * t.n_elements, 4 * t.n_elements)


Bend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # (of the result, a, b, eps) -> gradient of b in `_back`


def _define(
    name: str,
    params: tuple[str, ...],
    shape: Callable[[Srcs, Params], Ne],
    ref: Callable[..., Array],
    ref_back: Callable[..., Array],
    label: str,
    bend: Bend | None = None,
) -> tuple[OpDef, OpDef]:
    """A norm, and the op that computes its gradient. `bend` records the second derivative."""

    def grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
        a = src(node.src, 0)
        return (lambda: record(back, (dense_rows(gy), a), node.op_params),)

    def grad_back(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
        a, b = src(node.src, 0), src(node.src, 1)

        def of_b() -> Tensor:
            assert bend is not None
            return bend(gy, a, b, node.op_params["eps"])

        return lambda: record(back, (dense_rows(gy), b), node.op_params), of_b if bend is not None else None

    def back_shape(srcs: Srcs, params: Params) -> Ne:
        a, b = src(srcs, 0), src(srcs, 1)
        rule(a.ne == b.ne, f"a and b must have the same ne, not {list(a.ne)} and {list(b.ne)}")
        shape((b,), params)
        return shape(srcs, params)

    back = OpDef(
        name=f"{name}_back",
        srcs=("a", "b"),
        params=params,
        shape=back_shape,
        dtypes={(F32, F32): F32},
        ref=ref_back,
        kernel=f"{name}_back",
        cost=elementwise_cost(12),
        inplace=(0, 1),
        label=f"gradient of {name}",
        grad=grad_back,
    )
    norm = OpDef(
        name=name,
        srcs=("a",),
        params=params,
        shape=shape,
        dtypes={(F32,): F32},
        ref=ref,
        kernel=name,
        cost=_cost,
        inplace=(0,),
        label=label,
        grad=grad,
    )
    return norm, back


def _standardised(a: Array, axis: Any, eps: float) -> Array:
    d = a - a.mean(axis=axis, keepdims=True)
    return d / np.sqrt(np.square(d).mean(axis=axis, keepdims=True) + eps)


def _ref_norm(a: Array, eps: float) -> Array:
    return _standardised(a, 3, eps)


def _ref_rms_norm(a: Array, eps: float) -> Array:
    return a / np.sqrt(np.square(a).mean(axis=3, keepdims=True) + eps)


def _ref_l2_norm(a: Array, eps: float) -> Array:
    return a / np.maximum(np.sqrt(np.square(a).sum(axis=3, keepdims=True)), eps)


def _ref_group_norm(a: Array, n_groups: int, eps: float) -> Array:
    per_group = -(-a.shape[1] // n_groups)
    parts = [_standardised(a[:, i : i + per_group], (1, 2, 3), eps) for i in range(0, a.shape[1], per_group)]
    return np.concatenate(parts, axis=1)


def _ref_rms_norm_back(a: Array, b: Array, eps: float) -> Array:
    r = 1 / np.sqrt(np.square(b).mean(axis=3, keepdims=True) + eps)
    return r * (a - b * r * r * (a * b).mean(axis=3, keepdims=True))


def _ref_norm_back(a: Array, b: Array, eps: float, axis: Any = 3) -> Array:
    d = b - b.mean(axis=axis, keepdims=True)
    r = 1 / np.sqrt(np.square(d).mean(axis=axis, keepdims=True) + eps)
    return r * (a - a.mean(axis=axis, keepdims=True) - d * r * r * (a * d).mean(axis=axis, keepdims=True))


def _ref_l2_norm_back(a: Array, b: Array, eps: float) -> Array:
    length = np.sqrt(np.square(b).sum(axis=3, keepdims=True))
    along = (a * b).sum(axis=3, keepdims=True) / np.square(length)
    return np.where(length < eps, a / eps, (a - b * along) / length)


def _ref_group_norm_back(a: Array, b: Array, n_groups: int, eps: float) -> Array:
    n = -(-a.shape[1] // n_groups)
    parts = [_ref_norm_back(a[:, i : i + n], b[:, i : i + n], eps, (1, 2, 3)) for i in range(0, a.shape[1], n)]
    return np.concatenate(parts, axis=1)


def _mean_of(x: Tensor) -> Tensor:
    return ops.mean(dense_rows(x))


def _rms_bend(h: Tensor, g: Tensor, x: Tensor, eps: float) -> Tensor:
    """The gradient of the mean of h (r g - r^3 x mean(g x)) by x, where r' = -r^3 x / n."""
    r2 = 1 / (_mean_of(ops.sqr(x)) + eps)
    gx, hx, hg = _mean_of(g * x), _mean_of(h * x), _mean_of(h * g)
    return (x * (r2 * 3 * gx * hx - hg) - g * hx - h * gx) * (r2 * ops.sqrt(r2))


def _norm_bend(h: Tensor, g: Tensor, x: Tensor, eps: float) -> Tensor:
    g = _rms_bend(h - _mean_of(h), g, x - _mean_of(x), eps)
    return g - _mean_of(g)


NORM, NORM_BACK = _define("norm", ("eps",), _rows, _ref_norm, _ref_norm_back, "(a - mean) / std", _norm_bend)
RMS_NORM, RMS_NORM_BACK = _define(
    "rms_norm", ("eps",), _rows, _ref_rms_norm, _ref_rms_norm_back, "a / rms(a)", _rms_bend
)
L2_NORM, L2_NORM_BACK = _define("l2_norm", ("eps",), _rows, _ref_l2_norm, _ref_l2_norm_back, "a / |a|")
GROUP_NORM, GROUP_NORM_BACK = _define(
    "group_norm", ("n_groups", "eps"), _groups, _ref_group_norm, _ref_group_norm_back, "(a - mean) / std, by group"
)


def norm(a: Tensor, eps: float) -> Tensor:
    """Each row minus its mean, divided by sqrt(its variance + eps) (ggml_norm; layer norm without weights).

    a: F32, ne [n, ...], NumPy shape (..., n), dense rows. Result: as `a`. Rows whose squares overflow f32 are summed in
    double (in ggml they overflow). Raises ShapeError (also for eps < 0), DTypeError.
    """
    return record(NORM, (a,), {"eps": eps})


norm_inplace = inplace(NORM, norm)


def rms_norm(a: Tensor, eps: float) -> Tensor:
    """Each row divided by sqrt(mean of its squares + eps) (ggml_rms_norm; arXiv 1910.07467, without weights).

    Shapes, types, range and errors as `norm`.
    """
    return record(RMS_NORM, (a,), {"eps": eps})


rms_norm_inplace = inplace(RMS_NORM, rms_norm)


def l2_norm(a: Tensor, eps: float) -> Tensor:
    """Each row divided by its Euclidean length, or by eps when eps is larger (ggml_l2_norm).

    Shapes, types, range and errors as `norm`.
    """
    return record(L2_NORM, (a,), {"eps": eps})


l2_norm_inplace = inplace(L2_NORM, l2_norm)


def group_norm(a: Tensor, n_groups: int, eps: float) -> Tensor:
    """As `norm`, with mean and variance over groups of channels (ggml_group_norm; arXiv 1803.08494, without weights).

    a: F32, ne [width, height, channels, batch], dense rows. Each ceil(channels / n_groups) channels are one group
    (the last one may be smaller). Result: as `a`.
    Raises ShapeError when n_groups is not from 1 to channels, DTypeError.
    """
    return record(GROUP_NORM, (a,), {"n_groups": n_groups, "eps": eps})


group_norm_inplace = inplace(GROUP_NORM, group_norm)


def norm_back(a: Tensor, b: Tensor, eps: float) -> Tensor:
    """The gradient of `norm`: `a` is that of its result, `b` its source.

    a, b: F32, the same ne, dense rows. Result: F32, as `b`. Raises ShapeError (also for eps < 0), DTypeError.
    """
    return record(NORM_BACK, (a, b), {"eps": eps})


def rms_norm_back(a: Tensor, b: Tensor, eps: float) -> Tensor:
    """The gradient of `rms_norm` (ggml_rms_norm_back). As `norm_back`."""
    return record(RMS_NORM_BACK, (a, b), {"eps": eps})


def l2_norm_back(a: Tensor, b: Tensor, eps: float) -> Tensor:
    """The gradient of `l2_norm`. As `norm_back`."""
    return record(L2_NORM_BACK, (a, b), {"eps": eps})


def group_norm_back(a: Tensor, b: Tensor, n_groups: int, eps: float) -> Tensor:
    """The gradient of `group_norm`. As `norm_back`, ne [width, height, channels, batch]; n_groups as there."""
    return record(GROUP_NORM_BACK, (a, b), {"n_groups": n_groups, "eps": eps})
