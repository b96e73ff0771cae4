"""Draws a graph: DOT text, the same byte for byte for the same graph, and pictures where `dot` is installed."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path

import graphviz

from ..buffers.overlap import may_overlap
from ..errors import GraphError
from ..graph import Graph
from ..opdef import OPS
from ..sched import Scheduler
from ..tensor import FLAG_INPUT, FLAG_OUTPUT, Tensor

_LAYER = re.compile(r"^blk\.(\d+)\.|^cache_[a-z]+_l(\d+)")
NODE_OF_LAYER = re.compile(r"-(\d+)(?: |$)")
_SHORT = 32  # characters of parameters that stand in a label; the tooltip has them all
_AT_A_GLANCE = 200  # tensors that a notebook draws
_COLOURS = {
    "input": "#ffe08a",
    "weight": "#f6c6b5",
    "node": "#cfe2f3",
    "view": "#eeeeee",
    "output": "#b7e1a1",
    "outside": "white",
}


def layers_of(graph: Graph) -> dict[Tensor, int]:
    """The layers that the names of a graph's tensors tell: `blk.3.attn_q.weight`, `cache_k_l3`; and `Qcur-3`, where
    such weights or caches show that it is a model's."""
    found = {t: _LAYER.search(t.name) for t in graph.leafs}
    layers = {t: int(m[1] or m[2]) for t, m in found.items() if m}
    if layers:
        named = {t: NODE_OF_LAYER.search(t.name) for t in (*graph.leafs, *graph.nodes) if t not in layers}
        layers |= {t: int(m[1]) for t, m in named.items() if m}
    return layers


def _kind(t: Tensor) -> str:
    if t.flags & FLAG_OUTPUT:
        return "output"
    if t.op == "none":
        return "input" if t.flags & FLAG_INPUT else "weight"
    return "view" if OPS[t.op].kernel is None else "node"


def _is_store(t: Tensor) -> bool:
    """Whether `t` is written over memory of another tensor."""
    return t.view_src is not None and OPS[t.op].kernel is not None


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return getattr(value, "__name__", "a function") if callable(value) else str(value)


def _parameters(t: Tensor) -> str:
    """`s=0.5 b=0`: all but the shape, which stands in the label anyhow."""
    return " ".join(f"{k}={_text(v)}" for k, v in t.op_params.items() if not re.fullmatch(r"ne\d?", k))


def _label(t: Tensor, backend: str) -> str:
    lines = [t.name]
    if t.op != "none":
        given = _parameters(t)
        lines.append(f"{t.op} {given}" if 0 < len(given) <= _SHORT else t.op)
    if _is_store(t):
        lines.append(f"in place: {t.root.name}")
    lines.append(f"{t.dtype.name} [{', '.join(map(str, t.ne))}]")
    return _escape("\n".join([*lines, f"on {backend}"] if backend else lines)).replace("\n", "\\n")


def _tooltip(t: Tensor) -> str:
    parts = ["leaf"] if t.op == "none" else [OPS[t.op].label, _parameters(t)]
    if t.view_src is not None:
        parts.append(f"at byte {t.view_offs} of {t.view_src.name}")
    return _escape("; ".join(part for part in parts if part))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\")


def _add(into: graphviz.Digraph, ident: str, t: Tensor, kind: str, backend: str = "") -> None:
    style = "filled,dashed" if kind in ("view", "outside") else "filled"
    shape = "ellipse" if t.op == "none" else "box"
    twice = {"peripheries": "2"} if _is_store(t) else {}
    fill = _COLOURS[kind]
    into.node(ident, _label(t, backend), shape=shape, style=style, fillcolor=fill, tooltip=_tooltip(t), **twice)


def to_digraph(
    graph: Graph, layers: tuple[int, int] | None = None, scheduler: Scheduler | None = None
) -> graphviz.Digraph:
    """The drawing of `graph` as a graphviz.Digraph; with `layers` (first, end) only those, and what they touch; with a
    `scheduler` the backend of each node.

    Nodes of one layer of a model stand in one cluster. Nodes that write over memory of others have two borders; a
    dotted edge leads from such a store to what reads the memory later. Raises GraphError where no tensor belongs to
    `layers`.
    """
    if not isinstance(graph, Graph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"only a Graph can be drawn, not {type(graph).__name__}")
    if layers is not None and not (isinstance(layers, Sequence) and [*map(type, layers)] == [int, int]):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"layers must be two whole numbers (first, end), not {layers!r}")
    known = layers_of(graph)
    backends = {} if scheduler is None else scheduler.assign(graph)
    shown = [t for t in (*graph.leafs, *graph.nodes) if layers is None or layers[0] <= known.get(t, -1) < layers[1]]
    if layers is not None and not shown:
        raise GraphError(f"no tensor of this graph belongs to layers {layers[0]}:{layers[1]}")
    ids = {t: f"leaf{i}" for i, t in enumerate(graph.leafs)} | {t: f"node{i}" for i, t in enumerate(graph.nodes)}
    dot = _empty()
    for il, members in _by_layer(shown, known):
        if il is None:
            for t in members:
                _add(dot, ids[t], t, _kind(t), backends.get(t, ""))
            continue
        with dot.subgraph(name=f"cluster_{il}") as cluster:  # pyright: ignore[reportOptionalContextManager]
            cluster.attr(label=f"layer {il}", color="#999999", fontname="Helvetica")
            for t in members:
                _add(cluster, ids[t], t, _kind(t), backends.get(t, ""))
    inside = set(shown)
    outside: set[Tensor] = set()
    for t in shown:
        for i, s in enumerate(t.src):
            if s is None:
                continue
            if s not in inside and s not in outside:
                outside.add(s)
                _add(dot, ids[s], s, "outside")
            role = OPS[t.op].role(i) if len(t.src) > 1 else ""
            dot.edge(ids[s], ids[t], label=role, style="dashed" if OPS[t.op].kernel is None else "solid")
    for store, reader in _read_later(graph):
        if store in inside and reader in inside:
            dot.edge(ids[store], ids[reader], style="dotted", tooltip=f"stored in {_escape(store.root.name)}")
    return dot


