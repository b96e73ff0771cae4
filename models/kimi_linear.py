"""Kimi Linear (arXiv 2510.26692) and Ling 3: delta nets with a decay for each key, some layers with latent attention,
and mixtures of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import (
    MLA,
    Build,
    build_attn_gate,
    build_mla,
    build_moe_or_ffn,
    build_norm,
)
from .blocks.ffn import Activation, Glu
from .blocks.linear_attn import build_delta_net, l2_norm
from .blocks.states import as_f32, build_conv_window
from .decoder import PlainDecoder
from .hparams import HParams, Router, StateShape
from .metadata import Reader, read_clamps, read_hparams, read_rope_sections, read_router

_KDA_HEADS = "{arch}.kda.head_count"  # only pyggml has this key
GATE_LOWER_BOUND = "{arch}.kda.gate_lower_bound"


@dataclass(frozen=True, kw_only=True)
class KimiHParams(HParams):
    """Hyperparameters of models with delta nets and latent attention.

    mla                 the sizes of latent attention
    d_conv              tokens that the convolution of a delta net reads
    n_embd_head_kda     elements of a head of a delta net
    n_head_kda          heads of a delta net: as many as the first layer has, unless the file says otherwise
    gate_lower_bound    the fastest decay; 0: decays have no bound
    f_l2_eps            epsilon of the norms of Q and K; 0: as in the other norms
    swiglu_clamp_exp    the limit of the gate and up rows of experts, by layer; 0: no limit
    swiglu_clamp_shexp  the same for networks that all tokens go through
    """

    mla: MLA
    d_conv: int
    n_embd_head_kda: int
    n_head_kda: int
    gate_lower_bound: float = 0.0
    f_l2_eps: float = 0.0
    swiglu_clamp_exp: tuple[float, ...] = ()
    swiglu_clamp_shexp: tuple[float, ...] = ()

    def state(self, il: int) -> StateShape:
        """Layers without heads of K and V are delta nets."""
        if self.has_kv(il):
            return StateShape()
        n = self.n_head_kda * self.n_embd_head_kda
        return StateShape(3 * (self.d_conv - 1) * n, n * self.n_embd_head_kda)


K = TypeVar("K", bound=KimiHParams)


@dataclass(frozen=True, kw_only=True)
class KimiLinear(PlainDecoder[K]):
    """A decoder in which layers without heads of K and V have a delta net instead of attention."""

    def attention(self, b: Build[K], cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        hp = b.hparams
        if hp.has_kv(il):
            return b.linear("attn_output", self.latent(b, hp, cur, pos, il), hp.n_embd, "mla_out", il)
        s, n_head, n_tokens = hp.n_embd_head_kda, hp.n_head_kda, b.n_tokens
        q, k, v = self._qkv(b, hp, cur, il)
        q, k = (l2_norm(t, hp.f_l2_eps or hp.f_norm_rms_eps) for t in (q, k))
        beta = gg.reshape_3d(gg.sigmoid(b.linear("ssm_beta", cur, n_head, "kda_beta", il)), 1, n_head, n_tokens)
        out = build_delta_net(b, q, k, v, self.decay(b, hp, cur, il), beta, il)
        out = build_norm(b, out, "ssm_norm", "kda_normed", il)
        gate = gg.reshape_3d(gg.sigmoid(self.gate(b, hp, cur, il)), s, n_head, n_tokens)
        out = gg.reshape_2d(b.cb(gg.mul(out, gate), "kda_gated", il), s * n_head, n_tokens)
        return b.linear("attn_output", out, hp.n_embd, "kda_out", il)

    def latent(self, b: Build[K], hp: K, cur: Tensor, pos: Tensor, il: int) -> Tensor:
        """What latent attention gives, before it is projected."""
        return build_mla(b, cur, pos, None, il, hp.mla)

    def decay(self, b: Build[K], hp: K, cur: Tensor, il: int) -> Tensor:
        """The logarithms of what each key's part of a state fades by: ne [s, n_head, n_tokens]."""
        s, n_head = hp.n_embd_head_kda, hp.n_head_kda
        g = b.mul_mat(b.weight("ssm_f_a", (hp.n_embd, s), il), cur)
        g = b.cb(b.mul_mat(b.weight("ssm_f_b", (s, s * n_head), il), g), "g1", il)
        g = gg.softplus(gg.add(g, b.weight("ssm_dt", (s * n_head,), il, "bias")))
        return b.cb(
            gg.mul(gg.reshape_3d(g, s, n_head, b.n_tokens), b.weight("ssm_a", (1, n_head), il, "")), "kda_g1", il
        )

    def gate(self, b: Build[K], hp: K, cur: Tensor, il: int) -> Tensor:
        """The gate of the results, before its sigmoid: ne [s * n_head, n_tokens]."""
        s = hp.n_embd_head_kda
        g = b.mul_mat(b.weight("ssm_g_a", (hp.n_embd, s), il), cur)
        return b.cb(b.mul_mat(b.weight("ssm_g_b", (s, s * hp.n_head_kda), il), g), "g2", il)

    def _qkv(self, b: Build[K], hp: K, cur: Tensor, il: int) -> tuple[Tensor, ...]:
        """Q, K and V, each convolved over time by weights of its own: ne [s, n_head, n_tokens]."""
        n = hp.n_head_kda * hp.n_embd_head_kda
        if b.optional("attn_qkv", (cur.ne[0], 3 * n), il) is None:
            q, k, v = (b.linear(f"attn_{x}", cur, n, f"{x}_proj", il, bias=False) for x in "qkv")
            qkv = gg.concat(gg.concat(q, k, 0), v, 0)
        else:
            qkv = b.linear("attn_qkv", cur, 3 * n, "qkv_proj", il, bias=False)
        window = build_conv_window(b, qkv, hp.d_conv, il)
        nb = window.nb

        def convolved(i: int, x: str) -> Tensor:
            w = gg.reshape_2d(b.weight(f"ssm_conv1d_{x}", (hp.d_conv, 1, n), il), hp.d_conv, n)
            part = gg.view_3d(window, window.ne[0], n, b.n_seqs, nb[1], nb[2], i * n * nb[1])
            out = b.cb(gg.silu(gg.ssm_conv(part, as_f32(w))), f"{x}_conv", il)
            return gg.reshape_3d(out, hp.n_embd_head_kda, hp.n_head_kda, b.n_tokens)

        return tuple(convolved(i, x) for i, x in enumerate("qkv"))


