"""Hunyuan V3 (huggingface.co/tencent/Hy3-preview): Qwen3's attention, with DeepSeek-V3's router and a shared expert.

A layer without a router is dense.
"""

from __future__ import annotations

from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .blocks import Build, build_ffn
from .decoder import PlainDecoder, decoder
from .hparams import Router
from .metadata import read_router


class HyV3Decoder(PlainDecoder):
    """Decoders whose weights say which layers are dense."""

    def ffn(self, b: Build, cur: Tensor, il: int) -> Tensor:
        """The mixture of experts, or the dense network."""
        n_embd, n_ff = cur.ne[0], b.hparams.layer(il).n_ff
        if b.optional("ffn_gate_inp", (n_embd, b.hparams.n_expert), il) is None:
            return build_ffn(b, cur, il)
        for part, ne in (("gate", (n_embd, n_ff)), ("up", (n_embd, n_ff)), ("down", (n_ff, n_embd))):
            b.optional(f"ffn_{part}", ne, il)  # a file may hold it all the same
        return super().ffn(b, cur, il)


ARCHITECTURES = (
    decoder(
        "hy_v3",
        build=HyV3Decoder(qk_norm="head"),
        rope_type="neox",
        n_layer_dense_lead=0,
        n_ff_shexp=lambda r: r.integer(
            Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, r.integer(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH)
        ),
        router=lambda r: read_router(r, Router(gating="sigmoid", norm=False)),
        nextn=True,
    ),
)
