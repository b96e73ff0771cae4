"""Cases of convolutions, of im2col and of its gradient. All values are positive, so that no sum cancels: then a sum of
k products in f32 is off by at most (k + 16) u^2 (see matmul.py)."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.tensor import Tensor

from ..harness import Case, Src, gaussian
from .matmul import FLOATS, bound

LAYOUTS = [(None, 0), (None, 0), (None, 3), ((1, 0, 2, 3), 0), ((2, 0, 1, 3), 0), ((0, 3, 1, 2), 0)]
SEEDS = st.integers(0, 99)
FEW = st.integers(1, 3)
CHANNELS = FEW | st.sampled_from([5, 9])
OUT = FEW | st.sampled_from([4, 5, 8, 67])


def positive(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.abs(gaussian(rng, shape))


class Axis(NamedTuple):
    """A window along one axis: sizes of image and kernel, stride, padding, dilation."""

    n: int
    k: int
    s: int
    p: int
    d: int

    @property
    def places(self) -> int:
        return (self.n + 2 * self.p - self.d * (self.k - 1) - 1) // self.s + 1


@st.composite
def axes(draw: st.DrawFn, longest: int = 12) -> Axis:
    k, s, p, d = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(1, 3))
    least = max(1, d * (k - 1) + 1 - 2 * p)
    return Axis(least + draw(st.integers(0, longest)), k, s, p, d)


WIDE = axes(20) | axes(150)


def image(draw: st.DrawFn, dtype: gg.DType, *ne: int) -> Src:
    return Src(dtype, ne, *draw(st.sampled_from(LAYOUTS)), positive)


def numbers(*a: Axis) -> tuple[int, ...]:
    """Strides, paddings, dilations in ggml's order."""
    return (*(x.s for x in a), *(x.p for x in a), *(x.d for x in a))


@st.composite
def im2col_cases(draw: st.DrawFn) -> Case:
    w, h, channels, batch = draw(WIDE), draw(axes()), draw(CHANNELS), draw(FEW)
    ta, tb, to = (draw(st.sampled_from(FLOATS)) for _ in range(3))
    is_2d = draw(st.booleans())
    if is_2d:
        a, b = Src(ta, (w.k, h.k, channels, 2)), image(draw, tb, w.n, h.n, channels, batch)
    else:
        a, b = Src(ta, (w.k, channels, 2)), image(draw, tb, w.n, channels, batch)
    return Case((a, b), lambda a, b: gg.im2col(a, b, *numbers(w, h), is_2d, to), 0.0, draw(SEEDS))


@st.composite
def im2col_3d_cases(draw: st.DrawFn) -> Case:
    w, h, d, channels, batch = draw(axes(20)), draw(axes(4)), draw(axes(4)), draw(FEW), draw(FEW)
    ta, tb, to = (draw(st.sampled_from(FLOATS)) for _ in range(3))
    a, b = Src(ta, (w.k, h.k, d.k, channels)), image(draw, tb, w.n, h.n, d.n, channels * batch)
    return Case((a, b), lambda a, b: gg.im2col_3d(a, b, channels, *numbers(w, h, d), to), 0.0, draw(SEEDS))


@st.composite
def im2col_back_cases(draw: st.DrawFn) -> Case:
    w, h, channels, batch = draw(WIDE), draw(axes()), draw(CHANNELS), draw(FEW)
    ta, is_2d = draw(st.sampled_from(FLOATS)), draw(st.booleans())
    if is_2d:
        a, ne = Src(ta, (w.k, h.k, channels, 2)), (w.n, h.n, channels, batch)
        b = image(draw, gg.F32, w.k * h.k * channels, w.places, h.places, batch)
    else:
        a, ne = Src(ta, (w.k, channels, 2)), (w.n, channels, batch)
        b = image(draw, gg.F32, w.k * channels, w.places, batch)
    nmse = bound(w.k * h.k)
    return Case((a, b), lambda a, b: gg.im2col_back(a, b, ne, *numbers(w, h), is_2d), nmse, draw(SEEDS))


