"""Llama 4 (Meta, https://ai.meta.com/blog/llama-4-multimodal-intelligence/).

Three of four layers attend within chunks of 8192 tokens. The fourth attends to all tokens; it has no rope, and scales Q
by the position. Q and K are normed without weights after they are roped, except in the model with 128 experts. Some
layers are mixtures of experts, in which the input of an expert is weighted, not its output.

As in llama.cpp, a file whose window is 0 has neither chunks nor scale, and no rope in its last layer. For chunks of
another size pyggml has a key of its own, `attention.chunk_size`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import KV, Build, build_experts, build_inp_attn_scale, build_router, build_shared_expert
from .decoder import PlainDecoder
from .hparams import AttnTemperature, HParams, Router
from .metadata import Reader, read_hparams, read_window

_CHUNK = 8192
_CHUNK_KEY = "{arch}.attention.chunk_size"
_NO_QK_NORM = 128  # experts of the model that norms no Q and K


class Llama4(PlainDecoder):
    """The norm of roped Q and K, the scale of Q that is not roped, and experts of weighted input."""

    def kv(self, b: Build, cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> KV:
        """What attention of layer `il` takes."""
        hp, kv = b.hparams, super().kv(b, cur, pos, factors, il)
        if hp.rope(il) is None:
            if hp.attn_temperature is None:
                return kv
            scale = build_inp_attn_scale(b, hp.attn_temperature)
            return replace(kv, q_cur=b.cb(gg.mul(kv.q_cur, scale), "Qcur_attn_temp_scaled", il))
        if hp.n_expert == _NO_QK_NORM:
            return kv
        assert kv.k_cur is not None, il
        Qcur, Kcur = (gg.rms_norm(t, hp.f_norm_rms_eps) for t in (kv.q_cur, kv.k_cur))
        return replace(kv, q_cur=b.cb(Qcur, "Qcur_normed", il), k_cur=b.cb(Kcur, "Kcur_normed", il))

    def ffn(self, b: Build, cur: Tensor, il: int) -> Tensor:
        """The feed-forward network of layer `il`, or its mixture of experts with one expert that all tokens share."""
        if not b.hparams.is_moe(il):
            return super().ffn(b, cur, il)
        selected, weights = build_router(b, cur, il)
        n_ff = b.hparams.layer(il).n_ff_exp
        out = build_experts(b, cur, selected, weights, n_ff, il, weights_first=True)
        return b.cb(gg.add(out, build_shared_expert(b, cur, il)), "ffn_moe_out", il)


def _read(r: Reader) -> HParams:
    chunked = r.integer(Keys.Attention.SLIDING_WINDOW, _CHUNK) > 0
    n_layer, n_ff_exp = r.integer(Keys.LLM.BLOCK_COUNT), r.integer(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH)
    own: dict[str, Any] = {}
    if chunked:
        own = {**read_window(r, 4, _CHUNK), "n_swa": r.integer(_CHUNK_KEY, _CHUNK), "swa_type": "chunked"}
        own["attn_temperature"] = AttnTemperature(0.1, _CHUNK, 1.0)
    step = 4 if chunked else n_layer  # every `step`-th layer has no rope
    return read_hparams(
        HParams,
        r,
        router=Router(gating="sigmoid", norm=False, scale=r.number(Keys.LLM.EXPERT_WEIGHTS_SCALE, 0.0)),
        n_ff_shexp=n_ff_exp,
        rope_layers=tuple(int((il + 1) % step != 0) for il in range(n_layer)),
        **own,
    )


ARCHITECTURES = (Architecture(("llama4",), Llama4().build, _read),)
