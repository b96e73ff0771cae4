"""The llama architecture: Llama 1 to 3, Mistral, Mixtral and all that share it.

The first Mistral (arXiv:2310.06825) has a window in all layers, `llama.attention.sliding_window`. llama.cpp ignores
that window, and its converter does not write it."""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import (
    KV,
    Build,
    build_ffn,
    build_inp_embd,
    build_inp_kq_mask,
    build_inp_pos,
    build_lm_head,
    build_moe_ffn,
    build_norm,
    build_out_rows,
    build_qkv,
    build_rope,
    build_rope_factors,
    llm_build_kv,
)
from .hparams import HParams
from .metadata import Reader, read_hparams, read_window


def build_llama(b: Build) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        inpL = build_inp_embd(b)
        inp_pos = build_inp_pos(b)
        factors = build_rope_factors(b)

        def layer(inpL: Tensor, il: int) -> Tensor:
            inpSA = inpL
            cur = build_norm(b, inpL, "attn_norm", "attn_norm", il)

            # self-attention
            Qcur, Kcur, Vcur = build_qkv(b, cur, il)
            Qcur = build_rope(b, Qcur, inp_pos, factors, "Qcur", il)
            Kcur = build_rope(b, Kcur, inp_pos, factors, "Kcur", il)
            cur = llm_build_kv(b, KV(Qcur, Kcur, Vcur, build_inp_kq_mask(b, il), il))

            cur, inpSA = build_out_rows(
                b, il, cur, inpSA
            )  # from the last layer on, only tokens whose logits are wanted
            ffn_inp = b.cb(gg.add(cur, inpSA), "ffn_inp", il)

            # feed-forward network
            cur = build_norm(b, ffn_inp, "ffn_norm", "ffn_norm", il)
            cur = build_moe_ffn(b, cur, il) if hp.n_expert else build_ffn(b, cur, il)
            return b.cb(gg.add(cur, ffn_inp), "l_out", il)

        inpL = b.layers(layer, inpL)
        return build_lm_head(b, build_norm(b, inpL, "output_norm", "result_norm"))


def _read(r: Reader) -> HParams:
    window = read_window(r, 0, 0)
    return read_hparams(HParams, r, **(window if window["n_swa"] else {}))


ARCHITECTURES = (Architecture(("llama",), build_llama, _read),)
