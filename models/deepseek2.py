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
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import MLA, Build, build_inp_attn_scale, build_mla, build_moe_or_ffn
from .decoder import PlainDecoder
from .hparams import HParams, Router
from .metadata import Reader, read_attn_temperature, read_hparams, read_router

_LITE_LAYERS = (26, 27)  # layers of DeepSeek-V2-Lite and GigaChat3, whose Q is not a product of low rank


@dataclass(frozen=True, kw_only=True)
class DeepSeek2HParams(HParams):
    """The ranks of the rows that Q (0: it has none), and K and V, come from; the sizes of a head."""

    n_lora_q: int
    n_lora_kv: int
    n_embd_head_k_mla: int
    n_embd_head_v_mla: int

    @property
    def mla(self) -> MLA:
        """The sizes of latent attention."""
        return MLA(self.n_lora_q, self.n_lora_kv, self.n_embd_head_k_mla, self.n_embd_head_v_mla, self.n_rot)


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
    )  # 0.1 times the model's factor of log(rope scaling factor); the file has the product
    attn_factor = base.rope_attn_factor
    if log_mul < 0:
        r.fail(rope.SCALING_YARN_LOG_MUL, f"is {log_mul}: it must not be negative")
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


class DeepSeek2(PlainDecoder[D]):
    """A plain decoder with latent attention. Its mixtures of experts always have an expert that all tokens share."""

    def attention(self, b: Build[D], cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        return b.linear("attn_output", self.latent(b, cur, pos, il), b.hparams.n_embd, "kqv_out", il)

    def latent(self, b: Build[D], cur: Tensor, pos: Tensor, il: int) -> Tensor:
        """What latent attention gives in layer `il`, which reads `cur`, before it is projected."""
        hp = b.hparams
        q_scale = build_inp_attn_scale(b, hp.attn_temperature) if hp.attn_temperature else None
        return build_mla(b, cur, pos, None, il, hp.mla, q_scale)

    def ffn(self, b: Build[D], cur: Tensor, il: int) -> Tensor:
        return build_moe_or_ffn(b, cur, il)


_BUILD = DeepSeek2[DeepSeek2HParams](rope_factors=False).build
ARCHITECTURES = (
    Architecture(("deepseek2",), _BUILD, partial(read_deepseek2, DeepSeek2HParams), nextn=True),
    Architecture(("mistral4",), _BUILD, partial(read_deepseek2, DeepSeek2HParams, mscale_of_key=False)),
)
