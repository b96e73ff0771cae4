"""How checkpoints spell the names of tensors, for writing them: role -> name. Reading uses gguf's tables, which know
many spellings of each role; writing needs one. A family lists in `spelled` the names that differ from these."""

from __future__ import annotations

from collections.abc import Mapping

from ..family import NextnLayers


def experts(parts: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, str]:
    """Names of experts that have a tensor each; `{}` stands for the number of the expert."""
    return {f"ffn_{role}_exps": f"{parts}.{{}}.{name}" for role, name in (("gate", gate), ("up", up), ("down", down))}


def shared(parts: str) -> dict[str, str]:
    """Names of the experts that all tokens share."""
    return {f"ffn_{role}_shexp": f"{parts}.{role}_proj" for role in ("gate", "up", "down")}


OUTSIDE: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
INSIDE: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_gate": "self_attn.gate_proj",
    "attn_sinks": "self_attn.sinks=",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias=",
    **experts("mlp.experts"),
    **shared("mlp.shared_experts"),
}
"""A name that ends with `=` has no suffix."""

SANDWICH: Mapping[str, str] = {"ffn_norm": "pre_feedforward_layernorm"}  # norms before and after attention and network
BLOCK_SPARSE: Mapping[str, str] = {  # Mixtral's
    "ffn_gate_inp": "block_sparse_moe.gate",
    **experts("block_sparse_moe.experts", "w1", "w3", "w2"),
}


APPENDED = NextnLayers(  # drafting layers after the last layer; their embeddings and output are copies of the model's
    says="num_nextn_predict_layers",
    own={
        **{f"nextn.{x}": f"{{layer}}.{x}" for x in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
        **{f"nextn.shared_head_{x}": f"{{layer}}.shared_head.{x}" for x in ("norm", "head")},
    },
)


def mtp_layers(says: str) -> NextnLayers:
    """Drafting layers in a part of their own. The tensor that joins their inputs, and the norms, are one for all of
    them."""
    own = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head_norm": "norm"}
    own |= {"embed_tokens": "embed_tokens", "shared_head_head": "lm_head"}
    return NextnLayers(
        says=says, own={f"nextn.{role}": f"mtp.{name}" for role, name in own.items()}, layers="mtp.layers"
    )


def mamba(part: str, *, dt_proj: bool = True) -> dict[str, str]:
    """Names of state-space layers. Without `dt_proj` the time step has only a bias (Mamba-2)."""
    return {
        "ssm_a": f"{part}.A_log=",
        "ssm_d": f"{part}.D=",
        "ssm_conv1d": f"{part}.conv1d",
        "ssm_norm": f"{part}.norm",
        **{f"ssm_{x}": f"{part}.{x}_proj" for x in ("in", "out", "x", "dt")},
        **{f"ssm_{x}_norm": f"{part}.{x}_layernorm" for x in ("dt", "b", "c")},
        **({} if dt_proj else {"ssm_dt.bias": f"{part}.dt_bias="}),
    }
