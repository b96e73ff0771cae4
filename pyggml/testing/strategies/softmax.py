"""Cases of soft_max (with and without mask) and diag_mask_inf."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.tensor import Tensor

from ..harness import Case, Src, Values, gaussian

ROUNDING = (80 * 2.0**-24) ** 2  # half a unit in the last place of a score, up to some 80, in its exponential
ROWS = st.one_of(st.integers(1, 70), st.integers(255, 260), st.sampled_from([1024, 4099]))


def causal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """0 or -inf; the first column is open, so that every row has something to look at."""
    hidden = rng.integers(0, 2, shape) == 0
    hidden[..., 0] = False
    return np.where(hidden, -np.inf, 0.0)


def distances(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """As ALiBi has them."""
    row, column = np.indices(shape[2:])
    return np.broadcast_to(-np.abs(row - column).astype(np.float64), shape)


def mild(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Without outliers: scores of some hundred would make the error of one score the error of the result."""
    return rng.standard_normal(shape)


def of_signs(values: Values, first: int) -> Values:
    """The magnitudes of `values`, with signs that alternate from `first` on. The error of a sum that cancels has no
    bound that follows from its result: terms of this kind do not cancel."""

    def signed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        x = np.abs(values(rng, shape))
        x.flat[0::2] *= first
        x.flat[1::2] *= -first
        return x

    return signed


def draw_sinks(draw: st.DrawFn, n_head: int) -> Src | None:
    return draw(st.sampled_from([None, None, Src(gg.F32, (n_head,), None, 0, mild)]))


def hidden_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.where(rng.integers(0, 2, (*shape[:3], 1)) == 0, -np.inf, np.zeros(shape))


def with_odd_values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """-inf here and there; NaN in one row."""
    x = np.where(rng.integers(0, 5, shape) == 0, -np.inf, gaussian(rng, shape))
    x[..., 0] = 0
    x.flat[0] = np.nan
    return x


@st.composite
def soft_max_cases(draw: st.DrawFn) -> Case:
    n0 = draw(ROWS)
    m2, m3 = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    ne = (n0, draw(st.integers(1, 5)), m2 * draw(st.integers(1, 4)), m3 * draw(st.integers(1, 2)))
    sinks = draw_sinks(draw, ne[2])
    a = Src(gg.F32, ne, None, 0, mild if sinks else draw(st.sampled_from([gaussian, gaussian, with_odd_values])))
    seed = draw(st.integers(0, 99))
    kind = draw(st.sampled_from([None, gg.F32, gg.F16]))
    if kind is None and sinks is None and draw(st.booleans()):
        return Case((a,), draw(st.sampled_from([gg.soft_max, gg.soft_max_inplace])), ROUNDING, seed)
    mask = None
    max_bias = 0.0
    if kind is not None:
        max_bias = draw(st.sampled_from([0.0, 0.0, 8.0, 3.7]))
        values = draw(st.sampled_from([causal, causal, mild if sinks else gaussian, distances, hidden_rows]))
        mask = Src(kind, (n0, ne[1] + draw(st.sampled_from([0, 3])), m2, m3), None, 0, values)
    f = draw(st.sampled_from([gg.soft_max_ext, gg.soft_max_ext_inplace]))
    scale = draw(st.sampled_from([0.125, 0.3, 1.0, -1.7, 0.0]))

    def build(a: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        return f(a, mask, scale, max_bias, sinks)

    return Case((a, mask, sinks), build, ROUNDING * max(1, scale * scale), seed)


@st.composite
def back_cases(draw: st.DrawFn) -> Case:
    ne = (draw(ROWS), *(draw(st.integers(1, 3)) for _ in range(3)))
    layouts = st.sampled_from([(None, 0), (None, 3), ((0, 2, 1, 3), 0)])

    def weights(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        e = np.exp(3 * rng.standard_normal(shape))
        # One weight of nearly 1 would leave of its gradient the difference of two equal numbers.
        return e / e.sum(axis=3, keepdims=True) / 2 + 0.5 / shape[3]

    a, b = Src(gg.F32, ne, *draw(layouts), of_signs(gaussian, 1)), Src(gg.F32, ne, None, 0, weights)
    f = draw(st.sampled_from([gg.soft_max_ext_back, gg.soft_max_ext_back_inplace]))
    scale = draw(st.sampled_from([0.125, 1.0, -1.7]))
    nmse = 1e-10 if ne[0] > 1 else 1.0  # of one weight, which is 1, the gradient is 0
    return Case((a, b), lambda a, b: f(a, b, scale, 0.0), nmse, draw(st.integers(0, 99)))


@st.composite
def diag_cases(draw: st.DrawFn) -> Case:
    ne = (draw(ROWS), *(draw(st.integers(1, 9 if i == 0 else 3)) for i in range(3)))
    a = Src(gg.F32, ne, draw(st.sampled_from([None, (1, 0, 2, 3), (0, 2, 1, 3)])))
    n_past = draw(st.one_of(st.integers(0, 80), st.just(10**12)))
    f = draw(st.sampled_from([gg.diag_mask_inf, gg.diag_mask_inf_inplace]))
    return Case((a,), lambda a: f(a, n_past), 0.0, draw(st.integers(0, 99)))


STRATEGIES = {"soft_max": soft_max_cases(), "soft_max_ext_back": back_cases(), "diag_mask_inf": diag_cases()}
