"""Tensors: layout, conversion, and readable errors for bad input."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import pyggml as gg
from pyggml import errors
from pyggml.errors import user_site


def test_types_are_those_of_gguf() -> None:
    assert {t.gguf_id: (t.name, t.block_size, t.type_size) for t in gg.DType} == {
        int(q): (q.name, *sizes) for q, sizes in gguf.GGML_QUANT_SIZES.items()
    }


def test_ne_is_numpys_shape_reversed() -> None:
    with gg.Context() as ctx:
        t = ctx.from_numpy(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    assert t.ne == (4, 3, 2, 1) and t.nb == (4, 16, 48, 96)
    assert t.shape == (2, 3, 4) and t.strides == (48, 16, 4)
    assert t.nbytes == 96 and t.is_contiguous


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float16, np.int8, np.int16, np.int32, np.int64]), hnp.array_shapes(max_dims=4)
    )
)
def test_numpy_round_trip(a: np.ndarray[Any, Any]) -> None:
    t = gg.Context().from_numpy(a)
    assert t.numpy().dtype == a.dtype and t.numpy().shape == a.shape
    np.testing.assert_array_equal(t.numpy(), a)
    assert t.tobytes() == a.tobytes()
    np.testing.assert_array_equal(np.asarray(t), a)
    if a.dtype != np.float16:
        np.testing.assert_array_equal(np.from_dlpack(t), a)


def test_numpy_is_zero_copy() -> None:
    t = gg.Context().from_numpy(np.zeros(4, np.float32))
    t.numpy()[2] = 5
    assert t.numpy().tolist() == [0, 0, 5, 0]


def test_bf16_and_blocks_are_decoded() -> None:
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    ctx = gg.Context()
    np.testing.assert_allclose(ctx.from_numpy(x, gg.BF16).numpy(), x, rtol=2**-8)
    q = ctx.from_numpy(x, gg.Q8_0)
    assert q.nbytes == 2 * 34 and len(q.tobytes()) == 68
    np.testing.assert_allclose(q.numpy(), x, atol=1 / 127)
    again = ctx.from_bytes(q.tobytes(), gg.Q8_0, (32, 2))
    np.testing.assert_array_equal(again.numpy(), q.numpy())


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c: c.new_tensor(gg.F32, ()), gg.ShapeError, "ne must be"),
        (lambda c: c.new_tensor(gg.F32, (1, 2, 3, 4, 5)), gg.ShapeError, "ne must be"),
        (lambda c: c.new_tensor(gg.F32, (0,)), gg.ShapeError, "ne must be"),
        (lambda c: c.new_tensor("f32", (1,)), gg.DTypeError, "'f32' is no pyggml.DType"),
        (lambda c: c.new_tensor(gg.Q4_0, (33,)), gg.ShapeError, "blocks of 32"),
        (lambda c: c.from_numpy(np.zeros((1,) * 5)), gg.ShapeError, "1, 1, 1, 1, 1"),
        (lambda c: c.from_numpy(np.zeros((2, 0))), gg.ShapeError, "(2, 0)"),
        (lambda c: c.from_numpy(np.array(["a"])), gg.DTypeError, "U1"),
        (lambda c: c.from_numpy(np.zeros(2, np.complex64)), gg.DTypeError, "complex64"),
        (lambda c: c.from_numpy(np.array([300]), gg.I8), gg.DTypeError, "300 cannot be stored"),
        (lambda c: c.from_numpy(np.array([2**63], np.uint64), gg.I64), gg.DTypeError, "9223372036854775808 cannot"),
        (lambda c: c.from_numpy(np.array([0.0, 2.0**31]), gg.I32), gg.DTypeError, "2147483648.0 cannot"),
        (lambda c: c.from_numpy(np.array([np.nan]), gg.I32), gg.DTypeError, "nan cannot"),
        (lambda c: c.from_numpy(np.array([np.inf]), gg.I64), gg.DTypeError, "inf cannot"),
        (lambda c: c.from_numpy(np.array([0.5]), gg.I16), gg.DTypeError, "0.5 cannot"),
        (lambda c: c.from_numpy(np.ones(1, complex), gg.F32), gg.DTypeError, "complex128"),
        (lambda c: c.new_tensor(gg.F32, 2).set(np.ones(2, complex)), gg.DTypeError, "complex128"),
        (lambda c: c.new_tensor(gg.F32, (1 << 40, 1 << 40)), gg.ShapeError, "more than 9223372036854775807"),
        (lambda c: c.new_tensor(gg.F32, 2, 7), gg.GraphError, "must be a string, not 7"),
        (
            lambda c: gg.argsort(c.new_tensor(gg.F32, 2), 2),
            gg.ShapeError,
            "order must be one of 0 (asc), 1 (desc), not 2",
        ),
        (lambda c: gg.tri(c.new_tensor(gg.F32, (2, 2)), "down"), gg.ShapeError, "3 (lower), not 'down'"),
        (lambda c: gg.scale(c.new_tensor(gg.F32, 2), 1e39), gg.DTypeError, "s must be a number"),
        (lambda c: gg.soft_max_ext(c.new_tensor(gg.F32, 2), None, 1e39, 0.0), gg.DTypeError, "F32), not 1e+39"),
        (lambda c: gg.dump_dot(gg.Graph(), "/no/such/folder/x.dot"), gg.GraphError, "cannot write /no/such"),
        (lambda c: c.from_bytes(b"123", gg.F32, (1,)), gg.ShapeError, "3 bytes given"),
        (lambda c: c.new_tensor(gg.F32, (2,), "x").set(np.ones(3)), gg.ShapeError, "x: F32"),
        (lambda c: c.new_tensor(gg.F32, (2,), "x").numpy(), gg.AllocError, "x: F32 ne [2, 1, 1, 1] has no memory"),
        (lambda c: gg.sqr(c.new_tensor(gg.F32, (2,), "x")).set(np.ones(2)), gg.GraphError, "computed by sqr"),
        (lambda c: gg.add(c.new_tensor(gg.F32, (2,)), np.ones(2)), gg.DTypeError, "b must be a Tensor, not ndarray"),
    ],
)
def test_bad_input_is_a_named_error(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as e:
        call(gg.Context())
    assert text in str(e.value)


def test_a_number_is_one_dimension() -> None:
    t = gg.Context().new_tensor(gg.F32, np.int64(4))  # pyright: ignore[reportArgumentType]
    assert (t.ne, t.shape) == ((4, 1, 1, 1), (4,))


def test_whole_floats_are_stored_as_integers() -> None:
    t = gg.Context().from_numpy(np.array([-128.0, 127.0]), gg.I8)
    assert t.numpy().tolist() == [-128, 127]


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy 1 copies when it must")
def test_an_array_that_must_not_be_a_copy() -> None:
    ctx = gg.Context()
    t = ctx.from_numpy(np.ones(4, np.float32))
    assert np.shares_memory(np.array(t, copy=False), t.numpy())
    for array, dtype in (
        (t, np.float64),
        (ctx.from_numpy(np.ones(32), gg.Q8_0), None),
        (ctx.from_numpy(np.ones(2), gg.BF16), None),
    ):
        with pytest.raises(ValueError, match="without a copy"):
            np.array(array, dtype=dtype, copy=False)


def test_divided_by_zero() -> None:
    t = gg.Context().from_numpy(np.array([1, -1, 0], np.float32)) / 0
    gg.compute(gg.Graph().build_forward_expand(t))
    assert t.numpy()[:2].tolist() == [np.inf, -np.inf] and np.isnan(t.numpy()[2])
    with pytest.raises(TypeError, match="@"):
        t @ 2  # pyright: ignore[reportOperatorIssue]


def test_an_ops_error_names_op_tensors_rule_and_line() -> None:
    ctx = gg.Context()
    a = ctx.new_tensor(gg.F32, (4, 3), "weight")
    b = ctx.new_tensor(gg.F16, (5, 2), "input")
    site = user_site()
    with pytest.raises(gg.ShapeError) as e:
        gg.mul_mat(a, b)
    message = str(e.value)
    assert message.startswith("mul_mat: ")
    assert "a = weight: F32 ne [4, 3, 1, 1]" in message and "b = input: F16 ne [5, 2, 1, 1]" in message
    assert f"at {site[0]}:{site[1] + 2}" in message
    with pytest.raises(gg.DTypeError, match="b cannot be I32 beside a of F32; it may be F32, F16 or BF16"):
        gg.mul_mat(a, ctx.new_tensor(gg.I32, (4, 2)))


def test_operators() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 4), np.float32), rng.standard_normal((4, 5), np.float32)
    with gg.Context() as ctx:
        ta, tb = ctx.from_numpy(a), ctx.from_numpy(b)
        for t, want in (
            (ta @ tb, a @ b),
            (ta + ta, a + a),
            (ta - ta * 2, -a),
            (1 - ta, 1 - a),
            (2 * ta / 4, a / 2),
            (ta / ta, np.ones_like(a)),
            (ta + 1.5, a + 1.5),
            (ta - np.uint8(1), a - 1),
            (ta * np.float32(2), a * 2),
        ):
            gg.compute(gg.Graph().build_forward_expand(t))
            np.testing.assert_allclose(t.numpy(), want, rtol=1e-5, atol=1e-6)


def test_every_error_is_public() -> None:
    named = {n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, errors.GGMLError)}
    assert named <= set(gg.__all__) and all(hasattr(gg, n) for n in gg.__all__)
