"""GLM 5 Next (llama.cpp's `glm5-next`, https://github.com/ggml-org/llama.cpp).

Some layers have Kimi's delta nets. The others have latent attention without positions, which attends to pools of
consecutive tokens that an indexer chooses (see `indexer.py`). Layers are joined by hyper-connections (see `hyper.py`),
and have mixtures of experts whose gate and up rows are kept within a limit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from pyggml.gguf_io.keys import Keys
from pyggml.gguf_io.read import says
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .block_keys import TokenBlocks, build_block_keys
from .blocks import (
    Build,
    build_inp_kq_mask,
    build_inp_pos,
    build_mla,
    build_moe_or_ffn,
    limited,
)
from .hparams import Router, StateShape
from .hyper import BY_MEAN, HyperHParams, build_hyper, read_hyper
from .indexer import (
    INDEX_EPS,
    ChosenBlocks,
    Indexer,
    build_chosen_blocks,
    chosen_before,
    index_key,
    index_scores_of_row,
    must_choose,
    read_indexer,
    store_index_as_is,
)
from .kimi_k3 import BoundedKimi
from .kimi_linear import GATE_LOWER_BOUND, KimiHParams, read_kimi
from .metadata import Reader, read_clamps, read_router

_POOL, _TAIL = (f"{{arch}}.attention.indexer.{key}" for key in ("kpool", "kpool_select_tail"))
_MAX_POOL = 1024  # so that a file with a wrong number does not cost much memory
_L2_EPS = 1e-6  # files do not say it


@dataclass(frozen=True, kw_only=True)
class GLM5NextHParams(Indexer, KimiHParams, HyperHParams):
    """The indexer has one key for each pool of tokens, and chooses whole pools. `n_chosen` counts tokens."""

    def state(self, il: int) -> StateShape:
        if not self.has_indexer(il):
            return super().state(il)
        return StateShape((self.token_blocks[0].n_read - 1) * 2 * self.n_indexer_embd)


@dataclass(frozen=True, kw_only=True)
class GLM5Next(BoundedKimi[GLM5NextHParams]):
    """Bounded Kimi with several residual streams, and experts whose gate and up rows are kept within a limit."""

    def build(self, b: Build[GLM5NextHParams]) -> Graph:
        with b.ctx:
            pos = build_inp_pos(b)
            return build_hyper(
                b,
                BY_MEAN,
                lambda cur, il: self.attention(b, cur, pos, None, il),
                lambda cur, il: self.ffn(b, cur, il),
            )

    def latent(self, b: Build[GLM5NextHParams], hp: GLM5NextHParams, cur: Tensor, pos: Tensor, il: int) -> Tensor:
        return build_mla(b, cur, pos, None, il, hp.mla, choose=partial(_chosen, b, hp, cur, pos, il))

    def ffn(self, b: Build[GLM5NextHParams], cur: Tensor, il: int) -> Tensor:
        hp = b.hparams
        return build_moe_or_ffn(b, cur, il, limited(hp.swiglu_clamp_exp[il]), limited(hp.swiglu_clamp_shexp[il]))


def _chosen(b: Build, hp: GLM5NextHParams, cur: Tensor, pos: Tensor, il: int, q_row: Tensor) -> Tensor:
    """The mask of layer `il`, of the pools that its indexer chooses, or the last one before."""
    choose = must_choose(b, hp, il)
    if not hp.has_indexer(il):
        return chosen_before(b, il) if choose else build_inp_kq_mask(b, il)
    t, head, gate = hp.token_blocks[0], hp.n_indexer_embd, ("indexer_compressor_gate", "indexer_compressor_ape")
    ask = b.weight if choose else b.optional  # old files lack them
    there = [ask(gate[0], (hp.n_embd, head), il), ask(gate[1], (head, t.size), il)]
    k = index_key(b, hp, cur, il, required=choose)
    score = None
    if k is not None and None not in there:
        keys = build_block_keys(b, t, head, k, gate, cur, b.states.r_l[il], "indexer_pool", il)
        store_index_as_is(b, hp, keys.of_tokens(keys.keys), il)
        score = index_scores_of_row(b, hp, cur, q_row, pos, il, required=choose)
        if score is not None:
            return build_chosen_blocks(b, hp, score, keys.end, il)
    return build_inp_kq_mask(b, il)


def _read(r: Reader) -> GLM5NextHParams:
    for key, good in ((Keys.Rope.DIMENSION_COUNT, 0), (_TAIL, True)):
        if r.name(key) in r.kv and not says(r.kv, r.name(key), good):
            r.fail(key, f"is {r.get(key)!r}; supported is {good!r}")
    clamps, n_pool = Keys.LLM.SWIGLU_CLAMP_SHEXP, r.integer(_POOL)
    if not 1 < n_pool <= _MAX_POOL:
        r.fail(_POOL, f"is {n_pool}, not from 2 to {_MAX_POOL}")
    return read_kimi(
        GLM5NextHParams,
        r,
        n_lora_q=r.integer(Keys.Attention.Q_LORA_RANK),
        n_rot=0,
        gate_lower_bound=r.number(GATE_LOWER_BOUND, 0.0),
        f_l2_eps=_L2_EPS,
        router=read_router(r, Router(gating="sigmoid", norm=False)),
        swiglu_clamp_exp=read_clamps(r, Keys.LLM.SWIGLU_CLAMP_EXP),
        swiglu_clamp_shexp=read_clamps(r, clamps if r.get(clamps, None) is not None else Keys.LLM.SWIGLU_CLAMP_EXP),
        token_blocks=(TokenBlocks(n_pool, n_pool),),
        chosen_blocks=(ChosenBlocks(n_pool, tail=True),),
        f_index_norm_eps=r.number(Keys.Attention.LAYERNORM_EPS, INDEX_EPS),
        **read_indexer(r),
        **read_hyper(r),
    )


ARCHITECTURES = (Architecture(("glm5-next",), GLM5Next(rope_factors=False).build, _read, "hybrid"),)
