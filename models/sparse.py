"""Models whose tokens attend to a few tokens, or blocks of them, that an indexer chooses: DeepSeek-V3.2
(arXiv:2512.02556), GLM-5 (arXiv:2602.15763), and MiniMax-M3 (huggingface.co/MiniMaxAI).

In contexts of no more tokens than are chosen that is attention to all, which is what these builders have:
DeepSeek-V2's, and a decoder with gpt-oss' gates. Larger contexts are refused; the weights of the indexer are not used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gguf.constants import Keys

from pyggml import ops as gg
from pyggml.errors import ModelError
from pyggml.graph import Graph

from .architecture import Architecture
from .blocks import Build
from .decoder import Decoder
from .deepseek2 import DeepSeek2HParams, build_deepseek2, read_deepseek2
from .hparams import MAX_INT, HParams, Router
from .metadata import Reader, read_hparams, read_router

_BLOCK_SIZE = "{arch}.attention.indexer.block_size"


@dataclass(frozen=True, kw_only=True)
class Indexer(HParams):
    """The heads of the indexer, their size, and the tokens that it chooses."""

    n_indexer_head: int
    n_indexer_embd: int
    n_chosen: int


@dataclass(frozen=True, kw_only=True)
class DSAHParams(Indexer, DeepSeek2HParams):
    """Of DeepSeek's sparse attention."""


@dataclass(frozen=True, kw_only=True)
class MSAHParams(Indexer):
    """Of MiniMax's."""


def check_indexer(b: Build, hp: Indexer, size: int = 1) -> None:
    """Raise ModelError for a context in which an indexer, of blocks of `size` tokens, has to choose."""
    if b.kv.size > hp.n_chosen * size:
        raise ModelError(
            f"a context of {b.kv.size} cells needs sparse attention, which is not supported: this model attends to "
            f"{hp.n_chosen * size} at most; choose a smaller n_ctx"
        )


def ask_indexer(b: Build, hp: Indexer, n_lora_q: int) -> None:
    """Ask for the weights of the indexer, whose queries come from a row of `n_lora_q` elements, and see that it is not
    needed. Raises ModelError."""
    check_indexer(b, hp)
    head = hp.n_indexer_embd
    for il in range(hp.n_layer if head else 0):
        b.optional("indexer.attn_q_b", (n_lora_q, hp.n_indexer_head * head), il)
        b.optional("indexer.attn_k", (hp.n_embd, head), il)
        b.optional("indexer.proj", (hp.n_embd, hp.n_indexer_head), il)
        for suffix in ("weight", "bias"):
            b.optional("indexer.k_norm", (head,), il, suffix)


def ask_projections(b: Build, hp: Indexer, layers: Iterable[int]) -> None:
    """As `ask_indexer`, of indexers with queries and keys of their own, in these layers."""
    check_indexer(b, hp)
    head = hp.n_indexer_embd
    for il in layers:
        for part, n in (("q", hp.n_indexer_head), ("k", 1)):
            b.optional(f"indexer.{part}_proj", (hp.n_embd, n * head), il)
            b.optional(f"indexer.{part}_norm", (head,), il)


def build_dsa(b: Build) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    assert isinstance(b.hparams, DSAHParams)
    ask_indexer(b, b.hparams, b.hparams.n_lora_q)
    return build_deepseek2(b)


def build_msa(b: Build) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    assert isinstance(hp, MSAHParams)
    ask_projections(b, hp, range(hp.n_layer_dense_lead, hp.n_layer))
    return Decoder(qk_norm="head", act=partial(gg.swiglu_oai, alpha=1.702, limit=7.0)).build(b)


def read_indexer(r: Reader, *, optional: bool = False) -> dict[str, Any]:
    """What a file says of the indexer; `optional`: there may be none."""
    keys = Keys.Attention.Indexer
    if optional and not r.integer(keys.TOP_K, 0):
        return {"n_indexer_head": 0, "n_indexer_embd": 0, "n_chosen": MAX_INT}
    return {
        "n_indexer_head": r.integer(keys.HEAD_COUNT),
        "n_indexer_embd": r.integer(keys.KEY_LENGTH),
        "n_chosen": r.integer(keys.TOP_K),
    }


def _read_dsa(r: Reader) -> HParams:
    router = read_router(r, Router(gating="sigmoid", norm=False))
    return read_deepseek2(r, cls=DSAHParams, router=router, **read_indexer(r))


def _read_msa(r: Reader) -> HParams:
    own = read_indexer(r)
    own["n_chosen"] *= r.integer(_BLOCK_SIZE)
    router = read_router(r, Router(gating="sigmoid", norm=False))
    return read_hparams(MSAHParams, r, rope_type="neox", router=router, **own)


ARCHITECTURES = (
    Architecture(("deepseek32", "glm-dsa"), build_dsa, _read_dsa, nextn=True),
    Architecture(("minimax-m3",), build_msa, _read_msa),
)
