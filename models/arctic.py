"""Snowflake Arctic (snowflake.com/en/blog/arctic-open-efficient-foundation-language-models-snowflake/).

A mixture of experts beside each dense layer: it reads what the layer read, before attention, through a norm of its own,
and its output is added to the layer's. The dense network is as wide as the embeddings.
"""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.graph import Graph

from .architecture import Architecture
from .blocks import (
    Build,
    build_ffn,
    build_inp_embd,
    build_inp_pos,
    build_lm_head,
    build_moe_ffn,
    build_norm,
    build_out_rows,
)
from .decoder import Decoder
from .metadata import read_common

_LLAMA = Decoder()


def build_arctic(b: Build) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        inpL = build_inp_embd(b)
        inp_pos = build_inp_pos(b)
        for il in range(hp.n_layer):
            cur = build_norm(b, inpL, "attn_norm", "attn_norm", il)
            cur = _LLAMA.attention(b, cur, inp_pos, None, il)
            cur, inpL = build_out_rows(b, il, cur, inpL)
            ffn_inp = b.cb(gg.add(cur, inpL), "ffn_inp", il)

            cur = build_norm(b, ffn_inp, "ffn_norm", "ffn_norm", il)
            ffn_out = b.cb(gg.add(build_ffn(b, cur, il, n_ff=hp.n_embd), ffn_inp), "ffn_out", il)
            cur = build_norm(b, inpL, "ffn_norm_exps", "ffn_norm_exps", il)
            inpL = b.cb(gg.add(build_moe_ffn(b, cur, il), ffn_out), "l_out", il)

        return build_lm_head(b, build_norm(b, inpL, "output_norm", "result_norm"))


ARCHITECTURES = (Architecture(("arctic",), build_arctic, read_common),)
