"""The page of a run: what it holds, and a walk through it in a headless Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pyggml.tools.cli import app

import pyggml as gg
from pyggml.errors import GraphError
from pyggml.inspect.page import page
from pyggml.inspect.record import Recorder, Run, record, record_model
from pyggml.inspect.values import values_of
from pyggml.llm.model import load_model

from ..browser import Browser, Pixels
from ..tiny_model import KV, write_gguf

IDS = [5, 6, 7, 250, 9]


@pytest.fixture(scope="module")
def run(tiny: Path) -> Run:
    return record_model(load_model(tiny), IDS, n_threads=2)


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_the_run(run: Run) -> None:
    html = page(run, "a <title>", {"prompt": "</script><b>"})
    data = data_of(html)
    assert "<title>a &lt;title&gt;</title>" in html and data["about"] == {"prompt": "</script><b>"}
    assert not re.search(r"""(src|href)=|https?://|@import|url\(""", html)  # it is all here
    tensors = data["tensors"]
    assert len(tensors) == run.graph.n_nodes + run.graph.n_leafs
    by = {t["name"]: t for t in tensors}
    out = by["l_out-1"]
    assert (out["ne"], out["shape"], out["layer"], out["type"]) == ([32, 1, 1, 1], [1, 32], 1, "F32")
    assert [tensors[s]["name"] for s in out["src"]] == ["ffn_out-1", "ffn_inp-1"] and out["roles"] == ["a", "b"]
    assert out["values"]["n"] == 32 and sum(out["values"]["bins"]) == 32 and len(out["values"]["corners"][0][0]) == 8
    assert by["KQ_mask"]["values"]["inf"] > 0 and by["result_output"]["kind"] == "output"
    assert all("layer" in t for t in tensors if t["name"].startswith("node_"))  # rows taken amid the last layer
    assert len(data["steps"]) == len(run.steps) and all(s["spans"] and s["nodes"] for s in data["steps"])
    (pool,) = data["pools"]
    assert all(0 <= a <= b < data["n_steps"] for *_, a, b in pool["blocks"])
    assert max(offset + size for _, offset, size, *_ in pool["blocks"]) <= pool["size"]


def test_numbers_that_json_has_not() -> None:
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, 3, "x").set_input()
        g = gg.Graph().build_forward_expand(gg.log(x).set_name("y"))
    (y,) = [t for t in data_of(page(record(g, {x: [-1, 0, 1]}), "log"))["tensors"] if t["name"] == "y"]
    assert (y["values"]["nan"], y["values"]["inf"], y["values"]["corners"]) == (1, 1, [[["nan", "-inf", 0.0]]])


def test_attention_is_shown_by_head_and_token_without_padding(run: Run) -> None:
    data = data_of(page(run, "scores"))
    by = {t["name"]: t for t in data["tensors"]}
    assert len(data["tokens"]) == len(IDS)
    assert {name for name, t in by.items() if "scores" in t} == {"KQ_mask"} | {
        f"{what}-{il}" for what in ("kq", "kq_soft_max_ext") for il in (0, 1)
    }
    scores = by["kq_soft_max_ext-0"]
    assert scores["ne"] == [32, 5, 4, 1]  # 32 cells, of which five are used
    v = scores["values"]
    assert (v["planes"], v["rows"], v["columns"], v["size"], len(v["corners"])) == (4, 5, 5, [5, 5], 4)
    heads = np.array(v["corners"])
    assert np.allclose(heads.sum(-1), 1, atol=1e-3) and not np.allclose(heads[0], heads[1])
    assert np.all(np.triu(heads, 1) == 0)


