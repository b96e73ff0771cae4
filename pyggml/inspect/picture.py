"""Facts that drawings of a graph show: kinds, layers and names of tensors, repeated layers, differences of graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Literal, NamedTuple

from ..buffers.alloc import Plan
from ..buffers.overlap import may_overlap
from ..errors import GraphError
from ..graph import Graph
from ..opdef import OPS
from ..tensor import FLAG_INPUT, FLAG_OUTPUT, Tensor

Kind = Literal["input", "weight", "node", "view", "output"]
Status = Literal["same", "changed", "added", "removed"]

NODE_OF_LAYER = re.compile(r"-(\d+)(?: |$)")
_LAYER = re.compile(r"^blk\.(\d+)\.|^cache_[a-z]+_l(\d+)")
_UNNAMED = re.compile(r"(node|leaf)_\d+")  # a graph's names for tensors that the user has not named
_MAX_PERIOD = 16  # the longest period of layers that is looked for


def layers_of(graph: Graph) -> dict[Tensor, int]:
    """The layer of each tensor, by its name: `blk.3.attn_q.weight`, `cache_k_l3`; also `Qcur-3`, when such weights or
    caches show that the graph is a model's."""
    found = {t: _LAYER.search(t.name) for t in graph.leafs}
    layers = {t: int(m[1] or m[2]) for t, m in found.items() if m}
    if layers:
        named = {t: NODE_OF_LAYER.search(t.name) for t in (*graph.leafs, *graph.nodes) if t not in layers}
        layers |= {t: int(m[1]) for t, m in named.items() if m}
    return layers


def kind_of(t: Tensor) -> Kind:
    """The kind of a tensor in a graph, which decides its colour."""
    if t.flags & FLAG_OUTPUT:
        return "output"
    if t.op == "none":
        return "input" if t.flags & FLAG_INPUT else "weight"
    return "view" if OPS[t.op].kernel is None else "node"


def is_store(t: Tensor) -> bool:
    """Whether `t` is an op that writes over memory of another tensor."""
    return t.view_src is not None and OPS[t.op].kernel is not None


def parameters(t: Tensor) -> str:
    """The op's parameters as `s=0.5 b=0`, without the shape, which labels show anyhow."""
    return " ".join(f"{k}={_text(v)}" for k, v in t.op_params.items() if not re.fullmatch(r"ne\d?", k))


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return getattr(value, "__name__", "a function") if callable(value) else str(value)


class Place(NamedTuple):
    """Where the bytes of a tensor are: the buffer's type, the offset in the buffer and the number of bytes; and whether
    the buffer is the compute buffer, which all graphs share."""

    buft: str
    offset: int
    size: int
    planned: bool

    def __str__(self) -> str:
        return f"{self.buft}{' compute' * self.planned} at {self.offset}, {self.size} bytes"


def place_of(t: Tensor, plan: Plan) -> Place | None:
    """Where `t` is under a plan; None for a tensor without memory (it was fused away, or has none yet)."""
    root = t.root
    if root in plan.offsets:
        buft, offset = plan.offsets[root]
    elif root.buffer is not None and root.op == "none":
        buft, offset = root.buffer.buft, root.offset
    else:
        return None
    return Place(buft, offset + int(t.view_offs), t.nbytes, root in plan.offsets)


# -- what is drawn -----------------------------------------------------------------------------------------------------


def select(
    graph: Graph, layers: tuple[int, int] | None = None, patterns: Sequence[str] = (), around: int = 0
) -> list[Tensor]:
    """The tensors of `layers` (first, end) whose names match a pattern, and all up to `around` edges from them: leafs,
    then nodes, each in the graph's order. Raises GraphError when there are none."""
    if layers is not None and not (isinstance(layers, Sequence) and [*map(type, layers)] == [int, int]):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"layers must be two whole numbers (first, end), not {layers!r}")
    known = isinstance(patterns, Sequence) and not isinstance(patterns, str)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not (known and all(isinstance(p, str) for p in patterns)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"nodes must be a list of names or patterns such as 'kq-*', not {patterns!r:.80}")
    if type(around) is not int or around < 0:
        raise GraphError(f"around must be a number of edges, not {around!r}")
    known, every = layers_of(graph), [*graph.leafs, *graph.nodes]
    shown = {t for t in every if layers is None or layers[0] <= known.get(t, -1) < layers[1]}
    if layers is not None and not shown:
        raise GraphError(f"no tensor of this graph belongs to layers {layers[0]}:{layers[1]}")
    if patterns:
        shown = {t for t in shown if any(fnmatchcase(t.name, p) for p in patterns)}
        if not shown:
            raise GraphError(f"no tensor of this graph is called {' or '.join(patterns)}")
    users = users_of(graph)
    for _ in range(around if len(shown) < len(every) else 0):
        near = {s for t in shown for s in (*t.src, *users.get(t, ())) if s is not None}
        if near <= shown:
            break
        shown |= near
    return [t for t in every if t in shown]


def users_of(graph: Graph) -> dict[Tensor, list[Tensor]]:
    """For each tensor the nodes that read it, each once, in order."""
    users: dict[Tensor, dict[Tensor, None]] = {}
    for t in graph.nodes:
        for s in t.src:
            if s is not None:
                users.setdefault(s, {})[t] = None
    return {t: list(read) for t, read in users.items()}


