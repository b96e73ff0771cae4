"""Cases of sums and of order along rows."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.tensor import Tensor

from ..harness import Case, Src, gaussian

# A result is rounded once (half an ulp: 2^-24, 2^-11, 2^-8 of it); the double sum's own error is far below.
NMSE = {gg.F32: 1e-14, gg.F16: 1e-6, gg.BF16: 2e-5}
LAYOUTS = [(None, 0), (None, 0), (None, 3), ((0, 2, 1, 3), 0), ((1, 0, 2, 3), 0), ((3, 1, 2, 0), 0)]
lengths = st.one_of(st.integers(1, 70), st.integers(255, 260), st.integers(2046, 2050))


def far_from_zero(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """What a float accumulator would lose: small steps on a large level."""
    return 1000 + gaussian(rng, shape)


def with_infinity(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.where(rng.integers(0, 99, shape) == 0, np.inf, gaussian(rng, shape))


def with_nan(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.where(rng.integers(0, 99, shape) == 0, np.nan, gaussian(rng, shape))


def ties(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Few distinct values, with zeros of both signs, infinities and NaN of both signs."""
    return rng.choice(np.array([-np.inf, -1.5, -0.0, 0.0, 1e-40, 1.5, np.inf, np.nan, -np.nan]), shape)


def sums(op: Callable[[Tensor], Tensor], types: list[gg.DType], longest: int) -> st.SearchStrategy[Case]:
    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        ne = (draw(st.one_of(lengths, st.just(longest))), *(draw(st.integers(1, 3)) for _ in range(3)))
        values = draw(st.sampled_from([gaussian, far_from_zero, with_infinity, with_nan]))
        a = Src(draw(st.sampled_from(types)), ne, *draw(st.sampled_from(LAYOUTS)), values)
        return Case((a,), op, NMSE[a.dtype], draw(st.integers(0, 99)))

    return draw_case()


def whole(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape)


@st.composite
def integer_sums(draw: st.DrawFn) -> Case:
    ne = (draw(lengths), *(draw(st.integers(1, 3)) for _ in range(3)))
    a = Src(draw(st.sampled_from([gg.I32, gg.I64])), ne, *draw(st.sampled_from(LAYOUTS)), whole)
    return Case((a,), gg.sum_rows, 0.0, draw(st.integers(0, 99)))


def best(op: Callable[[Tensor], Tensor]) -> st.SearchStrategy[Case]:
    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        ne = (draw(lengths), *(draw(st.integers(1, 3)) for _ in range(3)))
        t = draw(st.sampled_from([gg.F32, gg.F16, gg.BF16, gg.I32, gg.I64]))
        values = whole if t in (gg.I32, gg.I64) else draw(st.sampled_from([gaussian, ties, with_infinity, with_nan]))
        return Case((Src(t, ne, *draw(st.sampled_from(LAYOUTS)), values),), op, 0.0, draw(st.integers(0, 99)))

    return draw_case()


@st.composite
def order_sources(draw: st.DrawFn, rank: int) -> Src:
    ne = (draw(lengths), *(draw(st.integers(1, 3)) if d < rank else 1 for d in range(1, 4)))
    layouts = LAYOUTS if rank == 4 else [(None, 0), (None, 3), ((1, 0, 2, 3), 0)]
    return Src(gg.F32, ne, *draw(st.sampled_from(layouts)), draw(st.sampled_from([gaussian, ties])))


@st.composite
def argmax_cases(draw: st.DrawFn) -> Case:
    return Case((draw(order_sources(2)),), gg.argmax, 0.0, draw(st.integers(0, 99)))


@st.composite
def argsort_cases(draw: st.DrawFn) -> Case:
    order = draw(st.sampled_from([0, 1, "asc", "DESC"]))
    return Case((draw(order_sources(4)),), lambda a: gg.argsort(a, order), 0.0, draw(st.integers(0, 99)))


@st.composite
def top_k_cases(draw: st.DrawFn) -> Case:
    a = draw(order_sources(4))
    k = draw(st.integers(1, a.ne[0]))
    op = draw(st.sampled_from([gg.top_k, gg.argsort_top_k]))
    return Case((a,), lambda a: op(a, k), 0.0, draw(st.integers(0, 99)))


STRATEGIES = {
    "sum": sums(gg.sum, [gg.F32, gg.F16, gg.BF16], 40_000),
    "sum_rows": st.one_of(sums(gg.sum_rows, [gg.F32], 40_000), integer_sums()),
    "max_rows": best(gg.max_rows),
    "min_rows": best(gg.min_rows),
    "mean": sums(gg.mean, [gg.F32], 40_000),
    "cumsum": sums(gg.cumsum, [gg.F32], 40_000),
    "argmax": argmax_cases(),
    "argsort": argsort_cases(),
    "top_k": top_k_cases(),
}
