"""What a drawing shows, and that Graphviz's own `dot` reads it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pyggml.tools.cli import app

import pyggml as gg
from pyggml.errors import BackendError, GraphError
from pyggml.inspect.layers import layers_of
from pyggml.inspect.picture import Fold, folds, keys_of
from pyggml.inspect.record import Recorder, record, record_model
from pyggml.inspect.values import first_rows, values_of
from pyggml.llm.model import Model, load_model

from ..tiny_model import KV, write_gguf

IDS = [5, 6, 7, 250, 9]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The tiny model with 40 layers, whose graph has 1,286 nodes."""
    return load_model(write_gguf(tmp_path_factory.mktemp("deep") / "deep.gguf", {"llama.block_count": 40}))


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


def parsed(text: str) -> dict[str, Any]:
    """What Graphviz makes of it: boxes by name, and edges as pairs of names."""
    if shutil.which("dot") is None:
        pytest.skip("Graphviz's dot is not installed")
    done = subprocess.run(["dot", "-Tdot_json"], input=text, capture_output=True, text=True, check=True)
    assert not [line for line in done.stderr.splitlines() if "Warning" not in line]  # of fonts that are missing
    graph = json.loads(done.stdout)
    objects = graph.get("objects", [])
    names = [o["name"] for o in objects]
    return {
        "boxes": {o["name"]: o for o in objects if "nodes" not in o and "subgraphs" not in o},
        "clusters": {o["name"]: o for o in objects if "nodes" in o or "subgraphs" in o},
        "edges": [(names[e["tail"]], names[e["head"]], e) for e in graph.get("edges", [])],
    }


def test_every_tensor_and_every_source_is_drawn(model: Model) -> None:
    graph = model.new_context(64).build_graph(3)
    text = gg.dump_dot(graph, legend=True)
    assert text == gg.dump_dot(model.new_context(64).build_graph(3), legend=True)
    found = parsed(text)
    assert len(found["boxes"]) == graph.n_nodes + graph.n_leafs + 1  # the legend
    reads = sum(s is not None for t in graph.nodes for s in t.src)
    assert len([e for *_, e in found["edges"] if e.get("style") != "dotted"]) == reads
    assert {"cluster_0", "cluster_1"} == set(found["clusters"])


def test_a_thousand_nodes_fold_into_a_page(deep: Model) -> None:
    graph = deep.new_context(64).build_graph(1)
    assert graph.n_nodes > 1000
    text = gg.dump_dot(graph, fold=True, legend=True)
    found = parsed(text)
    assert len(found["boxes"]) < 70
    label = found["boxes"]["fold0"]["label"]
    assert "layers 0..38: 39 x" in label and "32 nodes, 11 leafs each time" in label and "mul_mat x 9" in label
    ends = [(a, b) for a, b, _ in found["edges"] if "fold0" in (a, b)]
    assert len(ends) == len(set(ends)) > 3 and ("fold0", "fold0") not in ends
    assert len(graph._repr_svg_() or "") < 200_000


def test_what_folds() -> None:
    def chain(kinds: str) -> list[Fold]:
        with gg.Context() as ctx:
            x = gg.sqr(ctx.new_tensor(gg.F32, 4, "x"))
            for il, kind in enumerate(kinds):
                w = ctx.new_tensor(gg.F32, 4, f"blk.{il}.w")
                x = (gg.mul(x, w) if kind == "m" else gg.add(x, w)).set_name(f"l_out-{il}")
        g = gg.Graph().build_forward_expand(x)
        return folds([*g.leafs, *g.nodes], layers_of(g), {})

    assert chain("mmmm") == [Fold(0, 1, 4)]
    assert chain("mmama") == [Fold(0, 1, 2)] or chain("mmama") == [Fold(1, 2, 2)]
    assert chain("mamaa") == [Fold(0, 2, 2)]
    assert chain("mmammammamm") == [Fold(0, 3, 3), Fold(9, 1, 2)]
    assert chain("ma") == [] == chain("")


