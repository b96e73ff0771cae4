"""Views: what they see, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pyggml as gg
from pyggml.dtypes import DType
from pyggml.errors import DTypeError, GraphError, ShapeError
from pyggml.tensor import Context, Tensor, Var

A = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.fixture
def a() -> Tensor:
    return Context().from_numpy(A)


def blocks(*ne: int) -> Tensor:
    return Context().new_tensor(DType.Q8_0, ne)


def test_reshape(a: Tensor) -> None:
    assert np.array_equal(gg.reshape_1d(a, 24).numpy(), A.reshape(24))
    assert np.array_equal(gg.reshape_2d(a, 6, 4).numpy(), A.reshape(4, 6))
    assert np.array_equal(gg.reshape_4d(a, 2, 2, 3, 2).numpy(), A.reshape(2, 3, 2, 2))
    assert np.array_equal(gg.reshape(a, gg.reshape_3d(a, 2, 3, 4)).numpy(), A.reshape(4, 3, 2))
    assert gg.reshape_3d(a, 24, 1, 1).shape == (1, 1, 24)


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 3, 1, 2), (3, 2, 1, 0)])
def test_permute_sends_dimension_i_to_axis_i(a: Tensor, axes: tuple[int, int, int, int]) -> None:
    p = gg.permute(a, *axes)
    assert [p.ne[x] for x in axes] == list(a.ne)
    assert p.elements().shape == p.ne[::-1]
    for index in np.ndindex(A.shape):
        i = (*index[::-1], 0)
        j = [0] * 4
        for k, axis in enumerate(axes):
            j[axis] = i[k]
        assert p.elements()[tuple(j[::-1])] == A[index]


def test_transpose(a: Tensor) -> None:
    assert np.array_equal(gg.transpose(a).numpy(), A.transpose(0, 2, 1))
    assert np.array_equal(gg.transpose(gg.transpose(a)).numpy(), A)


def test_views_count_in_bytes_from_the_start_of_a(a: Tensor) -> None:
    assert np.array_equal(gg.view_1d(a, 5, 12).numpy(), A.reshape(24)[3:8])
    assert np.array_equal(gg.view_2d(a, 2, 3, 16, 52).numpy(), A[1, :, 1:3])
    assert np.array_equal(gg.view_3d(a, 2, 2, 2, 16, 48, 20).numpy(), A[:, 1:3, 1:3])
    inner = gg.view_1d(gg.view_2d(a, 2, 3, 16, 48), 2, 16)
    assert np.array_equal(inner.numpy(), A[1, 1, :2])
    assert inner.view_src is a and inner.view_offs == 64
    assert np.array_equal(gg.view_1d(gg.transpose(a), 4, 16).numpy(), A[0, 1])


def test_offset_is_bound_when_the_graph_runs(a: Tensor) -> None:
    head = Var("head", hi=5)
    v = gg.view_1d(gg.view_1d(a, 4, 16 * head), 2, 8)
    for row in range(6):
        head.bind(row)
        assert np.array_equal(v.numpy(), A.reshape(6, 4)[row, 2:])


REFUSED: list[tuple[Callable[[Tensor], object], str]] = [
    (lambda a: gg.reshape_1d(a, 23), "as many elements"),
    (lambda a: gg.reshape_2d(a, 24, 0), "whole numbers from 1"),
    (lambda a: gg.reshape_2d(a, 2.5, 3), "whole numbers from 1"),  # pyright: ignore[reportArgumentType]
    (lambda a: gg.reshape_1d(gg.transpose(a), 24), "must be contiguous"),
    (lambda a: gg.reshape_2d(blocks(64), 16, 4), "blocks"),
    (lambda a: gg.view_1d(a, 24, 4), "outside the 96 bytes"),
    (lambda a: gg.view_2d(a, 4, 3, 48, 0), "outside the 96 bytes"),
    (lambda a: gg.view_1d(a, 4, -4), "offset must be"),
    (lambda a: gg.view_2d(a, 4, 2, -16, 48), "nb must be"),
    (lambda a: gg.view_1d(a, 4, 2), "multiples of F32's 4 bytes"),
    (lambda a: gg.view_1d(blocks(64), 32, 17), "multiples of Q8_0's 34 bytes"),
    (lambda a: gg.view_1d(blocks(64), 16, 0), "blocks"),
    (lambda a: gg.view_1d(a, 4, 16 * Var("head", hi=6)), "outside the 96 bytes"),
    (lambda a: gg.view_1d(gg.view_1d(a, 4, 16 * Var("i", hi=5)), 4, 4 * Var("j", hi=1)), "for i = 5, j = 1"),
    (lambda a: gg.permute(a, 0, 0, 1, 2), "0, 1, 2, 3 in some order"),
    (lambda a: gg.permute(a, 0, 1, 2, 4), "0, 1, 2, 3 in some order"),
    (lambda a: gg.permute(blocks(64, 2), 1, 0, 2, 3), "dimension 0 of Q8_0 must stay"),
    (lambda a: gg.transpose(blocks(64, 2)), "dimension 0 of Q8_0 must stay"),
]


@pytest.mark.parametrize(("record", "text"), REFUSED)
def test_refused(a: Tensor, record: Callable[[Tensor], object], text: str) -> None:
    with pytest.raises(ShapeError, match=text) as e:
        record(a)
    assert __file__ in str(e.value)


def test_not_a_tensor() -> None:
    with pytest.raises(DTypeError, match="must be a Tensor, not int"):
        gg.transpose(3)  # pyright: ignore[reportArgumentType]


def test_vars_keep_their_bounds() -> None:
    """Of the first value as of those bound later, and of `hi` itself; NumPy's integers are integers."""
    v = Var("h", np.int64(10), np.int32(3))  # pyright: ignore[reportArgumentType]
    assert (v.hi, v.value, type(v.value)) == (10, 3, int)
    v.bind(np.uint8(7))  # pyright: ignore[reportArgumentType]
    assert int(4 * v + 2) == 30
    bad: list[Callable[[], object]] = [
        lambda: Var("h", 10, 10**9),
        lambda: Var("h", 10, 11),
        lambda: Var("h", 10, -1),
        lambda: Var("h", -1),
        lambda: Var("h", 1 << 63),
        lambda: Var("h", 10.0),  # pyright: ignore[reportArgumentType]
        lambda: Var("h", 10, 1.5),  # pyright: ignore[reportArgumentType]
        lambda: Var("h", "10"),  # pyright: ignore[reportArgumentType]
        lambda: v.bind(11),
        lambda: v.bind(2.0),  # pyright: ignore[reportArgumentType]
        lambda: v * 1.5,  # pyright: ignore[reportOperatorIssue]
        lambda: (v * 4) + 1.5,  # pyright: ignore[reportOperatorIssue]
    ]
    for call in bad:
        with pytest.raises(GraphError):
            call()
    assert v.value == 7
    for name in ("hi", "value"):
        with pytest.raises(AttributeError):
            setattr(v, name, 10**9)


@pytest.mark.parametrize("nb", [(1 << 62, 1 << 63), (1 << 63, 1 << 63), (32, 10**30)])
def test_strides_that_no_number_holds(nb: tuple[int, int]) -> None:
    x = Context().from_numpy(np.ones(8, np.float32))
    with pytest.raises(ShapeError, match=r"at most 2\^63 - 1"):
        gg.view_3d(x, 8, 1, 1, *nb, 0)
