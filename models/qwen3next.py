"""Qwen3-Next (huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct) and Qwen 3.5: gated delta nets (arXiv 2412.06464), and
some layers with gated attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import KV, Build, build_attn, build_inp_kq_mask, build_norm, build_rope
from .blocks.linear_attn import build_delta_net, l2_norm
from .blocks.ssm import SSM
from .blocks.states import build_conv, parts_of_rows
from .decoder import PlainDecoder
from .hparams import HParams, StateShape
from .mamba import read_ssm
from .metadata import Reader, read_hparams, read_recurrent, read_rope_sections


@dataclass(frozen=True, kw_only=True)
class QwenHParams(HParams):
    """recurrent: 1 for each layer with a delta net. ssm: the sizes of a delta net. It has dt_rank heads of V and
    n_group heads of Q and K, with d_state elements each."""

    recurrent: tuple[int, ...]
    ssm: SSM

    def has_kv(self, il: int) -> bool:
        """Layers without a delta net attend."""
        return not self.recurrent[il]

    def state(self, il: int) -> StateShape:
        """A delta net remembers as many floats as a Mamba layer of its sizes."""
        return self.ssm.state if self.recurrent[il] else StateShape()


Q = TypeVar("Q", bound=QwenHParams)


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(PlainDecoder[Q]):
    """interleaved: heads of V that share one of Q and K lie side by side. The inputs of a delta net come from fewer,
    wider weights. net_gate: what the gate of its results goes through."""

    interleaved: bool = False
    net_gate: Literal["silu", "sigmoid"] = "silu"

    def attention(self, b: Build[Q], cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        hp = b.hparams
        return self._delta_net(b, hp, cur, il) if hp.recurrent[il] else self._gated_attention(b, cur, pos, il)

    def _gated_attention(self, b: Build[Q], cur: Tensor, pos: Tensor, il: int) -> Tensor:
        """Each head of Q has a gate beside it."""
        n = b.hparams.layer(il)
        head = n.n_embd_head_k
        bias = self.biases != "none"
        q_gate = b.linear("attn_q", cur, 2 * n.n_embd_q, "Qcur_full", il, bias=bias)
        row = q_gate.nb[1]
        Qcur, gate = (
            gg.view_3d(q_gate, head, n.n_head, b.n_tokens, 2 * head * q_gate.nb[0], row, i * head * q_gate.nb[0])
            for i in (0, 1)
        )
        Kcur = gg.reshape_3d(
            b.linear("attn_k", cur, n.n_embd_k_gqa, "Kcur", il, bias=bias), head, n.n_head_kv, b.n_tokens
        )
        Vcur = b.linear("attn_v", cur, n.n_embd_v_gqa, "Vcur", il, bias=bias)
        Qcur = build_rope(b, build_norm(b, Qcur, "attn_q_norm", "Qcur_normed", il), pos, None, "Qcur", il)
        Kcur = build_rope(b, build_norm(b, Kcur, "attn_k_norm", "Kcur_normed", il), pos, None, "Kcur", il)
        attn = build_attn(b, KV(Qcur, Kcur, Vcur, self.mask(b, cur, pos, il), il))
        gate = b.cb(gg.sigmoid(gg.cont_2d(gate, n.n_embd_q, b.n_tokens)), "gate_sigmoid", il)
        return b.linear("attn_output", b.cb(gg.mul(attn, gate), "attn_gated", il), cur.ne[0], "attn_output", il)

    def mask(self, b: Build[Q], cur: Tensor, pos: Tensor, il: int) -> Tensor:
        """The mask of a layer that attends, which reads `cur`."""
        return build_inp_kq_mask(b, il)

    def _delta_net(self, b: Build, hp: QwenHParams, cur: Tensor, il: int) -> Tensor:
        m, s, n_tokens = hp.ssm, hp.ssm.d_state, b.n_tokens
        n_key = m.n_group * s
        qkv, z = self._qkvz(b, m, cur, il)
        alpha, beta = self._alpha_beta(b, m, cur, il)
        g = gg.softplus(gg.add(alpha, b.weight("ssm_dt", (m.dt_rank,), il, "bias")))
        g = b.cb(gg.mul(g, b.weight("ssm_a", (m.dt_rank,), il, "")), "gate", il)
        qkv = b.cb(gg.silu(build_conv(b, qkv, "ssm_conv1d", m.d_conv, il)), "conv_output_silu", il)
        v = parts_of_rows(qkv, 2 * n_key, m.dt_rank, s)
        eps = hp.f_norm_inner_eps or hp.f_norm_rms_eps
        q, k = (l2_norm(parts_of_rows(qkv, first, m.n_group, s), eps) for first in (0, n_key))
        if self.interleaved and m.n_group != m.dt_rank:
            each = m.dt_rank // m.n_group
            ne = s, m.dt_rank, n_tokens
            q, k = (
                gg.reshape_3d(
                    gg.repeat_4d(gg.reshape_4d(t, s, 1, m.n_group, n_tokens), s, each, m.n_group, n_tokens), *ne
                )
                for t in (q, k)
            )
        g, beta = (gg.reshape_3d(t, 1, m.dt_rank, n_tokens) for t in (g, gg.sigmoid(beta)))
        out = build_norm(b, build_delta_net(b, q, k, v, g, beta, il), "ssm_norm", "delta_normed", il)
        gate = (gg.silu if self.net_gate == "silu" else gg.sigmoid)(gg.reshape_3d(z, s, m.dt_rank, n_tokens))
        out = gg.mul(out, gate)
        out = gg.reshape_2d(b.cb(out, "final_output", il), m.d_inner, n_tokens)
        return b.linear("ssm_out", out, cur.ne[0], "linear_attn_out", il)

    def _qkvz(self, b: Build, m: SSM, cur: Tensor, il: int) -> tuple[Tensor, Tensor]:
        """What is convolved, ne [2 * n_key + d_inner, n_tokens], and what gates the result, ne [d_inner, n_tokens]."""
        n_key = m.n_group * m.d_state
        n_conv, n_in = 2 * n_key + m.d_inner, 2 * (n_key + m.d_inner)
        old = b.optional("ssm_in", (cur.ne[0], n_in), il) if self.interleaved else None
        if old is None or b.optional("attn_qkv", (cur.ne[0], n_conv), il) is not None:
            qkv = b.linear("attn_qkv", cur, n_conv, "linear_attn_qkv_mixed", il)
            return qkv, b.linear("attn_gate", cur, m.d_inner, "z", il)
        # Old files: for each head of Q and K its rows, then those of V and z that share it.
        qkvz = b.linear("ssm_in", cur, n_in, "linear_attn_mixed_qkvz", il)
        size, s, each = qkvz.nb[0], m.d_state, m.d_inner // m.n_group
        group = n_in // m.n_group * size
        parts = (
            gg.cont_2d(
                gg.view_3d(qkvz, n, m.n_group, b.n_tokens, group, qkvz.nb[1], first * size), n * m.n_group, b.n_tokens
            )
            for n, first in ((s, 0), (s, s), (each, 2 * s), (each, 2 * s + each))
        )
        q, k, v, z = parts
        return b.cb(gg.concat(gg.concat(q, k, 0), v, 0), "qkv_mixed", il), b.cb(z, "z", il)

    def _alpha_beta(self, b: Build, m: SSM, cur: Tensor, il: int) -> tuple[Tensor, Tensor]:
        """Alpha, which makes the decay, and beta, how much is written: both ne [dt_rank, n_tokens]."""
        if not self.interleaved:
            alpha, beta = (b.linear(f"ssm_{name}", cur, m.dt_rank, name, il) for name in ("alpha", "beta"))
            return alpha, beta
        ba = b.linear("ssm_ba", cur, 2 * m.dt_rank, "linear_attn_mixed_ba", il)
        size, each = ba.nb[0], m.dt_rank // m.n_group
        beta, alpha = (
            gg.cont_2d(
                gg.view_3d(ba, each, m.n_group, b.n_tokens, 2 * each * size, ba.nb[1], i * each * size),
                m.dt_rank,
                b.n_tokens,
            )
            for i in (0, 1)
        )
        return alpha, beta


def _read(r: Reader) -> QwenHParams:
    own: dict[str, object] = {"rope_type": "neox"}
    if r.arch != "qwen3next":
        own = {"rope_type": "imrope", "rope_sections": read_rope_sections(r)}
    if r.arch != "qwen35" and not r.integer(Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, 0):
        own["n_ff_shexp"] = r.integer(Keys.LLM.FEED_FORWARD_LENGTH)
    ssm = read_ssm(r)
    if ssm.d_inner != ssm.dt_rank * ssm.d_state:
        r.fail(Keys.SSM.INNER_SIZE, f"is {ssm.d_inner}, not {ssm.dt_rank} heads of {ssm.d_state}")
    return read_hparams(QwenHParams, r, ssm=ssm, recurrent=read_recurrent(r, 4), **own)


_NEXT = Qwen3Next[QwenHParams](interleaved=True, ffn_norm="post_attention_norm", rope_factors=False, shared_gate=True)
_QWEN35 = Qwen3Next[QwenHParams](ffn_norm="post_attention_norm", rope_factors=False, shared_gate=True)
ARCHITECTURES = (
    Architecture(("qwen3next",), _NEXT.build, _read, "hybrid", nextn=True),
    Architecture(("qwen35", "qwen35moe"), _QWEN35.build, _read, "hybrid", nextn=True),
)
