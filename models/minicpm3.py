"""MiniCPM3 (OpenBMB, https://huggingface.co/openbmb/MiniCPM3-4B): llama with multi-head latent attention. The
embeddings, the outputs of attention and network, and the row that the logits are made of are scaled. Files do not say
these scales."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import (
    MLA,
    Build,
    build_ffn,
    build_inp_embd,
    build_inp_pos,
    build_lm_head,
    build_mla,
    build_norm,
    build_out_rows,
    build_rope_factors,
)
from .hparams import HParams
from .metadata import Reader, read_hparams

_SCALE_EMBD, _SCALE_DEPTH, _N_EMBD_BASE = 12.0, 1.4, 256


@dataclass(frozen=True, kw_only=True)
class MiniCPM3HParams(HParams):
    """The ranks of the rows that Q, and K and V, come from."""

    n_lora_q: int
    n_lora_kv: int


def _read(r: Reader) -> MiniCPM3HParams:
    n_embd_head_k = r.integer(Keys.Attention.KEY_LENGTH)
    return read_hparams(
        MiniCPM3HParams,
        r,
        rope_type="neox",
        rope_first=n_embd_head_k - r.integer(Keys.Rope.DIMENSION_COUNT, n_embd_head_k),
        f_embedding_scale=_SCALE_EMBD,
        n_lora_q=r.integer(Keys.Attention.Q_LORA_RANK),
        n_lora_kv=r.integer(Keys.Attention.KV_LORA_RANK),
    )


def build_minicpm3(b: Build[MiniCPM3HParams]) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    mla = MLA(hp.n_lora_q, hp.n_lora_kv, hp.n_embd_head_k, hp.n_embd_head_v, hp.n_rot)
    scale = _SCALE_DEPTH / math.sqrt(hp.n_layer)

    def scaled(cur: Tensor, il: int) -> Tensor:
        return b.cb(gg.scale(cur, scale), "hidden_scaled", il)

    with b.ctx:
        inpL = build_inp_embd(b)
        inp_pos = build_inp_pos(b)
        factors = build_rope_factors(b)

        def layer(inpL: Tensor, il: int) -> Tensor:
            cur = build_norm(b, inpL, "attn_norm", "attn_norm", il)
            cur = build_mla(b, cur, inp_pos, factors, il, mla)
            cur = b.linear("attn_output", cur, hp.n_embd, "kqv_out", il)
            cur, inpL = build_out_rows(b, il, cur, inpL)
            ffn_inp = b.cb(gg.add(scaled(cur, il), inpL), "ffn_inp", il)
            cur = build_ffn(b, build_norm(b, ffn_inp, "ffn_norm", "ffn_norm", il), il)
            return b.cb(gg.add(scaled(cur, il), ffn_inp), "l_out", il)

        inpL = b.layers(layer, inpL)
        cur = build_norm(b, inpL, "output_norm", "result_norm")
        return build_lm_head(b, b.cb(gg.scale(cur, _N_EMBD_BASE / hp.n_embd), "lmhead_scaling"))


ARCHITECTURES = (Architecture(("minicpm3",), build_minicpm3, _read),)
