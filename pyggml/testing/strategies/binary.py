"""Cases of add, sub, mul, div."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.tensor import Tensor

from ..harness import Case, Src, gaussian

FLOATS = (gg.F32, gg.F16, gg.BF16)
TYPES = [(gg.F32, gg.F32), (gg.I32, gg.I32), (gg.I64, gg.I64), *((a, b) for a in FLOATS for b in (*FLOATS, gg.I32))]
NMSE = {gg.F32: 1e-13, gg.F16: 1e-6, gg.BF16: 1e-4, gg.I32: 0.0, gg.I64: 0.0}


def away_from_zero(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.where(rng.integers(0, 2, shape) == 0, -1, 1) * (0.5 + np.abs(gaussian(rng, shape)))


def small(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(1, 100, shape) * rng.choice([-1, 1], shape)


def extreme(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """What wraps around, and what does not divide."""
    return rng.choice(np.array([0, -1, 7, -7, 2**31 - 1, -(2**31), 123456789]), shape)


def extreme_i64(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice(np.array([0, -1, 7, -7, 2**63 - 1, -(2**63), 2**53 + 1, 3 * 2**60 + 1]), shape)


def cases(op: Callable[..., Tensor], op_inplace: Callable[..., Tensor]) -> st.SearchStrategy[Case]:
    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        ta, tb = draw(st.sampled_from(TYPES))
        b_ne = tuple(draw(st.integers(1, 70 if i == 0 else 3)) for i in range(4))
        reps = tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in range(4))
        a_ne = tuple(n * r for n, r in zip(b_ne, reps, strict=True))
        a_values, b_values = gaussian, small if tb is gg.I32 else away_from_zero
        if ta is gg.I32:
            a_values = b_values = draw(st.sampled_from([small, extreme]))
        if ta is gg.I64:
            a_values = b_values = draw(st.sampled_from([small, extreme_i64]))
        a = Src(ta, a_ne, draw(st.sampled_from([None, (0, 2, 1, 3), (1, 0, 2, 3), (3, 1, 2, 0)])), 0, a_values)
        b = Src(tb, b_ne, draw(st.sampled_from([None, (0, 2, 1, 3), (2, 0, 1, 3)])), 0, b_values)
        return Case((a, b), draw(st.sampled_from([op, op_inplace])), NMSE[ta], draw(st.integers(0, 99)))

    return draw_case()


STRATEGIES = {
    "add": cases(gg.add, gg.add_inplace),
    "sub": cases(gg.sub, gg.sub_inplace),
    "mul": cases(gg.mul, gg.mul_inplace),
    "div": cases(gg.div, gg.div_inplace),
}