@st.composite
def im2col_3d_back_cases(draw: st.DrawFn) -> Case:
    w, h, d, channels, batch = draw(axes(20)), draw(axes(4)), draw(axes(4)), draw(FEW), draw(FEW)
    a, ne = Src(draw(st.sampled_from(FLOATS)), (w.k, h.k, d.k, channels)), (w.n, h.n, d.n, channels * batch)
    b = image(draw, gg.F32, w.k * h.k * d.k * channels, w.places, h.places, d.places * batch)
    nmse = bound(w.k * h.k * d.k)
    return Case((a, b), lambda a, b: gg.im2col_3d_back(a, b, ne, channels, *numbers(w, h, d)), nmse, draw(SEEDS))


@st.composite
def col2im_1d_cases(draw: st.DrawFn) -> Case:
    t, n = draw(st.sampled_from(FLOATS)), draw(st.integers(1, 40) | st.sampled_from([700]))
    k, s, out = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(CHANNELS)
    p = draw(st.integers(0, min(4, ((n - 1) * s + k - 1) // 2)))
    rounded = {gg.F32: 1e-13, gg.F16: 1e-6, gg.BF16: 2e-5}[t]
    a = Src(t, (k * out, n), *draw(st.sampled_from([(None, 0), (None, 3), ((1, 0, 2, 3), 0)])), positive)
    return Case((a,), lambda a: gg.col2im_1d(a, s, out, p), rounded, draw(SEEDS))


def sliding(depthwise: bool, op: Callable[..., Tensor]) -> st.SearchStrategy[Case]:
    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        w, h, channels, batch = draw(WIDE), draw(axes()), draw(CHANNELS), draw(FEW)
        of_kernel, out = (1, channels) if depthwise else (channels, draw(OUT))
        a = image(draw, draw(st.sampled_from(FLOATS)), w.k, h.k, of_kernel, out)
        b = image(draw, gg.F32, w.n, h.n, channels, batch)
        return Case((a, b), lambda a, b: op(a, b, *numbers(w, h)), bound(w.k * h.k * of_kernel), draw(SEEDS))

    return draw_case()


@st.composite
def conv_3d_cases(draw: st.DrawFn) -> Case:
    w, h, d, channels, batch, out = draw(axes(20)), draw(axes(4)), draw(axes(4)), draw(FEW), draw(FEW), draw(OUT)
    a = image(draw, draw(st.sampled_from(FLOATS)), w.k, h.k, d.k, channels * out)
    b = image(draw, gg.F32, w.n, h.n, d.n, channels * batch)
    nmse = bound(w.k * h.k * d.k * channels)
    return Case(
        (a, b), lambda a, b: gg.conv_3d_direct(a, b, *numbers(w, h, d), channels, batch, out), nmse, draw(SEEDS)
    )


@st.composite
def conv_transpose_1d_cases(draw: st.DrawFn) -> Case:
    n, k, s = draw(st.integers(1, 20) | st.integers(60, 140)), draw(st.integers(1, 7)), draw(st.integers(1, 5))
    channels, out = draw(CHANNELS), draw(OUT)
    a, b = image(draw, draw(st.sampled_from(FLOATS)), k, out, channels), image(draw, gg.F32, n, channels, draw(FEW))
    return Case((a, b), lambda a, b: gg.conv_transpose_1d(a, b, s, 0, 1), bound(k * channels), draw(SEEDS))


@st.composite
def conv_transpose_2d_cases(draw: st.DrawFn) -> Case:
    n, k, s = draw(st.integers(1, 20) | st.integers(60, 80)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    kh, channels, out = draw(st.integers(1, 5)), draw(CHANNELS), draw(OUT)
    a = image(draw, draw(st.sampled_from(FLOATS)), k, kh, out, channels)
    b = image(draw, gg.F32, n, draw(st.integers(1, 6)), channels, draw(FEW))
    return Case((a, b), lambda a, b: gg.conv_transpose_2d_p0(a, b, s), bound(k * kh * channels), draw(SEEDS))


STRATEGIES = {
    "im2col": im2col_cases(),
    "im2col_3d": im2col_3d_cases(),
    "im2col_back": im2col_back_cases(),
    "im2col_3d_back": im2col_3d_back_cases(),
    "col2im_1d": col2im_1d_cases(),
    "conv_2d_direct": sliding(False, gg.conv_2d_direct),
    "conv_2d_dw_direct": sliding(True, gg.conv_2d_dw_direct),
    "conv_3d_direct": conv_3d_cases(),
    "conv_transpose_1d": conv_transpose_1d_cases(),
    "conv_transpose_2d_p0": conv_transpose_2d_cases(),
}
