"""Multi-head latent attention: K and V of all heads come from one row per token (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pyggml import ops as gg
from pyggml.tensor import Tensor

from .attention import KV, build_attn
from .build import Build
from .inputs import build_inp_kq_mask
from .norm import build_norm
from .rope import build_rope


class MLA(NamedTuple):
    """The sizes of multi-head latent attention in one layer.

    n_lora_q       elements of the row that Q of all heads is a product of; 0: Q is a product of the input of attention
    n_lora_kv      elements of the latent row, without the roped elements, which are part of K in all heads
    n_embd_head_k  elements of Q and K of a head; the last n_rot of them are roped
    n_embd_head_v  elements of V of a head
    n_rot          elements that are roped; 0: nothing is roped
    """

    n_lora_q: int
    n_lora_kv: int
    n_embd_head_k: int
    n_embd_head_v: int
    n_rot: int

    @property
    def n_nope(self) -> int:
        """Elements of Q and K of a head that are not roped."""
        return self.n_embd_head_k - self.n_rot


def build_mla(
    b: Build,
    cur: Tensor,
    pos: Tensor,
    factors: Tensor | None,
    il: int,
    m: MLA,
    q_scale: Tensor | None = None,
    *,
    k_norm: bool = False,
    scale: float = 0.0,
    sinks: Tensor | None = None,
    choose: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Attention of the heads, before it is projected: ne [n_head * m.n_embd_head_v, n_tokens].

    When V is in K (`hp.v_in_k`), the cache holds the latent rows, ne [n_lora_kv + n_rot]. `attn_k_b` then turns Q of
    each head into a latent row, and `attn_v_b` turns the latent result into values of each head. Otherwise the cache
    holds K and V of each head. `q_scale`, ne [1, 1, n_tokens], is a factor of Q. `k_norm`: the elements of K that are
    roped are normed before. `scale` and `sinks`: as in KV. `choose` is called with the row that Q comes from, and gives
    the mask; without it the mask is the layer's.
    """
    n_head, n_tokens = b.hparams.layer(il).n_head, cur.ne[1]
    q_row = _q_row(b, cur, il, m.n_lora_q) if m.n_lora_q else cur
    q = b.linear("attn_q_b" if m.n_lora_q else "attn_q", q_row, n_head * m.n_embd_head_k, "q", il)
    q = gg.reshape_3d(q, m.n_embd_head_k, n_head, n_tokens)
    q_nope, q_pe = _split(q, m.n_nope)

    latent = b.linear("attn_kv_a_mqa", cur, m.n_lora_kv + m.n_rot, "kv_cmpr_pe", il)
    kv_cmpr, k_pe = _split(gg.reshape_3d(latent, latent.ne[0], 1, n_tokens), m.n_lora_kv)
    assert kv_cmpr is not None, m
    if q_pe is not None and k_pe is not None:
        if k_norm:
            k_pe = build_norm(b, k_pe, "attn_k_norm", "k_pe_normed", il)
        q_pe = build_rope(b, q_pe, pos, factors, "q_pe", il)
        k_pe = build_rope(b, k_pe, pos, factors, "k_pe", il)
    kv_cmpr = gg.view_2d(kv_cmpr, m.n_lora_kv, n_tokens, latent.nb[1], 0)
    kv_cmpr = build_norm(b, kv_cmpr, "attn_kv_a_norm", "kv_cmpr", il, eps=b.hparams.f_norm_inner_eps)

    v_mla = None
    if b.hparams.v_in_k:
        assert q_nope is not None, m
        k_b = b.weight("attn_k_b", (m.n_nope, m.n_lora_kv, n_head), il)
        v_mla = b.weight("attn_v_b", (m.n_lora_kv, m.n_embd_head_v, n_head), il)
        q_nope = b.cb(b.mul_mat(k_b, gg.permute(q_nope, 0, 2, 1, 3)), "q_nope_absorbed", il)
        Qcur = b.cb(_beside(gg.permute(q_nope, 0, 2, 1, 3), q_pe), "Qcur", il)
        Kcur = b.cb(_beside(gg.reshape_3d(kv_cmpr, m.n_lora_kv, 1, n_tokens), k_pe), "Kcur", il)
        Vcur = None
    else:
        n_kv = m.n_nope + m.n_embd_head_v
        kv = gg.reshape_3d(b.linear("attn_kv_b", kv_cmpr, n_head * n_kv, "kv", il), n_kv, n_head, n_tokens)
        k_nope, v = _split(kv, m.n_nope)
        assert v is not None, m
        Vcur = b.cb(gg.cont_2d(v, m.n_embd_head_v * n_head, n_tokens), "Vcur", il)
        k_pe = None if k_pe is None else gg.repeat_4d(k_pe, m.n_rot, n_head, n_tokens, 1)
        Qcur, Kcur = b.cb(_beside(q_nope, q_pe), "Qcur", il), b.cb(_beside(k_nope, k_pe), "Kcur", il)
    if q_scale is not None:
        Qcur = b.cb(gg.mul(Qcur, q_scale), "Qcur_attn_temp_scaled", il)
    mask = choose(q_row) if choose else build_inp_kq_mask(b, il)
    return build_attn(b, KV(Qcur, Kcur, Vcur, mask, il, sinks, v_mla, scale))


def _q_row(b: Build, cur: Tensor, il: int, n_lora: int) -> Tensor:
    return build_norm(
        b, b.linear("attn_q_a", cur, n_lora, "q", il), "attn_q_a_norm", "q", il, eps=b.hparams.f_norm_inner_eps
    )


def _split(a: Tensor, n: int) -> tuple[Tensor | None, Tensor | None]:
    """The first `n` elements of each row, and the rest. None for a part without elements."""
    parts = (0, n), (n, a.ne[0] - n)
    first, rest = (gg.view_3d(a, m, a.ne[1], a.ne[2], a.nb[1], a.nb[2], i * a.nb[0]) if m else None for i, m in parts)
    return first, rest


def _beside(a: Tensor | None, b: Tensor | None) -> Tensor:
    """Rows that are a row of `a` followed by a row of `b`. One of the two may be None."""
    if a is None or b is None:
        cur = b if a is None else a
        assert cur is not None
        return cur
    return gg.concat(a, b, 0)
