"""The blocks that model builders are made of. Each records the nodes that llama.cpp's function of that name does; what
differs between architectures is an argument, and no block knows an architecture's name."""

from .adapt import NO_ADAPTERS, Adapters, LowRank
from .attention import KV, build_attn, build_attn_gate, build_qkv, llm_build_kv, rotate, split_qkv, store_k
from .build import Build, CacheUse, KVMemory, mask_name
from .ffn import Activation, Glu, build_ffn
from .inputs import (
    MASK_PADDING,
    attn_temp_scale,
    block_ends,
    block_input_sizes,
    block_inputs,
    build_inp_attn_scale,
    build_inp_blocks,
    build_inp_embd,
    build_inp_kq_mask,
    build_inp_ngrams,
    build_inp_out_ids,
    build_inp_per_layer,
    build_inp_pos,
    build_pos_embd,
    build_rel_bias,
    ngram_rows,
    per_layer_rows,
    relative_buckets,
    token_embd,
)
from .mla import MLA, build_mla
from .moe import build_expert_weights, build_experts, build_moe_ffn, build_router, build_shared_expert, router_probs
from .norm import build_norm
from .output import build_head, build_lm_head, build_result_embd
from .rope import build_rope, build_rope_factors, rope, rope_factors

__all__ = [
    "KV",
    "NO_ADAPTERS",
    "MASK_PADDING",
    "MLA",
    "Activation",
    "Adapters",
    "Build",
    "CacheUse",
    "Glu",
    "KVMemory",
    "LowRank",
    "attn_temp_scale",
    "block_ends",
    "block_input_sizes",
    "block_inputs",
    "build_attn",
    "build_attn_gate",
    "build_expert_weights",
    "build_experts",
    "build_ffn",
    "build_head",
    "build_inp_attn_scale",
    "build_inp_blocks",
    "build_inp_embd",
    "build_inp_kq_mask",
    "build_inp_ngrams",
    "build_inp_out_ids",
    "build_inp_per_layer",
    "build_inp_pos",
    "build_lm_head",
    "build_mla",
    "build_moe_ffn",
    "build_norm",
    "build_pos_embd",
    "build_qkv",
    "build_rel_bias",
    "build_result_embd",
    "build_rope",
    "build_rope_factors",
    "build_router",
    "build_shared_expert",
    "llm_build_kv",
    "mask_name",
    "ngram_rows",
    "per_layer_rows",
    "relative_buckets",
    "rope",
    "rope_factors",
    "rotate",
    "router_probs",
    "split_qkv",
    "store_k",
    "token_embd",
]
