"""Cases of ops that Python computes."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

import pyggml as gg

from ..harness import Case, Src


def _sort(dst: np.ndarray, a: np.ndarray, ith: int = 0, nth: int = 1) -> None:
    rows = slice(ith, None, nth)
    dst.reshape(-1, dst.shape[-1])[rows] = np.sort(a.reshape(-1, a.shape[-1])[rows])


@st.composite
def map_custom_cases(draw: st.DrawFn) -> Case:
    ne = draw(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3)))
    dtype, n_tasks = draw(st.sampled_from([gg.F32, gg.F16])), draw(st.sampled_from([1, None]))
    src = Src(dtype, ne, permute=draw(st.sampled_from([None, (1, 0, 2, 3)])))
    return Case((src,), lambda a: gg.map_custom(_sort, a, n_tasks=n_tasks), 0.0, draw(st.integers(0, 99)))


STRATEGIES = {"map_custom": map_custom_cases()}
