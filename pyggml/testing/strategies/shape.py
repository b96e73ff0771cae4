"""Cases of pads, roll, set, acc, diag, tri, diag_mask_zero, add_id, count_equal, timestep_embedding."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.dtypes import DType
from pyggml.ops.copy import PLAIN_TYPES
from pyggml.tensor import Tensor

from ..harness import Case, Src
from .copy import SEEDS, layouts, shapes


@st.composite
def pad_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from(PLAIN_TYPES))
    a = draw(layouts(t, draw(shapes(t))))
    op = draw(st.sampled_from([gg.pad, gg.pad_circular, gg.pad_ext, gg.pad_ext_circular]))
    p = [draw(st.integers(0, 5)) for _ in range(4 if op in (gg.pad, gg.pad_circular) else 8)]
    return Case((a,), lambda a: op(a, *p), 0.0, draw(SEEDS))


@st.composite
def reflect_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from(PLAIN_TYPES))
    a = draw(layouts(t, draw(shapes(t))))
    p0, p1 = (draw(st.integers(0, min(9, a.ne[0] - 1))) for _ in range(2))
    return Case((a,), lambda a: gg.pad_reflect_1d(a, p0, p1), 0.0, draw(SEEDS))


@st.composite
def roll_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from(PLAIN_TYPES))
    a = draw(layouts(t, draw(shapes(t))))
    shifts = [draw(st.integers(1 - n, n - 1)) for n in a.ne]
    return Case((a,), lambda a: gg.roll(a, *shifts), 0.0, draw(SEEDS))


def regions(name: str, types: tuple[DType, ...], forms: tuple[str, ...]) -> st.SearchStrategy[Case]:
    """b somewhere in a dense a: whole strides of a, or its rows further apart."""

    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        t = draw(st.sampled_from(types))
        n0, n1, n2, _ = a_ne = draw(shapes(t))
        b_ne = tuple(draw(st.integers(1, n)) for n in a_ne)
        start = [draw(st.integers(0, n - m)) for n, m in zip(a_ne, b_ne, strict=True)]
        size = t.type_size
        nb1, nb2, nb3 = size * n0, size * n0 * n1, size * n0 * n1 * n2
        offset = size * start[0] + nb1 * start[1] + nb2 * start[2] + nb3 * start[3]
        if b_ne[1] > 1 and b_ne[1] * 2 - 1 <= n1 - start[1]:
            nb1 *= draw(st.sampled_from([1, 2]))
        form = draw(st.sampled_from(forms))
        op: Callable[..., Tensor] = getattr(gg, name + form)
        steps = {"_1d": (), "_2d": (nb1,)}.get(form.removesuffix("_inplace"), (nb1, nb2, nb3))
        if not steps and nb1 != size * n0:
            steps, op = (nb1,), gg.set_2d
        srcs = (Src(t, a_ne), draw(layouts(t, b_ne)))
        return Case(srcs, lambda a, b: op(a, b, *steps, offset), 1e-13 if name == "acc" else 0.0, draw(SEEDS))

    return draw_case()


@st.composite
def diag_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from(PLAIN_TYPES))
    n0, _, n2, n3 = draw(shapes(t))
    return Case((draw(layouts(t, (n0, 1, n2, n3))),), gg.diag, 0.0, draw(SEEDS))


@st.composite
def tri_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from([gg.F32, gg.F16, gg.BF16]))
    n, _, n2, n3 = draw(shapes(t))
    kind = draw(st.sampled_from([0, 1, 2, 3, "upper_diag", "LOWER"]))
    return Case((draw(layouts(t, (n, n, n2, n3))),), lambda a: gg.tri(a, kind), 0.0, draw(SEEDS))


@st.composite
def mask_cases(draw: st.DrawFn) -> Case:
    a = draw(layouts(gg.F32, draw(shapes(gg.F32))))
    op = draw(st.sampled_from([gg.diag_mask_zero, gg.diag_mask_zero_inplace]))
    n_past = draw(st.sampled_from([0, 1, 7, 300]))
    return Case((a,), lambda a: op(a, n_past), 0.0, draw(SEEDS))


@st.composite
def add_id_cases(draw: st.DrawFn) -> Case:
    n, n_used, n_tokens, _ = ne = draw(shapes(gg.F32))
    n_expert = draw(st.integers(1, 9))

    def ids(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, n_expert, shape)

    a, b = draw(layouts(gg.F32, ne)), draw(layouts(gg.F32, (n, n_expert, 1, 1)))
    return Case((a, b, Src(gg.I32, (n_used, n_tokens), None, 2, ids)), gg.add_id, 1e-13, draw(SEEDS))


@st.composite
def count_equal_cases(draw: st.DrawFn) -> Case:
    def few(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, 3, shape)

    ne = draw(shapes(gg.I32))
    a, b = (draw(layouts(gg.I32, ne)) for _ in range(2))
    a, b = (Src(s.dtype, s.ne, s.permute, s.pad, few) for s in (a, b))
    return Case((a, b), gg.count_equal, 0.0, draw(SEEDS))


@st.composite
def timestep_cases(draw: st.DrawFn) -> Case:
    def steps(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.uniform(0, 1000, shape)

    n, dim = draw(st.integers(1, 9)), draw(st.integers(1, 321))
    a = Src(gg.F32, (n,), None, draw(st.sampled_from([0, 3])), steps)
    return Case((a,), lambda a: gg.timestep_embedding(a, dim, 10000), 1e-13, draw(SEEDS))


STRATEGIES = {
    "pad": pad_cases(),
    "pad_reflect_1d": reflect_cases(),
    "roll": roll_cases(),
    "set": regions("set", PLAIN_TYPES, ("", "_inplace", "_1d", "_1d_inplace", "_2d", "_2d_inplace")),
    "acc": regions("acc", (gg.F32,), ("", "_inplace")),
    "diag": diag_cases(),
    "tri": tri_cases(),
    "diag_mask_zero": mask_cases(),
    "add_id": add_id_cases(),
    "count_equal": count_equal_cases(),
    "timestep_embedding": timestep_cases(),
}