@dataclass(frozen=True, kw_only=True)
class Ling3(KimiLinear[KimiHParams]):
    """Attention has a gate for each head; decays are bounded; gate and up may be clamped."""

    def latent(self, b: Build[KimiHParams], hp: KimiHParams, cur: Tensor, pos: Tensor, il: int) -> Tensor:
        return build_attn_gate(b, super().latent(b, hp, cur, pos, il), cur, il, gg.sigmoid)

    def decay(self, b: Build[KimiHParams], hp: KimiHParams, cur: Tensor, il: int) -> Tensor:
        s, n_head = hp.n_embd_head_kda, hp.n_head_kda
        g = b.mul_mat(b.weight("ssm_f_a", (hp.n_embd, s * n_head), il), cur)
        g = gg.reshape_3d(gg.add(g, b.weight("ssm_dt", (s * n_head,), il, "bias")), s, n_head, b.n_tokens)
        g = gg.sigmoid(gg.mul(g, b.weight("ssm_a", (1, n_head), il, "")))
        return b.cb(gg.scale(g, hp.gate_lower_bound), "kda_gate", il)

    def gate(self, b: Build[KimiHParams], hp: KimiHParams, cur: Tensor, il: int) -> Tensor:
        return b.cb(b.mul_mat(b.weight("ssm_g_a", (hp.n_embd, hp.n_embd_head_kda * hp.n_head_kda), il), cur), "g2", il)

    def ffn(self, b: Build[KimiHParams], cur: Tensor, il: int) -> Tensor:
        hp = b.hparams
        limits = hp.swiglu_clamp_exp[il], hp.swiglu_clamp_shexp[il]
        return build_moe_or_ffn(b, cur, il, *map(_clamped_swiglu, limits))


