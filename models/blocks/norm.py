"""Norms of rows, with their weights."""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.ops.norm import norm
from pyggml.tensor import Tensor

from ..hparams import NormKind
from .weighted import WeightedGraph


def build_norm(
    b: WeightedGraph,
    cur: Tensor,
    role: str,
    name: str,
    il: int = -1,
    kind: NormKind = "rms",
    *,
    per_head: bool = False,
    eps: float = 0.0,
    suffix: str = "weight",
) -> Tensor:
    """Norm each row of `cur`, multiply by a weight, and add a bias when the model has one. Without a `role` there is
    neither weight nor bias. The result has the shape of `cur`. Kinds of norms:

    rms     the row divided by the root of its mean square
    layer   the row minus its mean, divided by its standard deviation

    `per_head`: the weight has a row for each head of `cur`, ne [n_embd_head, n_head, n_tokens]. `eps`: by default that
    of the model. `suffix`: the end of the weight's name.
    """
    ne = cur.ne[:2] if per_head else cur.ne[:1]
    eps = eps or b.norm_eps(kind)
    cur = gg.rms_norm(cur, eps) if kind == "rms" else norm(cur, eps)
    if not role:
        return b.cb(cur, name, il)
    cur = b.cb(gg.mul(b.cb(cur, "norm", il), b.weight(role, ne, il, suffix)), name, il)
    bias = b.optional(role, ne, il, "bias")
    return cur if bias is None else b.cb(gg.add(b.cb(cur, "norm_w", il), bias), name, il)
