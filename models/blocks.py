"""The blocks that model builders are made of. Each records the nodes that llama.cpp's function of that name does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.errors import GraphError, ModelError
from pyggml.graph import Graph
from pyggml.tensor import Context, Tensor, Var

from .hparams import HParams
from .kv_cache import KVCache
from .kv_iswa import KVCacheISWA
from .names import tensor_name

MASK_PADDING = 32  # rows of the mask are padded to a multiple


KVMemory = KVCache | KVCacheISWA


def mask_name(kv: KVCache) -> str:
    """The name of the mask of a cache."""
    return "KQ_mask_swa" if kv.n_swa else "KQ_mask"


class CacheUse(NamedTuple):
    """How a graph uses one cache: the cells that attention looks at, the first cell of the ubatch's slot (bound when
    the graph runs), and the name of the mask."""

    kv: KVCache
    n_kv: int
    head: Var
    mask: str


class Build:
    """One graph in the making: the model, the cache, the sizes of the batch, and the inputs created so far.

    n_tokens    tokens of the ubatch
    n_outputs   tokens of which logits are wanted
    n_kv        cells that attention looks at, in each of the memory's caches
    embd        embeddings are given instead of tokens
    uses        how each of the memory's caches is used
    """

    def __init__(
        self,
        hparams: HParams,
        weights: Mapping[str, Tensor],
        kv: KVMemory,
        n_tokens: int,
        n_outputs: int,
        n_kv: tuple[int, ...],
        embd: bool = False,
    ) -> None:
        if not 0 < n_tokens <= kv.size:
            raise GraphError(f"n_tokens must be 1 to {kv.size}, the cells of the cache, not {n_tokens}")
        if not 0 < n_outputs <= n_tokens:
            raise GraphError(f"n_outputs must be 1 to {n_tokens}, the tokens of the batch, not {n_outputs}")
        self.hparams, self.weights, self.kv = hparams, weights, kv
        self.n_tokens, self.n_outputs, self.n_kv, self.embd = n_tokens, n_outputs, n_kv, embd
        self.uses = tuple(
            CacheUse(c, n, Var("kv_head", c.size - n_tokens), mask_name(c))
            for c, n in zip(kv.caches, n_kv, strict=True)
        )
        self.ctx = Context()
        self.graph = Graph()
        self.inputs: dict[str, Tensor] = {}
        self.masks: dict[str, Tensor] = {}

    def use(self, il: int) -> CacheUse:
        """The cache of layer `il`."""
        return next(u for u in self.uses if il in u.kv.index)

    def cb(self, t: Tensor, name: str, il: int = -1) -> Tensor:
        """Name a node as llama.cpp does: `Qcur-0` in a layer, `result_norm` outside of one."""
        t.name = name if il < 0 else f"{name}-{il}"
        return t

    def input(self, name: str, dtype: DType, *ne: int) -> Tensor:
        """The input leaf of that name."""
        if name not in self.inputs:
            self.inputs[name] = self.ctx.new_tensor(dtype, ne, name).set_input()
        return self.inputs[name]

    def weight(self, role: str, il: int = -1) -> Tensor:
        """The weight of that role. Raises ModelError where the model has none."""
        t = self.optional(role, il)
        if t is None:
            raise ModelError(f"the model has no tensor {tensor_name(role, il)}")
        return t

    def optional(self, role: str, il: int = -1, suffix: str = "weight") -> Tensor | None:
        """The weight (or bias) of that role, or None."""
        return self.weights.get(tensor_name(role, il, suffix))

    def linear(self, role: str, cur: Tensor, name: str, il: int) -> Tensor:
        """weight @ cur, and the bias where the model has one; both nodes are called `name`."""
        cur = self.cb(gg.mul_mat(self.weight(role, il), cur), name, il)
        bias = self.optional(role, il, "bias")
        return cur if bias is None else self.cb(gg.add(cur, bias), name, il)


# -- inputs -------------------------------------------------------------------------------------------------------


def build_inp_embd(b: Build) -> Tensor:
    """The embeddings of the tokens, or those that are given: ne [n_embd, n_tokens]."""
    if b.embd:
        return b.input("inp_embd", DType.F32, b.hparams.n_embd, b.n_tokens)
    tokens = b.input("inp_tokens", DType.I32, b.n_tokens)
    return b.cb(gg.get_rows(b.weight("token_embd"), tokens), "inp_embd")


def build_inp_pos(b: Build) -> Tensor:
    """Positions of the tokens: I32 ne [n_tokens]."""
    return b.input("inp_pos", DType.I32, b.n_tokens)


def build_inp_kq_mask(b: Build, il: int) -> Tensor:
    """The attention mask of layer `il`: ne [n_kv, n_tokens padded], F32 (F16 for flash attention).

    Rows lie as far apart as the cache has cells, so that they stay where they are when n_kv grows.
    """
    kv, n_kv, _, name = b.use(il)
    if name not in b.masks:
        mask = b.input(name, DType.F32, n_kv, -(-b.n_tokens // MASK_PADDING) * MASK_PADDING)
        row = 4 * kv.size
        mask.nb = (4, row, row * mask.ne[1], row * mask.ne[1])
        b.masks[name] = b.cb(gg.cast(mask, DType.F16), f"{name} (copy)") if kv.flash_attn else mask
    return b.masks[name]


def build_inp_out_ids(b: Build) -> Tensor:
    """The rows of which logits are wanted: I32 ne [n_outputs]."""
    return b.input("inp_out_ids", DType.I32, b.n_outputs)


# -- blocks -------------------------------------------------------------------------------------------------------


def build_norm(b: Build, cur: Tensor, role: str, name: str, il: int = -1) -> Tensor:
    """RMS norm and its weight. Shape as `cur`."""
    cur = b.cb(gg.rms_norm(cur, b.hparams.f_norm_rms_eps), "norm", il)
    return b.cb(gg.mul(cur, b.weight(role, il)), name, il)


def build_rope(b: Build, cur: Tensor, n_head: int, pos: Tensor, factors: Tensor | None, name: str, il: int) -> Tensor:
    """`cur` ne [n_embd_head * n_head, n_tokens] in heads, roped (mode NORM): ne [n_embd_head, n_head, n_tokens]."""
    heads = gg.reshape_3d(cur, cur.ne[0] // n_head, n_head, b.n_tokens).set_name(f"{cur.name} (reshaped)")
    return b.cb(rope(b.hparams, heads, pos, factors, b.hparams.rope_attn_factor), name, il)


def rope(hp: HParams, cur: Tensor, pos: Tensor, factors: Tensor | None, attn_factor: float) -> Tensor:
    """rope_ext with the model's frequencies. `cur`: ne [n_embd_head, n_head, n_tokens]."""
    return gg.rope_ext(
        cur,
        pos,
        factors,
        hp.n_rot,
        0,
        hp.n_ctx_orig_yarn,
        hp.rope_freq_base,
        hp.rope_freq_scale,
        hp.yarn_ext_factor,
        attn_factor,
        hp.yarn_beta_fast,
        hp.yarn_beta_slow,
    )


