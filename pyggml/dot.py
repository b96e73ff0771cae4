"""Draws a graph: DOT text, the same byte for byte for the same graph, and pictures where `dot` is installed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from os import PathLike, fspath
from pathlib import Path

import graphviz

from .errors import GraphError
from .graph import Graph
from .opdef import OPS
from .tensor import FLAG_INPUT, FLAG_OUTPUT, Tensor

_LAYER = re.compile(r"^blk\.(\d+)\.|^cache_[kv]_l(\d+)|-(\d+)(?: |$)")
_COLOURS = {
    "input": "#ffe08a",
    "weight": "#f6c6b5",
    "node": "#cfe2f3",
    "view": "#eeeeee",
    "output": "#b7e1a1",
    "outside": "white",
}


def layer_of(t: Tensor) -> int | None:
    """The layer a tensor's name tells (`Qcur-3`, `blk.3.attn_q.weight`, `cache_k_l3`), or None."""
    m = _LAYER.search(t.name)
    return int(next(g for g in m.groups() if g is not None)) if m else None


def _kind(t: Tensor) -> str:
    if t.flags & FLAG_OUTPUT:
        return "output"
    if t.op == "none":
        return "input" if t.flags & FLAG_INPUT else "weight"
    return "view" if OPS[t.op].kernel is None else "node"


def _label(t: Tensor) -> str:
    what = "" if t.op == "none" else f"{t.op}\\n"
    return f"{_escape(t.name)}\\n{what}{t.dtype.name} [{', '.join(map(str, t.ne))}]"


def _tooltip(t: Tensor) -> str:
    return "leaf" if t.op == "none" else OPS[t.op].label


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\")


def _add(into: graphviz.Digraph, ident: str, t: Tensor, kind: str) -> None:
    style = "filled,dashed" if kind in ("view", "outside") else "filled"
    shape = "ellipse" if t.op == "none" else "box"
    into.node(ident, _label(t), shape=shape, style=style, fillcolor=_COLOURS[kind], tooltip=_tooltip(t))


def _in_layers(t: Tensor, layers: tuple[int, int] | None) -> bool:
    if layers is None:
        return True
    il = layer_of(t)
    return il is not None and layers[0] <= il < layers[1]


def to_digraph(graph: Graph, layers: tuple[int, int] | None = None) -> graphviz.Digraph:
    """The drawing of `graph` as a graphviz.Digraph; with `layers` (first, end) only those, and what they touch.

    Nodes of one layer stand in one cluster. Raises GraphError where no tensor belongs to `layers`.
    """
    shown = [t for t in (*graph.leafs, *graph.nodes) if _in_layers(t, layers)]
    if layers is not None and not shown:
        raise GraphError(f"no tensor of this graph belongs to layers {layers[0]}:{layers[1]}")
    ids = {t: f"leaf{i}" for i, t in enumerate(graph.leafs)} | {t: f"node{i}" for i, t in enumerate(graph.nodes)}
    dot = graphviz.Digraph("cgraph", graph_attr={"rankdir": "TB", "newrank": "true"})
    dot.attr("node", fontname="Helvetica", fontsize="10")
    dot.attr("edge", fontname="Helvetica", fontsize="8", arrowsize="0.6")
    for il, members in _by_layer(shown):
        if il is None:
            for t in members:
                _add(dot, ids[t], t, _kind(t))
            continue
        with dot.subgraph(name=f"cluster_{il}") as cluster:  # pyright: ignore[reportOptionalContextManager]
            cluster.attr(label=f"layer {il}", color="#999999", fontname="Helvetica")
            for t in members:
                _add(cluster, ids[t], t, _kind(t))
    inside = set(shown)
    outside: set[Tensor] = set()
    for t in shown:
        for i, s in enumerate(t.src):
            if s is None:
                continue
            if s not in inside and s not in outside:
                outside.add(s)
                _add(dot, ids[s], s, "outside")
            role = OPS[t.op].srcs[i].rstrip("?") if len(t.src) > 1 else ""
            dot.edge(ids[s], ids[t], label=role, style="dashed" if OPS[t.op].kernel is None else "solid")
    return dot


def _by_layer(tensors: Iterable[Tensor]) -> list[tuple[int | None, list[Tensor]]]:
    groups: dict[int | None, list[Tensor]] = {None: []}
    for t in tensors:
        groups.setdefault(layer_of(t), []).append(t)
    return list(groups.items())


def dump_dot(graph: Graph, path: str | PathLike[str] | None = None, layers: tuple[int, int] | None = None) -> str:
    """The DOT text of `graph` (see `to_digraph`), also written to `path` where one is given."""
    text = to_digraph(graph, layers).source
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def render(graph: Graph, path: str | PathLike[str], layers: tuple[int, int] | None = None) -> None:
    """Draw `graph` into an .svg, .png or .pdf file. Raises GraphError where the `dot` program is missing or fails."""
    out = Path(fspath(path))
    try:
        out.write_bytes(to_digraph(graph, layers).pipe(format=out.suffix.lstrip(".") or "svg"))
    except graphviz.ExecutableNotFound:
        raise GraphError("drawing needs Graphviz's `dot` program; dump_dot() writes the text without it") from None
    except (ValueError, subprocess.CalledProcessError) as e:
        raise GraphError(f"dot could not write {out}: {e}") from None


def _svg(graph: Graph) -> str | None:
    try:
        return to_digraph(graph).pipe(format="svg", encoding="utf-8")
    except graphviz.ExecutableNotFound:
        return None


Graph.svg = _svg