def test_planes_have_no_padding() -> None:
    x = np.zeros((2, 3, 40, 50), np.float32)
    x[1, 2, 10, 4] = 2
    x[..., 20:] = -np.inf
    v = values_of(x, planes=True)
    assert v.planes is not None and v.pixels.shape == (24, 24)
    assert (v.planes.n, v.planes.rows, v.planes.columns, v.planes.pixels.shape) == (6, 11, 5, (6, 11, 5))
    assert v.planes.pixels[5, 10, 4] == 255 and v.planes.pixels[:5].max() == 1
    assert values_of(np.zeros((40, 2, 2)), planes=True).planes.corners == (((0.0, 0.0),) * 2,) * 32  # pyright: ignore[reportOptionalMemberAccess]


def own_graph() -> tuple[gg.Graph, gg.Tensor]:
    """Twelve nodes without names over one weight; what is added up is also written over a leaf."""
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, (64, 8), "x").set_input()
        w = ctx.from_numpy(np.random.default_rng(0).normal(size=(64, 64)), gg.F32).set_name("w")
        total = ctx.from_numpy(np.zeros((8, 64)), gg.F32).set_name("total")
        y = x
        for _ in range(3):
            y = gg.rms_norm(gg.silu(gg.mul_mat(w, y)), 1e-5) + y
        return gg.Graph().build_forward_expand(gg.cpy(total + y, total).set_name("stored")), total


def test_the_page_of_an_own_graph(tmp_path: Path) -> None:
    g, total = own_graph()
    out, x = tmp_path / "own.html", np.random.default_rng(1).normal(size=(8, 64))
    gg.inspect(g, out, {"x": x})
    once = total.numpy().copy()
    data = data_of(out.read_text(encoding="utf-8"))
    assert data["title"] == "own" and all("values" in t for t in data["tensors"])
    other, total = own_graph()
    gg.compute(other, {"x": x})
    assert np.allclose(once, total.numpy(), atol=1e-5)  # as after one run
    gg.inspect(record(g, {"x": x}), out)
    with pytest.raises(GraphError, match="shows a Graph, or a recorded Run, not Tensor"):
        gg.inspect(total, out)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("own", [True, False])
def test_the_time_of_the_run_is_that_of_the_time_line(run: Run, own: bool) -> None:
    if own:
        run = record(own_graph()[0], {"x": np.ones((8, 64))})
    data = data_of(page(run, "times"))
    spans = [span for s in data["steps"] for span in s["spans"]]
    assert min(begin for _, begin, _ in spans) == 0
    assert max(end for *_, end in spans) == pytest.approx(data["wall"]) and data["wall"] == run.wall_ns / 1e3


def test_runs_on_two_backends_stand_one_after_another() -> None:
    g, _ = own_graph()
    scheduler = gg.Scheduler(("cpu", "ref"))
    scheduler.set_tensor_backend(g.nodes[5], "ref")
    scheduler.alloc(g)
    next(t for t in g.leafs if t.name == "x").set(np.ones((8, 64)))
    with Recorder(scheduler) as recorder:
        scheduler.compute(g)
    run = recorder.run
    steps = sorted([span for s in run.steps for span in s.spans.values()])
    assert all(end <= begin for (_, end), (begin, _) in pairwise(steps))
    assert (steps[0][0], steps[-1][1]) == (0, run.wall_ns)


