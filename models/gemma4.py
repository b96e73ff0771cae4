"""Gemma 4 (Google, huggingface.co/google/gemma-4-E2B-it).

There are norms before and after attention and network. Q, K and V are normed (V without weights), and scores are not
scaled. Most layers have a window. The other layers have larger heads, and only a part of each head is roped (the
frequency factors of the rest are 1e30); in some models their V is K before its norm.

In the small models the last layers have no K and V of their own: they attend to those of an earlier layer of their
kind. Each layer also reads an embedding that the token has for this layer. The large model has a mixture of experts
beside the network; its router reads the output of attention."""

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
    build_experts,
    build_ffn,
    build_inp_embd,
    build_inp_kq_mask,
    build_inp_per_layer,
    build_inp_pos,
    build_lm_head,
    build_norm,
    build_out_rows,
    build_qkv,
    build_rope,
    build_rope_factors,
    build_router,
    llm_build_kv,
    per_layer_rows,
)
from .blocks.ffn import ACTIVATIONS
from .hparams import HParams, LayerShape, RopeShape, refuse
from .metadata import Reader, read_hparams, read_window


@dataclass(frozen=True, kw_only=True)
class Gemma4HParams(HParams):
    """Hyperparameters of Gemma 4.

    n_embd_per_layer       elements of the embedding that a token has for each layer; 0: there are no such embeddings
    n_layer_kv_from_start  how many layers, from the first on, have K and V of their own; 0: all
    """

    n_embd_per_layer: int
    n_layer_kv_from_start: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        first = self.n_layer_kv_from_start
        if not 0 <= first <= self.n_layer:
            refuse("n_layer_kv_from_start", first, f"there are {self.n_layer} layers")
        for il in range(first or self.n_layer, self.n_layer):
            source = self.kv_layer(il)
            if source < 0 or _kv_sizes(self.layer(il)) != _kv_sizes(self.layer(source)):
                why = f"layer {il} is to attend to K and V of one before, of which none is of its kind and shape"
                refuse("n_layer_kv_from_start", first, why)

    def kv_layer(self, il: int) -> int:
        """The layer whose K and V layer `il` attends to. For a layer without K and V it is the last layer of the same
        kind (with a window, or without) that has them; -1 when there is no such layer."""
        first = self.n_layer_kv_from_start
        if not first or il < first:
            return il
        return next((i for i in reversed(range(first)) if self.is_swa(i) == self.is_swa(il)), -1)

    def rope(self, il: int) -> RopeShape | None:
        """How layer `il` is roped. Layers with the window have no frequency factors."""
        shape = super().rope(il)
        return shape and shape._replace(factors=not self.is_swa(il))


def _kv_sizes(n: LayerShape) -> tuple[int, int, int]:
    return n.n_head_kv, n.n_embd_head_k, n.n_embd_head_v


def read_shared_kv(r: Reader, default: int = 0) -> int:
    """How many layers have K and V of their own; 0: all. The file says how many do not."""
    n_layer, n_shared = r.integer(Keys.LLM.BLOCK_COUNT), r.integer(Keys.Attention.SHARED_KV_LAYERS, default)
    if n_shared >= n_layer:
        r.fail(Keys.Attention.SHARED_KV_LAYERS, f"is {n_shared}; there are {n_layer} layers")
    return n_layer - n_shared if n_shared else 0


