"""attention: v times soft_max of k times q (or of its tanh), and the copy that puts the heads of each token side by
side. Scores never lie in memory: csrc/attention/flash_attn.c goes through the keys block by block."""

from __future__ import annotations

from pyggml.native import lib

from ....buffers.alloc import Step
from ....tensor import FLAG_INPUT, FLAG_OUTPUT, Tensor
from .nodes import FLOATS, Fusion, Nodes, fused, is_f32_rows


def _uncapped(scores: Tensor) -> tuple[Tensor, ...]:
    """(x, its scale node, `scores`) when the scores are tanh(x times a number); otherwise just (`scores`,)."""
    scaled = scores.src[0] if scores.op == "tanh" else None
    x = scaled.src[0] if scaled is not None and scaled.op == "scale" else None
    if scaled is None or x is None or scaled.op_params["b"] or not scaled.op_params["s"]:
        return (scores,)
    return (x, scaled, scores)


def _turned(v: Tensor) -> tuple[Tensor, ...]:
    """(rows, [the cast of the rows to floats], their transpose, `v`) when `v` is the dense copy of transposed rows;
    otherwise just (`v`,)."""
    view = v.src[0] if v.op == "cont" else None
    last = view.src[0] if view is not None and view.op == "transpose" else None
    if view is None or last is None or v.ne != view.ne:
        return (v,)
    rows = last.src[0] if last.op == "cast" else None
    nodes = (last, view, v) if rows is None else (rows, last, view, v)
    return nodes if nodes[0].nb[0] == nodes[0].dtype.type_size else (v,)


def _merged(g: Nodes, t: Tensor) -> tuple[Tensor, ...]:
    """The nodes of permute(t, 0, 2, 1, 3) and of its dense copy, when nothing else reads t."""
    view = g.reader(t)
    if view is None or view.op != "permute" or view.flags & (FLAG_INPUT | FLAG_OUTPUT):
        return ()
    swapped = tuple((x[0], x[2], x[1], x[3]) for x in (t.ne, t.nb))
    readers = g.readers.get(view, ())
    if (view.ne, view.nb) != swapped or len(readers) != 1 or g.uses[view] != 1 or readers[0].op != "cont":
        return ()
    return (view, readers[0])


def _find(g: Nodes, t: Tensor) -> Step | None:
    """Find attention whose last product is `t`: v times its weights, with v and k of the same heads."""
    v, weights = t.src
    if t.view_src is not None or v is None or weights is None or weights.op != "soft_max":
        return None
    scores, mask, sinks = weights.src
    if scores is None or weights.view_src is not None:
        return None
    kq, *cap = _uncapped(scores)
    if kq.op != "mul_mat" or (cap and weights.op_params["scale"] <= 0):
        return None
    k, q = kq.src
    if k is None or q is None or not is_f32_rows(q) or v.dtype not in FLOATS or v.nb[0] != v.dtype.type_size:
        return None
    if k.nb[0] != k.dtype.type_size or k.ne[1:] != (v.ne[0], *v.ne[2:]) or not k.ne[3] == q.ne[3] == t.ne[3]:
        return None
    v, *turned = _turned(v)
    inner = (*turned, kq, *cap, weights)
    if not all(map(g.passes, inner)):
        return None
    merged = _merged(g, t)
    nodes = g.in_order((*inner, t, *merged))
    srcs = {
        lib.PG_ATTN_K: k,
        lib.PG_ATTN_Q: q,
        lib.PG_ATTN_V: v,
        lib.PG_ATTN_MASK: mask,
        lib.PG_ATTN_SINKS: sinks,
    }
    params = {
        lib.PG_ATTN_SCALE: weights.op_params["scale"],
        lib.PG_ATTN_MAX_BIAS: weights.op_params["max_bias"],
        lib.PG_ATTN_MERGED: bool(merged),
        lib.PG_ATTN_CAP: cap[0].op_params["s"] if cap else 0.0,
        lib.PG_ATTN_IN_ROWS: bool(turned),
    }
    shape = merged[0] if merged else None
    step = fused("attention", nodes, nodes[-1:], g.kernel("attn_vt", k.dtype), srcs, params, shape=shape)
    return step if g.unwritten(step.sources(), nodes[0], nodes[-1]) else None


ATTENTION = Fusion("attention", ("mul_mat",), _find)
