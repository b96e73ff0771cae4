"""rope: a rope, together with the norm before it, and with the copy of its result to the cache, when that is the only
reader."""

from __future__ import annotations

from pyggml.native import lib

from ....buffers.alloc import Step
from ....tensor import Tensor
from ..isa import kernel_of
from .nodes import FLOATS, Fusion, Nodes, fused
from .norm import norm_before


def _stored(g: Nodes, rope: Tensor) -> Tensor | None:
    """The node that copies the result of a rope to a cache, when nothing else reads it; otherwise None."""
    t = g.reader(rope)
    if t is None or t.op != "cpy" or t.op_params.get("limit") or t.src[0] is not rope:
        return None
    return t if t.dtype in FLOATS and t.is_contiguous else None


def _find(g: Nodes, rope: Tensor) -> Step | None:
    x, positions, factors = rope.src
    normed, stored = norm_before(g, x), _stored(g, rope)
    for norm, store in ((normed, stored), (None, stored), (normed, None)):
        nodes = (*(norm.nodes if norm else ()), rope, *((store,) if store is not None else ()))
        row, weight, eps = (norm.x, norm.weight, norm.eps) if norm else (x, None, 0.0)
        if len(nodes) == 1 or row is None or not g.unwritten((row, weight, positions, factors), nodes[0], nodes[-1]):
            continue
        srcs = {
            lib.PG_ROPE_X: row,
            lib.PG_ROPE_POSITIONS: positions,
            lib.PG_ROPE_FACTORS: factors,
            lib.PG_ROPE_WEIGHT: weight,
        }
        params = {**dict(enumerate(rope.op_params.values())), lib.PG_ROPE_EPS: eps}
        heir = None if store is not None else row
        return fused("rope", nodes, nodes[-1:], kernel_of(g.isa, rope), srcs, params, heir=heir, shape=rope)
    return None


ROPE = Fusion("rope", ("rope", "rope_multi"), _find)
