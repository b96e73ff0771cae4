"""The page of a run: what it holds, and a walk through it in a headless Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pyggml.tools.cli import app

import pyggml as gg
from pyggml.inspect.page import page
from pyggml.inspect.record import Run, record, record_model
from pyggml.llm.model import load_model

from ..tiny_model import KV, write_gguf
from .browser import Browser, Pixels

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


def in_graph(browser: Browser, what: int) -> tuple[float, float]:
    """Where a tensor (or layer -1 - il) is on the screen."""
    x, y = browser.js(f"inspector.graph.where({what})")
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
        browser.click(*browser.centre("#unfold"))
        n = browser.js("inspector.graph.shown()")
    browser.click(*in_graph(browser, -1))
    assert browser.js("inspector.graph.shown()") > n + 30
    browser.click(*in_graph(browser, -1))
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
    for part in ("in attention of", "GB/s", "GFLOPS", f"elements{v.n}", "fused away", "first rows"):
        assert part in text.replace(",", ""), part
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
    browser.js("[...document.querySelectorAll('#tab-nodes th')].find((th) => th.textContent == 'time').click()")
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
    folded = browser.js("inspector.graph.shown()")
    assert folded < 60
    browser.click(*browser.centre("#unfold"))
    assert browser.js("inspector.graph.shown()") == 1030 + 359 + 32
    assert browser.js("(() => { for (let i = 0; i < 5; i++) inspector.graph.paint(); return true; })()")
    assert share(browser.screenshot(tmp_path / "all.png")[35:315, :520], (0xF7, 0xF7, 0xF5)) < 0.999
    assert browser.errors == []
