"""Attention over the cache, or over the tokens of the batch alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.tensor import Tensor

from .build import Build, CacheUse
from .inputs import build_inp_own_mask

# Names of nodes that flash attention does not make, or makes in another layout
_SCORES = ("kq", "kq_scaled", "kq_tanh", "kq_soft_max_ext", "v", "kqv")


def build_qkv(b: Build, cur: Tensor, il: int, *, bias: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Make Q, ne [n_embd_head_k, n_head, n_tokens], K, ne [n_embd_head_k, n_head_kv, n_tokens], and V, ne
    [n_embd_v_gqa, n_tokens], of `cur`. Each has a weight of its own, or all three have `attn_qkv` together. They are
    clamped when the model asks for it (`f_clamp_kqv`). `bias`: as for `Build.linear`."""
    n = b.hparams.layer(il)
    if not n.n_head_kv:
        raise ModelError(f"hyperparameter n_head_kv: layer {il} has no heads, as those of this architecture must")
    sizes = (n.n_embd_q, n.n_embd_k_gqa, n.n_embd_v_gqa)
    if b.optional("attn_qkv", (cur.ne[0], sum(sizes)), il) is None:
        Qcur, Kcur, Vcur = (
            _clamped(b, b.linear(f"attn_{x}", cur, size, f"{x.upper()}cur", il, bias=bias))
            for x, size in zip("qkv", sizes, strict=True)
        )
        return _heads(b, Qcur, n.n_head), _heads(b, Kcur, n.n_head_kv), Vcur
    wqkv = _clamped(b, b.linear("attn_qkv", cur, sum(sizes), "wqkv", il, bias=bias))
    return split_qkv(b, wqkv, il)


