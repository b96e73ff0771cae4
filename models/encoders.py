"""Encoders that norm before attention and network, as decoders do. Tokens see each other, nothing is remembered, and
there are no logits: graphs end with `result_embd`."""

from __future__ import annotations

import math

from pyggml.gguf_io.keys import Keys

from .architecture import Architecture
from .decoder import PlainDecoder, decoder
from .hparams import HParams, RankHead
from .metadata import Reader, read_activation, read_hparams, read_rank_head, read_window


def _read_modern_bert(r: Reader) -> HParams:
    window = {}
    if r.integer(Keys.Attention.SLIDING_WINDOW, 0):
        window = read_window(r, 3, dense_first=True) | {"swa_type": "symmetric"}
    head = read_rank_head(r, RankHead(pooling="mean", act="gelu_erf" if read_activation(r) == "gelu_erf" else "gelu"))
    return read_hparams(HParams, r, "layer", causal_attn=False, rope_type="neox", rank_head=head, **window)


_MODERN_BERT = PlainDecoder(
    norm="layer",
    embd_norm="weighted",
    first_norm=False,
    act="gelu",
    gate_in_up=True,
    rope_factors=False,
    lm_head=False,
)


def _read_gemma_embedding(r: Reader) -> HParams:
    return read_hparams(
        HParams,
        r,
        causal_attn=False,
        rope_type="neox",
        f_embedding_scale=math.sqrt(r.integer(Keys.LLM.EMBEDDING_LENGTH)),
        **read_window(r, 6, plain_rope=True),
        swa_type="symmetric",
    )


ARCHITECTURES = (
    # ModernBERT (arXiv 2412.13663), GTE and Granite of its shape: the embeddings are normed (and what the first layer
    # reads is not once more), two of three layers see a window to both sides, gate and up are one weight.
    Architecture(("modern-bert",), _MODERN_BERT.build, _read_modern_bert, "none", False),
    # NeoBERT (arXiv 2502.19587): as Llama, with one weight for Q, K and V, and one for gate and up.
    decoder(
        "neo-bert",
        build=PlainDecoder(gate_in_up=True, rope_factors=False, output_norm="enc.output_norm", lm_head=False),
        memory="none",
        causal_attn=False,
    ),
    # EuroBERT (arXiv 2503.05500): as Llama.
    decoder(
        "eurobert",
        build=PlainDecoder(rope_factors=False, lm_head=False),
        memory="none",
        causal_attn=False,
        rope_type="neox",
    ),
    # EmbeddingGemma (arXiv 2509.20354): Gemma 3 whose tokens see each other, in five of six layers within a window to
    # both sides; two more products of the pooled embeddings (`dense_2`, `dense_3`).
    Architecture(
        ("gemma-embedding",),
        PlainDecoder(act="gelu", post_norm=True, rope_factors=False, qk_norm="head", lm_head=False).build,
        _read_gemma_embedding,
        "none",
        False,
    ),
)
