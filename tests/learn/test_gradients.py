"""gg.grad and Graph.build_backward_expand: what they record, and what they refuse."""

from __future__ import annotations

import re

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import user_site
from pyggml.opdef import OPS

RNG = np.random.default_rng(0)
W, X = RNG.standard_normal((3, 4)).astype(np.float32), RNG.standard_normal((5, 4)).astype(np.float32)


@pytest.fixture
def ctx() -> gg.Context:
    return gg.Context()


def net(ctx: gg.Context) -> tuple[gg.Tensor, gg.Tensor, gg.Tensor]:
    """(loss, w, x) with loss = the mean of squares of x @ w.T."""
    w, x = ctx.from_numpy(W, name="w"), ctx.from_numpy(X, name="x")
    return (gg.mul_mat(w, x) ** 2).mean(), w, x


def test_gradients_are_nodes_with_names_and_shapes(ctx: gg.Context) -> None:
    loss, w, x = net(ctx)
    gw, gx = gg.grad(loss, [w, x])
    assert [gw.name, gx.name] == ["w (grad)", "x (grad)"] and [gw.shape, gx.shape] == [(3, 4), (5, 4)]
    assert gw.dtype is gg.F32 and gw.op != "none" and gw in gg.Graph().build_forward_expand(gw)
    y = X @ W.T
    for backend in ("cpu", "ref"):
        got_w, got_x = gg.eval(gw, gx, backend=backend)
        np.testing.assert_allclose(got_w, 2 / 15 * y.T @ X, rtol=1e-5)
        np.testing.assert_allclose(got_x, 2 / 15 * y @ W, rtol=1e-5)


def test_a_cotangent(ctx: gg.Context) -> None:
    x = ctx.from_numpy(X)
    gy = ctx.from_numpy(np.arange(20, dtype=np.float32).reshape(5, 4), gg.F16)
    (gx,) = gg.grad(gg.sqr(x), [x], gy)
    np.testing.assert_allclose(gg.eval(gx), 2 * X * np.arange(20).reshape(5, 4), rtol=1e-6)


def test_what_is_read_more_than_once_gets_the_sum(ctx: gg.Context) -> None:
    x = ctx.from_numpy(X)
    (gx,) = gg.grad((x * x + x).sum(), [x])
    np.testing.assert_allclose(gg.eval(gx), 2 * X + 1, rtol=1e-6)


def test_of_a_node_between_and_of_y_itself(ctx: gg.Context) -> None:
    x = ctx.from_numpy(X)
    h = gg.sqr(x)
    y = (h * 3).sum()
    gh, gx, gy = gg.grad(y, [h, x, y])
    np.testing.assert_array_equal(gg.eval(gh), np.full_like(X, 3))
    np.testing.assert_allclose(gg.eval(gx), 6 * X, rtol=1e-6)
    assert gg.eval(gy) == 1 and gy.op != "none"


def test_each_run_of_a_gradient_graph_gives_the_same(ctx: gg.Context) -> None:
    loss, w, x = net(ctx)
    g = gg.Graph().build_forward_expand(loss)
    for t in gg.grad(loss, [w, x]):
        g.build_forward_expand(t.set_output())
    gg.compute(g)
    first = [np.array(t.numpy()) for t in g.nodes[-1:]]
    gg.compute(g)
    np.testing.assert_array_equal(first[0], g.nodes[-1].numpy())


@pytest.mark.parametrize("dtype", [gg.F16, gg.BF16, gg.F64])
def test_the_gradient_of_other_floats_is_f32(ctx: gg.Context, dtype: gg.DType) -> None:
    x = ctx.from_numpy(X, dtype)
    (gx,) = gg.grad(gg.sqr(gg.cast(x, gg.F32)).sum(), [x])
    assert gx.dtype is gg.F32 and gx.ne == x.ne
    np.testing.assert_allclose(gg.eval(gx), 2 * x.numpy(), rtol=1e-5)