def gate_and_up(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both; without `up` they are the halves of each row of `gate`."""
    if up is not None:
        return gate, up
    n = gate.ne[0] // 2
    gate, up = (gg.cont(gg.view_3d(gate, n, *gate.ne[1:3], *gate.nb[1:3], i * n * gate.nb[0])) for i in (0, 1))
    return gate, up


def _clamped_swiglu(limit: float) -> Glu | Activation:
    """silu(gate) * up, with silu(gate) at most `limit`, and up within -limit .. limit."""

    def glu(gate: Tensor, up: Tensor | None) -> Tensor:
        gate, up = gate_and_up(gate, up)
        return gg.mul(gg.clamp(gg.silu(gate), -math.inf, limit), gg.clamp(up, -limit, limit))

    return glu if limit else "silu"


def read_kimi(cls: type[K], r: Reader, *, n_lora_q: int = 0, n_rot: int | None = None, **own: object) -> K:
    """Read the hyperparameters, as `read_hparams` does. `n_lora_q` and `n_rot` are as in `MLA`; when `n_rot` is not
    given, the file says it. Nothing is roped, unless `own` says so."""
    attention = Keys.Attention
    base = read_hparams(HParams, r)
    mla = MLA(
        n_lora_q,
        r.integer(attention.KV_LORA_RANK),
        r.integer(attention.KEY_LENGTH_MLA),
        r.integer(attention.VALUE_LENGTH_MLA),
        base.n_rot if n_rot is None else n_rot,
    )
    keys = attention.KEY_LENGTH_MLA, attention.VALUE_LENGTH_MLA, Keys.SSM.CONV_KERNEL, Keys.KDA.HEAD_DIM
    for key, least in zip(keys, (mla.n_rot + 1, 1, 2, 1), strict=True):
        if r.integer(key) < least:
            r.fail(key, f"is {r.integer(key)}, less than {least}")
    common: dict[str, object] = {
        "mla": mla,
        "n_embd_head_v": mla.n_lora_kv,
        "v_in_k": True,
        "rope_layers": 0,
        "rope_first": mla.n_lora_kv if mla.n_rot else 0,
        "f_attention_scale": mla.n_embd_head_k**-0.5,
        "d_conv": r.integer(Keys.SSM.CONV_KERNEL),
        "n_embd_head_kda": r.integer(Keys.KDA.HEAD_DIM),
        "f_l2_eps": base.f_norm_inner_eps,
        "n_head_kda": r.integer(_KDA_HEADS, 0) or base.layer(0).n_head,
    }
    return read_hparams(cls, r, **{**common, **own})


def _read_ling(r: Reader) -> KimiHParams:
    sections = read_rope_sections(r)
    return read_kimi(
        KimiHParams,
        r,
        n_lora_q=r.integer(Keys.Attention.Q_LORA_RANK, 0),
        rope_layers=1,
        rope_type="mrope" if any(sections[:2]) else "norm",
        rope_sections=sections,
        router=read_router(r, Router(norm=False)),
        gate_lower_bound=r.number(GATE_LOWER_BOUND),
        swiglu_clamp_exp=read_clamps(r, Keys.LLM.SWIGLU_CLAMP_EXP),
        swiglu_clamp_shexp=read_clamps(r, Keys.LLM.SWIGLU_CLAMP_SHEXP),
    )


ARCHITECTURES = (
    Architecture(
        ("kimi-linear",), KimiLinear[KimiHParams](rope_factors=False).build, partial(read_kimi, KimiHParams), "hybrid"
    ),
    Architecture(("bailingmoe3",), Ling3(rope_factors=False).build, _read_ling, "hybrid", nextn=True),
)
