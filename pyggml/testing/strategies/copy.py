"""Cases of cpy, cast, cont, dup, get_rows, set_rows, repeat, concat, arange, which are exact, and of the sums that are
the gradients of get_rows and repeat."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.dtypes import READABLE_BLOCKS, WRITABLE_BLOCKS, DType
from pyggml.ops.copy import PLAIN_TYPES
from pyggml.tensor import Tensor

from ..harness import Case, Src, Values, gaussian

CONVERTED = (DType.F32, DType.F16, DType.BF16, DType.I32)
PERMUTES = [None, None, (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3), (3, 1, 2, 0)]
ROWS_STAY = [None, None, (0, 2, 1, 3), (0, 3, 1, 2)]
SEEDS = st.integers(0, 99)
LENGTHS = st.one_of(st.integers(1, 70), st.integers(255, 260))


def special(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Gaussian, with NaN, infinities, values on either side of 2**24, and F16's subnormals among them."""
    x = gaussian(rng, shape)
    odd = np.array([np.nan, np.inf, -np.inf, 1e-7, 6e-8, -0.0, 65504.0, 2.5, 0.1])
    return np.where(rng.integers(0, 5, shape) == 0, odd[rng.integers(0, len(odd), shape)], x)


def integers(t: DType) -> Values:
    """Small ones, and one in four from the whole range of the type."""
    assert t.np_dtype is not None
    ends = np.iinfo(t.np_dtype)

    def values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        large = rng.integers(ends.min, ends.max, shape, endpoint=True)
        return np.where(rng.integers(0, 4, shape) == 0, large, rng.integers(-100, 101, shape))

    return values


def values_for(t: DType) -> Values:
    if t.is_quantized:
        return gaussian
    return integers(t) if t.name.startswith("I") else special


def positive(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """What does not cancel in sums."""
    return np.abs(gaussian(rng, shape))


@st.composite
def layouts(draw: st.DrawFn, t: DType, ne: tuple[int, ...]) -> Src:
    """A source of `ne`, dense, padded or permuted."""
    permute = draw(st.sampled_from(ROWS_STAY if t.is_quantized else PERMUTES))
    pad = 0 if permute else draw(st.sampled_from([0, 0, t.block_size, 3 * t.block_size]))
    return Src(t, ne, permute, pad, values_for(t))


@st.composite
def shapes(draw: st.DrawFn, t: DType) -> tuple[int, int, int, int]:
    n0 = t.block_size * draw(st.integers(1, 1024 // t.block_size)) if t.is_quantized else draw(LENGTHS)
    n1 = draw(st.sampled_from([1, 2, 3, 8, 9, 33]))
    return (n0, n1, draw(st.integers(1, 3)), draw(st.integers(1, 2)))


CONVERSIONS = st.one_of(
    st.tuples(st.sampled_from(CONVERTED), st.sampled_from(CONVERTED)),
    st.tuples(st.sampled_from(PLAIN_TYPES), st.sampled_from(PLAIN_TYPES)),
    st.sampled_from([(t, t) for t in (*PLAIN_TYPES, *READABLE_BLOCKS)]),
    st.tuples(st.sampled_from([DType.F32, DType.F16]), st.sampled_from(WRITABLE_BLOCKS)),
    st.tuples(st.sampled_from(READABLE_BLOCKS), st.just(DType.F32)),
)


@st.composite
def cpy_cases(draw: st.DrawFn) -> Case:
    ta, tb = draw(CONVERSIONS)
    block = ta if ta.is_quantized else tb
    ne = draw(shapes(block))
    forms = [ne, (ne[0], ne[2], ne[1], ne[3]), (ne[0] * ne[1], ne[2], ne[3], 1), (ne[0], ne[1] * ne[2], ne[3], 1)]
    if not block.is_quantized:
        forms += [(ne[1], ne[0], ne[2], ne[3]), (ne[3], ne[2], ne[1], ne[0]), (ne[0] * ne[1] * ne[2] * ne[3], 1, 1, 1)]
    a_ne, b_ne = draw(st.sampled_from(forms)), draw(st.sampled_from(forms))
    a, b = draw(layouts(ta, a_ne)), draw(layouts(tb, b_ne))
    if tb.is_quantized and not ta.is_quantized:
        a = Src(a.dtype, a.ne, a.permute, a.pad, gaussian)
    return Case((a, b), gg.cpy, 0.0, draw(SEEDS))


@st.composite
def cast_cases(draw: st.DrawFn) -> Case:
    ta, tb = draw(CONVERSIONS)
    a = draw(layouts(ta, draw(shapes(ta if ta.is_quantized else tb))))
    if tb.is_quantized:
        a = Src(a.dtype, a.ne, a.permute, a.pad, gaussian)
    return Case((a,), lambda a: gg.cast(a, tb), 0.0, draw(SEEDS))


@st.composite
def cont_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from((*PLAIN_TYPES, *READABLE_BLOCKS)))
    n0, n1, n2, n3 = ne = draw(shapes(t))
    ops: list[Callable[[Tensor], Tensor]] = [
        gg.cont,
        lambda a: gg.cont_1d(a, n0 * n1 * n2 * n3),
        lambda a: gg.cont_2d(a, n0 * n3, n1 * n2),
        lambda a: gg.cont_3d(a, n0, n1, n2 * n3),
        lambda a: gg.cont_4d(a, n0, n2, n3, n1),
    ]
    return Case((draw(layouts(t, ne)),), draw(st.sampled_from(ops)), 0.0, draw(SEEDS))


@st.composite
def dup_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from((*PLAIN_TYPES, *READABLE_BLOCKS)))
    return Case((draw(layouts(t, draw(shapes(t)))),), draw(st.sampled_from([gg.dup, gg.dup_inplace])), 0.0, draw(SEEDS))


@st.composite
def get_rows_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from((*CONVERTED, DType.I16, *READABLE_BLOCKS)))
    _, m, b2, b3 = ne = draw(shapes(t))

    def ids(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, m, shape)

    i_type = draw(st.sampled_from([DType.I32, DType.I64]))
    b = Src(i_type, (draw(st.integers(1, 9)), b2, b3), draw(st.sampled_from([None, (1, 0, 2, 3)])), 0, ids)
    return Case((draw(layouts(t, ne)), b), gg.get_rows, 0.0, draw(SEEDS))