def test_nodes_by_name_and_what_is_around_them(model: Model) -> None:
    graph = model.new_context(64).build_graph(3)

    def names(**options: Any) -> set[str]:
        boxes = parsed(gg.dump_dot(graph, **options))["boxes"].values()
        return {b["label"].split("\\n")[0] for b in boxes if b["fillcolor"] != "#ffffff"}

    assert names(nodes=["kq-*"]) == {"kq-0", "kq-1"}
    assert names(nodes=["kq-*"], layers=(1, 2)) == {"kq-1"}
    assert names(nodes=["kq-0"], around=1) == {"kq-0", "k-0", "q-0", "kq_soft_max_ext-0"}
    assert "KQ_mask" in names(nodes=["kq-0"], around=2)
    assert len(names(nodes=["kq-0"], around=99)) > 50
    bad: dict[str, dict[str, Any]] = {
        "called no-": {"nodes": ["no-*"]},
        "a list": {"nodes": "kq"},
        "-1": {"around": -1},
    }
    for why, options in bad.items():
        with pytest.raises(GraphError, match=why):
            gg.dump_dot(graph, **options)
    with pytest.raises(TypeError, match="no option 'layer'"):
        gg.dump_dot(graph, layer=(0, 1))  # pyright: ignore[reportCallIssue]


def test_what_differs_is_coloured(model: Model) -> None:
    plain, flash = (model.new_context(64, flash_attn=on).build_graph(3) for on in (False, True))
    boxes = parsed(gg.dump_dot(flash, against=plain))["boxes"].values()
    by = {b["label"].split("\\n")[0]: b["fillcolor"] for b in boxes}
    assert by["kqv_merged-0"] == by["kqv_merged_cont-0"] == "#ffc966"  # other ops
    assert by["kq-1"] == by["kq_soft_max_ext-1"] == "#f4a6a6" and by["KQ_mask (copy)"] == "#8fd694"
    assert by["attn_norm-0"] == "#f5f5f5" and by["KQ_mask"] == "#ffc966"
    assert set(by) >= {t.name for t in (*plain.nodes, *plain.leafs) if not t.name.startswith("node_")}
    same = parsed(gg.dump_dot(plain, against=model.new_context(64).build_graph(3)))["boxes"].values()
    assert {b["fillcolor"] for b in same} == {"#f5f5f5"}


def test_keys_tell_tensors_of_one_name_and_of_none_apart() -> None:
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, 4, "x")
        a = gg.sqr(x).set_name("y")
        g = gg.Graph().build_forward_expand(gg.add(gg.sqrt(a).set_name("y"), gg.neg(x)))
    keys = [*keys_of(g).values()]
    assert keys[:3] == ["x", "y", "y (2)"] and keys[3].startswith("(neg ") and len({*keys}) == 5


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_is_drawn_with_its_values() -> None:
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, (3, 2), "x").set_input()
        y = gg.log(x).set_name("y")
        g = gg.Graph().build_forward_expand(gg.scale(y, 2.0).set_name("z"))
    run = record(g, {x: np.array([[1, np.e, -1], [1, 1, 0]], np.float32)})
    assert [v.n_nan for v in (run.values[x], run.values[y])] == [0, 1] and run.values[y].n_inf == 1
    text = gg.dump_dot(g, run=run)
    box = parsed(text)["boxes"]["node0"]
    for part in ("on cpu: CPU compute at ", "us, 48 B moved", "min 0  max 1  mean 0.25", "1 NaN", "1 infinite"):
        assert part in box["label"], box["label"]
    assert box["color"] == "#d00000" and "color" not in parsed(text)["boxes"]["leaf0"]
    assert re.search(r"x\\nF32 \[3, 2, 1, 1\]\\nCPU at 0, 24 bytes\\nmin -1  max 2.718", text)


def test_the_fastest_of_runs_is_recorded() -> None:
    scheduler = gg.Scheduler(["cpu"], 1)
    graph = gg.Graph().build_forward_expand(gg.sqrt(gg.sqr(gg.Context().new_tensor(gg.F32, [4]))))
    with Recorder(scheduler, values=False) as recorder:
        (program,) = scheduler.alloc(graph).programs
        for ns in (50, 90, 20, 70):
            begin = np.arange(1000, 1000 + 100 * graph.n_nodes, 100)
            recorder.note(program, np.stack([begin, begin + ns], axis=-1)[:, None])
    assert [s.ns for s in recorder.run.steps] == [20] * graph.n_nodes


