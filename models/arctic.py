"""Snowflake Arctic (snowflake.com/en/blog/arctic-open-efficient-foundation-language-models-snowflake/).

Beside each dense layer stands a mixture of experts. It reads the input of the layer, before attention, through a norm
of its own, and its output is added to the layer's. The dense network is as wide as the embeddings.
"""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.tensor import Tensor

from .blocks import Build, build_ffn, build_moe_ffn, build_norm, build_out_rows
from .decoder import PlainDecoder, decoder


class Arctic(PlainDecoder):
    """The experts of a layer beside its attention and its network."""

    def layer(self, b: Build, inpL: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        attn = self.attention(b, build_norm(b, inpL, "attn_norm", "attn_norm", il), pos, factors, il)
        attn, inpL = build_out_rows(b, il, attn, inpL)
        ffn_inp = b.cb(gg.add(attn, inpL), "ffn_inp", il)

        cur = build_norm(b, ffn_inp, "ffn_norm", "ffn_norm", il)
        ffn_out = b.cb(gg.add(build_ffn(b, cur, il, n_ff=b.hparams.n_embd), ffn_inp), "ffn_out", il)
        cur = build_norm(b, inpL, "ffn_norm_exps", "ffn_norm_exps", il)
        return b.cb(gg.add(build_moe_ffn(b, cur, il), ffn_out), "l_out", il)


ARCHITECTURES = (decoder("arctic", build=Arctic(rope_factors=False)),)