@st.composite
def set_rows_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from((DType.F32, DType.F16, DType.BF16, *WRITABLE_BLOCKS)))
    n, m, b2, b3 = ne = draw(shapes(t))

    def ids(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, m, shape)

    r = draw(st.integers(1, 9))
    a = draw(layouts(t, ne))
    b = Src(DType.F32, (n, r, b2, b3), draw(st.sampled_from(PERMUTES)), 0, gaussian)
    c_ne = (r, draw(st.sampled_from([1, b2])), draw(st.sampled_from([1, b3])))
    c = Src(draw(st.sampled_from([DType.I32, DType.I64])), c_ne, None, draw(st.sampled_from([0, 2])), ids)
    return Case((a, b, c), gg.set_rows, 0.0, draw(SEEDS))


@st.composite
def repeat_cases(draw: st.DrawFn) -> Case:
    t = draw(st.sampled_from(PLAIN_TYPES))
    ne = draw(shapes(t))
    to = tuple(n * draw(st.integers(1, 3)) for n in ne)
    a = draw(layouts(t, ne))
    if draw(st.booleans()):
        return Case((a, Src(DType.F32, to)), gg.repeat, 0.0, draw(SEEDS))
    return Case((a,), lambda a: gg.repeat_4d(a, *to), 0.0, draw(SEEDS))


@st.composite
def repeat_back_cases(draw: st.DrawFn) -> Case:
    ne = (draw(LENGTHS | st.sampled_from([1, 1])), *(draw(st.integers(1, 3)) for _ in range(3)))
    a_ne = tuple(n * draw(st.sampled_from([1, 1, 2, 3, 70 if i else 3])) for i, n in enumerate(ne[:2]))
    a_ne = (*a_ne, *(n * draw(st.integers(1, 2)) for n in ne[2:]))
    a = Src(DType.F32, a_ne, draw(st.sampled_from(PERMUTES)), 0, positive)
    return Case((a,), lambda a: gg.repeat_back(a, ne), 1e-13, draw(SEEDS))


@st.composite
def get_rows_back_cases(draw: st.DrawFn) -> Case:
    n, m, b2, b3 = draw(shapes(DType.F32))
    r = draw(st.integers(1, 20))
    a = Src(DType.F32, (n, r, b2, b3), draw(st.sampled_from(PERMUTES)), 0, positive)
    i_type = draw(st.sampled_from([DType.I32, DType.I64]))
    permute = draw(st.sampled_from([None, (1, 0, 2, 3)]))
    b = Src(i_type, (r, b2, b3), permute, 0, lambda rng, shape: rng.integers(0, m, shape))
    return Case((a, b), lambda a, b: gg.get_rows_back(a, b, (n, m, b2, b3)), 1e-12, draw(SEEDS))


@st.composite
def concat_cases(draw: st.DrawFn) -> Case:
    t = draw(st.one_of(st.sampled_from(PLAIN_TYPES), st.sampled_from(READABLE_BLOCKS)))
    a_ne, dim = draw(shapes(t)), draw(st.integers(0, 3))
    more = draw(st.integers(1, 5)) * (t.block_size if dim == 0 else 1)
    b_ne = tuple(more if i == dim else n for i, n in enumerate(a_ne))
    srcs = (draw(layouts(t, a_ne)), draw(layouts(t, b_ne)))
    return Case(srcs, lambda a, b: gg.concat(a, b, dim), 0.0, draw(SEEDS))


@st.composite
def arange_cases(draw: st.DrawFn) -> Case:
    start, step = draw(st.floats(-100, 100)), draw(st.sampled_from([1.0, 0.5, 0.1, 3.0, -1.0, -0.25]))
    stop = start + step * (draw(LENGTHS) - 0.5)

    def build() -> Tensor:
        return gg.arange(start, stop, step)

    return Case((), build, 0.0)


STRATEGIES = {
    "cpy": cpy_cases(),
    "cast": cast_cases(),
    "cont": cont_cases(),
    "dup": dup_cases(),
    "get_rows": get_rows_cases(),
    "get_rows_back": get_rows_back_cases(),
    "set_rows": set_rows_cases(),
    "repeat": repeat_cases(),
    "repeat_back": repeat_back_cases(),
    "concat": concat_cases(),
    "arange": arange_cases(),
}
