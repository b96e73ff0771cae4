"""Grok-1 (github.com/xai-org/grok-1) and Grok-2 (huggingface.co/xai-org/grok-2).

They have a mixture of experts with gelu; Grok-2 also has a dense network beside it. There are norms after attention and
after the network too, and the scores of attention are kept within a limit. Old files do not say the scales; then those
of Grok-1 are taken.
"""

from __future__ import annotations

import math

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .blocks import Build, build_ffn
from .decoder import PlainDecoder, decoder


class GrokDecoder(PlainDecoder):
    """A plain decoder with a dense network beside the experts. The norms after attention and network have names of
    their own."""

    def ffn(self, b: Build, cur: Tensor, il: int) -> Tensor:
        """The experts, and the dense network when the model has one, together as large as one of them."""
        out = super().ffn(b, cur, il)
        if b.optional("ffn_up", (cur.ne[0], b.hparams.layer(il).n_ff), il) is None:
            return out
        both = gg.add(build_ffn(b, cur, il, self.act), out)
        return b.cb(gg.scale(both, math.sqrt(0.5)), "ffn_out", il)

    def post(self, b: Build, cur: Tensor, role: str, name: str, il: int) -> Tensor:
        """The output `cur` of attention or network, normed, as it is added to the residual."""
        own = {"post_attention_norm": "attn_output_norm", "post_ffw_norm": "layer_output_norm"}[role]
        if role == "post_ffw_norm" and b.optional(own, cur.ne[:1], il) is None:
            own = role
        return super().post(b, cur, own, name, il)


ARCHITECTURES = (
    decoder(
        "grok",
        build=GrokDecoder(act="gelu", post_norm=True, rope_factors=False),
        rope_type="neox",
        f_embedding_scale=lambda r: r.number(Keys.LLM.EMBEDDING_SCALE, 78.38367176906169),
        f_logit_scale=lambda r: r.number(Keys.LLM.LOGIT_SCALE, 0.5773502691896257),
        f_attention_scale=lambda r: r.number(Keys.Attention.OUTPUT_SCALE, 0.08838834764831845),
        f_attn_logit_softcapping=lambda r: r.number(Keys.LLM.ATTN_LOGIT_SOFTCAPPING, 30.0),
        f_final_logit_softcapping=lambda r: r.number(Keys.LLM.FINAL_LOGIT_SOFTCAPPING, 0.0),
        yarn_beta_fast=lambda r: r.number(Keys.Rope.SCALING_YARN_BETA_FAST, 8.0),
    ),
)
