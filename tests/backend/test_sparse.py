"""What lightning_indexer and top_k_mask refuse, and what they choose of equals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pyggml as gg
from pyggml.tensor import Tensor

X = gg.Context()


def zeros(dtype: gg.DType, *ne: int) -> Tensor:
    return X.from_numpy(np.zeros(ne[::-1]), dtype)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (lambda: gg.lightning_indexer(zeros(gg.F32, 8, 2, 3), zeros(gg.F32, 7, 5)), "rows of the same length: 7 and 8"),
        (lambda: gg.lightning_indexer(zeros(gg.F32, 8, 2, 3), zeros(gg.F32, 8, 5, 2)), "one head of keys"),
        (
            lambda: gg.lightning_indexer(zeros(gg.F32, 8, 2, 3), zeros(gg.F32, 8, 5), zeros(gg.F32, 3, 2)),
            r"for each head and token: ne \[2, 3\], not \[3, 2, 1, 1\]",
        ),
        (lambda: gg.top_k_mask(zeros(gg.F32, 8, 2), zeros(gg.F32, 7, 2), 1), "rows must have 8 elements, not 7"),
        (lambda: gg.top_k_mask(zeros(gg.F32, 8, 2), zeros(gg.F16, 8, 1), 1), "at least 2 rows, not 1"),
        (lambda: gg.top_k_mask(zeros(gg.F32, 8, 2), zeros(gg.F16, 8, 2), -1), r"a whole number from 0 to \d+, not -1"),
        (
            lambda: gg.top_k_mask(zeros(gg.F32, 8, 2), zeros(gg.F32, 8, 2), 1, zeros(gg.I32, 7)),
            "a number for each of the 8",
        ),
        (
            lambda: gg.top_k_mask(zeros(gg.F32, 8, 2), zeros(gg.F32, 8, 2), 1, zeros(gg.I32, 8), zeros(gg.I32, 1, 3)),
            "a row for each of the 2 tokens",
        ),
    ],
)
def test_refused_shapes(op: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(gg.ShapeError, match=message):
        op()


def test_refused_types() -> None:
    for op in (
        lambda: gg.top_k_mask(zeros(gg.F32, 8, 2), zeros(gg.F32, 8, 2), 1, None, zeros(gg.I32, 1, 2)),
        lambda: gg.top_k_mask(zeros(gg.F32, 8, 2), zeros(gg.BF16, 8, 2), 1),
        lambda: gg.lightning_indexer(zeros(gg.F16, 8, 2, 3), zeros(gg.F32, 8, 5)),
    ):
        with pytest.raises((gg.DTypeError, gg.ShapeError)):
            op()


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize(("blocks", "own"), [([0, 8], [0]), ([0, -1], [0]), ([0, 1], [8])])
def test_blocks_out_of_range(backend: str, blocks: list[int], own: list[int]) -> None:
    of = X.from_numpy(np.array((blocks * 4), np.int32), gg.I32)
    always = X.from_numpy(np.array([own], np.int32), gg.I32)
    y = gg.top_k_mask(zeros(gg.F32, 8, 1), zeros(gg.F32, 8, 1), 1, of, always)
    with pytest.raises(gg.BackendError):
        gg.eval(y, backend=backend)


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_of_equals_the_first(backend: str) -> None:
    a = X.from_numpy(np.array([[0.0, 2.0, -0.0, np.nan, 0.0, -np.inf, 2.0]], np.float32))
    mask = X.from_numpy(np.array([[0, 0, 0, 0, 0, 0, -np.inf]], np.float32))
    for k, seen in ((0, []), (1, [1]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 4]), (7, [0, 1, 2, 4])):
        got = gg.eval(gg.top_k_mask(a, mask, k), backend=backend)
        np.testing.assert_array_equal(np.flatnonzero(got[0] == 0), seen)
