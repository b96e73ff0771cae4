"""What a weight is stored as is said on the tensor, and on no other."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu.products import choose
from pyggml.backends.cpu.repack import allow_rounding, repack, repack_in_passing
from pyggml.form import IN_PASSING, ROUNDED, STORED

from .test_repack import ISAS, source


@pytest.mark.parametrize("dtype", [gg.Q4_0, gg.F16])
def test_a_form_belongs_to_one_tensor(dtype: gg.DType) -> None:
    """A view, and another tensor of the same memory, are as stored, and so are their products."""
    w = source(dtype, np.random.default_rng(1).standard_normal((32, 256)).astype(np.float32))
    x = source(gg.F32, np.ones((1000, 256), np.float32))
    twin = gg.Context().new_tensor(dtype, (256, 32))
    twin.buffer, twin.offset = w.buffer, w.offset
    others = (twin, gg.view_2d(w, 256, 16, w.nb[1], 0))
    before = [choose(ISAS[-1], gg.mul_mat(t, x)) for t in others]
    repack([w])
    assert w.form is ROUNDED if dtype is gg.F16 else w.form.copy is not None
    assert (choose(ISAS[-1], gg.mul_mat(w, x)) is None) == (dtype is gg.F16)
    assert all(t.form is STORED for t in others)
    assert [choose(ISAS[-1], gg.mul_mat(t, x)) for t in others] == before


def test_forms_by_type() -> None:
    """Blocks are repacked in passing, F16 may be rounded, and all else stays as it is."""
    values = np.zeros((8, 256), np.float32)
    blocks, halves, floats = (source(t, values) for t in (gg.Q8_0, gg.F16, gg.F32))
    for t in (blocks, halves, floats):
        assert t.form is STORED
    repack_in_passing([blocks, halves, floats])
    assert [t.form for t in (blocks, halves, floats)] == [IN_PASSING, STORED, STORED]
    allow_rounding([blocks, halves, floats])
    assert [t.form for t in (blocks, halves, floats)] == [IN_PASSING, ROUNDED, STORED]
