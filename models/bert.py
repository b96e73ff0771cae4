"""BERT (arXiv 1810.04805) and encoders that norm after attention and after the network, as BERT does:

bert            BERT, MiniLM, BGE, E5, GTE, Snowflake Arctic Embed; RoBERTa (arXiv 1907.11692) and XLM-R (1911.02116)
                with BGE-M3, whose files have the embeddings of positions from the first one that is used on
nomic-bert      Nomic Embed (arXiv 2402.01613), CodeRankEmbed: with rope, and a gate with silu
nomic-bert-moe  Nomic Embed 2 (arXiv 2502.07972): with rope, and a mixture of experts in every other layer
jina-bert-v2    Jina Embeddings 2 (arXiv 2310.19923) and Jina Reranker 1: ALiBi to both sides, and a gate with gelu. The
                model for code also norms Q and K, and norms twice after attention
jina-bert-v3    Jina Embeddings 3 (arXiv 2409.10173): XLM-R with a rope

Tokens see each other, and nothing is remembered. There are no logits: graphs end with `result_embd`. The gelu of these
models is the exact one, while llama.cpp computes its approximation by a tanh; the key `hidden_activation` of a file
says which one it means (see `models/metadata.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import (
    KV,
    Build,
    build_ffn,
    build_inp_embd,
    build_inp_kq_mask,
    build_inp_pos,
    build_moe_ffn,
    build_norm,
    build_out_rows,
    build_pos_embd,
    build_qkv,
    build_result_embd,
    build_rope,
    llm_build_kv,
)
from .hparams import Activation, HParams, Router
from .metadata import Reader, read_activation, read_hparams, read_router

_TOKEN_TYPES = "tokenizer.ggml.token_type_count"


@dataclass(frozen=True, kw_only=True)
class BertHParams(HParams):
    """Hyperparameters of BERT and its kin, in this order: how many kinds of text there are (0: as many as have
    embeddings; all tokens count as the first kind), and which layers are mixtures of experts: from the second on, every
    n-th (0: no layer is)."""

    n_token_types: int
    moe_every_n_layers: int = 0

    def is_moe(self, il: int) -> bool:
        return self.moe_every_n_layers > 0 and il % self.moe_every_n_layers == 1


def _read(r: Reader, act: Activation = "gelu", **own: Any) -> BertHParams:
    n_token_types = r.kv.get(_TOKEN_TYPES, 0)
    return read_hparams(
        BertHParams,
        r,
        "layer",
        causal_attn=False,
        n_token_types=n_token_types if isinstance(n_token_types, int) else 0,
        act=read_activation(r) or act,
        **own,
    )


def _read_bert(r: Reader) -> BertHParams:
    return _read(r, learned_positions=True, rope_layers=0)


def _read_nomic(r: Reader) -> BertHParams:
    return _read(r, "silu", rope_type="neox")


def _read_nomic_moe(r: Reader) -> BertHParams:
    every = r.integer(Keys.LLM.MOE_EVERY_N_LAYERS, 0)
    return _read(r, rope_type="neox", moe_every_n_layers=every, router=read_router(r, Router(norm=False)))


def _read_jina2(r: Reader) -> BertHParams:
    return _read(r, rope_layers=0, f_max_alibi_bias=8.0)


def _read_jina3(r: Reader) -> BertHParams:
    return _read(r, rope_type="neox")


def build_bert(b: Build[BertHParams], *, gated: bool = False) -> Graph:
    """The graph of one ubatch; its last node `result_embd` has ne [n_embd, n_outputs]. `gated`: the network has a gate,
    with a weight of its own or inside `ffn_up`."""
    hp = b.hparams
    with b.ctx:
        inpL = _embeddings(b, hp)
        pos = build_inp_pos(b)

        def layer(inpL: Tensor, il: int) -> Tensor:
            Qcur, Kcur, Vcur = build_qkv(b, inpL, il)
            Qcur = build_rope(b, _row_norm(b, Qcur, "attn_q_norm", il), pos, None, "Qcur", il)
            Kcur = build_rope(b, _row_norm(b, Kcur, "attn_k_norm", il), pos, None, "Kcur", il)
            cur = llm_build_kv(b, KV(Qcur, Kcur, Vcur, build_inp_kq_mask(b, il), il))

            cur, inpL = build_out_rows(b, il, cur, inpL)
            cur = build_norm(b, gg.add(cur, inpL), "attn_output_norm", "attn_out_norm", il, "layer")
            if b.optional("attn_norm_2", cur.ne[:1], il) is not None:
                cur = build_norm(b, gg.add(cur, inpL), "attn_norm_2", "attn_norm_2", il, "layer")
            ffn_inp = b.cb(cur, "ffn_inp", il)

            cur = gg.add(_ffn(b, hp, ffn_inp, il, gated), ffn_inp)
            return build_norm(b, cur, "layer_output_norm", "l_out", il, "layer")

        inpL = b.layers(layer, inpL)
        return build_result_embd(b, inpL)


def _embeddings(b: Build, hp: BertHParams) -> Tensor:
    """The normed sum of three embeddings: of the token, of its position, and of the first kind of text. The result has
    ne [n_embd, n_tokens]."""
    cur = build_inp_embd(b)
    there = b.weights.ne("token_types.weight")
    n_types = hp.n_token_types or (there[1] if there is not None else 0)
    types = b.optional("token_types", (hp.n_embd, n_types)) if n_types else None
    if types is not None:
        first = gg.view_1d(types, hp.n_embd, 0)
        cur = gg.add(cur, first if types.dtype is DType.F32 else gg.cast(first, DType.F32))
    if hp.learned_positions:
        cur = build_pos_embd(b, cur)
    return build_norm(b, cur, "token_embd_norm", "inp_norm", kind="layer")


def _row_norm(b: Build, cur: Tensor, role: str, il: int) -> Tensor:
    """The norm of all heads of a token together, when the model has one."""
    head, n_head, n_tokens, _ = cur.ne
    if b.optional(role, (head * n_head,), il) is None:
        return cur
    row = gg.reshape_2d(gg.cont(cur) if cur.op == "view" else cur, head * n_head, n_tokens)
    return gg.reshape_3d(build_norm(b, row, role, f"{role}ed", il, "layer"), head, n_head, n_tokens)


def _ffn(b: Build, hp: BertHParams, cur: Tensor, il: int, gated: bool) -> Tensor:
    if hp.is_moe(il):
        return build_moe_ffn(b, cur, il, "gelu", gated=False)
    n_ff = hp.layer(il).n_ff
    if gated and b.n_out("ffn_up", (n_ff, 2 * n_ff), il) != n_ff:
        return build_ffn(b, cur, il, "gelu", gate_in_up=True)
    return build_ffn(b, cur, il, "gelu", gated)


def _build_gated(b: Build[BertHParams]) -> Graph:
    return build_bert(b, gated=True)


def _build_jina2(b: Build[BertHParams]) -> Graph:
    """The graph of a ubatch. In the first of these models the gate is in `ffn_up`, or there is no gate."""
    n = b.hparams.layer(0)
    own = b.optional("ffn_gate", (b.hparams.n_embd, n.n_ff), 0) is not None
    return build_bert(b, gated=own or b.n_out("ffn_up", (n.n_ff, 2 * n.n_ff), 0) != n.n_ff)


ARCHITECTURES = (
    Architecture(("bert",), build_bert, _read_bert, "none", False),
    Architecture(("nomic-bert",), _build_gated, _read_nomic, "none", False),
    Architecture(("nomic-bert-moe",), build_bert, _read_nomic_moe, "none", False),
    Architecture(("jina-bert-v2",), _build_jina2, _read_jina2, "none", False),
    Architecture(("jina-bert-v3",), build_bert, _read_jina3, "none", False),
)
