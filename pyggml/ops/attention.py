"""Attention in one op: softmax(q k) v without ever storing the scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from .. import ops
from ..codec import Array
from ..dtypes import CACHE_TYPES
from ..opdef import OPS, Cost, Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, MAX_F32, src
from ._gradients import constant
from ._mask import MASKS, SINKS, biased, check_mask, check_sinks, sink_scores
from .matmul import outer_summed

__all__ = [
    "flash_attn_ext",
]


def _shape(srcs: Srcs, params: Params) -> Ne:
    q, k, v = src(srcs, 0), src(srcs, 1), src(srcs, 2)
    for name, t in (("q", q), ("k", k), ("v", v)):
        rule(t.nb[0] == t.dtype.type_size, f"rows of {name} must be dense (nb[0] = {t.nb[0]}, not {t.dtype.type_size})")
    rule(k.ne[0] == q.ne[0], f"k and q must have rows of the same length: {k.ne[0]} and {q.ne[0]}")
    rule(k.ne[1:] == v.ne[1:], f"k and v must agree in n_kv, n_head_kv and batch: ne[1:] {k.ne[1:]} and {v.ne[1:]}")
    rule(q.ne[2] % k.ne[2] == 0, f"n_head_kv = {k.ne[2]} must divide n_head = {q.ne[2]}")
    rule(q.ne[3] == k.ne[3], f"q and k must have the same batch: {q.ne[3]} and {k.ne[3]}")
    scale, cap = params["scale"], params["logit_softcap"]
    rule(cap >= 0, f"logit_softcap must not be negative ({cap})")
    rule(not cap or abs(scale / cap) <= MAX_F32, f"scale / logit_softcap must be within F32: {scale} / {cap} is not")
    check_mask(srcs[3], (k.ne[1], *q.ne[1:]), params["max_bias"])
    check_sinks(srcs[4], q.ne[2])
    return (v.ne[0], q.ne[2], q.ne[1], q.ne[3])


def _ref_flash_attn_ext(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    sinks: Array | None,
    scale: float,
    max_bias: float,
    logit_softcap: float,
) -> Array:
    n_batch, n_head, n_tokens, _ = q.shape
    group = n_head // k.shape[1]
    bias = biased(np.zeros((n_batch, n_head, n_tokens, k.shape[2])), mask, max_bias)
    sink = np.broadcast_to(sink_scores(sinks), (1, n_head, 1, 1))[0]
    out = np.zeros((n_batch, n_tokens, n_head, v.shape[3]))
    for i in range(n_batch * n_head):
        b, h = divmod(i, n_head)
        s = q[b, h] @ k[b, h // group].T * scale
        if logit_softcap:
            s = logit_softcap * np.tanh(s / logit_softcap)
        seen = bias[b, h] != -np.inf
        s = np.where(seen, s + bias[b, h], -np.inf)
        top = np.maximum(s.max(axis=1, keepdims=True), sink[h])
        top = np.where(top == -np.inf, 0.0, top)
        e = np.exp(s - top)
        total = e.sum(axis=1, keepdims=True) + np.exp(sink[h] - top)
        out[b, :, h] = np.where(total == 0, 0.0, _mixed(e, seen, v[b, h // group]) / total)
    return out


def _mixed(e: Array, seen: Array, v: Array) -> Array:
    """Weights [token, key] times v [key, dv], without the keys that a token does not see: their v may be NaN."""
    if np.isfinite(v).all():
        return e @ v
    return np.stack([(e[t, seen[t], None] * v[seen[t]]).sum(axis=0) for t in range(len(e))])


def _called(entry: Gradient) -> Tensor:
    g = entry() if callable(entry) else entry
    assert isinstance(g, Tensor)
    return g


def _grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """Through the weights, which are recorded as a matrix for each head: ne [n_kv, n_tokens, n_head, n_batch]."""
    q, k, v, mask, sinks = src(node.src, 0), src(node.src, 1), src(node.src, 2), node.src[3], node.src[4]
    scale, cap = node.op_params["scale"], node.op_params["logit_softcap"]
    g = ops.permute(gy, 0, 2, 1, 3)  # tokens before heads

    @cache
    def capped() -> Tensor:
        return ops.tanh(ops.mul_mat(k, q) * (scale / cap))

    @cache
    def weights() -> Tensor:
        """A token that sees no key has weights of 0 with sinks, and NaN without: there is one, beside which every key
        has all of the weight."""
        nothing = constant(np.full(q.ne[2], -MAX_F32, np.float32), q) if sinks is None else sinks
        scores, factor = (capped() * cap, 1.0) if cap else (ops.mul_mat(k, q), scale)
        return ops.soft_max_ext(scores, mask, factor, node.op_params["max_bias"], nothing)

    @cache
    def of_soft_max() -> Sequence[Gradient]:
        grad = OPS["soft_max"].grad
        assert grad is not None
        return grad(weights(), ops.mul_mat(v, g))

    @cache
    def of_scores() -> Tensor:
        gs = _called(of_soft_max()[0])
        return gs * (1 - ops.sqr(capped())) * scale if cap else gs

    return (
        lambda: ops.out_prod(k, ops.transpose(of_scores())),
        lambda: outer_summed(q, of_scores(), k),
        lambda: outer_summed(g, weights(), v),
        None if mask is None else lambda: _called(of_soft_max()[1]),
        None if sinks is None else lambda: _called(of_soft_max()[2]),
    )


def _cost(t: Tensor) -> Cost:
    q, k, v = src(t.src, 0), src(t.src, 1), src(t.src, 2)
    scores = q.n_rows * k.ne[1]
    read = 4 * q.n_elements + sum(s.n_rows * s.dtype.row_size(s.ne[0]) for s in (k, v))
    return Cost(scores * (2 * q.ne[0] + 2 * v.ne[0] + 20), read, 4 * t.n_elements)


FLASH_ATTN_EXT = OpDef(
    name="flash_attn_ext",
    srcs=("q", "k", "v", "mask?", "sinks?"),
    params=("scale", "max_bias", "logit_softcap"),
    shape=_shape,
    dtypes={(F32, k, v, m, s): F32 for k in CACHE_TYPES for v in CACHE_TYPES for m in MASKS for s in SINKS},
    ref=_ref_flash_attn_ext,
    kernel="flash_attn_ext",
    cost=_cost,
    inplace=(),
    label="softmax(q k) v",
    grad=_grad,
)


def flash_attn_ext(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax over n_kv of (scale * q k + slope * mask), times v, without storing the scores (ggml_flash_attn_ext).

    q: F32, ne [d, n_tokens, n_head, n_batch].
    k: ne [d, n_kv, n_head_kv, n_batch], v: ne [dv, n_kv, n_head_kv, n_batch]; each F32, F16, BF16, Q8_0,
    Q4_0, Q4_1, Q5_0, Q5_1 or IQ4_NL. n_head_kv divides n_head. Any strides, dense rows.
    mask: None, or F16 or F32, ne [n_kv, n_tokens or more, ..], as in `soft_max_ext`, and so is max_bias.
    logit_softcap > 0: the products first become logit_softcap * tanh(scale * q k / logit_softcap).
    sinks: None, or F32, ne [n_head], as in `soft_max_ext` (ggml_flash_attn_ext_add_sinks).

    Result: F32, ne [dv, n_head, n_tokens, n_batch] (heads before tokens, as in ggml); sums are accumulated in f32.
    A key that the mask hides from a token does not affect the token, whatever k and v hold there (even NaN): unused
    cells of a cache may hold anything. A token that sees no key gets zeros. Other scores of NaN or +inf make their row
    NaN.
    Raises ShapeError, DTypeError. Source: arXiv 2205.14135 (blocks, running maximum and sum).
    """
    params = {"scale": scale, "max_bias": max_bias, "logit_softcap": logit_softcap}
    return record(FLASH_ATTN_EXT, (q, k, v, mask, sinks), params)
