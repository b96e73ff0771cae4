"""norm: rms_norm(x) or norm(x), times weight, plus a bias or a residual: a row is read and written once."""

from __future__ import annotations

from typing import NamedTuple

from pyggml.native import lib

from ....buffers.alloc import Step
from ....tensor import Tensor
from .nodes import Fusion, Nodes, fused, is_f32_rows, other_source


def norm_of(t: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """(x, norm or rms_norm of it, weight) where `t` is the product of a norm's rows and one row, all dense f32."""
    if t.op != "mul" or t.view_src is not None:
        return None
    norm, weight = t.src
    if norm is None or weight is None or norm.op not in ("norm", "rms_norm") or (x := norm.src[0]) is None:
        return None
    dense = all(is_f32_rows(s) for s in (x, norm, weight, t))
    return (x, norm, weight) if dense and weight.ne == (t.ne[0], 1, 1, 1) else None


class Normed(NamedTuple):
    """The rms_norm that comes before what another kernel computes, which then takes x."""

    x: Tensor
    weight: Tensor
    eps: float
    nodes: tuple[Tensor, Tensor]


def normed_before(g: Nodes, t: Tensor | None, n: int = 1) -> Normed | None:
    """The norm that makes `t`, where nothing but the n reads of it by one step needs it."""
    found = norm_of(t) if t is not None and g.passes(t, n) else None
    if t is None or found is None or found[1].op != "rms_norm" or not g.passes(found[1]):
        return None
    x, norm, weight = found
    return Normed(x, weight, norm.op_params["eps"], (norm, t))


def _find(g: Nodes, t: Tensor) -> Step | None:
    found = norm_of(t)
    if found is None or not g.passes(found[1]):
        return None
    x, norm, weight = found
    nodes, added = (norm, t), None
    out = g.reader(t)
    if out is not None and out.op == "add" and out.view_src is None and out.ne == t.ne:
        other = other_source(out, t)
        if other is not None and other is not t and is_f32_rows(other) and other.ne[0] == t.ne[0]:
            nodes, added = (norm, t, out), other
    last = nodes[-1]
    if not g.unwritten((x, weight), norm, last):
        return None
    srcs = {lib.PG_NORM_X: x, lib.PG_NORM_WEIGHT: weight, lib.PG_NORM_ADDED: added}
    params = {lib.PG_NORM_EPS: norm.op_params["eps"]}
    return fused("norm", nodes, (last,), g.kernel(norm.op), last, srcs, params, heirs=(x,))


NORM = Fusion("norm", ("mul",), _find)
