"""Cases of comparisons, maximum, minimum and where. All of them are exact."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.ops.copy import PLAIN_TYPES
from pyggml.tensor import Tensor

from ..harness import Case, Src, Values

TYPES = (gg.F32, gg.F16, gg.BF16, gg.I32, gg.I64)
PERMUTES = [None, None, (0, 2, 1, 3), (1, 0, 2, 3), (3, 1, 2, 0)]
LENGTHS = st.one_of(st.integers(1, 70), st.integers(255, 260), st.integers(511, 513))
FLOATS = np.array([-np.inf, -1.5, -0.0, 0.0, 6e-8, 1.5, 6e4, np.inf, np.nan, -np.nan])


def few(t: gg.DType) -> Values:
    """Few distinct values, so that many are equal: zeros of both signs, infinities, NaN; the ends of integers."""
    ends = np.iinfo(t.np_dtype) if t.np_dtype is not None and t.np_dtype.kind == "i" else None
    values = FLOATS if ends is None else np.array([ends.min, -1, 0, 1, ends.max - 1, ends.max], np.int64)
    return lambda rng, shape: rng.choice(values, shape)


def mask(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice(np.array([0, 1, -7, 1 << 16]), shape)


@st.composite
def shapes(draw: st.DrawFn, n: int) -> list[tuple[int, ...]]:
    """Shapes that all repeat to one shape, which has the largest ne of them in each dimension."""
    least = [draw(LENGTHS if i == 0 else st.integers(1, 3)) for i in range(4)]
    whole = [m * draw(st.sampled_from([1, 1, 1, 2, 3])) for m in least]
    options = [
        st.sampled_from([1, m, w, w]) if i == 0 else st.sampled_from([1, w, w])
        for i, (m, w) in enumerate(zip(least, whole, strict=True))
    ]
    return [tuple(draw(option) for option in options) for _ in range(n)]


def pairs(op: Callable[..., Tensor]) -> st.SearchStrategy[Case]:
    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        t = draw(st.sampled_from(TYPES))
        srcs = [Src(t, ne, draw(st.sampled_from(PERMUTES)), 0, few(t)) for ne in draw(shapes(2))]
        return Case(tuple(srcs), op, 0.0, draw(st.integers(0, 99)))

    return draw_case()


@st.composite
def where_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from(PLAIN_TYPES))
    kinds = ((gg.I32, mask), (t, few(t)), (t, few(t)))
    of = zip(kinds, draw(shapes(3)), strict=True)
    srcs = [Src(dtype, ne, draw(st.sampled_from(PERMUTES)), 0, values) for (dtype, values), ne in of]
    return Case(tuple(srcs), gg.where, 0.0, draw(st.integers(0, 99)))


NAMES = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "maximum", "minimum")
STRATEGIES = {**{name: pairs(getattr(gg, name)) for name in NAMES}, "where": where_cases()}
