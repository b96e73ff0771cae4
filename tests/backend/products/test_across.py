"""out_prod follows the form of its weights, as mul_mat does: the gradient of the columns that met them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu.products import ROUND_BEYOND, choose
from pyggml.backends.cpu.repack import allow_rounding, repack, repack_in_passing
from pyggml.buffers.buffer import LazyBuffer
from pyggml.testing.harness import gaussian

from .test_repack import ISAS, TYPES, source, symbols
from .test_repack import run as run_node

# Both operands are rounded to 16 bits, of which a strip of 256 leaves about 11 to one element: 2 / 12 * 2**-22 if it is
# evenly spread, and more when a strip has an outlier.
FIXED = 1e-6


def run(y: gg.Tensor, isa: str, n_threads: int) -> np.ndarray:
    """The node y of up to three dimensions."""
    return run_node(y, isa, n_threads).reshape(y.shape)


def columns(rng: np.random.Generator, k: int, n: int, turned: bool) -> gg.Tensor:
    """b of out_prod, ne [n, k]: dense, or the transposed of dense columns, as a gradient is."""
    x = gaussian(rng, (n, k)).astype(np.float32)
    return gg.transpose(source(gg.F32, x)) if turned else source(gg.F32, np.ascontiguousarray(x.T))


def product(w: gg.Tensor, b: gg.Tensor) -> np.ndarray:
    """out_prod of w [k, m] and b, in float64."""
    return b.numpy().astype(np.float64).T @ w.numpy().astype(np.float64)


def nmse(y: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sum((y - exact) ** 2) / np.sum(exact**2))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES)
def test_copies_and_passing(dtype: gg.DType, isa: str) -> None:
    """A repacked copy and the stored blocks give the same bits, for any number of columns and of threads, and for sums
    that are no whole units."""
    rng = np.random.default_rng(dtype.gguf_id)
    block = max(256, dtype.block_size)
    for m, k, n in ((dtype.block_size, 1, 1), (block + dtype.block_size, 47, 5), (2 * block, 300, 33)):
        stored, copied = (source(dtype, np.zeros((k, m))) for _ in range(2))
        values = gg.quantize(gaussian(rng, (k, m)).astype(np.float32), dtype).reshape(-1)
        for w in (stored, copied):
            w.raw()[...] = values
        for b in (columns(rng, k, n, turned) for turned in (False, True)):
            plain = run(gg.out_prod(stored, b), isa, 1)
            assert nmse(plain, product(stored, b)) < 1e-12
        repack_in_passing([stored])
        assert repack([copied], isa=isa) == 1
        for b in (columns(rng, k, n, turned) for turned in (False, True)):
            one = run(gg.out_prod(stored, b), isa, 1)
            assert nmse(one, product(stored, b)) < FIXED
            for w in (stored, copied):
                for n_threads in (1, 2):
                    assert np.array_equal(run(gg.out_prod(w, b), isa, n_threads), one)
        few = gg.view_2d(b.src[0], k, 1, b.src[0].nb[1], 0)  # type: ignore[union-attr]
        assert np.array_equal(run(gg.out_prod(copied, gg.transpose(few)), isa, 2)[0], one[0])
        stored.raw()[...] = 0  # the copy is read, and nothing else
        assert np.array_equal(run(gg.out_prod(copied, b), isa, 2), one)


def test_stored_bytes_are_not_made() -> None:
    """The gradient through a weight whose file has only the copy needs no second copy in memory."""

    def made() -> np.ndarray:
        raise AssertionError("the stored bytes were made")

    rng = np.random.default_rng(1)
    w, b = source(gg.Q4_K, gaussian(rng, (40, 256))), columns(rng, 40, 30, True)
    repack([w])
    y = gg.out_prod(w, b)
    gg.compute(gg.Graph().build_forward_expand(y))
    want = y.numpy().copy()
    w.buffer, w.offset = LazyBuffer(None, made), 0
    for t in (y, gg.mul_mat(w, source(gg.F32, gaussian(rng, (30, 256))))):
        gg.compute(gg.Graph().build_forward_expand(t))
    assert np.array_equal(y.numpy(), want)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15)
@given(st.data())
def test_shapes(isa: str, data: st.DataObject) -> None:
    """Any shape, broadcast batches of b, values of any size."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from([gg.Q4_0, gg.Q4_K, gg.Q8_0, gg.IQ2_S]))
    m = dtype.block_size * data.draw(st.integers(1, 40 if dtype.block_size == 32 else 4))
    k, n = (data.draw(st.integers(1, 40) | st.sampled_from([255, 256, 257, 290])) for _ in range(2))
    b2 = data.draw(st.sampled_from([1, 1, 3]))
    scale = 10.0 ** data.draw(st.sampled_from([0, 0, -18, 18, -25]))
    w = source(dtype, np.zeros((k, m)))
    w.raw()[...] = gg.quantize(gaussian(rng, (k, m)).astype(np.float32), dtype).reshape(-1)
    x = (gaussian(rng, (b2, n, k)) * scale).astype(np.float32)
    b = gg.permute(source(gg.F32, x), 1, 0, 2, 3)
    repack([w], isa=isa)
    y = run(gg.out_prod(w, b), isa, data.draw(st.integers(1, 2)))
    exact = x.astype(np.float64) @ w.numpy().astype(np.float64)
    assert nmse(y, exact) < FIXED


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in ROUND_BEYOND])
@pytest.mark.parametrize("dtype", [gg.F16, gg.BF16])
def test_rounded(dtype: gg.DType, isa: str) -> None:
    """F16 and BF16 are rounded beyond a number of columns, when they may be."""
    rng = np.random.default_rng(1)
    w = source(dtype, gaussian(rng, (300, 288)))
    b = columns(rng, 300, 300, True)
    y = gg.out_prod(w, b)
    exact = product(w, b)
    assert nmse(run(y, isa, 1), exact) < 1e-12
    before = symbols(y, isa)
    allow_rounding([w])
    assert symbols(y, isa) != before
    one = run(y, isa, 1)
    assert 1e-12 < nmse(one, exact) < 1e-7
    assert np.array_equal(run(y, isa, 2), one)
    few = gg.out_prod(w, columns(rng, 300, min(ROUND_BEYOND.values()), True))
    assert choose(isa, few) is None


