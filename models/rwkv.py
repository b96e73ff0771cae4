"""RWKV-6 (Finch, arXiv 2404.05892), RWKV-7 (Goose, arXiv 2503.14456), and Qwen2 models whose attention was replaced by
their time mixing (QRWKV, arXiv 2505.03005)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.ops.norm import norm
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_ffn, build_inp_embd, build_lm_head, build_norm, build_out_rows
from .blocks.states import as_f32, by_sequence, read_state, store_state
from .hparams import HParams, NormKind, StateShape
from .metadata import Reader, read_hparams

_LN_EPS = 64e-5  # the epsilon of the norm of each head's results
_MAX_DECAY = -math.exp(-0.5)  # logarithm of the fastest decay in RWKV-7


@dataclass(frozen=True, kw_only=True)
class RWKVHParams(HParams):
    """Hyperparameters of models that mix over time.

    head_size             elements of a head
    n_head_wkv            heads
    n_head_wkv_kv         heads of K and V; there may be fewer than heads of R
    n_mix, n_decay        ranks of the products that interpolate tokens, and of those that make the decay
    n_iclr, n_value, n_gate  further ranks of RWKV-7
    rescale_every         after how many layers the residual is halved; 0: never
    crossed               norms and networks are those of Qwen2
    """

    head_size: int
    n_head_wkv: int
    n_head_wkv_kv: int
    n_mix: int = 0
    n_decay: int
    n_iclr: int = 0
    n_value: int = 0
    n_gate: int = 0
    rescale_every: int = 0
    crossed: bool

    def state(self, il: int) -> StateShape:
        """The last token that time mixing (and the network of RWKV) read, and a matrix for each head."""
        return StateShape((1 if self.crossed else 2) * self.n_embd, self.n_embd * self.head_size)


def _read(r: Reader, *, crossed: bool, version: int) -> RWKVHParams:
    llm, attention = Keys.LLM, Keys.Attention
    n_layer, n_embd, head_size = (
        r.integer(llm.BLOCK_COUNT),
        r.integer(llm.EMBEDDING_LENGTH),
        r.integer(Keys.WKV.HEAD_SIZE),
    )
    if head_size < 1 or n_embd < 1 or n_embd % head_size:
        r.fail(Keys.WKV.HEAD_SIZE, f"is {head_size}, which does not divide {n_embd}")
    n_head = n_embd // head_size
    n_head_kv = (r.integer(attention.HEAD_COUNT_KV, 0) or n_head) if crossed and version == 6 else n_head
    if n_head % n_head_kv:
        r.fail(attention.HEAD_COUNT_KV, f"is {n_head_kv}, which does not divide the {n_head} heads")
    if version == 6:
        ranks = {
            "n_mix": r.integer(llm.TIME_MIX_EXTRA_DIM),
            "n_decay": r.integer(llm.TIME_DECAY_EXTRA_DIM),
            "rescale_every": r.integer(llm.RESCALE_EVERY_N_LAYERS, 0),
        }
    else:
        ranks = {
            "n_decay": r.integer(attention.DECAY_LORA_RANK),
            "n_iclr": r.integer(attention.ICLR_LORA_RANK),
            "n_value": r.integer(attention.VALUE_RESIDUAL_MIX_LORA_RANK),
            "n_gate": r.integer(attention.GATE_LORA_RANK, 0),
        }
    return read_hparams(
        RWKVHParams,
        r,
        "rms" if crossed else "layer",
        n_head=n_head,
        n_head_kv=(0,) * n_layer,
        head_size=head_size,
        n_head_wkv=n_head,
        n_head_wkv_kv=n_head_kv,
        crossed=crossed,
        **ranks,
    )


def build_model(b: Build[RWKVHParams], *, version: int) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    kind: NormKind = "rms" if hp.crossed else "layer"
    v_first: Tensor | None = None
    with b.ctx:
        inpL = build_inp_embd(b)
        if not hp.crossed:
            inpL = build_norm(b, inpL, "token_embd_norm", "inp_norm", kind=kind)
        for il in range(hp.n_layer):
            cells = b.states.r_l[il]
            before = read_state(b, cells, "token_shift", il)
            att_norm = build_norm(b, inpL, "attn_norm", "attn_norm", il, kind)
            att_prev = _previous(b, att_norm, before, 0)
            if version == 6:
                cur = _time_mix6(b, hp, att_norm, att_prev, il)
            else:
                cur, v_first = _time_mix7(b, hp, att_norm, att_prev, v_first, il)
            ffn_inp = b.cb(gg.add(cur, inpL), "ffn_inp", il)
            ffn_norm = build_norm(b, ffn_inp, "ffn_norm" if hp.crossed else "attn_norm_2", "ffn_norm", il, kind)
            last, ffn_prev = _last(b, att_norm), ffn_norm
            if not hp.crossed:
                ffn_prev = _previous(b, ffn_norm, before, 1)
                last = gg.concat(last, _last(b, ffn_norm), 1)
            store_state(b, cells, last, "token_shift_updated", il)
            ffn_inp, ffn_norm, ffn_prev = build_out_rows(b, il, ffn_inp, ffn_norm, ffn_prev)
            cur = build_ffn(b, ffn_norm, il) if hp.crossed else _channel_mix(b, ffn_norm, ffn_prev, il, version == 6)
            inpL = gg.add(cur, ffn_inp)
            if hp.rescale_every and (il + 1) % hp.rescale_every == 0:
                inpL = gg.scale(inpL, 0.5)
            inpL = b.cb(inpL, "l_out", il)
        return build_lm_head(b, build_norm(b, inpL, "output_norm", "result_norm", kind=kind))


# -- tokens and those before them ------------------------------------------------------------------------------------


def _previous(b: Build, cur: Tensor, before: Tensor, part: int) -> Tensor:
    """Shift the columns of `cur`, ne [n_embd, n_tokens], by one token: each token gets the column of the token before.
    The first token of a sequence gets its column from the stored state. The result has the ne of `cur`."""
    n, n_tokens, n_seqs = cur.ne[0], b.n_seq_tokens, b.n_seqs
    row = before.nb[1]
    first = gg.view_3d(before, n, 1, n_seqs, row, row, part * n * before.nb[0])
    if n_tokens == 1:
        return gg.view_2d(before, n, n_seqs, row, part * n * before.nb[0])
    others = gg.view_3d(cur, n, n_tokens - 1, n_seqs, cur.nb[1], cur.nb[1] * n_tokens, 0)
    return gg.reshape_2d(gg.concat(first, others, 1), n, b.n_tokens)


def _last(b: Build, cur: Tensor) -> Tensor:
    """The last token of each sequence: ne [n_embd, 1, n_seqs]."""
    by_seq = by_sequence(b, cur)
    return gg.view_3d(by_seq, cur.ne[0], 1, b.n_seqs, by_seq.nb[1], by_seq.nb[2], (b.n_seq_tokens - 1) * by_seq.nb[1])


def _lerp(b: Build, cur: Tensor, sx: Tensor, role: str, il: int) -> Tensor:
    """`cur` plus `sx`, the difference to the token before, times the weight of that role."""
    return gg.add(gg.mul(sx, b.weight(role, (cur.ne[0],), il)), cur)


def _channel_mix(b: Build, cur: Tensor, prev: Tensor, il: int, gated: bool) -> Tensor:
    """The network of RWKV: ne as `cur`. `gated`: its output is gated by another product of `cur` (RWKV-6)."""
    n_embd, n_ff = cur.ne[0], b.hparams.layer(il).n_ff
    sx = gg.sub(prev, cur)
    k = b.linear("channel_mix_key", _lerp(b, cur, sx, "channel_mix_lerp_k", il), n_ff, "ffn_key", il)
    out = b.linear("channel_mix_value", gg.sqr(gg.relu(k)), n_embd, "ffn_value", il)
    if not gated:
        return out
    r = b.linear("channel_mix_receptance", _lerp(b, cur, sx, "channel_mix_lerp_r", il), n_embd, "ffn_receptance", il)
    return b.cb(gg.mul(gg.sigmoid(r), out), "ffn_out", il)


# -- time mixing -----------------------------------------------------------------------------------------------------


def _time_mix6(b: Build, hp: RWKVHParams, cur: Tensor, prev: Tensor, il: int) -> Tensor:
    """Time mixing of RWKV-6: ne [n_embd, n_tokens]. A model without the weight of the token itself is a crossing of
    RWKV and Qwen2: there the newest token fades like the earlier ones before it is read, and the result is not
    normed."""
    n, n_tokens, head, n_head = hp.n_embd, b.n_tokens, hp.head_size, hp.n_head_wkv
    first = b.optional("time_mix_first", (head, n_head), il)
    xw, xk, xv, xr, xg = _mixed6(b, hp, cur, gg.sub(prev, cur), il)
    r = b.linear("time_mix_receptance", xr, n, "receptance", il)
    k, v = (
        _repeated(b, hp, b.linear(f"time_mix_{name}", x, hp.n_head_wkv_kv * head, name, il))
        for name, x in (("key", xk), ("value", xv))
    )
    g = b.linear("time_mix_gate", xg, n, "gate", il)
    w = gg.tanh(b.mul_mat(b.weight("time_mix_decay_w1", (n, hp.n_decay), il), xw))
    w = gg.add(b.mul_mat(b.weight("time_mix_decay_w2", (hp.n_decay, n), il), w), b.weight("time_mix_decay", (n,), il))
    w = b.cb(gg.exp(gg.neg(gg.exp(w))), "decay", il)
    r, w = (gg.reshape_3d(t, head, n_head, n_tokens) for t in (r, w))
    state = read_state(b, b.states.s_l[il], "wkv_state", il)
    if first is None:
        k = gg.sub(k, gg.mul(k, w))
        out = gg.gated_linear_attn(k, v, r, w, state, head**-0.5)
        y = gg.mul(_wkv(b, hp, out, il), gg.sigmoid(g))
    else:
        out = gg.rwkv_wkv6(k, v, r, as_f32(first), w, state)
        y = gg.mul(_heads_norm(b, hp, _wkv(b, hp, out, il), il), gg.silu(g))
    return b.linear("time_mix_output", b.cb(y, "wkv_gated", il), n, "time_mix_out", il)


def _mixed6(b: Build, hp: RWKVHParams, cur: Tensor, sx: Tensor, il: int) -> list[Tensor]:
    """The inputs of decay, K, V, receptance and gate, each of ne [n_embd, n_tokens]. Each lies between the token and
    the token before it; how far depends on the token."""
    n, n_mix, n_tokens = hp.n_embd, hp.n_mix, b.n_tokens
    base = gg.tanh(b.mul_mat(b.weight("time_mix_w1", (n, 5 * n_mix), il), _lerp(b, cur, sx, "time_mix_lerp_x", il)))
    base = gg.cont(gg.permute(gg.reshape_3d(base, n_mix, 5, n_tokens), 0, 2, 1, 3))
    mix = b.mul_mat(b.weight("time_mix_w2", (n_mix, n, 5), il), base)  # [n_embd, n_tokens, 5]
    fused = b.optional("time_mix_lerp_fused", (n, 1, 1, 5), il)
    ask = b.weight if fused is None else b.optional  # files may have both
    own = [ask(f"time_mix_lerp_{x}", (n,), il) for x in "wkvrg"]
    if fused is None:
        parts = [t for t in own if t is not None]
        fused = gg.concat(gg.concat(gg.concat(parts[0], parts[1], 1), gg.concat(parts[2], parts[3], 1), 1), parts[4], 1)
    mix = gg.add(gg.mul(gg.add(mix, gg.reshape_3d(fused, n, 1, 5)), sx), cur)
    return _planes(b.cb(mix, "mixed", il))


def _time_mix7(
    b: Build, hp: RWKVHParams, cur: Tensor, prev: Tensor, v_first: Tensor | None, il: int
) -> tuple[Tensor, Tensor]:
    """Time mixing of RWKV-7, ne [n_embd, n_tokens]. Also returns V of the first layer, which is mixed into V of the
    other layers."""
    n, n_tokens, head, n_head = hp.n_embd, b.n_tokens, hp.head_size, hp.n_head_wkv
    g1, g2 = _gate7(b, hp, il)
    n_mixed = 5 if g1 is None else 6
    lerp = gg.reshape_3d(b.weight("time_mix_lerp_fused", (n, 1, 1, n_mixed), il), n, 1, n_mixed)
    sx = gg.sub(prev, cur)
    sx = gg.view_3d(sx, n, n_tokens, n_mixed, sx.nb[1], 0, 0)  # the same for each: nothing is copied
    mixed = _planes(b.cb(gg.add(gg.mul(sx, lerp), cur), "mixed", il))
    xr, xw, xk, xv, xa = mixed[:5]

    def low_rank(name: str, x: Tensor, rank: int) -> Tensor:
        """A product of that rank, with a bias."""
        t = b.mul_mat(b.weight(f"time_mix_{name}1", (n, rank), il), x)
        t = b.mul_mat(b.weight(f"time_mix_{name}2", (rank, n), il), gg.tanh(t) if name == "w" else t)
        return gg.add(t, b.weight(f"time_mix_{name}0", (n,), il))

    r, k, v = (
        b.linear(f"time_mix_{name}", x, n, name, il) for name, x in (("receptance", xr), ("key", xk), ("value", xv))
    )
    w = b.cb(gg.exp(gg.scale(gg.sigmoid(low_rank("w", xw, hp.n_decay)), _MAX_DECAY)), "decay", il)
    if v_first is None:
        v_first = v
        for i, ne in ((0, (n,)), (1, (n, hp.n_iclr)), (2, (hp.n_iclr, n))):
            b.optional(f"time_mix_v{i}", ne, il)  # declared so that the loader does not report them as unused
    else:
        v = gg.add(v, gg.mul(gg.sub(v_first, v), gg.sigmoid(low_rank("v", xv, hp.n_value))))
    a = gg.sigmoid(low_rank("a", xa, hp.n_iclr))
    kk = gg.reshape_3d(gg.mul(k, b.weight("time_mix_k_k", (n,), il)), head, n_head, n_tokens)
    kk = b.cb(gg.l2_norm(kk, 1e-12), "removal_key", il)
    ka = gg.mul(k, b.weight("time_mix_k_a", (n,), il))
    k = b.cb(gg.add(k, gg.sub(gg.mul(a, ka), ka)), "replacement_key", il)
    r, w, k, v3, a = (gg.reshape_3d(t, head, n_head, n_tokens) for t in (r, w, k, v, a))
    state = read_state(b, b.states.s_l[il], "wkv_state", il)
    y = _wkv(b, hp, gg.rwkv_wkv7(r, w, k, v3, gg.neg(kk), gg.mul(kk, a), state), il)
    if not hp.crossed or b.optional("time_mix_ln", (n,), il) is not None:
        y = _heads_norm(b, hp, y, il)
    bonus = gg.mul(gg.mul(k, r), gg.reshape_2d(b.weight("time_mix_r_k", (n,), il), head, n_head))
    y = gg.add(y, gg.reshape_2d(gg.mul(v3, gg.sum_rows(bonus)), n, n_tokens))
    if g1 is not None and g2 is not None:
        y = gg.mul(y, b.mul_mat(g2, gg.sigmoid(b.mul_mat(g1, mixed[5]))))
    return b.linear("time_mix_output", b.cb(y, "wkv_gated", il), n, "time_mix_out", il), v_first


def _gate7(b: Build, hp: RWKVHParams, il: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The weights of the gate; the crossings may have none."""
    ne1, ne2 = (hp.n_embd, hp.n_gate), (hp.n_gate, hp.n_embd)
    if not hp.n_gate or (hp.crossed and b.optional("time_mix_g1", ne1, il) is None):
        return None, None
    return b.weight("time_mix_g1", ne1, il), b.weight("time_mix_g2", ne2, il)


