"""What the per-op cases of mul_mat do not show: errors, and that neither threads nor the number of columns matter."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.errors import BackendError, DTypeError, ShapeError

RNG = np.random.default_rng(1)


def product(w: gg.Tensor, x: np.ndarray, isa: str, n_threads: int) -> np.ndarray:
    y = gg.mul_mat(w, w.ctx.from_numpy(x))
    g = gg.Graph().build_forward_expand(y)
    gg.compute(g, backend=CpuBackend(n_threads, isa))
    return y.numpy().copy()


@pytest.mark.parametrize("isa", list(isa_levels()))
@pytest.mark.parametrize("dtype", [gg.F32, gg.F16, gg.BF16, gg.Q8_0, gg.Q4_0, gg.Q4_1])
def test_threads_and_columns(dtype: gg.DType, isa: str) -> None:
    """The bits stay; test_company.py has random shapes."""
    w = gg.Context().from_numpy(RNG.standard_normal((300, 1024)), dtype)
    x = RNG.standard_normal((140, 1024)).astype(np.float32)  # beyond the borders between the ways of product.c
    one = product(w, x, isa, 1)
    assert np.array_equal(one, product(w, x, isa, 2)), "the number of threads changes the result"
    for n in (1, 7, 13, 33, 65, 128):
        few = product(w, x[:n], isa, 2)
        assert np.array_equal(few, product(w, x[:n], isa, 1)), f"{n} columns: the number of threads changes the result"
        assert np.array_equal(few, one[:n]), f"{n} columns: company changes the result"


def transposed(x: np.ndarray, pad: int) -> gg.Tensor:
    """x as a view across its rows, which are `pad` elements longer than they seem."""
    n, k = x.shape
    wide = np.full((k, n + pad), np.nan, np.float32)
    wide[:, :n] = x.T
    t = gg.Context().from_numpy(wide)
    return gg.transpose(gg.view_2d(t, n, k, t.nb[1], 0))


@pytest.mark.parametrize("isa", list(isa_levels()))
@pytest.mark.parametrize("dtype", [gg.F32, gg.F16, gg.BF16, gg.Q8_0, gg.Q4_K])
def test_out_prod_is_a_product_of_the_transposed(dtype: gg.DType, isa: str) -> None:
    """out_prod has nearly the precision of mul_mat, whose chains are shorter, and the same bits for any layout of b,
    any number of columns and of threads. The sizes are beyond one block of rows, of sums and of columns."""
    m, k, n = 768, 600, 150
    w = gg.Context().from_numpy(RNG.standard_normal((k, m)), dtype)
    x = RNG.standard_normal((k, n)).astype(np.float32)

    def run(b: gg.Tensor, n_threads: int) -> np.ndarray:
        y = gg.out_prod(w, b)
        gg.compute(gg.Graph().build_forward_expand(y), backend=CpuBackend(n_threads, isa))
        return y.numpy().copy()

    one = run(gg.Context().from_numpy(x), 1)  # neighbouring columns: the gradient of weights
    exact = x.T.astype(np.float64) @ w.numpy().astype(np.float64)
    turned = np.ascontiguousarray(w.numpy().T)
    of_mul_mat = product(gg.Context().from_numpy(turned), np.ascontiguousarray(x.T), isa, 1)
    error, usual = (np.sum((y - exact) ** 2) for y in (one, of_mul_mat))
    assert error <= 8 * usual
    across = gg.transpose(gg.Context().from_numpy(np.ascontiguousarray(x.T)))  # dense columns: the gradient of x
    for b in (gg.Context().from_numpy(x), across, transposed(np.ascontiguousarray(x.T), 5), transposed(x, 3)):
        for n_threads in (1, 2):
            assert np.array_equal(run(b if b.ne[0] == n else gg.transpose(b), n_threads), one)
    for few in (1, 5, 12, 13, 48, 61):
        assert np.array_equal(run(gg.Context().from_numpy(np.ascontiguousarray(x[:, :few])), 2), one[:few])
    same = gg.Context().from_numpy(np.ascontiguousarray(x[:, :1]))
    repeated = gg.view_2d(same, 1, k, same.nb[1], 0)
    assert np.array_equal(run(repeated, 2), one[:1])
    row = gg.Context().from_numpy(x[:1])
    assert np.array_equal(run(gg.view_2d(row, n, k, 0, 0), 2), run(gg.Context().from_numpy(np.tile(x[:1], (k, 1))), 1))


def test_shape_errors() -> None:
    with gg.Context() as ctx:
        a, b = ctx.new_tensor(gg.F32, (8, 3, 2)), ctx.new_tensor(gg.F32, (8, 5, 3))
        with pytest.raises(ShapeError, match="repeats along dimensions 2 and 3"):
            gg.mul_mat(a, b)
        with pytest.raises(ShapeError, match="summed over dimension 0: 8 is not 3"):
            gg.mul_mat(a, gg.transpose(a))
        with pytest.raises(ShapeError, match="rows of a must be dense"):
            gg.mul_mat(gg.transpose(a), ctx.new_tensor(gg.F32, (3, 5, 2)))
        with pytest.raises(DTypeError):
            gg.mul_mat(a, ctx.new_tensor(gg.I32, (8, 5)))
        with pytest.raises(ShapeError, match="summed over dimension 1"):
            gg.out_prod(a, b)
        ids = ctx.new_tensor(gg.I32, (3, 7))
        with pytest.raises(ShapeError, match="must divide the 3 experts"):
            gg.mul_mat_id(a, ctx.new_tensor(gg.F32, (8, 2, 7)), ids)
        with pytest.raises(ShapeError, match="one row of ids per token"):
            gg.mul_mat_id(a, ctx.new_tensor(gg.F32, (8, 1, 6)), ids)


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("bad", [-1, 4])
def test_id_out_of_range(bad: int, backend: str) -> None:
    with gg.Context() as ctx:
        a = ctx.from_numpy(RNG.standard_normal((4, 6, 32)).astype(np.float32))
        b = ctx.from_numpy(RNG.standard_normal((5, 1, 32)).astype(np.float32))
        ids = ctx.from_numpy(np.array([[0, 1], [2, 3], [1, bad], [0, 0], [3, 3]], np.int32))
        g = gg.Graph().build_forward_expand(gg.mul_mat_id(a, b, ids))
    with pytest.raises(BackendError, match=f"row index {bad} is out of range"):
        gg.compute(g, backend=backend)