def rope_factors(hp: HParams, weights: Mapping[str, Tensor], n_ctx: int) -> Tensor | None:
    """Frequency factors: `rope_freqs` (Llama 3), else the long or the short ones, by the size of the context."""
    for role in ("rope_freqs", "rope_factors_long" if n_ctx > hp.n_ctx_orig_yarn else "rope_factors_short"):
        t = weights.get(tensor_name(role))
        if t is not None:
            return t
    return None


def build_ffn(b: Build, cur: Tensor, il: int) -> Tensor:
    """down(silu(gate(cur)) * up(cur)): ne [n_embd, n_tokens]."""
    up = b.linear("ffn_up", cur, "ffn_up", il)
    gate = b.linear("ffn_gate", cur, "ffn_gate", il)
    gate = b.cb(gg.silu(gate), "ffn_silu", il)
    cur = b.cb(gg.mul(gate, up), "ffn_gate_par", il)
    return b.linear("ffn_down", cur, "ffn_out", il)


def build_moe_ffn(b: Build, cur: Tensor, il: int) -> Tensor:
    """The experts that the router picks for each token, weighted and summed: ne [n_embd, n_tokens].

    The weights are the softmax over all experts, normalised over those picked.
    """
    n_expert, n_used = b.hparams.n_expert, b.hparams.n_expert_used
    n_embd, n_tokens = cur.ne[0], cur.ne[1]
    logits = b.cb(gg.mul_mat(b.weight("ffn_gate_inp", il), cur), "ffn_moe_logits", il)  # [n_expert, n_tokens]
    probs = b.cb(gg.soft_max(logits), "ffn_moe_probs", il)
    selected = b.cb(gg.top_k(probs, n_used), "ffn_moe_topk", il)  # [n_used, n_tokens]
    weights = gg.get_rows(gg.reshape_3d(probs, 1, n_expert, n_tokens), selected)
    weights = gg.reshape_2d(b.cb(weights, "ffn_moe_weights", il), n_used, n_tokens)
    weights_sum = b.cb(gg.sum_rows(weights), "ffn_moe_weights_sum", il)  # [1, n_tokens]
    weights = b.cb(gg.div(weights, weights_sum), "ffn_moe_weights_norm", il)
    weights = gg.reshape_3d(weights, 1, n_used, n_tokens)

    cur = gg.reshape_3d(cur, n_embd, 1, n_tokens)
    up = b.cb(gg.mul_mat_id(b.weight("ffn_up_exps", il), cur, selected), "ffn_moe_up", il)  # [n_ff, n_used, n_tokens]
    gate = b.cb(gg.mul_mat_id(b.weight("ffn_gate_exps", il), cur, selected), "ffn_moe_gate", il)
    gate = b.cb(gg.silu(gate), "ffn_moe_silu", il)
    par = b.cb(gg.mul(up, gate), "ffn_moe_gate_par", il)
    experts = b.cb(gg.mul_mat_id(b.weight("ffn_down_exps", il), par, selected), "ffn_moe_down", il)
    experts = b.cb(gg.mul(experts, weights), "ffn_moe_weighted", il)  # [n_embd, n_used, n_tokens]

    views = [gg.view_2d(experts, n_embd, n_tokens, experts.nb[2], i * experts.nb[1]) for i in range(n_used)]
    out = views[0]
    for view in views[1:]:
        out = gg.add(out, view)
    return b.cb(out if n_used > 1 else gg.cont(out), "ffn_moe_out", il)


