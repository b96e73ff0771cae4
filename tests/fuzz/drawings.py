"""What is written: DOT and HTML of graphs whose names, texts and values are anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache

import numpy as np

import pyggml as gg
from pyggml.inspect.dot import dump_dot
from pyggml.inspect.page import page
from pyggml.inspect.record import Run, record

from .harness import harness

_WORD = re.compile(r"=[\w.+-]+")  # a value that needs no quotes
_DOT = {
    *("digraph", "subgraph", "cgraph", "cluster_", "cluster_scope", "node", "leaf", "again", "graph", "edge", "label"),
    *("tooltip", "shape", "style", "fillcolor", "color", "fontname", "fontsize", "arrowsize", "penwidth", "newrank"),
    *("rankdir", "constraint", "peripheries", "weight"),
}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def _names() -> Iterable[bytes]:
    yield b"\0blk.0.attn_q.weight\nl_out-0\n</script><b>\nl_out-1"
    yield b'\1a"b\\\nx -> y\nnode [label="z"]; }\nl-2\xff'
    yield b"\0<b>/x\n<i>/y/z\n/\na/b\na/b"
    yield "\2<TABLE>&amp;\n\u2028\n\\N\\G\\l\n{a|b}".encode()


def _graph(data: bytes) -> tuple[gg.Graph, dict[gg.Tensor, np.ndarray]]:
    names = [line.decode("utf-8", "replace") for line in data[1:].split(b"\n")] * 5
    ctx = gg.Context()
    a, b = ctx.new_tensor(gg.F32, (4, 3)), ctx.new_tensor(gg.F32, (4, 3))
    nodes = [a, b, gg.add(a, b)]
    nodes.append(gg.soft_max(nodes[2]) if data[:1] < b"\2" else gg.relu(nodes[2]))
    nodes.append(gg.mul_mat(nodes[3], b))
    for t, name in zip(nodes, names, strict=False):
        t.set_name(name)
    values = np.resize(np.frombuffer(data[: len(data) // 4 * 4] or bytes(4), "<f4"), (3, 4))
    return gg.Graph().build_forward_expand(nodes[-1]), {a: values, b: values}


@harness(
    "pyggml.inspect.dot",
    "pyggml.inspect.layers",
    "pyggml.inspect.picture",
    seeds=_names,
    words='" \\ < > { } | ; -> blk. -0 \\n <b>',
)
def dot(data: bytes) -> None:
    """Names cannot end their strings, or the statement around them."""
    graph, _ = _graph(data)
    text = dump_dot(graph, fold=data[:1] == b"\1")
    outside = _WORD.sub("", _STRING.sub("", text)).replace("->", "")
    assert not set(outside) & set('"<>&|\\'), text
    assert set(re.findall(r"[a-z_]+", outside)) <= _DOT, text


@cache
def _run() -> Run:
    graph, inputs = _graph(b"\0a\nb\nc\nd\ne")
    return record(graph, inputs, 1)


@harness(
    "pyggml.inspect.page",
    "pyggml.inspect.record",
    "pyggml.inspect.values",
    seeds=_names,
    words="</script> <!-- @@DATA@@ ]]> &lt; NaN \u2028",
)
def html(data: bytes) -> None:
    """The data of a page are the JSON that was put in, and nothing else is a tag."""
    graph, inputs = _graph(data)
    title = data.decode("utf-8", "replace")
    text = page(record(graph, inputs, 1), title, {"prompt": title, title: "x"})
    start = text.index('<script id="data" type="application/json">')
    found = re.compile(r'<script id="data" type="application/json">(.*?)</script>', re.DOTALL).match(text, start)
    assert found is not None and json.loads(found[1])["about"]["prompt"] in (title, "x")
    tags = len(re.findall("<script", text)), len(re.findall("</script", text))
    assert tags == _tags(), tags


@cache
def _tags() -> tuple[int, int]:
    text = page(_run(), "a")
    return len(re.findall("<script", text)), len(re.findall("</script", text))
