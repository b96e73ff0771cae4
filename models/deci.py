"""DeciLM, of NVIDIA's Nemotron 51B, 49B and 253B (arXiv:2411.19146): Llama whose layers a search made smaller, each in
its own way. A layer has attention, or one product in its place, or neither; and a network of any size, or none."""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import (
    Build,
    build_ffn,
    build_inp_embd,
    build_inp_pos,
    build_lm_head,
    build_norm,
    build_out_rows,
    build_rope_factors,
)
from .decoder import Decoder
from .metadata import read_common

_LLAMA = Decoder()


def build_deci(b: Build) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        inpL = build_inp_embd(b)
        inp_pos = build_inp_pos(b)
        factors = build_rope_factors(b)
        for il in range(hp.n_layer):
            n = hp.layer(il)
            if n.n_head:
                attn, inpL = build_out_rows(b, il, _attention(b, inpL, inp_pos, factors, il), inpL)
                inpL = b.cb(gg.add(attn, inpL), "ffn_inp", il)
            else:
                (inpL,) = build_out_rows(b, il, inpL)
            if n.n_ff:
                cur = build_ffn(b, build_norm(b, inpL, "ffn_norm", "ffn_norm", il), il)
                inpL = b.cb(gg.add(cur, inpL), "l_out", il)
        return build_lm_head(b, build_norm(b, inpL, "output_norm", "result_norm"))


def _attention(b: Build, cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
    cur = build_norm(b, cur, "attn_norm", "attn_norm", il)
    if not b.hparams.layer(il).n_head_kv:
        return b.linear("attn_output", cur, b.hparams.n_embd, "attn_out", il)
    return _LLAMA.attention(b, cur, pos, factors, il)


ARCHITECTURES = (Architecture(("deci",), build_deci, read_common),)
