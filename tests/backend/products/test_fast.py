"""Weights in the fast form: columns rounded to a byte times a factor (csrc/products/r16/round.h): how large the error
is, and which products it concerns. That a column has the same bits in any company is in test_company.py.
"""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu.isa import kernel_of
from pyggml.backends.cpu.products import choose
from pyggml.backends.cpu.repack import be_fast, repack
from pyggml.testing.harness import gaussian, nmse

from .test_repack import ISAS, TYPES, decoded, run, source, terms

FAST = [isa for isa in ISAS if isa in ("avx2", "avx512vnni")]  # the levels that have kernels for it
TRIED, ROOM = 8, 0.98  # of round.h


def fast(rng: np.random.Generator, dtype: gg.DType, shape: tuple[int, ...], isa: str) -> gg.Tensor:
    w = source(dtype, gaussian(rng, shape))
    repack([w], isa=isa)
    be_fast([w])
    return w


def largest_error(x: np.ndarray) -> np.ndarray:
    """Half of the largest factor that each element's part of 16 may get, times its run's step."""
    runs = x.astype(np.float64).reshape(*x.shape[:-1], -1, 256)
    norms = np.sqrt((runs.reshape(*runs.shape[:-1], 2, 128) ** 2).sum(-1)).max(-1)
    steps = np.maximum(norms / 46300, np.abs(runs).max(-1) / 32512) / ROOM
    parts = np.abs(runs.reshape(*runs.shape[:-1], 16, 16)).max(-1) / 127.4
    return np.repeat(0.5 * (parts + TRIED * steps[..., None]), 16, -1).reshape(x.shape)


def plain_bytes(x: np.ndarray) -> np.ndarray:
    """x rounded to bytes as usual: in each 32 elements the largest becomes 127."""
    units = x.astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    d = np.abs(units).max(-1, keepdims=True) / 127
    return (np.rint(units / d) * d).reshape(x.shape)


@pytest.mark.parametrize("n_cols", [2, 40])
@pytest.mark.parametrize("isa", FAST)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name)
def test_error(dtype: gg.DType, isa: str, n_cols: int) -> None:
    """Each result is within what rounding each element by half its factor can make of it."""
    rng = np.random.default_rng(1)
    w, x = fast(rng, dtype, (37, 512), isa), gaussian(rng, (n_cols, 512))
    y = run(gg.mul_mat(w, source(gg.F32, x)), isa, 1)[0, 0].astype(np.float64)
    expected = x.astype(np.float64) @ decoded(w)[0, 0].T
    bound = largest_error(x) @ np.abs(decoded(w)[0, 0]).T + np.abs(x) @ terms(w)[0, 0].T * 1e-5
    assert (np.abs(y - expected) <= bound).all()
    assert 1e-6 < nmse(y, expected) < 2e-4  # gaussian columns have outliers


@pytest.mark.parametrize("isa", FAST)
@pytest.mark.parametrize("outliers, most", [(False, 0.7), (True, 0.55)])
def test_error_beside_that_of_plain_bytes(isa: str, outliers: bool, most: float) -> None:
    rng = np.random.default_rng(2)
    x = (gaussian(rng, (64, 1024)) if outliers else rng.standard_normal((64, 1024))).astype(np.float32)
    w = fast(rng, gg.Q4_0, (64, 1024), isa)
    weights = decoded(w)[0, 0]
    y = run(gg.mul_mat(w, source(gg.F32, x)), isa, 1)[0, 0]
    assert nmse(y, x @ weights.T) < most * nmse(plain_bytes(x) @ weights.T, x @ weights.T)


@pytest.mark.parametrize("isa", FAST)
def test_the_largest_integers(isa: str) -> None:
    """Columns, and weights, all of whose integers are as large as they may be: no sum overflows."""
    for dtype in (gg.Q6_K, gg.IQ4_XS, gg.Q5_1, gg.Q8_0):
        w = source(dtype, np.where(np.arange(512) % 3, 1.0, -1.0)[None].repeat(16, 0))
        repack([w], isa=isa)
        be_fast([w])
        x = np.stack([np.sign(decoded(w)[0, 0, 0]), np.where(np.arange(512) % 256 == 7, 1.0, 1e-4)]).astype(np.float32)
        y = run(gg.mul_mat(w, source(gg.F32, x.repeat(20, 0))), isa, 1)[0, 0]
        assert nmse(y, x.repeat(20, 0) @ decoded(w)[0, 0].T) < 1e-4, dtype


@pytest.mark.parametrize("n_cols", [1, 8])
@pytest.mark.parametrize("isa", FAST)
def test_numbers_at_the_ends(isa: str, n_cols: int) -> None:
    """Zeros, numbers too small for a step, large ones, NaN and infinities; alone and among many."""
    rng = np.random.default_rng(3)
    w = fast(rng, gg.Q4_0, (16, 64), isa)
    x = gaussian(rng, (6, 64)).astype(np.float32)
    x[0], x[1], x[2] = 0, x[1] * 1e-39, x[2] * 1e36
    x[3, 5], x[4, 40] = np.nan, -np.inf
    y = np.concatenate([run(gg.mul_mat(w, source(gg.F32, v[None].repeat(n_cols, 0))), isa, 1)[0, 0, -1:] for v in x])
    assert not y[:2].any()
    assert nmse(y[2] / 1e30, (x[2].astype(np.float64) / 1e30) @ decoded(w)[0, 0].T) < 1e-4
    assert np.isnan(y[3]).all() and np.isnan(y[4]).all()
    assert np.isfinite(y[5]).all()


def test_choice() -> None:
    """The form of the weights decides, at levels that have kernels for it."""
    rng = np.random.default_rng(4)
    for isa in ISAS:
        w = fast(rng, gg.Q4_K, (16, 256), isa)
        node = gg.mul_mat(w, source(gg.F32, gaussian(rng, (3, 256))))
        found = choose(isa, node)
        assert found is not None and found[0] == kernel_of(isa, node, "_r16_fast" if isa in FAST else "_r16")
        assert found[1] is w.form.copy
