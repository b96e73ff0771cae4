"""experts: the sum of the experts' outputs times their weights, and a residual (csrc/kernels/experts_sum.c)."""

from __future__ import annotations

from collections.abc import Sequence

from pyggml.native import lib

from ....buffers.alloc import Step
from ....dtypes import DType
from ....tensor import Tensor
from .nodes import Fusion, Nodes, fused, is_f32_rows, other_source


def _are_rows(views: Sequence[Tensor], t: Tensor) -> bool:
    """Whether `views` are one view for each row of `t`, ne [n, n_rows, n_columns], over all columns, in order."""
    if t.view_src is not None or not is_f32_rows(t) or t.ne[3] != 1 or not len(views) == t.ne[1] > 1:
        return False
    same = (t.ne[0], t.ne[2], 1, 1), (4, t.nb[2])
    return all(v.op == "view" and (v.ne, v.nb[:2]) == same and v.view_offs == i * t.nb[1] for i, v in enumerate(views))


def _weighted(t: Tensor) -> tuple[Tensor, Tensor] | None:
    """(rows, weights) when `t`, ne [n, n_rows, n_columns], is rows times a number for each."""
    if t.op != "mul" or t.view_src is not None:
        return None
    rows, weights = t.src
    fits = weights is not None and weights.ne == (1, *t.ne[1:]) and weights.dtype is DType.F32
    return (rows, weights) if rows is not None and weights is not None and fits and is_f32_rows(rows) else None


def _find(g: Nodes, first: Tensor) -> Step | None:
    """Find the sum over all rows of experts; `first` is the view of the first rows. The weights of the rows are part of
    the fusion when nothing else reads the weighted rows. So is a tensor that is added to the sum."""
    t = first.src[0]
    views = g.readers.get(t, []) if t is not None else []
    if t is None or views[0] is not first or not _are_rows(views, t) or not all(map(g.passes, views)):
        return None
    nodes, total = [*views], first
    for view in views[1:]:
        out = g.readers[view][0]
        if out.op != "add" or out.view_src is not None or out.src[0] is not total or not g.passes(total):
            return None
        nodes.append(total := out)
    rows, weights, added = t, None, None
    if (found := _weighted(t)) is not None and g.passes(t, len(views)):
        nodes.append(t)
        rows, weights = found
    out = g.reader(total)
    other = other_source(out, total) if out is not None and out.op == "add" and out.view_src is None else None
    if out is not None and other is not None and other is not total and other.ne == out.ne and is_f32_rows(other):
        nodes.append(out)
        added = other
    nodes = g.in_order(nodes)
    srcs = {lib.PG_EXPERTS_ROWS: rows, lib.PG_EXPERTS_WEIGHTS: weights, lib.PG_EXPERTS_ADDED: added}
    step = fused("experts", nodes, nodes[-1:], g.kernel("experts_sum"), srcs, {}, heir=added)
    return step if g.unwritten((s for s in step.sources() if s is not added), nodes[0], nodes[-1]) else None


EXPERTS = Fusion("experts", ("view",), _find)