def test_a_model_s_run_is_fused_and_has_all_values(model: Model) -> None:
    exact: Any = {"type_k": gg.F32, "type_v": gg.F32}  # F16 would make more of a sum's last bit
    run = record_model(model, IDS, **exact)
    graph = run.graph
    assert set(run.values) == {*graph.nodes, *graph.leafs}
    assert repr(run).startswith(f"<Run of <Graph {graph.n_nodes} nodes")
    assert len(run.steps) == len({s.nodes[-1] for s in run.steps}) < graph.n_nodes
    assert {s.op for s in run.steps} > {"mul_mat", "attention"} and run.wall_ns > 0
    with model.tap("l_out-1", "result_output") as t, model.new_context(64, **exact) as ctx:
        ctx.decode(IDS)
    for name in t:
        x, v = t[name][0], run.values[next(n for n in graph.nodes if n.name == name)]
        assert (v.low, v.high, v.mean) == pytest.approx((x.min(), x.max(), x.mean()), abs=1e-5) and v.n == x.size
        assert np.allclose(v.corner, x[:6, :8], atol=1e-5) and sum(v.histogram) == x.size
    text = gg.dump_dot(graph, run=run, fold=True, legend=True)
    assert "in attention of " in text and parsed(text)
    first = [n for n in graph.nodes if n.name == "Qcur-0"]
    assert len(first) == 2 and run.values[first[0]].low != run.values[first[1]].low  # before and after rope


def test_a_drawing_of_another_graph_of_the_same_names(model: Model) -> None:
    run = record_model(model, IDS)
    text = gg.dump_dot(model.new_context(64).build_graph(5), run=run, layers=(0, 1))
    assert " us, " in text and "mean" in text and "on cpu" not in text  # it lies elsewhere


@pytest.mark.parametrize("name", ["<b>/x", "<b>", 'a"b\\', "x\0y", "\\N\n\\l", "<i>/<b>/]; }"])
def test_names_are_texts_and_nothing_else(name: str) -> None:
    """A name in angle brackets is no HTML (as `<b>/x` was, the name of a scope), and none ends its label."""
    a = gg.Context().new_tensor(gg.F32, 4, name)
    text = gg.dump_dot(gg.Graph().build_forward_expand(gg.neg(a).set_name(name)))
    outside = re.sub(r'"(\\.|[^"\\])*"', "", text).replace("->", "")
    assert not set(outside) & set('"<>\\\0') and outside.count("{") == outside.count("}")
    assert "\0" not in text
    if shutil.which("dot"):
        parsed(text)


def test_borders_of_splits() -> None:
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, 8, "x").set_input()
        a, b = gg.sqr(x).set_name("a"), None
        b = gg.sqrt(a).set_name("b")
        g = gg.Graph().build_forward_expand(gg.neg(b).set_name("c"))
    scheduler = gg.Scheduler(("cpu", "ref"))
    scheduler.set_tensor_backend(b, "ref")
    text = gg.dump_dot(g, scheduler=scheduler, legend=True)
    assert a.buffer is None  # drawing allocates nothing
    found = parsed(text)
    assert set(found["clusters"]) == {"cluster_split0", "cluster_split1", "cluster_split2"}
    assert "split 1 on ref" in found["clusters"]["cluster_split1"]["label"]
    assert "on ref" in found["boxes"]["node1"]["label"]
    scheduler.alloc(g)
    x.set(np.arange(8))
    with Recorder(scheduler) as r:
        scheduler.compute(g)
    assert r.run.values[b].high == pytest.approx(7)
    with pytest.raises(BackendError, match="only the cpu backend"):
        Recorder(gg.Scheduler(("ref",)))
    with Recorder(scheduler) as r, pytest.raises(GraphError, match="nothing was recorded"):
        _ = r.run


def test_values_of_odd_arrays() -> None:
    v = values_of(np.full((3, 100), np.nan, np.float32))
    assert v.n_nan == 300 and str(v) == "no finite value" and not v.pixels.any()
    v = values_of(np.float32([2.0]))
    assert (v.low, v.high, v.mean, v.std, sum(v.histogram)) == (2, 2, 2, 0, 1)
    v = values_of(np.arange(10_000, dtype=np.int32).reshape(100, 100))
    assert v.pixels.shape == (24, 24) and v.pixels[0, 0] < 5 and v.pixels[-1, -1] > 245
    v = values_of(np.float32([[3e38, 3e38]]))  # far from 0, all equal
    assert v.low == v.high and sum(v.histogram) == 2
    v = values_of(np.float32([[-3e38, 3e38]]))
    assert np.isfinite(v.std) and sum(v.histogram) == 2
    with gg.Context() as ctx:
        w = ctx.from_numpy(np.ones((1 << 13, 1 << 10), np.float32), gg.Q8_0)
        assert first_rows(w).shape == (1 << 12, 1 << 10) and first_rows(w).mean() == pytest.approx(1, rel=1e-2)


