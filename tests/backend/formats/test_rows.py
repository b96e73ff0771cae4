"""What copies, row ops and ops of shape refuse, when recorded and when computed."""

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
        gg.add_id(zeros(DType.F32, 64, 3), zeros(DType.F32, 64, 5), ids(0, bad, 4)),
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


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16, DType.Q8_0, DType.Q4_1])
def test_cpy_with_a_limit_stores_finite_numbers(dtype: DType, transposed: bool) -> None:
    x = np.random.default_rng(1).normal(size=(64, 96)).astype(np.float32)
    x[3, :5] = np.nan, np.inf, -np.inf, 1e30, -1e30
    want = np.clip(np.nan_to_num(x), -100, 100)
    results: list[np.ndarray] = []
    for values, limit in ((x, 100.0), (want, 0.0)):
        for backend in ("cpu", "ref"):
            a, b = Context().from_numpy(values.T if transposed else values), zeros(dtype, 96, 64)
            t = gg.cpy(gg.transpose(a) if transposed else a, b, limit)
            gg.compute(gg.Graph().build_forward_expand(t), backend=backend, n_threads=2)
            results.append(b.numpy())
    for got in results[:3]:
        np.testing.assert_array_equal(got, results[3])


def test_casts_round_once() -> None:
    """Half an F16 step, a little more, a little less: what F32 does not tell apart."""
    x = np.array([1 + 2**-11, 1 + 2**-11 + 2**-40, 1 + 3 * 2**-11 - 2**-40, 65519.999999, 2**-25 + 2**-60])
    a = Context().new_tensor(DType.F64, (5,)).set(x)
    y = gg.cast(a, DType.F16)
    gg.compute(gg.Graph().build_forward_expand(y))
    assert y.numpy().tolist() == x.astype(np.float16).tolist() == [1, 1 + 2**-10, 1 + 2**-10, 65504, 2**-24]


def test_wide_integers_stay_whole() -> None:
    x = np.array([2**62 + 1, -(2**62) - 1, 2**31, -129, 200])
    for dtype, want in (
        (DType.I64, x.tolist()),
        (DType.F64, x.astype(np.float64).tolist()),
        (DType.I32, [2**31 - 1, -(2**31), 2**31 - 1, -129, 200]),
        (DType.I8, [127, -128, 127, -128, 127]),
    ):
        y = gg.cast(Context().from_numpy(x), dtype)
        gg.compute(gg.Graph().build_forward_expand(y))
        assert y.numpy().tolist() == want


