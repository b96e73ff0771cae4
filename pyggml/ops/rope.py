"""Rotary position embedding (RoFormer, arXiv 2104.09864), with YaRN (arXiv 2309.00071) and frequency factors."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, log, pi
from typing import Any

import numpy as np

from ..codec import Array
from ..opdef import Cost, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F16, F32, I32, is_number, is_whole, src

__all__ = [
    "ROPE_TYPE_NEOX",
    "ROPE_TYPE_NORM",
    "rope",
    "rope_ext",
    "rope_ext_back",
    "rope_ext_inplace",
    "rope_inplace",
]


_SCALING = ("n_ctx_orig", "freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")
_PARAMS = ("n_dims", "mode", *_SCALING)

ROPE_TYPE_NORM = 0  # pairs are elements 2i, 2i + 1
ROPE_TYPE_NEOX = 2  # pairs are elements i, i + n_dims / 2


def _shape(srcs: Srcs, params: Params) -> Ne:
    a, b, c = src(srcs, 0), src(srcs, 1), srcs[2]
    n_dims, mode = params["n_dims"], params["mode"]
    rule(mode in (ROPE_TYPE_NORM, ROPE_TYPE_NEOX), f"mode must be 0 (NORM) or 2 (NEOX), not {mode}")
    ok = is_whole(n_dims, 2) and n_dims % 2 == 0 and n_dims <= a.ne[0]
    rule(ok, f"n_dims must be even and from 2 to a's ne[0] {a.ne[0]}, not {n_dims}")
    rule(b.ne == (a.ne[2], 1, 1, 1), f"b must have one position for each of a's ne[2] = {a.ne[2]} tokens")
    if c is not None:
        rule(c.ne[0] >= n_dims // 2, f"c must have n_dims / 2 = {n_dims // 2} frequency factors, not {c.ne[0]}")
    rule(all(is_number(params[k]) for k in _SCALING), f"{', '.join(_SCALING)} must be numbers")
    rule(params["freq_base"] > 0 and params["freq_scale"] > 0, "freq_base and freq_scale must be positive")
    if params["ext_factor"] != 0:
        yarn = params["n_ctx_orig"] > 0 and params["beta_fast"] > 0 and params["beta_slow"] > 0
        rule(yarn and params["freq_base"] != 1, "ext_factor needs a positive n_ctx_orig, beta_fast and beta_slow")
    return a.ne


def _angles(n_dims: int, c: Array | None, p: dict[str, Any]) -> Array:
    """Angle per position of each of the n_dims / 2 pairs."""
    extrapolated = p["freq_base"] ** (-np.arange(0, n_dims, 2) / n_dims)
    if c is not None:
        extrapolated = extrapolated / c.reshape(-1)[: n_dims // 2]
    interpolated = p["freq_scale"] * extrapolated
    if p["ext_factor"] == 0:
        return interpolated

    def pair_of(rotations: float) -> float:  # the pair that turns so many times within the original context
        return n_dims * log(p["n_ctx_orig"] / (rotations * 2 * pi)) / (2 * log(p["freq_base"]))

    low, high = max(0, floor(pair_of(p["beta_fast"]))), min(n_dims - 1, ceil(pair_of(p["beta_slow"])))
    ramp = np.clip((np.arange(n_dims // 2) - low) / max(0.001, high - low), 0, 1)
    kept = (1 - ramp) * p["ext_factor"]
    return interpolated * (1 - kept) + extrapolated * kept


def _reference(direction: float) -> Callable[..., Array]:
    def ref(a: Array, b: Array, c: Array | None, n_dims: int, mode: int, **p: Any) -> Array:
        scale = p["attn_factor"] * (1 if p["ext_factor"] == 0 else 1 + 0.1 * log(1 / p["freq_scale"]))
        theta = (b.reshape(-1)[:, None] * _angles(n_dims, c, p))[:, None, :]  # [tokens, heads, pairs]
        cos, sin = np.cos(theta) * scale, np.sin(theta) * scale * direction
        neox = mode == ROPE_TYPE_NEOX
        first = slice(0, n_dims // 2) if neox else slice(0, n_dims, 2)
        second = slice(n_dims // 2, n_dims) if neox else slice(1, n_dims, 2)
        out = np.array(a)
        out[..., first] = a[..., first] * cos - a[..., second] * sin
        out[..., second] = a[..., first] * sin + a[..., second] * cos
        return out

    return ref


def _cost(t: Tensor) -> Cost:
    return Cost(4 * t.n_elements, t.n_elements * t.dtype.type_size, t.n_elements * t.dtype.type_size)


def _define(name: str, kernel: str, direction: float) -> OpDef:
    return OpDef(
        name=name,
        srcs=("a", "b", "c?"),
        params=_PARAMS,
        shape=_shape,
        dtypes={(t, I32, c): t for t in (F32, F16) for c in (None, F32)},
        ref=_reference(direction),
        kernel=kernel,
        cost=_cost,
        inplace=(0,),
        label="rope(a, b)",
    )


ROPE = _define("rope", "rope", 1.0)
ROPE_EXT_BACK = _define("rope_ext_back", "rope_back", -1.0)


def rope(a: Tensor, b: Tensor, n_dims: int, mode: int) -> Tensor:
    """`rope_ext` with base 10000, no scaling and no frequency factors (ggml_rope)."""
    return rope_ext(a, b, None, n_dims, mode, 0, 10000.0, 1.0, 0.0, 1.0, 0.0, 0.0)


def rope_inplace(a: Tensor, b: Tensor, n_dims: int, mode: int) -> Tensor:
    """`rope`, the result written over `a`."""
    return rope_ext_inplace(a, b, None, n_dims, mode, 0, 10000.0, 1.0, 0.0, 1.0, 0.0, 0.0)


def rope_ext(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    n_dims: int,
    mode: int,
    n_ctx_orig: int,
    freq_base: float,
    freq_scale: float,
    ext_factor: float,
    attn_factor: float,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """Rotate pairs of the first `n_dims` elements of every row by angles that grow with its position (ggml_rope_ext).

    a: ne [head_dim, n_head, n_tokens, batch], NumPy (batch, n_tokens, n_head, head_dim), F32 or F16, any strides;
    b: positions, I32, ne [n_tokens]; c: frequency factors, F32, ne [n_dims / 2], or None. n_dims: even, up to head_dim.
    mode: ROPE_TYPE_NORM (pairs 2i, 2i + 1) or ROPE_TYPE_NEOX (pairs i, i + n_dims / 2).

    Pair i turns by position * freq_base ** (-2i / n_dims) / c[i] * freq_scale radians. ext_factor > 0 mixes in the
    angle without freq_scale for pairs that turn more than `beta_slow` to `beta_fast` times within `n_ctx_orig`
    positions (YaRN), and scales the result by 1 + 0.1 ln(1 / freq_scale); attn_factor scales it too.
    Result: shape and type of `a`. Raises ShapeError, DTypeError.
    """
    p = _params(n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return record(ROPE, (a, b, c), p)


def rope_ext_inplace(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    n_dims: int,
    mode: int,
    n_ctx_orig: int,
    freq_base: float,
    freq_scale: float,
    ext_factor: float,
    attn_factor: float,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """`rope_ext`, the result written over `a`."""
    p = _params(n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return record(ROPE, (a, b, c), p, inplace=0)


def rope_ext_back(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    n_dims: int,
    mode: int,
    n_ctx_orig: int,
    freq_base: float,
    freq_scale: float,
    ext_factor: float,
    attn_factor: float,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """`rope_ext` with the angles reversed: its gradient, and its inverse where nothing scales (ggml_rope_ext_back)."""
    p = _params(n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return record(ROPE_EXT_BACK, (a, b, c), p)


def _params(*values: float) -> Params:
    return dict(zip(_PARAMS, values, strict=True))
