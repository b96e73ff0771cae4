"""Convolutions by matrix products against the direct ones; enumerations by name; what the ops of images refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.tensor import Tensor
from pyggml.testing.harness import nmse
from pyggml.testing.strategies.conv import FEW, SEEDS, Axis, axes, numbers, positive
from pyggml.testing.strategies.matmul import FLOATS, bound

Op = Callable[..., Tensor]
_WH = st.tuples(axes(), axes())


def both(a_ne: tuple[int, ...], b_ne: tuple[int, ...], dtype: gg.DType, seed: int, product: Op, direct: Op) -> None:
    """Assert that `product` on the CPU is `direct` by the reference."""
    rng = np.random.default_rng(seed)
    results: list[np.ndarray] = []
    values = [positive(rng, a_ne[::-1]), positive(rng, b_ne[::-1])]
    for op, backend in ((product, "cpu"), (direct, "ref")):
        with gg.Context() as ctx:
            a, b = ctx.new_tensor(dtype, a_ne).set(values[0]), ctx.new_tensor(gg.F32, b_ne).set(values[1])
            y = op(a, b)
            gg.compute(gg.Graph().build_forward_expand(y), backend=backend)
            results.append(np.array(y.numpy()))
    got, want = results
    columns = 1e-6 if dtype is gg.F16 else 0.0  # which are rounded to F16: 2^-11 each
    assert nmse(got.reshape(want.shape), want) <= bound(int(np.prod(a_ne))) + columns


@settings(max_examples=40, deadline=None)
@given(_WH, FEW, FEW, FEW, st.sampled_from(FLOATS), SEEDS)
def test_conv_2d(wh: tuple[Axis, Axis], ic: int, oc: int, n: int, dtype: gg.DType, seed: int) -> None:
    (w, h), p = wh, numbers(*wh)
    image = (w.n, h.n, ic, n)
    both(
        (w.k, h.k, ic, oc),
        image,
        dtype,
        seed,
        lambda a, b: gg.conv_2d(a, b, *p),
        lambda a, b: gg.conv_2d_direct(a, b, *p),
    )
    both(
        (w.k, h.k, 1, ic),
        image,
        dtype,
        seed,
        lambda a, b: gg.conv_2d_dw(a, b, *p),
        lambda a, b: gg.conv_2d_dw_direct(a, b, *p),
    )


@settings(max_examples=40, deadline=None)
@given(axes(40), FEW, FEW, FEW, st.sampled_from(FLOATS), SEEDS)
def test_conv_1d(w: Axis, ic: int, oc: int, n: int, dtype: gg.DType, seed: int) -> None:
    """A signal is an image of one row."""
    p = numbers(w, Axis(1, 1, 1, 0, 1))

    def image(a: Tensor, b: Tensor) -> Tensor:
        a, b = gg.reshape_4d(a, w.k, 1, ic, oc), gg.reshape_4d(b, w.n, 1, ic, n)
        return gg.conv_2d_direct(a, b, *p)

    def image_dw(a: Tensor, b: Tensor) -> Tensor:
        return gg.conv_2d_dw_direct(gg.reshape_4d(a, w.k, 1, 1, ic), gg.reshape_4d(b, w.n, 1, ic, 1), *p)

    both((w.k, ic, oc), (w.n, ic, n), dtype, seed, lambda a, b: gg.conv_1d(a, b, w.s, w.p, w.d), image)
    both((w.k, 1, ic), (w.n, ic), dtype, seed, lambda a, b: gg.conv_1d_dw(a, b, w.s, w.p, w.d), image_dw)


@settings(max_examples=40, deadline=None)
@given(axes(), axes(3), axes(3), FEW, FEW, FEW, st.sampled_from(FLOATS), SEEDS)
def test_conv_3d(w: Axis, h: Axis, d: Axis, ic: int, oc: int, n: int, dtype: gg.DType, seed: int) -> None:
    p = numbers(w, h, d)
    both(
        (w.k, h.k, d.k, ic * oc),
        (w.n, h.n, d.n, ic * n),
        dtype,
        seed,
        lambda a, b: gg.conv_3d(a, b, ic, *p),
        lambda a, b: gg.conv_3d_direct(a, b, *p, ic, n, oc),
    )


def test_nodes_are_ggmls() -> None:
    with gg.Context() as ctx:
        a, b = ctx.new_tensor(gg.F32, (3, 3, 4, 5)), ctx.new_tensor(gg.F32, (8, 6, 4, 2))
        signal = ctx.new_tensor(gg.F16, (3, 4, 5)), ctx.new_tensor(gg.F32, (8, 4))

    def ops(y: Tensor) -> list[str]:
        return [t.op for t in gg.Graph().build_forward_expand(y).nodes]

    product = ["im2col", "reshape", "reshape", "mul_mat", "reshape"]
    assert ops(gg.conv_2d_s1_ph(a, b)) == [*product, "permute", "cont"]
    assert ops(gg.conv_1d_ph(*signal, 1, 1)) == product
    assert gg.conv_2d_s1_ph(a, b).ne == (8, 6, 5, 2) and gg.conv_2d_sk_p0(a, b).ne == (2, 2, 5, 2)
    assert gg.conv_1d_ph(*signal, 1, 1).ne == (8, 5, 1, 1)
    columns = gg.Graph().build_forward_expand(gg.conv_1d_ph(*signal, 1, 1)).nodes[0]
    assert columns.dtype is gg.F16


def test_enumerations() -> None:
    with gg.Context() as ctx:
        a = ctx.new_tensor(gg.F32, (6, 6))
    assert gg.pool_1d(a, "avg", 2, 2, 0).op_params == gg.pool_1d(a, gg.OpPool.AVG, 2, 2, 0).op_params
    flags = gg.ScaleMode.BILINEAR | gg.ScaleFlag.ALIGN_CORNERS
    assert gg.upscale(a, 2, "bilinear|align_corners").op_params["mode"] == flags == 257
    f16 = [gg.im2col(a, a, 1, 0, 0, 0, 1, 0, False, t) for t in (gg.F16, "f16", 1)]
    assert [t.op_params["dst_type"] for t in f16] == [1, 1, 1] and all(t.dtype is gg.F16 for t in f16)


IMAGE = (8, 6, 4, 2)
REFUSED: list[tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor], str]] = [
    ((3, 3, 5, 2), lambda a, b: gg.conv_2d(a, b, 1, 1, 0, 0, 1, 1), "im2col: a and b must have as many channels"),
    ((9, 3, 4, 2), lambda a, b: gg.conv_2d(a, b, 1, 1, 0, 0, 1, 1), "9 elements of width do not fit into 8"),
    ((3, 3, 4, 2), lambda a, b: gg.conv_2d(a, b, 1, 0, 0, 0, 1, 1), "s1 and d1 must be whole numbers from 1"),
    ((3, 3, 4, 2), lambda a, b: gg.conv_2d_direct(a, b, 1, 1, -1, 0, 1, 1), "p0 must be a whole number from 0"),
    ((3, 3, 4, 2), lambda a, b: gg.conv_2d_direct(a, b, 1, 1, 0, 0, 1.5, 1), "d0 must be"),  # type: ignore[arg-type]
    ((3, 3, 4, 2), lambda a, b: gg.conv_2d_dw_direct(a, b, 1, 1, 0, 0, 1, 1), r"must be ne \[KW, KH, 1, 4\]"),
    ((3, 3, 4, 2), lambda a, b: gg.conv_3d_direct(a, b, *(1,) * 9, 2, 1, 2), "n_channels \\* n_channels_out = 4"),
    ((3, 3, 4, 2), lambda a, b: gg.im2col_3d(a, b, 3, *(1,) * 9, gg.F32), "IC must be a whole number that divides"),
    ((3, 3, 5, 2), lambda a, b: gg.conv_transpose_2d_p0(a, b, 2), "the channels, must be equal"),
    ((3, 5, 6), lambda a, b: gg.conv_transpose_1d(a, gg.view_2d(b, 8, 6, 32, 0), 2, 1, 1), "p0 must be 0"),
    ((6, 4), lambda a, b: gg.col2im_1d(a, 2, 4, 0), "oc must be a whole number that divides"),
    ((6, 4), lambda a, b: gg.pool_1d(b, "min", 2, 2, 0), r"op must be one of 0 \(max\), 1 \(avg\), not 'min'"),
    ((6, 4), lambda a, b: gg.pool_1d(b, "max", 2, 2, 2), "p0 must be a number from 0 and below k0 = 2"),
    ((6, 4), lambda a, b: gg.pool_2d(b, "max", 9, 2, 2, 2, 0, 0), "9 elements do not fit into 8"),
    ((6, 4), lambda a, b: gg.pool_2d(b, "max", 1, 2, 2, 2, 0.5, 0), "sees nothing of 8 elements"),
    ((6, 4), lambda a, b: gg.upscale(b, 2, "cubic"), r"mode must be one of 0 \(nearest\), 1 .* not 'cubic'"),
    ((6, 4), lambda a, b: gg.upscale(b, 2, "bicubic|antialias"), "513 .bilinear.antialias., 769 .* not 'bicubic"),
    ((6, 4), lambda a, b: gg.upscale(b, 0, 0), "ne must be whole numbers from 1"),
    ((6, 4), lambda a, b: gg.win_part(b, 3), "at most three dimensions"),
    ((6, 4), lambda a, b: gg.win_unpart(b, 5, 5, 4), r"a must be ne \[n, 4, 4, 4\]"),
    ((6, 4), lambda a, b: gg.get_rel_pos(a, 3, 3), r"a must be ne \[n, 5\]"),
    ((6, 4), lambda a, b: gg.add_rel_pos(a, b, b), r"a must be ne \[64, 24, 2\]"),
]


@pytest.mark.parametrize(("ne", "op", "text"), REFUSED, ids=[text[:40] for _, _, text in REFUSED])
def test_refused(ne: tuple[int, ...], op: Op, text: str) -> None:
    with gg.Context() as ctx:
        a, b = ctx.new_tensor(gg.F32, ne), ctx.new_tensor(gg.F32, IMAGE)
        with pytest.raises(gg.ShapeError, match=text) as e:
            op(a, b)
    assert "test_conv.py" in str(e.value)


def test_types_are_refused() -> None:
    with gg.Context() as ctx:
        a, b = ctx.new_tensor(gg.Q8_0, (32, 3, 4, 2)), ctx.new_tensor(gg.F32, IMAGE)
        for op in (
            lambda: gg.conv_2d(a, b, 1, 1, 16, 0, 1, 1),
            lambda: gg.conv_2d_direct(a, b, 1, 1, 16, 0, 1, 1),
            lambda: gg.im2col(b, b, 1, 1, 0, 0, 1, 1, True, "f31"),
            lambda: gg.pool_2d(a, 0, 2, 2, 2, 2, 0, 0),
            lambda: gg.upscale(a, 2, 0),
            lambda: gg.conv_2d(None, b, 1, 1, 0, 0, 1, 1),  # type: ignore[arg-type]
            lambda: gg.conv_1d_dw_ph(b, None, 1, 1),  # type: ignore[arg-type]
            lambda: gg.conv_2d_dw(a, 3, 1, 1, 1, 1, 1, 1),  # type: ignore[arg-type]
            lambda: gg.upscale("a", 2, 0),  # type: ignore[arg-type]
        ):
            with pytest.raises(gg.DTypeError):
                op()


def test_gradients_have_the_same_bits_on_any_number_of_threads() -> None:
    rng = np.random.default_rng(0)

    def random(*ne: int) -> Tensor:
        return gg.Context().from_numpy(rng.standard_normal(ne[::-1]).astype(np.float32))

    kernel, image = random(3, 2, 5, 1), random(19, 13, 5, 3)
    seen = gg.im2col(kernel, image, 2, 1, 1, 1, 1, 2, True, gg.F32)
    largest, mean = (gg.pool_2d(image, op, 3, 2, 2, 1, 1, 0.5) for op in ("max", "avg"))
    large, small = gg.interpolate(image, 50, 31, 10, 3, "bicubic"), gg.interpolate(image, 7, 5, 2, 2, 513)
    for y in (seen, largest, mean, large, small):
        (g,) = gg.grad(y, [image], random(*y.ne))
        graph = gg.Graph().build_forward_expand(g.set_output())
        results: list[bytes] = []
        for n_threads in (1, 2, 3, 7):
            gg.compute(graph, n_threads=n_threads)
            results.append(g.tobytes())
        assert len({*results}) == 1


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (lambda a, b: gg.im2col_back(a, b, (8, 8, 2, 1), 1, 1, 0, 0, 1, 1, True), r"b must have the ne of the columns"),
        (
            lambda a, b: gg.im2col_back(a, b, (8, 8, 3, 1), 1, 1, 0, 0, 1, 1, True),
            r"a and the result must have as many",
        ),
        (
            lambda a, b: gg.im2col_3d_back(a, b, (8, 8, 2, 3), 2, 1, 1, 1, 0, 0, 0, 1, 1, 1),
            r"IC must be a whole number",
        ),
        (lambda a, b: gg.pool_2d_back(b, a, "max", 2, 2, 1, 1, 0, 0), r"a must have the ne of the pooled af"),
        (lambda a, b: gg.upscale_back(a, 0, 1, 1, 1, "nearest"), r"ne must be whole numbers from 1"),
    ],
)
def test_gradients_of_other_shapes_are_named(record: Op, text: str) -> None:
    a, b = gg.Context().from_numpy(np.ones((2, 2, 3, 3), np.float32)), gg.Context().from_numpy(np.ones((4, 18)), gg.F32)
    with pytest.raises(gg.ShapeError, match=text):
        record(a, b)
