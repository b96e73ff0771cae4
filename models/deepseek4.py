"""DeepSeek-V4 (llama.cpp's `deepseek4`, https://github.com/ggml-org/llama.cpp).

Attention has one head of K, and the same rows serve as V. Through a sliding window a token sees single tokens; beyond
the window it sees blocks of tokens, each through one key. Rope turns K, and so V, by position; therefore the output of
attention is turned back by the position of its token.

The key of a block is a weighted sum of rows of its tokens. The weights are a softmax over these tokens, one for each
element. The sum is normed, and roped with the position of the block's first token. Blocks are small or large. Small
blocks overlap: half of each row is for the token's own block, half for the block after it. An indexer chooses which
small blocks a token sees (see `indexer.py`).

The cache of block keys has a cell for every token. Attention sees only the cells of tokens that end a block (see
`block_keys.py`). The indexer's keys of small blocks are kept the same way.

Layers are joined by hyper-connections (see `hyper.py`). Each has a mixture of experts whose gate and up rows are kept
within a limit. In the first layers a table of the file says which experts a token gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .block_keys import BlockKeys, TokenBlocks, build_block_keys
from .blocks import (
    KV,
    Build,
    build_attn,
    build_expert_weights,
    build_experts,
    build_inp_kq_mask,
    build_inp_pos,
    build_inp_tokens,
    build_norm,
    build_router,
    build_shared_expert,
    limited,
    router_probs,
    store_k,
)
from .hparams import HParams, LayerShape, RopeShape, StateShape
from .hyper import BY_WEIGHTS, HyperHParams, build_hyper, read_hyper
from .indexer import Indexer, index_scores_of_row, must_choose, read_indexer, rope_from, store_index_as_is
from .metadata import Reader, read_clamps, read_hparams, read_router

_GROUPS, _RANK, _BASE, _RATIOS = (
    f"{{arch}}.attention.{key}"
    for key in ("output_group_count", "output_lora_rank", "compress_rope_freq_base", "compress_ratios")
)
_HASHED = "{arch}.hash_layer_count"
_SMALL, _LARGE = 4, 128  # tokens of a block; small blocks overlap, and an indexer chooses among them


@dataclass(frozen=True, kw_only=True)
class DeepSeek4HParams(Indexer, HyperHParams):
    """Hyperparameters of DeepSeek-V4. Layer n_layer + il of the cache has the block keys of layer il.

    n_lora_q               elements of the row that Q is a product of
    n_out_group            groups into which the heads are divided for the output projection
    n_lora_out             elements to which each group is projected
    ratios                 tokens of a block, by layer; 0: the layer sees the window only
    rope_freq_base_blocks  rope base of the layers that have blocks
    n_layer_hashed         how many of the first layers look up a token's experts in a table
    swiglu_clamp_exp       limit of the gate and up rows of experts, by layer; 0: no limit
    swiglu_clamp_shexp     the same of the shared expert
    """

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
        blocks = (self.n_layer + il for il in range(self.n_layer) if self.ratios[il])
        return (*range(self.n_layer), *blocks, *self.index_layers)

    def is_swa(self, il: int) -> bool:
        return il < self.n_layer

    @property
    def index_from(self) -> int:
        return 2 * self.n_layer

    def has_indexer(self, il: int) -> bool:
        return self.ratios[il] == _SMALL and self.n_indexer_head > 0

    def layer(self, il: int) -> LayerShape:
        return super().layer(il if il >= self.index_from else il % self.n_layer)

    def rope(self, il: int) -> RopeShape | None:
        if il >= self.index_from:
            return super().rope(il)
        shape = super().rope(il % self.n_layer)
        if shape is None or not self.ratios[il % self.n_layer]:
            return shape and shape._replace(freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
        return shape._replace(freq_base=self.rope_freq_base_blocks)

    def blocks(self, il: int) -> TokenBlocks | None:
        """The blocks of layer `il`; None when it sees the window only."""
        return _blocks(self.ratios[il]) if self.ratios[il] else None

    def state(self, il: int) -> StateShape:
        """What blocks that are not full yet need of earlier tokens: rows and their scores. Overlapping blocks need
        them for two blocks."""
        t = self.blocks(il)
        if t is None:
            return StateShape()
        row = 2 * (t.n_read // t.size) * (t.n_read - 1)
        return StateShape(row * self.n_embd_head_k, p=row * self.n_indexer_embd if self.has_indexer(il) else 0)


def _blocks(ratio: int) -> TokenBlocks:
    return TokenBlocks(ratio, 2 * ratio if ratio == _SMALL else ratio)


def build_deepseek4(b: Build[DeepSeek4HParams]) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        pos = build_inp_pos(b)
        ffn = partial(_ffn, b, hp)
        return build_hyper(b, BY_WEIGHTS, lambda cur, il: _attention(b, hp, cur, pos, il), ffn)


def _roped(
    b: Build, hp: DeepSeek4HParams, cur: Tensor, pos: Tensor, name: str, il: int, *, back: bool = False
) -> Tensor:
    """Rope the last n_rot elements of each head of `cur`, ne [n_embd_head, n, n_tokens]; with `back`, undo that."""
    shape = hp.rope(il)
    assert shape is not None, hp
    shape = shape._replace(first=cur.ne[0] - shape.n_rot)
    return b.cb(rope_from(hp, shape, cur, pos, back=back), name, il)


def _attention(b: Build, hp: DeepSeek4HParams, cur: Tensor, pos: Tensor, il: int) -> Tensor:
    n, n_tokens = hp.layer(il), cur.ne[1]
    head, n_head = n.n_embd_head_k, n.n_head
    q_row = build_norm(b, b.linear("attn_q_a", cur, hp.n_lora_q, "qr", il), "attn_q_a_norm", "qr_norm", il)
    q = gg.reshape_3d(b.linear("attn_q_b", q_row, n.n_embd_q, "q", il), head, n_head, n_tokens)
    q = _roped(b, hp, build_norm(b, q, "", "q_norm", il), pos, "Qcur", il)
    kv = build_norm(b, b.linear("attn_kv", cur, head, "kv", il), "attn_kv_a_norm", "kv_norm", il)
    kv = _roped(b, hp, gg.reshape_3d(kv, head, 1, n_tokens), pos, "Kcur", il)
    beside = None
    t = hp.blocks(il)
    if t is not None:
        keys = _block_keys(b, hp, t, "attn", cur, il)
        store_k(b, keys.of_tokens(keys.keys), hp.n_layer + il)
        mask = _mask(b, t, keys.end, il)
        if hp.has_indexer(il):
            mask = _chosen(b, hp, t, cur, q_row, pos, mask, il)
        beside = hp.n_layer + il, mask
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
    """The numbers of all groups of heads, for each token: I32 ne [n_out_group, n_tokens]. They let `mul_mat_id` take
    the groups for experts, because products with experts read repacked weights."""
    name, n = "out_groups", hp.n_out_group
    if name not in b.masks:
        numbers = gg.repeat_4d(gg.arange(0.0, n, 1.0, ctx=b.ctx), n, b.n_tokens, 1, 1)
        b.masks[name] = b.cb(gg.cast(numbers, DType.I32), name)
    return b.masks[name]


def _mask(b: Build, t: TokenBlocks, end: Tensor, il: int) -> Tensor:
    """The mask of the cells with block keys: a token sees those cells that it sees in the cache and that end a
    block."""
    name = f"KQ_mask_blocks_{t.size}"
    if name not in b.masks:
        mask = build_inp_kq_mask(b, b.hparams.n_layer + il)
        b.masks[name] = b.cb(gg.add(mask, gg.cast(end, mask.dtype) if mask.dtype is not DType.F32 else end), name)
    return b.masks[name]


def _block_keys(b: Build, hp: DeepSeek4HParams, t: TokenBlocks, part: str, cur: Tensor, il: int) -> BlockKeys:
    """The normed and roped keys of the blocks that the tokens end. `part` says for whom: "attn" or "indexer"."""
    head, cells, name = hp.n_embd_head_k, b.states.r_l[il], "block"
    if part == "indexer":
        head, cells, name = hp.n_indexer_embd, b.states.p_l[il], "indexer_block"
    value = b.linear(f"{part}_compressor_kv", cur, head * (t.n_read // t.size), f"{name}_kv", il)
    gate = f"{part}_compressor_gate", f"{part}_compressor_ape"
    found = build_block_keys(b, t, head, value, gate, cur, cells, name, il)
    keys = build_norm(b, found.keys, f"{part}_compressor_norm", f"{name}_normed", il)
    keys = _roped(b, hp, gg.reshape_3d(keys, head, 1, keys.ne[1]), found.pos, f"{name}_keys", il)
    return found._replace(keys=keys)


def _chosen(
    b: Build, hp: DeepSeek4HParams, t: TokenBlocks, cur: Tensor, q_row: Tensor, pos: Tensor, mask: Tensor, il: int
) -> Tensor:
    """The blocks that tokens attend to: those of `mask` that the indexer chooses. `mask` itself when the cache is too
    small for a choice, or an old file has no indexer."""
    head, choose = hp.n_indexer_embd, must_choose(b, hp, hp.n_layer + il, t.size)
    ask = b.weight if choose else b.optional  # old files lack these weights
    there = [ask(f"indexer_compressor_{part}", (hp.n_embd, 2 * head), il) for part in ("kv", "gate")]
    there += [ask("indexer_compressor_ape", (2 * head, t.size), il), ask("indexer_compressor_norm", (head,), il)]
    if None in there:
        return mask
    keys = _block_keys(b, hp, t, "indexer", cur, il)
    store_index_as_is(b, hp, keys.of_tokens(keys.keys), il)
    score = index_scores_of_row(b, hp, cur, q_row, pos, il, required=choose)
    return mask if score is None else b.cb(gg.top_k_mask(score, mask, hp.n_chosen), "kq_mask_chosen", il)


def _ffn(b: Build, hp: DeepSeek4HParams, cur: Tensor, il: int) -> Tensor:
    act, shared = limited(hp.swiglu_clamp_exp[il]), limited(hp.swiglu_clamp_shexp[il])
    for role in ("exp_probs_b", "exp_probs_b_vl"):  # exp_probs_b_vl: when embeddings are given
        b.optional(role, (hp.n_expert,), il, "bias")
    hashed = il < hp.n_layer_hashed
    table = b.weight("ffn_gate_tid2eid", (hp.n_expert_used, hp.n_vocab), il) if hashed else None
    if b.mixed:
        raise ModelError("deepseek4 chooses experts by tokens: a batch has tokens, or embeddings of pictures, not both")
    if table is not None and not b.embd:
        logits = b.linear("ffn_gate_inp", cur, hp.n_expert, "ffn_moe_logits", il)
        selected = gg.get_rows(table, build_inp_tokens(b))
        weights = build_expert_weights(b, router_probs(b, logits, il), selected, il)
    else:
        other = b.embd and b.weights.ne(b.name("exp_probs_b_vl", il, "bias")) is not None
        selected, weights = build_router(b, cur, il, bias_role="exp_probs_b_vl" if other else "exp_probs_b")
    out = build_experts(b, cur, selected, weights, hp.layer(il).n_ff_exp, il, act)
    return b.cb(gg.add(out, build_shared_expert(b, cur, il, shared)), "ffn_out", il)


def _read(r: Reader) -> DeepSeek4HParams:
    n_layer, attention = r.integer(Keys.LLM.BLOCK_COUNT), Keys.Attention
    ratios = r.per_layer(_RATIOS)
    ratios = ratios if isinstance(ratios, tuple) else (ratios,) * n_layer
    if len(ratios) < n_layer or not {*ratios} <= {0, _SMALL, _LARGE}:
        r.fail(_RATIOS, f"is {ratios}: it must hold 0, {_SMALL} or {_LARGE} for each layer")
    groups, n_out = r.integer(_GROUPS), r.integer(attention.HEAD_COUNT) * r.integer(attention.KEY_LENGTH)
    if groups < 1 or n_out % groups:
        r.fail(_GROUPS, f"is {groups}, which does not divide {n_out}")
    base, index = read_hparams(HParams, r), read_indexer(r)
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
        **index,
        index_rope_first=max(index["n_indexer_embd"] - base.n_rot, 0),
        **read_hyper(r),
    )


ARCHITECTURES = (Architecture(("deepseek4",), build_deepseek4, _read, "hybrid"),)