def test_on_the_command_line(shared: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    line = ["inspect", "-m", str(shared / "models/stories260K.gguf"), "-p", "Once upon a time", "-o", str(out)]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0 and "166 nodes, 62 leafs" in done.output
    assert out.stat().st_size < 2_000_000
    done = CliRunner().invoke(app, [*line[:-1], str(tmp_path / "no" / "where.html")])
    assert done.exit_code == 1 and isinstance(done.exception, OSError)


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    b = Browser(tmp_path_factory.mktemp("browser"))
    yield b
    b.close()


def share(pixels: Pixels, colour: tuple[int, int, int]) -> float:
    """The part of the pixels that are nearly of a colour."""
    return float((np.abs(pixels.astype(int) - colour).max(axis=-1) <= 3).mean())


def index(browser: Browser, name: str) -> int:
    found: int = browser.js(f"inspector.data.tensors.findIndex((t) => t.name == {name!r})")
    return found


def in_graph(browser: Browser, what: int | str) -> tuple[float, float]:
    """Where a tensor (or a layer) is on the screen."""
    x, y = browser.js(f"inspector.graph.where({what!r})")
    left, top = browser.js(
        "(() => { const r = document.querySelector('#graph').getBoundingClientRect(); return [r.x, r.y]; })()"
    )
    return x + left, y + top


def test_a_walk_through_the_page(browser: Browser, run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.html").write_text(page(run, "a tiny model", {"prompt": "none"}), encoding="utf-8")
    browser.open(tmp_path / "out.html")
    browser.js("inspector.theme('light')")
    folded = browser.js("inspector.graph.folded()")
    browser.settle()
    assert browser.js("document.querySelector('h1').textContent") == "a tiny model"

    # a layer opens where it is clicked, and closes again
    n = browser.js("inspector.graph.shown()")
    if not folded:
        browser.click(*browser.centre("#unfold"))
        n = browser.js("inspector.graph.shown()")
    browser.click(*in_graph(browser, "layer 0"))
    assert browser.js("inspector.graph.shown()") > n + 30
    browser.click(*in_graph(browser, "layer 0"))
    assert browser.js("inspector.graph.shown()") == n

    # search finds a node, opens its layer and shows its values
    browser.click(*browser.centre("#search"))
    browser.type("soft_max_ext-1")
    assert browser.js("[...document.querySelectorAll('#hits li')].map((li) => li.firstChild.textContent)") == [
        "kq_soft_max_ext-1"
    ]
    browser.key("Enter")
    scores = index(browser, "kq_soft_max_ext-1")
    assert browser.js("inspector.selected()") == scores
    assert browser.js("document.querySelector('aside h2').textContent") == "kq_soft_max_ext-1"
    text = browser.js("document.querySelector('aside').textContent")
    v = run.values[next(t for t in run.graph.nodes if t.name == "kq_soft_max_ext-1")]
    for part in ("in attention of", "GB/s", "GFLOPS", f"elements{v.n}", "fused away", "first rows", "head 0 of 4"):
        assert part in text.replace(",", ""), part
    assert "5 × 5 without padding" in text
    fused = "[...document.querySelectorAll('aside h3')].find((h) => h.textContent == 'fused into one step: attention')"
    names = browser.js(f"[...{fused}.nextSibling.children].map((c) => c.lastChild.textContent)")
    assert {"kq-1", "kq_soft_max_ext-1", "kqv-1"} <= set(names)
    first = browser.js("document.querySelector('aside .numbers').textContent")
    browser.js("document.querySelectorAll('.slices button')[1].click()")  # the next head
    assert "head 1 of 4" in browser.js("document.querySelector('.slices').textContent")
    assert first != browser.js("document.querySelector('aside .numbers').textContent")
    browser.key("Escape")

    # its neighbours are a click away, in the panel and in the graph
    browser.js("document.querySelector('#search').blur()")
    browser.js(f"inspector.select({scores}, true)")
    browser.js(f"document.querySelector('aside .chip[data-t=\"{index(browser, 'kq-1')}\"]').click()")
    assert browser.js("document.querySelector('aside h2').textContent") == "kq-1"
    browser.click(*in_graph(browser, scores))
    assert browser.js("inspector.selected()") == scores
    x, y = in_graph(browser, scores)
    before = browser.js("inspector.graph.scale()")
    browser.wheel(x, y, -300)
    assert browser.js("inspector.graph.scale()") > before * 1.2
    assert np.allclose(in_graph(browser, scores), (x, y), atol=60)  # what is under the pointer stays there

    # the other views
    browser.click(*browser.centre('[data-tab="memory"]'))
    inp = index(browser, "inp_embd")
    mx, my = browser.js(f"inspector.memory.where({inp})")
    left, top = browser.js(
        "(() => { const r = document.querySelector('#memory').getBoundingClientRect(); return [r.x, r.y]; })()"
    )
    browser.click(mx + left, my + top)
    assert browser.js("inspector.selected()") == inp
    browser.click(*browser.centre('[data-tab="ops"]'))
    rows = browser.js("[...document.querySelectorAll('#tab-ops tbody tr')].map((r) => r.firstChild.textContent)")
    assert {"mul_mat", "attention"} <= set(rows)
    browser.click(*browser.centre('[data-tab="nodes"]'))
    first = browser.js("document.querySelector('#tab-nodes tr[data-t]').dataset.t")
    assert browser.js(
        f"inspector.data.tensors[{first}].us == Math.max(...inspector.data.tensors.map((t) => t.us || 0))"
    )
    assert browser.errors == []


def test_what_is_to_be_seen(browser: Browser, run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.html").write_text(page(run, "a tiny model"), encoding="utf-8")
    browser.open(tmp_path / "out.html")
    browser.js("inspector.theme('light'); inspector.graph.openAll(true); inspector.show('time')")
    browser.js(f"inspector.select({index(browser, 'Kcur-0')}, true); inspector.select(-1)")
    light = browser.screenshot(tmp_path / "light.png")
    graph, charts = light[35:315, :520], light[340:430, 40:]
    assert share(graph, (0xDB, 0xE8, 0xFB)) > 0.002 and share(graph, (0xFB, 0xE4, 0xD8)) > 0.002  # nodes, weights
    assert share(graph, (0xF5, 0xF3, 0xFB)) > 0.05 and share(graph, (0xF7, 0xF7, 0xF5)) > 0.3  # open layers, paper
    assert 0.02 < 1 - share(charts, (255, 255, 255)) < 0.98  # bars, and nothing between them
    browser.js("inspector.theme('dark')")
    dark = browser.screenshot(tmp_path / "dark.png")
    assert dark.mean() < 60 < 200 < light.mean()
    assert share(dark[35:315, :520], (0x1D, 0x34, 0x52)) > 0.002
    browser.js("inspector.select(inspector.data.tensors.findIndex((t) => t.name == 'l_out-0'), true)")
    chosen = browser.screenshot(tmp_path / "chosen.png")
    assert share(chosen[35:315, :520], (0x6E, 0xA8, 0xFF)) > 0.0005  # its border and edges
    assert share(chosen[35:315, 530:], (0x6E, 0xA8, 0xFF)) > 0.002  # its histogram
    assert browser.errors == []


def test_a_thousand_nodes_are_drawn(browser: Browser, tmp_path: Path) -> None:
    model = load_model(write_gguf(tmp_path / "deep.gguf", KV | {"llama.block_count": 32}))
    (tmp_path / "out.html").write_text(page(record_model(model, IDS), "deep"), encoding="utf-8")
    browser.open(tmp_path / "out.html")
    assert browser.js("inspector.data.tensors.filter((t) => t.op != 'none').length") == 1030
    assert browser.js("inspector.graph.shown()") < 20  # equal layers are one box, and all can be read
    browser.settle()
    assert browser.js("inspector.graph.scale()") >= 0.8 and browser.js("inspector.graph.smallest()") >= 9
    browser.click(*in_graph(browser, "fold 0"))
    assert browser.js("inspector.graph.shown()") < 20 + 31
    browser.click(*in_graph(browser, "fold 0"))
    browser.click(*browser.centre("#unfold"))
    tensors = browser.js("inspector.graph.items().map((b) => b.tensor ?? -1)")
    kinds = browser.js("inspector.data.tensors.map((t) => t.op)")
    nodes = [i for i in tensors if i >= 0 and kinds[i] != "none"]
    assert len(nodes) == len(set(nodes)) == 1030 and set(range(len(kinds))) <= set(tensors)
    assert tensors.count(-1) == 32 + 1 and tensors.count(index(browser, "KQ_mask")) == 32  # one in each layer
    assert browser.js("(() => { for (let i = 0; i < 5; i++) inspector.graph.paint(); return true; })()")
    assert browser.js("inspector.graph.smallest()") >= 9  # what cannot be read is not written
    assert share(browser.screenshot(tmp_path / "all.png")[35:315, :520], (0xF7, 0xF7, 0xF5)) < 0.999
    assert browser.errors == []


def test_lines_end_at_boxes_and_go_around_others(browser: Browser, run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.html").write_text(page(run, "a tiny model"), encoding="utf-8")
    browser.open(tmp_path / "out.html")
    browser.js("inspector.graph.openAll(true)")
    items = browser.js("inspector.graph.items().map((b) => [b.x, b.y, b.w, b.h, b.tensor ?? -1, !!b.inside])")
    boxes = [b for b in items if not b[-1]]
    lines = browser.js(
        "inspector.graph.edges().map((e) => [[e.from, ...e.points, e.to].map((p) => p.slice(0, 2)), e.arrow, e.role, "
        "e.links])"
    )
    for points, arrow, *_ in lines:
        (x, y), ends = points[-1], [b for b in boxes if abs(points[-1][0] - b[0]) <= b[2] / 2]
        assert not arrow or any(abs(y - (by - h / 2)) < 0.01 for _, by, _, h, *_ in ends), (x, y)
        for (x0, y0), (x1, y1) in pairwise(points):
            for bx, by, w, h, *_ in boxes if x0 == x1 else ():
                above, below = sorted((y0, y1))
                assert abs(x0 - bx) >= w / 2 or below <= by - h / 2 + 1 or above >= by + h / 2 - 1
    scores, mask = index(browser, "kq_soft_max_ext-0"), index(browser, "KQ_mask")
    into = {role for *_, role, links in lines if any(link["i"] == scores for link in links)}
    assert into == {"a", "mask"}
    assert [b[4] for b in boxes].count(mask) == 2  # drawn in each of the two layers, not above them
    assert browser.errors == []


def test_on_a_narrow_screen(browser: Browser, run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.html").write_text(page(run, "a tiny model", {"prompt": "none"}), encoding="utf-8")
    size = {"width": 900, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    browser.send("Emulation.setDeviceMetricsOverride", **size)
    try:
        browser.open(tmp_path / "out.html")
        browser.settle()
        assert browser.js("document.documentElement.scrollWidth") <= 900
        assert browser.js("document.querySelector('h1').scrollWidth <= document.querySelector('h1').clientWidth")
        assert browser.js("inspector.graph.smallest()") >= 9 and browser.js("inspector.graph.scale()") >= 0.34
        assert browser.js("getComputedStyle(document.querySelector('aside')).display") == "none"
        browser.js(f"inspector.select({index(browser, 'kq-1')}, true)")  # the panel stands over the graph
        left, right = browser.js(
            "['graph', 'details'].map((id) => document.getElementById(id).getBoundingClientRect().right)"
        )
        assert left == right == 900
        # an open layer is all to be seen, with a name in each box, and opening it moves nothing out of sight
        browser.js("inspector.select(-1); inspector.graph.openAll(false); inspector.graph.fit(0.8)")
        browser.click(*in_graph(browser, "layer 1"))
        (x0, y0), (x1, y1) = browser.js(
            "(() => { const g = inspector.graph, b = g.items().find((b) => b.key === 'layer 1'), v = g.place; "
            "return [v(b.x - b.w / 2, b.y - b.h / 2), v(b.x + b.w / 2, b.y + b.h / 2)]; })()"
        )
        width, height = browser.js(
            "(() => { const r = document.getElementById('graph').getBoundingClientRect(); "
            "return [r.width, r.height]; })()"
        )
        assert 0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height
        assert browser.js("inspector.graph.scale()") >= 0.34 and browser.js("inspector.graph.smallest()") >= 9
    finally:
        browser.send("Emulation.setDeviceMetricsOverride", **{**size, "width": 1400, "height": 900})
    assert browser.errors == []
