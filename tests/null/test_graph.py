"""The graph: ggml's order, stable text, and every malformed graph an exception."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import pyggml as gg


def leaf(ctx: gg.Context, *ne: int, name: str = "") -> gg.Tensor:
    return ctx.new_tensor(gg.F32, ne, name)


def test_post_order_left_to_right_each_once() -> None:
    with gg.Context() as ctx:
        a, b, c = (leaf(ctx, 4, name=n) for n in "abc")
        ab = gg.add(a, b).set_name("ab")
        bc = gg.mul(b, c).set_name("bc")
        out = gg.add(bc, ab).set_name("out")
        last = gg.add(out, ab).set_name("last")
    g = gg.Graph().build_forward_expand(last)
    assert [t.name for t in g.nodes] == ["bc", "ab", "out", "last"]
    assert [t.name for t in g.leafs] == ["b", "c", "a"]
    assert (g.n_nodes, g.n_leafs) == (4, 3)
    g.build_forward_expand(out)
    assert g.n_nodes == 4


def test_unnamed_tensors_get_ggmls_names() -> None:
    with gg.Context() as ctx:
        g = gg.Graph().build_forward_expand(gg.sqr(gg.sqr(leaf(ctx, 2))))
    assert [t.name for t in (*g.nodes, *g.leafs)] == ["node_0", "node_1", "leaf_0"]
    assert "sqr" in str(g) and "leaf_0" in str(g)


def test_deep_graph_needs_no_recursion() -> None:
    with gg.Context() as ctx:
        t = leaf(ctx, 1)
        for _ in range(sys.getrecursionlimit() * 3):
            t = gg.sqr(t)
    assert gg.Graph().build_forward_expand(t).n_nodes == sys.getrecursionlimit() * 3


def test_cycle() -> None:
    with gg.Context() as ctx:
        a = gg.sqr(leaf(ctx, 1)).set_name("a")
        b = gg.sqr(a)
        a.src = (b,)
    g = gg.Graph()
    with pytest.raises(gg.GraphError, match="cycle"):
        g.build_forward_expand(b)
    assert g.n_nodes == g.n_leafs == 0


def test_oversized_graph() -> None:
    with gg.Context() as ctx:
        x = leaf(ctx, 1)
        y = gg.sqr(gg.sqr(gg.sqr(x)))
    g = gg.Graph(size=2)
    with pytest.raises(gg.GraphError, match="full: 2 nodes"):
        g.build_forward_expand(y)
    assert g.n_nodes == 0 and x not in g


def test_foreign_and_missing_inputs() -> None:
    with gg.Context() as ctx:
        x = leaf(ctx, 2, name="x").set_input()
        other = leaf(ctx, 2, name="other").set_input()
        y = gg.sqr(x)
    g = gg.Graph().build_forward_expand(y)
    with pytest.raises(gg.AllocError, match="no memory"):
        y.numpy()
    with pytest.raises(gg.GraphError, match=r"no value for the input x: F32 ne \[2, 1, 1, 1\]"):
        gg.compute(g)
    with pytest.raises(gg.GraphError, match=r"other.*not in this graph"):
        gg.compute(g, inputs={x: np.ones(2), other: np.ones(2)})
    with pytest.raises(gg.ShapeError, match="x"):
        gg.compute(g, inputs={x: np.ones(3)})
    with pytest.raises(gg.BackendError, match="gpu"):
        gg.compute(g, inputs={x: np.ones(2)}, backend="gpu")
    with pytest.raises(gg.GraphError, match="empty"):
        gg.compute(gg.Graph())
    gg.compute(g, inputs={x: np.array([1.0, 2.0])})
    assert y.numpy().tolist() == [1.0, 4.0]


def test_recycled_memory_is_not_read() -> None:
    with gg.Context() as ctx:
        x = ctx.from_numpy(np.arange(4, dtype=np.float32))
        middle = gg.sqr(x).set_name("middle")
        y = gg.sqr(gg.sqr(middle))
    g = gg.Graph().build_forward_expand(y)
    gg.compute(g)
    with pytest.raises(gg.AllocError, match=r"middle.*recycled"):
        middle.numpy()
    middle.set_output()
    g2 = gg.Graph().build_forward_expand(y)
    gg.compute(g2)
    assert middle.numpy().tolist() == [0, 1, 4, 9]


def test_a_graph_gives_the_same_text_every_time() -> None:
    def build() -> str:
        with gg.Context() as ctx:
            w = leaf(ctx, 4, 3, name="blk.0.w")
            x = leaf(ctx, 4, 2, name="inp").set_input()
            y = gg.reshape_1d(gg.mul_mat(w, x), 6).set_name("out-0").set_output()
            return gg.dump_dot(gg.Graph().build_forward_expand(y))

    text = build()
    assert text == build()
    for part in ("blk.0.w", "inp", "mul_mat", "F32 [4, 3, 1, 1]", "cluster_0", "dashed"):
        assert part in text


def test_dot_layer_range() -> None:
    with gg.Context() as ctx:
        x = leaf(ctx, 4, name="inp").set_input()
        for il in range(3):
            x = gg.mul(x, leaf(ctx, 4, name=f"blk.{il}.w")).set_name(f"l_out-{il}")
        g = gg.Graph().build_forward_expand(x)
    text = gg.dump_dot(g, layers=(1, 2))
    assert "l_out-1" in text and "l_out-0" in text and "l_out-2" not in text and "cluster_1" in text
    with pytest.raises(gg.GraphError, match="7:9"):
        gg.dump_dot(g, layers=(7, 9))


def test_a_name_is_a_layer_in_a_models_graph_only() -> None:
    with gg.Context() as ctx:
        g = gg.Graph().build_forward_expand(gg.sqr(leaf(ctx, 4, name="x")).set_name("x-1"))
    assert "cluster" not in gg.dump_dot(g)


def test_dot_shows_parameters_stores_and_backends() -> None:
    with gg.Context() as ctx:
        x, cache = leaf(ctx, 4, 2, name="x"), leaf(ctx, 4, 8, name="cache")
        at = gg.view_2d(cache, 4, 2, 16, 16 * gg.Var("head", 6))
        store = gg.cpy(gg.rms_norm(x, 1e-5), at).set_name("store")
        y = gg.scale_inplace(gg.mul_mat(cache[:4].set_name("seen"), x), 0.5)
        g = gg.Graph().build_forward_expand(store).build_forward_expand(y)
    text = gg.dump_dot(g, scheduler=gg.Scheduler(("cpu", "ref")))
    for part in ("rms_norm eps=1e-05", "offset=16*head", "in place: cache", "peripheries=2", "s=0.5", "on cpu"):
        assert part in text
    ids = {t.name: f"node{i}" for i, t in enumerate(g.nodes)}
    assert f"{ids['store']} -> {ids['seen']} [style=dotted" in text and text.count("style=dotted") == 1


def test_a_notebook_draws_a_summary_of_what_is_large() -> None:
    rng = np.random.default_rng(0)
    with gg.Context() as ctx:
        g, made = gg.Graph(), [leaf(ctx, 4, name="x")]
        for _ in range(1000):
            a, b = rng.integers(0, len(made), 2)
            made.append(gg.add(made[a], made[b]))
            g.build_forward_expand(made[-1])
    svg = g._repr_svg_()
    assert svg is None or ("add x 1000" in svg and len(svg) < 10_000)


def test_render_draws_or_says_what_is_missing(tmp_path: Path) -> None:
    with gg.Context() as ctx:
        g = gg.Graph().build_forward_expand(gg.sqr(leaf(ctx, 4, name="x")))
    if shutil.which("dot") is None:
        with pytest.raises(gg.GraphError, match="dot"):
            gg.render(g, tmp_path / "g.svg")
        return
    gg.render(g, tmp_path / "g.svg")
    assert "sqr" in (tmp_path / "g.svg").read_text()
    with pytest.raises(gg.GraphError, match="nonsense"):
        gg.render(g, tmp_path / "g.nonsense")
