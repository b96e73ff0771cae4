"""Weights in the fast form: columns in bytes (csrc/products/gemm/int8.h). What follows from the steps of bytes, how
large the error is, and that a column has the same bits in any company.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu.isa import kernel_of
from pyggml.backends.cpu.products import choose
from pyggml.backends.cpu.repack import be_fast, repack, repack_in_passing
from pyggml.testing.harness import gaussian, nmse

from .test_company import CASES, Case, cases, columns_of, same
from .test_repack import ISAS, TYPES, decoded, run, source, terms

FAST = [isa for isa in ISAS if isa != "amx"]  # with tiles the fast form is not used
WIDE = {"avx2": (gg.Q8_0, gg.IQ4_NL, gg.IQ4_XS)}  # types whose codes have 8 bits, which is as fast in 16


def in_bytes(isa: str) -> list[gg.DType]:
    return [t for t in TYPES if t not in WIDE.get(isa, ())]


def fast(
    rng: np.random.Generator, dtype: gg.DType, shape: tuple[int, ...], isa: str, passing: bool = False
) -> gg.Tensor:
    w = source(dtype, gaussian(rng, shape))
    repack_in_passing([w]) if passing else repack([w], isa=isa)
    be_fast([w])
    return w


def largest_step(x: np.ndarray) -> np.ndarray:
    """The largest step of each element's unit of 32: the largest integer is at least 119, and the step that fits the
    integers best is within half an integer of that."""
    units = np.abs(x).reshape(*x.shape[:-1], -1, 32).max(-1) / 118.5
    return np.repeat(units, 32, -1)


def plain_bytes(x: np.ndarray) -> np.ndarray:
    """x rounded to bytes as usual: in each unit the largest element becomes 127."""
    units = x.astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    d = np.abs(units).max(-1, keepdims=True) / 127
    return (np.rint(units / d) * d).reshape(x.shape)


@pytest.mark.parametrize("isa", FAST)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name)
def test_error(dtype: gg.DType, isa: str) -> None:
    """Each result is within what rounding each element by half a step can make of it, and the error is smaller
    than that of plain bytes."""
    rng = np.random.default_rng(1)
    k = max(dtype.block_size, 512)
    w, x = fast(rng, dtype, (37, k), isa), gaussian(rng, (19, k))
    node = gg.mul_mat(w, source(gg.F32, x))
    y = run(node, isa, 1)[0, 0].astype(np.float64)
    expected = x.astype(np.float64) @ decoded(w)[0, 0].T
    # half a step of rounding, and for the step that fits best another half of an integer in 118 of the value
    bound = (largest_step(x) * (0.5 + 0.5)) @ np.abs(decoded(w)[0, 0]).T + np.abs(x) @ terms(w)[0, 0].T * 1e-5
    assert (np.abs(y - expected) <= bound).all()
    error = nmse(y, expected)
    assert error < nmse(plain_bytes(x) @ decoded(w)[0, 0].T, expected)
    if dtype in in_bytes(isa):
        assert error > 1e-6  # it is in bytes


@pytest.mark.parametrize("isa", FAST)
def test_least_error(isa: str) -> None:
    """Steps are chosen so that less is lost than with the largest element at 127."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((64, 1024)).astype(np.float32)
    w = fast(rng, gg.Q4_0, (64, 1024), isa)
    weights = decoded(w)[0, 0]
    expected = x @ weights.T
    y = run(gg.mul_mat(w, source(gg.F32, x)), isa, 1)[0, 0]
    assert nmse(y, expected) < 0.85 * nmse(plain_bytes(x) @ weights.T, expected)


@pytest.mark.parametrize("isa", FAST)
def test_company(isa: str) -> None:
    """Alone or among others, from a copy or in passing, with one thread or two: the same bits."""

    @CASES
    @given(cases(150))
    def check(c: Case) -> None:
        rng = np.random.default_rng(c.seed)
        w = fast(rng, c.dtype, (c.m, c.k), isa, c.passing)
        x = columns_of(rng, c.n, c.k)
        together = run(gg.mul_mat(w, source(gg.F32, x)), isa, c.n_threads)[0, 0]
        some = rng.permutation(c.n)[: rng.integers(1, c.n + 1)]
        assert same(run(gg.mul_mat(w, source(gg.F32, x[some])), isa, 1)[0, 0], together[some])
        i = int(some[0])
        assert same(run(gg.mul_mat(w, source(gg.F32, x[i : i + 1])), isa, 1)[0, 0, 0], together[i])
        other = source(c.dtype, np.zeros((c.m, c.k)))
        other.raw()[...] = w.raw()
        repack([other], isa=isa) if c.passing else repack_in_passing([other])
        be_fast([other])
        assert same(run(gg.mul_mat(other, source(gg.F32, x)), isa, 1)[0, 0], together)

    check()


@pytest.mark.parametrize("isa", FAST)
def test_experts(isa: str) -> None:
    """A result is the product of its expert's matrix alone with the column alone."""

    @CASES
    @given(cases(100), st.integers(1, 5))
    def check(c: Case, n_expert: int) -> None:
        rng = np.random.default_rng(c.seed)
        w, x = fast(rng, c.dtype, (n_expert, c.m, c.k), isa, c.passing), columns_of(rng, c.n, c.k)
        ids = rng.integers(0, n_expert, (c.n, 1))
        product = gg.mul_mat_id(w, source(gg.F32, x.reshape(c.n, 1, c.k)), source(gg.I32, ids))
        together = run(product, isa, c.n_threads)[0]
        for i in rng.integers(0, c.n, 2):
            matrix = source(c.dtype, np.zeros((c.m, c.k)))
            matrix.raw()[...] = w.raw().reshape(n_expert, -1)[ids[i, 0]].reshape(matrix.raw().shape)
            repack([matrix], isa=isa)
            be_fast([matrix])
            assert same(run(gg.mul_mat(matrix, source(gg.F32, x[i : i + 1])), isa, 1)[0, 0, 0], together[i, 0])

    check()


@pytest.mark.parametrize("isa", FAST)
def test_numbers_at_the_ends(isa: str) -> None:
    """Zeros, numbers too small for a step, large ones, NaN and infinities."""
    rng = np.random.default_rng(3)
    w = fast(rng, gg.Q4_0, (16, 64), isa)
    x = gaussian(rng, (6, 64)).astype(np.float32)
    x[0], x[1], x[2] = 0, x[1] * 1e-39, x[2] * 1e36
    x[3, 5], x[4, 40] = np.nan, -np.inf
    y = run(gg.mul_mat(w, source(gg.F32, x)), isa, 1)[0, 0]
    assert not y[:2].any()
    assert nmse(y[2] / 1e30, (x[2].astype(np.float64) / 1e30) @ decoded(w)[0, 0].T) < 1e-4
    assert np.isnan(y[3]).all() and np.isnan(y[4]).all()
    assert np.isfinite(y[5]).all()


def test_choice() -> None:
    """The form of the weights decides; with tiles nothing changes."""
    rng = np.random.default_rng(4)
    for isa in ISAS:
        w = fast(rng, gg.Q4_K, (16, 256), isa)
        node = gg.mul_mat(w, source(gg.F32, gaussian(rng, (3, 256))))
        found = choose(isa, node)
        assert found is not None and found[0] == kernel_of(isa, node, "_r16_fast" if isa in FAST else "_r16")
        assert found[1] is w.form.copy
