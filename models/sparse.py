"""Models whose tokens attend only to tokens, or blocks of tokens, that an indexer chooses (see `indexer.py`).

DeepSeek-V3.2 (arXiv:2512.02556) and GLM-5 (arXiv:2602.15763) are DeepSeek-V2 with such an indexer beside its latent
attention. MiniMax-M3 (huggingface.co/MiniMaxAI) is a plain decoder with such an indexer and gpt-oss' activation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import KV, Build, build_mla, build_norm
from .decoder import PlainDecoder
from .deepseek2 import DeepSeek2, DeepSeek2HParams, read_deepseek2
from .hparams import Router
from .indexer import (
    INDEX_EPS,
    ChosenBlocks,
    Indexer,
    build_chosen_mask,
    build_inp_chosen_blocks,
    index_keys,
    index_projections,
    index_rope,
    index_rotated,
    must_choose,
    read_indexer,
    store_index,
)
from .metadata import Reader, read_hparams, read_router

_GLM_52_CONTEXT = 1 << 20  # tells GLM-5.2 by its context: its first files do not say which layers have an indexer
_BLOCK_SIZE, _LOCAL_BLOCKS = (f"{{arch}}.attention.indexer.{key}" for key in ("block_size", "local_blocks"))


@dataclass(frozen=True, kw_only=True)
class DSAHParams(Indexer, DeepSeek2HParams):
    """Hyperparameters of DeepSeek's sparse attention."""


@dataclass(frozen=True, kw_only=True)
class MSAHParams(Indexer):
    """Hyperparameters of MiniMax's sparse attention. A token sees `n_chosen` blocks of tokens, among them those that it
    sees in any case."""

    def has_indexer(self, il: int) -> bool:
        return il >= self.n_layer_dense_lead and super().has_indexer(il)


@dataclass(frozen=True, kw_only=True)
class MSA(PlainDecoder[MSAHParams]):
    """A plain decoder with an indexer. The indexer has a head for each head of K, and that head chooses the blocks that
    the head of K sees. The score of a block is its largest product of query and key."""

    def kv(self, b: Build[MSAHParams], cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> KV:
        hp, a = b.hparams, super().kv(b, cur, pos, factors, il)
        if not hp.has_indexer(il):
            return a
        blocks = hp.chosen_blocks[0]
        choose, n_tokens = must_choose(b, hp, il, blocks.size), b.n_tokens
        q, k = index_projections(b, hp, cur, il, required=choose)
        if q is None or k is None:
            return a
        k = build_norm(b, k, "indexer.k_norm", "indexer_k", il)
        store_index(b, hp, gg.reshape_3d(k, hp.n_indexer_embd, 1, n_tokens), pos, il)
        if not choose:
            return a
        q = index_rope(b, hp, build_norm(b, q, "indexer.q_norm", "indexer_q", il), pos, "indexer_q", il)
        score = gg.mul_mat(index_keys(b, hp, il), gg.permute(index_rotated(b, hp, q, il), 0, 2, 1, 3))
        of, own = build_inp_chosen_blocks(b, blocks)
        n = hp.n_chosen - blocks.n_own
        score = b.cb(score, "indexer_score", il)  # [n_kv, n_tokens, n_head_kv]
        return replace(a, kq_mask=b.cb(gg.top_k_mask(score, a.kq_mask, n, of, own), "kq_mask_chosen", il))


class DSA(DeepSeek2[DSAHParams]):
    """DeepSeek's sparse attention."""

    def latent(self, b: Build[DSAHParams], cur: Tensor, pos: Tensor, il: int) -> Tensor:
        choose = partial(build_chosen_mask, b, b.hparams, cur, pos=pos, il=il)
        return build_mla(b, cur, pos, None, il, b.hparams.mla, choose=choose)


def _read_dsa(r: Reader) -> DSAHParams:
    router = read_router(r, Router(gating="sigmoid", norm=False))
    own: dict[str, Any] = {"router": router, **read_indexer(r), "f_index_norm_eps": INDEX_EPS}
    if r.arch == "deepseek32":
        own["index_rope_type"] = "neox"
    elif not own["indexers"] and r.integer(Keys.LLM.CONTEXT_LENGTH) >= _GLM_52_CONTEXT:
        own["indexers"] = tuple(int(il < 2 or il % 4 == 2) for il in range(r.integer(Keys.LLM.BLOCK_COUNT)))
    return read_deepseek2(DSAHParams, r, **own)


def _read_msa(r: Reader) -> MSAHParams:
    own = read_indexer(r)
    size, n_own = r.integer(_BLOCK_SIZE), r.integer(_LOCAL_BLOCKS, 1)
    if size < 1:
        r.fail(_BLOCK_SIZE, "must not be 0")
    if n_own > own["n_chosen"]:
        r.fail(_LOCAL_BLOCKS, f"is {n_own}, more than the {own['n_chosen']} blocks that are seen")
    if n_own < 1:
        r.fail(_LOCAL_BLOCKS, "must not be 0: a token sees its own block")
    router = read_router(r, Router(gating="sigmoid", norm=False))
    blocks = (ChosenBlocks(size, n_own),)
    hp = read_hparams(MSAHParams, r, rope_type="neox", router=router, chosen_blocks=blocks, **own)
    for il in filter(hp.has_indexer, range(hp.n_layer)):
        if hp.layer(il).n_head_kv != hp.n_indexer_head:
            r.fail(Keys.Attention.Indexer.HEAD_COUNT, f"is {hp.n_indexer_head}, not one for each head of K")
    return hp


_MSA = MSA(qk_norm="head", act=partial(gg.swiglu_oai, alpha=1.702, limit=7.0))
ARCHITECTURES = (
    Architecture(("deepseek32", "glm-dsa"), DSA(rope_factors=False).build, _read_dsa, nextn=True),
    Architecture(("minimax-m3",), _MSA.build, _read_msa),
)
