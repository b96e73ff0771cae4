"""Cases of state-space models, linear attention, their gradients, and triangular systems.

Values are positive, so that no sum cancels, and a bound follows from the number of roundings of a result. Two ops need
more: gated_delta_net subtracts, but only a part of what is there. solve_tri has signs; each of its results is at most
as exact as the largest result before it, and the bound counts that too."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.dtypes import DType
from pyggml.tensor import Tensor

from ..harness import Case, Src, Values, record_case

F32 = DType.F32
TOKENS = st.sampled_from([1, 1, 2, 3, 7, 20])
SIZES = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 64, 65, 80, 128]))
LAYOUTS = [None, None, (0, 2, 1, 3), (0, 3, 1, 2)]  # rows stay dense
EPS = 2.0**-24


def bound(n: int, n_tokens: int = 1) -> float:
    """The bound for sums of n products that are added up over all tokens, with a rounding at each step."""
    return 4 * EPS**2 * (n + 16 * n_tokens)


def uniform(low: float, high: float) -> Values:
    def values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.uniform(low, high, shape)

    return values


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def some(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.1, 2, shape)


def short(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Rows whose length is at most 1/2: what they add to a state, or take from it, is a quarter of it."""
    return rng.uniform(0.1, 0.5, shape) * shape[3] ** -0.5


def draw_rows(draw: st.DrawFn, ne: tuple[int, ...], values: Values = some) -> Src:
    layout = draw(st.sampled_from(LAYOUTS)) if len(ne) == 4 else None
    return Src(F32, ne, layout, 0 if layout else draw(st.sampled_from([0, 0, 3])), values)


@st.composite
def ssm_conv_cases(draw: st.DrawFn) -> Case:
    d_conv, n_tokens = draw(st.integers(1, 5)), draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 200])))
    d_inner, n_seqs = draw(st.one_of(st.integers(1, 40), st.just(130))), draw(st.integers(1, 3))
    sx = draw_rows(draw, (d_conv - 1 + n_tokens, d_inner, n_seqs))
    c = draw_rows(draw, (d_conv, d_inner))
    return Case((sx, c), gg.ssm_conv, bound(d_conv), draw(st.integers(0, 99)))


