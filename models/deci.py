"""DeciLM, the architecture of NVIDIA's Nemotron 51B, 49B and 253B (arXiv:2411.19146): Llama whose layers were made
smaller by a search, each in its own way. A layer has attention, or one product instead, or neither. It has a network of
any size, or no network."""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.tensor import Tensor

from .blocks import Build, build_ffn, build_norm, build_out_rows
from .decoder import PlainDecoder, decoder


class Deci(PlainDecoder):
    """Llama whose layers may lack attention, or its heads, or the network."""

    def layer(self, b: Build, inpL: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        n = b.hparams.layer(il)
        if n.n_head:
            attn = self.attention(b, build_norm(b, inpL, "attn_norm", "attn_norm", il), pos, factors, il)
            attn, inpL = build_out_rows(b, il, attn, inpL)
            inpL = b.cb(gg.add(attn, inpL), "ffn_inp", il)
        else:
            (inpL,) = build_out_rows(b, il, inpL)
        if n.n_ff:
            cur = build_ffn(b, build_norm(b, inpL, "ffn_norm", "ffn_norm", il), il)
            inpL = b.cb(gg.add(cur, inpL), "l_out", il)
        return inpL

    def attention(self, b: Build, cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        """Without heads of K and V, a product of `cur`."""
        if not b.hparams.layer(il).n_head_kv:
            return b.linear("attn_output", cur, b.hparams.n_embd, "attn_out", il)
        return super().attention(b, cur, pos, factors, il)


ARCHITECTURES = (decoder("deci", build=Deci()),)