def split_qkv(b: Build, wqkv: Tensor, il: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V as `build_qkv` returns them: views of `wqkv`, whose rows have all three one after the other."""
    n = b.hparams.layer(il)
    sizes = (n.n_embd_q, n.n_embd_k_gqa, n.n_embd_v_gqa)
    size, row = wqkv.nb[0], wqkv.nb[1]
    head = n.n_embd_head_k
    Qcur = gg.view_3d(wqkv, head, n.n_head, b.n_tokens, size * head, row, 0)
    Kcur = gg.view_3d(wqkv, head, n.n_head_kv, b.n_tokens, size * head, row, size * sizes[0])
    Vcur = gg.view_2d(wqkv, sizes[2], b.n_tokens, row, size * (sizes[0] + sizes[1]))
    return b.cb(Qcur, "Qcur", il), b.cb(Kcur, "Kcur", il), b.cb(Vcur, "Vcur", il)


def _clamped(b: Build, cur: Tensor) -> Tensor:
    limit = b.hparams.f_clamp_kqv
    return gg.clamp(cur, -limit, limit).set_name(f"{cur.name} (clamped)") if limit else cur


def _heads(b: Build, cur: Tensor, n_head: int) -> Tensor:
    return gg.reshape_3d(cur, cur.ne[0] // n_head, n_head, b.n_tokens).set_name(f"{cur.name} (reshaped)")


@dataclass(frozen=True)
class KV:
    """The arguments of attention over the cache, for layer `il`.

    q_cur    ne [n_embd_head_k, n_head, n_tokens]
    k_cur    ne [n_embd_head_k, n_head_kv, n_tokens]; None: the layer attends to K and V of another layer
             (`hp.kv_layer`)
    v_cur    ne [n_embd_v_gqa, n_tokens]; None: V is in K
    kq_mask  ne [n_kv, n_tokens padded], or one for each head of K: ne [n_kv, n_tokens, n_head_kv]
    sinks    ne [n_head]: one more score for each head
    v_mla    ne [n_embd_head_v, n, n_head]: the matrix that makes the values of each head from those in the cache
    scale    the factor of the scores; 0: the model's
    bias     ne [n_kv, n_tokens, n_head]: added to the scores before they are scaled
    cross    attend to the encoded text; there are no k_cur and v_cur then
    beside   a layer, perhaps of another cache, whose cells are attended to as well, and the mask of these (V is in K)
    """

    q_cur: Tensor
    k_cur: Tensor | None
    v_cur: Tensor | None
    kq_mask: Tensor
    il: int
    sinks: Tensor | None = None
    v_mla: Tensor | None = None
    scale: float = 0.0
    bias: Tensor | None = None
    cross: bool = False
    beside: tuple[int, Tensor] | None = None


def llm_build_kv(b: Build, a: KV, *, bias: bool = True) -> Tensor:
    """Store K and V in the cache, attend, and project: ne [n_embd, n_tokens]. `bias`: as for `Build.linear`."""
    return b.linear("attn_output", build_attn(b, a), b.hparams.n_embd, "kqv_out", a.il, bias=bias)


def build_attn(b: Build, a: KV) -> Tensor:
    """Store K and V in the cache, and attend: ne [n_embd_out, n_tokens]."""
    use = b.cross if a.cross else b.use(a.il)
    a = _rotated(b, a, use)
    for t in (a.q_cur, a.k_cur, a.v_cur):  # added together, so that the order of the nodes is llama.cpp's
        if t is not None:
            b.graph.build_forward_expand(t)
    if a.k_cur is not None:
        _kv_store(b, use, a.k_cur, a.v_cur, a.il)
    cur = rotate(_kqv(b, a, use), use.kv.rotation_v(b.hparams.layer(a.il).n_embd_head_v))
    b.graph.build_forward_expand(cur)
    return cur


def build_cross_kv(b: Build, k_cur: Tensor, v_cur: Tensor, il: int) -> None:
    """Store K, ne [n_embd_k_gqa, n_tokens], and V, ne [n_embd_v_gqa, n_tokens], of an encoded text, for attention in
    the decoder's layer `il`."""
    kv, n = b.cross.kv, b.hparams.layer(il)
    k_cur, v_cur = rotate(k_cur, kv.rotation_k(il)), rotate(v_cur, kv.rotation_v(n.n_embd_head_v))
    b.graph.build_forward_expand(k_cur)
    b.graph.build_forward_expand(v_cur)
    _kv_store(b, b.cross, k_cur, v_cur, il)


def _rotated(b: Build, a: KV, use: CacheUse) -> KV:
    """The arguments with Q, K and V rotated, as the cache stores K and V."""
    kv, n = use.kv, b.hparams.layer(a.il)
    by_k, by_v = kv.rotation_k(a.il), kv.rotation_v(n.n_embd_head_v)
    k, v = (None if t is None else rotate(t, by) for t, by in ((a.k_cur, by_k), (a.v_cur, by_v)))
    return replace(a, q_cur=rotate(a.q_cur, by_k), k_cur=k, v_cur=v)


def rotate(cur: Tensor, by: Tensor | None) -> Tensor:
    """`cur` with its rows cut into parts as long as the rows of `by`, and each part multiplied with `by`."""
    if by is None:
        return cur
    n = by.ne[0]
    parts = gg.reshape_2d(cur if cur.is_contiguous else gg.cont(cur), n, cur.n_elements // n)
    return gg.reshape_4d(gg.mul_mat(by, parts), *cur.ne).set_name(f"{cur.name} (rotated)")


def build_attn_gate(b: Build, attn: Tensor, cur: Tensor, il: int, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Gate `attn`, the output of attention before its projection: multiply it with `act` of a product of `cur`. The
    product has an element for each element of `attn`, or one for each head. The result has the ne of `attn`."""
    n_head = b.hparams.layer(il).n_head
    n_gate = b.n_out("attn_gate", (n_head, attn.ne[0]), il)
    gate = b.cb(act(b.linear("attn_gate", cur, n_gate, "attn_gate", il)), "attn_gate_act", il)
    if n_gate != n_head:
        return b.cb(gg.mul(attn, gate), "attn_gated", il)
    heads = gg.reshape_3d(attn, attn.ne[0] // n_head, n_head, b.n_tokens)
    gated = b.cb(gg.mul(heads, gg.reshape_3d(gate, 1, n_head, b.n_tokens)), "attn_gated", il)
    return gg.reshape_2d(gated, attn.ne[0], b.n_tokens)


def store_k(b: Build, k_cur: Tensor, il: int) -> None:
    """Copy K of the ubatch's tokens, ne [n_embd_k_gqa, n_tokens], into the slot of a layer that has no V."""
    _kv_store(b, b.use(il), k_cur, None, il)


def _kv_store(b: Build, use: CacheUse, k_cur: Tensor, v_cur: Tensor | None, il: int) -> None:
    """Copy K and V into the slot of the ubatch; those of a transient cache are kept where they are. K may overflow: its
    own sequence sees that, and the mask hides it from others. V is stored finite, because a weight of 0 does not hide
    NaN."""
    n, kv, head = b.hparams.layer(il), use.kv, use.head
    if kv.transient:
        v = None if v_cur is None else _heads_of_rows(v_cur, n.n_embd_head_v, n.n_head_kv)
        b.kept[kv, il] = _heads_of_rows(k_cur, n.n_embd_head_k, n.n_head_kv), v
        return
    k_l = kv.k_l[kv.index[il]]
    k_row = kv.type_k.row_size(n.n_embd_k_gqa)
    view = gg.view_1d(k_l, b.n_tokens * n.n_embd_k_gqa, k_row * head)
    _store(b, k_cur, b.cb(view, "k_cache_view", il), kv.v_limit if kv.v_in_k else 0.0)
    if v_cur is None:
        return
    v_l = kv.v_l[kv.index[il]]
    if not kv.v_trans:
        v_row = kv.type_v.row_size(n.n_embd_v_gqa)
        view = gg.view_1d(v_l, b.n_tokens * n.n_embd_v_gqa, v_row * head)
    else:
        size = kv.type_v.type_size
        view = gg.view_2d(v_l, b.n_tokens, n.n_embd_v_gqa, size * kv.size, size * head)
        v_cur = gg.transpose(v_cur).set_name(f"{v_cur.name} (transposed)")
    _store(b, v_cur, b.cb(view, "v_cache_view", il), kv.v_limit)


def _heads_of_rows(cur: Tensor, head: int, n_head: int) -> Tensor:
    """`cur`, which has a row of all heads for each token, or a row for each head: ne [head, n_head, n_tokens]."""
    if cur.ne[:2] == (head, n_head):
        return cur
    return gg.view_3d(cur, head, n_head, cur.ne[1], cur.nb[0] * head, cur.nb[1], 0)


def _store(b: Build, cur: Tensor, view: Tensor, limit: float = 0.0) -> None:
    b.graph.build_forward_expand(gg.cpy(cur, view, limit).set_name(f"{view.name} (copy of {cur.name})"))


def _kqv(b: Build, a: KV, use: CacheUse) -> Tensor:
    """softmax(mask(K q)) V over the first n_kv cells: ne [n_embd_out, n_tokens]."""
    hp, n, il = b.hparams, b.hparams.layer(a.il), a.il
    kv = use.kv
    if a.kq_mask.ne[2] > 1:
        return _kqv_of_groups(b, a, use)
    apart = _apart(b, a, use)
    q_cur = _by_sequence(b, a.q_cur) if apart else a.q_cur
    q = b.cb(gg.permute(q_cur, 0, 2, 1, 3), "q", il)  # [n_embd_head_k, n_tokens, n_head]
    k, mask = b.cb(_rows_of_k(b, use, il, apart), "k", il), _own_mask(b, a, use) if apart else a.kq_mask
    if a.beside is not None:
        other, other_mask = a.beside
        k, more = (gg.cast(t, DType.F32) if t.dtype.is_quantized else t for t in (k, cells_of_k(b, other)))
        k = b.cb(gg.concat(k, more, 1), "k_all", il)
        first, rest = (gg.view_2d(m, m.ne[0], b.n_tokens, m.nb[1], 0) for m in (mask, other_mask))  # rows may be more
        mask = b.cb(gg.concat(first, rest, 0), "kq_mask_all", il)
    scale, cap = a.scale or hp.f_attention_scale, hp.f_attn_logit_softcapping
    if kv.flash_attn and a.bias is None and not any(b.asked(f"{name}-{il}") for name in _SCORES):
        v = k if a.beside else b.cb(_rows_of_v(b, use, il, apart), "v", il)
        cur = gg.flash_attn_ext(q, k, v, mask, scale, hp.f_max_alibi_bias, cap, a.sinks)
        if a.v_mla is None:
            cur = b.cb(cur, "kqv_merged", il)  # [n_embd_head_v, n_head, n_tokens]
            return b.cb(gg.reshape_2d(cur, n.n_embd_out, b.n_tokens), "kqv_merged_cont", il)
        kqv = b.cb(gg.permute(cur, 0, 2, 1, 3), "kqv", il)
    else:
        kq = b.cb(gg.mul_mat(k, q), "kq", il)  # [n_kv, n_tokens, n_head]
        if a.bias is not None:
            kq = b.cb(gg.add(kq, a.bias), "kq_biased", il)
        if cap:
            kq = b.cb(gg.tanh(b.cb(gg.scale(kq, scale / cap), "kq_scaled", il)), "kq_tanh", il)
            scale = cap
        kq = gg.soft_max_ext(kq, mask, scale, hp.f_max_alibi_bias, a.sinks)
        b.cb(kq, "kq_soft_max_ext", il)
        v = gg.cont(gg.transpose(k)) if a.beside else _columns_of_v(b, use, il, apart)
        kqv = b.cb(gg.mul_mat(b.cb(v, "v", il), kq), "kqv", il)
    if a.v_mla is not None:  # [n_embd_head_v, n_tokens, n_head] becomes [v_mla.ne[1], n_tokens, n_head]
        kqv = b.cb(b.mul_mat(a.v_mla, kqv), "kqv_mla", il)
    cur = b.cb(gg.permute(kqv, 0, 2, 1, 3), "kqv_merged", il)
    return b.cb(gg.cont_2d(cur, cur.ne[0] * n.n_head, b.n_tokens), "kqv_merged_cont", il)


def _apart(b: Build, a: KV, use: CacheUse) -> bool:
    """Whether each sequence of the batch attends to its own tokens in a matrix of its own, the last dimension of all
    tensors, and not, masked, to those of all sequences: over a transient cache nothing else can be seen."""
    return use.kv.transient and not a.cross and b.n_seqs > 1 and a.bias is None and a.beside is None


def _by_sequence(b: Build, t: Tensor) -> Tensor:
    """ne [head, n_head, n_tokens] as ne [head, n_head, n_seq_tokens, n_seqs]. (A view has a slower gradient.)"""
    return gg.reshape_4d(t if t.is_contiguous else gg.cont(t), *t.ne[:2], b.n_seq_tokens, b.n_seqs)


def _own_mask(b: Build, a: KV, use: CacheUse) -> Tensor:
    """The parts of a layer's mask of all tokens, ne [n_tokens, n_tokens padded], that lie on its diagonal: ne
    [n_seq_tokens, n_seq_tokens, 1, n_seqs]."""
    mask = a.kq_mask
    if mask is b.masks.get(use.mask):
        return build_inp_own_mask(b, a.il)
    n, row = b.n_seq_tokens, mask.nb[1]
    return gg.view_4d(mask, n, n, 1, b.n_seqs, row, row * n, row * n + mask.nb[0] * n, 0)


def _kqv_of_groups(b: Build, a: KV, use: CacheUse) -> Tensor:
    """As `_kqv`, with a mask for each head of K. The heads of Q that share a head of K are a batch of their own."""
    n, il, scale = b.hparams.layer(a.il), a.il, a.scale or b.hparams.f_attention_scale
    groups, n_tokens = n.n_head_kv, b.n_tokens
    heads = gg.reshape_4d(a.q_cur, n.n_embd_head_k, n.n_head // groups, groups, n_tokens)
    q = b.cb(gg.permute(heads, 0, 2, 3, 1), "q", il)  # [n_embd_head_k, n_tokens, n_head / groups, groups]
    k = b.cb(gg.permute(_rows_of_k(b, use, il), 0, 1, 3, 2), "k", il)
    mask = gg.reshape_4d(a.kq_mask, a.kq_mask.ne[0], n_tokens, 1, groups)
    if use.kv.flash_attn and not any(b.asked(f"{name}-{il}") for name in _SCORES):
        v = b.cb(gg.permute(_rows_of_v(b, use, il), 0, 1, 3, 2), "v", il)
        cur = gg.flash_attn_ext(q, k, v, mask, scale)  # [.., n_head / groups, n_tokens, groups]
        cur = gg.permute(cur, 0, 1, 3, 2)
    else:
        kq = gg.soft_max_ext(b.cb(gg.mul_mat(k, q), "kq", il), mask, scale)
        v = b.cb(gg.permute(_columns_of_v(b, use, il), 0, 1, 3, 2), "v", il)
        cur = b.cb(gg.mul_mat(v, b.cb(kq, "kq_soft_max_ext", il)), "kqv", il)
        cur = gg.permute(cur, 0, 3, 1, 2)
    return b.cb(gg.cont_2d(b.cb(cur, "kqv_merged", il), n.n_embd_out, n_tokens), "kqv_merged_cont", il)


def cells_of_k(b: Build, il: int) -> Tensor:
    """What layer `il` of the cache holds as K in the first n_kv cells: ne [n_embd_head_k, n_kv, n_head_kv]."""
    return _rows_of_k(b, b.use(il), il)


def _kept(b: Build, use: CacheUse, il: int) -> tuple[Tensor, Tensor | None]:
    """K and V of the transient cache that layer `il` looks at: see `Build.kept`."""
    return b.kept[use.kv, use.kv.layers[use.kv.index[il]]]


def _rows_of_k(b: Build, use: CacheUse, il: int, apart: bool = False) -> Tensor:
    """K of the first n_kv cells: ne [n_embd_head_k, n_kv, n_head_kv]. `apart`, here and below: see `_apart`."""
    kv, n_kv, _, _ = use
    if kv.transient:
        k = _kept(b, use, il)[0]
        return gg.permute(_by_sequence(b, k) if apart else k, 0, 2, 1, 3)
    n, row, k_l = b.hparams.layer(il), kv.type_k.row_size, kv.k_l[kv.index[il]]
    return gg.view_3d(k_l, n.n_embd_head_k, n_kv, n.n_head_kv, row(n.n_embd_k_gqa), row(n.n_embd_head_k), 0)


def _rows_of_v(b: Build, use: CacheUse, il: int, apart: bool = False) -> Tensor:
    """V of the first n_kv cells, a row of each: ne [n_embd_head_v, n_kv, n_head_kv]."""
    kv, n_kv, _, _ = use
    n = b.hparams.layer(il)
    if kv.transient:
        k, v = _kept(b, use, il)
        if v is None:
            v = gg.view_3d(k, n.n_embd_head_v, *k.ne[1:3], *k.nb[1:3], 0)
        return gg.permute(_by_sequence(b, v) if apart else v, 0, 2, 1, 3)
    if kv.v_in_k:
        rows, row, head = kv.k_l, kv.type_k.row_size(n.n_embd_k_gqa), kv.type_k.row_size(n.n_embd_head_k)
    else:
        rows, row, head = kv.v_l, kv.type_v.row_size(n.n_embd_v_gqa), kv.type_v.row_size(n.n_embd_head_v)
    return gg.view_3d(rows[kv.index[il]], n.n_embd_head_v, n_kv, n.n_head_kv, row, head, 0)


def _columns_of_v(b: Build, use: CacheUse, il: int, apart: bool = False) -> Tensor:
    """V of the first n_kv cells, a column of each: ne [n_kv, n_embd_head_v, n_head_kv]."""
    kv, n_kv, _, _ = use
    if not kv.v_trans or kv.transient:
        v = _rows_of_v(b, use, il, apart)
        return gg.cont(gg.transpose(gg.cast(v, DType.F32) if v.dtype.is_quantized else v))
    n, size = b.hparams.layer(il), kv.type_v.type_size
    row, v_l = size * kv.size, kv.v_l[kv.index[il]]
    return gg.view_3d(v_l, n_kv, n.n_embd_head_v, n.n_head_kv, row, row * n.n_embd_head_v, 0)