# -- attention with the cache ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KV:
    """What attention over the cache takes, for layer `il`.

    q_cur ne [n_embd_head_k, n_head, n_tokens], k_cur ne [n_embd_head_k, n_head_kv, n_tokens], v_cur ne
    [n_embd_v_gqa, n_tokens], kq_mask ne [n_kv, n_tokens padded].
    """

    q_cur: Tensor
    k_cur: Tensor
    v_cur: Tensor
    kq_mask: Tensor
    il: int


def llm_build_kv(b: Build, a: KV) -> Tensor:
    """Store K and V in the cache, attend, and project: ne [n_embd, n_tokens]."""
    for t in (a.q_cur, a.k_cur, a.v_cur):  # added together, so that the order of the nodes is llama.cpp's
        b.graph.build_forward_expand(t)
    _kv_store(b, a)
    cur = _kqv(b, a)
    b.graph.build_forward_expand(cur)
    return b.linear("attn_output", cur, "kqv_out", a.il)


def _kv_store(b: Build, a: KV) -> None:
    """Copy K and V into the slot of the ubatch."""
    il, n = a.il, b.hparams.layer(a.il)
    kv, _, head, _ = b.use(il)
    k_l, v_l, v_cur = kv.k_l[kv.index[il]], kv.v_l[kv.index[il]], a.v_cur
    k_row = kv.type_k.row_size(n.n_embd_k_gqa)
    view = gg.view_1d(k_l, b.n_tokens * n.n_embd_k_gqa, k_row * head)
    _store(b, a.k_cur, b.cb(view, "k_cache_view", il))
    if not kv.v_trans:
        v_row = kv.type_v.row_size(n.n_embd_v_gqa)
        view = gg.view_1d(v_l, b.n_tokens * n.n_embd_v_gqa, v_row * head)
    else:
        size = kv.type_v.type_size
        view = gg.view_2d(v_l, b.n_tokens, n.n_embd_v_gqa, size * kv.size, size * head)
        v_cur = gg.transpose(v_cur).set_name(f"{v_cur.name} (transposed)")
    _store(b, v_cur, b.cb(view, "v_cache_view", il))


def _store(b: Build, cur: Tensor, view: Tensor) -> None:
    b.graph.build_forward_expand(gg.cpy(cur, view).set_name(f"{view.name} (copy of {cur.name})"))


def _kqv(b: Build, a: KV) -> Tensor:
    """softmax(mask(K q)) V over the first n_kv cells: ne [n_embd_head_v * n_head, n_tokens]."""
    hp, n, il = b.hparams, b.hparams.layer(a.il), a.il
    kv, n_kv, _, _ = b.use(il)
    k_l, v_l = kv.k_l[kv.index[il]], kv.v_l[kv.index[il]]
    k_row = kv.type_k.row_size
    q = b.cb(gg.permute(a.q_cur, 0, 2, 1, 3), "q", il)  # [n_embd_head_k, n_tokens, n_head]
    k = gg.view_3d(k_l, hp.n_embd_head_k, n_kv, n.n_head_kv, k_row(n.n_embd_k_gqa), k_row(hp.n_embd_head_k), 0)
    b.cb(k, "k", il)
    if kv.flash_attn:
        v_row = kv.type_v.row_size
        v = gg.view_3d(v_l, hp.n_embd_head_v, n_kv, n.n_head_kv, v_row(n.n_embd_v_gqa), v_row(hp.n_embd_head_v), 0)
        b.cb(v, "v", il)
        cur = gg.flash_attn_ext(q, k, v, a.kq_mask, hp.f_attention_scale, hp.f_max_alibi_bias, 0.0)
        b.cb(cur, "kqv", il)  # [n_embd_head_v, n_head, n_tokens]
        return b.cb(gg.reshape_2d(cur, n.n_embd_out, b.n_tokens), "kqv_merged", il)
    kq = b.cb(gg.mul_mat(k, q), "kq", il)  # [n_kv, n_tokens, n_head]
    kq = gg.soft_max_ext(kq, a.kq_mask, hp.f_attention_scale, hp.f_max_alibi_bias)
    b.cb(kq, "kq_soft_max_ext", il)
    size = kv.type_v.type_size
    v = gg.view_3d(v_l, n_kv, hp.n_embd_head_v, n.n_head_kv, size * kv.size, size * kv.size * hp.n_embd_head_v, 0)
    kqv = b.cb(gg.mul_mat(b.cb(v, "v", il), kq), "kqv", il)  # [n_embd_head_v, n_tokens, n_head]
    kqv = b.cb(gg.permute(kqv, 0, 2, 1, 3), "kqv_merged", il)
    return b.cb(gg.cont_2d(kqv, n.n_embd_out, b.n_tokens), "kqv_merged_cont", il)