def test_through_quantised_weights_but_not_of_them(ctx: gg.Context) -> None:
    w = ctx.from_numpy(RNG.standard_normal((6, 64)), gg.Q8_0, name="w")
    x = ctx.from_numpy(RNG.standard_normal((2, 64)).astype(np.float32))
    y = gg.mul_mat(w, x)
    n = len(ctx.tensors)
    (gx,) = gg.grad(y.sum(), [x])
    np.testing.assert_allclose(gg.eval(gx), np.ones((2, 6)) @ w.numpy(), rtol=1e-5, atol=1e-5)
    assert not any(t.op == "out_prod" and t.ne == w.ne for t in ctx.tensors[n:]), "nobody wants w's gradient"
    with pytest.raises(gg.DTypeError, match=r"w: Q8_0 .* has no gradient"):
        gg.grad(y.sum(), [w])


def test_views_of_one_tensor_are_added_where_they_lie(ctx: gg.Context) -> None:
    x = ctx.from_numpy(np.arange(24, dtype=np.float32).reshape(4, 6), name="x")
    parts = [x[:, :2], x[:, 2:4] * 2, x[1:3, 3:].T * 3, x[::2, 1] * 4]
    (gx,) = gg.grad(sum((p.sum() for p in parts), ctx.from_numpy(0.0)), [x])
    want = np.zeros((4, 6))
    want[:, :2] += 1
    want[:, 2:4] += 2
    want[1:3, 3:] += 3
    want[::2, 1] += 4
    np.testing.assert_array_equal(gg.eval(gx), want)
    g = gg.Graph().build_forward_expand(gx)
    assert sum(t.op == "repeat" and t.ne == x.ne for t in g.nodes) == 1, "one tensor of zeros for all views"


def test_windows_that_overlap_and_rows_that_repeat(ctx: gg.Context) -> None:
    x = ctx.from_numpy(np.arange(6, dtype=np.float32))
    windows = gg.view_2d(x, 3, 4, 4, 0)  # rows 0..2, 1..3, 2..4, 3..5
    repeated = gg.view_2d(x, 2, 3, 0, 4)
    for view, want in ((windows, [1, 2, 3, 3, 2, 1]), (repeated, [0, 3, 3, 0, 0, 0])):
        (gx,) = gg.grad(gg.cont(view).sum(), [x])
        np.testing.assert_array_equal(gg.eval(gx), want)


