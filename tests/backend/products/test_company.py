"""A column of a product of weights in blocks has the same bits whatever is computed beside it: one column or many,
from a copy or in passing, by experts, fused or not (csrc/products/r16/sums.h); in the fast form, too (round.h), but
where tiles round to bf16. So has one of a matrix of F16 or BF16 (csrc/products/f32_order.h, gemm/halves.c).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu import CpuBackend
from pyggml.backends.cpu.fuse import FUSIONS
from pyggml.backends.cpu.repack import be_fast, repack, repack_in_passing
from pyggml.sched import Scheduler
from pyggml.testing.harness import gaussian

from .test_repack import ISAS, TYPES, run, source

FLOATS = [gg.F16, gg.BF16]
CASES = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


class Case(NamedTuple):
    dtype: gg.DType
    k: int
    m: int
    n: int
    seed: int
    passing: bool
    fast: bool
    n_threads: int


@st.composite
def cases(draw: st.DrawFn, isa: str, most: int = 150, floats: bool = True) -> Case:
    dtype = draw(st.sampled_from(TYPES) | st.sampled_from(FLOATS) if floats else st.sampled_from(TYPES))
    k = dtype.block_size * draw(st.integers(1, 800 // dtype.block_size + 1))
    n = draw(st.integers(2, min(20, most)) | st.integers(2, most))
    m, seed, n_threads = draw(st.integers(1, 70)), draw(st.integers(0, 999)), draw(st.integers(1, 2))
    fast = isa != "amx" and draw(st.booleans())
    return Case(dtype, k, m, n, seed, draw(st.booleans()), fast, n_threads)


def weights(rng: np.random.Generator, c: Case, shape: Sequence[int], isa: str) -> gg.Tensor:
    w = source(c.dtype, gaussian(rng, tuple(shape)))
    make_ready([w], isa, c.passing, c.fast)
    return w


def make_ready(w: Sequence[gg.Tensor], isa: str, passing: bool, fast: bool) -> None:
    repack_in_passing(w) if passing else repack(w, isa=isa)
    if fast:
        be_fast(w)


def columns_of(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Columns of very different sizes; one of zeros, and, now and then, one that is not finite."""
    x = gaussian(rng, (n, k)) * 10.0 ** rng.integers(-6, 6, (n, 1))
    x[rng.integers(n)] = 0
    if rng.random() < 0.2:
        x[rng.integers(n), rng.integers(k)] = np.inf
    return x.astype(np.float32)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.astype(np.float32).view(np.int32), b.astype(np.float32).view(np.int32))


@pytest.mark.parametrize("isa", ISAS)
def test_columns(isa: str) -> None:
    @CASES
    @given(cases(isa))
    def check(c: Case) -> None:
        rng = np.random.default_rng(c.seed)
        w, x = weights(rng, c, (c.m, c.k), isa), columns_of(rng, c.n, c.k)
        together = run(gg.mul_mat(w, source(gg.F32, x)), isa, c.n_threads)[0, 0]
        some = rng.permutation(c.n)[: rng.integers(1, c.n + 1)]
        assert same(run(gg.mul_mat(w, source(gg.F32, x[some])), isa, 1)[0, 0], together[some])
        for i in some[:3]:
            assert same(run(gg.mul_mat(w, source(gg.F32, x[i : i + 1])), isa, 1)[0, 0, 0], together[i])

    check()


@pytest.mark.parametrize("isa", ISAS)
def test_experts(isa: str) -> None:
    """A result is the product of its expert's matrix alone with the column alone."""

    @CASES
    @given(cases(isa, floats=False), st.integers(1, 5))
    def check(c: Case, n_expert: int) -> None:
        rng = np.random.default_rng(c.seed)
        n_used = int(rng.integers(1, 3))
        n = max(1, c.n // n_used)
        w, x = weights(rng, c, (n_expert, c.m, c.k), isa), columns_of(rng, n, c.k)
        ids = rng.integers(0, n_expert, (n, n_used))
        product = gg.mul_mat_id(w, source(gg.F32, x.reshape(n, 1, c.k)), source(gg.I32, ids))
        together = run(product, isa, c.n_threads)[0]
        for i in rng.integers(0, n, 3):
            e = source(gg.I32, ids[i : i + 1])
            alone = run(gg.mul_mat_id(w, source(gg.F32, x[i].reshape(1, 1, c.k)), e), isa, 1)[0, 0]
            assert same(alone, together[i])
            matrix = source(c.dtype, np.zeros((c.m, c.k)))
            matrix.raw()[...] = w.raw().reshape(n_expert, -1)[ids[i, 0]].reshape(matrix.raw().shape)
            make_ready([matrix], isa, False, c.fast)
            assert same(run(gg.mul_mat(matrix, source(gg.F32, x[i : i + 1])), isa, 1)[0, 0, 0], together[i, 0])

    check()


@pytest.mark.parametrize("isa", ISAS)
def test_fused(isa: str) -> None:
    """A feed-forward block: normed columns, a gate and what it gates, biases, and the sum with what came in. The gate
    may have another type, whose fast form may round the same columns in another way."""

    def block(x: np.ndarray, w: Sequence[gg.Tensor], others: Sequence[np.ndarray], n_threads: int) -> np.ndarray:
        ctx = w[0].ctx
        norm, *biases = (ctx.from_numpy(v) for v in others)
        b = ctx.from_numpy(x)
        cur = gg.mul(gg.rms_norm(b, 1e-5), norm)
        up, gate = (gg.add(gg.mul_mat(a, cur), bias) for a, bias in zip(w[:2], biases, strict=False))
        y = gg.add(gg.add(gg.mul_mat(w[2], gg.mul(gg.silu(gate), up)), biases[2]), b)
        graph = gg.Graph()
        graph.build_forward_expand(y)
        Scheduler([CpuBackend(n_threads, isa, FUSIONS)]).alloc(graph).run()
        return y.numpy().copy()

    @settings(CASES, max_examples=25)
    @given(cases(isa, 60))
    def check(c: Case) -> None:
        rng = np.random.default_rng(c.seed)
        inner = c.dtype.block_size * int(rng.integers(1, 3)) if c.dtype.is_quantized else int(rng.integers(1, 400))
        shapes = ((inner, c.k), (inner, c.k), (c.k, inner))
        others_of = [t for t in (*TYPES, *FLOATS) if c.k % t.block_size == 0] if rng.random() < 0.5 else [c.dtype]
        types = c.dtype, others_of[rng.integers(len(others_of))], c.dtype
        values = [rng.standard_normal(s).astype(np.float32) * 0.1 for s in shapes]
        w = [gg.Context().from_numpy(v, dtype=t) for v, t in zip(values, types, strict=True)]
        make_ready(w, isa, c.passing, c.fast)
        others = [rng.standard_normal(n).astype(np.float32) for n in (c.k, inner, inner, c.k)]
        x = gaussian(rng, (c.n, c.k)).astype(np.float32)
        together = block(x, w, others, c.n_threads)
        for i in rng.integers(0, c.n, 3):
            assert same(block(x[i : i + 1], w, others, 1)[0], together[i])

    check()
