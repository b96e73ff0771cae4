"""MiniMax-Text-01 (arXiv 2501.08313): lightning attention (arXiv 2401.04658), with ordinary attention in every eighth
layer, and mixtures of experts. The residual of a block is its normed input, not the input itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import (
    KV,
    Build,
    build_inp_embd,
    build_inp_kq_mask,
    build_inp_pos,
    build_lm_head,
    build_moe_ffn,
    build_norm,
    build_out_rows,
    build_qkv,
    build_rope,
    llm_build_kv,
)
from .blocks.linear_attn import build_linear_attn
from .hparams import HParams, StateShape
from .metadata import Reader, read_hparams, read_recurrent


@dataclass(frozen=True, kw_only=True)
class MiniMaxHParams(HParams):
    """recurrent: 1 for each layer with lightning attention."""

    recurrent: tuple[int, ...]

    def has_kv(self, il: int) -> bool:
        """Layers without lightning attention have a cache."""
        return not self.recurrent[il]

    def state(self, il: int) -> StateShape:
        """A recurrent layer remembers a matrix for each head."""
        n = self.layer(il)
        return StateShape(s=n.n_embd_q * n.n_embd_head_k) if self.recurrent[il] else StateShape()


def _read(r: Reader) -> MiniMaxHParams:
    scale = r.number(Keys.LLM.RESIDUAL_SCALE)
    return read_hparams(MiniMaxHParams, r, recurrent=read_recurrent(r, 8), f_residual_scale=scale, rope_type="neox")


def build_model(b: Build[MiniMaxHParams]) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        inpL = build_inp_embd(b)
        inp_pos = build_inp_pos(b)
        for il in range(hp.n_layer):
            normed = build_norm(b, inpL, "attn_norm", "attn_norm", il)
            if hp.recurrent[il]:
                cur = _lightning(b, normed, il)
            else:
                Qcur, Kcur, Vcur = build_qkv(b, normed, il)
                Qcur = build_rope(b, Qcur, inp_pos, None, "Qcur", il)
                Kcur = build_rope(b, Kcur, inp_pos, None, "Kcur", il)
                cur = llm_build_kv(b, KV(Qcur, Kcur, Vcur, build_inp_kq_mask(b, il), il))
            cur, normed = build_out_rows(b, il, cur, normed)
            ffn_inp = b.cb(gg.add(cur, gg.scale(normed, hp.f_residual_scale)), "ffn_inp", il)
            normed = build_norm(b, ffn_inp, "ffn_norm", "ffn_norm", il)
            cur = build_moe_ffn(b, normed, il)
            inpL = b.cb(gg.add(cur, gg.scale(normed, hp.f_residual_scale)), "l_out", il)
        return build_lm_head(b, build_norm(b, inpL, "output_norm", "result_norm"))


def _lightning(b: Build, cur: Tensor, il: int) -> Tensor:
    """Linear attention whose heads fade at fixed rates, faster in the first layers: ne as `cur`."""
    hp, n, n_tokens = b.hparams, b.hparams.layer(il), b.n_tokens
    head, n_head = n.n_embd_head_k, n.n_head
    qkv = b.cb(gg.silu(b.linear("attn_qkv", cur, 3 * n.n_embd_q, "QKVcur", il)), "QKVcur_silu", il)
    size = qkv.nb[0]
    q, k, v = (gg.view_3d(qkv, head, n_head, n_tokens, 3 * head * size, qkv.nb[1], i * head * size) for i in range(3))
    layer = 1.0 - il / max(hp.n_layer - 1, 1) + 1e-5
    slopes = gg.exp(gg.scale(gg.arange(1.0, n_head + 1.0, 1.0), -8.0 / n_head * math.log(2.0)))  # 2^(-8 i / n_head)
    fades = gg.reshape_3d(b.cb(gg.exp(gg.scale(slopes, -layer)), "decay", il), 1, n_head, 1)
    y = build_linear_attn(b, q, k, v, gg.repeat_4d(fades, head, n_head, n_tokens, 1), il)
    y = gg.reshape_2d(y, n.n_embd_q, n_tokens)
    y = build_norm(b, y, "attn_norm_2", "qkv_norm", il, eps=b.hparams.f_norm_inner_eps)
    gate = b.cb(gg.sigmoid(b.linear("attn_gate", cur, n.n_embd_q, "g", il)), "g_sigm", il)
    return b.linear("attn_output", b.cb(gg.mul(gate, y), "attn_gated", il), hp.n_embd, "attn_out", il)


ARCHITECTURES = (Architecture(("minimax-01",), build_model, _read, "hybrid"),)
