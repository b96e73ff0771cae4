"""Cases of norm, rms_norm, l2_norm, group_norm."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.tensor import Tensor

from ..harness import Case, Src, Values, gaussian

NMSE = 1e-12
EPS = st.sampled_from([1e-6, 1e-5, 0.1, 1e-70])
ROWS = st.one_of(st.integers(1, 70), st.integers(255, 260), st.sampled_from([1024, 2049, 8192]))


def on_a_hill(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A mean that is large against the spread."""
    return 1000 + gaussian(rng, shape)


def with_nan(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    x = gaussian(rng, shape)
    x.flat[0] = np.nan
    return x


def huge(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Values whose squares, sums and differences are beyond f32, of both signs or of one."""
    return rng.uniform(2e38, 3.4e38, shape) * rng.choice([-1, 1], shape) ** rng.integers(0, 2)


def tiny(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Squares below f32; some are denormal themselves."""
    return rng.standard_normal(shape) * 10.0 ** rng.integers(-38, -18)


def zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape)


VALUES: list[Values] = [gaussian, gaussian, on_a_hill, with_nan, huge, tiny, zeros]


@st.composite
def sources(draw: st.DrawFn) -> Src:
    n0 = draw(ROWS)
    ne = (n0, *(draw(st.integers(1, 3 if n0 < 300 else 2)) for _ in range(3)))
    permute = draw(st.sampled_from([None, None, (0, 2, 1, 3), (0, 3, 2, 1)]))
    pad = draw(st.sampled_from([0, 3])) if permute is None else 0
    return Src(gg.F32, ne, permute, pad, draw(st.sampled_from(VALUES)))


def rows(op: Callable[..., Tensor], op_inplace: Callable[..., Tensor]) -> st.SearchStrategy[Case]:
    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        f, eps = draw(st.sampled_from([op, op_inplace])), draw(EPS)
        return Case((draw(sources()),), lambda a: f(a, eps), NMSE, draw(st.integers(0, 99)))

    return draw_case()


@st.composite
def groups(draw: st.DrawFn) -> Case:
    ne = (draw(st.integers(1, 40)), draw(st.integers(1, 9)), draw(st.integers(1, 13)), draw(st.integers(1, 3)))
    n_groups = draw(st.integers(1, ne[2]))
    f, eps = draw(st.sampled_from([gg.group_norm, gg.group_norm_inplace])), draw(EPS)
    a = Src(gg.F32, ne, draw(st.sampled_from([None, (0, 2, 1, 3)])), 0, draw(st.sampled_from(VALUES)))
    return Case((a,), lambda a: f(a, n_groups, eps), NMSE, draw(st.integers(0, 99)))


STRATEGIES = {
    "norm": rows(gg.norm, gg.norm_inplace),
    "rms_norm": rows(gg.rms_norm, gg.rms_norm_inplace),
    "l2_norm": rows(gg.l2_norm, gg.l2_norm_inplace),
    "group_norm": groups(),
}