@st.composite
def ssm_scan_cases(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> Case:
    d_state, n_tokens = draw(sizes), draw(TOKENS)
    mamba2 = draw(st.booleans())
    head_dim = draw(st.sampled_from([1, 3, 4, 7, 16, 64])) if mamba2 else draw(st.sampled_from([1, 1, 5]))
    n_group = draw(st.integers(1, 2))
    n_head = n_group * draw(st.sampled_from([1, 2, 3, 17]))
    n_seqs, n_states = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    slots = draw(st.sampled_from([1, 1, 2, 5]))

    def some_state(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, n_states, shape)

    srcs = (
        Src(F32, (d_state, head_dim, n_head, n_states), None, 0, some),
        draw_rows(draw, (head_dim, n_head, n_tokens, n_seqs)),
        draw_rows(draw, (n_head, n_tokens, n_seqs), uniform(-30, 25) if draw(st.booleans()) else normal),
        draw_rows(draw, (1 if mamba2 else d_state, n_head), uniform(-3, 0)),
        draw_rows(draw, (d_state, n_group, n_tokens, n_seqs)),
        draw_rows(draw, (d_state, n_group, n_tokens, n_seqs)),
        Src(DType.I32, (n_seqs,), None, 0, some_state),
    )

    def build(*t: Tensor) -> Tensor:
        return gg.ssm_scan(*t, K=slots)

    return Case(srcs, build, bound(d_state, n_tokens), draw(st.integers(0, 99)))


def by_token(
    op: Callable[..., Tensor], sizes: st.SearchStrategy[int], values: dict[str, Values], *params: float
) -> st.SearchStrategy[Case]:
    """Cases of an op whose sources, but tf and the state, are rows of S per head and token."""

    @st.composite
    def cases(draw: st.DrawFn) -> Case:
        s, n_head, n_seqs = draw(sizes), draw(st.integers(1, 4)), draw(st.integers(1, 3))
        n_tokens = draw(TOKENS)
        srcs = [
            draw_rows(draw, (s, n_head) if name == "tf" else (s, n_head, n_tokens * n_seqs, 1), v)
            for name, v in values.items()
        ]
        state = Src(F32, (s * s * n_head, n_seqs), None, 0, some)

        def build(*t: Tensor) -> Tensor:
            return op(*t, *params)

        return Case((*srcs, state), build, bound(s, n_tokens), draw(st.integers(0, 99)))

    return cases()


@st.composite
def gated_delta_net_cases(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> Case:
    s, n_tokens = draw(sizes), draw(TOKENS)
    n_head_k, n_seqs_k = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    n_head, n_seqs = n_head_k * draw(st.integers(1, 3)), n_seqs_k * draw(st.integers(1, 2))
    slots = draw(st.sampled_from([1, 1, 2, 5]))
    srcs = (
        draw_rows(draw, (s, n_head_k, n_tokens, n_seqs_k)),
        draw_rows(draw, (s, draw(st.sampled_from([1, n_head_k])), n_tokens, n_seqs_k), short),
        draw_rows(draw, (s, n_head, n_tokens, n_seqs)),
        draw_rows(draw, (draw(st.sampled_from([1, s])), n_head, n_tokens, n_seqs), uniform(-0.5, 0)),
        draw_rows(draw, (1, n_head, n_tokens, n_seqs), uniform(0, 1)),
        Src(F32, (s, s, n_head, n_seqs), None, 0, some),
    )

    def build(*t: Tensor) -> Tensor:
        return gg.gated_delta_net(*t, K=slots)

    return Case(srcs, build, bound(s, n_tokens), draw(st.integers(0, 99)))


def lower_triangle(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A well conditioned matrix. The op must not look at the values above the diagonal."""
    a = rng.standard_normal(shape) * shape[3] ** -0.5
    return np.tril(a, -1) + np.eye(shape[3]) * rng.uniform(1, 2, shape) + np.triu(np.full(shape, np.nan), 1)


def upper_triangle(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.swapaxes(lower_triangle(rng, shape), 2, 3)


@st.composite
def solve_tri_cases(draw: st.DrawFn) -> Case:
    n, n_columns, n2, n3 = draw(SIZES), draw(SIZES), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    lower = draw(st.booleans())
    a = Src(F32, (n, n, n2, n3), None, 0, lower_triangle if lower else upper_triangle)
    b = draw_rows(draw, (n_columns, n, n2, n3), normal)
    return Case((a, b), lambda a, b: gg.solve_tri(a, b, lower=lower), bound(n, n), draw(st.integers(0, 99)))


def backwards(cases: st.SearchStrategy[Case], back: Callable[..., Tensor]) -> st.SearchStrategy[Case]:
    """Cases of the op that computes the gradients of another one, whose cases are given. Their sums have about four
    times as many roundings."""

    def of(case: Case) -> Case:
        node = record_case(case)
        params = node.op_params

        def build(*t: Tensor) -> Tensor:
            return back(*t, *params.values())

        return replace(case, srcs=(Src(F32, node.ne, None, 0, some), *case.srcs), build=build, nmse=4 * case.nmse)

    return cases.map(of)


def scans(sizes: st.SearchStrategy[int]) -> dict[str, st.SearchStrategy[Case]]:
    """Cases of all recurrences. `sizes` of a state: d_state, or S."""
    fades = uniform(0, 1)
    wkv6 = {"k": some, "v": some, "r": some, "tf": some, "td": fades}
    wkv7 = {"r": some, "w": fades, "k": some, "v": some, "a": short, "b": short}
    gla = {"k": some, "v": some, "q": some, "g": fades}
    return {
        "ssm_scan": ssm_scan_cases(sizes),
        "rwkv_wkv6": by_token(gg.rwkv_wkv6, sizes, wkv6),
        "rwkv_wkv7": by_token(gg.rwkv_wkv7, sizes, wkv7),
        "gated_linear_attn": by_token(gg.gated_linear_attn, sizes, gla, 0.35),
        "gated_delta_net": gated_delta_net_cases(sizes),
    }


FORWARD = {"ssm_conv": ssm_conv_cases(), **scans(SIZES)}
SMALL = scans(st.integers(1, 18))
BACKWARD = {f"{name}_back": backwards(cases, getattr(gg, f"{name}_back")) for name, cases in FORWARD.items()}
STRATEGIES = {**FORWARD, **BACKWARD, "solve_tri": solve_tri_cases()}
