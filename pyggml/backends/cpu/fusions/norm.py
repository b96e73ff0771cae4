"""norm: rms_norm(x) or norm(x), times weight, plus a bias or a residual: a row is read and written once."""

from __future__ import annotations

from typing import NamedTuple

from pyggml.native import lib

from ....buffers.alloc import Step
from ....tensor import Tensor
from .nodes import Fusion, Nodes, fused, is_f32_rows, other_source


class Norm(NamedTuple):
    """The norm of x times a weight. Its two `nodes` are the norm or rms_norm, and the product with the weight."""

    x: Tensor
    weight: Tensor
    nodes: tuple[Tensor, Tensor]

    @property
    def eps(self) -> float:
        """The epsilon of the norm."""
        return self.nodes[0].op_params["eps"]


def norm_of(t: Tensor) -> Norm | None:
    """The norm when `t` is the product of its rows and one row, all dense f32."""
    if t.op != "mul" or t.view_src is not None:
        return None
    norm, weight = t.src
    if norm is None or weight is None or norm.op not in ("norm", "rms_norm") or (x := norm.src[0]) is None:
        return None
    dense = all(is_f32_rows(s) for s in (x, norm, weight, t))
    return Norm(x, weight, (norm, t)) if dense and weight.ne == (t.ne[0], 1, 1, 1) else None


def norm_before(g: Nodes, t: Tensor | None, n: int = 1) -> Norm | None:
    """The rms_norm that makes `t`; None unless `t` is read n times by one step and needed for nothing else."""
    found = norm_of(t) if t is not None and g.passes(t, n) else None
    return found if found is not None and found.nodes[0].op == "rms_norm" and g.passes(found.nodes[0]) else None


def _find(g: Nodes, t: Tensor) -> Step | None:
    norm = norm_of(t)
    if norm is None or not g.passes(norm.nodes[0]):
        return None
    nodes, added, out = norm.nodes, None, g.reader(t)
    if out is not None and out.op == "add" and out.view_src is None and out.ne == t.ne:
        other = other_source(out, t)
        if other is not None and other is not t and is_f32_rows(other) and other.ne[0] == t.ne[0]:
            nodes, added = (*nodes, out), other
    if not g.unwritten((norm.x, norm.weight), nodes[0], nodes[-1]):
        return None
    srcs = {lib.PG_NORM_X: norm.x, lib.PG_NORM_WEIGHT: norm.weight, lib.PG_NORM_ADDED: added}
    params = {lib.PG_NORM_EPS: norm.eps}
    return fused("norm", nodes, nodes[-1:], g.kernel(nodes[0].op), srcs, params, heir=norm.x)


NORM = Fusion("norm", ("mul",), _find)
