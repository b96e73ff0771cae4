"""Hazards: nodes that read memory which another node writes over, where the result depends on which of them runs first.

A store is a node that writes over memory of another tensor (cpy, set_rows, the `_inplace` variants). What reads its
result runs after it. What reads the same bytes by another name does not have to. So that programs mean what they say,
line by line:

- A node cannot be recorded that reads, by its old name, what an `_inplace` op has overwritten (`overwritten`). It can
  when that op is in a graph already: then the order of that graph counts, or the order in which graphs run.
- A graph cannot be planned in which a store and another node that uses the same bytes run in another order than they
  were recorded in (`check_graph`); or in which a node reads what a store has overwritten before, and the store is
  missing: a store into a leaf that is in no graph at all, a store into a node that is not in this graph.

A store that nobody holds, and that is in no graph, never runs. It does not count. Nor does one that another thread has
recorded: it stands in no line of this thread's program.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from threading import get_ident
from typing import NamedTuple
from weakref import ref

from .buffers.overlap import Elements, may_overlap, same_elements
from .dtypes import DType
from .errors import GraphError, at_line, explain
from .tensor import FLAG_AFTER, FLAG_BUILT, FLAG_INTO, FLAG_OUTPUT, FLAG_STORE, Ne, Size, Tensor, last_byte, shown

_MARKS = FLAG_STORE | FLAG_AFTER | FLAG_OUTPUT


class Region(NamedTuple):
    """Elements within the memory of a root, as a view of it has them."""

    dtype: DType
    ne: Ne
    nb: Ne
    view_offs: int


def note_store(t: Tensor) -> None:
    """Enter a store that was just recorded in the tensor that it writes into. Not one into memory that cannot be
    written (weights of a model): no graph with it can be planned."""
    root = t.root
    if root.buffer is not None and not root.buffer.writable:
        return
    older = root.stores
    while older is not None and _settled(root, older[0]()):
        older = older[1]
    root.stores = ref(t), older, get_ident()


def note_built(t: Tensor) -> None:
    """Note that a store is in a graph; in a second graph it stands beside what was recorded after the first."""
    t.flags |= FLAG_AFTER if t.flags & FLAG_BUILT else FLAG_BUILT
    root, stores = t.root, t.root.stores  # read once: other threads may change it
    if stores is not None and root.op == "none" and stores[0]() is t:
        root.stores = stores[1]


def _settled(root: Tensor, store: Tensor | None) -> bool:
    return store is None or (root.op == "none" and bool(store.flags & FLAG_BUILT))


def _stores(root: Tensor) -> Iterator[Tensor]:
    """The stores into `root` that still count for this thread, the latest first."""
    entry, here = root.stores, get_ident()
    while entry is not None:
        made, entry, thread = entry
        store = made()
        if store is not None and thread == here and not _settled(root, store):
            yield store


def written(t: Tensor) -> Elements:
    """What a store changes (set_rows: some of it)."""
    if t.op not in ("set", "acc"):
        return t
    b, p = t.src[1], t.op_params
    assert b is not None
    return Region(t.dtype, b.ne, (p["size"], p["nb1"], p["nb2"], p["nb3"]), t.view_offs + p["offset"])


def _reads(t: Tensor) -> Iterator[tuple[int, Tensor, Elements]]:
    """What a node reads: (index of the source, the source, which of its elements)."""
    over = [s for s in t.src if s is not None and s.root is t.view_src and same_elements(s, t)]
    for i, s in enumerate(t.src):
        if s is None:
            continue
        if not t.flags & FLAG_STORE or all(s is not u for u in over):
            yield i, s, s
        elif not t.flags & FLAG_INTO:
            yield i, s, written(t)
        elif len(over) > 1 and s is max(over, key=_serial):  # a copy of something onto itself: else it is not read
            yield i, s, s


def _serial(t: Tensor) -> int:
    return t.serial


# -- when a node is recorded -------------------------------------------------------------------------------------------


def overwritten(t: Tensor) -> tuple[int, Tensor] | None:
    """A source of a new node that an `_inplace` op has overwritten: its index, and the op; None when there is none."""
    for i, s, what in _reads(t):
        if s.root.stores is None:
            continue
        for store in _unseen(s, what):
            if store.flags & (FLAG_INTO | FLAG_BUILT) or not may_overlap(written(store), what):
                continue
            if not _depends(s, store):
                return i, store
    return None


def _unseen(s: Tensor, what: Elements) -> Iterator[Tensor]:
    """The stores into the memory of `s`, unless the bytes `what` are those that a later store has left there, whose
    result `s` is (or a view of it)."""
    store = s
    while store.view_src is not None and not store.flags & FLAG_STORE:
        first = store.src[0]
        assert first is not None
        store = first
    last = store.serial if store.flags & FLAG_STORE and _is_whole(store) and _within(what, store) else -1
    for other in _stores(s.root):
        if other.serial <= last:
            return
        yield other


def _is_whole(store: Tensor) -> bool:
    """Whether all elements of a store are new, or were looked at when it was recorded."""
    return store.op == "cpy" or (not store.flags & FLAG_INTO and store.op not in ("set", "acc"))


def _within(what: Elements, t: Tensor) -> bool:
    if same_elements(what, t):
        return True
    numbers = what.view_offs, t.view_offs, *what.ne, *what.nb, *t.ne, *t.nb
    if any(isinstance(n, Size) for n in numbers) or not t.is_contiguous:
        return False
    end = what.view_offs + last_byte(what.dtype, what.ne, what.nb)
    return t.view_offs <= what.view_offs and end <= t.view_offs + t.nbytes


def _depends(t: Tensor, on: Tensor) -> bool:
    """Whether `t` is computed from `on`."""
    todo, seen = [t], {t}
    while todo:
        t = todo.pop()
        if t is on:
            return True
        more = [s for s in t.src if s is not None and s.serial >= on.serial and s not in seen]
        seen.update(more)
        todo += more
    return False


# -- when a graph is planned -------------------------------------------------------------------------------------------


class _Use(NamedTuple):
    """A node that reads (as source `s`) or writes elements of a root."""

    node: Tensor
    what: Elements
    s: Tensor | None = None


def check_graph(nodes: Sequence[Tensor], graph: Container[Tensor]) -> None:
    """Raise GraphError for a graph of these nodes in which the result depends on an order that the program does not
    say, see above."""
    if not _is_suspect(nodes):
        return
    targets = {t.view_src for t in nodes if t.flags & FLAG_STORE}
    uses: dict[Tensor, list[_Use]] = {}
    for t in nodes:
        root = t.view_src
        if root is not None and not t.flags & FLAG_STORE:
            if t.flags & FLAG_OUTPUT and root.stores is not None:
                uses.setdefault(root, []).append(_Use(t, t, t))
            continue
        for _, s, what in _reads(t):
            if s.root.stores is not None or s.root in targets:
                uses.setdefault(s.root, []).append(_Use(t, what, s))
        if root is not None:
            uses.setdefault(root, []).append(_Use(t, written(t)))
    for root, found in uses.items():
        if root in targets:
            _check_order(root, found)
        if root.stores is not None:
            _check_missing(root, found, graph)


def _is_suspect(nodes: Sequence[Tensor]) -> bool:
    """Whether a graph may have a hazard: False for nearly all, and quickly."""
    marked = [t for t in nodes if t.flags & _MARKS]
    if not marked:
        return False
    for t in marked:
        root = t.view_src
        if t.flags & FLAG_AFTER or (t.flags & FLAG_OUTPUT and root is not None and root.stores is not None):
            return True
    targets: set[Tensor | None] = set()
    last = -1  # the largest serial of the stores so far
    for t in nodes:
        if t.serial < last:
            for s in t.src:
                if s is not None and (s if s.view_src is None else s.view_src) in targets:
                    return True
        if t.flags & FLAG_STORE:
            last = max(last, t.serial)
            targets.add(t.view_src)
    return False


def _check_order(root: Tensor, uses: Sequence[_Use]) -> None:
    """Raise GraphError when two nodes that use the same bytes, one of which writes them, run in another order than they
    were recorded in."""
    last = last_write = -1  # the largest serials so far
    for i, use in enumerate(uses):
        serial = use.node.serial
        if serial < (last if use.s is None else last_write):
            for before in uses[:i]:
                if before.node.serial <= serial or (use.s is not None and before.s is not None):
                    continue
                if _is_view(use.node) or _is_view(before.node):
                    continue  # read when all has run
                if may_overlap(before.what, use.what):
                    raise _out_of_order(root, before, use)
        last = max(last, serial)
        if use.s is None:
            last_write = max(last_write, serial)


def _check_missing(root: Tensor, uses: Sequence[_Use], graph: Container[Tensor]) -> None:
    """Raise GraphError when a node reads what a store has overwritten before that is missing."""
    missing = {store for store in _stores(root) if store not in graph}
    if not missing:
        return
    for use in uses:
        for store in () if use.s is None else _unseen(use.s, use.what):
            if store in missing and store.serial < use.node.serial and may_overlap(written(store), use.what):
                raise _without(root, store, use)


def _is_view(t: Tensor) -> bool:
    return t.view_src is not None and not t.flags & FLAG_STORE


def _what(t: Tensor) -> str:
    return t.op if not t.name or t.name.endswith("/") else f"{t.op} {shown(t.name)}"


def _lines(root: Tensor, *nodes: Tensor) -> list[tuple[str, str]]:
    lines = [("the memory", root.describe())]
    for t in nodes:
        lines.append((t.op, t.describe() + (", recorded" if t.site else "") + at_line(t.site)))
    return lines


def _out_of_order(root: Tensor, first: _Use, second: _Use) -> GraphError:
    a, b = _what(first.node), _what(second.node)
    does = "reads what" if first.s is not None else "writes over what"
    other = "writes over" if second.s is None else "reads"
    return GraphError(
        explain(
            "hazard",
            f"{a} {does} {b} {other}, and runs before it in this graph, but was recorded after it: name {b} first "
            "(in gg.eval, or build_forward_expand), or give one of them a copy (gg.dup)",
            _lines(root, first.node, second.node),
            None,
        )
    )


def _without(root: Tensor, store: Tensor, use: _Use) -> GraphError:
    a, b = _what(use.node), _what(store)
    where = "in no graph" if root.op == "none" else "not in this graph"
    return GraphError(
        explain(
            "hazard",
            f"{a} reads what {b} has overwritten before, but {b} is {where}: name it first (in gg.eval, or "
            "build_forward_expand), read its result, or a copy that was made before it (gg.dup)",
            _lines(root, use.node, store),
            None,
        )
    )


# -- when values are asked for -----------------------------------------------------------------------------------------


def check_asked(tensors: Sequence[Tensor], graph: Container[Tensor]) -> None:
    """Raise GraphError when one of these tensors, whose values are read after `graph` has run, does not have them any
    more: an `_inplace` op has overwritten it, or a store into it is missing in the graph."""
    for t in tensors:
        for store in () if t.root.stores is None else _unseen(t, t):
            if not may_overlap(written(store), t) or _depends(t, store):
                continue
            if not store.flags & FLAG_INTO:
                text = (
                    f"{_what(t)} was overwritten by the {store.op} in place{at_line(store.site)}: ask for the result "
                    "of that, or for a copy that was made before it (gg.dup)"
                )
                raise GraphError(explain("eval", text, _lines(t.root, t, store), None))
            if store not in graph:
                raise _without(t.root, store, _Use(t, t, t))
