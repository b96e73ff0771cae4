"""Mamba, and models whose layers are in part attention and in part Mamba or short convolutions."""

from __future__ import annotations

from typing import Any

from pyggml.errors import ModelError

from ..config import Config
from ..family import Family, Key, Of
from ..moves import A_LOG, COLUMN, CONV1D, ROPE_PAIRS, in_groups
from .llama import GRANITE_KEYS, GRANITE_SPLITS

_ATTENTION = ("full_attention", "attention", "*")
_MULTIPLIERS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "mlp_multipliers", "ssm_multipliers"),
    *("attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
_NO_LIMIT = 1 << 20  # of the context, where nothing but a state is remembered
_NO_ATTENTION: dict[str, Key] = {  # keys that a loader wants all the same
    "context_length": _NO_LIMIT,
    "feed_forward_length": 0,
    "attention.head_count": 0,
    "attention.head_count_kv": None,
    "attention.key_length": None,
    "attention.value_length": None,
    "rope.dimension_count": None,
}
_DT_BIAS = {r"\.dt_bias$": ".dt_proj.bias"}
_MAMBA = {"ssm_a": A_LOG, "ssm_conv1d.weight": CONV1D}
_MAMBA2 = {
    "ssm_a": (A_LOG, COLUMN),
    "ssm_d": COLUMN,
    "ssm_conv1d.weight": CONV1D,
    "ssm_norm": in_groups("ssm.group_count"),
}
_IN_MAMBA: dict[str, Key] = {
    "ssm.conv_kernel": ("mamba_d_conv", "conv_kernel"),
    "ssm.state_size": ("mamba_d_state", "ssm_state_size"),
    "ssm.group_count": ("mamba_n_groups", "n_groups"),
    "ssm.time_step_rank": ("mamba_n_heads", "mamba_num_heads"),
}


def _heads_kv(c: Config, attends: list[bool]) -> list[int]:
    return [c.integer("num_key_value_heads") if a else 0 for a in attends]


def _attends(c: Config) -> list[bool]:
    """Of each layer whether it is attention: by its type, by a list of such layers, or by a period."""
    types = c.get("layer_types", "layers_block_type", "hybrid_override_pattern", default=None)
    if types is not None:
        return [t in _ATTENTION for t in types]
    layers = c.get("attn_layer_indices", default=None)
    if layers is not None:
        return [il in layers for il in range(c.n_layer)]
    period, offset = c.integer("attn_layer_period"), c.integer("attn_layer_offset")
    return [il % period == offset for il in range(c.n_layer)]


def _inner(c: Config) -> int:
    return int(c.number("mamba_expand", "expand", default=2) * c.n_embd)


def _granite_rope(c: Config) -> bool:
    return c.get("position_embedding_type", default="rope") == "rope"


def _nemotron_ff(c: Config) -> list[int]:
    types = c.get("layers_block_type", "hybrid_override_pattern")
    return [c.integer("intermediate_size") if t in ("mlp", "-") else 0 for t in types]


def _no_multipliers(c: Config) -> dict[str, object]:
    """Falcon-H1's many factors of what goes into and comes out of its parts have no keys; only 1 can be said."""
    for name in _MULTIPLIERS:
        value: Any = c.get(name, default=1.0)
        if value != 1 and value != [1] * 2 and value != [1] * 5:
            raise ModelError(f"{c.path}: {name} = {value}: multipliers of Falcon-H1 other than 1 are not supported")
    return {}


_HYBRID: dict[str, Key] = {
    **_IN_MAMBA,
    "ssm.inner_size": Of(_inner),
    "attention.head_count_kv": Of(lambda c: _heads_kv(c, _attends(c))),
}
_SHORT_CONV: dict[str, Key] = {
    "shortconv.l_cache": "conv_L_cache",
    "attention.head_count_kv": Of(lambda c: _heads_kv(c, _attends(c))),
}

FAMILIES = (
    Family(
        arch="mamba",
        types=("mamba", "falcon_mamba"),
        cls="MambaForCausalLM",
        keys={
            **_NO_ATTENTION,
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.inner_size": Of(_inner),
            "ssm.state_size": "state_size",
            "ssm.time_step_rank": "time_step_rank",
            "ssm.dt_b_c_rms": Of(lambda c: c.model_type == "falcon_mamba"),
        },
        moves=_MAMBA,
    ),
    Family(
        arch="mamba2",
        types=("mamba2",),
        cls="Mamba2ForCausalLM",
        keys={
            **_NO_ATTENTION,
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.inner_size": Of(_inner),
            "ssm.state_size": "state_size",
            "ssm.time_step_rank": "num_heads",
            "ssm.group_count": "n_groups",
        },
        moves=_MAMBA2,
        names=_DT_BIAS,
    ),
    Family(
        arch="granitehybrid",
        types=("granitemoehybrid",),
        cls="GraniteMoeHybridForCausalLM",
        keys={
            **GRANITE_KEYS,
            **_HYBRID,
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "rope.scaling.finetuned": Of(_granite_rope),
        },
        moves={**ROPE_PAIRS, **_MAMBA2},
        splits=GRANITE_SPLITS,
        names=_DT_BIAS,
    ),
    Family(
        arch="granitehybrid",
        types=("bamba",),
        cls="BambaForCausalLM",
        keys={**_HYBRID, "rope.scaling.finetuned": True},
        moves={**ROPE_PAIRS, **_MAMBA2},
        names=_DT_BIAS,
    ),
    Family(
        arch="falcon-h1",
        types=("falcon_h1",),
        cls="FalconH1ForCausalLM",
        keys={**_IN_MAMBA, "ssm.inner_size": Of(lambda c: c.get("mamba_d_ssm", default=0) or _inner(c))},
        more=_no_multipliers,
        moves=_MAMBA2,
        names={**_DT_BIAS, r"^model\.layers\.(\d+)\.pre_ff_layernorm\.weight$": r"=blk.\1.ffn_norm"},
    ),
    Family(
        arch="jamba",
        types=("jamba",),
        cls="JambaForCausalLM",
        keys={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.inner_size": Of(_inner),
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
            "attention.head_count_kv": Of(lambda c: _heads_kv(c, _attends(c))),
            "rope.dimension_count": None,
        },
        moves=_MAMBA,
    ),
    Family(
        arch="nemotron_h",
        types=("nemotron_h",),
        cls="NemotronHForCausalLM",
        keys={
            **_IN_MAMBA,
            "ssm.inner_size": Of(lambda c: c.integer("mamba_num_heads") * c.integer("mamba_head_dim")),
            "attention.head_count_kv": Of(lambda c: _heads_kv(c, _attends(c))),
            "attention.layer_norm_rms_epsilon": ("layer_norm_epsilon", "rms_norm_eps"),
            "feed_forward_length": Of(_nemotron_ff),
            "ssm.time_step_min": "time_step_min",  # which the class does not go below; read by models/mamba.py
            **dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length")),
            **dict.fromkeys(("expert_group_count", "expert_group_used_count")),
        },
        moves=_MAMBA2,
        names=_DT_BIAS,
    ),
    Family(
        arch="lfm2", types=("lfm2",), cls="Lfm2ForCausalLM", keys=_SHORT_CONV, moves={"shortconv.conv.weight": CONV1D}
    ),
    Family(
        arch="lfm2moe",
        types=("lfm2_moe",),
        cls="Lfm2MoeForCausalLM",
        keys={
            **_SHORT_CONV,
            "leading_dense_block_count": "num_dense_layers",
            "expert_gating_func": 2,
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
        },
        moves={"shortconv.conv.weight": CONV1D},
        names={r"^model\.(layers\.\d+\.feed_forward\.experts\.)": r"\1", r"\.expert_bias$": ".expert_bias.bias"},
    ),
)
