"""Plain decoders with mixtures of experts: for each, its source and what is special in it."""

from __future__ import annotations

import math
from collections.abc import Callable

from pyggml.gguf_io.keys import Keys

from .decoder import PlainDecoder, decoder
from .hparams import Gating, HParams, PerLayer, Router
from .metadata import (
    Reader,
    read_attn_temperature,
    read_hparams,
    read_rope_sections,
    read_router,
    read_swa_pattern,
)


def _router(*, gating: Gating = "softmax", norm: bool = True) -> Callable[[Reader], Router]:
    """A function that reads the rules of a router; `router` are the rules when a file does not say them."""
    return lambda r: read_router(r, Router(gating=gating, norm=norm))


def _n_ff_exp(r: Reader) -> PerLayer:
    """The width of an expert. Old files give the sum over all experts that a token uses."""
    used = r.integer(Keys.LLM.EXPERT_USED_COUNT, 0) or 1
    return r.per_layer(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, 0) or r.integer(Keys.LLM.FEED_FORWARD_LENGTH) // used


def _n_ff_shexps(r: Reader) -> int:
    """The width of all shared experts together. The file gives the width of one."""
    size = r.integer(Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, 0) or r.integer(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH)
    return size * r.integer(Keys.LLM.EXPERT_SHARED_COUNT)


def _inverse(r: Reader, key: str, *default: float) -> float:
    """The factor of the logits, from a key that says what they are divided by."""
    return 1.0 / (r.number(key, *default) or r.fail(key, "must not be 0"))


def _mistral3_attn_factor(r: Reader) -> float:
    """A factor of cos and sin with YaRN, in addition to 1 + 0.1 log(factor)."""
    hp = read_hparams(HParams, r)
    if not hp.yarn_ext_factor:
        return hp.rope_attn_factor
    log_factor = max(0.0, -math.log(hp.rope_freq_scale))
    return hp.rope_attn_factor / (1.0 + 0.1 * r.number(Keys.Rope.SCALING_YARN_LOG_MUL, 0.0) * log_factor)


