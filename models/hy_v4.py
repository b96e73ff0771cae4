"""Hunyuan 4 (llama.cpp's `hy_v4`, https://github.com/ggml-org/llama.cpp).

It has latent attention with sinks and a gate, which attends to the tokens that an indexer chooses (see `indexer.py`);
mixtures of experts whose gate and up rows are kept within a limit; and hyper-connections whose streams are not mixed
with each other (see `hyper.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import (
    Build,
    build_attn_gate,
    build_inp_pos,
    build_mla,
    build_moe_or_ffn,
    limited,
)
from .deepseek2 import read_deepseek2
from .hparams import HParams, Router
from .hyper import BY_WEIGHTS, HyperHParams, build_hyper, read_hyper
from .indexer import build_chosen_mask, read_indexer
from .metadata import Reader, read_clamps, read_hparams, read_router
from .sparse import DSAHParams

_MAGNITUDE = "{arch}.hyper_connection.magnitude"


@dataclass(frozen=True, kw_only=True)
class HyV4HParams(DSAHParams, HyperHParams):
    """swiglu_clamp_exp: the limit of the gate and up rows of experts, by layer; 0: no limit."""

    swiglu_clamp_exp: tuple[float, ...]


def build_hy_v4(b: Build[HyV4HParams]) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams

    def attention(cur: Tensor, il: int) -> Tensor:
        sinks = b.weight("attn_sinks", (hp.layer(il).n_head,), il)
        pos = build_inp_pos(b)
        choose = partial(build_chosen_mask, b, hp, cur, pos=pos, il=il)
        attn = build_mla(b, cur, pos, None, il, hp.mla, sinks=sinks, choose=choose)
        return b.linear("attn_output", build_attn_gate(b, attn, cur, il, gg.sigmoid), hp.n_embd, "attn_out", il)

    def ffn(cur: Tensor, il: int) -> Tensor:
        return build_moe_or_ffn(b, cur, il, limited(hp.swiglu_clamp_exp[il]))

    with b.ctx:
        return build_hyper(b, BY_WEIGHTS, attention, ffn)


def _read(r: Reader) -> HyV4HParams:
    base, index = read_hparams(HParams, r), read_indexer(r, optional=True)
    return read_deepseek2(
        HyV4HParams,
        r,
        router=read_router(r, Router(norm=False)),
        **index,
        index_rope_first=max(index["n_indexer_embd"] - base.n_rot, 0),
        f_index_norm_eps=base.f_norm_rms_eps,
        **read_hyper(r, mixed=False),
        f_hc_magnitude=r.number(_MAGNITUDE),
        swiglu_clamp_exp=read_clamps(r, Keys.LLM.SWIGLU_CLAMP_EXP),
    )


ARCHITECTURES = (Architecture(("hy_v4",), build_hy_v4, _read),)
