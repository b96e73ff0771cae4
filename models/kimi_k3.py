"""Kimi K3 (llama.cpp's `kimi-k3`, https://github.com/ggml-org/llama.cpp): Kimi Linear without positions, whose experts
read a narrower row, and whose layers attend to earlier layers.

After every n_res_block layers the residual is put aside, and a new one begins with the output of attention. Attention,
network and logits read a weighted sum of all residuals, those put aside and the present one. The weights are a softmax
over scores, one for each residual (attention residuals). Gate and value of all networks are bounded by a tanh (SiTU).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import (
    Build,
    build_attn_gate,
    build_experts,
    build_ffn,
    build_inp_embd,
    build_inp_out_ids,
    build_inp_pos,
    build_lm_head,
    build_norm,
    build_router,
    build_shared_expert,
)
from .hparams import Router
from .hyper import weighted_streams
from .kimi_linear import GATE_LOWER_BOUND, K, KimiHParams, KimiLinear, gate_and_up, read_kimi
from .metadata import Reader, read_router

_LATENT, _BLOCK, _BETA, _LINEAR_BETA = (
    f"{{arch}}.{key}"
    for key in ("expert_latent_length", "attn_res.block_size", "activation.situ_beta", "activation.situ_linear_beta")
)


@dataclass(frozen=True, kw_only=True)
class KimiK3HParams(KimiHParams):
    """Hyperparameters of Kimi K3.

    n_latent          elements of the row that experts read; 0: n_embd
    n_res_block       after how many layers the residual is put aside; 0: never
    situ_beta         the bound of the gate
    situ_linear_beta  the bound of the value; 0: no bound
    """

    n_latent: int
    n_res_block: int
    situ_beta: float
    situ_linear_beta: float


@dataclass(frozen=True, kw_only=True)
class BoundedKimi(KimiLinear[K]):
    """Decays have a bound, when the file has one."""

    def decay(self, b: Build[K], hp: K, cur: Tensor, il: int) -> Tensor:
        s, n_head = hp.n_embd_head_kda, hp.n_head_kda
        g = b.mul_mat(b.weight("ssm_f_a", (hp.n_embd, s), il), cur)
        g = b.cb(b.mul_mat(b.weight("ssm_f_b", (s, s * n_head), il), g), "g1", il)
        g = gg.reshape_3d(gg.add(g, b.weight("ssm_dt", (s * n_head,), il, "bias")), s, n_head, b.n_tokens)
        a = gg.reshape_2d(b.weight("ssm_a", (n_head,), il, ""), 1, n_head)
        if not hp.gate_lower_bound:
            return b.cb(gg.mul(gg.softplus(g), a), "kda_g1", il)
        g = gg.sigmoid(gg.scale(gg.mul(g, a), -1.0))  # `ssm_a` is negative
        return b.cb(gg.scale(g, hp.gate_lower_bound), "kda_g1", il)


@dataclass(frozen=True, kw_only=True)
class KimiK3(BoundedKimi[KimiK3HParams]):
    """One weight makes the gate of a delta net; latent attention may have a gate; see the module."""

    def gate(self, b: Build[KimiK3HParams], hp: KimiK3HParams, cur: Tensor, il: int) -> Tensor:
        return b.linear("ssm_g", cur, hp.n_embd_head_kda * hp.n_head_kda, "g2", il)

    def latent(self, b: Build[KimiK3HParams], hp: KimiK3HParams, cur: Tensor, pos: Tensor, il: int) -> Tensor:
        attn = super().latent(b, hp, cur, pos, il)
        if b.optional("attn_gate", (hp.n_embd, attn.ne[0]), il) is None:
            return attn
        return build_attn_gate(b, attn, cur, il, gg.sigmoid)

    def build(self, b: Build[KimiK3HParams]) -> Graph:
        hp = b.hparams
        with b.ctx:
            cur = build_inp_embd(b)
            pos = build_inp_pos(b)
            kept: Tensor | None = None
            for il in range(hp.n_layer):
                read = build_norm(b, mixed(b, kept, cur, "attn_res_score", il), "attn_norm", "attn_norm", il)
                keep = hp.n_res_block and il % hp.n_res_block == 0
                if keep:
                    row = gg.reshape_3d(cur, hp.n_embd, 1, b.n_tokens)
                    kept = row if kept is None else gg.concat(kept, row, 1)
                attn = self.attention(b, read, pos, None, il)
                cur = b.cb(attn if keep else gg.add(cur, attn), "prefix_sum_attn", il)
                read = build_norm(b, mixed(b, kept, cur, "ffn_res_score", il), "ffn_norm", "ffn_norm", il)
                cur = b.cb(gg.add(cur, self.ffn(b, read, il)), "l_out", il)
            cur = gg.get_rows(mixed(b, kept, cur, "output_res_score", -1), build_inp_out_ids(b))
            return build_lm_head(b, build_norm(b, cur, "output_norm", "result_norm"))

    def ffn(self, b: Build[KimiK3HParams], cur: Tensor, il: int) -> Tensor:
        hp = b.hparams
        act = partial(situ, beta=hp.situ_beta, linear_beta=hp.situ_linear_beta)
        if not hp.is_moe(il):
            return build_ffn(b, cur, il, act)
        selected, weights = build_router(b, cur, il)
        inp = b.linear("ffn_routed_down", cur, hp.n_latent, "ffn_routed_down", il) if hp.n_latent else cur
        out = build_experts(b, inp, selected, weights, hp.layer(il).n_ff_exp, il, act)
        if hp.n_latent:
            if b.optional("ffn_routed_norm", (hp.n_latent,), il) is not None:
                out = build_norm(b, out, "ffn_routed_norm", "ffn_routed_norm", il)
            out = b.linear("ffn_routed_up", out, hp.n_embd, "ffn_routed_up", il)
        return b.cb(gg.add(out, build_shared_expert(b, cur, il, act)) if hp.n_ff_shexp else out, "ffn_out", il)


def mixed(b: Build[KimiK3HParams], kept: Tensor | None, cur: Tensor, role: str, il: int) -> Tensor:
    """The sum of the residuals `kept`, ne [n_embd, n, n_tokens], and of `cur`, ne [n_embd, n_tokens], by the softmax of
    their scores; they are scored by a product with each of them, normed."""
    n_embd, n_tokens = cur.ne[:2]
    hp = b.hparams
    if not hp.n_res_block:
        return cur
    w = b.weight(role, (n_embd,), il)  # a file also has the first one, though there is one residual only
    if kept is None:
        return cur
    x = gg.concat(kept, gg.reshape_3d(cur, n_embd, 1, n_tokens), 1)
    scores = b.mul_mat(w, build_norm(b, x, "", "res_normed", il))
    probs = b.cb(gg.soft_max(gg.reshape_2d(scores, x.ne[1], n_tokens)), "res_probs", il)
    return b.cb(weighted_streams(x, probs), "res_mixed", il)


def situ(gate: Tensor, up: Tensor | None, beta: float, linear_beta: float) -> Tensor:
    """beta tanh(gate / beta) sigmoid(gate), times linear_beta tanh(up / linear_beta), or `up` for a linear_beta of 0.
    Without `up` both are in the halves of each row."""
    gate, up = gate_and_up(gate, up)
    cur = gg.mul(_bounded(gate, beta), gg.sigmoid(gate))
    return gg.mul(cur, _bounded(up, linear_beta) if linear_beta > 0 else up)


def _bounded(t: Tensor, limit: float) -> Tensor:
    return gg.scale(gg.tanh(gg.scale(t, 1.0 / limit)), limit)


def _read(r: Reader) -> KimiK3HParams:
    beta = r.number(_BETA)
    if beta <= 0:
        r.fail(_BETA, f"is {beta}, not positive")
    return read_kimi(
        KimiK3HParams,
        r,
        n_lora_q=r.integer(Keys.Attention.Q_LORA_RANK, 0),
        gate_lower_bound=r.number(GATE_LOWER_BOUND, 0.0),
        router=read_router(r, Router(norm=False)),
        n_latent=r.integer(_LATENT, 0),
        n_res_block=r.integer(_BLOCK),
        situ_beta=beta,
        situ_linear_beta=r.number(_LINEAR_BETA),
    )


ARCHITECTURES = (Architecture(("kimi-k3",), KimiK3(rope_factors=False).build, _read, "hybrid"),)
