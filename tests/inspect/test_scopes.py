"""Scopes name what is made inside them; drawings, taps, profiles and the page follow."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyggml.models.twins import BuiltLayer, find_twins

import pyggml as gg
from pyggml.errors import GraphError
from pyggml.inspect.layers import layers_of, scoped_layer
from pyggml.inspect.picture import Fold, folds
from pyggml.inspect.profile import Profile
from pyggml.inspect.record import record
from pyggml.inspect.taps import Edit, Tap
from pyggml.llm.model import load_model
from pyggml.scope import prefix
from pyggml.tensor import Tensor

from .test_dot import parsed

RNG = np.random.default_rng(0)


def matrix() -> np.ndarray:
    return RNG.standard_normal((8, 8)).astype(np.float32)


def network(names: list[str]) -> tuple[gg.Graph, Tensor]:
    """A scope `embed`, blocks in scopes of these names, a scope `head`. Only some weights and nodes have names."""
    ctx = gg.Context()
    x = ctx.new_tensor(gg.F32, (8, 2), "x").set_input()
    with gg.scope("embed"):
        h = gg.scale(x, 2.0)
    for name in names:
        with gg.scope(name):
            with gg.scope("attention"):
                a = gg.soft_max(gg.mul_mat(ctx.from_numpy(matrix()), h).set_name("q"))
            with gg.scope("ffn"):
                f = gg.silu(gg.mul_mat(ctx.from_numpy(matrix(), name="w"), a))
            h = h + f
    with gg.scope("head"):
        y = gg.rms_norm(h, 1e-5).set_name("norm")
    return gg.Graph().build_forward_expand(y), x


LAYERS = [f"layer {il}" for il in range(4)]
X = RNG.standard_normal((2, 8)).astype(np.float32)


def test_names_within_scopes() -> None:
    g, _ = network(LAYERS[:1])
    names = ["embed/node_0", "layer 0/attention/q", "layer 0/attention/node_2", "layer 0/ffn/node_3"]
    assert [t.name for t in g.nodes] == [*names, "layer 0/ffn/node_4", "layer 0/node_5", "head/norm"]
    assert [t.name for t in g.leafs] == ["x", "layer 0/ffn/w", "layer 0/attention/leaf_2"]
    with gg.scope("a"):
        t = gg.neg(g.leafs[0])
        assert t.describe() == "a/(neg): F32 ne [8, 2, 1, 1]"
        assert t.set_name("b").name == "a/b" == t.set_name("a/b").name
    assert t.set_name("c").name == "c"


def test_scopes_end_and_are_refused() -> None:
    with pytest.raises(ZeroDivisionError), gg.scope("a"), gg.scope("b/c"):
        assert prefix() == "a/b/c/"
        raise ZeroDivisionError
    assert prefix() == ""
    for bad in ("", "a//b", "/a", "a/", 3, None):
        with pytest.raises(GraphError, match="a scope needs a name such as 'layer 3'"), gg.scope(bad):  # pyright: ignore
            pass

    @gg.scope("f")
    def f(t: Tensor) -> Tensor:
        return t * 2

    x = gg.Context().from_numpy([1.0])
    assert f(x).name == f(x).name == "f/" and (x * 2).name == ""


def test_threads_and_tasks_have_their_own() -> None:
    seen: list[str] = []
    with gg.scope("a"):
        thread = threading.Thread(target=lambda: seen.append(prefix()))
        thread.start()
        thread.join()

    async def task(name: str) -> str:
        with gg.scope(name):
            await asyncio.sleep(0.001)
            return prefix()

    async def both() -> list[str]:
        return [*await asyncio.gather(task("a"), task("b"))]

    assert seen == [""] and asyncio.run(both()) == ["a/", "b/"] and prefix() == ""


def test_a_model_and_a_file_keep_their_names(tiny: Path, tmp_path: Path) -> None:
    def names() -> list[str]:
        ctx = load_model(tiny).new_context(64)
        ctx.decode([5, 6])
        g = ctx.build_graph(3)
        return [t.name for t in (*g.nodes, *g.leafs)]

    want = names()
    gg.save(tmp_path / "t.gguf", {"w": X})
    with gg.scope("mine"):
        assert names() == want
        assert gg.load(tmp_path / "t.gguf")["w"].name == "w"


# -- drawings ----------------------------------------------------------------------------------------------------------


def test_layers_by_scope() -> None:
    g, _ = network(LAYERS)
    layers = layers_of(g)
    assert [layers[t] for t in g.nodes] == [5, *[il for il in range(4) for _ in range(5)], 7]
    assert layers.names == {il: f"layer {il}" for il in range(4)} | {5: "embed", 7: "head"}
    assert layers.inside[g.nodes[1]] == ("attention",) and g.leafs[0] not in layers
    assert folds([*g.leafs, *g.nodes], layers, {}) == [Fold(0, 1, 4)]


def test_scopes_are_boxes_and_fold() -> None:
    g, _ = network(LAYERS)
    found = parsed(gg.dump_dot(g))
    labels = sorted(c["label"] for c in found["clusters"].values())
    assert labels == sorted([*LAYERS, "embed", "head", *["attention", "ffn"] * 4])
    inside = {c["label"]: len(c["nodes"]) for c in found["clusters"].values()}
    assert inside["layer 0"] == 7 and inside["attention"] == 3 and inside["head"] == 1
    found = parsed(gg.dump_dot(g, fold=True))
    label = found["boxes"]["fold0"]["label"]
    assert "layers 0..3: 4 x" in label and "5 nodes, 2 leafs each time" in label
    assert len(found["boxes"]) == 4 and len(found["edges"]) == 3
    assert "layer 2/ffn/w" in gg.dump_dot(g, layers=(2, 3)) and "layer 1/ffn/w" not in gg.dump_dot(g, layers=(2, 3))
    assert "cluster_scope1" in gg.dump_dot(g, nodes=["layer 3/*"]) and parsed(
        gg.dump_dot(g, against=network(LAYERS)[0])
    )


@pytest.mark.parametrize(
    ("names", "title"),
    [
        ([f"encoder/layer {il}" for il in range(3)], "encoder/layer 0..2: 3 x"),
        ([f"block_{il}" for il in range(1, 4)], "block_1..3: 3 x"),
        ([f"conv{il}" for il in range(3)], "conv0..2: 3 x"),
        ([f"blk.{il}/inner" for il in range(3)], "blk.0..2: 3 x"),
    ],
)
def test_all_scopes_that_count_fold(names: list[str], title: str) -> None:
    g, _ = network(names)
    assert title in gg.dump_dot(g, fold=True)


def test_two_rows_of_layers() -> None:
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, 4, "x").set_input()
        for row in ("encoder", "decoder"):
            for il in range(3):
                with gg.scope(f"{row}/layer {il}"):
                    x = gg.mul(x, ctx.from_numpy([1.0] * 4)) if row == "encoder" else gg.sqr(x)
    g = gg.Graph().build_forward_expand(x)
    layers = layers_of(g)
    assert [layers.names[layers[t]] for t in g.nodes] == [
        f"{r}/layer {i}" for r in ("encoder", "decoder") for i in range(3)
    ]
    assert folds([*g.leafs, *g.nodes], layers, {}) == [Fold(0, 1, 3), Fold(4, 1, 3)]
    text = gg.dump_dot(g, fold=True)
    assert "encoder/layer 0..2: 3 x" in text and "decoder/layer 0..2: 3 x" in text


@pytest.mark.parametrize("name", ["model.layers.{}.w", "layers.{}.mlp.w", "transformer.h.{}.w", "encoder.layer.{}.w"])
def test_names_of_hugging_face_fold(name: str) -> None:
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, 4, "x").set_input()
        for il in range(12):
            x = gg.silu(gg.mul(gg.rms_norm(x, 1e-5), ctx.from_numpy([1.0] * 4, name=name.format(il)))) + x
    g = gg.Graph().build_forward_expand(x)
    label = parsed(gg.dump_dot(g, fold=True))["boxes"]["fold0"]["label"]
    assert "layers 0..11: 12 x" in label and "4 nodes, 1 leafs each time" in label


def test_scopes_inside_the_layers_of_a_model() -> None:
    """Weights say the layer, scopes the part of it."""
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, 4, "x").set_input()
        for il in range(3):
            w = ctx.from_numpy([1.0] * 4, name=f"blk.{il}.w")
            with gg.scope("ffn"):
                x = gg.silu(gg.mul(gg.rms_norm(x, 1e-5), w)) + x
    g = gg.Graph().build_forward_expand(x)
    layers = layers_of(g)
    assert [layers[t] for t in g.nodes] == [0] * 4 + [1] * 4 + [2] * 4
    assert {layers.inside[t] for t in g.nodes} == {("ffn",)}
    assert "layers 0..2: 3 x" in gg.dump_dot(g, fold=True)


def test_what_a_name_says() -> None:
    said = scoped_layer("encoder/layer 3/attention/inner/q")
    assert said == ("encoder/layer", 3, "encoder/layer 3", ("attention", "inner"))
    assert scoped_layer("layers.07/q") == ("", 7, "layers.07", ()) and scoped_layer("Qcur-3") is None
    assert scoped_layer("head/a/q") == ("head", None, "head", ("a",)) and scoped_layer("3/q") == ("", 3, "3", ())


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_name_of_many_slashes() -> None:
    """Boxes are as deep as a reader can follow; the innermost box has the rest of the scopes."""
    a = gg.Context().new_tensor(gg.F32, (2,))
    deep = gg.relu(a).set_name("/".join(str(i) for i in range(5001)))
    text = gg.dump_dot(gg.Graph().build_forward_expand(gg.relu(deep).set_name("0/1/x")))
    innermost = "/".join(str(i) for i in range(32, 5000))  # 0 is the layer
    assert text.count("subgraph cluster_scope") == 32 and f'label="{innermost}"' in text


def test_taps_and_edits_by_scope() -> None:
    g, x = network(LAYERS)
    sched = gg.Scheduler(("cpu",), 1)
    x.set(X)
    with Tap(sched.watches, ("layer 3/*",)) as t, Edit(sched.watches, ("layer 1/attention/q",), lambda a: a * 0):
        sched.compute(g)
    assert sorted(t) == sorted(n.name for n in g.nodes if n.name.startswith("layer 3/")) and len(t) == 5
    with Tap(sched.watches, ("*/attention/*",)) as t:
        sched.compute(g)
    assert {name.split("/")[0] for name in t} == {*LAYERS} and len(t) == 8


def test_profiles_by_scope() -> None:
    g, x = network(LAYERS[:2])
    sched = gg.Scheduler(("cpu",), 1)
    x.set(X)
    with Profile(sched) as p:
        sched.compute(g)
    assert [r.key for r in p.table("layer")] == ["0", "1", "embed", "head"]
    table = p.table("scope")
    assert [r.key for r in table] == list(dict.fromkeys(s.scope for s in p.steps)) and table[-1].key == "head"
    assert {"embed", "layer 0/ffn", "layer 1/ffn"} <= {r.key for r in table}
    assert sum(r.n for r in table) == len(p.steps)


def test_the_page_names_scopes() -> None:
    from pyggml.inspect.page import page

    g, x = network(LAYERS)
    text = page(record(g, {x: X}), "scopes")
    found = re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.S)
    data: Any = json.loads(found[1]) if found else {}
    assert data["layers"] == {str(il): f"layer {il}" for il in range(4)} | {"5": "embed", "7": "head"}
    assert data["folds"] == [[0, 1, 4]]
    assert {t.get("layer") for t in data["tensors"]} == {None, 0, 1, 2, 3, 5, 7}


# -- layers that are repeated ------------------------------------------------------------------------------------------


def test_repeated_layers_keep_their_scopes() -> None:
    """A graph of twins names its nodes as one in which each layer was built."""

    def build(repeat: bool) -> gg.Graph:
        g = gg.Graph()
        x = gg.sqr(gg.Context().from_numpy([1.0] * 4))
        g.build_forward_expand(x)
        layers: list[BuiltLayer] = []
        for il, w in enumerate(weights):
            begin = g.n_nodes
            if il and repeat:
                to: dict[Tensor | None, Tensor] = {layers[0].inpL: x, weights[0]: w}
                g.repeat(layers[0].nodes, to, twins[il].names)
                y = to[layers[0].cur]
            else:
                with gg.scope(f"layer {il}"):
                    y = gg.silu(gg.mul(x, w).set_name("times"))
                g.build_forward_expand(y)
            layers.append(BuiltLayer(range(begin, g.n_nodes), x, y))
            x = y
        if not repeat:
            twins.update(find_twins(g, layers))
        return g

    weights, twins = [gg.Context().from_numpy([1.0] * 4) for _ in range(3)], dict[int, Any]()
    want = [t.name for t in build(False).nodes]
    assert set(twins) == {1, 2} and want[-2:] == ["layer 2/times", "layer 2/node_6"]
    assert [t.name for t in build(True).nodes] == want


def test_a_scope_can_be_entered_again() -> None:
    ctx, scope = gg.Context(), gg.scope("a/b")
    with scope, scope:
        assert ctx.new_tensor(gg.F32, 1, "x").name == "a/b/a/b/x"
    with scope:
        assert ctx.new_tensor(gg.F32, 1, "x").name == "a/b/x"
    assert ctx.new_tensor(gg.F32, 1, "x").name == "x"