def test_views_of_views(ctx: gg.Context) -> None:
    x = ctx.from_numpy(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    turned = x.permute(2, 0, 1)
    weights = np.arange(4, dtype=np.float32).reshape(2, 2)
    (gt, gx) = gg.grad((turned[1:3, 1, ::2] * ctx.from_numpy(weights)).sum(), [turned, x])
    want = np.zeros((4, 2, 3))
    want[1:3, 1, ::2] = weights
    np.testing.assert_array_equal(gg.eval(gt), want)
    np.testing.assert_array_equal(gg.eval(gx), want.transpose(1, 2, 0))
    outside = gg.view_1d(x[:, :, 1], 5, 0)  # five elements of x, of which the slice has two
    with pytest.raises(gg.GraphError, match="elements that are none of a's"):
        gg.grad(gg.sum(outside), [x])


def test_what_is_written_into_memory(ctx: gg.Context) -> None:
    x, y = ctx.from_numpy(X, name="x"), ctx.from_numpy(X + 1, name="y")
    room = ctx.from_numpy(np.zeros((5, 4), np.float32), name="room")
    stored = gg.cpy(gg.sqr(x), room)
    (gx,) = gg.grad((stored * 3).sum(), [x])
    np.testing.assert_allclose(gg.eval(gx), 6 * X, rtol=1e-6)
    with pytest.raises(gg.GraphError, match=r"(?s)room: .* is read after cpy has written over it"):
        gg.grad((stored + room).sum(), [x])
    (gx,) = gg.grad(gg.scale_inplace(gg.sqr(y), 2.0).sum(), [y])  # neither scale nor sum reads what was there
    np.testing.assert_allclose(gg.eval(gx), 4 * (X + 1), rtol=1e-6)
    squares = gg.sqr(x)
    site = user_site()
    changed = gg.sin_inplace(squares)
    with pytest.raises(gg.GraphError, match=r"a was overwritten by the sin in place") as e:
        gg.grad(changed.sum(), [x])
    assert f"{site[0]}:{site[1] + 1}" in str(e.value)


def test_second_derivatives(ctx: gg.Context) -> None:
    x = ctx.from_numpy(X)
    (gx,) = gg.grad((x * x * x).sum(), [x])
    (gxx,) = gg.grad(gx.sum(), [x])
    np.testing.assert_allclose(gg.eval(gxx), 6 * X, rtol=1e-5)


def test_what_is_refused(ctx: gg.Context) -> None:
    x, other = ctx.from_numpy(X, name="x"), ctx.from_numpy(X, name="other")
    rows = ctx.from_numpy(np.array([0, 2]), name="rows")
    y = gg.sqr(x)
    tensor = gg.GraphError, "must be a list of tensors, not"
    for call, error, text in (
        (lambda: gg.grad(y, [x]), gg.ShapeError, r"(?s)grad: y must have one element, or gy must be given.*at .*test_"),
        (lambda: gg.grad(y, [x], rows), gg.ShapeError, "gy must have y's ne"),
        (lambda: gg.grad(y, [x], gg.cast(y, gg.I32)), gg.DTypeError, "gy must be of a float type"),
        (lambda: gg.grad(y, [x], X), gg.DTypeError, "gy must be a Tensor, not ndarray"),
        (lambda: gg.grad(y.sum(), [other]), gg.GraphError, r"(?s)y does not depend on other: .*y = .*at .*test_"),
        (lambda: gg.grad(y.sum(), [x, other]), gg.GraphError, "y does not depend on other"),
        (lambda: gg.grad(y.sum(), x), *tensor),
        (lambda: gg.grad(y.sum(), [X]), gg.GraphError, "not of ndarray"),
        (lambda: gg.grad(3, [x]), gg.GraphError, "y must be a Tensor, not int"),
        (lambda: gg.grad(y.sum(), [rows]), gg.DTypeError, "rows: I64 .* has no gradient"),
        (lambda: gg.grad(gg.argmax(x), [x], rows), gg.DTypeError, "y must be F32"),
        (lambda: gg.grad(gg.cast(gg.argmax(x), gg.F32).sum(), [x]), gg.GraphError, "or only through integers"),
    ):
        with pytest.raises(error, match=text):
            call()


def test_an_op_without_a_gradient_is_named(ctx: gg.Context) -> None:
    x = ctx.from_numpy(X, name="x")
    site = user_site()
    y = gg.map_custom(lambda dst, a: np.copyto(dst, a), x)
    with pytest.raises(gg.GraphError, match="map_custom: the op has no gradient") as e:
        gg.grad(y.sum(), [x])
    assert f"{site[0]}:{site[1] + 1}" in str(e.value) and "x: F32 ne [4, 5, 1, 1]" in str(e.value)
    labels = ctx.from_numpy(X)
    with pytest.raises(gg.GraphError, match="the op has no gradient for its source b"):
        gg.grad(gg.cross_entropy_loss(x, labels), [labels])


def test_an_op_whose_gradient_is_wrong_is_named(ctx: gg.Context) -> None:
    def shape(srcs, params):
        return srcs[0].ne

    def define(grad) -> gg.OpDef:
        return gg.OpDef(
            name="wrong",
            srcs=("a",),
            params=(),
            shape=shape,
            dtypes={(gg.F32,): gg.F32},
            ref=lambda a: a,
            kernel="wrong",
            cost=gg.elementwise_cost(1),
            inplace=(),
            label="wrong",
            grad=grad,
        )

    x = ctx.from_numpy(X)
    try:
        for grad, text in (
            (lambda node, gy: (gy.sum(),), "the gradient of a must be F32 of its ne"),
            (lambda node, gy: (), "an entry for each of 1 sources, not 0"),
            (lambda node, gy: gy, "an entry for each of 1 sources, not Tensor"),
            (lambda node, gy: None, "an entry for each of 1 sources, not NoneType"),
            (lambda node, gy: (np.ones(X.shape, np.float32),), "the gradient of a must be a Tensor, not ndarray"),
            (lambda node, gy: (lambda: 1.0,), "the gradient of a must be a Tensor, not float"),
        ):
            with pytest.raises(gg.GraphError, match=text):
                gg.grad(gg.record(define(grad), (x,), {}).sum(), [x])
    finally:
        del OPS["wrong"]


# -- ggml's way -----------------------------------------------------------------------------------------------------


def test_build_backward_expand(ctx: gg.Context) -> None:
    loss, w, x = net(ctx)
    assert w.set_param() is w
    g = gg.Graph().build_forward_expand(loss)
    assert g.build_backward_expand(loss) is g
    assert g.grad(w) in g and g.grad(w).name == "w (grad)"
    g.grad(w).set_output()
    for _ in range(2):
        gg.compute(g)
        np.testing.assert_allclose(g.grad(w).numpy(), 2 / 15 * (X @ W.T).T @ X, rtol=1e-5)
    with pytest.raises(gg.GraphError, match="the graph has no gradient of x"):
        g.grad(x)


def test_accumulators(ctx: gg.Context) -> None:
    loss, w, _ = net(ctx)
    w.set_param()
    acc = ctx.from_numpy(np.zeros((3, 4), np.float32), name="acc")
    g = gg.Graph().build_forward_expand(loss).build_backward_expand(loss, {w: acc})
    want = 2 / 15 * (X @ W.T).T @ X
    for n in (1, 2, 3):
        gg.compute(g)
        np.testing.assert_allclose(acc.numpy(), n * want, rtol=1e-5)
        np.testing.assert_array_equal(g.grad(w).numpy(), acc.numpy())
    acc.set(np.zeros((3, 4)))
    gg.compute(g)
    np.testing.assert_allclose(acc.numpy(), want, rtol=1e-5)


def test_what_build_backward_expand_refuses(ctx: gg.Context) -> None:
    loss, w, x = net(ctx)
    g = gg.Graph()
    with pytest.raises(gg.GraphError, match="not in this graph"):
        g.build_backward_expand(loss)
    g.build_forward_expand(loss)
    with pytest.raises(gg.GraphError, match=r"depends on no parameter; mark them with set_param\(\)"):
        g.build_backward_expand(loss)
    w.set_param()
    with pytest.raises(gg.GraphError, match="which is no parameter"):
        g.build_backward_expand(loss, {x: x})
    with pytest.raises(gg.ShapeError, match="the accumulator of w"):
        g.build_backward_expand(loss, {w: x})
    with pytest.raises(gg.GraphError, match="parameters are leafs"):
        loss.set_param()
    with pytest.raises(gg.DTypeError, match="parameters are F32"):
        ctx.from_numpy(np.arange(3)).set_param()


def test_what_another_node_of_the_graph_has_written(ctx: gg.Context) -> None:
    """The order of the graph counts: the cache is written before the loss reads it, by a node that is no source."""
    w, room = ctx.from_numpy(W, name="w").set_param(), ctx.from_numpy(W, name="room")
    stored = gg.cpy(gg.sqr(w), room)
    g = gg.Graph().build_forward_expand(stored)
    loss = (gg.mul_mat(room, ctx.from_numpy(X)) + w.sum()).sum()
    g.build_forward_expand(loss)
    with pytest.raises(gg.GraphError, match=re.escape("is read after cpy has written over it")):
        g.build_backward_expand(loss)


def test_a_net_learns_with_adamw(ctx: gg.Context) -> None:
    x = RNG.standard_normal((64, 2)).astype(np.float32)
    inside = (np.square(x).sum(axis=1) < 1).astype(np.float32)
    with ctx:
        w1, w2 = (ctx.from_numpy(RNG.standard_normal(s).astype(np.float32) * 0.7) for s in ((16, 2), (2, 16)))
        b1 = ctx.from_numpy(np.zeros(16, np.float32))
        h = gg.gelu(gg.mul_mat(w1, ctx.from_numpy(x)) + b1)
        labels = ctx.from_numpy(np.stack([1 - inside, inside], axis=1))
        loss = gg.cross_entropy_loss(gg.mul_mat(w2, h), labels).set_output()
        params = ctx.new_tensor(gg.F32, 7)
        g = gg.Graph().build_forward_expand(loss)
        for w, gw in zip((w1, w2, b1), gg.grad(loss, [w1, w2, b1]), strict=True):
            m, v = (ctx.from_numpy(np.zeros(w.shape, np.float32)) for _ in range(2))
            g.build_forward_expand(gg.opt_step_adamw(w, gw, m, v, params))
    losses: list[float] = []
    for t in range(1, 101):
        gg.compute(g, inputs={params: [0.05, 0.9, 0.999, 1e-8, 0.0, 1 / (1 - 0.9**t), 1 / (1 - 0.999**t)]})
        losses.append(float(loss.item()))
    assert losses[-1] < 0.2 < 0.5 < losses[0]


def test_what_changes_in_steps_has_a_gradient_of_0(ctx: gg.Context) -> None:
    """Nothing is recorded for it, however far below x is."""
    x, w = ctx.from_numpy(X), ctx.from_numpy(X)
    (gx,) = gg.grad(gg.floor(gg.exp(x * 3)).sum(), [x])
    np.testing.assert_array_equal(gg.eval(gx), np.zeros_like(X))
    assert {t.op for t in gg.Graph().build_forward_expand(gx).nodes} <= {"repeat", "reshape"}
    (gx,) = gg.grad((gg.floor(x) * x + w).sum(), [x])
    np.testing.assert_array_equal(gg.eval(gx), np.floor(X))


def test_a_choice_of_keys_has_a_gradient_of_0(ctx: gg.Context) -> None:
    """The scores of an indexer choose what attention sees: only the mask, and what it is added to, have gradients."""
    index, scores = (ctx.from_numpy(RNG.standard_normal((3, 8)).astype(np.float32)) for _ in range(2))
    mask = ctx.from_numpy(np.zeros((3, 8), np.float32))
    chosen = gg.top_k_mask(index * 2, mask, 4)
    g_index, g_scores = gg.grad(gg.sqr(gg.soft_max_ext(scores, chosen, 1.0, 0.0)).sum(), [index, scores])
    assert not gg.eval(g_index).any()
    assert (gg.eval(g_scores) != 0).sum() == 3 * 4
    (g_mask,) = gg.grad(gg.sqr(gg.soft_max_ext(scores, chosen, 1.0, 0.0)).sum(), [mask])
    np.testing.assert_allclose(gg.eval(g_mask), gg.eval(g_scores), rtol=1e-6)


def test_products_of_images_have_gradients_of_gradients(ctx: gg.Context) -> None:
    """A penalty on the gradient of a convolution, which is linear in its image."""
    kernel = ctx.from_numpy(RNG.standard_normal((2, 3, 3, 3)).astype(np.float32))
    image = ctx.from_numpy(RNG.standard_normal((1, 3, 6, 7)).astype(np.float32))
    (g,) = gg.grad(gg.conv_2d_direct(kernel, image, 1, 1, 1, 1, 1, 1).sum(), [image])
    (gk,) = gg.grad(gg.sqr(g).sum(), [kernel])
    at = kernel.numpy().copy()

    def penalty(k: np.ndarray) -> float:
        kernel.set(k)
        return float((gg.eval(g).astype(np.float64) ** 2).sum())

    slope = gg.eval(gk).copy()
    step = 1e-2 * RNG.standard_normal(at.shape).astype(np.float32)
    found = penalty(at + step) - penalty(at - step)  # exact for squares
    np.testing.assert_allclose(found, 2 * (slope * step).sum(), rtol=1e-3)
