"""The blocks that model builders are made of. Each records the nodes that llama.cpp's function of that name does; what
differs between architectures is an argument, and no block knows an architecture's name."""

from .adapt import NO_ADAPTERS, Adapters, LowRank
from .attention import (
    KV,
    build_attn,
    build_attn_gate,
    build_cross_kv,
    build_qkv,
    cells_of_k,
    llm_build_kv,
    rotate,
    split_qkv,
    store_k,
)
from .build import Build, CacheUse, Input, mask_name
from .ffn import Activation, Glu, build_ffn, limited
from .inputs import (
    MASK_PADDING,
    build_inp_attn_scale,
    build_inp_embd,
    build_inp_kq_mask,
    build_inp_out_ids,
    build_inp_per_layer,
    build_inp_pos,
    build_inp_tokens,
    build_out_rows,
    build_out_streams,
    build_pos_embd,
    given_embd,
    per_layer_rows,
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
    "Input",
    "LowRank",
    "build_attn",
    "build_attn_gate",
    "build_cross_kv",
    "build_expert_weights",
    "build_experts",
    "build_ffn",
    "build_head",
    "build_inp_attn_scale",
    "build_inp_embd",
    "build_inp_kq_mask",
    "build_inp_out_ids",
    "build_inp_per_layer",
    "build_inp_pos",
    "build_inp_tokens",
    "build_lm_head",
    "build_mla",
    "build_moe_ffn",
    "build_norm",
    "build_out_rows",
    "build_out_streams",
    "build_pos_embd",
    "build_qkv",
    "build_result_embd",
    "build_rope",
    "build_rope_factors",
    "build_router",
    "build_shared_expert",
    "cells_of_k",
    "given_embd",
    "limited",
    "llm_build_kv",
    "mask_name",
    "per_layer_rows",
    "rope",
    "rope_factors",
    "rotate",
    "router_probs",
    "split_qkv",
    "store_k",
    "token_embd",
]