def _empty() -> graphviz.Digraph:
    dot = graphviz.Digraph("cgraph", graph_attr={"rankdir": "TB", "newrank": "true"})
    dot.attr("node", fontname="Helvetica", fontsize="10")
    dot.attr("edge", fontname="Helvetica", fontsize="8", arrowsize="0.6")
    return dot


def _by_layer(tensors: Iterable[Tensor], known: Mapping[Tensor, int]) -> list[tuple[int | None, list[Tensor]]]:
    groups: dict[int | None, list[Tensor]] = {None: []}
    for t in tensors:
        groups.setdefault(known.get(t), []).append(t)
    return list(groups.items())


def _read_later(graph: Graph) -> list[tuple[Tensor, Tensor]]:
    """Each store, and the first view of (or else the node that reads) the same bytes later without the store among its
    sources."""
    stores: dict[Tensor, list[Tensor]] = {}
    edges: dict[tuple[Tensor, Tensor], None] = {}
    for t in graph.nodes:
        for s in t.src if OPS[t.op].kernel is not None else ():
            if s is None or s.root not in stores:
                continue
            seen = {s}  # what `s` is a view of, node by node
            reader = t if s.op == "none" else s
            while s.view_src is not None and not _is_store(s) and s.src[0] is not None:
                reader, s = s, s.src[0]
                seen.add(s)
            for store in stores[t.root if s.root not in stores else s.root]:
                if store not in seen and store is not reader and may_overlap(store, reader if reader is not t else s):
                    edges[store, reader] = None
        if _is_store(t):
            stores.setdefault(t.root, []).append(t)
    return list(edges)


def _summary(graph: Graph) -> graphviz.Digraph:
    """What a notebook shows of a graph that is too large for a glance: how often it has which op."""
    lines = [f"{graph.n_nodes} nodes, {graph.n_leafs} leafs"]
    layers = set(layers_of(graph).values())
    lines += [f"{len(layers)} layers: dump_dot(g, path, layers=(0, 1)) draws the first"] if layers else []
    lines += [f"{op} x {n}" for op, n in Counter(t.op for t in graph.nodes).most_common()]
    lines += [f"{what}: {t.describe()}" for what, t in (("first", graph.nodes[0]), ("last", graph.nodes[-1]))]
    lines.append("render(g, path) draws them all")
    dot = _empty()
    dot.node("graph", "".join(f"{_escape(line)}\\l" for line in lines), shape="box")
    return dot


def dump_dot(
    graph: Graph,
    path: str | PathLike[str] | None = None,
    layers: tuple[int, int] | None = None,
    scheduler: Scheduler | None = None,
) -> str:
    """The DOT text of `graph` (see `to_digraph`), also written to `path` where one is given.

    Raises GraphError where that file cannot be written.
    """
    text = to_digraph(graph, layers, scheduler).source
    if path is not None:
        _write(path, text.encode())
    return text


def _path(path: str | PathLike[str]) -> Path:
    if not isinstance(path, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"a drawing is written to a path, not {path!r}")
    return Path(path)


def _write(path: str | PathLike[str], data: bytes) -> None:
    try:
        _path(path).write_bytes(data)
    except (OSError, ValueError) as e:  # ValueError: a name with a null byte
        raise GraphError(f"cannot write {path}: {e}") from None


def render(graph: Graph, path: str | PathLike[str], layers: tuple[int, int] | None = None) -> None:
    """Draw `graph` into an .svg, .png or .pdf file.

    Raises GraphError where the `dot` program is missing or fails, or the file cannot be written.
    """
    out = _path(path)
    try:
        drawn = to_digraph(graph, layers).pipe(format=out.suffix.lstrip(".") or "svg")
    except graphviz.ExecutableNotFound:
        raise GraphError("drawing needs Graphviz's `dot` program; dump_dot() writes the text without it") from None
    except (ValueError, subprocess.CalledProcessError) as e:
        raise GraphError(f"dot could not draw {out}: {e}") from None
    _write(out, drawn)


def _svg(graph: Graph) -> str | None:
    try:
        small = graph.n_nodes + graph.n_leafs <= _AT_A_GLANCE
        return (to_digraph(graph) if small else _summary(graph)).pipe(format="svg", encoding="utf-8")
    except graphviz.ExecutableNotFound:
        return None


Graph.svg = _svg
