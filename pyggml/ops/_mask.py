"""Masks, ALiBi and attention sinks, which soft_max_ext and flash_attn_ext have in common."""

from __future__ import annotations

import math

import numpy as np

from ..codec import Array
from ..dtypes import DType
from ..opdef import rule
from ..tensor import Ne, Tensor
from ._common import F16, F32

MASKS: tuple[DType | None, ...] = (None, F32, F16)
SINKS: tuple[DType | None, ...] = (None, F32)


def alibi_slopes(n_head: int, max_bias: float) -> Array:
    """The factor by which each head multiplies its mask; 1 when max_bias is 0 (arXiv 2108.12409, ggml_soft_max_ext)."""
    if max_bias <= 0:
        return np.ones(n_head)
    n_log2 = 1 << int(math.log2(n_head))
    h = np.arange(n_head)
    return np.where(
        h < n_log2, 2.0 ** (-max_bias / n_log2 * (h + 1)), 2.0 ** (-max_bias / 2 / n_log2 * (2 * (h - n_log2) + 1))
    )


def check_mask(mask: Tensor | None, ne: Ne, max_bias: float) -> None:
    """Check that `mask` fits scores with `ne` [n_kv, n_tokens, n_head, n_batch]. For a shape rule."""
    rule(max_bias >= 0, f"max_bias must not be negative ({max_bias})")
    if mask is None:
        rule(max_bias == 0, "max_bias (ALiBi) needs a mask: it holds the distances")
        return
    m = mask.ne
    rule(m[0] == ne[0], f"the mask's rows must have {ne[0]} elements, not {m[0]}")
    rule(m[1] >= ne[1], f"the mask must have at least {ne[1]} rows, not {m[1]}")
    rule(
        ne[2] % m[2] == 0 and ne[3] % m[3] == 0, f"the mask's ne {list(m)} must divide {list(ne)} in dimensions 2 and 3"
    )
    rule(mask.nb[0] == mask.dtype.type_size, "rows of the mask must be dense")


def check_sinks(sinks: Tensor | None, n_head: int) -> None:
    """Check that `sinks` has a score for each of `n_head` heads. For a shape rule."""
    if sinks is not None:
        rule(sinks.ne == (n_head, 1, 1, 1), f"sinks must hold one score for each of the {n_head} heads: ne [{n_head}]")


def sink_scores(sinks: Array | None) -> Array:
    """Reference: the score of each head's sink, [1, head, 1, 1]; -inf without sinks."""
    return np.full((1, 1, 1, 1), -np.inf) if sinks is None else sinks.reshape(1, -1, 1, 1)


def biased(scores: Array, mask: Array | None, max_bias: float) -> Array:
    """Reference: scores [batch, head, token, kv] + slope * mask. The mask is repeated over batches and heads. Where it
    is -inf the result is -inf, even when the score is NaN."""
    if mask is None:
        return scores
    n3, n2, n1, _ = scores.shape
    m = np.tile(mask[:, :, :n1], (n3 // mask.shape[0], n2 // mask.shape[1], 1, 1))
    return np.where(m == -np.inf, -np.inf, scores + alibi_slopes(n2, max_bias)[None, :, None, None] * m)
