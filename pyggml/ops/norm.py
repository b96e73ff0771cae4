"""Normalisation of rows, or of groups of channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..codec import Array
from ..opdef import Cost, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, inplace, is_whole, src

__all__ = [
    "group_norm",
    "group_norm_inplace",
    "l2_norm",
    "l2_norm_inplace",
    "norm",
    "norm_inplace",
    "rms_norm",
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


def _define(
    name: str, params: tuple[str, ...], shape: Callable[[Srcs, Params], Ne], ref: Callable[..., Array], label: str
) -> OpDef:
    return OpDef(
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
    )


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


NORM = _define("norm", ("eps",), _rows, _ref_norm, "(a - mean) / std")
RMS_NORM = _define("rms_norm", ("eps",), _rows, _ref_rms_norm, "a / rms(a)")
L2_NORM = _define("l2_norm", ("eps",), _rows, _ref_l2_norm, "a / |a|")
GROUP_NORM = _define("group_norm", ("n_groups", "eps"), _groups, _ref_group_norm, "(a - mean) / std, by group")


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