# -- layers of nodes without names ------------------------------------------------------------------------------------


def unnamed(n_layer: int) -> gg.Graph:
    """Blocks of eight nodes without names, with a residual, over weights blk.N.*."""
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, 16, "x").set_input()
        for il in range(n_layer):
            w = ctx.new_tensor(gg.F32, (16, 16), f"blk.{il}.w.weight")
            v = ctx.new_tensor(gg.F32, 16, f"blk.{il}.norm.weight")
            y = gg.silu(gg.mul_mat(w, gg.mul(gg.rms_norm(x, 1e-5), v)))
            x = gg.sqr(gg.add(gg.scale(gg.mul(y, v), 0.5), x))
    return gg.Graph().build_forward_expand(x)


@pytest.mark.parametrize("n_layer", [2, 16, 130])
def test_nodes_without_names_take_the_layer_around_them(n_layer: int) -> None:
    """Weights that fold without the nodes that read them make a picture that `dot` works on for minutes."""
    g = unnamed(n_layer)
    layers = layers_of(g)
    assert [layers[t] for t in g.nodes] == [il for il in range(n_layer) for _ in range(8)]
    found = parsed(gg.dump_dot(g, fold=True))
    assert set(found["boxes"]) == {"fold0", f"leaf{[t.name for t in g.leafs].index('x')}"} and len(found["edges"]) == 1
    label = found["boxes"]["fold0"]["label"]
    assert f"layers 0..{n_layer - 1}: {n_layer} x" in label and "8 nodes, 2 leafs each time" in label


def test_an_output_within_a_layer_does_not_split_a_fold() -> None:
    g = unnamed(6)
    for i in (8 * 3 + 7, 8 * 5 + 2):
        g.nodes[i].set_output()
    (label,) = [b["label"] for name, b in parsed(gg.dump_dot(g, fold=True))["boxes"].items() if name == "fold0"]
    assert "layers 0..5: 6 x" in label and "output: node_31, node_42" in label


def test_the_layers_of_a_model_are_whole(model: Model) -> None:
    for flash_attn in (False, True):
        graph = model.new_context(64, flash_attn=flash_attn).build_graph(3)
        layers = layers_of(graph)
        outside = [t.name for t in graph.nodes if t not in layers]
        assert outside == ["inp_embd", *["KQ_mask (copy)"] * flash_attn, "norm", "result_norm", "result_output"]


def test_a_fold_that_would_read_what_is_computed_from_it_is_not_made() -> None:
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, 4, "x").set_input()
        for il in (0, 1, 9, 2, 3):  # 9: "between" reads layer 1, layer 2 reads it
            if il == 9:
                x = gg.neg(gg.add(x, ctx.new_tensor(gg.F32, 4, "other"))).set_name("between")
                continue
            x = gg.mul(x, ctx.new_tensor(gg.F32, 4, f"blk.{il}.w")).set_name(f"l_out-{il}")
        g = gg.Graph().build_forward_expand(x)
    between = next(t for t in g.nodes if t.name == "between")
    layers = {t: il for t, il in layers_of(g).items() if t is not between and t is not between.src[0]}
    every = [*g.leafs, *g.nodes]
    assert folds(every, layers, {}) == []
    assert folds(every, layers_of(g), {}) == [Fold(2, 1, 2)]  # layer 1 ends with it


def test_what_several_layers_read_is_drawn_again_in_each(deep: Model) -> None:
    graph = deep.new_context(64).build_graph(3)
    found = parsed(gg.dump_dot(graph, layers=(0, 4)))
    own = {name for name in found["boxes"] if re.fullmatch(r"(node|leaf)\d+", name)}
    again = set(found["boxes"]) - own
    assert all(name.startswith("again") for name in again)
    labels = [found["boxes"][name]["label"].split("\\n")[0] for name in again]
    assert sorted(labels) == ["KQ_mask"] * 3 + ["inp_pos"] * 3
    at = {o["_gvid"]: o["name"] for o in found["boxes"].values()}
    for il in range(1, 4):
        inside = {at[i] for i in found["clusters"][f"cluster_{il}"]["nodes"]}
        assert len(inside & again) == 2
        assert {a for a, b, _ in found["edges"] if a in again and b in inside} == inside & again
    text = gg.dump_dot(graph)
    assert len(re.findall(r"^\t+(?:node|leaf)\d+ \[", text, re.M)) == graph.n_nodes + graph.n_leafs
    reads = sum(s is not None for t in graph.nodes for s in t.src)
    assert len([e for e in re.findall(r"^\t\w+ -> .*", text, re.M) if "style=dotted" not in e]) == reads
    assert text.count(' [label="inp_pos') == text.count(' [label="KQ_mask') == 40


