"""Finds how graphs read the cells of recurrent states, and how they store there (for scan.py and conv.py)."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ....buffers.alloc import Step
from ....dtypes import DType
from ....opdef import OPS
from ....tensor import Tensor
from .nodes import Nodes

_VIEWS = ("view", "reshape")


class Stored(NamedTuple):
    """A node stores `rows`, dense f32, into the rows of `cells`, ne [floats, n_cells], that `ids` names."""

    cells: Tensor
    rows: Tensor
    ids: Tensor


class Gathered(NamedTuple):
    """The rows of `cells` that `read` names. nodes: the nodes between the cells and their reader."""

    cells: Tensor
    read: Tensor
    nodes: tuple[Tensor, ...]


def stored(store: Tensor) -> Stored | None:
    """What `store`, a node of set_rows, stores into cells; None when these are not whole rows."""
    cells, rows, ids = store.src
    if cells is None or rows is None or ids is None or rows.op not in _VIEWS:
        return None
    fits = _is_matrix(cells) and ids.dtype is DType.I32 and ids.ne[1:] == (1, 1, 1)
    return Stored(cells, rows, ids) if fits else None


def gathered(t: Tensor, to: Stored) -> Gathered | None:
    """How `t` reads rows of the cells that `to` stores to, when it reads as many as are stored; otherwise None."""
    views, rows = views_up(t)
    if rows.op != "get_rows" or any(v.op != "reshape" for v in views):
        return None
    cells, read = rows.src
    if cells is None or read is None or not _is_matrix(cells) or not is_all(cells, to.cells):
        return None
    fits = cells.ne == to.cells.ne and read.dtype is DType.I32 and read.ne == to.ids.ne
    return Gathered(cells, read, (rows, *views)) if fits else None


def _is_matrix(t: Tensor) -> bool:
    return t.dtype is DType.F32 and t.is_contiguous and t.ne[2:] == (1, 1)


def is_all(t: Tensor, cells: Tensor) -> bool:
    """Whether `t` has all bytes of `cells` and no others."""
    return t.root is cells.root and t.view_offs == cells.view_offs and t.nbytes == cells.nbytes and t.is_contiguous


def views_up(t: Tensor) -> tuple[list[Tensor], Tensor]:
    """The chain of views that ends with `t`, and the tensor that they are views of."""
    views: list[Tensor] = []
    while t.op in _VIEWS and (source := t.src[0]) is not None:
        views.append(t)
        t = source
    return views, t


def alone(g: Nodes, store: Tensor, nodes: Collection[Tensor], results: Collection[Tensor]) -> tuple[Tensor, ...] | None:
    """The nodes in their order, when they can be fused: nothing else needs them, except the results, and between them
    no other node reads the cells or changes what they read. Otherwise None."""
    if not all(t in g.at for t in nodes):
        return None
    ordered = g.in_order(nodes)
    own = frozenset(ordered)
    inner = own.difference(results)
    if not all(g.passes(t, sum(s is t for node in ordered for s in node.src)) for t in inner):
        return None
    read, cells = {s.root for s in Step(ordered, inner).sources()}, store.root
    for t in g.nodes[g.at[ordered[0]] : g.at[ordered[-1]]]:
        if t not in own and OPS[t.op].kernel is not None:
            changes = t.view_src is not None and t.root in read
            if changes or any(s is not None and s.root is cells for s in t.src):
                return None
    return ordered
