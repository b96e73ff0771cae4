"""Plain decoders with a sliding window in some of their layers: for each, its source and what is special in it."""

from __future__ import annotations

import math
from typing import Any

from pyggml.gguf_io.keys import Keys

from .architecture import Architecture
from .decoder import PlainDecoder
from .hparams import HParams, Router
from .metadata import PLAIN_ROPE, Reader, read_hparams, read_router, read_swa_pattern, read_window

_ROPE_PATTERN = "{arch}.attention.rope_pattern"
_EXAONE4_LAYERS = 64  # tells the model that has the window by its layers: old files do not say it


def _softcaps(r: Reader) -> dict[str, float]:
    return {
        "f_attn_logit_softcapping": r.number(Keys.LLM.ATTN_LOGIT_SOFTCAPPING, 50.0),
        "f_final_logit_softcapping": r.number(Keys.LLM.FINAL_LOGIT_SOFTCAPPING, 30.0),
    }


def _gemma(r: Reader, n_layer_27b: int, **own: Any) -> HParams:
    n_embd = r.integer(Keys.LLM.EMBEDDING_LENGTH)
    said = r.get(Keys.Attention.SCALE, None) is not None
    if (
        r.integer(Keys.LLM.BLOCK_COUNT) == n_layer_27b and not said
    ):  # scores are scaled by the size that heads would have if they shared n_embd
        heads = r.per_layer(Keys.Attention.HEAD_COUNT)
        own["f_attention_scale"] = 1.0 / math.sqrt(n_embd // (heads if isinstance(heads, int) else heads[0]))
    return read_hparams(HParams, r, rope_type="neox", f_embedding_scale=math.sqrt(n_embd), **own)


def _gemma2(r: Reader) -> HParams:
    window = read_window(r, 2, 4096) | {"swa_type": "prefix"}  # of PaliGemma 2
    return _gemma(r, 46, **_softcaps(r), **window)


def _gemma3(r: Reader) -> HParams:
    cap = r.number(Keys.LLM.FINAL_LOGIT_SOFTCAPPING, 0.0)
    return _gemma(r, 62, f_final_logit_softcapping=cap, **read_window(r, 6, 0, plain_rope=True))


def _exaone4(r: Reader) -> HParams:
    pattern = r.get(Keys.Attention.SLIDING_WINDOW_PATTERN, None)
    if pattern is None and r.integer(Keys.LLM.BLOCK_COUNT) != _EXAONE4_LAYERS:
        return read_hparams(HParams, r, rope_type="neox")
    return _roped_where_windowed(r, 4, 4096, rope_type="neox")


def _roped_where_windowed(r: Reader, n_pattern: int, default: int | None = None, **own: Any) -> HParams:
    """Only layers with the window are roped."""
    norm = own.pop("norm", "rms")
    own["rope_layers"] = read_swa_pattern(r, n_pattern)
    return read_hparams(HParams, r, norm, **own, **read_window(r, n_pattern, default))


def _cohere2(r: Reader) -> HParams:
    return _roped_where_windowed(r, 4, norm="layer", f_logit_scale=r.number(Keys.LLM.LOGIT_SCALE))


def _olmo2(r: Reader) -> HParams:
    return read_hparams(HParams, r, rope_type="neox", **{**read_window(r, 4, 0), **PLAIN_ROPE})


def _granite_swa(r: Reader) -> HParams:
    logit_scale = r.number(Keys.LLM.LOGIT_SCALE)
    if not logit_scale:
        r.fail(Keys.LLM.LOGIT_SCALE, "must not be 0")
    return read_hparams(
        HParams,
        r,
        f_logit_scale=1.0 / logit_scale,
        f_residual_scale=r.number(Keys.LLM.RESIDUAL_SCALE, 0.0),
        f_embedding_scale=r.number(Keys.LLM.EMBEDDING_SCALE, 0.0),
        rope_layers=1 if r.get(_ROPE_PATTERN, None) is None else r.flags(_ROPE_PATTERN),
        **read_window(r, 0),
    )


def _afmoe(r: Reader) -> HParams:
    return read_hparams(
        HParams,
        r,
        rope_type="neox",
        router=read_router(r, Router(gating="sigmoid", norm=False)),
        f_embedding_scale=r.number(Keys.LLM.EMBEDDING_SCALE, math.sqrt(r.integer(Keys.LLM.EMBEDDING_LENGTH))),
        rope_layers=r.flags(_ROPE_PATTERN)  # a key of pyggml: llama.cpp has a fixed pattern
        if r.get(_ROPE_PATTERN, None) is not None
        else tuple(int((il + 1) % 4 != 0) for il in r.layers),
        **read_window(r, 4, 0),
    )


def _exaone_moe(r: Reader) -> HParams:
    router = read_router(r, Router(gating="sigmoid", norm=False))
    return _roped_where_windowed(r, 4, rope_type="neox", router=router)


def _laguna(r: Reader) -> HParams:
    size, n_shared = r.integer(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH), r.integer(Keys.LLM.EXPERT_SHARED_COUNT, 1)
    return read_hparams(
        HParams,
        r,
        rope_type="neox",
        router=read_router(r, Router(gating="sigmoid", norm=False)),
        n_ff_shexp=r.integer(Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, 0) or size * n_shared,
        **{**read_window(r, 4, 0, dense_first=True), **PLAIN_ROPE},
    )


def _spark2_5(r: Reader) -> HParams:
    return read_hparams(HParams, r, rope_type="neox", **read_window(r, 0))


ARCHITECTURES = (
    # Gemma 2 (arXiv 2408.00118): norms before and after attention and network, softcaps of scores and logits, a window
    # in every other layer.
    Architecture(("gemma2",), PlainDecoder(act="gelu", post_norm=True, rope_factors=False).build, _gemma2),
    # Gemma 3 (arXiv 2503.19786): Q and K normed, no softcaps; five of six layers have a window and another rope.
    Architecture(
        ("gemma3",), PlainDecoder(act="gelu", post_norm=True, rope_factors=False, qk_norm="head").build, _gemma3
    ),
    # Command R7B, Command A (arXiv 2504.00698): attention and network side by side; three of four layers have a window,
    # the others have no rope.
    Architecture(("cohere2",), PlainDecoder(norm="layer", parallel=True).build, _cohere2),
    # EXAONE 4 (arXiv 2507.11407): norms after attention and network, not before; Q and K normed. In the larger model
    # three of four layers have a window, the others have no rope.
    Architecture(("exaone4",), PlainDecoder(pre_norm=False, post_norm=True, qk_norm="head").build, _exaone4),
    # OLMo 2 (arXiv 2501.00656): norms after attention and network, not before; Q and K normed over all heads. OLMo 3
    # (arXiv 2512.13961): three of four layers have a window, and a rope without YaRN.
    Architecture(
        ("olmo2",), PlainDecoder(pre_norm=False, post_norm=True, qk_norm="row", rope_factors=False).build, _olmo2
    ),
    # Granite with a window (IBM): the scales of Granite, and attention sinks.
    Architecture(("granite_swa",), PlainDecoder(sinks="some").build, _granite_swa),
    # Trinity (huggingface.co/arcee-ai/Trinity-Mini): attention gated by a sigmoid, norms before and after attention and
    # network, Q and K normed, a sigmoid router; every fourth layer has no window and no rope.
    Architecture(
        ("afmoe",), PlainDecoder(qk_norm="head", post_norm=True, attn_gate="sigmoid", rope_factors=False).build, _afmoe
    ),
    # K-EXAONE (arXiv 2601.01739): only layers with the window are roped; Q and K normed, a sigmoid router.
    Architecture(("exaone-moe",), PlainDecoder(qk_norm="head").build, _exaone_moe),
    # Laguna (Poolside, huggingface.co/poolside): attention gated by a softplus, Q and K normed; layers with a window
    # have another rope, without YaRN.
    Architecture(("laguna",), PlainDecoder(qk_norm="head", attn_gate="softplus").build, _laguna),
    # iFlytek Spark 2.5 (github.com/ggml-org/llama.cpp, src/models/spark2-5.cpp): each head of attention is gated by a
    # sigmoid, and the network has gelu.
    Architecture(("spark2_5",), PlainDecoder(act="gelu", attn_gate="sigmoid").build, _spark2_5),
)
