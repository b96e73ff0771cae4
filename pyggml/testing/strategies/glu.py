"""Cases of the gated linear units: halves of one tensor, swapped halves, two tensors."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.tensor import Tensor

from ..harness import Case, Src
from .unary import FINITE_EDGES, NMSE, PERMUTES, edges, lengths, scaled


def cases(split: Callable[[Tensor, Tensor], Tensor], *of_halves: Callable[[Tensor], Tensor]) -> st.SearchStrategy[Case]:
    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        n, *outer = draw(lengths), *(draw(st.integers(1, 3)) for _ in range(3))
        dtype, seed = draw(st.sampled_from(list(NMSE))), draw(st.integers(0, 99))
        layouts = st.sampled_from([(p, 0) for p in PERMUTES] + [(None, 3)])
        # no infinities: times a gate that underflows in F32 but not in float64 they would give NaN
        values = st.sampled_from([scaled(1), scaled(10), edges(np.nan, *FINITE_EDGES)])
        if draw(st.booleans()):
            a, b = (Src(dtype, (n, *outer), *draw(layouts), draw(values)) for _ in range(2))
            return Case((a, b), split, NMSE[dtype], seed)
        a = Src(dtype, (2 * n, *outer), *draw(layouts), draw(values))
        return Case((a,), draw(st.sampled_from(of_halves)), NMSE[dtype], seed)

    return draw_case()


def oai(a: Tensor, b: Tensor | None = None) -> Tensor:
    return gg.swiglu_oai(a, b, 1.702, 7.0)


def clamped(a: Tensor, b: Tensor | None = None) -> Tensor:
    return gg.swiglu_clamp(a, b, 2.5)


STRATEGIES = {
    "reglu": cases(gg.reglu_split, gg.reglu, gg.reglu_swapped),
    "geglu": cases(gg.geglu_split, gg.geglu, gg.geglu_swapped),
    "geglu_erf": cases(gg.geglu_erf_split, gg.geglu_erf, gg.geglu_erf_swapped),
    "geglu_quick": cases(gg.geglu_quick_split, gg.geglu_quick, gg.geglu_quick_swapped),
    "swiglu": cases(gg.swiglu_split, gg.swiglu, gg.swiglu_swapped),
    "swiglu_oai": cases(oai, oai),
    "swiglu_clamp": cases(clamped, clamped),
}
