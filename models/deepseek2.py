"""DeepSeek-V2, V3 and R1 (arXiv 2405.04434, 2412.19437), and the others of their architecture: Kimi K2, GigaChat3,
Kanana 2, GLM 4.7 Flash, Mistral Large 3 and Mistral 4.

llama with multi-head latent attention and a mixture of experts in all but the first layers: V2 routes by a softmax, V3
by a sigmoid with a bias that corrects which experts are chosen, both in groups, with experts that all tokens share.
Files of today hold the weights for latent rows in the cache (`key_length_mla`); older ones those that make K and V of
each head before. YaRN scales the scores of attention beside the roped elements (`yarn_log_multiplier`). Of long texts Q
may be scaled by the position (`temperature_scale`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pyggml import ops as gg
from pyggml.gguf_io.constants import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import (
    MLA,
    Build,
    build_ffn,
    build_inp_attn_scale,
    build_inp_embd,
    build_inp_pos,
    build_lm_head,
    build_mla,
    build_moe_ffn,
    build_norm,
    build_out_rows,
    build_shared_expert,
)
from .hparams import HParams, Router
from .metadata import Reader, read_attn_temperature, read_hparams, read_router

_LITE_LAYERS = (26, 27)  # of DeepSeek-V2-Lite and GigaChat3, whose Q has no rank


@dataclass(frozen=True, kw_only=True)
class DeepSeek2HParams(HParams):
    """The ranks of the rows that Q (0: it has none), and K and V, come from; the sizes of a head."""

    n_lora_q: int
    n_lora_kv: int
    n_embd_head_k_mla: int
    n_embd_head_v_mla: int


D = TypeVar("D", bound=DeepSeek2HParams)


def read_deepseek2(cls: type[D], r: Reader, *, mscale_of_key: bool = True, **own: object) -> D:
    """The hyperparameters, as `read_hparams` reads them. `mscale_of_key`: YaRN scales the roped elements by the same
    factor as the scores."""
    attention, rope = Keys.Attention, Keys.Rope
    base = read_hparams(HParams, r)
    v_in_k = r.integer(attention.KEY_LENGTH_MLA, 0) > 0
    n_embd_head_k = r.integer(attention.KEY_LENGTH_MLA, 0) or base.n_embd_head_k
    n_embd_head_v = r.integer(attention.VALUE_LENGTH_MLA, 0) or base.n_embd_head_v
    n_lora_kv = r.integer(attention.KV_LORA_RANK)
    lite = r.n_layer in _LITE_LAYERS or (r.n_layer == 48 and base.n_vocab == 128256)
    is_glm = r.n_layer in (47, 48) and base.n_vocab == 154880
    log_factor = max(0.0, -math.log(base.rope_freq_scale))
    log_mul = r.number(
        rope.SCALING_YARN_LOG_MUL, 0.0
    )  # 0.1 times what multiplies log(factor), which has a 0.1 of its own
    attn_factor = base.rope_attn_factor
    if base.yarn_ext_factor and log_mul:
        mscale = 1.0 if mscale_of_key else (1.0 + 0.1 * log_factor) / (1.0 + log_mul * log_factor)
        attn_factor *= mscale / (1.0 + 0.1 * log_factor)
    mscale = attn_factor * (1.0 + 0.1 * log_factor) * (1.0 + log_mul * log_factor)
    router = read_router(r, Router(gating="sigmoid" if is_glm else "softmax", norm=False))
    return read_hparams(
        cls,
        r,
        rope_first=n_lora_kv if v_in_k else n_embd_head_k - base.n_rot,
        rope_attn_factor=attn_factor,
        f_attention_scale=mscale * mscale / math.sqrt(n_embd_head_k),
        attn_temperature=read_attn_temperature(r, r.integer(attention.TEMPERATURE_LENGTH, 0)),
        v_in_k=v_in_k,
        n_lora_q=0 if lite else r.integer(attention.Q_LORA_RANK),
        n_lora_kv=n_lora_kv,
        n_embd_head_k_mla=n_embd_head_k,
        n_embd_head_v_mla=n_embd_head_v,
        **{"router": router, **own},
    )


def build_deepseek2(
    b: Build[DeepSeek2HParams], attention: Callable[[Tensor, Tensor, int], Tensor] | None = None
) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]. `attention`, of what it
    reads, positions, and the layer, gives what is projected; without it that is the model's own."""
    hp = b.hparams
    mla = MLA(hp.n_lora_q, hp.n_lora_kv, hp.n_embd_head_k_mla, hp.n_embd_head_v_mla, hp.n_rot)
    with b.ctx:
        inpL = build_inp_embd(b)
        inp_pos = build_inp_pos(b)
        q_scale = build_inp_attn_scale(b, hp.attn_temperature) if hp.attn_temperature else None
        for il in range(hp.n_layer):
            cur = build_norm(b, inpL, "attn_norm", "attn_norm", il)
            cur = attention(cur, inp_pos, il) if attention else build_mla(b, cur, inp_pos, None, il, mla, q_scale)
            cur = b.linear("attn_output", cur, hp.n_embd, "kqv_out", il)
            cur, inpL = build_out_rows(b, il, cur, inpL)
            ffn_inp = b.cb(gg.add(cur, inpL), "ffn_inp", il)
            cur = build_norm(b, ffn_inp, "ffn_norm", "ffn_norm", il)
            if hp.is_moe(il):
                cur = b.cb(gg.add(build_moe_ffn(b, cur, il), build_shared_expert(b, cur, il)), "ffn_out", il)
            else:
                cur = build_ffn(b, cur, il)
            inpL = b.cb(gg.add(cur, ffn_inp), "l_out", il)
        return build_lm_head(b, build_norm(b, inpL, "output_norm", "result_norm"))


ARCHITECTURES = (
    Architecture(("deepseek2",), build_deepseek2, partial(read_deepseek2, DeepSeek2HParams), nextn=True),
    Architecture(("mistral4",), build_deepseek2, partial(read_deepseek2, DeepSeek2HParams, mscale_of_key=False)),
)
