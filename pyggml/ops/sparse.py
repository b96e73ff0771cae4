"""Sparse attention: the scores of an indexer, and a mask that shows only the keys with the best scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import cast

import numpy as np

from .. import ops
from ..codec import Array
from ..dtypes import CACHE_TYPES
from ..opdef import ZERO, Cost, Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F16, F32, I32, MAX_INT, is_int, src
from ._gradients import as_f32, dense, summed_to_mask
from ._mask import check_mask
from .matmul import outer_summed

__all__ = [
    "lightning_indexer",
    "top_k_mask",
]


def _indexer_shape(srcs: Srcs, params: Params) -> Ne:
    q, k, w = src(srcs, 0), src(srcs, 1), srcs[2]
    for name, t in (("q", q), ("k", k), ("w", w)):
        rule(t is None or t.nb[0] == t.dtype.type_size, f"rows of {name} must be dense")
    rule(k.ne[0] == q.ne[0], f"k and q must have rows of the same length: {k.ne[0]} and {q.ne[0]}")
    rule(q.ne[3] == 1 and k.ne[2:] == (1, 1), "q must have three dimensions, and k two: one head of keys, for all of q")
    if w is not None:
        want = (*q.ne[1:3], 1, 1)
        rule(w.ne == want, f"w must have a weight for each head and token: ne {list(want[:2])}, not {list(w.ne)}")
    return (k.ne[1], q.ne[2], 1, 1)


def _indexer_ref(q: Array, k: Array, w: Array | None) -> Array:
    scores = np.maximum(np.einsum("thd,cd->thc", q[0], k[0, 0]), 0.0)
    weights = np.ones(scores.shape[:2]) if w is None else w[0, 0]
    return np.einsum("thc,th->tc", scores, weights)[None, None]


def _indexer_cost(t: Tensor) -> Cost:
    q, k = src(t.src, 0), src(t.src, 1)
    return Cost(2 * q.n_elements * k.ne[1], 4 * q.n_elements + k.ne[1] * k.dtype.row_size(k.ne[0]), t.nbytes)


def _grad_indexer(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """Through the scores, which are recorded as a matrix for each token: ne [n_kv, n_head, n_tokens]."""
    q, k, w = src(node.src, 0), src(node.src, 1), node.src[2]

    @cache
    def scores() -> Tensor:
        return ops.mul_mat(k, q)

    @cache
    def by_score() -> Tensor:
        return ops.reshape_3d(dense(gy), node.ne[0], 1, node.ne[1])

    @cache
    def of_scores() -> Tensor:
        g = ops.step(scores()) * by_score()
        return g if w is None else g * ops.reshape_3d(dense(w), 1, *w.ne[:2])

    def of_w() -> Tensor:
        assert w is not None
        return ops.reshape(ops.sum_rows(ops.relu(scores()) * by_score()), w)

    return (
        lambda: ops.out_prod(k, ops.transpose(of_scores())),
        lambda: outer_summed(q, of_scores(), k),
        None if w is None else of_w,
    )


LIGHTNING_INDEXER = OpDef(
    name="lightning_indexer",
    srcs=("q", "k", "w?"),
    params=(),
    shape=_indexer_shape,
    dtypes={(F32, k, w): F32 for k in CACHE_TYPES for w in (F32, None)},
    ref=_indexer_ref,
    kernel="lightning_indexer",
    cost=_indexer_cost,
    inplace=(),
    label="sum of w relu(q k)",
    grad=_grad_indexer,
    ranks=(),
)


def lightning_indexer(q: Tensor, k: Tensor, w: Tensor | None = None) -> Tensor:
    """How much each key matters to each token: the sum over heads of w * relu(q k). The products q k are never stored.
    (ggml_lightning_indexer, which also adds a mask; arXiv 2512.02556.)

    q: F32, ne [d, n_head, n_tokens]. k: ne [d, n_kv], F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 or IQ4_NL. w: F32,
    ne [n_head, n_tokens]; None: all 1. Rows dense, other strides any. Result: F32, ne [n_kv, n_tokens], NumPy shape
    (n_tokens, n_kv); sums are accumulated in f32. Raises ShapeError, DTypeError.
    """
    return record(LIGHTNING_INDEXER, (q, k, w), {})


def _choice_shape(srcs: Srcs, params: Params) -> Ne:
    a, mask, blocks, own = src(srcs, 0), src(srcs, 1), srcs[2], srcs[3]
    rule(a.nb[0] == a.dtype.type_size, "rows of a must be dense")
    check_mask(mask, a.ne, 0.0)
    rule(is_int(params["k"], 0), f"k must be a whole number from 0 to {MAX_INT}, not {params['k']}")
    if blocks is not None:
        rule(blocks.ne == (a.ne[0], 1, 1, 1), f"blocks must have a number for each of the {a.ne[0]} elements of a row")
    if own is not None:
        rule(blocks is not None, "own needs blocks")
        rule(own.ne[1:] == (a.ne[1], 1, 1), f"own must have a row for each of the {a.ne[1]} tokens")
        rule(own.is_contiguous, "own must be contiguous")
    return a.ne


def _choice_ref(a: Array, mask: Array, blocks: Array | None, own: Array | None, k: int) -> Array:
    n0 = a.shape[3]
    of = cast(Array, np.arange(n0)) if blocks is None else cast(Array, blocks.reshape(-1))
    if of.min() < 0 or of.max() >= n0:
        raise IndexError(f"block {of.min() if of.min() < 0 else of.max()} is outside 0..{n0 - 1}")
    if own is not None and own.max() >= n0:
        raise IndexError(f"block {own.max()} is outside 0..{n0 - 1}")
    out = np.empty(a.shape)
    for i3, i2, i1 in product(*map(range, a.shape[:3])):
        seen = mask[i3 % mask.shape[0], i2 % mask.shape[1], i1]
        score = np.where((seen > -np.inf) & (a[i3, i2, i1] > -np.inf), a[i3, i2, i1], -np.inf)
        best = np.full(n0, -np.inf)
        np.maximum.at(best, of, score)
        chosen = np.zeros(n0, np.bool_)
        if own is not None:
            chosen[[b for b in own[0, 0, i1] if b >= 0]] = True
        best[chosen] = -np.inf
        first = np.argsort(-best, kind="stable")[:k]
        chosen[first[best[first] > -np.inf]] = True
        out[i3, i2, i1] = np.where(chosen[of], seen, -np.inf)
    return out


def _choice_cost(t: Tensor) -> Cost:
    return Cost(20 * t.n_elements, 4 * t.n_elements + t.nbytes, t.nbytes)


def _grad_choice(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """What is chosen does not change with small changes of `a`."""
    mask = src(node.src, 1)

    def of_mask() -> Tensor:
        return summed_to_mask(ops.where(ops.greater(as_f32(node), -np.inf), gy, 0.0), mask)

    return ZERO, of_mask, None, None


TOP_K_MASK = OpDef(
    name="top_k_mask",
    srcs=("a", "mask", "blocks?", "own?"),
    params=("k",),
    shape=_choice_shape,
    dtypes={
        **{(F32, m, b, None): m for m in (F32, F16) for b in (None, I32)},
        **{(F32, m, I32, I32): m for m in (F32, F16)},
    },
    ref=_choice_ref,
    kernel="top_k_mask",
    cost=_choice_cost,
    inplace=(),
    label="mask of the top k",
    grad=_grad_choice,
)


def top_k_mask(a: Tensor, mask: Tensor, k: int, blocks: Tensor | None = None, own: Tensor | None = None) -> Tensor:
    """A mask that lets attention see only the keys with the best scores: `mask` itself for the `k` largest elements in
    each row of `a`, and -inf for all others. Elements that `mask` hides (-inf) are never chosen, nor elements that are
    -inf or NaN. Among equal elements the first ones are chosen.

    a: F32, ne [n_kv, n_tokens, n_head, n_batch], rows dense. mask: F32 or F16, as in `soft_max_ext`.
    blocks: I32, ne [n_kv], 0 <= block < n_kv: the block of each key. Then `k` whole blocks are chosen, by the largest
    visible element of each; among equal blocks, the one with the least number.
    own: I32, ne [n, n_tokens]: blocks that a token sees in any case (negative: no block).
    Result: type of the mask, ne as `a`. Raises ShapeError, DTypeError; computing it with a block out of range raises
    BackendError. ggml has no such op: llama.cpp uses top_k, fill, set_rows and add.
    """
    return record(TOP_K_MASK, (a, mask, blocks, own), {"k": k})
