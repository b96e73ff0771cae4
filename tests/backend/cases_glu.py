"""Cases of the gated linear units: halves of one tensor, swapped halves, two tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.tensor import Tensor

from .cases_unary import FINITE_EDGES, NMSE, PERMUTES, edges, lengths, scaled
from .harness import Case, Src


def cases(
    halves: Callable[[Tensor], Tensor],
    swapped: Callable[[Tensor], Tensor],
    split: Callable[[Tensor, Tensor], Tensor],
) -> st.SearchStrategy[Case]:
    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        n, *outer = draw(lengths), *(draw(st.integers(1, 3)) for _ in range(3))
        dtype, seed = draw(st.sampled_from(list(NMSE))), draw(st.integers(0, 99))
        layouts = st.sampled_from([(p, 0) for p in PERMUTES] + [(None, 3)])
        # no infinities: times a gate that underflows in F32 but not in float64 they would give NaN
        values = st.sampled_from([scaled(1), scaled(10), edges(np.nan, *FINITE_EDGES)])
        form = draw(st.sampled_from(["halves", "swapped", "split"]))
        if form == "split":
            a, b = (Src(dtype, (n, *outer), *draw(layouts), draw(values)) for _ in range(2))
            return Case((a, b), split, NMSE[dtype], seed)
        a = Src(dtype, (2 * n, *outer), *draw(layouts), draw(values))
        return Case((a,), halves if form == "halves" else swapped, NMSE[dtype], seed)

    return draw_case()


STRATEGIES = {
    "reglu": cases(gg.reglu, gg.reglu_swapped, gg.reglu_split),
    "geglu": cases(gg.geglu, gg.geglu_swapped, gg.geglu_split),
    "swiglu": cases(gg.swiglu, gg.swiglu_swapped, gg.swiglu_split),
}
