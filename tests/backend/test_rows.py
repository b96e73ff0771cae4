"""What copies and row ops refuse, when recorded and when computed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pyggml as gg
from pyggml.dtypes import DType
from pyggml.errors import BackendError, DTypeError, GraphError, ShapeError
from pyggml.tensor import Context, Tensor


def zeros(dtype: DType, *ne: int) -> Tensor:
    return Context().new_tensor(dtype, ne).set(np.zeros(ne[::-1]))


def ids(*values: int, dtype: DType = DType.I32) -> Tensor:
    return Context().from_numpy(np.array(values), dtype)


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [DType.F32, DType.Q8_0])
def test_row_index_out_of_range(backend: str, bad: int, dtype: DType) -> None:
    a = zeros(dtype, 64, 5)
    for node in (
        gg.get_rows(a, ids(0, bad, 4)),
        gg.set_rows(a, zeros(DType.F32, 64, 3), ids(0, bad, 4, dtype=DType.I64)),
    ):
        g = gg.Graph().build_forward_expand(node)
        with pytest.raises(BackendError, match=f"row index {bad} is out of range"):
            gg.compute(g, backend=backend, n_threads=1)


def test_of_equal_indices_the_last_wins() -> None:
    a, n = zeros(DType.F32, 64, 3), 200
    b = Context().from_numpy(np.repeat(np.arange(n, dtype=np.float32), 64).reshape(n, 64))
    where = np.arange(n) % 3
    g = gg.Graph().build_forward_expand(gg.set_rows(a, b, ids(*where.tolist())))
    gg.compute(g, n_threads=2)
    assert a.numpy()[:, 0].tolist() == [198, 199, 197]


def test_cpy_to_i32_saturates() -> None:
    x = np.array([2.9, -2.9, 3e9, -3e9, np.inf, -np.inf, np.nan], np.float32)
    y = gg.cast(Context().from_numpy(x), DType.I32)
    gg.compute(gg.Graph().build_forward_expand(y))
    top, bottom = 2**31 - 1, -(2**31)
    assert y.numpy().tolist() == [2, -2, top, bottom, top, bottom, 0]


F = DType.F32
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: gg.cpy(zeros(F, 4), zeros(F, 5)), ShapeError, "as many elements"),
    (lambda: gg.cpy(zeros(DType.I64, 4), zeros(F, 4)), DTypeError, "no such combination"),
    (lambda: gg.cast(zeros(F, 33), DType.Q8_0), ShapeError, "blocks"),
    (lambda: gg.cast(zeros(F, 256), DType.Q4_K), DTypeError, "no such combination"),
    (lambda: gg.cast(zeros(F, 4), "f16"), DTypeError, "no such combination"),  # pyright: ignore[reportArgumentType]
    (lambda: gg.cont_2d(zeros(F, 6), 2, 2), ShapeError, "as many elements"),
    (lambda: gg.cont_1d(zeros(F, 6), 6.0), ShapeError, "whole numbers"),  # pyright: ignore[reportArgumentType]
    (lambda: gg.cont(3), DTypeError, "must be a Tensor"),  # pyright: ignore[reportArgumentType]
    (lambda: gg.get_rows(zeros(F, 4, 5, 2), ids(1)), ShapeError, "must be b's ne"),
    (lambda: gg.get_rows(zeros(F, 4, 5), zeros(F, 3)), DTypeError, "no such combination"),
    (lambda: gg.set_rows(zeros(F, 4, 5), zeros(F, 3, 1), ids(1)), ShapeError, "equally long"),
    (lambda: gg.set_rows(zeros(F, 4, 5), zeros(F, 4, 2), ids(1)), ShapeError, "index for each of b's 2 rows"),
    (lambda: gg.repeat(zeros(F, 4), zeros(F, 6)), ShapeError, "must divide"),
    (lambda: gg.concat(zeros(F, 4), zeros(F, 4, 2), 0), ShapeError, "differ only in dimension 0"),
    (lambda: gg.concat(zeros(F, 4), zeros(F, 4), 4), ShapeError, "dim must be"),
    (lambda: gg.pad(zeros(F, 4), -1, 0, 0, 0), ShapeError, "p must be"),
    (lambda: gg.arange(0, 1, 0, Context()), ShapeError, "step 0"),
    (lambda: gg.arange(0, 1, -1, Context()), ShapeError, "towards"),
    (lambda: gg.arange(0, 1, 1), GraphError, "needs ctx="),
    (lambda: gg.rope(zeros(F, 4, 1, 2), ids(0), 4, 0), ShapeError, "one position for each"),
    (lambda: gg.rope(zeros(F, 4), ids(0), 3, 0), ShapeError, "n_dims must be even"),
    (lambda: gg.rope(zeros(F, 4), ids(0), 6, 0), ShapeError, "n_dims must be even"),
    (lambda: gg.rope(zeros(F, 4), ids(0), 4, 1), ShapeError, "mode must be"),
    (lambda: gg.rope(zeros(F, 4), zeros(F, 1), 4, 0), DTypeError, "no such combination"),
]


@pytest.mark.parametrize(("record", "error", "text"), REFUSED)
def test_refused(record: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as e:
        record()
    assert __file__ in str(e.value)
