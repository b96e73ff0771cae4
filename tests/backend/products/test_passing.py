"""Weights that products read as they are stored, and repack in passing (csrc/products/r16/passing.c)."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu.products import choose
from pyggml.backends.cpu.repack import repack, repack_in_passing
from pyggml.testing.harness import gaussian, place

from .test_repack import ISAS, TYPES, run, source, symbols


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES)
def test_in_passing(dtype: gg.DType, isa: str) -> None:
    """Weights that are repacked each time they are read give the bits that copies give: any codes, several strips, last
    groups that are not full, both ways of computing, by expert."""
    rng = np.random.default_rng(dtype.gguf_id)
    block = max(256, dtype.block_size)
    for k, m, n_expert in ((dtype.block_size, 1, 1), (4 * block + dtype.block_size, 37, 1), (block, 48, 3)):
        stored, copied = (source(dtype, np.zeros((n_expert, m, k))) for _ in range(2))
        values = gaussian(rng, (n_expert, m, k)).astype(np.float32)
        for w in (stored, copied):
            w.raw()[...] = gg.quantize(values, dtype).reshape(-1)
        repack_in_passing([stored])
        assert repack([copied], isa=isa) == 1
        for n in (1, 2, 3, 4, 5, 9, 50):
            x = source(gg.F32, gaussian(rng, (n, 1, k) if n_expert > 1 else (n, k)))
            ids = source(gg.I32, rng.integers(0, n_expert, (n, 2)))
            a, b = (gg.mul_mat(w, x) if n_expert == 1 else gg.mul_mat_id(w, x, ids) for w in (stored, copied))
            for n_threads in (1, 2):
                assert np.array_equal(run(a, isa, n_threads), run(b, isa, n_threads))
            assert symbols(a, isa) != symbols(b, isa)


def test_who_is_asked() -> None:
    """Products of what nobody allowed keep the precision of F32."""
    values = np.random.default_rng(1).standard_normal((32, 256)).astype(np.float32)
    w, x = source(gg.Q4_K, values), source(gg.F32, values[:1])
    y = gg.mul_mat(w, x)
    place(y)
    before = symbols(y, ISAS[-1])
    repack_in_passing([w, x])
    assert symbols(y, ISAS[-1]) != before
    assert choose("generic", y) is None and choose(ISAS[-1], gg.mul_mat(x, x)) is None
