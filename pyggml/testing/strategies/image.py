"""Cases of pooling and interpolation, of their gradients, and of windows with relative positions."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from math import floor

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.dtypes import DType

from ..harness import Case, Src, gaussian
from .conv import LAYOUTS, SEEDS, positive
from .matmul import FLOATS, bound
from .reduce import with_infinity, with_nan

POOLS = st.sampled_from([gg.OpPool.MAX, gg.OpPool.AVG, "max", "avg"])
MODES = st.sampled_from(["nearest", "bilinear", "bicubic", 0, 1, 2, 256, 257, 258, 513, 769, "bilinear|antialias"])
FEW = st.integers(1, 3)


def about_one(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Values so near to each other that bicubic weights, which have both signs, do not make them cancel."""
    return 1 + rng.random(shape)


def about_one_or_nan(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.where(rng.integers(0, 9, shape) == 0, np.nan, about_one(rng, shape))


def positive_or_special(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.abs(with_infinity(rng, shape) + 0 * with_nan(rng, shape))


@st.composite
def pool_axes(draw: st.DrawFn, longest: int, whole: bool) -> tuple[int, int, int, float]:
    """Size, window, stride, padding; every window sees an element."""
    k, s = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    p = draw(st.integers(0, k - 1)) if whole else draw(st.integers(0, 2 * (k - 1))) / 2
    n = max(1, k - floor(2 * p)) + draw(st.integers(0, longest))
    last = floor((n + 2 * p - k) / s) * s - floor(p)
    return n + max(0, last - n + 1), k, s, p


def pooled(draw: st.DrawFn, op: object, *ne: int) -> Src:
    """What is added must not cancel."""
    added = [positive, positive_or_special]
    values = added if op in (gg.OpPool.AVG, "avg") else [gaussian, with_infinity, with_nan]
    return Src(draw(st.sampled_from(FLOATS)), ne, *draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(values)))


@st.composite
def pool_1d_cases(draw: st.DrawFn) -> Case:
    (n, k, s, p), op = draw(pool_axes(90, True)), draw(POOLS)
    a = pooled(draw, op, n, draw(FEW), draw(FEW), draw(FEW))
    return Case((a,), lambda a: gg.pool_1d(a, op, k, s, int(p)), bound(k), draw(SEEDS))


@st.composite
def pool_2d_cases(draw: st.DrawFn) -> Case:
    w, h, op = draw(pool_axes(90, False)), draw(pool_axes(9, False)), draw(POOLS)
    a = pooled(draw, op, w[0], h[0], draw(FEW), draw(FEW))
    (_, k0, s0, p0), (_, k1, s1, p1) = w, h
    return Case((a,), lambda a: gg.pool_2d(a, op, k0, k1, s0, s1, p0, p1), bound(w[1] * h[1]), draw(SEEDS))


def windows(n: int, k: int, s: int, p: float) -> int:
    return floor((n + 2 * p - k) / s) + 1


@st.composite
def pool_1d_back_cases(draw: st.DrawFn) -> Case:
    (n, k, s, p), op = draw(pool_axes(90, True)), draw(POOLS)
    af = pooled(draw, op, n, draw(FEW), draw(FEW), draw(FEW))
    a = Src(gg.F32, (windows(n, k, s, p), *af.ne[1:]), *draw(st.sampled_from(LAYOUTS)), positive)
    return Case((a, af), lambda a, af: gg.pool_1d_back(a, af, op, k, s, int(p)), bound(k), draw(SEEDS))


@st.composite
def pool_2d_back_cases(draw: st.DrawFn) -> Case:
    w, h, op = draw(pool_axes(90, False)), draw(pool_axes(9, False)), draw(POOLS)
    af = pooled(draw, op, w[0], h[0], draw(FEW), draw(FEW))
    a = Src(gg.F32, (windows(*w), windows(*h), *af.ne[2:]), *draw(st.sampled_from(LAYOUTS)), positive)
    (_, k0, s0, p0), (_, k1, s1, p1) = w, h
    nmse = bound(k0 * k1)
    return Case((a, af), lambda a, af: gg.pool_2d_back(a, af, op, k0, k1, s0, s1, p0, p1), nmse, draw(SEEDS))


@st.composite
def upscale_back_cases(draw: st.DrawFn) -> Case:
    """An element of a small image has weights in all elements of a large one."""
    sizes = st.integers(1, 40)
    ne, to = [(draw(sizes), draw(sizes), draw(FEW), draw(FEW)) for _ in range(2)]
    mode = draw(MODES)
    a = Src(gg.F32, ne, *draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([about_one, about_one_or_nan])))
    return Case((a,), lambda a: gg.upscale_back(a, *to, mode), bound(200), draw(SEEDS))


