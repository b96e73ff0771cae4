"""Decoders built like GPT-2 and GPT-J."""

from __future__ import annotations

from ..config import Config
from ..family import Family, Of
from ..moves import QKV_PER_GROUP, QKV_PER_HEAD, TRANSPOSED

_N_FF = Of(
    lambda c: c.get("n_inner", "ffn_hidden_size", default=None) or 4 * c.n_embd,
    lambda n, keys: {"n_inner": n, "ffn_hidden_size": n},
)
_ALL_HEADS = Of(lambda c: c.n_head)


def _falcon_heads(c: Config) -> int:
    if c.get("new_decoder_architecture", default=False):
        return c.integer("num_kv_heads", "n_head_kv", default=c.n_head)
    return 1 if c.get("multi_query", default=True) else c.n_head


def _one_head(c: Config) -> int:
    if c.get("multi_query", default=True) is not True:
        c.fail("multi_query: GPT-BigCode with K and V of each head is not supported")
    return 1


def _mpt_alibi(c: Config) -> float:
    if c.get("attn_config.alibi_bias_max", default=8) != 8:
        c.fail("attn_config.alibi_bias_max: the transformers library has 8 for all, which alone is supported")
    return 8.0 if c.get("attn_config.alibi", default=False) else 0.0


_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BLOOM = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_NEOX = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_GPTJ = {
    **_GPT2,
    **{f"attn_{x}": f"attn.{x}_proj" for x in "qkv"},
    "attn_output": "attn.out_proj",
    "ffn_up": "mlp.fc_in",
    "ffn_down": "mlp.fc_out",
}
_MPT = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.norm_f",
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}

FAMILIES = (
    Family(
        arch="gpt2",
        types=("gpt2",),
        cls="GPT2LMHeadModel",
        act="gelu_new",
        spelled=_GPT2,
        layers="transformer.h",
        keys={"feed_forward_length": _N_FF, "attention.head_count_kv": _ALL_HEADS},
        moves={f"{role}.weight": TRANSPOSED for role in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")},
    ),
    Family(
        arch="gptj",
        types=("gptj",),
        cls="GPTJForCausalLM",
        act="gelu_new",
        spelled=_GPTJ,
        layers="transformer.h",
        keys={
            "feed_forward_length": _N_FF,
            "attention.head_count_kv": _ALL_HEADS,
            "rope.dimension_count": "rotary_dim",
        },
    ),
    Family(
        arch="starcoder",
        types=("gpt_bigcode",),
        cls="GPTBigCodeForCausalLM",
        act="gelu_new",
        spelled=_GPT2,
        layers="transformer.h",
        keys={
            "feed_forward_length": _N_FF,
            "attention.head_count_kv": Of(_one_head),
        },
    ),
    Family(
        arch="gptneox",
        types=("gpt_neox",),
        cls="GPTNeoXForCausalLM",
        act="gelu_new",
        spelled=_NEOX,
        layers="gpt_neox.layers",
        keys={
            "attention.head_count_kv": _ALL_HEADS,
            "use_parallel_residual": Of(
                lambda c: bool(c.get("use_parallel_residual", default=True)),
                lambda value, keys: {"use_parallel_residual": value},
            ),
            "rope.dimension_count": Of(
                lambda c: int(c.head * c.rope.get("partial_rotary_factor", c.get("rotary_pct", default=0.25)))
            ),
        },
        moves={"attn_qkv": QKV_PER_HEAD},
    ),
    Family(
        arch="bloom",
        types=("bloom",),
        cls="BloomForCausalLM",
        act="gelu_new",
        spelled=_BLOOM,
        layers="transformer.h",
        keys={
            "context_length": Of(
                lambda c: c.integer("max_position_embeddings", "seq_length", default=2048),
                lambda n, keys: {"max_position_embeddings": n, "seq_length": n},
            ),
            "feed_forward_length": Of(lambda c: 4 * c.n_embd),
            "attention.head_count_kv": _ALL_HEADS,
        },
        moves={"attn_qkv": QKV_PER_HEAD},
    ),
    Family(
        arch="falcon",
        types=("falcon",),
        cls="FalconForCausalLM",
        told=("num_kv_heads", "num_ln_in_parallel_attn"),
        act="gelu_new",
        spelled=_BLOOM,
        layers="transformer.h",
        keys={"feed_forward_length": _N_FF, "attention.head_count_kv": Of(_falcon_heads)},
        moves={"attn_qkv": QKV_PER_GROUP},
    ),
    Family(
        arch="mpt",
        types=("mpt",),
        cls="MptForCausalLM",
        act="gelu_new",
        spelled=_MPT,
        layers="transformer.blocks",
        keys={
            "feed_forward_length": Of(lambda c: int(c.number("expansion_ratio", default=4)) * c.n_embd),
            "attention.head_count_kv": Of(lambda c: c.get("attn_config.kv_n_heads", default=c.n_head)),
            "attention.max_alibi_bias": Of(
                _mpt_alibi, lambda bias, keys: {"attn_config": {"alibi": bias > 0, "alibi_bias_max": int(bias)}}
            ),
            "attention.clamp_kqv": "attn_config.clip_qkv",
            "hidden_activation": Of(lambda c: "gelu"),
        },
    ),
)