@pytest.mark.parametrize("isa", ISAS)
def test_nan_and_infinities(isa: str) -> None:
    """NaN in a column makes the whole column NaN; NaN in a scale the elements of its block, in every column."""
    rng = np.random.default_rng(1)
    w = source(gg.Q8_0, gaussian(rng, (300, 320)))
    for special in (np.nan, np.inf):
        x = gaussian(rng, (20, 300)).astype(np.float32)
        x[3, 77] = special
        bad = source(gg.Q8_0, w.numpy())
        bad.raw()[5 * 340 + 34 * 2 : 5 * 340 + 34 * 2 + 2] = np.array([special], np.float16).view(np.uint8)
        repack([w, bad], isa=isa)
        y = run(gg.out_prod(w, gg.transpose(source(gg.F32, x))), isa, 1)
        assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, 0)).all()
        x[3, 77] = 0
        y = run(gg.out_prod(bad, gg.transpose(source(gg.F32, x))), isa, 1)
        assert np.isnan(y[:, 64:96]).all() and np.isfinite(np.delete(y, np.s_[64:96], 1)).all()


def test_not_a_matrix() -> None:
    """Several matrices of weights have no form, and neither do levels without kernels."""
    x = np.zeros((2, 32, 64), np.float32)
    several, one, b = source(gg.Q8_0, x), source(gg.Q8_0, x[0]), source(gg.F32, x)
    repack([several, one])
    assert choose(ISAS[-1], gg.out_prod(several, b)) is None
    assert choose("generic", gg.out_prod(one, b)) is None
    assert choose(ISAS[-1], gg.out_prod(one, b)) is not None
