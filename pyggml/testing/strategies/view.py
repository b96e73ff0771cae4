"""Cases of reshape, view, permute, transpose, seen through cont (null/test_view.py tests what they mean)."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

from hypothesis import strategies as st

import pyggml as gg
from pyggml.dtypes import DType
from pyggml.tensor import Tensor

from ..harness import Case, Src
from .copy import SEEDS

TYPES = [DType.F32, DType.F16, DType.BF16, DType.I32, DType.Q8_0]


@st.composite
def shapes(draw: st.DrawFn, t: DType) -> tuple[int, int, int, int]:
    n0 = draw(st.integers(1, 70)) * t.block_size
    return (n0, draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 2)))


@st.composite
def reshape_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from(TYPES))
    n0, n1, n2, n3 = ne = draw(shapes(t))
    ops: list[Callable[[Tensor], Tensor]] = [
        lambda a: gg.reshape_1d(a, n0 * n1 * n2 * n3),
        lambda a: gg.reshape_2d(a, n0 * n2, n1 * n3),
        lambda a: gg.reshape_3d(a, n0, n3, n1 * n2),
        lambda a: gg.reshape_4d(a, n0, n3, n2, n1),
        lambda a: gg.reshape(gg.reshape_1d(a, n0 * n1 * n2 * n3), a),
    ]
    op = draw(st.sampled_from(ops))
    return Case((Src(t, ne),), lambda a: gg.cont(op(a)), 0.0, draw(SEEDS))


@st.composite
def view_cases(draw: st.DrawFn) -> Case:
    """A window of `a`, in one to four dimensions."""
    t = draw(st.sampled_from(TYPES))
    ne = draw(shapes(t))
    first = tuple(draw(st.integers(0, n // (t.block_size if i == 0 else 1) - 1)) for i, n in enumerate(ne))
    window = [draw(st.integers(1, n - f)) for n, f in zip((ne[0] // t.block_size, *ne[1:]), first, strict=True)]
    window[0] *= t.block_size
    n_dims = draw(st.integers(1, 4))

    def build(a: Tensor) -> Tensor:
        offset = sum(f * nb for f, nb in zip(first, a.nb, strict=True))
        view = (gg.view_1d, gg.view_2d, gg.view_3d, gg.view_4d)[n_dims - 1]
        return gg.cont(view(a, *window[:n_dims], *a.nb[1:n_dims], offset))

    return Case((Src(t, ne),), build, 0.0, draw(SEEDS))


@st.composite
def permute_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from(TYPES))
    axes = draw(st.sampled_from([p for p in permutations(range(4)) if p[0] == 0 or not t.is_quantized]))
    return Case((Src(t, draw(shapes(t))),), lambda a: gg.cont(gg.permute(a, *axes)), 0.0, draw(SEEDS))


@st.composite
def transpose_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from([t for t in TYPES if not t.is_quantized]))
    return Case((Src(t, draw(shapes(t))),), lambda a: gg.cont(gg.transpose(a)), 0.0, draw(SEEDS))


STRATEGIES = {
    "reshape": reshape_cases(),
    "view": view_cases(),
    "permute": permute_cases(),
    "transpose": transpose_cases(),
}
