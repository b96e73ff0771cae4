"""Talkie (huggingface.co/talkie-lm): norms have no weights, and the embeddings are normed too. Q and K are normed after
they are roped; then Q is multiplied with a gain for each head. Every layer adds the embeddings once more, times a
number of its own."""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph

from .architecture import Architecture
from .blocks import (
    KV,
    Build,
    build_ffn,
    build_inp_embd,
    build_inp_kq_mask,
    build_inp_pos,
    build_lm_head,
    build_norm,
    build_out_rows,
    build_qkv,
    build_rope,
    llm_build_kv,
)
from .hparams import HParams
from .metadata import Reader, read_hparams


def build_talkie(b: Build) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        skip = inpL = build_norm(b, build_inp_embd(b), "", "inp_norm")
        inp_pos = build_inp_pos(b)
        for il in range(hp.n_layer):
            Qcur, Kcur, Vcur = build_qkv(b, build_norm(b, inpL, "", "attn_norm", il), il)
            Qcur = build_norm(b, build_rope(b, Qcur, inp_pos, None, "Qcur", il), "", "Qcur_normed", il)
            Kcur = build_norm(b, build_rope(b, Kcur, inp_pos, None, "Kcur", il), "", "Kcur_normed", il)
            gain = b.weight("attn_q_norm", (1, hp.layer(il).n_head), il)
            Qcur = b.cb(gg.mul(Qcur, gain), "Qcur_scaled", il)
            cur = llm_build_kv(b, KV(Qcur, Kcur, Vcur, build_inp_kq_mask(b, il), il))
            cur, inpL, skip = build_out_rows(b, il, cur, inpL, skip)
            ffn_inp = b.cb(gg.add(cur, inpL), "ffn_inp", il)
            cur = build_ffn(b, build_norm(b, ffn_inp, "", "ffn_norm", il), il)
            cur = b.cb(gg.add(cur, ffn_inp), "ffn_out", il)
            embd_skip = b.cb(gg.mul(skip, b.weight("layer_output_scale", (1,), il)), "embd_skip", il)
            inpL = b.cb(gg.add(cur, embd_skip), "l_out", il)
        return build_lm_head(b, build_norm(b, inpL, "", "result_norm"))


def _read(r: Reader) -> HParams:
    return read_hparams(HParams, r, rope_type="neox", f_logit_scale=r.number(Keys.LLM.LOGIT_SCALE))


ARCHITECTURES = (Architecture(("talkie",), build_talkie, _read),)