ARCHITECTURES = (
    # Ling (arXiv:2503.05139): shared experts; the weights of the others are normalised when the file says so.
    decoder("bailingmoe", router=_router(norm=False)),
    # Ling 2.0 (arXiv:2510.22115): Q and K normed, one layer without experts first, a sigmoid router with groups.
    decoder(
        "bailingmoe2",
        build=PlainDecoder(qk_norm="head"),
        rope_type="neox",
        n_ff_shexp=_n_ff_shexps,
        router=_router(gating="sigmoid", norm=False),
        nextn=True,
    ),
    # DBRX (databricks.com/blog/introducing-dbrx-new-state-art-open-llm): layer norms, and Q, K and V clamped.
    decoder(
        "dbrx",
        build=PlainDecoder(norm="layer", ffn_norm="attn_output_norm"),
        rope_type="neox",
        f_clamp_kqv=lambda r: r.number(Keys.Attention.CLAMP_KQV),
    ),
    # DeepSeekMoE (arXiv:2401.06066): small experts and shared ones, one layer without experts first.
    decoder("deepseek", router=_router(norm=False)),
    # dots.llm1 (arXiv:2506.05767): DeepSeek-V3's router, with Q and K normed.
    decoder(
        "dots1",
        build=PlainDecoder(qk_norm="head"),
        rope_type="neox",
        router=_router(gating="sigmoid", norm=False),
        own_window=True,
    ),
    # ERNIE 4.5 (ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf): Llama, or a mixture in every n-th layer
    # after the first ones, with a bias that helps to choose experts.
    decoder("ernie4_5", build=PlainDecoder(biases="qkv"), n_expert=0, n_expert_used=0),
    decoder("ernie4_5-moe", build=PlainDecoder(biases="qkv")),
    # GLM-4.5 (arXiv:2508.06471): DeepSeek-V3's router, with Q and K normed in the largest model. GLM-4.5V
    # (arXiv:2507.01006), its text model: a token has three positions.
    decoder(
        "glm4moe",
        build=PlainDecoder(qk_norm="head", qk_norm_optional=True, ffn_norm="post_attention_norm"),
        rope_type=lambda r: "mrope" if any(read_rope_sections(r)) else "neox",
        rope_sections=read_rope_sections,
        router=_router(gating="sigmoid", norm=False),
        nextn=True,
    ),
    # Granite 3 (github.com/ibm-granite/granite-3.0-language-models) and its mixtures: embeddings, residual, scores and
    # logits are scaled, and all tokens share an expert. Files may switch the rope off.
    decoder(
        *("granite", "granitemoe"),
        rope_layers=lambda r: int(r.boolean(Keys.Rope.SCALING_FINETUNED, True)),
        f_embedding_scale=lambda r: r.number(Keys.LLM.EMBEDDING_SCALE, 0.0),
        f_residual_scale=lambda r: r.number(Keys.LLM.RESIDUAL_SCALE, 0.0),
        f_logit_scale=lambda r: _inverse(r, Keys.LLM.LOGIT_SCALE),
    ),
    # Hunyuan-A13B (huggingface.co/tencent/Hunyuan-A13B-Instruct): Q and K are normed after they are roped.
    decoder("hunyuan-moe", build=PlainDecoder(qk_norm="roped"), rope_type="neox"),
    # Mellum 2 (huggingface.co/JetBrains): Qwen3's mixture, with a sliding window in three of four layers, whose rope
    # is not scaled.
    decoder(
        "mellum",
        build=PlainDecoder(qk_norm="head"),
        rope_type="neox",
        n_swa=lambda r: r.integer(Keys.Attention.SLIDING_WINDOW, 0),
        swa_pattern=lambda r: read_swa_pattern(r, 4),
        rope_freq_base_swa=lambda r: r.number(Keys.Rope.FREQ_BASE_SWA, 0.0),
        rope_freq_scale_swa=1.0,
        rope_attn_factor_swa=1.0,
        yarn_ext_factor_swa=0.0,
    ),
    # MiniCPM (arXiv:2404.06395): the scales of Granite, which old files do not say.
    decoder(
        "minicpm",
        f_embedding_scale=lambda r: r.number(Keys.LLM.EMBEDDING_SCALE, 12.0),
        f_residual_scale=lambda r: r.number(
            Keys.LLM.RESIDUAL_SCALE, 1.4 / math.sqrt(r.integer(Keys.LLM.BLOCK_COUNT) or 1)
        ),
        f_logit_scale=lambda r: _inverse(r, Keys.LLM.LOGIT_SCALE, 256.0 / (r.integer(Keys.LLM.EMBEDDING_LENGTH) or 1)),
    ),
    # MiniMax-M2 (huggingface.co/MiniMaxAI/MiniMax-M2): Q and K normed over all heads, a sigmoid router with a bias.
    decoder("minimax-m2", build=PlainDecoder(qk_norm="row"), rope_type="neox", router=_router(gating="sigmoid")),
    # Ministral 3 (huggingface.co/mistralai/Ministral-3-8B-Instruct-2512): in long texts Q is scaled by the position,
    # and YaRN scales Q and K by less.
    decoder(
        "mistral3",
        attn_temperature=lambda r: read_attn_temperature(
            r, r.integer(Keys.Rope.SCALING_ORIG_CTX_LEN, r.integer(Keys.LLM.CONTEXT_LENGTH))
        ),
        rope_attn_factor=_mistral3_attn_factor,
    ),
    # OLMoE (arXiv:2409.02060): Q and K normed over all heads; the weights of experts are not normalised.
    decoder("olmoe", build=PlainDecoder(qk_norm="row"), rope_type="neox", router=_router(norm=False)),
    # Qwen1.5-MoE (qwenlm.github.io/blog/qwen-moe): a shared expert with a gate; weights are not normalised.
    decoder(
        "qwen2moe",
        build=PlainDecoder(shared_gate=True),
        rope_type="neox",
        n_ff_exp=_n_ff_exp,
        n_ff_shexp=lambda r: r.integer(
            Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, r.integer(Keys.LLM.FEED_FORWARD_LENGTH)
        ),
        router=_router(norm=False),
        own_window=True,
    ),
    # Qwen3 (arXiv:2505.09388): Q and K normed. RND1 (huggingface.co/radicalnumerics/RND1-Base-0910), made of it, and
    # LLaDA-MoE (arXiv:2509.24389) write by diffusion: all tokens see each other, and nothing is remembered.
    decoder("qwen3moe", build=PlainDecoder(qk_norm="head"), rope_type="neox", n_ff_exp=_n_ff_exp, own_window=True),
    decoder("rnd1", build=PlainDecoder(qk_norm="head"), memory="none", rope_type="neox", causal_attn=False),
    decoder(
        "llada-moe",
        build=PlainDecoder(qk_norm="head"),
        memory="none",
        rope_type="neox",
        causal_attn=False,
        router=_router(norm=False),
    ),
    # PaddleOCR-VL (arXiv:2510.14528), its text model: ERNIE 4.5 without experts; a token has three positions.
    decoder("paddleocr", rope_type="mrope", rope_sections=read_rope_sections, n_expert=0, n_expert_used=0),
)
