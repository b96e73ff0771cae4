"""Plain decoders: for each, its source and what differs from Llama."""

from __future__ import annotations

import math

from pyggml.gguf_io.keys import Keys

from .decoder import PlainDecoder, decoder
from .hparams import RankHead
from .metadata import Reader, read_rank_head, read_rope_sections

_ROPE_PATTERN = "{arch}.attention.rope_pattern"


def _roped(r: Reader) -> tuple[int, ...]:
    if r.get(_ROPE_PATTERN, None) is not None:  # only pyggml's files have this key
        return r.flags(_ROPE_PATTERN)
    return tuple(int((il + 1) % 4 != 0) for il in range(r.integer(Keys.LLM.BLOCK_COUNT)))


def yes_or_no(r: Reader) -> RankHead:
    """The head of a reranker that answers yes or no."""
    return read_rank_head(r, RankHead(pooling="last", soft_max=True))


ARCHITECTURES = (
    # InternLM2 (arXiv:2403.17297), XVERSE (huggingface.co/xverse/XVERSE-7B): as Llama.
    decoder("internlm2", "xverse"),
    # Qwen (arXiv:2309.16609): one weight for Q, K and V; feed_forward_length is that of gate and up together.
    decoder("qwen", rope_type="neox", n_ff=lambda r: r.integer(Keys.LLM.FEED_FORWARD_LENGTH) // 2),
    # Qwen2 (arXiv:2407.10671): biases of Q, K and V. EXAONE 3 (arXiv:2408.03541) has none.
    decoder("qwen2", "exaone", rope_type="neox", own_window=True),
    # openPangu Embedded (arXiv:2505.22375): as Qwen2, and the product after attention has a bias too.
    decoder("pangu-embedded", build=PlainDecoder(rope_factors=False), rope_type="neox"),
    # Qwen3 (arXiv:2505.09388): Q and K of each head are normed. Its reranker (arXiv:2506.05176) ends with yes or no.
    decoder("qwen3", build=PlainDecoder(qk_norm="head"), rope_type="neox", rank_head=yes_or_no, own_window=True),
    # Qwen2-VL (arXiv:2409.12191), its text model: a token has three positions.
    decoder(
        "qwen2vl",
        build=PlainDecoder(biases="qkv"),
        own_window=True,
        rope_type="mrope",
        rope_sections=read_rope_sections,
        f_norm_rms_eps=lambda r: r.number(Keys.Attention.LAYERNORM_RMS_EPS, 0.0),  # llama.cpp does not read it
    ),
    # Dream (arXiv:2508.15487), made of Qwen2, and LLaDA (arXiv:2502.09992), made of Llama, write by diffusion: all
    # tokens see each other, and nothing is remembered.
    decoder("dream", build=PlainDecoder(biases="qkv"), memory="none", rope_type="neox", causal_attn=False),
    decoder("llada", build=PlainDecoder(biases="qkv", rope_factors=False), memory="none", causal_attn=False),
    # AFM (huggingface.co/arcee-ai/AFM-4.5B): relu squared, and no gate.
    decoder("arcee", build=PlainDecoder(act="relu_sqr", gated=False)),
    # Seed-OSS (huggingface.co/ByteDance-Seed/Seed-OSS-36B-Base): as Qwen2, but a norm has another name.
    decoder("seed_oss", build=PlainDecoder(ffn_norm="post_attention_norm"), rope_type="neox"),
    # SmolLM3 (huggingface.co/HuggingFaceTB/SmolLM3-3B): every fourth layer is not roped (arXiv:2501.18795).
    decoder("smollm3", rope_layers=_roped, own_window=True),
    # Phi-3 (arXiv:2404.14219): one weight for Q, K and V, one for gate and up; long and short frequency factors.
    decoder("phi3", build=PlainDecoder(gate_in_up=True), rope_type="neox", own_window=True),
    # ChatGLM3 and GLM-4-9B (arXiv:2406.12793): one weight for gate and up, half of each head roped.
    decoder("chatglm", build=PlainDecoder(gate_in_up=True)),
    # GLM-4-0414 (huggingface.co/zai-org/GLM-4-32B-0414): norms after attention and network too. GLM-4.1V
    # (arXiv:2507.01006), its text model: a token has three positions.
    decoder(
        "glm4",
        build=PlainDecoder(gate_in_up=True, post_norm=True),
        rope_type=lambda r: "mrope" if any(read_rope_sections(r)) else "norm",
        rope_sections=read_rope_sections,
        nextn=True,
    ),
    # Hunyuan (huggingface.co/tencent/Hunyuan-7B-Instruct): Q and K are normed after they are roped.
    decoder("hunyuan-dense", build=PlainDecoder(qk_norm="roped"), rope_type="neox"),
    # HunyuanOCR (arXiv:2511.19575), its text model: as Hunyuan; a token has four positions, or one.
    decoder(
        "hunyuan_vl",
        build=PlainDecoder(qk_norm="roped"),
        rope_type=lambda r: "mrope" if any(read_rope_sections(r)) else "neox",
        rope_sections=read_rope_sections,
    ),
    # Maincoder (huggingface.co/Maincode/Maincoder-1B): as Hunyuan, but other elements of a head turn together.
    decoder("maincoder", build=PlainDecoder(qk_norm="roped")),
    # OpenELM (arXiv:2404.14619): heads and networks grow with the layers; Q and K of each head are normed.
    decoder("openelm", build=PlainDecoder(qk_norm="head"), rope_type="neox"),
    # PLaMo (huggingface.co/pfnet/plamo-13b): attention and network side by side.
    decoder("plamo", build=PlainDecoder(parallel=True), rope_type="neox"),
    # Baichuan (arXiv:2309.10305): as Llama with 7B parameters, with ALiBi instead of a rope with 13B.
    decoder(
        "baichuan",
        rope_layers=lambda r: int(r.integer(Keys.LLM.BLOCK_COUNT) == 32),
        f_max_alibi_bias=lambda r: 8.0 if r.integer(Keys.LLM.BLOCK_COUNT) == 40 else 0.0,
    ),
    # Gemma (arXiv:2403.08295)
    decoder(
        "gemma",
        build=PlainDecoder(act="gelu"),
        rope_type="neox",
        f_embedding_scale=lambda r: math.sqrt(r.integer(Keys.LLM.EMBEDDING_LENGTH)),
    ),
)
