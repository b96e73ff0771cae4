"""The layer of each tensor of a graph: by its name or scope, or by the tensors around it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..graph import Graph
from ..scope import scopes_of
from ..tensor import FLAG_INPUT, Tensor

_NODE = re.compile(r"-(\d+)(?: |$)")  # Qcur-3, Qcur-3 (reshaped)
_WORDS = r"(?:blk|block|blocks|layer|layers|h)"  # GGUF's, and those of Hugging Face
_LEAF = re.compile(rf"(?:^|\.){_WORDS}\.(\d+)\.|^cache_[a-z]+_l(\d+)")
_COUNTED = re.compile(r"(.*?)[ ._-]?(\d+)")  # layer 3, blk.3, conv2
_MODEL = re.compile(rf"{_WORDS}?")


class ScopedLayer(NamedTuple):
    """What a name with scopes says of its layer: `encoder/layer 3/attention/Qcur`.

    row     the layers among which it is counted: `encoder/layer`; "" for those of a model, `layer 3` and the like
    number  which of them it is; None when the scopes have no number, and the outermost one is taken for a layer
    name    what it is called: `encoder/layer 3`
    inside  the scopes within it: `attention`
    """

    row: str
    number: int | None
    name: str
    inside: tuple[str, ...]


def scoped_layer(name: str) -> ScopedLayer | None:
    """The layer that the scopes of a name say; None for a name without scopes."""
    parts = scopes_of(name)
    if not parts:
        return None
    for i, part in enumerate(parts):
        found = _COUNTED.fullmatch(part)
        if found is not None:
            row = "" if i == 0 and _MODEL.fullmatch(found[1]) else "/".join([*parts[:i], found[1]])
            return ScopedLayer(row, int(found[2]), "/".join(parts[: i + 1]), parts[i + 1 :])
    return ScopedLayer(parts[0], None, parts[0], parts[1:])


def layer_of_leaf(name: str) -> int | None:
    """The layer of a weight or a cache of this name: `blk.3.attn_q.weight`, `model.layers.3.mlp.up_proj.weight`,
    `cache_k_l3`."""
    found = _LEAF.search(name)
    return int(found[1] or found[2]) if found else None


def _of_model(name: str) -> int | None:
    """The layer of a model's node of this name: `Qcur-3`."""
    found = _NODE.search(name)
    return int(found[1]) if found else None


def layer_of_node(name: str) -> str:
    """The layer of a node by its name alone: `3` for `Qcur-3` and `layer 3/Qcur`, `encoder/layer 3` and `head` for
    those of other scopes, "" for none."""
    scoped = scoped_layer(name)
    if scoped is not None:
        return scoped.name if scoped.row else str(scoped.number)
    il = _of_model(name)
    return "" if il is None else str(il)


