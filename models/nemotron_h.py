"""Nemotron-H (arXiv 2504.03624), with or without mixtures of experts. A layer is one thing: Mamba-2, or attention
without positions, or a network. A draft head is attention and then experts. Its last norm is an RMS norm like the
others, as in vLLM's `nemotron_h_mtp.py` (in llama.cpp it also subtracts the mean)."""

from __future__ import annotations

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
    build_lm_head,
    build_norm,
    build_out_rows,
    build_qkv,
    build_router,
    llm_build_kv,
)
from .blocks.ssm import build_mamba2
from .hparams import Router, StateShape
from .mamba import MambaHParams, read_ssm
from .metadata import Reader, read_hparams, read_router


@dataclass(frozen=True, kw_only=True)
class NemotronHParams(MambaHParams):
    """n_latent: elements of the rows that the experts read and give; 0: n_embd."""

    n_latent: int = 0

    def has_kv(self, il: int) -> bool:
        """A layer attends when it has heads and no network. A draft head has both."""
        n = self.layer(il)
        return n.n_head_kv > 0 and (n.n_ff == 0 or self.is_head)

    def state(self, il: int) -> StateShape:
        """A layer with neither heads nor a network is Mamba-2."""
        n = self.layer(il)
        return self.ssm.state if n.n_head_kv == 0 and n.n_ff == 0 else StateShape()


def _read(r: Reader) -> NemotronHParams:
    eps = r.number(Keys.Attention.LAYERNORM_RMS_EPS, r.number(Keys.Attention.LAYERNORM_EPS, 0.0))
    router = read_router(r, Router(gating="sigmoid", norm=False))
    hp = read_hparams(
        NemotronHParams,
        r,
        ssm=read_ssm(r),
        f_norm_rms_eps=eps,
        rope_layers=0,
        router=router,
        n_latent=r.integer(Keys.LLM.MOE_LATENT_SIZE, 0),
    )
    if hp.is_head and not hp.has_kv(0):
        r.fail(Keys.Attention.HEAD_COUNT_KV, "says that a layer which drafts does not attend")
    return hp


def build_model(b: Build[NemotronHParams]) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        inpL = build_inp_embd(b)
        for il in range(hp.n_layer):
            cur = build_norm(b, inpL, "attn_norm", "attn_norm", il)
            if hp.has_kv(il):
                cur = llm_build_kv(b, KV(*build_qkv(b, cur, il), build_inp_kq_mask(b, il), il))
                if hp.is_head:
                    inpL = b.cb(gg.add(cur, inpL), "ffn_inp", il)
                    cur = _ffn(b, hp, build_norm(b, inpL, "post_attention_norm", "ffn_norm", il), il)
            elif hp.layer(il).n_ff:
                cur = _ffn(b, hp, cur, il)
            else:
                cur = build_mamba2(b, cur, hp.ssm, il)
            cur, inpL = build_out_rows(b, il, cur, inpL)
            inpL = b.cb(gg.add(cur, inpL), "l_out", il)
        return build_lm_head(b, build_norm(b, inpL, "output_norm", "result_norm"))


def _ffn(b: Build, hp: NemotronHParams, cur: Tensor, il: int) -> Tensor:
    """A network, or experts on a product of fewer elements, and one that all share."""
    if not hp.n_expert:
        return build_ffn(b, cur, il, "relu_sqr", gated=False)
    n = hp.layer(il)
    n_ff_exp = n.n_ff_exp if hp.n_ff_exp else n.n_ff // hp.n_expert_used
    selected, weights = build_router(b, cur, il)
    latent = b.linear("ffn_latent_down", cur, hp.n_latent, "ffn_latent", il) if hp.n_latent else cur
    out = build_experts(b, latent, selected, weights, n_ff_exp, il, "relu_sqr", gated=False)
    if hp.n_latent:
        out = b.linear("ffn_latent_up", out, cur.ne[0], "ffn_latent_out", il)
    shared = build_ffn(b, cur, il, "relu_sqr", gated=False, n_ff=hp.n_ff_shexp, kind="_shexp")
    return b.cb(gg.add(out, shared), "ffn_out", il)


ARCHITECTURES = (
    Architecture(("nemotron_h",), build_model, _read, "hybrid"),
    Architecture(("nemotron_h_moe",), build_model, _read, "hybrid", nextn=True),
)
