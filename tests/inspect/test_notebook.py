"""What notebooks show, as fragments that a browser can parse."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import pyggml as gg
from pyggml.llm.model import load_model

from ..browser import Browser


def parsed(fragment: str | None) -> ET.Element:
    """It is well-formed, and no name in it is markup."""
    assert fragment is not None
    return ET.fromstring(fragment)


def text_of(t: gg.Tensor) -> str:
    return "".join(parsed(t._repr_html_()).itertext())


def test_a_tensor_with_values() -> None:
    with gg.Context() as ctx:
        a = np.linspace(-1, 3, 24, dtype=np.float32).reshape(4, 6)
        a[0, 0] = np.nan
        t = ctx.from_numpy(a, name="<w & x>")
    text = text_of(t)
    for part in ("<w & x>", "[6, 4, 1, 1], [4, 24, 96, 96]", "(4, 6), (24, 4)", "F32, 96 bytes", "max 3", "1 NaN"):
        assert part in text, text
    root = parsed(t._repr_html_())
    assert len(root.findall(".//rect")) == 32
    image = re.search(r"data:image/png;base64,([^\"]+)", t._repr_html_() or "")
    assert image is not None and base64.b64decode(image[1])[:8] == b"\x89PNG\r\n\x1a\n"
    assert "not contiguous" in text_of(gg.permute(t, 1, 0, 2, 3))


def test_tensors_without_values_say_why() -> None:
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, 4, "x")
        y = gg.sqrt(gg.sqr(x).set_name("middle"))
        assert "x: F32 ne [4, 1, 1, 1] has no memory" in text_of(x) and "has no memory" in text_of(y)
        g = gg.Graph().build_forward_expand(gg.sqr(y))
        gg.compute(g, {x: np.ones(4)})
        assert "was recycled" in text_of(g.nodes[0]) and "mean 1" in text_of(g.nodes[-1])
    for dtype in gg.Q4_K, gg.BF16, gg.I8, gg.F64:
        assert f"{dtype.name}, " in text_of(ctx.from_numpy(np.ones((2, 256)), dtype))


def test_a_plan_is_a_map(tiny: Path) -> None:
    ctx = load_model(tiny).new_context(64)
    graph = ctx.build_graph(3)
    _, plan = ctx.scheduler.plan(graph)
    root = parsed(plan._repr_html_())
    titles = [e.text or "" for e in root.iter("title")]
    assert len(titles) == len(plan.offsets) and any(t.startswith("l_out-0 (add): 384 bytes at ") for t in titles)
    for box in root.iter("rect"):
        assert float(box.get("x", "")) + float(box.get("width", "")) <= 960
        assert float(box.get("y", "")) + float(box.get("height", "")) <= 200.5
    assert parsed(gg.Scheduler(("cpu",)).plan(gg.Graph())[1]._repr_html_()) is not None


@pytest.mark.parametrize("flash_attn", [False, True])
def test_caches_and_graphs(tiny: Path, flash_attn: bool) -> None:
    ctx = load_model(tiny).new_context(64, flash_attn=flash_attn)
    ctx.decode([5, 6, 7])
    assert "3 of " in (getattr(ctx.memory, "_repr_html_")() or "")  # noqa: B009
    svg = ctx.build_graph(1)._repr_svg_()
    assert svg is None or "result_output" in svg


def test_the_pictures_are_drawn(tiny: Path, tmp_path: Path) -> None:
    browser = Browser(tmp_path / "browser")
    try:
        ctx = load_model(tiny).new_context(64)
        ctx.decode([5, 6, 7])
        _, plan = ctx.scheduler.plan(ctx.build_graph(3))
        weight = ctx.model.tensors["blk.0.ffn_up.weight"]
        body = f"{weight._repr_html_()}<hr>{plan._repr_html_()}"
        (tmp_path / "n.html").write_text(f"<!doctype html><meta charset=utf-8><body>{body}", encoding="utf-8")
        browser.open(tmp_path / "n.html")
        assert browser.js(
            "document.querySelector('img').decode().then(() => document.querySelector('img').naturalWidth)"
        )
        pixels = browser.screenshot(tmp_path / "n.png").reshape(-1, 3)
        assert len(np.unique(pixels, axis=0)) > 50 and browser.errors == []
    finally:
        browser.close()
