"""The encoder of T5 (arXiv 1910.10683), alone: sentence-T5 (arXiv 2108.08877), and what conditions image models.

Instead of positions, what is added to the scores of attention: a number for each head and each bucket of distances,
small ones each in their own, larger ones together (see `relative_buckets`). All layers use those of the first, unless
they have their own. Scores are not scaled, products have no biases. The network has a gate of gelu (T5 1.1, Flan-T5),
or is one of relu.
"""

from __future__ import annotations

from gguf.constants import Keys

from pyggml import ops as gg
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import (
    KV,
    Build,
    build_attn,
    build_inp_embd,
    build_inp_kq_mask,
    build_inp_out_ids,
    build_norm,
    build_rel_bias,
    build_result_embd,
)
from .hparams import HParams
from .metadata import Reader, read_hparams

_MAX_DISTANCE = "{arch}.attention.relative_buckets_max_distance"  # our own: llama.cpp takes 128, as all T5 have it


def _read(r: Reader) -> HParams:
    return read_hparams(
        HParams,
        r,
        causal_attn=False,
        rope_layers=0,
        f_attention_scale=1.0,
        n_rel_attn_bkts=r.integer(Keys.Attention.REL_BUCKETS_COUNT),
        n_rel_attn_max_distance=r.integer(_MAX_DISTANCE, 128),
    )


def build_t5encoder(b: Build) -> Graph:
    """The graph of one ubatch; its last node `result_embd` has ne [n_embd, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        inpL = build_inp_embd(b)
        for il in range(hp.n_layer):
            cur = build_norm(b, inpL, "enc.attn_norm", "attn_norm", il)
            n = hp.layer(il)
            Qcur, Kcur, Vcur = (
                b.linear(f"enc.attn_{x}", cur, size, f"{x.upper()}cur", il)
                for x, size in zip("qkv", (n.n_embd_q, n.n_embd_k_gqa, n.n_embd_v_gqa), strict=True)
            )
            Qcur = gg.reshape_3d(Qcur, n.n_embd_head_k, n.n_head, b.n_tokens)
            Kcur = gg.reshape_3d(Kcur, n.n_embd_head_k, n.n_head_kv, b.n_tokens)
            bias = build_rel_bias(b, "enc.attn_rel_b", il)
            cur = build_attn(b, KV(Qcur, Kcur, Vcur, build_inp_kq_mask(b, il), il, bias=bias))
            cur = b.linear("enc.attn_o", cur, hp.n_embd, "kqv_out", il)
            if il == hp.n_layer - 1:  # from here on only the rows that are wanted
                inp_out_ids = build_inp_out_ids(b)
                cur, inpL = gg.get_rows(cur, inp_out_ids), gg.get_rows(inpL, inp_out_ids)
            ffn_inp = b.cb(gg.add(cur, inpL), "ffn_inp", il)
            cur = _ffn(b, build_norm(b, ffn_inp, "enc.ffn_norm", "ffn_norm", il), il)
            inpL = b.cb(gg.add(cur, ffn_inp), "l_out", il)
        return build_result_embd(b, build_norm(b, inpL, "enc.output_norm", "result_norm"))


def _ffn(b: Build, cur: Tensor, il: int) -> Tensor:
    n_ff = b.hparams.layer(il).n_ff
    up = b.linear("enc.ffn_up", cur, n_ff, "ffn_up", il)
    if b.optional("enc.ffn_gate", (cur.ne[0], n_ff), il) is None:
        par = b.cb(gg.relu(up), "ffn_relu", il)
    else:
        gate = b.linear("enc.ffn_gate", cur, n_ff, "ffn_gate", il)
        par = b.cb(gg.mul(b.cb(gg.gelu(gate), "ffn_gelu", il), up), "ffn_gate_par", il)
    return b.linear("enc.ffn_down", par, cur.ne[0], "ffn_out", il)


ARCHITECTURES = (Architecture(("t5encoder",), build_t5encoder, _read, "none", False),)
