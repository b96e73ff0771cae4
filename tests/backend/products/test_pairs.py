"""Matrices of BF16 in the fast form: columns are rounded to bf16, and pairs of elements are multiplied at once
(csrc/products/product_pairs.c), on CPUs that do that."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import CpuBackend
from pyggml.backends.cpu.products import choose
from pyggml.backends.cpu.repack import allow_rounding, be_fast
from pyggml.native import lib

from .test_repack import ISAS, run, source

PAIRS = [isa for isa in ISAS if isa.startswith(("avx512", "amx")) and lib.pg_has_bf16()]


def fast(w: np.ndarray, dtype: gg.DType = gg.BF16) -> gg.Tensor:
    t = source(dtype, w)
    allow_rounding([t])
    be_fast([t])
    return t


def bf16(x: np.ndarray) -> np.ndarray:
    """x rounded to bf16, to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("isa", PAIRS)
@pytest.mark.parametrize("k", [160, 1024, 1056, 2592])  # short, one cut, a bit more, several
@pytest.mark.parametrize("m", [1, 39, 1030])  # rows: less than a tile, some of a panel, several blocks
def test_values_and_company(isa: str, k: int, m: int) -> None:
    """The product of rounded columns, with the precision of f32, and the same bits beside any others."""
    rng = np.random.default_rng(k + m)
    w, x = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((93, k)).astype(np.float32)
    a = fast(w)
    every = run(gg.mul_mat(a, source(gg.F32, x)), isa, 3)[0, 0]
    bound = np.abs(bf16(x)) @ np.abs(bf16(w)).T * 1e-6
    assert (np.abs(every - bf16(x) @ bf16(w).T) <= bound).all()
    for first, last in ((0, 1), (1, 6), (6, 86), (12, 93)):  # gemv; tiles; as stored, most; panels
        some = run(gg.mul_mat(a, source(gg.F32, x[first:last])), isa, 2)[0, 0]
        assert np.array_equal(some, every[first:last])


@pytest.mark.parametrize("isa", PAIRS)
def test_columns_of_any_layout(isa: str) -> None:
    """Stacks, turned ones, and other types than F32; what is not finite stays so."""
    rng = np.random.default_rng(5)
    w, x = rng.standard_normal((20, 192)).astype(np.float32), rng.standard_normal((2, 3, 192, 4)).astype(np.float32)
    turned = gg.permute(source(gg.F32, x), 1, 0, 2, 3)
    y = run(gg.mul_mat(fast(w), turned), isa, 2)
    assert y.shape == (2, 3, 4, 20)
    np.testing.assert_allclose(y, bf16(x.swapaxes(2, 3).copy()) @ bf16(w).T, atol=1e-4)
    half = x[0, 0].T.astype(np.float16)
    y = run(gg.mul_mat(fast(w), source(gg.F16, half)), isa, 1)[0, 0]
    np.testing.assert_allclose(y, bf16(half.astype(np.float32)) @ bf16(w).T, atol=1e-4)
    x[0, 0, 5, 0], x[0, 0, 6, 1] = np.inf, np.nan
    y = run(gg.mul_mat(fast(np.abs(w)), source(gg.F32, x[0, 0].T.copy())), isa, 1)[0, 0]
    assert np.isposinf(y[0]).all() and np.isnan(y[1]).all() and np.isfinite(y[2:]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_in_pairs(isa: str) -> None:
    """Matrices of BF16 with rows of 160 elements or more, in the fast form, where the CPU has the instruction."""
    x = source(gg.F32, np.ones((2, 256), np.float32))

    def way(w: gg.Tensor) -> str:
        chosen = choose(isa, gg.mul_mat(w, gg.view_2d(x, w.ne[0], 2, x.nb[1], 0)))
        return "" if chosen is None else chosen[0].symbol

    ones = np.ones((4, 256), np.float32)
    assert ("pairs" in way(fast(ones))) == (isa in PAIRS)
    exact = source(gg.BF16, ones)
    allow_rounding([exact])
    for w in (exact, fast(ones[:, :128].copy()), fast(ones, gg.F16), fast(ones, gg.F32)):
        assert way(w) == ""


@pytest.mark.skipif(not PAIRS, reason="this CPU does not multiply pairs of bf16")
def test_what_stands_around_products() -> None:
    """Fusions of norms, gates, biases and shared columns belong to other kernels: each product stands by itself."""
    rng = np.random.default_rng(7)
    x, bias = (source(gg.F32, rng.standard_normal((n, 192)).astype(np.float32)) for n in (5, 1))
    wq, wk, gate, up = (fast(rng.standard_normal((192, 192)).astype(np.float32)) for _ in range(4))
    normed = gg.rms_norm(x, eps=1e-6) * bias
    q, k = gg.mul_mat(wq, normed) + bias, gg.mul_mat(wk, normed)
    down = gg.mul_mat(
        fast(np.eye(192, dtype=np.float32)), gg.swiglu_split(*[gg.mul_mat(w, normed) for w in (gate, up)])
    )
    graph = gg.Graph()
    for t in (results := (q, k, down + x)):
        graph.build_forward_expand(t)
    values = list[list[np.ndarray]]()
    for fusions in (None, ()):
        gg.Scheduler([CpuBackend(2, fusions=fusions)]).compute(graph)
        values.append([t.numpy() for t in results])
    for fused, alone in zip(*values, strict=True):
        assert np.array_equal(fused, alone) and fused.any()