def read_later(graph: Graph) -> list[tuple[Tensor, Tensor]]:
    """For each store, the first later view of the bytes that it writes (else the first node that reads them), unless
    the store is among its sources."""
    stores: dict[Tensor, list[Tensor]] = {}
    edges: dict[tuple[Tensor, Tensor], None] = {}
    for t in graph.nodes:
        for s in t.src if OPS[t.op].kernel is not None else ():
            if s is None or s.root not in stores:
                continue
            seen = {s}  # `s`, what it is a view of, and so on
            reader = t if s.op == "none" else s
            while s.view_src is not None and not is_store(s) and s.src[0] is not None:
                reader, s = s, s.src[0]
                seen.add(s)
            for store in stores[t.root if s.root not in stores else s.root]:
                if store not in seen and store is not reader and may_overlap(store, reader if reader is not t else s):
                    edges[store, reader] = None
        if is_store(t):
            stores.setdefault(t.root, []).append(t)
    return list(edges)


# -- what repeats ------------------------------------------------------------------------------------------------------


class Fold(NamedTuple):
    """Layers `first` to `end` - 1, which are `times` times the same `period` layers."""

    first: int
    period: int
    times: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.times

    def __str__(self) -> str:
        what = f"layers {self.first}..{self.end - 1}"
        return f"{what}: {self.times} x" if self.period == 1 else f"{what}: {self.times} x {self.period}"


def folds(shown: Iterable[Tensor], layers: Mapping[Tensor, int], note: Mapping[Tensor, Hashable]) -> list[Fold]:
    """Find layers that repeat: they have the same tensors in the same order, with the same sources and equal notes."""
    members: dict[int, list[Tensor]] = {}
    for t in shown:
        if t in layers:
            members.setdefault(layers[t], []).append(t)
    signs = {il: _signature(il, ts, note) for il, ts in members.items()}
    found: list[Fold] = []
    il, end = min(signs, default=0), max(signs, default=-1) + 1
    while il < end:
        best = Fold(il, 1, 1)
        for period in range(1, min(_MAX_PERIOD, end - il) + 1) if il in signs else ():
            at = il + period
            while at < end and at in signs and signs.get(at - period) == signs[at]:
                at += 1
            fold = Fold(il, period, (at - il) // period)
            if fold.times > 1 and fold.end > best.end:
                best = fold
        if best.times > 1:
            found.append(best)
        il = best.end
    return found


def _signature(il: int, members: Sequence[Tensor], note: Mapping[Tensor, Hashable]) -> Hashable:
    at = {t: i for i, t in enumerate(members)}
    own = re.compile(rf"(?<!\d){il}(?!\d)")

    def reads(s: Tensor | None) -> Hashable:
        if s is None or s in at:
            return None if s is None else at[s]
        return s.name if s.op == "none" else s.ne  # the first layer reads inp_embd, others l_out

    def sign(t: Tensor) -> Hashable:
        name = own.sub("#", t.name)
        return name, t.op, t.dtype, t.ne, t.nb, kind_of(t), parameters(t), note.get(t), tuple(map(reads, t.src))

    return tuple(map(sign, members))


# -- two graphs --------------------------------------------------------------------------------------------------------


def keys_of(graph: Graph) -> dict[Tensor, str]:
    """A key for each tensor, by which it is found in another graph: its name (the second tensor of a name is `norm-0
    (2)`), or for a tensor without a name its op and sources."""
    keys: dict[Tensor, str] = {}
    seen: Counter[str] = Counter()
    for t in (*graph.leafs, *graph.nodes):
        key = t.name
        if _UNNAMED.fullmatch(key):
            sources = ",".join("-" if s is None else keys.get(s, "") for s in t.src)
            key = f"({t.op} {blake2b(sources.encode(), digest_size=8).hexdigest()})" if t.src else "(leaf)"
        seen[key] += 1
        keys[t] = key if seen[key] == 1 else f"{key} ({seen[key]})"
    return keys


def statuses(graph: Graph, old: Graph) -> tuple[dict[Tensor, Status], list[Tensor]]:
    """How each tensor of `graph` compares with the tensor of the same key in `old` (op, parameters, type, shape,
    strides, sources), and the tensors of `old` that are missing in `graph`."""
    if not isinstance(old, Graph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"a graph is compared with a Graph, not {type(old).__name__}")
    new_keys, old_keys = keys_of(graph), keys_of(old)
    before = {key: t for t, key in old_keys.items()}

    def facts(t: Tensor, keys: Mapping[Tensor, str]) -> Hashable:
        reads = tuple([None if s is None else keys.get(s) for s in t.src])
        return t.op, t.dtype, t.ne, t.nb, parameters(t), kind_of(t), reads

    found: dict[Tensor, Status] = {}
    for t, key in new_keys.items():
        was = before.get(key)
        same = was is not None and facts(was, old_keys) == facts(t, new_keys)
        found[t] = "added" if was is None else "same" if same else "changed"
    now: Collection[str] = set(new_keys.values())
    return found, [t for t, key in old_keys.items() if key not in now]
