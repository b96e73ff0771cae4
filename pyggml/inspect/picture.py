"""Facts that drawings of a graph show: kinds and names of tensors, repeated layers, differences of graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from itertools import zip_longest
from typing import Literal, NamedTuple

from ..buffers.alloc import Plan
from ..buffers.overlap import may_overlap
from ..errors import GraphError
from ..graph import Graph
from ..opdef import OPS
from ..scope import scopes_of
from ..tensor import FLAG_INPUT, FLAG_OUTPUT, FLAG_STORE, Tensor
from .layers import Layers, layers_of

Kind = Literal["input", "weight", "node", "view", "output"]
Status = Literal["same", "changed", "added", "removed"]

_UNNAMED = re.compile(r"(?:.*/)?(node|leaf)_\d+")  # a graph's names for tensors that the user has not named
_MAX_PERIOD = 16  # the longest period of layers that is looked for


def kind_of(t: Tensor) -> Kind:
    """The kind of a tensor in a graph, which decides its colour."""
    if t.flags & FLAG_OUTPUT:
        return "output"
    if t.op == "none":
        return "input" if t.flags & FLAG_INPUT else "weight"
    return "view" if OPS[t.op].kernel is None else "node"


def is_store(t: Tensor) -> bool:
    """Whether `t` is an op that writes over memory of another tensor."""
    return bool(t.flags & FLAG_STORE)


def parameters(t: Tensor) -> str:
    """The op's parameters as `s=0.5 b=0`, without the shape, which labels show anyhow."""
    return " ".join(f"{k}={v}" for k, v in _parameters(t).items())


def _parameters(t: Tensor) -> dict[str, str]:
    return {k: _text(v) for k, v in t.op_params.items() if not re.fullmatch(r"ne\d?", k)}


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
    return Place(buft, offset + t.view_offs, t.nbytes, root in plan.offsets)


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


