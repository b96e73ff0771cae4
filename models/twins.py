"""Layers that are alike in a graph: found in the first one of its kind, and then built once in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyggml.graph import Graph
from pyggml.tensor import Tensor


class BuiltLayer(NamedTuple):
    """What a graph has of a layer: its nodes, and what it reads and gives."""

    nodes: range
    inpL: Tensor
    cur: Tensor


class Twin(NamedTuple):
    """The layer that another one is like, and what it has for the weights (and the part of the cache) of that, in the
    order of the graph."""

    like: int
    leafs: dict[Tensor, Tensor]


def renamed(il: int, to: int) -> tuple[str, str]:
    """What the names of nodes of layer `il` have of it, and those of another layer instead."""
    return f"-{il}", f"-{to}"


def find_twins(graph: Graph, layers: Sequence[BuiltLayer]) -> dict[int, Twin]:
    """The layers of a graph that have the same nodes as one before them, but for the weights that they read."""
    twins: dict[int, Twin] = {}
    for il in range(1, len(layers)):
        for like in range(il):
            leafs = None if like in twins else _leafs(graph, layers, like, il)
            if leafs is not None:
                twins[il] = Twin(like, leafs)
                break
    return twins


def _leafs(graph: Graph, layers: Sequence[BuiltLayer], like: int, il: int) -> dict[Tensor, Tensor] | None:
    """What layer `il` has for the leafs of layer `like`, where all else of them is the same; else None."""
    a, b = layers[like], layers[il]
    ours, theirs = (graph.nodes[r.start : r.stop] for r in (a.nodes, b.nodes))
    if len(ours) != len(theirs):
        return None
    leafs: dict[Tensor, Tensor] = {}
    to = {**dict(zip(ours, theirs, strict=True)), a.inpL: b.inpL}
    if to[a.cur] is not b.cur:
        return None
    for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        unnamed = (x.name, y.name) == (f"node_{a.nodes.start + i}", f"node_{b.nodes.start + i}")
        same = _same_layout(x, y) and x.op == y.op and x.op_params == y.op_params and x.view_offs == y.view_offs
        if not (same and len(x.src) == len(y.src) and (unnamed or x.name.replace(*renamed(like, il)) == y.name)):
            return None
        for s, t in (*zip(x.src, y.src, strict=True), (x.view_src, y.view_src)):
            if s is None or t is None:
                if s is not t:
                    return None
            elif (known := to.get(s)) is None:
                to[s] = t
                if s is not t:
                    if not _leaf_of_model(s, t, x):
                        return None
                    leafs[s] = t
            elif known is not t:
                return None
    return {s: leafs[s] for s in graph.leafs if s in leafs}


def _same_layout(x: Tensor, y: Tensor) -> bool:
    return (x.dtype, x.ne, x.nb, x.rank, x.flags) == (y.dtype, y.ne, y.nb, y.rank, y.flags)


def _leaf_of_model(s: Tensor, t: Tensor, reader: Tensor) -> bool:
    """Whether `s` and `t` are leafs that differ in their values alone, and that other graphs read, too."""
    both = s.op == t.op == "none" and s.view_src is t.view_src is None
    return both and _same_layout(s, t) and s.ctx is not reader.ctx and t.ctx is not reader.ctx
