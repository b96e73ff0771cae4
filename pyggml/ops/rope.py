"""Rotary position embedding (RoFormer, arXiv 2104.09864): YaRN (arXiv 2309.00071), frequency factors, sections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from math import ceil, floor, log, pi
from typing import Any

import numpy as np

from ..codec import Array
from ..opdef import OPS, Cost, Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F16, F32, I32, inplace, is_int, is_number, is_whole, src

__all__ = [
    "ROPE_TYPE_IMROPE",
    "ROPE_TYPE_MROPE",
    "ROPE_TYPE_NEOX",
    "ROPE_TYPE_NORM",
    "ROPE_TYPE_VISION",
    "rope",
    "rope_ext",
    "rope_ext_back",
    "rope_ext_inplace",
    "rope_inplace",
    "rope_multi",
    "rope_multi_back",
    "rope_multi_inplace",
]


_SCALING = ("n_ctx_orig", "freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")
_PARAMS = ("n_dims", "mode", *_SCALING)
_SECTIONS = ("section0", "section1", "section2", "section3")

ROPE_TYPE_NORM = 0  # pairs are elements 2i, 2i + 1
ROPE_TYPE_NEOX = 2  # pairs are elements i, i + n_dims / 2
ROPE_TYPE_MROPE = 8  # as NEOX; sections of the pairs turn by positions of their own
ROPE_TYPE_VISION = 24  # as MROPE, but the angles of each section begin anew; pairs are elements i, i + n_dims
ROPE_TYPE_IMROPE = 40  # as MROPE, the first three sections interleaved

_MODES = IntEnum("_MODES", {"NORM": ROPE_TYPE_NORM, "NEOX": ROPE_TYPE_NEOX})
_MULTI_MODES = IntEnum(
    "_MULTI_MODES", {"MROPE": ROPE_TYPE_MROPE, "VISION": ROPE_TYPE_VISION, "IMROPE": ROPE_TYPE_IMROPE}
)


def _shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    rule(b.ne == (a.ne[2], 1, 1, 1), f"b must have one position for each of a's ne[2] = {a.ne[2]} tokens")
    return _rotated(srcs, params)


def _multi_shape(srcs: Srcs, params: Params) -> Ne:
    a, b = src(srcs, 0), src(srcs, 1)
    sections = [v for k, v in params.items() if k.startswith("section")]
    whole = len(sections) == 4 and all(is_whole(n, 0) for n in sections)
    rule(whole and any(sections[:3]), f"sections must be four whole numbers, not all of the first three 0: {sections}")
    rule(sum(sections) <= a.ne[0], f"sections {sections} must not be more in all than a's ne[0] = {a.ne[0]}")
    rule(b.ne == (4 * a.ne[2], 1, 1, 1), f"b must have 4 x {a.ne[2]} positions: of all of a's tokens, four times")
    if params["mode"] == ROPE_TYPE_VISION:
        rule(2 * params["n_dims"] == a.ne[0], f"n_dims must be half of a's ne[0] = {a.ne[0]}, not {params['n_dims']}")
    return _rotated(srcs, params)


def _n_pairs(n_dims: int, mode: int) -> int:
    return n_dims if mode == ROPE_TYPE_VISION else n_dims // 2


def _rotated(srcs: Srcs, params: Params) -> Ne:
    """The rules of all modes."""
    a, c, n_dims = src(srcs, 0), srcs[2], params["n_dims"]
    ok = is_whole(n_dims, 2) and n_dims % 2 == 0 and n_dims <= a.ne[0]
    rule(ok, f"n_dims must be even and from 2 to a's ne[0] {a.ne[0]}, not {n_dims}")
    if c is not None:
        n = _n_pairs(n_dims, params["mode"])
        rule(c.ne[0] >= n, f"c must have {n} frequency factors, one for each pair, not {c.ne[0]}")
    rule(all(is_number(params[k]) for k in _SCALING), f"{', '.join(_SCALING)} must be numbers")
    rule(params["freq_base"] > 0 and params["freq_scale"] > 0, "freq_base and freq_scale must be positive")
    if params["ext_factor"] != 0:
        yarn = is_int(params["n_ctx_orig"], 1) and params["beta_fast"] > 0 and params["beta_slow"] > 0
        rule(yarn and params["freq_base"] != 1, "ext_factor needs a positive n_ctx_orig, beta_fast and beta_slow")
    return a.ne


def _angles(n_dims: int, steps: Array, c: Array | None, p: dict[str, Any]) -> Array:
    """Angle per position of each pair; `steps` says how many steps it is from the fastest pair."""
    extrapolated = p["freq_base"] ** (-2 * steps / n_dims)
    if c is not None:
        extrapolated = extrapolated / c.reshape(-1)[: len(steps)]
    interpolated = p["freq_scale"] * extrapolated
    if p["ext_factor"] == 0:
        return interpolated

    def pair_of(rotations: float) -> float:  # the pair that turns this number of times within the original context
        return n_dims * log(p["n_ctx_orig"] / (rotations * 2 * pi)) / (2 * log(p["freq_base"]))

    low, high = max(0, floor(pair_of(p["beta_fast"]))), min(n_dims - 1, ceil(pair_of(p["beta_slow"])))
    ramp = np.clip((np.arange(len(steps)) - low) / max(0.001, high - low), 0, 1)
    kept = (1 - ramp) * p["ext_factor"]
    return interpolated * (1 - kept) + extrapolated * kept


def _sectors(n_pairs: int, mode: int, sections: Array) -> tuple[Array, Array]:
    """For each pair: which of the four positions it turns by, and how many steps it is from the fastest pair that turns
    by the same."""
    pair = np.arange(n_pairs)
    if mode < ROPE_TYPE_MROPE:
        return np.zeros_like(pair), pair
    sector, ends = pair % sections.sum(), sections.cumsum()
    if mode == ROPE_TYPE_IMROPE:
        return np.where(sector < 3 * sections[sector % 3], sector % 3, 3), pair
    axis = (sector[:, None] >= ends[:3]).sum(axis=1)
    return axis, sector - (ends - sections)[axis] if mode == ROPE_TYPE_VISION else pair


def _reference(direction: float) -> Callable[..., Array]:
    def ref(a: Array, b: Array, c: Array | None, n_dims: int, mode: int, **p: Any) -> Array:
        n = _n_pairs(n_dims, mode)
        axis, steps = _sectors(n, mode, np.array([p.get(k, 0) for k in _SECTIONS]))
        scale = p["attn_factor"] * (1 if p["ext_factor"] == 0 else 1 + 0.1 * log(1 / p["freq_scale"]))
        positions = np.transpose(b.reshape(-1, int(a.shape[1]))[axis])  # [tokens, pairs]
        theta = (positions * _angles(n_dims, steps, c, p))[:, None, :]  # [tokens, heads, pairs]
        cos, sin = np.cos(theta) * scale, np.sin(theta) * scale * direction
        norm = mode == ROPE_TYPE_NORM
        first = slice(0, 2 * n, 2) if norm else slice(0, n)
        second = slice(1, 2 * n, 2) if norm else slice(n, 2 * n)
        out = np.array(a)
        out[..., first] = a[..., first] * cos - a[..., second] * sin
        out[..., second] = a[..., first] * sin + a[..., second] * cos
        return out

    return ref


def _cost(t: Tensor) -> Cost:
    return Cost(4 * t.n_elements, t.n_elements * t.dtype.type_size, t.n_elements * t.dtype.type_size)


def _define(
    name: str,
    reverse: str,
    kernel: str,
    direction: float,
    params: tuple[str, ...],
    modes: type[IntEnum],
    shape: Callable[[Srcs, Params], Ne],
) -> OpDef:
    """`reverse`: the op that turns by the same angles the other way, which computes the gradient."""

    def grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
        return lambda: record(OPS[reverse], (gy, node.src[1], node.src[2]), node.op_params), None, None

    return OpDef(
        name=name,
        srcs=("a", "b", "c?"),
        params=params,
        enums={"mode": modes},
        shape=shape,
        dtypes={(t, I32, c): t for t in (F32, F16) for c in (None, F32)},
        ref=_reference(direction),
        kernel=kernel,
        cost=_cost,
        inplace=(0,),
        label="rope(a, b)",
        grad=grad,
    )


ROPE = _define("rope", "rope_ext_back", "rope", 1.0, _PARAMS, _MODES, _shape)
ROPE_EXT_BACK = _define("rope_ext_back", "rope", "rope_back", -1.0, _PARAMS, _MODES, _shape)
ROPE_MULTI = _define("rope_multi", "rope_multi_back", "rope", 1.0, (*_PARAMS, *_SECTIONS), _MULTI_MODES, _multi_shape)
ROPE_MULTI_BACK = _define(
    "rope_multi_back", "rope_multi", "rope_back", -1.0, (*_PARAMS, *_SECTIONS), _MULTI_MODES, _multi_shape
)


def rope(a: Tensor, b: Tensor, n_dims: int, mode: int | str) -> Tensor:
    """`rope_ext` with base 10000, no scaling and no frequency factors (ggml_rope)."""
    return rope_ext(a, b, None, n_dims, mode, 0, 10000.0, 1.0, 0.0, 1.0, 0.0, 0.0)


def rope_inplace(a: Tensor, b: Tensor, n_dims: int, mode: int | str) -> Tensor:
    """`rope`, the result written over `a`."""
    return rope_ext_inplace(a, b, None, n_dims, mode, 0, 10000.0, 1.0, 0.0, 1.0, 0.0, 0.0)


def rope_ext(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    n_dims: int,
    mode: int | str,
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
    mode, by number or name: ROPE_TYPE_NORM, "norm" (pairs 2i, 2i + 1) or ROPE_TYPE_NEOX, "neox" (pairs i, i +
    n_dims / 2).

    Pair i turns by position * freq_base ** (-2i / n_dims) / c[i] * freq_scale radians. ext_factor > 0 mixes in the
    angle without freq_scale for pairs that turn more than `beta_slow` to `beta_fast` times within `n_ctx_orig`
    positions (YaRN), and scales the result by 1 + 0.1 ln(1 / freq_scale); attn_factor scales it too.
    Result: shape and type of `a`. Raises ShapeError, DTypeError.
    """
    p = _params(n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return record(ROPE, (a, b, c), p)


rope_ext_inplace = inplace(ROPE, rope_ext)


def rope_ext_back(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    n_dims: int,
    mode: int | str,
    n_ctx_orig: int,
    freq_base: float,
    freq_scale: float,
    ext_factor: float,
    attn_factor: float,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """`rope_ext` with the angles reversed: its gradient, and its inverse when nothing is scaled
    (ggml_rope_ext_back)."""
    p = _params(n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return record(ROPE_EXT_BACK, (a, b, c), p)


def rope_multi(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    n_dims: int,
    sections: Sequence[int],
    mode: int | str,
    n_ctx_orig: int,
    freq_base: float,
    freq_scale: float,
    ext_factor: float,
    attn_factor: float,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """`rope_ext` for tokens with four positions each; every pair turns by one of the four (ggml_rope_multi). In images
    and videos the positions are time, row and column (Qwen2-VL, arXiv 2409.12191).

    a, c and the scaling: as in `rope_ext`. b: I32, ne [4 * n_tokens]: the first positions of all tokens, then the
    second ones, and so on. sections: how many pairs turn by the first, second, third and fourth position; when pairs
    are left, the sections begin again. mode, by number or name: ROPE_TYPE_MROPE, "mrope": pairs i, i + n_dims / 2; pair
    i is as fast as in `rope_ext`. ROPE_TYPE_IMROPE, "imrope": as "mrope", but consecutive pairs take the first three
    positions in turn, as long as the section of a position has pairs left; the others take the fourth.
    ROPE_TYPE_VISION, "vision": pairs i, i + n_dims, with n_dims half of head_dim; each section begins with the fastest
    pair; c: ne [n_dims]. Result: shape and type of `a`. Raises ShapeError, DTypeError.
    """
    p = _params(n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return record(ROPE_MULTI, (a, b, c), {**p, **_section_params(sections)})


def rope_multi_back(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    n_dims: int,
    sections: Sequence[int],
    mode: int | str,
    n_ctx_orig: int,
    freq_base: float,
    freq_scale: float,
    ext_factor: float,
    attn_factor: float,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """`rope_multi` with the angles reversed: its gradient (ggml_rope_multi_back)."""
    p = _params(n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return record(ROPE_MULTI_BACK, (a, b, c), {**p, **_section_params(sections)})


def rope_multi_inplace(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    n_dims: int,
    sections: Sequence[int],
    mode: int | str,
    n_ctx_orig: int,
    freq_base: float,
    freq_scale: float,
    ext_factor: float,
    attn_factor: float,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """`rope_multi`, the result written over `a`."""
    p = _params(n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return record(ROPE_MULTI, (a, b, c), {**p, **_section_params(sections)}, inplace=0)


def _params(*values: float | str) -> Params:
    return dict(zip(_PARAMS, values, strict=True))


def _section_params(sections: Sequence[int]) -> Params:
    numbers = sections if isinstance(sections, list | tuple) else np.asarray(sections).ravel().tolist()
    return {f"section{i}": n for i, n in enumerate(numbers)}
