"""Weights in the fast form: columns rounded to a byte times a factor (csrc/products/r16/round.h): how large the error
is, and which products it concerns. That a column has the same bits in any company is in test_company.py. Of matrices of
floats both operands are rounded to 16-bit fixed point (csrc/products/gemm/halves.c). Where there are tiles, many
columns, and weights, are rounded to bf16 instead (csrc/products/gemm/bf16.h).
"""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu.isa import kernel_of
from pyggml.backends.cpu.products import FAST_BEYOND, NOT_FASTER, choose
from pyggml.backends.cpu.repack import be_fast, repack
from pyggml.testing.harness import gaussian, nmse

from .test_repack import ISAS, TYPES, decoded, run, source, terms

LEVELS = ("avx2", "avx512vnni", "dotprod", "i8mm")  # that have kernels which round columns to bytes
FAST = [isa for isa in ISAS if isa in LEVELS]
TILES = [isa for isa in ISAS if isa == "amx"]
FLOATS = [isa for isa in FAST if isa in FAST_BEYOND]  # and those that have some for floats
TRIED, ROOM = 8, 0.97  # of round.h


def fast(rng: np.random.Generator, dtype: gg.DType, shape: tuple[int, ...], isa: str) -> gg.Tensor:
    w = source(dtype, gaussian(rng, shape))
    repack([w], isa=isa)
    be_fast([w])
    return w


def part_of(dtype: gg.DType) -> int:
    """Elements that have the same factor."""
    return 32 if dtype.block_size == 256 else 16


def largest_error(x: np.ndarray, part: int) -> np.ndarray:
    """Half of the largest factor that each element's part may get, times its run's step."""
    runs = x.astype(np.float64).reshape(*x.shape[:-1], -1, 256)
    norms = np.sqrt((runs.reshape(*runs.shape[:-1], 2, 128) ** 2).sum(-1)).max(-1)
    steps = np.maximum(norms / 46300, np.abs(runs).max(-1) / 32512) / ROOM
    parts = np.abs(runs.reshape(*runs.shape[:-1], -1, part)).max(-1) / 127.4
    return np.repeat(0.5 * (parts + TRIED * steps[..., None]), part, -1).reshape(x.shape)


def plain_bytes(x: np.ndarray, n: int) -> np.ndarray:
    """x rounded to bytes as usual: in each n elements the largest becomes 127."""
    units = x.astype(np.float64).reshape(*x.shape[:-1], -1, n)
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
    bound = largest_error(x, part_of(dtype)) @ np.abs(decoded(w)[0, 0]).T + np.abs(x) @ terms(w)[0, 0].T * 1e-5
    assert (np.abs(y - expected) <= bound).all()
    if dtype in NOT_FASTER.get(isa, ()):
        assert nmse(y, expected) < 3e-8
    else:
        assert 1e-6 < nmse(y, expected) < 2e-4  # gaussian columns have outliers


@pytest.mark.parametrize("isa", FAST)
@pytest.mark.parametrize(
    "dtype, outliers, most",
    [(gg.Q4_0, False, 0.7), (gg.Q4_0, True, 0.55), (gg.Q4_K, False, 0.6), (gg.Q4_K, True, 0.3)],
    ids=lambda v: v.name if isinstance(v, gg.DType) else str(v),
)
def test_error_beside_that_of_plain_bytes(isa: str, dtype: gg.DType, outliers: bool, most: float) -> None:
    """llama.cpp has a step for each block of 32 or, with K types, of 256 elements."""
    rng = np.random.default_rng(2)
    x = (gaussian(rng, (64, 1024)) if outliers else rng.standard_normal((64, 1024))).astype(np.float32)
    w = fast(rng, dtype, (64, 1024), isa)
    weights = decoded(w)[0, 0]
    y = run(gg.mul_mat(w, source(gg.F32, x)), isa, 1)[0, 0]
    assert nmse(y, x @ weights.T) < most * nmse(plain_bytes(x, dtype.block_size) @ weights.T, x @ weights.T)


