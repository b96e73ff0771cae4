"""The bits of a column of a product do not depend on the columns beside it, on threads, nor on how the columns lie."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu import isa_levels
from pyggml.backends.cpu.repack import repack
from pyggml.testing.harness import gaussian

from .test_repack import TYPES, run, source

ISAS = list(isa_levels())
FLOATS = [gg.F32, gg.F16, gg.BF16]


@lru_cache(maxsize=256)
def stored_rows(dtype: gg.DType, k: int) -> np.ndarray:
    """A few rows, as they are stored."""
    return gg.quantize(gaussian(np.random.default_rng(k), (8, k)).astype(np.float32), dtype)


def matrices(dtype: gg.DType, k: int, m: int, *batch: int) -> gg.Tensor:
    w = gg.Context().new_tensor(dtype, (k, m, *batch))
    rows = source(dtype, np.zeros((m * int(np.prod(batch)), k)))
    rows.raw()[...] = np.resize(stored_rows(dtype, k).view(np.uint8).reshape(8, -1)[:7], rows.raw().size)
    w.buffer, w.offset = rows.buffer, rows.offset
    return w


def lying(x: np.ndarray, how: str) -> gg.Tensor:
    """x [..., n, k] as columns that lie side by side, apart, or across memory."""
    if how == "dense":
        return source(gg.F32, x)
    if how == "across":
        axes = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
        return gg.transpose(source(gg.F32, np.ascontiguousarray(np.transpose(x, axes))))
    wide = np.full((*x.shape[:-1], x.shape[-1] + 5), np.nan, np.float32)
    wide[..., : x.shape[-1]] = x
    t = source(gg.F32, wide)
    return gg.view_4d(t, x.shape[-1], *t.ne[1:], *t.nb[1:], 0)


def of_matrix(w: gg.Tensor, i: int, x: np.ndarray, isa: str) -> np.ndarray:
    """Matrix i of w times one column by itself."""
    one = gg.view_2d(w, w.ne[0], w.ne[1], w.nb[1], i * w.nb[2])
    return run(gg.mul_mat(one, source(gg.F32, x[None])), isa, 1)


def same(got: np.ndarray, want: np.ndarray) -> bool:
    return np.array_equal(got.reshape(-1).view(np.int32), want.reshape(-1).view(np.int32))


LENGTHS = st.integers(1, 80) | st.integers(81, 1300) | st.sampled_from([64, 65, 511, 512, 513, 1024, 1536])
COLUMNS = st.sampled_from([1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 16, 31, 40, 80, 81, 97, 140])


def draw_sizes(data: st.DataObject, dtype: gg.DType) -> tuple[int, int]:
    """k and m."""
    k = data.draw(LENGTHS, "k") if dtype in FLOATS else dtype.block_size * data.draw(st.integers(1, 5), "blocks")
    return k, data.draw(st.sampled_from([1, 3, 4, 8, 15, 33, 64, 70]), "m")


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_column_alone(isa: str, data: st.DataObject) -> None:
    """mul_mat, with matrices that repeat and columns that lie anyhow."""
    dtype = data.draw(st.sampled_from(FLOATS) | st.sampled_from(TYPES), "dtype")
    k, m = draw_sizes(data, dtype)
    n, a2, r2 = data.draw(COLUMNS, "n"), data.draw(st.integers(1, 2), "a2"), data.draw(st.integers(1, 3), "r2")
    how = data.draw(st.sampled_from(["dense", "dense", "apart", "across"]), "how")
    w = matrices(dtype, k, m, a2)
    if dtype in FLOATS and data.draw(st.booleans(), "repack"):
        repack([w], isa=isa)  # as load_model does
    x = gaussian(np.random.default_rng(n), (a2 * r2, n, k)).astype(np.float32)
    y = run(gg.mul_mat(w, lying(x, how)), isa, data.draw(st.integers(1, 2), "threads")).reshape(a2 * r2, n, m)
    for i, j in ((0, 0), (a2 * r2 - 1, n - 1), (a2 * r2 // 2, n // 2)):
        assert same(y[i, j], of_matrix(w, i // r2, x[i, j], isa)), f"column {j} of {n}, matrix {i // r2}"


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_column_of_an_expert(isa: str, data: st.DataObject) -> None:
    """mul_mat_id: the column of a token is that of its expert's matrix alone."""
    dtype = data.draw(st.sampled_from(FLOATS) | st.sampled_from(TYPES), "dtype")
    k, m = draw_sizes(data, dtype)
    n, used, experts = data.draw(COLUMNS, "n"), data.draw(st.integers(1, 3), "used"), data.draw(st.integers(3, 5))
    rng = np.random.default_rng(n)
    ids = np.argsort(rng.random((n, experts)) + np.arange(experts), axis=1)[:, :used].astype(np.int32)  # 0 is frequent
    w = matrices(dtype, k, m, experts)
    x = gaussian(rng, (n, data.draw(st.sampled_from([1, used]), "columns of a token"), k)).astype(np.float32)
    y = gg.mul_mat_id(w, source(gg.F32, x), source(gg.I32, ids))
    got = run(y, isa, data.draw(st.integers(1, 2), "threads")).reshape(n, used, m)
    for j, u in ((0, 0), (n - 1, used - 1), (n // 2, 0)):
        assert same(got[j, u], of_matrix(w, int(ids[j, u]), x[j, u % x.shape[1]], isa)), f"token {j} of {n}, use {u}"
