"""Cases of mul_mat, mul_mat_id, out_prod.

Bound: a sum of k products in float32, each addition rounding by at most u = 2^-24 of the partial sum. Where all
products have one sign the errors are independent, and the result's relative error is about u * sqrt(k / lanes / 9),
besides u or two for each product and for decoding a block: NMSE <= (k + 16) u^2 with room. So both sources of a case
share a pattern of signs along k, and no sum cancels.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.dtypes import DType
from pyggml.ops.matmul import WEIGHT_TYPES
from pyggml.tensor import Tensor

from ..harness import Case, Src, Values, gaussian

FLOATS = (gg.F32, gg.F16, gg.BF16)
U2 = 2.0**-48


def bound(k: int) -> float:
    return (k + 16) * U2


def signed_along(axis: int, special: float | None = None) -> Values:
    """Values whose signs depend on the index along the 4-d NumPy `axis` alone; one of them may be inf or NaN."""

    def values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        signs = np.where(np.arange(shape[axis]) % 3 == 0, -1.0, 1.0)
        x = np.abs(gaussian(rng, shape)) * signs.reshape([-1 if i == axis else 1 for i in range(4)])
        if special is not None:
            x[tuple(int(rng.integers(0, n)) for n in shape)] = special
        return x

    return values


def axis_of(dim: int, permute: tuple[int, int, int, int] | None) -> int:
    """The NumPy axis of the stored tensor that dimension `dim` of the permuted one comes from."""
    return 3 - (dim if permute is None else permute.index(dim))


@st.composite
def weights_and_k(draw: st.DrawFn) -> tuple[DType, int]:
    """A weight type and a row length: for floats any length (around vectors, and around a strip of 512), for block
    types whole blocks."""
    dtype = draw(st.sampled_from(FLOATS) | st.sampled_from(WEIGHT_TYPES))
    if dtype.block_size > 1:
        return dtype, dtype.block_size * draw(st.sampled_from([1, 2, 3]) | st.integers(1, 640 // dtype.block_size))
    return dtype, draw(st.integers(1, 70) | st.integers(255, 260) | st.integers(510, 530))


def draw_a(draw: st.DrawFn, dtype: DType, ne: tuple[int, ...], k_dim: int) -> Src:
    """A weight matrix: dense, or a view with longer rows, or permuted (rows stay dense)."""
    permute = draw(st.sampled_from([None, None, (0, 2, 1, 3), (0, 3, 1, 2)]))
    pad = draw(st.sampled_from([0, 0, 1, 2])) * dtype.block_size if permute is None else 0
    return Src(dtype, ne, permute, pad, signed_along(axis_of(k_dim, permute)))


@st.composite
def mul_mat_cases(draw: st.DrawFn) -> Case:
    ta, k = draw(weights_and_k())
    tb = draw(st.sampled_from([gg.F32, gg.F32, gg.F16, gg.BF16]))
    m = draw(st.integers(1, 9) | st.integers(10, 150))
    n = draw(st.integers(1, 10) | st.integers(11, 70))
    a2, a3, r2, r3 = (draw(st.sampled_from([1, 1, 2, 3])) for _ in range(4))
    permute = draw(st.sampled_from([None, None, (0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3), (0, 3, 2, 1)]))
    pad = draw(st.sampled_from([0, 0, 3])) if permute is None else 0
    special = draw(st.sampled_from([None, None, None, np.inf, np.nan]))
    b = Src(tb, (k, n, a2 * r2, a3 * r3), permute, pad, signed_along(axis_of(0, permute), special))
    a = draw_a(draw, ta, (k, m, a2, a3), 0)
    return Case((a, b), gg.mul_mat, bound(k), draw(st.integers(0, 99)))


@st.composite
def mul_mat_id_cases(draw: st.DrawFn) -> Case:
    ta, k = draw(weights_and_k())
    n_used = draw(st.integers(1, 4))
    n_b = draw(st.sampled_from([i for i in range(1, n_used + 1) if n_used % i == 0]))
    n_tokens = draw(st.integers(1, 3) | st.integers(4, 40))
    n_expert = draw(st.integers(1, 8))
    permute = draw(st.sampled_from([None, (0, 2, 1, 3), (1, 0, 2, 3)]))
    pad = draw(st.sampled_from([0, 3]))
    ids = Src(gg.I32, (n_used, n_tokens), None, pad, lambda rng, shape: rng.integers(0, n_expert, shape))
    b = Src(gg.F32, (k, n_b, n_tokens), permute, 0, signed_along(axis_of(0, permute)))
    a = draw_a(draw, ta, (k, draw(st.integers(1, 80)), n_expert), 0)
    return Case((a, b, ids), gg.mul_mat_id, bound(k), draw(st.integers(0, 99)))


def expert_ids(draw: st.DrawFn, n_used: int, n_tokens: int, n_expert: int) -> Src:
    pad = draw(st.sampled_from([0, 3]))
    return Src(gg.I32, (n_used, n_tokens), None, pad, lambda rng, shape: rng.integers(0, n_expert, shape))


@st.composite
def mul_mat_id_back_b_cases(draw: st.DrawFn) -> Case:
    ta, k = draw(weights_and_k())
    m, n_used, n_expert = draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    n_tokens = draw(st.integers(1, 3) | st.integers(4, 40))
    permute = draw(st.sampled_from([None, (0, 2, 1, 3), (1, 0, 2, 3)]))
    b = Src(gg.F32, (m, n_used, n_tokens), permute, 0, signed_along(axis_of(0, permute)))
    srcs = (draw_a(draw, ta, (k, m, n_expert), 1), b, expert_ids(draw, n_used, n_tokens, n_expert))
    return Case(srcs, gg.mul_mat_id_back_b, bound(m), draw(st.integers(0, 99)))


@st.composite
def mul_mat_id_back_as_cases(draw: st.DrawFn) -> Case:
    _, k = draw(weights_and_k())
    m, n_used, n_expert = draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    n_b = draw(st.sampled_from([i for i in range(1, n_used + 1) if n_used % i == 0]))
    n_tokens = draw(st.integers(1, 3) | st.integers(4, 40))

    def positive(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.abs(gaussian(rng, shape))

    permute = draw(st.sampled_from([None, (0, 2, 1, 3), (1, 0, 2, 3)]))
    a = Src(gg.F32, (k, n_b, n_tokens), draw(st.sampled_from([None, (0, 2, 1, 3)])), 0, positive)
    b = Src(gg.F32, (m, n_used, n_tokens), permute, 0, positive)
    srcs = (a, b, expert_ids(draw, n_used, n_tokens, n_expert))

    def build(a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        return gg.mul_mat_id_back_as(a, b, ids, n_expert)

    return Case(srcs, build, bound(n_used * n_tokens), draw(st.integers(0, 99)))


@st.composite
def out_prod_cases(draw: st.DrawFn) -> Case:
    ta, m = draw(weights_and_k())
    k = draw(st.integers(1, 40))
    n = draw(st.integers(1, 20))
    a2, a3, r2, r3 = (draw(st.sampled_from([1, 1, 2])) for _ in range(4))
    permute = draw(st.sampled_from([None, (0, 2, 1, 3), (1, 0, 2, 3)]))
    b = Src(gg.F32, (n, k, a2 * r2, a3 * r3), permute, 0, signed_along(axis_of(1, permute)))
    a = draw_a(draw, ta, (m, k, a2, a3), 1)
    return Case((a, b), gg.out_prod, bound(k), draw(st.integers(0, 99)))


STRATEGIES: dict[str, st.SearchStrategy[Case]] = {
    "mul_mat": mul_mat_cases(),
    "mul_mat_id": mul_mat_id_cases(),
    "mul_mat_id_back_b": mul_mat_id_back_b_cases(),
    "mul_mat_id_back_as": mul_mat_id_back_as_cases(),
    "out_prod": out_prod_cases(),
}