@pytest.mark.parametrize("isa", FAST)
def test_the_largest_integers(isa: str) -> None:
    """Columns, and weights, all of whose integers are as large as they may be: no sum overflows."""
    for dtype in (gg.Q6_K, gg.IQ4_XS, gg.Q5_1, gg.Q8_0, gg.Q5_0, gg.Q4_K, gg.Q3_K, gg.Q2_K, gg.MXFP4, gg.TQ2_0):
        w = source(dtype, np.where(np.arange(512) % 3, 1.0, -1.0)[None].repeat(16, 0))
        repack([w], isa=isa)
        be_fast([w])
        x = np.stack([np.sign(decoded(w)[0, 0, 0]), np.where(np.arange(512) % 256 == 7, 1.0, 1e-4)]).astype(np.float32)
        y = run(gg.mul_mat(w, source(gg.F32, x.repeat(20, 0))), isa, 1)[0, 0]
        assert nmse(y, x.repeat(20, 0) @ decoded(w)[0, 0].T) < 1e-4, dtype
        for c in range(2):
            assert np.array_equal(y[20 * c], run(gg.mul_mat(w, source(gg.F32, x[c : c + 1])), isa, 1)[0, 0, 0]), dtype


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
        assert found is not None and found[0] == kernel_of(isa, node, "_r16_fast" if isa in (*FAST, *TILES) else "_r16")
        assert found[1] is w.form.copy
        for dtype in NOT_FASTER.get(isa, ()):
            node = gg.mul_mat(fast(rng, dtype, (16, 256), isa), source(gg.F32, gaussian(rng, (3, 256))))
            found = choose(isa, node)
            assert found is not None and found[0] == kernel_of(isa, node, "_r16")


def most_off(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """How far each result of finite rows w and columns x may be from the product: half a step of each element, with
    steps for each 128 of a row and of a column; and f32's roundings."""
    k = w.shape[1]
    w, x = (np.pad(np.abs(v).astype(np.float64), ((0, 0), (0, -k % 128))).reshape(len(v), -1, 128) for v in (w, x))
    of_w, of_x = w.max(-1) / 8191, np.maximum(x.sum(-1) / 262000, x.max(-1) / 32766)
    near = 0.5 * (x.sum(-1) @ of_w.T + of_x @ (w.sum(-1) + 0.5 * 128 * of_w).T)
    return near * 1.0001 + 1e-6 * x.reshape(len(x), -1) @ w.reshape(len(w), -1).T


@pytest.mark.parametrize("isa", FLOATS)
@pytest.mark.parametrize("dtype", [gg.F16, gg.BF16], ids=lambda t: t.name)
def test_floats(dtype: gg.DType, isa: str) -> None:
    """Rows need not be whole strips. Short rows are exact."""
    rng = np.random.default_rng(5)
    for k, m in ((128, 1), (588, 97), (1080, 40), (17000, 18)):  # the last one: more strips than a table has
        w = source(dtype, gaussian(rng, (m, k)))
        be_fast([w])
        x = gaussian(rng, (30, k)).astype(np.float32)
        want = x.astype(np.float64) @ decoded(w)[0, 0].T
        y = run(gg.mul_mat(w, source(gg.F32, x)), isa, 2)[0, 0]
        assert nmse(y, want) > 1e-10
        assert (np.abs(y - want) <= most_off(decoded(w)[0, 0], x)).all()
        for n in (30, 1, 2, 3, 4, 5, 17):
            assert np.array_equal(run(gg.mul_mat(w, source(gg.F32, x[:n])), isa, 1)[0, 0], y[:n]), f"{n} columns"
    w, x = source(dtype, rng.standard_normal((64, 2048))), rng.standard_normal((64, 2048)).astype(np.float32)
    be_fast([w])
    y = run(gg.mul_mat(w, source(gg.F32, x)), isa, 2)[0, 0]
    assert nmse(y, x.astype(np.float64) @ decoded(w)[0, 0].T) < 2.5e-8  # without outliers
    short = source(dtype, gaussian(rng, (8, 96)))
    be_fast([short])
    assert choose(isa, gg.mul_mat(short, source(gg.F32, gaussian(rng, (64, 96))))) is None


@pytest.mark.parametrize("isa", FLOATS)
def test_floats_at_the_ends(isa: str) -> None:
    """Zeros, subnormals, the largest numbers; NaN and infinities stay in their rows and columns."""
    rng = np.random.default_rng(6)
    values = gaussian(rng, (33, 200)).astype(np.float32)
    values[0], values[1], values[2] = 0, 6e-8, np.where(np.arange(200) % 2, 65504.0, -65504.0)
    values[3, 199] = np.inf
    w = source(gg.F16, values)
    be_fast([w])
    x = gaussian(rng, (40, 200)).astype(np.float32)
    x[0], x[1], x[2, 7] = 0, x[1] * 1e30, np.nan
    y = run(gg.mul_mat(w, source(gg.F32, x)), isa, 1)[0, 0].astype(np.float64)
    assert np.isnan(y[2]).all() and np.isnan(y[4:, 3]).all()
    assert not y[3:, 0].any() and not np.delete(y[0], 3).any()
    finite = np.delete(x, 2, 0), np.delete(values, 3, 0).astype(np.float16).astype(np.float32)
    want = finite[0].astype(np.float64) @ finite[1].astype(np.float64).T
    assert (np.abs(np.delete(np.delete(y, 2, 0), 3, 1) - want) <= most_off(finite[1], finite[0])).all()
    for n in (1, 3):
        assert np.array_equal(run(gg.mul_mat(w, source(gg.F32, x[:n])), isa, 1)[0, 0], y[:n], equal_nan=True)
    # Steps whose product f32 does not have, because it is too small, or too large.
    small, columns = (rng.standard_normal((n, 256)).astype(np.float32) * np.float32(5e-20) for n in (20, 7))
    large, one = np.zeros((2, 128), np.float32), np.zeros((7, 128), np.float32)
    large[:, 0], one[:, 1] = 1e38, 1e10
    a, b = source(gg.BF16, small), source(gg.BF16, large)
    be_fast([a, b])
    for n in (1, 7):
        y = run(gg.mul_mat(a, source(gg.F32, columns[:n])), isa, 1)[0, 0].astype(np.float64)
        want = columns[:n].astype(np.float64) @ decoded(a)[0, 0].astype(np.float64).T
        assert (np.abs(y - want) <= most_off(decoded(a)[0, 0], columns[:n]) + 1e-44).all()
        assert not run(gg.mul_mat(b, source(gg.F32, one[:n])), isa, 1).any()
    tiny = source(gg.BF16, np.full((20, 200), 1e-31))  # as all values below 1e-30
    be_fast([tiny])
    assert not run(gg.mul_mat(tiny, source(gg.F32, np.full((2, 200), 1e38))), isa, 1).any()


@pytest.mark.parametrize("isa", TILES)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name)
def test_tiles(dtype: gg.DType, isa: str) -> None:
    """Both operands are off by 2**-8 of themselves at most, which makes a third when it is evenly spread; one outlier
    may decide a result. Up to 32 columns are exact. Neither threads nor other columns change a bit of many."""
    rng = np.random.default_rng(6)
    k = 768 if dtype.block_size > 64 else 576
    w, x = fast(rng, dtype, (97, k), isa), gaussian(rng, (70, k)).astype(np.float32)
    exact = source(dtype, np.zeros((97, k)))
    exact.raw()[...] = w.raw()
    repack([exact], isa=isa)
    y = run(gg.mul_mat(w, source(gg.F32, x)), isa, 2)[0, 0]
    assert 1e-7 < nmse(y, x @ decoded(w)[0, 0].T) < 2e-5
    assert np.array_equal(run(gg.mul_mat(w, source(gg.F32, x)), isa, 1)[0, 0], y)
    for n in (33, 36, 49, 64, 65):
        assert np.array_equal(run(gg.mul_mat(w, source(gg.F32, x[:n])), isa, 2)[0, 0], y[:n]), f"{n} columns"
    for n in (1, 9, 20, 32):
        few = gg.mul_mat(w, source(gg.F32, x[:n])), gg.mul_mat(exact, source(gg.F32, x[:n]))
        assert np.array_equal(run(few[0], isa, 2), run(few[1], isa, 2)), f"{n} columns"