def _planes(t: Tensor) -> list[Tensor]:
    """The planes of a tensor of ne [n, m, planes], each of ne [n, m]."""
    return [gg.view_2d(t, *t.ne[:2], t.nb[1], i * t.nb[2]) for i in range(t.ne[2])]


def _repeated(b: Build, hp: RWKVHParams, t: Tensor) -> Tensor:
    """Repeat the heads of K or V for the heads of R that share them: ne [head_size, n_head, n_tokens]."""
    head, n_kv, n_tokens = hp.head_size, hp.n_head_wkv_kv, b.n_tokens
    if n_kv != hp.n_head_wkv:
        t = gg.repeat_4d(gg.reshape_4d(t, head, 1, n_kv, n_tokens), head, hp.n_head_wkv // n_kv, n_kv, n_tokens)
    return gg.reshape_3d(t, head, hp.n_head_wkv, n_tokens)


def _wkv(b: Build, hp: RWKVHParams, out: Tensor, il: int) -> Tensor:
    """Store the states that `out` ends with, and return the rest, what tokens read: ne [n_embd, n_tokens]."""
    n, size, state = hp.n_embd, out.nb[0], hp.n_embd * hp.head_size
    b.cb(out, "wkv", il)
    last = gg.view_2d(out, state, b.n_seqs, size * state, size * n * b.n_tokens)
    store_state(b, b.states.s_l[il], last, "wkv_state_updated", il)
    return gg.view_2d(out, n, b.n_tokens, size * n, 0)


def _heads_norm(b: Build, hp: RWKVHParams, y: Tensor, il: int) -> Tensor:
    """The norm of each head's results, ne [n_embd, n_tokens], with weights for all of them."""
    n = hp.n_embd
    y = norm(gg.reshape_3d(y, hp.head_size, hp.n_head_wkv, b.n_tokens), _LN_EPS)
    y = gg.mul(gg.reshape_2d(y, n, b.n_tokens), b.weight("time_mix_ln", (n,), il))
    return b.cb(gg.add(y, b.weight("time_mix_ln", (n,), il, "bias")), "wkv_normed", il)


def _architecture(name: str, version: int, crossed: bool) -> Architecture[RWKVHParams]:
    return Architecture(
        (name,), partial(build_model, version=version), partial(_read, crossed=crossed, version=version), "recurrent"
    )


ARCHITECTURES = (
    _architecture("rwkv6", 6, False),
    _architecture("rwkv7", 7, False),
    _architecture("rwkv6qwen2", 6, True),
    _architecture("arwkv7", 7, True),
)
