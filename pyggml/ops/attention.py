"""Attention in one op: softmax(q k) v without ever storing the scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from .. import ops
from ..codec import Array
from ..dtypes import CACHE_TYPES
from ..opdef import OPS, Cost, Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, MAX_F32, src
from ._gradients import constant, dense_rows, part
from ._mask import MASKS, SINKS, biased, check_mask, check_sinks, sink_scores

__all__ = [
    "flash_attn_ext",
    "flash_attn_ext_back",
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
        e, _, total = _powers(s, seen, bias[b, h], sink[h])
        out[b, :, h] = np.where(total == 0, 0.0, _mixed(e, seen, v[b, h // group]) / total)
    return out


def _powers(s: Array, seen: Array, bias: Array, sink: Array) -> tuple[Any, Any, Any]:
    """exp(score - the token's largest score): of the keys that it sees [token, key], of its sink [token, 1], and their
    sum [token, 1]."""
    s = np.where(seen, s + bias, -np.inf)
    top = np.maximum(s.max(axis=1, keepdims=True), sink)
    top = np.where(top == -np.inf, 0.0, top)
    e, e_sink = np.exp(s - top), np.exp(sink - top)
    return e, e_sink, e.sum(axis=1, keepdims=True) + e_sink


def _mixed(e: Array, seen: Array, v: Array) -> Array:
    """Weights [token, key] times v [key, dv], without the keys that a token does not see: their v may be NaN."""
    if np.isfinite(v).all():
        return e @ v
    return np.stack([(e[t, seen[t], None] * v[seen[t]]).sum(axis=0) for t in range(len(e))])


def _grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """By q, k, v and sinks in one op, `flash_attn_ext_back`. The mask's is recorded as a matrix of weights of each
    head: rarely is it wanted, and then it is as large itself."""
    q, k, v, mask, sinks = src(node.src, 0), src(node.src, 1), src(node.src, 2), node.src[3], node.src[4]

    @cache
    def row() -> Tensor:
        return flash_attn_ext_back(q, k, v, mask, sinks, node, dense_rows(gy), **node.op_params)

    def heads_inside(t: Tensor, first: int) -> Tensor:
        d, n, n_head, _ = t.ne
        return ops.view_4d(row(), *t.ne, 4 * d * n_head, 4 * d, 4 * d * n_head * n, 4 * first)

    of_k = q.n_elements
    of_v = of_k + k.n_elements
    return (
        lambda: heads_inside(q, 0),
        lambda: heads_inside(k, of_k),
        lambda: heads_inside(v, of_v),
        None if mask is None else lambda: _of_mask(node, gy),
        None if sinks is None else lambda: part(row(), sinks, of_v + v.n_elements),
    )


def _of_mask(node: Tensor, gy: Tensor) -> Tensor:
    """The gradient of the mask: that of `soft_max_ext`, of scores that are stored."""
    q, k, v, mask, sinks = src(node.src, 0), src(node.src, 1), src(node.src, 2), node.src[3], node.src[4]
    scale, cap = node.op_params["scale"], node.op_params["logit_softcap"]
    if sinks is None:  # a token that sees no key would have NaN; beside this one, every key has all of the weight
        sinks = constant(np.full(q.ne[2], -MAX_F32, np.float32), q)
    scores = ops.mul_mat(k, q)
    if cap:
        scores, scale = ops.tanh(scores * (scale / cap)), cap
    weights = ops.soft_max_ext(scores, mask, scale, node.op_params["max_bias"], sinks)
    grad = OPS["soft_max"].grad
    assert grad is not None
    of_mask = grad(weights, ops.mul_mat(v, ops.permute(gy, 0, 2, 1, 3)))[1]  # tokens before heads
    assert callable(of_mask)
    g = of_mask()
    assert isinstance(g, Tensor)
    return g


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


# -- the gradient


def _back_shape(srcs: Srcs, params: Params) -> Ne:
    ne = _shape(srcs[:5], params)
    for role, t in (("y", src(srcs, 5)), ("gy", src(srcs, 6))):
        rule(t.ne == ne, f"{role} must have the ne of flash_attn_ext's result, {list(ne)}, not {list(t.ne)}")
        rule(t.ne[0] == 1 or t.nb[0] == 4, f"rows of {role} must be dense (nb[0] = {t.nb[0]}, not 4)")
    return (sum(t.n_elements for t in (*srcs[:3], srcs[4]) if t is not None), 1, 1, 1)


def _back_ref(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    sinks: Array | None,
    y: Array,
    gy: Array,
    scale: float,
    max_bias: float,
    logit_softcap: float,
) -> Array:
    n_batch, n_head, n_tokens, _ = q.shape
    group = n_head // k.shape[1]
    bias = biased(np.zeros((n_batch, n_head, n_tokens, k.shape[2])), mask, max_bias)
    sink = np.broadcast_to(sink_scores(sinks), (1, n_head, 1, 1))[0]
    of_q, of_k, of_v, of_sinks = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape), np.zeros(n_head)
    for i in range(n_batch * n_head):
        b, h = divmod(i, n_head)
        seen = bias[b, h] != -np.inf
        rows_k, rows_v = _seen_rows(k[b, h // group], seen), _seen_rows(v[b, h // group], seen)
        s, slope = q[b, h] @ rows_k.T * scale, np.ones(1)
        if logit_softcap:
            t = np.tanh(s / logit_softcap)
            s, slope = logit_softcap * t, 1 - t * t
        e, e_sink, total = _powers(s, seen, bias[b, h], sink[h])
        part = np.where(total == 0, 0.0, 1 / np.where(total == 0, 1.0, total))
        weights, g = e * part, gy[b, :, h]
        weighed = (g * y[b, :, h]).sum(axis=1, keepdims=True)
        of_scores = weights * (g @ rows_v.T - weighed) * slope * scale
        of_q[b, h] = of_scores @ rows_k
        of_k[b, h // group] += of_scores.T @ q[b, h]
        of_v[b, h // group] += weights.T @ g
        of_sinks[h] -= float((e_sink * part * weighed).sum())
    rows = [np.swapaxes(x, 1, 2).ravel() for x in (of_q, of_k, of_v)]
    return np.concatenate(rows if sinks is None else [*rows, of_sinks]).reshape(1, 1, 1, -1)


def _seen_rows(x: Array, seen: Array) -> Any:
    """Rows of keys. Those that no token sees may hold anything; here they are 0."""
    return np.where(np.any(seen, axis=0, keepdims=True).T, x, 0.0)


def _back_cost(t: Tensor) -> Cost:
    q, k, v = src(t.src, 0), src(t.src, 1), src(t.src, 2)
    scores = q.n_rows * k.ne[1]
    read = 4 * (2 * q.n_elements + src(t.src, 6).n_elements) + sum(s.n_rows * s.dtype.row_size(s.ne[0]) for s in (k, v))
    return Cost(scores * (6 * q.ne[0] + 4 * v.ne[0] + 30), read, 4 * t.n_elements)


FLASH_ATTN_EXT_BACK = OpDef(
    name="flash_attn_ext_back",
    srcs=("q", "k", "v", "mask?", "sinks?", "y", "gy"),
    params=("scale", "max_bias", "logit_softcap"),
    shape=_back_shape,
    dtypes={(*row, F32, F32): F32 for row in FLASH_ATTN_EXT.dtypes},
    ref=_back_ref,
    kernel="flash_attn_ext_back",
    cost=_back_cost,
    inplace=(),
    label="gradient of softmax(q k) v",
    ranks=(),
)


def flash_attn_ext_back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    y: Tensor,
    gy: Tensor,
    scale: float,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
) -> Tensor:
    """The gradients of `flash_attn_ext` by q, k, v and sinks. The scores are computed again, those of some rows of q at
    a time, so that memory does not grow with n_kv * n_tokens.

    y: the result of flash_attn_ext, gy: its gradient; F32, its ne [dv, n_head, n_tokens, n_batch], dense rows. The
    others as there. Result: F32, one row: the gradients of q, ne [d, n_head, n_tokens, n_batch] (heads before tokens,
    as they lie in a projection), of k, ne [d, n_head_kv, n_kv, n_batch], of v, ne [dv, n_head_kv, n_kv, n_batch], and
    of sinks, ne [n_head], when there are any. Use views. A key that is hidden from all tokens has 0.
    Raises ShapeError, DTypeError. Source: arXiv 2205.14135, appendix B.
    """
    params = {"scale": scale, "max_bias": max_bias, "logit_softcap": logit_softcap}
    return record(FLASH_ATTN_EXT_BACK, (q, k, v, mask, sinks, y, gy), params)
