"""What is special about products of repacked weights with many columns (csrc/products/gemm): 16-bit integers, with a
step for each run of 256 elements of a column. The types and shapes at large are in test_repack.py.
"""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.backends.cpu.repack import repack
from pyggml.buffers.alloc import steps_of
from pyggml.testing.harness import check_guards, fill, gaussian, nmse, place

from .test_repack import TYPES

ISAS = [isa for isa in isa_levels() if isa not in ("generic", "avx512")]  # the levels with such kernels of their own
# A rounding is 1/12 of a squared step; the step is 1/32512 of the largest of 256 values, or 1/46300 of the norm of 128.
# Weights are exact.
BOUND = 256 / 12 / 32512**2


def weights(w: np.ndarray, dtype: gg.DType, isa: str) -> gg.Tensor:
    t = gg.Context().new_tensor(dtype, w.shape[::-1])
    place(t)
    fill(t, w.reshape(t.ne[::-1]))
    assert repack([t], isa=isa) == 1
    return t


def times(w: gg.Tensor, x: np.ndarray, isa: str, n_threads: int = 2) -> np.ndarray:
    """w times the rows of x, in guarded memory."""
    b = w.ctx.new_tensor(gg.F32, x.shape[::-1])
    place(b)
    fill(b, x.reshape(b.ne[::-1]))
    y = gg.mul_mat(w, b)
    place(y)
    CpuBackend(n_threads, isa).compile(steps_of([y]), lambda s: s).run()
    for t in (w, b, y):
        check_guards(t)
    return y.numpy().copy()


def values_of(w: gg.Tensor) -> np.ndarray:
    return np.asarray(w.elements(), np.float64).reshape(w.ne[1], w.ne[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [gg.Q4_0, gg.Q4_1, gg.Q5_0, gg.Q8_0, gg.MXFP4])
def test_edges(dtype: gg.DType, isa: str) -> None:
    """Parts of tiles, of groups of columns, of strips; outliers. Neither threads nor other columns change a bit."""
    rng = np.random.default_rng(5)
    for k, m in ((32, 1), (256, 16), (288, 31), (544, 97)):
        w = weights(gaussian(rng, (m, k)), dtype, isa)
        x = gaussian(rng, (70, k)).astype(np.float32)
        y = times(w, x, isa)
        assert nmse(y, x @ values_of(w).T) < BOUND
        assert np.array_equal(times(w, x, isa, 1), y)
        for n in (1, 2, 9, 13, 25, 28, 35, 36, 37, 41, 49, 54, 63, 65):
            assert np.array_equal(times(w, x[:n], isa), y[:n]), f"{n} columns"
        if isa == "amx":  # tiles multiply the same integers
            assert np.array_equal(times(w, x, "avx512vnni"), y)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [t for t in TYPES if t.block_size > 32])
def test_blocks_of_256(dtype: gg.DType, isa: str) -> None:
    rng = np.random.default_rng(6)
    w = weights(gaussian(rng, (70, 768)), dtype, isa)
    x = gaussian(rng, (41, 768)).astype(np.float32)
    assert nmse(times(w, x, isa), x @ values_of(w).T) < BOUND


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [gg.Q8_0, gg.Q4_0, gg.Q4_1, gg.Q6_K])
def test_sums_cannot_overflow(dtype: gg.DType, isa: str) -> None:
    """Columns in the direction of a row make the largest sums that their norms allow, of either sign."""
    rng = np.random.default_rng(7)
    rows = [
        np.ones(512),
        -np.ones(512),
        rng.standard_normal(512),
        np.eye(512)[300],
        np.where(np.arange(512) % 32 == 7, -9.0, 1e-3),
    ]
    w = weights(np.array(rows * 8), dtype, isa)
    real = values_of(w)
    x = np.concatenate([real, -real]).astype(np.float32)
    assert nmse(times(w, x, isa), x @ real.T) < BOUND


@pytest.mark.parametrize("isa", ISAS)
def test_range_of_columns(isa: str) -> None:
    """Each column has its own steps: large and small ones do not disturb each other; squares would overflow."""
    rng = np.random.default_rng(8)
    w = weights(rng.standard_normal((40, 512)), gg.Q8_0, isa)
    x = rng.standard_normal((56, 512)) * 10.0 ** np.linspace(-28, 35, 56)[:, None]
    x[5, :256] *= 1e-6
    x[6] = 0
    got, want = times(w, x.astype(np.float32), isa), x.astype(np.float32) @ values_of(w).T
    for i in range(56):
        assert nmse(got[i], want[i]) < BOUND, f"column {i}"
    assert (got[6] == 0).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite(bad: float, isa: str) -> None:
    """A column or a row with NaN or an infinity gives NaN or an infinity, the others what they gave before."""
    rng = np.random.default_rng(9)
    values = rng.standard_normal((40, 512))
    w = weights(values, gg.Q8_0, isa)
    x = rng.standard_normal((56, 512)).astype(np.float32)
    before = times(w, x, isa)
    x[3, 300] = bad
    after = times(w, x, isa)
    assert not np.isfinite(after[3]).any() and np.array_equal(np.delete(after, 3, 0), np.delete(before, 3, 0))

    w = weights(values, gg.Q8_0, isa)
    stored = gg.Context().new_tensor(gg.Q8_0, (512, 40))
    place(stored)
    stored.raw()[...] = w.raw()
    stored.raw().reshape(40, 16, 34)[7, 9, :2] = np.frombuffer(np.float16(bad).tobytes(), np.uint8)
    assert repack([stored], isa=isa) == 1
    x[3, 300] = 0
    before, after = times(w, x, isa), times(stored, x, isa)
    assert not np.isfinite(after[:, 7]).any() and np.array_equal(np.delete(after, 7, 1), np.delete(before, 7, 1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [gg.F32, gg.F16, gg.BF16])
def test_columns_of_any_layout(dtype: gg.DType, isa: str) -> None:
    rng = np.random.default_rng(10)
    w = weights(rng.standard_normal((33, 288)), gg.Q5_0, isa)
    b = w.ctx.from_numpy(rng.standard_normal((2, 9, 3, 288)).astype(np.float32), dtype)
    for view in (gg.permute(b, 0, 2, 1, 3), gg.view_3d(b, 288, 3, 9, b.nb[1], b.nb[2], b.nb[3])):
        y = gg.mul_mat(w, view)
        place(y)
        CpuBackend(2, isa).compile(steps_of([y]), lambda s: s).run()
        check_guards(y)
        assert nmse(np.array(y.elements()), np.asarray(view.elements(), np.float64) @ values_of(w).T) < BOUND