F = DType.F32
SQUARE = (4, 4)
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: gg.cpy(zeros(F, 4), zeros(F, 5)), ShapeError, "as many elements"),
    (lambda: gg.cpy(zeros(DType.I64, 32), zeros(DType.Q8_0, 32)), DTypeError, "cannot be"),
    (lambda: gg.cpy(zeros(F, 4), zeros(F, 4), -1.0), ShapeError, "limit must be positive"),
    (lambda: gg.cpy(zeros(DType.I32, 4), zeros(F, 4), 5.0), ShapeError, "a limit is for F32"),
    (lambda: gg.cast(zeros(F, 33), DType.Q8_0), ShapeError, "blocks"),
    (lambda: gg.cast(zeros(F, 256), DType.Q4_K), DTypeError, "cannot be"),
    (lambda: gg.cast(zeros(F, 4), "f16"), DTypeError, "is no pyggml.DType"),  # pyright: ignore[reportArgumentType]
    (lambda: gg.cont_2d(zeros(F, 6), 2, 2), ShapeError, "as many elements"),
    (lambda: gg.cont_1d(zeros(F, 6), 6.0), ShapeError, "whole numbers"),  # pyright: ignore[reportArgumentType]
    (lambda: gg.cont(3), DTypeError, "must be a Tensor"),  # pyright: ignore[reportArgumentType]
    (lambda: gg.get_rows(zeros(F, 4, 5, 2), ids(1)), ShapeError, "must be b's ne"),
    (lambda: gg.get_rows(zeros(F, 4, 5), zeros(F, 3)), DTypeError, "cannot be"),
    (lambda: gg.set_rows(zeros(F, 4, 5), zeros(F, 3, 1), ids(1)), ShapeError, "equally long"),
    (lambda: gg.set_rows(zeros(F, 4, 5), zeros(F, 4, 2), ids(1)), ShapeError, "index for each of b's 2 rows"),
    (lambda: gg.repeat(zeros(F, 4), zeros(F, 6)), ShapeError, "must divide"),
    (lambda: gg.concat(zeros(F, 4), zeros(F, 4, 2), 0), ShapeError, "differ only in dimension 0"),
    (lambda: gg.concat(zeros(F, 4), zeros(F, 4), 4), ShapeError, "dim must be"),
    (lambda: gg.pad(zeros(F, 4), -1, 0, 0, 0), ShapeError, "borders must be"),
    (lambda: gg.concat(zeros(DType.Q8_0, 32), zeros(DType.Q4_0, 32), 1), DTypeError, "cannot be"),
    (lambda: gg.pad_reflect_1d(zeros(F, 4), 4, 0), ShapeError, "within 0..3"),
    (lambda: gg.roll(zeros(F, 4), 4, 0, 0, 0), ShapeError, "shift0 must be"),
    (lambda: gg.roll(zeros(F, 4), 0, 1, 0, 0), ShapeError, "shift1 must be"),
    (lambda: gg.set(zeros(F, *SQUARE), zeros(F, 2, 2), 16, 64, 64, 44), ShapeError, "ends at byte 68, outside"),
    (lambda: gg.set(zeros(F, *SQUARE), zeros(F, 2, 2), 4, 64, 64, 0), ShapeError, "fall on each other"),
    (lambda: gg.set_2d(zeros(F, *SQUARE), zeros(F, 2, 2), 18, 0), ShapeError, "multiples of F32's 4 bytes"),
    (lambda: gg.set_1d(zeros(F, *SQUARE), zeros(F, 2), -4), ShapeError, "multiples of F32's 4 bytes"),
    (lambda: gg.set_1d(gg.transpose(zeros(F, 4, 3)), zeros(F, 2), 0), ShapeError, "must be contiguous"),
    (lambda: gg.set_1d(zeros(F, 4), zeros(DType.I32, 2), 0), DTypeError, "cannot be"),
    (lambda: gg.set_1d(3, zeros(F, 2), 0), DTypeError, "a must be a Tensor"),  # pyright: ignore[reportArgumentType]
    (lambda: gg.acc(zeros(F, 4), 3, 16, 16, 16, 0), DTypeError, "b must be a Tensor"),  # pyright: ignore[reportArgumentType]
    (lambda: gg.acc(zeros(DType.F16, 4), zeros(DType.F16, 4), 8, 8, 8, 0), DTypeError, "cannot be"),
    (lambda: gg.diag(zeros(F, 4, 2)), ShapeError, "one row per matrix"),
    (lambda: gg.diag_mask_zero(zeros(F, *SQUARE), -1), ShapeError, "n_past must be"),
    (lambda: gg.tri(zeros(F, 4, 3), 0), ShapeError, "square"),
    (lambda: gg.tri(zeros(F, *SQUARE), "left"), ShapeError, "upper_diag.*not 'left'"),
    (lambda: gg.tri(zeros(F, *SQUARE), 4), ShapeError, "type must be one of 0"),
    (lambda: gg.argsort(zeros(F, 4), "down"), ShapeError, "order must be one of 0"),
    (lambda: gg.argsort_top_k(zeros(F, 4), 5), ShapeError, "k must be within 1..4"),
    (lambda: gg.count_equal(zeros(DType.I32, 4), zeros(DType.I32, 5)), ShapeError, "same ne"),
    (lambda: gg.add_id(zeros(F, 4, 2, 3), zeros(F, 4, 5), ids(0, 1)), ShapeError, "an index for each of a's rows"),
    (lambda: gg.add_id(zeros(F, 4, 2), zeros(F, 5, 5), ids(0, 1)), ShapeError, "equally long"),
    (lambda: gg.timestep_embedding(zeros(F, 4, 2), 8, 100), ShapeError, "one dimension"),
    (lambda: gg.timestep_embedding(zeros(F, 4), 0, 100), ShapeError, "dim must be"),
    (lambda: gg.timestep_embedding(zeros(F, 4), 8, 0), ShapeError, "max_period must be"),
    (lambda: gg.add(zeros(DType.I32, 4), zeros(F, 4)), DTypeError, "cannot be"),
    (lambda: gg.swiglu_oai(zeros(F, 4), zeros(F, 5), 1.0, 7.0), ShapeError, "same ne"),
    (lambda: gg.arange(0, 1, 0, Context()), ShapeError, "step 0"),
    (lambda: gg.arange(0, 1, -1, Context()), ShapeError, "towards"),
    (lambda: gg.arange(0, 1, 1), GraphError, "needs ctx="),
    (lambda: gg.rope(zeros(F, 4, 1, 2), ids(0), 4, 0), ShapeError, "one position for each"),
    (lambda: gg.rope(zeros(F, 4), ids(0), 3, 0), ShapeError, "n_dims must be even"),
    (lambda: gg.rope(zeros(F, 4), ids(0), 6, 0), ShapeError, "n_dims must be even"),
    (lambda: gg.rope(zeros(F, 4), ids(0), 4, 1), ShapeError, "mode must be"),
    (lambda: gg.rope(zeros(F, 4), zeros(F, 1), 4, 0), DTypeError, "cannot be"),
]


@pytest.mark.parametrize(("record", "error", "text"), REFUSED)
def test_refused(record: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as e:
        record()
    assert __file__ in str(e.value)