class Layers(dict[Tensor, int]):
    """The layer of each tensor that belongs to one. Layers that follow one another have numbers that do. Those of a
    model have their own; layers of another kind, and scopes that do not count, have higher ones.

    names   what each layer is called: `layer 3`, `encoder/layer 3`, `head`
    inside  the scopes within its layer in which a tensor was made, the outermost first
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.inside: dict[Tensor, tuple[str, ...]] = {}

    def number(self, il: int) -> str:
        """The number in the name of a layer, "" when it has none."""
        found = _COUNTED.fullmatch(self.names[il])
        return "" if found is None else found[2]

    def title(self, first: int, end: int) -> str:
        """What the layers `first` to `end` - 1 are called together: `layers 0..5`, `encoder/layer 0..5`."""
        name, last = self.names[first], self.names[end - 1]
        if name == f"layer {first}":
            return f"layers {first}..{end - 1}"
        return f"{name}..{self.number(end - 1) or last}"


_Key = tuple[str, int | None]  # a row of layers, and which of them


def layers_of(graph: Graph) -> Layers:
    """The layer of each tensor that belongs to one; empty when no leaf of the graph has the name of a layer's weight or
    cache, and no tensor was made in a scope (`gg.scope`).

    Scopes that count (`layer 3`) say the layer of what was made inside; a leaf that one layer alone reads belongs to
    it, too. Without them, names do, see `_by_names`. What is in no layer then, but in a scope (`head`), belongs to the
    outermost scope as to a layer.
    """
    every = (*graph.leafs, *graph.nodes)
    scoped = {t: s for t in every if (s := scoped_layer(t.name)) is not None}
    counted: dict[Tensor, _Key] = {t: (s.row, s.number) for t, s in scoped.items() if s.number is not None}
    named = _named(graph)
    if not named or any(row == "" for row, _ in counted.values()):
        counted = {t: ("", il) for t, il in named.items()} | counted
        counted |= _read_in_one(graph, counted)
    else:
        counted = {t: ("", il) for t, il in _by_names(graph, named).items()}
    keys = counted | {t: (s.row, s.number) for t, s in scoped.items() if t not in counted}
    numbers, layers = _numbers(keys.values()), Layers()
    for t in every:
        if t in keys:
            layers[t] = il = numbers[keys[t]]
            layers.names.setdefault(il, f"layer {keys[t][1]}")
    for t, s in scoped.items():
        own = keys[t] == (s.row, s.number)
        layers.inside[t] = s.inside if own else scopes_of(t.name)
        if own:
            layers.names[layers[t]] = s.name
    return layers


def _numbers(keys: Iterable[_Key]) -> dict[_Key, int]:
    """A number for each layer. There is a gap between one row of layers and the next."""
    rows: dict[str, dict[_Key, int]] = {}
    for row, n in keys:
        rows.setdefault(row, {})[row, n] = n or 0
    numbers: dict[_Key, int] = {}
    for row in sorted(rows, key=bool):  # the layers of a model first
        base = max(numbers.values()) + 2 - min(rows[row].values()) if numbers else 0
        numbers |= {key: base + n for key, n in rows[row].items()}
    return numbers


def _named(graph: Graph) -> dict[Tensor, int]:
    """The layer of each tensor whose own name says it, in a graph in which leafs have the names of a model's layers."""
    layers = {t: il for t in graph.leafs if (il := layer_of_leaf(t.name)) is not None}
    if not layers:
        return {}
    for t in (*graph.leafs, *graph.nodes):
        if t not in layers and (il := _of_model(t.name)) is not None:
            layers[t] = il
    return layers


def _read_in_one(graph: Graph, counted: Mapping[Tensor, _Key]) -> dict[Tensor, _Key]:
    """The leafs that one layer alone reads. Not the one that the first layer reads in place of what a layer before it
    would have computed."""
    readers: dict[Tensor, set[_Key | None]] = {}
    nodes: dict[_Key, list[Tensor]] = {}
    for t in graph.nodes:
        key = counted.get(t)
        if key is not None:
            nodes.setdefault(key, []).append(t)
        for s in t.src:
            if s is not None and s.op == "none" and s not in counted and not s.flags & FLAG_INPUT:
                readers.setdefault(s, set()).add(key)
    begins: set[Tensor | None] = set()
    for row in dict.fromkeys(row for row, _ in nodes):
        first, *rest = sorted(n for r, n in nodes if r == row and n is not None)
        if rest:
            for t, u in zip(nodes[row, first], nodes[row, rest[0]], strict=False):
                begins.update(s for s, v in zip(t.src, u.src, strict=False) if v is not None and v.op != "none")
    return {s: key for s, (key, *more) in readers.items() if key is not None and not more and s not in begins}


def _by_names(graph: Graph, named: Mapping[Tensor, int]) -> dict[Tensor, int]:
    """The layer of each tensor of a model's graph. `named`: those that their own names say.

    A node whose name has no layer belongs to the layer whose weights it reads, otherwise to the layer around it. The
    border between two layers is the last place where the fewest tensors are alive: between blocks with a residual,
    that is the place where only the residual is. What depends on no layer and is read in several (a mask that is
    converted once) belongs to none.
    """
    layers = dict(named)
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
