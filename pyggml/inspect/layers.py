"""The layer of each tensor of a graph: by its name, or by the tensors around it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from ..graph import Graph
from ..tensor import Tensor

_NODE = re.compile(r"-(\d+)(?: |$)")  # Qcur-3, Qcur-3 (reshaped)
_LEAF = re.compile(r"(?:^|\.)blk\.(\d+)\.|^cache_[a-z]+_l(\d+)")


def layer_of_leaf(name: str) -> int | None:
    """The layer of a weight or a cache of this name: `blk.3.attn_q.weight`, `cache_k_l3`."""
    found = _LEAF.search(name)
    return int(found[1] or found[2]) if found else None


def layer_of_node(name: str) -> int | None:
    """The layer of a model's node of this name: `Qcur-3`."""
    found = _NODE.search(name)
    return int(found[1]) if found else None


def layers_of(graph: Graph) -> dict[Tensor, int]:
    """The layer of each tensor that belongs to one; empty when no leaf of the graph has the name of a layer's weight or
    cache.

    A node whose name has no layer belongs to the layer whose weights it reads, otherwise to the layer around it. The
    border between two layers is the last place where the fewest tensors are alive: between blocks with a residual,
    that is the place where only the residual is. What depends on no layer and is read in several (a mask that is
    converted once) belongs to none.
    """
    named = {t: layer_of_leaf(t.name) for t in graph.leafs}
    layers = {t: il for t, il in named.items() if il is not None}
    if not layers:
        return {}
    for t in (*graph.leafs, *graph.nodes):
        if t not in layers and (il := layer_of_node(t.name)) is not None:
            layers[t] = il
    known: list[tuple[int, int]] = []  # the nodes whose layer is certain: their place in the graph, and their layer
    for i, t in enumerate(graph.nodes):
        il = layers.get(t)
        if il is None:
            il = max((layers[s] for s in t.src if s is not None and s.op == "none" and s in layers), default=None)
        if il is not None:
            known.append((i, il))
    around = _spread(known, _alive(graph, layers), graph.n_nodes)
    shared = _shared(graph, layers, around)
    return layers | {t: il for t, il in zip(graph.nodes, around, strict=True) if il is not None and t not in shared}


def _spread(known: Sequence[tuple[int, int]], alive: Sequence[int], n: int) -> list[int | None]:
    """The layer of each of `n` nodes, from the nodes whose layer is known. alive[i + 1]: see `_alive`."""
    around: list[int | None] = [None] * n
    if not known:
        return around

    def border(first: int, end: int) -> int:
        """The last node of `first` .. `end` - 1 after which the fewest tensors are alive; node -1 is the start."""
        return min(range(first, end), key=lambda i: (alive[i + 1], -i))

    tail: int | None = None  # how many nodes the latest layer that has ended has behind its last certain one
    begin = border(-1, known[0][0]) + 1
    for (i, il), (j, other) in pairwise(known):
        if other != il:
            end = border(i, j) + 1
            tail = end - i - 1
            around[begin:end] = [il] * (end - begin)
            begin = end
    i, il = known[-1]
    if tail is None:  # one layer: it ends at the first place where the fewest tensors are alive
        tail = min(range(n - i), key=lambda k: alive[i + k + 1])
    end = min(i + 1 + tail, n)  # the last layer ends as the one before it does
    around[begin:end] = [il] * (end - begin)
    return around


def _alive(graph: Graph, layers: Mapping[Tensor, int]) -> list[int]:
    """How many tensors are computed and will be read, before the first node and after each. Weights of layers do not
    count: they are there all the time."""
    place = {t: i for i, t in enumerate(graph.nodes, 1)}
    last: dict[Tensor, int] = {}
    for i, t in enumerate(graph.nodes, 1):
        last |= {s: i for s in t.src if s is not None and not (s.op == "none" and s in layers)}
    change = [0] * (graph.n_nodes + 2)
    for t in graph.nodes:
        last.setdefault(t, graph.n_nodes + 1)  # nothing reads a result, it stays
    for t, end in last.items():
        change[place.get(t, 0)] += 1
        change[end] -= 1
    return list(accumulate(change))


def _shared(graph: Graph, layers: Mapping[Tensor, int], around: Sequence[int | None]) -> set[Tensor]:
    """The nodes that depend on no layer and are read in several layers."""
    depends = set(layers)
    for t in graph.nodes:
        if any(s in depends for s in t.src):
            depends.add(t)
    read: dict[Tensor, set[int]] = {}  # the layers that read a node, directly or through nodes that depend on no layer
    for t, il in zip(reversed(graph.nodes), reversed(around), strict=True):
        within = read.get(t, set()) if t not in depends else {il} if il is not None else set[int]()
        for s in t.src:
            if s is not None and s not in depends:
                read.setdefault(s, set()).update(within)
    return {t for t in graph.nodes if t not in depends and len(read.get(t, ())) > 1}
