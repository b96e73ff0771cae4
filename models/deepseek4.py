"""DeepSeek-V4 (llama.cpp's `deepseek4`, https://github.com/ggml-org/llama.cpp): one head of K, which is V, too, seen
through a sliding window, and beyond it blocks of tokens of which attention sees one key; hyper-connections (see
`hyper.py`), and mixtures of limited experts, in the first layers chosen by the token alone.

The key of a block is a sum of rows of its tokens, by a softmax for each element, normed and roped as the first of them.
Small blocks overlap: half of each row is for the block of its token, half for the one after it. Of small blocks an
indexer chooses which are seen: contexts that need it are refused (see `sparse.py`).

The keys of blocks lie in a cache with a cell for every token, of which attention sees those of tokens that end a block.
The rows that a block still needs are states. What attention gives is turned back by the positions of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.gguf_io.constants import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import (
    KV,
    Build,
    block_ends,
    build_attn,
    build_expert_weights,
    build_experts,
    build_inp_blocks,
    build_inp_kq_mask,
    build_inp_pos,
    build_norm,
    build_router,
    build_shared_expert,
    limited,
    rope,
    router_probs,
    store_k,
)
from .blocks.states import by_sequence, read_state, store_state
from .hparams import HParams, LayerShape, RopeShape, StateShape, TokenBlocks
from .hyper import BY_WEIGHTS, HyperHParams, build_hyper, read_hyper
from .metadata import Reader, read_clamps, read_hparams, read_router
from .sparse import Indexer, check_indexer, read_indexer

_GROUPS, _RANK, _BASE, _RATIOS = (
    f"{{arch}}.attention.{key}"
    for key in ("output_group_count", "output_lora_rank", "compress_rope_freq_base", "compress_ratios")
)
_HASHED = "{arch}.hash_layer_count"
_SMALL, _LARGE = 4, 128  # blocks; small ones overlap, and have an indexer


@dataclass(frozen=True, kw_only=True)
class DeepSeek4HParams(HyperHParams, Indexer):
    """n_lora_q: of the row that Q comes from. n_out_group, n_lora_out: heads are projected in groups, each to so many
    elements. ratios: of each layer, the tokens of a block; 0: it sees the window only. rope_freq_base_blocks: of layers
    with blocks. n_layer_hashed: the first layers, where a token's experts are in a table. swiglu_clamp_exp,
    swiglu_clamp_shexp: of each layer, what gate and up are kept within; 0: they are not.

    Layer n_layer + il of the cache has the keys of blocks of layer il."""

    n_lora_q: int
    n_out_group: int
    n_lora_out: int
    ratios: tuple[int, ...]
    rope_freq_base_blocks: float
    n_layer_hashed: int
    swiglu_clamp_exp: tuple[float, ...]
    swiglu_clamp_shexp: tuple[float, ...]

    @property
    def cache_layers(self) -> Iterable[int]:
        return (*range(self.n_layer), *(self.n_layer + il for il in range(self.n_layer) if self.ratios[il]))

    def is_swa(self, il: int) -> bool:
        return il < self.n_layer

    def layer(self, il: int) -> LayerShape:
        return super().layer(il % self.n_layer)

    def rope(self, il: int) -> RopeShape | None:
        shape = super().rope(il % self.n_layer)
        if shape is None or not self.ratios[il % self.n_layer]:
            return shape and shape._replace(freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
        return shape._replace(freq_base=self.rope_freq_base_blocks)

    def blocks(self, il: int) -> TokenBlocks | None:
        """Those of a layer."""
        return _blocks(self.ratios[il]) if self.ratios[il] else None

    def row(self, il: int) -> int:
        """Elements of what a block needs of a token: what is summed, and by what, of two blocks where they overlap."""
        t = self.blocks(il)
        return 0 if t is None else 2 * self.n_embd_head_k * (t.n_read // t.size)

    def state(self, il: int) -> StateShape:
        t = self.blocks(il)
        return StateShape() if t is None else StateShape((t.n_read - 1) * self.row(il))


def _blocks(ratio: int) -> TokenBlocks:
    return TokenBlocks(ratio, 2 * ratio if ratio == _SMALL else ratio)


def build_deepseek4(b: Build) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    assert isinstance(hp, DeepSeek4HParams), hp
    _ask_indexer(b, hp)
    with b.ctx:
        pos = build_inp_pos(b)
        ffn = partial(_ffn, b, hp)
        return build_hyper(b, BY_WEIGHTS, lambda cur, il: _attention(b, hp, cur, pos, il), ffn)


def _ask_indexer(b: Build, hp: DeepSeek4HParams) -> None:
    """The weights of the indexer, which is not needed where all small blocks can be seen."""
    if any(r == _SMALL for r in hp.ratios):
        check_indexer(b, hp, _SMALL)
    head = hp.n_indexer_embd
    for il in (il for il in range(hp.n_layer) if hp.ratios[il] == _SMALL):
        b.optional("indexer.attn_q_b", (hp.n_lora_q, hp.n_indexer_head * head), il)
        b.optional("indexer.proj", (hp.n_embd, hp.n_indexer_head), il)
        for part in ("kv", "gate"):
            b.optional(f"indexer_compressor_{part}", (hp.n_embd, 2 * head), il)
        b.optional("indexer_compressor_ape", (2 * head, _SMALL), il)
        b.optional("indexer_compressor_norm", (head,), il)


def _roped(
    b: Build, hp: DeepSeek4HParams, cur: Tensor, pos: Tensor, name: str, il: int, *, back: bool = False
) -> Tensor:
    """`cur`, ne [n_embd_head, n, n_tokens], its last n_rot elements roped, or turned back."""
    shape = hp.rope(il)
    assert shape is not None, hp
    first = cur.ne[0] - shape.n_rot
    part = gg.view_3d(cur, shape.n_rot, *cur.ne[1:3], *cur.nb[1:3], first * cur.nb[0])
    part = rope(hp, shape, part, pos, None, shape.attn_factor, back=back)
    if first:
        part = gg.concat(gg.view_3d(cur, first, *cur.ne[1:3], *cur.nb[1:3], 0), part, 0)
    return b.cb(part, name, il)


def _attention(b: Build, hp: DeepSeek4HParams, cur: Tensor, pos: Tensor, il: int) -> Tensor:
    n, n_tokens = hp.layer(il), cur.ne[1]
    head, n_head = n.n_embd_head_k, n.n_head
    q = build_norm(b, b.linear("attn_q_a", cur, hp.n_lora_q, "qr", il), "attn_q_a_norm", "qr_norm", il)
    q = gg.reshape_3d(b.linear("attn_q_b", q, n.n_embd_q, "q", il), head, n_head, n_tokens)
    q = _roped(b, hp, build_norm(b, q, "", "q_norm", il), pos, "Qcur", il)
    kv = build_norm(b, b.linear("attn_kv", cur, head, "kv", il), "attn_kv_a_norm", "kv_norm", il)
    kv = _roped(b, hp, gg.reshape_3d(kv, head, 1, n_tokens), pos, "Kcur", il)
    beside = None
    t = hp.blocks(il)
    if t is not None:
        keys, end = build_blocks(b, hp, t, cur, il)
        store_k(b, keys, hp.n_layer + il)
        beside = hp.n_layer + il, _mask(b, t, end, il)
    sinks = b.weight("attn_sinks", (n_head,), il)
    out = build_attn(b, KV(q, kv, None, build_inp_kq_mask(b, il), il, sinks, beside=beside))
    out = _roped(b, hp, gg.reshape_3d(out, head, n_head, n_tokens), pos, "attn_derope", il, back=True)

    group, rank = n_head * head // hp.n_out_group, hp.n_lora_out
    flat = b.weights.ne(b.name("attn_output_a", il)) == (group, rank * hp.n_out_group, 1, 1)  # as some files have it
    w = b.weight("attn_output_a", (group, rank * hp.n_out_group) if flat else (group, rank, hp.n_out_group), il)
    w = gg.reshape_3d(w, group, rank, hp.n_out_group) if flat else w
    groups, out = _groups(b, hp), gg.reshape_3d(out, group, hp.n_out_group, n_tokens)
    out = b.adapters.product(gg.mul_mat_id(w, out, groups), w.name, out, groups)
    out = gg.reshape_2d(b.cb(out, "attn_wo_a", il), rank * hp.n_out_group, n_tokens)
    return b.linear("attn_output_b", out, hp.n_embd, "attn_out", il)


def _groups(b: Build, hp: DeepSeek4HParams) -> Tensor:
    """All groups of heads, of each token: I32 ne [n_out_group, n_tokens]. As if of experts: their products read
    repacked weights."""
    name, n = "out_groups", hp.n_out_group
    if name not in b.masks:
        numbers = gg.repeat_4d(gg.arange(0.0, n, 1.0, ctx=b.ctx), n, b.n_tokens, 1, 1)
        b.masks[name] = b.cb(gg.cast(numbers, DType.I32), name)
    return b.masks[name]


def _mask(b: Build, t: TokenBlocks, end: Tensor, il: int) -> Tensor:
    """The mask of the cells with keys of blocks: of those that a token sees, and that end one."""
    name = f"KQ_mask_blocks_{t.size}"
    if name not in b.masks:
        mask = build_inp_kq_mask(b, b.hparams.n_layer + il)
        b.masks[name] = b.cb(gg.add(mask, gg.cast(end, mask.dtype) if mask.dtype is not DType.F32 else end), name)
    return b.masks[name]


def build_blocks(b: Build, hp: DeepSeek4HParams, t: TokenBlocks, cur: Tensor, il: int) -> tuple[Tensor, Tensor]:
    """The keys of the blocks that the tokens end, ne [n_embd_head, n_tokens] (of tokens that end none: any), and which
    cells have one, see `block_inputs`. What the next blocks need is stored."""
    rows, mask, pos, of, at, end = build_inp_blocks(b, t)
    head, row, before = hp.n_embd_head_k, hp.row(il), t.n_read - 1
    n_blocks, n = block_ends(t, b.n_tokens, b.n_seqs), row // 2
    value = b.linear("attn_compressor_kv", cur, n, "block_kv", il)
    score = b.linear("attn_compressor_gate", cur, n, "block_score", il)
    score = gg.add(score, gg.get_rows(b.weight("attn_compressor_ape", (n, t.size), il), at))

    cells = b.states.r_l[il]
    known = gg.reshape_3d(read_state(b, cells, "block_states", il), row, before, b.n_seqs)
    window = b.cb(gg.concat(known, by_sequence(b, gg.concat(value, score, 0)), 1), "block_rows", il)
    nb = window.nb
    last = gg.view_3d(window, row, before, b.n_seqs, nb[1], nb[2], b.n_seq_tokens * nb[1])
    store_state(b, cells, last, "block_states_updated", il)
    window = gg.reshape_2d(window, row, window.ne[1] * b.n_seqs)
    read = gg.reshape_3d(gg.get_rows(window, rows), row, t.n_read, n_blocks)

    def part(first: int) -> Tensor:  # ne [n_read, head, n_blocks]
        size, row_size = read.nb[0], read.nb[1]

        def of_block(i: int) -> Tensor:  # where blocks overlap, i = 1 is the block itself, and reads the second halves
            at = i * t.size * row_size + (first + i * head) * size
            return gg.view_3d(read, head, t.size, n_blocks, row_size, read.nb[2], at)

        rows = of_block(0) if t.n_read == t.size else gg.concat(of_block(0), of_block(1), 1)
        return gg.cont(gg.permute(rows, 1, 0, 2, 3))

    weights = gg.soft_max(gg.add(part(n), gg.reshape_3d(mask, t.n_read, 1, n_blocks)))
    keys = gg.reshape_2d(gg.sum_rows(gg.mul(part(0), weights)), head, n_blocks)
    keys = build_norm(b, keys, "attn_compressor_norm", "block_normed", il)
    keys = _roped(b, hp, gg.reshape_3d(keys, head, 1, n_blocks), pos, "block_keys", il)
    return gg.get_rows(gg.reshape_2d(keys, head, n_blocks), of), end


def _ffn(b: Build, hp: DeepSeek4HParams, cur: Tensor, il: int) -> Tensor:
    act, shared = limited(hp.swiglu_clamp_exp[il]), limited(hp.swiglu_clamp_shexp[il])
    for role in ("exp_probs_b", "exp_probs_b_vl"):  # the latter for what is no text
        b.optional(role, (hp.n_expert,), il, "bias")
    hashed = il < hp.n_layer_hashed
    table = b.weight("ffn_gate_tid2eid", (hp.n_expert_used, hp.n_vocab), il) if hashed else None
    if table is not None and not b.embd:
        logits = b.linear("ffn_gate_inp", cur, hp.n_expert, "ffn_moe_logits", il)
        selected = gg.get_rows(table, b.input("inp_tokens", DType.I32, b.n_tokens))
        weights = build_expert_weights(b, router_probs(b, logits, il), selected, il)
    else:
        other = b.embd and b.weights.ne(b.name("exp_probs_b_vl", il, "bias")) is not None
        selected, weights = build_router(b, cur, il, bias_role="exp_probs_b_vl" if other else "exp_probs_b")
    out = build_experts(b, cur, selected, weights, hp.layer(il).n_ff_exp, il, act)
    return b.cb(gg.add(out, build_shared_expert(b, cur, il, shared)), "ffn_out", il)


def _read(r: Reader) -> HParams:
    n_layer, attention = r.integer(Keys.LLM.BLOCK_COUNT), Keys.Attention
    ratios = r.per_layer(_RATIOS)
    ratios = ratios if isinstance(ratios, tuple) else (ratios,) * n_layer
    if len(ratios) < n_layer or not {*ratios} <= {0, _SMALL, _LARGE}:
        r.fail(_RATIOS, f"is {ratios}: it must hold 0, {_SMALL} or {_LARGE} for each layer")
    groups, n_out = r.integer(_GROUPS), r.integer(attention.HEAD_COUNT) * r.integer(attention.KEY_LENGTH)
    if groups < 1 or n_out % groups:
        r.fail(_GROUPS, f"is {groups}, which does not divide {n_out}")
    base = read_hparams(HParams, r)
    scale = 1.0 + 0.1 * max(0.0, -math.log(base.rope_freq_scale)) if base.yarn_ext_factor else 1.0
    clamps = Keys.LLM.SWIGLU_CLAMP_SHEXP
    return read_hparams(
        DeepSeek4HParams,
        r,
        router=read_router(r),
        v_in_k=True,
        n_swa=r.integer(attention.SLIDING_WINDOW),
        rope_first=base.n_embd_head_k - base.n_rot,
        rope_attn_factor=1.0 / scale,
        n_lora_q=r.integer(attention.Q_LORA_RANK),
        n_out_group=groups,
        n_lora_out=r.integer(_RANK),
        ratios=ratios,
        token_blocks=tuple(map(_blocks, sorted({*ratios} - {0}))),
        rope_freq_base_blocks=r.number(_BASE),
        n_layer_hashed=r.integer(_HASHED),
        swiglu_clamp_exp=read_clamps(r, Keys.LLM.SWIGLU_CLAMP_EXP),
        swiglu_clamp_shexp=read_clamps(r, clamps if r.get(clamps, None) is not None else Keys.LLM.SWIGLU_CLAMP_EXP),
        **read_indexer(r),
        **read_hyper(r),
    )


ARCHITECTURES = (Architecture(("deepseek4",), build_deepseek4, _read, "hybrid"),)