# -- what differs, what is fused, how long it takes -------------------------------------------------------------------


def test_a_drawing_says_what_differs() -> None:
    def build(kind: gg.DType, ne: int, s: float, other: bool) -> gg.Graph:
        with gg.Context() as ctx:
            w = ctx.new_tensor(kind, (32, 8), "w")
            x = ctx.new_tensor(gg.F32, (32, ne), "x").set_input()
            y = gg.scale(gg.mul_mat(w, x).set_name("y"), s).set_name("z")
            return gg.Graph().build_forward_expand((gg.neg if other else gg.sqr)(y).set_name("out"))

    before = build(gg.Q8_0, 2, 0.5, False)
    text = gg.dump_dot(build(gg.Q4_0, 3, 0.25, True), against=before, legend=True)
    labels = {b["label"].split("\\n")[0]: b["label"] for b in parsed(text)["boxes"].values() if "\\n" in b["label"]}
    assert labels["w"].endswith("Q8_0 -> Q4_0") and labels["x"].endswith("[32, 2, 1, 1] -> [32, 3, 1, 1]")
    assert labels["z"].endswith("s 0.5 -> 0.25") and "sqr -> neg" in labels["out"]
    assert "changed: before -&gt; now" in text and "added" not in text
    same = gg.dump_dot(build(gg.Q8_0, 2, 0.5, False), against=before)
    assert "#ffc966" not in same


def test_nodes_of_one_step_stand_in_a_box(model: Model) -> None:
    run = record_model(model, IDS)
    found = parsed(gg.dump_dot(run.graph, run=run))
    names = {o["_gvid"]: o["label"].split("\\n")[0] for o in found["boxes"].values()}
    boxes = {c["label"].split(":")[0]: c for name, c in found["clusters"].items() if name.endswith("_fused")}
    together = {s.op: s for s in run.steps if len(s.nodes) > 1}
    assert set(boxes) == set(together) and "attention" in boxes
    for box in (c for name, c in found["clusters"].items() if name.endswith("_fused")):
        members = sorted(names[i] for i in box["nodes"])
        assert any(members == sorted(t.name for t in s.nodes) for s in run.steps) and " us, " in box["label"]


def test_render_gives_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "dot"
    slow.write_text("#!/bin/sh\nexec sleep 20\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(GraphError, match=r"16 nodes and 5 leafs.* within 0.1 s: draw less.*fold=True.*timeout="):
        gg.render(unnamed(2), tmp_path / "x.svg", timeout=0.1)
    assert not (tmp_path / "x.svg").exists()


def test_on_the_command_line(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "g.dot"
    line = ["dump-dot", "-m", str(tiny), "-o", str(out)]
    done = CliRunner().invoke(app, [*line, "-p", "abc", "--nodes", "kq-*", "--around", "1", "--legend"])
    assert done.exit_code == 0, done.output
    assert "mean" in out.read_text() and "legend" in out.read_text()
    other = write_gguf(tmp_path / "other.gguf", KV | {"llama.block_count": 3})
    done = CliRunner().invoke(app, [*line, "--against", str(other), "--fold"])
    assert (
        done.exit_code == 0 and STATUS_RED in out.read_text() and "only in the graph compared with" in out.read_text()
    )


STATUS_RED = "#f4a6a6"


def test_layers_of_any_number_take_no_time() -> None:
    """The names in a file may have any: what lies between two layers is not counted through."""
    ctx = gg.Context()
    leafs = [ctx.from_numpy(np.ones(4, np.float32), name=f"blk.{il}.attn_q.weight") for il in (0, 1, 2, 10**17)]
    with ctx:
        squares = [gg.mul(t, t) for t in leafs]
        total = gg.add(gg.add(squares[0], squares[1]), gg.add(squares[2], squares[3]))
    g = gg.Graph().build_forward_expand(total)
    assert leafs[-1].name in gg.dump_dot(g, fold=True)