@st.composite
def upscale_cases(draw: st.DrawFn) -> Case:
    """At most some 80 taps each way, whose weights are rounded to f32."""
    sizes = st.integers(1, 40)
    ne, to = [(draw(sizes), draw(sizes), draw(FEW), draw(FEW)) for _ in range(2)]
    mode, times = draw(MODES), draw(st.integers(1, 3))
    a = Src(gg.F32, ne, *draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([about_one, about_one_or_nan])))
    if draw(st.booleans()):
        return Case((a,), lambda a: gg.upscale(a, times, mode), bound(80), draw(SEEDS))
    return Case((a,), lambda a: gg.interpolate(a, *to, mode), bound(80), draw(SEEDS))


@st.composite
def win_part_cases(draw: st.DrawFn) -> Case:
    t, w = draw(st.sampled_from([gg.F32, gg.F16, gg.BF16, gg.I32, DType.I8, DType.F64])), draw(st.integers(1, 5))
    ne = (draw(st.integers(1, 9)), draw(st.integers(1, 12)), draw(st.integers(1, 12)))
    a = Src(t, ne, *draw(st.sampled_from(LAYOUTS[:-1])))
    if draw(st.booleans()):
        return Case((a,), lambda a: gg.win_part(a, w), 0.0, draw(SEEDS))
    return Case((a,), lambda a: gg.win_unpart(gg.win_part(a, w), ne[1], ne[2], w), 0.0, draw(SEEDS))


@st.composite
def win_unpart_cases(draw: st.DrawFn) -> Case:
    t, w = draw(st.sampled_from([gg.F32, gg.F16, gg.BF16, gg.I32, DType.I8, DType.F64])), draw(st.integers(1, 5))
    w0, h0 = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    ne = (draw(st.integers(1, 9)), w, w, -(-w0 // w) * -(-h0 // w))
    a = Src(t, ne, *draw(st.sampled_from(LAYOUTS)))
    return Case((a,), lambda a: gg.win_unpart(a, w0, h0, w), 0.0, draw(SEEDS))


@st.composite
def get_rel_pos_cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(1, 9))
    layout = draw(st.sampled_from([(None, 0), (None, 3), ((1, 0, 2, 3), 0)]))
    a = Src(draw(st.sampled_from(FLOATS)), (draw(st.integers(1, 40)), 2 * n - 1), *layout)
    return Case((a,), lambda a: gg.get_rel_pos(a, n, n), 0.0, draw(SEEDS))


@st.composite
def add_rel_pos_cases(draw: st.DrawFn) -> Case:
    n, w, h, batch = draw(st.integers(1, 18)), draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(FEW)
    layout = draw(st.sampled_from([(None, 0), (None, 3), ((1, 0, 2, 3), 0)]))
    a = Src(gg.F32, (n * n, w * h, batch), *layout, positive)
    pw, ph = (Src(gg.F32, (n, w, h, batch), *draw(st.sampled_from(LAYOUTS)), positive) for _ in range(2))
    op = draw(st.sampled_from([gg.add_rel_pos, gg.add_rel_pos_inplace]))
    return Case((a, pw, ph), op, 1e-13, draw(SEEDS))


STRATEGIES = {
    "pool_1d": pool_1d_cases(),
    "pool_1d_back": pool_1d_back_cases(),
    "pool_2d": pool_2d_cases(),
    "pool_2d_back": pool_2d_back_cases(),
    "upscale": upscale_cases(),
    "upscale_back": upscale_back_cases(),
    "win_part": win_part_cases(),
    "win_unpart": win_unpart_cases(),
    "get_rel_pos": get_rel_pos_cases(),
    "add_rel_pos": add_rel_pos_cases(),
}
