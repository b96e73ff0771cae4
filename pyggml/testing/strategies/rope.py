"""Cases of rope, with sections too, and its reverse."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.dtypes import DType
from pyggml.tensor import Tensor

from ..harness import Case, Src

NMSE = {DType.F32: 1e-13, DType.F16: 1e-6}
LAYOUTS = [None, None, (0, 2, 1, 3), (1, 0, 2, 3), (0, 3, 1, 2)]
# n_ctx_orig, freq_scale, ext_factor, attn_factor
SCALINGS = [(0, 1.0, 0.0, 1.0), (0, 0.25, 0.0, 1.5), (4096, 0.25, 1.0, 1.0), (64, 0.5, 0.7, 1.3)]


def positions(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([0, 1, -3, 17, 511, 4000, 131071], shape)


def factors(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.5, 32, shape)


@st.composite
def draw_case(draw: st.DrawFn, ops: list[Callable[..., Tensor]]) -> Case:
    t = draw(st.sampled_from([DType.F32, DType.F16]))
    n0 = draw(st.one_of(st.integers(2, 70), st.integers(127, 130)))
    n_dims = 2 * draw(st.one_of(st.just(n0 // 2), st.integers(1, n0 // 2)))
    ne = (n0, draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 2)))
    mode = draw(st.sampled_from([gg.ROPE_TYPE_NORM, gg.ROPE_TYPE_NEOX]))
    base = draw(st.sampled_from([10000.0, 500000.0]))
    n_ctx_orig, freq_scale, ext_factor, attn_factor = draw(st.sampled_from(SCALINGS))
    beta = draw(st.sampled_from([(32.0, 1.0), (16.0, 2.0)]))
    layout = draw(st.sampled_from(LAYOUTS))
    a = Src(t, ne, layout, 0 if layout else draw(st.sampled_from([0, 3])))
    b = Src(DType.I32, (ne[2],), None, 0, positions)
    c = draw(st.sampled_from([None, Src(DType.F32, (n_dims // 2,), None, 0, factors)]))
    op = draw(st.sampled_from(ops))

    def build(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
        return op(a, b, c, n_dims, mode, n_ctx_orig, base, freq_scale, ext_factor, attn_factor, *beta)

    return Case((a, b, c), build, NMSE[t], draw(st.integers(0, 99)))


@st.composite
def sections_cases(draw: st.DrawFn, ops: list[Callable[..., Tensor]]) -> Case:
    t = draw(st.sampled_from([DType.F32, DType.F16]))
    mode = draw(st.sampled_from([gg.ROPE_TYPE_MROPE, gg.ROPE_TYPE_VISION, gg.ROPE_TYPE_IMROPE]))
    n_dims = 2 * draw(st.one_of(st.integers(1, 12), st.sampled_from([32, 33, 64])))
    vision = mode == gg.ROPE_TYPE_VISION
    n_pairs = n_dims if vision else n_dims // 2
    n0 = 2 * n_dims if vision else n_dims + draw(st.sampled_from([0, 0, 1, 6]))
    sections = draw(st.lists(st.integers(0, n0 // 4), min_size=4, max_size=4).filter(lambda s: any(s[:3])))
    if draw(st.booleans()):
        sections = [1 + n_pairs // 4, n_pairs // 4, n_pairs // 4, 0]
    ne = (n0, draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 2)))
    layout = draw(st.sampled_from(LAYOUTS))
    a = Src(t, ne, layout, 0 if layout else draw(st.sampled_from([0, 3])))
    b = Src(DType.I32, (4 * ne[2],), None, 0, positions)
    c = draw(st.sampled_from([None, Src(DType.F32, (n_pairs,), None, 0, factors)]))
    n_ctx_orig, freq_scale, ext_factor, attn_factor = draw(st.sampled_from(SCALINGS))
    op = draw(st.sampled_from(ops))

    def build(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
        scaling = (freq_scale, ext_factor, attn_factor, 32.0, 1.0)
        return op(a, b, c, n_dims, sections, mode, n_ctx_orig, 10000.0, *scaling)

    return Case((a, b, c), build, NMSE[t], draw(st.integers(0, 99)))


@st.composite
def plain(draw: st.DrawFn) -> Case:
    ne = (2 * draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.integers(1, 6)))
    op = draw(st.sampled_from([gg.rope, gg.rope_inplace]))
    mode = draw(st.sampled_from([0, 2]))
    srcs = (Src(DType.F32, ne), Src(DType.I32, (ne[2],), None, 0, positions))
    return Case(srcs, lambda a, b: op(a, b, ne[0], mode), NMSE[DType.F32], draw(st.integers(0, 99)))


STRATEGIES = {
    "rope": st.one_of(draw_case([gg.rope_ext, gg.rope_ext_inplace]), plain()),
    "rope_multi": sections_cases([gg.rope_multi, gg.rope_multi_inplace]),
    "rope_multi_back": sections_cases([gg.rope_multi_back]),
    "rope_ext_back": draw_case([gg.rope_ext_back]),
}