@pytest.mark.parametrize("isa", TILES)
@pytest.mark.parametrize("dtype", [gg.F16, gg.BF16], ids=lambda t: t.name)
def test_floats_in_tiles(dtype: gg.DType, isa: str) -> None:
    """Tiles leave out the rest of a rest of a column, and what two rests make. Few columns, and rows that are not whole
    units, are exact."""
    rng = np.random.default_rng(11)
    border = FAST_BEYOND[isa]
    for k, m in ((128, 1), (288, 31), (544, 97), (588, 40)):
        w = source(dtype, gaussian(rng, (m, k)))
        be_fast([w])
        x = gaussian(rng, (border + 38, k)).astype(np.float32)
        want = x.astype(np.float64) @ decoded(w)[0, 0].T
        y = run(gg.mul_mat(w, source(gg.F32, x)), isa, 2)[0, 0]
        assert (1e-12 if k % 32 == 0 else 0) < nmse(y, want) < (2 * (2.0**-16 / 3) ** 2 if k % 32 == 0 else 1e-12)
        assert np.array_equal(run(gg.mul_mat(w, source(gg.F32, x)), isa, 1)[0, 0], y)
        for n in (border + i for i in (1, 4, 5, 16, 29)):
            assert np.array_equal(run(gg.mul_mat(w, source(gg.F32, x[:n])), isa, 2)[0, 0], y[:n]), f"{n} columns"
        assert nmse(run(gg.mul_mat(w, source(gg.F32, x[:border])), isa, 2)[0, 0], want[:border]) < 1e-12
