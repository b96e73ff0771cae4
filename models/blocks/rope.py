"""Rotary positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from pyggml import ops as gg
from pyggml.tensor import Context, Tensor

from ..hparams import HParams, RopeShape
from ..names import tensor_name
from .build import Build

_MODES = {
    "norm": gg.ROPE_TYPE_NORM,
    "neox": gg.ROPE_TYPE_NEOX,
    "mrope": gg.ROPE_TYPE_MROPE,
    "imrope": gg.ROPE_TYPE_IMROPE,
}


def build_rope(b: Build, cur: Tensor, pos: Tensor, factors: Tensor | None, name: str, il: int) -> Tensor:
    """`cur`, ne [n_embd_head, n_head, n_tokens], roped, when layer `il` ropes."""
    shape = b.hparams.rope(il)
    return cur if shape is None else b.cb(rope(b.hparams, shape, cur, pos, factors, shape.attn_factor), name, il)


def rope(
    hp: HParams,
    shape: RopeShape,
    cur: Tensor,
    pos: Tensor,
    factors: Tensor | None,
    attn_factor: float,
    *,
    back: bool = False,
) -> Tensor:
    """Rope the first elements of each head of `cur`, ne [n_embd_head, n_head, n_tokens], with the model's frequencies:
    rope_ext, or rope_multi when tokens have four positions. `back` undoes it (rope_ext_back)."""
    mode, factors = _MODES[shape.type or hp.rope_type], factors if shape.factors else None
    if shape.ext_factor and not hp.yarn_truncate:  # rope_ext rounds: what YaRN does goes into frequency factors
        own = _unrounded(hp.n_ctx_orig_yarn, shape, hp.yarn_beta_fast, hp.yarn_beta_slow)
        factors = own if factors is None else gg.mul(own, factors)
        attn_factor *= 1.0 - 0.1 * math.log(shape.freq_scale)
        shape = shape._replace(freq_scale=1.0, ext_factor=0.0)
    scaling = (
        hp.n_ctx_orig_yarn,
        shape.freq_base,
        shape.freq_scale,
        shape.ext_factor,
        attn_factor,
        hp.yarn_beta_fast,
        hp.yarn_beta_slow,
    )
    if hp.n_pos_per_embd > 1:
        return gg.rope_multi(cur, pos, factors, shape.n_rot, hp.rope_sections, mode, *scaling)
    return (gg.rope_ext_back if back else gg.rope_ext)(cur, pos, factors, shape.n_rot, mode, *scaling)


@lru_cache
def _unrounded(n_ctx: int, shape: RopeShape, beta_fast: float, beta_slow: float) -> Tensor:
    """The divisors of the frequencies of pairs by YaRN (arXiv 2309.00071): ne [n_rot / 2]."""

    def pair(turns: float) -> float:  # which turns so often within n_ctx positions
        return shape.n_rot * math.log(n_ctx / (turns * 2 * math.pi)) / (2 * math.log(shape.freq_base))

    low, high = max(0.0, pair(beta_fast)), min(shape.n_rot - 1.0, pair(beta_slow))
    scaled = np.clip((np.arange(shape.n_rot // 2) - low) / (high - low or 0.001), 0, 1)
    kept = shape.ext_factor * (1 - scaled)
    return Context().from_numpy((1 / (shape.freq_scale * (1 - kept) + kept)).astype(np.float32), name="yarn_factors")


def build_rope_factors(b: Build) -> Tensor | None:
    """The frequency factors that the model has for a context of this size: ne [n_rot / 2], or None."""
    for role in ("rope_freqs", "rope_factors_long", "rope_factors_short"):
        b.optional(role, (b.hparams.n_rot // 2,))
    return rope_factors(b.hparams, b.weights, b.kv.size)


def rope_factors(hp: HParams, weights: Mapping[str, Tensor], n_ctx: int) -> Tensor | None:
    """The frequency factors of the rope: `rope_freqs` when the model has them (Llama 3), otherwise the long or the
    short ones, depending on the size of the context."""
    for role in ("rope_freqs", "rope_factors_long" if n_ctx > hp.n_ctx_orig_yarn else "rope_factors_short"):
        t = weights.get(tensor_name(role))
        if t is not None:
            return t
    return None