def build_gemma4(b: Build[Gemma4HParams]) -> Graph:
    """The graph of one ubatch; its last node is `result_output`, ne [n_vocab, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        inpL = build_inp_embd(b)
        inp_pos = build_inp_pos(b)
        factors = build_rope_factors(b)
        per_layer = build_inp_per_layer(b, inpL, hp.n_embd_per_layer) if hp.n_embd_per_layer else None
        for il in range(hp.n_layer):
            cur = build_norm(b, inpL, "attn_norm", "attn_norm", il)
            cur = llm_build_kv(b, _kv(b, cur, inp_pos, factors, il))
            cur, inpL = build_out_rows(b, il, cur, inpL)
            cur = build_norm(b, cur, "post_attention_norm", "attn_post_norm", il)
            attn_out = b.cb(gg.add(cur, inpL), "attn_out", il)
            cur = build_norm(b, _ffn(b, attn_out, il), "post_ffw_norm", "ffn_post_norm", il)
            cur = b.cb(gg.add(cur, attn_out), "pe_in", il)
            if per_layer is not None:
                (own,) = build_out_rows(b, il, per_layer_rows(per_layer, il))
                cur = b.cb(gg.add(cur, _per_layer(b, cur, own, il)), "per_layer_added", il)
            scale = b.optional("layer_output_scale", (1,), il)
            if scale is not None:
                cur = b.cb(gg.mul(cur, scale), "out_scaled", il)
            inpL = b.cb(cur, "l_out", il)
        return build_lm_head(b, build_norm(b, inpL, "output_norm", "result_norm"))


def _kv(b: Build, cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> KV:
    """What attention takes in layer `il`, which reads `cur`."""
    hp, n, mask = b.hparams, b.hparams.layer(il), build_inp_kq_mask(b, il)
    sizes = (n.n_embd_q, n.n_embd_k_gqa, n.n_embd_v_gqa)
    in_one = b.optional("attn_qkv", (cur.ne[0], sum(sizes)), il)
    if not hp.has_kv(il):
        for role, size in (("attn_k", sizes[1]), ("attn_v", sizes[2])):
            b.optional(role, (cur.ne[0], size), il)  # declared so that the loader does not report it as unused
        b.optional("attn_k_norm", (n.n_embd_head_k,), il)
        if in_one is None:
            Qcur = b.linear("attn_q", cur, sizes[0], "Qcur", il)
        else:
            wqkv = b.linear("attn_qkv", cur, sum(sizes), "wqkv", il)
            Qcur = gg.cont(gg.view_2d(wqkv, sizes[0], b.n_tokens, wqkv.nb[1], 0))
        Qcur = gg.reshape_3d(Qcur, n.n_embd_head_k, n.n_head, b.n_tokens)
        return KV(_normed(b, Qcur, "q", pos, factors, il), None, None, mask, il)
    if in_one is not None or b.optional("attn_v", (cur.ne[0], sizes[2]), il) is not None:
        Qcur, Kcur, Vcur = build_qkv(b, cur, il)
    else:
        Qcur = gg.reshape_3d(b.linear("attn_q", cur, sizes[0], "Qcur", il), n.n_embd_head_k, n.n_head, b.n_tokens)
        Vcur = b.linear("attn_k", cur, sizes[1], "Kcur", il)
        Kcur = gg.reshape_3d(Vcur, n.n_embd_head_k, n.n_head_kv, b.n_tokens)
    if not Vcur.is_contiguous:
        Vcur = gg.cont(Vcur)
    Vcur = gg.reshape_3d(Vcur, n.n_embd_head_v, n.n_head_kv, b.n_tokens)
    Vcur = build_norm(b, Vcur, "", "Vcur_normed", il)
    Qcur, Kcur = _normed(b, Qcur, "q", pos, factors, il), _normed(b, Kcur, "k", pos, factors, il)
    return KV(Qcur, Kcur, gg.reshape_2d(Vcur, n.n_embd_v_gqa, b.n_tokens), mask, il)


def _normed(b: Build, cur: Tensor, part: str, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
    """Q or K, ne [n_embd_head_k, their heads, n_tokens], normed and roped."""
    name = f"{part.upper()}cur"
    cur = build_norm(b, cur, f"attn_{part}_norm", f"{name}_normed", il)
    return build_rope(b, cur, pos, factors, f"{name}_pos", il)


def _ffn(b: Build[Gemma4HParams], attn_out: Tensor, il: int) -> Tensor:
    """The network of layer `il`, plus its experts when the layer has a router, each normed."""
    hp, n_embd = b.hparams, attn_out.ne[0]
    cur = build_ffn(b, build_norm(b, attn_out, "ffn_norm", "ffn_norm", il), il, "gelu")
    if not hp.n_expert or b.optional("ffn_gate_inp", (n_embd, hp.n_expert), il) is None:
        return cur
    cur = build_norm(b, cur, "post_ffw_norm_1", "ffn_mlp", il)
    by = gg.scale(build_norm(b, attn_out, "", "ffn_moe_normed", il), 1.0 / math.sqrt(n_embd))
    by = b.cb(gg.mul(by, b.weight("ffn_gate_inp", (n_embd,), il, "scale")), "ffn_moe_inp", il)
    selected, weights = build_router(b, by, il)
    moe = build_norm(b, attn_out, "pre_ffw_norm_2", "ffn_norm_2", il)
    moe = build_experts(b, moe, selected, weights, hp.layer(il).n_ff_exp, il, "gelu")
    moe = build_norm(b, moe, "post_ffw_norm_2", "ffn_moe", il)
    return b.cb(gg.add(cur, moe), "ffn_moe_combined", il)


def _per_layer(b: Build[Gemma4HParams], cur: Tensor, own: Tensor, il: int) -> Tensor:
    """What the embedding `own` that tokens have for layer `il` adds to `cur`, which gates it."""
    hp = b.hparams
    gate = b.linear("inp_gate", cur, own.ne[0], "per_layer_gate", il)
    out = b.linear("proj", gg.mul(ACTIVATIONS[hp.act or "gelu"](gate), own), cur.ne[0], "per_layer_proj", il)
    return build_norm(b, out, "post_norm", "per_layer_embd_out", il)


def _read(r: Reader) -> Gemma4HParams:
    return read_hparams(
        Gemma4HParams,
        r,
        rope_type="neox",
        f_embedding_scale=math.sqrt(r.integer(Keys.LLM.EMBEDDING_LENGTH)),
        f_attention_scale=1.0,
        f_final_logit_softcapping=r.number(Keys.LLM.FINAL_LOGIT_SOFTCAPPING, 0.0),
        n_layer_kv_from_start=read_shared_kv(r),
        n_embd_per_layer=r.integer(Keys.LLM.EMBD_LENGTH_PER_LAYER_INP, 0),
        **{**read_window(r, 0, plain_rope=True), "swa_pattern": r.flags(Keys.Attention.SLIDING_WINDOW_PATTERN)},
    )


ARCHITECTURES = (Architecture(("gemma4",), build_gemma4, _read),)
