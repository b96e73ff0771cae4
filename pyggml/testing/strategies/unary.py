"""Cases of the elementwise functions of one tensor, with and without parameters."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.tensor import Tensor

from ..harness import Case, Src, gaussian

NMSE = {gg.F32: 1e-13, gg.F16: 1e-6, gg.BF16: 1e-4}
PERMUTES = [None, None, (0, 2, 1, 3), (1, 0, 2, 3), (3, 1, 2, 0)]
lengths = st.one_of(st.integers(1, 70), st.integers(255, 260), st.integers(2046, 2050))


def scaled(factor: float) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    """Gaussian times `factor`; the first element is 2, so that no case measures the tail of a function alone."""

    def values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        x = gaussian(rng, shape) * factor
        x.flat[0] = 2
        return x

    return values


def edges(*numbers: float) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    """One value in three is one of `numbers`."""

    def values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        x = np.where(rng.integers(0, 3, shape) == 0, rng.choice(np.array(numbers), shape), gaussian(rng, shape))
        x.flat[-1] = 2
        return x

    return values


FINITE_EDGES = (0.0, -0.0, 6e4, -6e4, 100.0, -100.0, 1e-7, -1e-7, 0.5, -2.5, 0.49999997)


@st.composite
def sources(draw: st.DrawFn) -> Src:
    """One float tensor of any type, size and layout."""
    ne = (draw(lengths), *(draw(st.integers(1, 3)) for _ in range(3)))
    permute, pad = draw(st.sampled_from([(p, 0) for p in PERMUTES] + [(None, 3)]))
    values = draw(st.sampled_from([scaled(1), scaled(0.01), scaled(30), edges(np.inf, -np.inf, np.nan, *FINITE_EDGES)]))
    return Src(draw(st.sampled_from(list(NMSE))), ne, permute, pad, values)


def cases(builds: list[Callable[[Tensor], Tensor]], exact: bool = False) -> st.SearchStrategy[Case]:
    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        a = draw(sources())
        return Case((a,), draw(st.sampled_from(builds)), 0.0 if exact else NMSE[a.dtype], draw(st.integers(0, 99)))

    return draw_case()


def both(name: str) -> list[Callable[[Tensor], Tensor]]:
    return [getattr(gg, name), getattr(gg, f"{name}_inplace")]


def with_numbers(f: Callable[..., Tensor], *numbers: float) -> Callable[[Tensor], Tensor]:
    return lambda a: f(a, *numbers)


@st.composite
def add1_cases(draw: st.DrawFn) -> Case:
    a = draw(sources())
    b = Src(draw(st.sampled_from([gg.F32, a.dtype])), (1,))
    return Case((a, b), draw(st.sampled_from([gg.add1, gg.add1_inplace])), NMSE[a.dtype], draw(st.integers(0, 99)))


@st.composite
def back_cases(draw: st.DrawFn, name: str) -> Case:
    b = draw(sources())
    a = Src(gg.F32, b.ne, draw(st.sampled_from(PERMUTES)))
    return Case((a, b), getattr(gg, f"{name}_back"), 1e-12, draw(st.integers(0, 99)))


INEXACT = [
    "silu",
    "gelu",
    "gelu_quick",
    "gelu_erf",
    "elu",
    "tanh",
    "sigmoid",
    "hardswish",
    "hardsigmoid",
    "exp",
    "expm1",
    "log",
    "softplus",
    "sqr",
    "sqrt",
    "sin",
    "cos",
]
EXACT = ["relu", "step", "neg", "abs", "floor", "ceil", "round", "trunc", "sgn"]
STRATEGIES = {
    **{name: cases(both(name)) for name in INEXACT},
    **{name: cases(both(name), exact=True) for name in EXACT},
    "scale": cases(
        [
            with_numbers(gg.scale, 0.37),
            with_numbers(gg.scale_inplace, -2.0),
            with_numbers(gg.scale_bias, 0.37, -1.5),
            with_numbers(gg.scale_bias_inplace, 1.25, 3.0),
        ]
    ),
    "clamp": cases(
        [
            with_numbers(gg.clamp, -0.5, 0.75),
            with_numbers(gg.clamp_inplace, 0.0, float("inf")),
            with_numbers(gg.clamp, 1.0, -1.0),
        ],
        exact=True,
    ),
    "leaky_relu": cases([with_numbers(gg.leaky_relu, 0.1), with_numbers(gg.leaky_relu, 0.25, True)]),
    "xielu": cases([with_numbers(gg.xielu, 0.8, 0.7, 0.5, 1e-6), with_numbers(gg.xielu, -1.0, 2.0, 0.0, -1e-6)]),
    "fill": cases([with_numbers(gg.fill, 2.4), with_numbers(gg.fill_inplace, float("-inf"))], exact=True),
    "add1": add1_cases(),
    **{f"{name}_back": back_cases(name) for name in ("silu", "gelu", "gelu_quick", "gelu_erf")},
}