def folds(shown: Sequence[Tensor], layers: Mapping[Tensor, int], note: Mapping[Tensor, Hashable]) -> list[Fold]:
    """Find layers that repeat: they have the same tensors in the same order, with the same sources and equal notes.

    Layers are not folded when their box would read what is computed from it outside, because no order of the boxes
    shows such a graph.
    """
    members: dict[int, list[Tensor]] = {}
    readers: dict[Tensor, set[int | None]] = {}  # the layers that read a tensor without a layer
    for t in shown:
        if t in layers:
            members.setdefault(layers[t], []).append(t)
        for s in t.src:
            if s is not None and s not in layers:
                readers.setdefault(s, set()).add(layers.get(t))
    first = [{il} for il in members if il - 1 not in members]
    begins = {s for s, read in readers.items() if s.op == "none" and read in first}
    number = layers.number if isinstance(layers, Layers) else str
    signs = {il: _signature(number(il), ts, note, begins) for il, ts in members.items()}
    found: list[Fold] = []
    done, end = min(signs, default=0), max(signs, default=-1) + 1
    for il in sorted(signs):  # not each number: the names in a file may have any
        if il < done:
            continue
        best = Fold(il, 1, 1)
        for period in range(1, min(_MAX_PERIOD, end - il) + 1):
            at = il + period
            while at < end and at in signs and signs.get(at - period) == signs[at]:
                at += 1
            fold = Fold(il, period, (at - il) // period)
            if fold.times > 1 and fold.end > best.end:
                best = fold
        if best.times > 1 and _has_order(shown, layers, [*found, best]):
            found.append(best)
        done = best.end
    return found


def _has_order(shown: Sequence[Tensor], layers: Mapping[Tensor, int], made: Sequence[Fold]) -> bool:
    """Whether the tensors still have an order when each fold is one box: no box needs what is computed from it."""
    fold_of = {il: f for f in made for il in range(f.first, f.end)}
    box: dict[Tensor, Fold | Tensor] = {t: fold_of[layers[t]] if layers.get(t) in fold_of else t for t in shown}
    reads: dict[Fold | Tensor, set[Fold | Tensor]] = {b: set() for b in box.values()}
    for t in shown:
        reads[box[t]].update(box[s] for s in t.src if s is not None and s in box and box[s] is not box[t])
    users: dict[Fold | Tensor, list[Fold | Tensor]] = {}
    for b, sources in reads.items():
        for s in sources:
            users.setdefault(s, []).append(b)
    ready, n_done = [b for b, sources in reads.items() if not sources], 0
    while ready:
        n_done += 1
        done = ready.pop()
        for b in users.get(done, ()):
            reads[b].discard(done)
            if not reads[b]:
                ready.append(b)
    return n_done == len(reads)


def _signature(
    number: str, members: Sequence[Tensor], note: Mapping[Tensor, Hashable], begins: Collection[Tensor]
) -> Hashable:
    """What layers have in common that repeat. `number`: the layer's, in the names of its tensors. `begins`: leafs that
    only the first layer reads, where the next layers may read a node."""
    at = {t: i for i, t in enumerate(members)}
    own = re.compile(rf"(?<!\d)0*{number}(?!\d)" if number else r"(?!)")
    outside: dict[Tensor, int] = {}

    def reads(s: Tensor | None) -> Hashable:
        if s is None or s in at:
            return None if s is None else at[s]
        return s.name if s.op == "none" and s not in begins else (outside.setdefault(s, len(outside)), s.dtype, s.ne)

    def sign(t: Tensor) -> Hashable:
        name = own.sub("#", "/".join(scopes_of(t.name)) if _UNNAMED.fullmatch(t.name) else t.name)
        is_input = bool(t.flags & FLAG_INPUT)  # whether it is an output makes no other layer of it
        return name, t.op, t.dtype, t.ne, t.nb, is_input, parameters(t), note.get(t), tuple(map(reads, t.src))

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


class Comparison(NamedTuple):
    """How the tensors of a graph differ from the tensors of the same keys in another, earlier graph.

    status   of each tensor of the graph
    changes  what changed of a tensor, before and now: `Q8_0 -> Q4_0`
    removed  the tensors of the earlier graph that are missing
    """

    status: dict[Tensor, Status]
    changes: dict[Tensor, list[str]]
    removed: list[Tensor]


def compare(graph: Graph, old: Graph) -> Comparison:
    """Compare op, parameters, type, shape, strides, kind and sources of each tensor with those in `old`."""
    if not isinstance(old, Graph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"a graph is compared with a Graph, not {type(old).__name__}")
    keys, old_keys = keys_of(graph), keys_of(old)
    before = {key: t for t, key in old_keys.items()}
    found = Comparison({}, {}, [])
    for t, key in keys.items():
        was = before.pop(key, None)
        if was is None:
            found.status[t] = "added"
            continue
        changes = _changes(was, t, old_keys, keys)
        found.status[t] = "changed" if changes else "same"
        if changes:
            found.changes[t] = changes
    found.removed.extend(before.values())
    return found


def _changes(was: Tensor, t: Tensor, old_keys: Mapping[Tensor, str], keys: Mapping[Tensor, str]) -> list[str]:
    """What differs between two tensors, a text for each difference."""
    pairs: list[tuple[str, object, object]] = [("", was.op, t.op), ("", was.dtype.name, t.dtype.name)]
    pairs.append(("", list(was.ne), list(t.ne)))
    if (was.dtype, was.ne) == (t.dtype, t.ne):
        pairs.append(("nb ", list(was.nb), list(t.nb)))
    if kind_of(was) != kind_of(t) and was.op == t.op:
        pairs.append(("", kind_of(was), kind_of(t)))
    if was.op == t.op:
        old_values, values = _parameters(was), _parameters(t)
        pairs += [(f"{k} ", old_values.get(k, "none"), values.get(k, "none")) for k in {**old_values, **values}]
    changes = [f"{what}{a} -> {b}" for what, a, b in pairs if a != b]
    for a, b in zip_longest(was.src, t.src):
        if (None if a is None else old_keys.get(a)) != (None if b is None else keys.get(b)):
            names = ["nothing" if s is None else s.name for s in (a, b)]
            changes.append(f"reads {names[0]} -> {names[1]}")
    return changes
