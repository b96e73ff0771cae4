"""Layers that are alike: built once in a graph, and repeated.

Most layers of a model are the same nodes over other weights. The first graph of a kind builds every layer, and
`find_twins` compares them. Later graphs build one layer of each sort and repeat it (`Graph.repeat`): a graph of another
batch size is then made, fused and lowered in half the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyggml.graph import Graph
from pyggml.tensor import Tensor


class BuiltLayer(NamedTuple):
    """The nodes of a layer in its graph, the node that the layer reads, and its result."""

    nodes: range
    inpL: Tensor
    cur: Tensor


class Twin(NamedTuple):
    """How to make a layer from one before it.

    like   the layer that is repeated
    leafs  each weight of that layer (and its part of the cache), and what takes its place; in the order of the graph
    names  the names of the nodes, "" for a node that the graph names
    """

    like: int
    leafs: dict[Tensor, Tensor]
    names: list[str]


def find_twins(graph: Graph, layers: Sequence[BuiltLayer]) -> dict[int, Twin]:
    """The layers of a graph that have the same nodes as an earlier layer and differ in the weights that they read
    only."""
    twins: dict[int, Twin] = {}
    for il in range(1, len(layers)):
        for like in range(il):
            leafs = None if like in twins else _leafs(graph, layers[like], layers[il])
            if leafs is not None:
                nodes = layers[il].nodes
                named = zip(nodes, graph.nodes[nodes.start : nodes.stop], strict=True)
                twins[il] = Twin(like, leafs, ["" if t.name == f"node_{i}" else t.name for i, t in named])
                break
    return twins


def _leafs(graph: Graph, a: BuiltLayer, b: BuiltLayer) -> dict[Tensor, Tensor] | None:
    """For each leaf that layer `a` reads, the leaf that layer `b` reads instead. None when the layers differ in more
    than that."""
    ours, theirs = (graph.nodes[r.start : r.stop] for r in (a.nodes, b.nodes))
    if len(ours) != len(theirs):
        return None
    leafs: dict[Tensor, Tensor] = {}
    to = {**dict(zip(ours, theirs, strict=True)), a.inpL: b.inpL}
    if to[a.cur] is not b.cur:
        return None
    for x, y in zip(ours, theirs, strict=True):
        same = _same_layout(x, y) and x.op == y.op and x.op_params == y.op_params and x.view_offs == y.view_offs
        if not same or len(x.src) != len(y.src):
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
    """Whether `s` and `t` are leafs of one layout that outlive the graph of `reader`: weights, or parts of a cache."""
    both = s.op == t.op == "none" and s.view_src is t.view_src is None
    return both and _same_layout(s, t) and s.ctx is not reader.ctx and t.ctx is not reader.ctx
