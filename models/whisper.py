"""Whisper (arXiv 2212.04356): a decoder of text whose tokens attend to what a tower has heard.

The decoder stands beside T5's. Its norms have a mean and a bias, positions are learned, and scores are scaled. The
encoder is a tower (`towers/whisper.py`): it gives one row for each 20 milliseconds of 30 seconds of sound. `encode`
takes these rows as embeddings, and stores the keys and values that each layer of the decoder looks at.
"""

from __future__ import annotations

import math

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.errors import BatchError
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor
from pyggml.types import Floats

from .architecture import Architecture
from .blocks import (
    KV,
    Build,
    build_attn,
    build_cross_kv,
    build_inp_embd,
    build_inp_kq_mask,
    build_inp_out_ids,
    build_lm_head,
    build_norm,
    build_out_rows,
    build_pos_embd,
    build_result_embd,
)
from .blocks.ffn import ACTIVATIONS
from .hparams import HParams
from .memory.memory import Memory
from .metadata import Reader, read_hparams
from .ubatch import UBatch


def _read(r: Reader) -> HParams:
    scaled = r.boolean("{arch}.scale_embedding", False)
    return read_hparams(
        HParams,
        r,
        "layer",
        learned_positions=True,
        n_heard=r.integer("{arch}.encoder_context_length", 1500),
        rope_layers=0,
        f_embedding_scale=math.sqrt(r.integer(Keys.LLM.EMBEDDING_LENGTH)) if scaled else 0.0,
    )


def build_whisper_encode(b: Build) -> Graph:
    """The graph of a sound: keys and values of the rows that the tower gave are stored. Its last node `result_embd` has
    those rows, ne [n_embd, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        heard = b.input("inp_embd", DType.F32, (hp.n_embd, b.n_tokens), _heard)
        for il in range(hp.n_layer):
            n = hp.layer(il)
            Kcur = b.linear("dec.cross_attn_k", heard, n.n_embd_k_gqa, "Kcur_cross", il)
            Vcur = b.linear("dec.cross_attn_v", heard, n.n_embd_v_gqa, "Vcur_cross", il)
            build_cross_kv(b, Kcur, Vcur, il)
        return build_result_embd(b, gg.get_rows(heard, build_inp_out_ids(b)))


def _heard(u: UBatch, memory: Memory) -> Floats:
    if u.embd is None:
        raise BatchError("whisper encodes what its tower has heard (rows of Batch.add_embd), not tokens")
    return u.embd


def build_whisper(b: Build) -> Graph:
    """The graph of the decoder's tokens; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        inpL = build_pos_embd(b, build_inp_embd(b))
        for il in range(hp.n_layer):
            n = hp.layer(il)
            cur = build_norm(b, inpL, "dec.attn_norm", "attn_norm", il, "layer")
            Qcur, Kcur, Vcur = (b.linear(f"dec.attn_{x}", cur, hp.n_embd, f"{x.upper()}cur", il) for x in "qkv")
            Qcur, Kcur = (gg.reshape_3d(t, n.n_embd_head_k, n.n_head, b.n_tokens) for t in (Qcur, Kcur))
            cur = build_attn(b, KV(Qcur, Kcur, Vcur, build_inp_kq_mask(b, il), il))
            cur = b.linear("dec.attn_o", cur, hp.n_embd, "kqv_out", il)
            cross_inp = b.cb(gg.add(cur, inpL), "cross_inp", il)

            cur = build_norm(b, cross_inp, "dec.cross_attn_norm", "attn_norm_cross", il, "layer")
            Qcur = b.linear("dec.cross_attn_q", cur, hp.n_embd, "Qcur_cross", il)
            Qcur = gg.reshape_3d(Qcur, n.n_embd_head_k, n.n_head, b.n_tokens)
            cur = build_attn(b, KV(Qcur, None, None, build_inp_kq_mask(b, il, cross=True), il, cross=True))
            cur = b.linear("dec.cross_attn_o", cur, hp.n_embd, "kqv_out_cross", il)

            cur, cross_inp = build_out_rows(b, il, cur, cross_inp)
            ffn_inp = b.cb(gg.add(cur, cross_inp), "ffn_inp", il)
            cur = build_norm(b, ffn_inp, "dec.ffn_norm", "ffn_norm", il, "layer")
            inpL = b.cb(gg.add(_ffn(b, cur, il), ffn_inp), "l_out", il)
        return build_lm_head(b, build_norm(b, inpL, "dec.output_norm", "result_norm", kind="layer"))


def _ffn(b: Build, cur: Tensor, il: int) -> Tensor:
    up = b.linear("dec.ffn_up", cur, b.hparams.layer(il).n_ff, "ffn_up", il)
    up = b.cb(ACTIVATIONS[b.hparams.act or "gelu_erf"](up), "ffn_act", il)
    return b.linear("dec.ffn_down", up, cur.ne[0], "ffn_out", il)


ARCHITECTURES = (Architecture(("whisper",), build_whisper, _read, "cross", encode=build_whisper_encode),)
