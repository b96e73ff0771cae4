"""Mamba, and models with some layers of attention and some of Mamba or short convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from pyggml.errors import ModelError

from ..config import Config
from ..family import Array, Back, Family, Key, Of
from ..moves import A_LOG, COLUMN, CONV1D, ROPE_PAIRS, in_groups
from .llama import GRANITE_KEYS, GRANITE_MERGED, GRANITE_SPELLED
from .spelling import experts, mamba

_ATTENTION = ("full_attention", "attention", "*")
_NO_LIMIT = 1 << 20  # trained context of models that remember only a state
_NO_ATTENTION: dict[str, Key] = {  # keys that loaders want even without attention
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
_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "attn_norm": "norm"}
_FEED_FORWARD = {
    **{f"ffn_{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_norm": "pre_ff_layernorm",
    "output_norm": "model.final_layernorm",
}


def _heads_back(heads: str, size: str) -> Back:
    """The number of Mamba-2's heads, and their size, which follows from it."""
    return lambda n, keys: {heads: n, size: keys["ssm.inner_size"] // n}


def _expand_back(*names: str) -> Back:
    """The ratio of the inner size to the embeddings' size."""

    def back(n: int, keys: Mapping[str, Any]) -> dict[str, object]:
        ratio = n / keys["embedding_length"]
        return {name: int(ratio) if ratio.is_integer() else ratio for name in names}

    return back


_IN_MAMBA: dict[str, Key] = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": Of(lambda c: c.integer("mamba_n_heads"), _heads_back("mamba_n_heads", "mamba_d_head")),
}


def _heads_kv(c: Config, attends: list[bool]) -> list[int]:
    n = c.integer("num_key_value_heads", default=c.n_head)
    return [n if a else 0 for a in attends]


def _kinds_back(other: str) -> Back:
    """The kinds of layers, from each layer's heads of K and V: attention when it has any, otherwise `other`."""

    def back(n: object, keys: Mapping[str, Any]) -> dict[str, object]:
        if not isinstance(n, list):
            return {"num_key_value_heads": n}
        heads = cast("list[int]", n)
        return {"num_key_value_heads": max(heads), "layer_types": ["full_attention" if h else other for h in heads]}

    return back


def _indices_back(n: object, keys: Mapping[str, Any]) -> dict[str, object]:
    heads = cast("list[int]", n if isinstance(n, list) else [n] * keys["block_count"])
    attends = [il for il, h in enumerate(heads) if h]
    return {"num_key_value_heads": max(heads), "attn_layer_indices": attends}


def _periodic(kind: str, layers: list[int], n_layer: int) -> dict[str, object]:
    """The period and the offset of `layers` among `n_layer`. Raises ModelError for layers that are not periodic."""
    period = layers[1] - layers[0] if len(layers) > 1 else n_layer
    if not layers or layers != list(range(layers[0] % period, n_layer, period)):
        raise ModelError(f"the layers of {kind}, {layers}, are not at one distance from each other")
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": layers[0] % period}


def _period_back(n: object, keys: Mapping[str, Any]) -> dict[str, object]:
    heads = cast("list[int]", n if isinstance(n, list) else [n] * keys["block_count"])
    attends = [il for il, h in enumerate(heads) if h]
    return {"num_key_value_heads": max(heads), **_periodic("attn", attends, len(heads))}


def _expert_layers(ne: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    n_layer = sum(name.endswith(".attn_norm.weight") for name in ne)
    layers = [il for il in range(n_layer) if f"blk.{il}.ffn_gate_inp.weight" in ne]
    return _periodic("expert", layers, n_layer) if layers else {"num_experts": 1}


def _has(ne: Mapping[str, tuple[int, ...]], end: str) -> bool:
    return any(name.endswith(end) for name in ne)


def _told_h1(ne: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    return {
        "mamba_rms_norm": _has(ne, ".ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": _has(ne, ".ssm_conv1d.bias"),
        "mamba_proj_bias": _has(ne, ".ssm_in.bias"),
        "projectors_bias": _has(ne, ".ssm_out.bias"),
        "mlp_bias": _has(ne, ".ffn_up.bias"),
    }


def _attends(c: Config) -> list[bool]:
    """For each layer, whether it is attention: by its type, by a list of such layers, or by a period."""
    layers = c.get("attn_layer_indices", "full_attn_idxs", default=None)
    types = c.get("layer_types", "layers_block_type", "hybrid_override_pattern", default=None)
    if types is not None:
        return [t in _ATTENTION for t in types]
    if layers is not None:
        return [il in layers for il in range(c.n_layer)]
    period, offset = c.integer("attn_layer_period", default=0), c.integer("attn_layer_offset", default=0)
    if not period:
        return [False] * c.n_layer
    return [il % period == offset for il in range(c.n_layer)]


def _inner(c: Config) -> int:
    return int(c.number("mamba_expand", "expand", default=2) * c.n_embd)


def _inner_1(c: Config) -> int:
    """The inner size of Mamba: `intermediate_size` when the config has it, as the class does."""
    return c.integer("intermediate_size", default=_inner(c))


def _dt_rank(*names: str) -> Of:
    """The rank of the time step, which may be `auto`."""

    def there(c: Config) -> int:
        return -(-c.n_embd // 16) if c.get(*names) == "auto" else c.integer(*names)

    return Of(there, lambda n, keys: {names[0]: n})


def _check_steps(c: Config) -> dict[str, object]:
    """Refuse limits of the time step, which no GGUF can describe."""
    limit = c.get("time_step_limit", default=None)
    if limit is not None and (limit[0] != 0 or limit[1] not in (math.inf, {"__float__": "Infinity"})):
        c.fail(f"time_step_limit is {limit!r:.60}: only 0 to infinity is supported")
    return {}


def _check_heads(heads: str, head: str, inner: Callable[[Config], int]) -> Callable[[Config], dict[str, object]]:
    def check(c: Config) -> dict[str, object]:
        size = c.get(head, default="auto")
        if size != "auto" and size * c.integer(heads) != inner(c):
            c.fail(f"{head} is {size!r:.60}, but {c.integer(heads)} heads are to be {inner(c)} elements")
        return _check_steps(c)

    return check


def _mixer_eps(c: Config) -> float | None:
    """The epsilon of the mixer's norms; None when it is the other norms' too. Only models/mamba.py reads the key."""
    eps = c.number("mixer_rms_eps")
    return None if eps == c.number("layer_norm_epsilon") else eps


def _granite_rope(c: Config) -> bool:
    return c.get("position_embedding_type", default=None) == "rope"


def _nemotron_back(n: object, keys: Mapping[str, Any]) -> dict[str, object]:
    n_layer = keys["block_count"]
    sizes, heads = (
        np.broadcast_to(v, n_layer).tolist() for v in (np.asarray(n), np.asarray(keys["attention.head_count_kv"]))
    )
    kinds = ["mlp" if f else "full_attention" if h else "linear_attention" for f, h in zip(sizes, heads, strict=True)]
    return {"layers_block_type": kinds, "intermediate_size": max(sizes), "num_key_value_heads": max(heads)}


def _lfm2_ff(c: Config) -> int:
    """The size of the network, which is the config's, scaled and rounded up to a multiple."""
    n = c.integer("block_ff_dim", "intermediate_size")
    if c.get("block_auto_adjust_ff_dim", default=True) is not True:
        return c.integer("intermediate_size", "block_ff_dim")
    n, of = (
        int(c.number("block_ffn_dim_multiplier", default=1.0) * int(2 * n / 3)),
        c.integer("block_multiple_of", default=256),
    )
    return of * -(-n // of)


def _nemotron_ff(c: Config) -> list[int]:
    if c.get("tie_word_embeddings", default=False) is True:
        c.fail("tie_word_embeddings: the class has an output of its own all the same")
    types = c.get("layers_block_type", "hybrid_override_pattern")
    return [c.integer("intermediate_size") if t in ("mlp", "-") else 0 for t in types]


def _multipliers(c: Config) -> dict[str, float | Array]:
    """Falcon-H1's factors at the inputs and outputs of its parts. A GGUF has no keys for them, so weights are
    multiplied with them. Factors of inputs do not apply to biases, which are added later."""

    def number(name: str) -> float:
        return c.number(name, default=1.0)

    gate, down = c.get("mlp_multipliers", default=(1.0, 1.0))
    key, attn_in, attn_out = (number(f"{name}_multiplier") for name in ("key", "attention_in", "attention_out"))
    inner, bc = _inner_h1(c), c.integer("mamba_n_groups") * c.integer("mamba_d_state")
    sizes = (inner, inner, bc, bc, c.integer("mamba_n_heads"))  # rows of z, x, B, C and dt
    parts = np.repeat(np.asarray(c.get("ssm_multipliers", default=(1.0,) * 5), np.float64), sizes)
    found: dict[str, float | Array] = {
        "token_embd": number("embedding_multiplier"),
        "output": number("lm_head_multiplier"),
        "attn_q": attn_in,
        "attn_k": attn_in * key,
        "attn_k.bias": key,
        "attn_v": attn_in,
        "attn_output": attn_out,
        "ssm_in": parts * number("ssm_in_multiplier"),
        "ssm_in.bias": parts,
        **dict.fromkeys(("ssm_out", "ssm_out.bias"), number("ssm_out_multiplier")),
        **dict.fromkeys(("ffn_gate", "ffn_gate.bias"), float(gate)),
        **dict.fromkeys(("ffn_down", "ffn_down.bias"), float(down)),
    }
    return {role: scale for role, scale in found.items() if (np.asarray(scale) != 1).any()}


def _inner_h1(c: Config) -> int:
    return c.get("mamba_d_ssm", default=0) or _inner(c)


def _refuse_h1(c: Config) -> dict[str, object]:
    """Refuse what the graph of Falcon-H1, here as in llama.cpp, does not do."""
    if c.get("attention_bias", default=False) is True:
        c.fail("attention_bias: Falcon-H1's attention has no biases")
    if c.get("mamba_rms_norm", default=False) is True and c.get("mamba_norm_before_gate", default=True) is True:
        c.fail("mamba_norm_before_gate: Falcon-H1's norm comes behind the gate")
    return _check_heads("mamba_n_heads", "mamba_d_head", _inner_h1)(c)


_HYBRID: dict[str, Key] = {
    **_IN_MAMBA,
    "ssm.inner_size": Of(_inner, _expand_back("mamba_expand")),
    "attention.head_count_kv": Of(lambda c: _heads_kv(c, _attends(c)), _kinds_back("linear_attention")),
}
_SHORT_CONV: dict[str, Key] = {
    "shortconv.l_cache": "conv_L_cache",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "attention.head_count_kv": Of(lambda c: _heads_kv(c, _attends(c)), _kinds_back("conv")),
}
_SHORT_CONV_SPELLED = {
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **{f"attn_{x}_norm": f"self_attn.{x}_layernorm" for x in "qk"},
    "attn_output": "self_attn.out_proj",
    **{f"shortconv.{x}": f"conv.{x}" for x in ("conv", "in_proj", "out_proj")},
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias=",
    **experts("feed_forward.experts", "w1", "w3", "w2"),
}
_MAMBA_1: dict[str, Key] = {
    **_NO_ATTENTION,
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.inner_size": Of(_inner_1, lambda n, keys: {**_expand_back("expand")(n, keys), "intermediate_size": n}),
    "ssm.state_size": "state_size",
    "ssm.time_step_rank": _dt_rank("time_step_rank"),
}
_MAMBA_1_SPELLED = {**_BACKBONE, **mamba("mixer")}

FAMILIES = (
    Family(
        arch="mamba",
        types=("mamba",),
        cls="MambaForCausalLM",
        told=("time_step_min",),
        act="",
        keys={**_MAMBA_1, "ssm.dt_b_c_rms": False},
        moves=_MAMBA,
        spelled=_MAMBA_1_SPELLED,
        layers="backbone.layers",
    ),
    Family(
        arch="mamba",
        types=("falcon_mamba",),
        cls="FalconMambaForCausalLM",
        told=("time_step_min",),
        act="",
        keys={
            **_MAMBA_1,
            "ssm.dt_b_c_rms": True,
            "ssm.dt_b_c_rms_epsilon": Of(_mixer_eps, lambda eps, keys: {"mixer_rms_eps": eps}),
        },
        moves=_MAMBA,
        spelled=_MAMBA_1_SPELLED,
        layers="backbone.layers",
    ),
    Family(
        arch="mamba2",
        types=("mamba2",),
        cls="Mamba2ForCausalLM",
        more=_check_heads("num_heads", "head_dim", _inner),
        told=("time_step_rank", "time_step_min"),
        act="",
        keys={
            **_NO_ATTENTION,
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.inner_size": Of(_inner, _expand_back("expand")),
            "ssm.state_size": "state_size",
            "ssm.time_step_rank": Of(lambda c: c.integer("num_heads"), _heads_back("num_heads", "head_dim")),
            "ssm.group_count": "n_groups",
        },
        moves=_MAMBA2,
        names=_DT_BIAS,
        spelled={**_BACKBONE, **mamba("mixer", dt_proj=False)},
        layers="backbone.layers",
    ),
    Family(  # stands before Granite, because its files could be written as Granite too
        arch="granitehybrid",
        types=("bamba",),
        cls="BambaForCausalLM",
        more=_check_heads("mamba_n_heads", "mamba_d_head", _inner),
        act="",
        keys={
            **_HYBRID,
            "attention.head_count_kv": Of(lambda c: _heads_kv(c, _attends(c)), _indices_back),
            "rope.scaling.finetuned": True,
        },
        moves={**ROPE_PAIRS, **_MAMBA2},
        names=_DT_BIAS,
        spelled={**_FEED_FORWARD, **mamba("mamba", dt_proj=False)},
    ),
    Family(
        arch="granitehybrid",
        types=("granitemoehybrid",),
        cls="GraniteMoeHybridForCausalLM",
        more=_check_heads("mamba_n_heads", "mamba_d_head", _inner),
        act="",
        keys={
            **GRANITE_KEYS,
            **_HYBRID,
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "rope.scaling.finetuned": Of(
                _granite_rope, lambda ropes, keys: {"position_embedding_type": "rope" if ropes else "nope"}
            ),
        },
        moves={**ROPE_PAIRS, **_MAMBA2},
        merged=GRANITE_MERGED,
        names=_DT_BIAS,
        spelled={**GRANITE_SPELLED, **mamba("mamba", dt_proj=False)},
    ),
    Family(
        arch="falcon-h1",
        types=("falcon_h1",),
        cls="FalconH1ForCausalLM",
        told=("mamba_expand", "mamba_norm_before_gate"),  # nothing else depends on them
        act="",
        keys={**_IN_MAMBA, "ssm.inner_size": Of(_inner_h1, lambda n, keys: {"mamba_d_ssm": n})},
        more=_refuse_h1,
        scaled=_multipliers,
        untied=lambda c: c.number("embedding_multiplier", default=1.0) != c.number("lm_head_multiplier", default=1.0),
        moves=_MAMBA2,
        names={**_DT_BIAS, r"^model\.layers\.(\d+)\.pre_ff_layernorm\.weight$": r"=blk.\1.ffn_norm"},
        by_tensors=_told_h1,
        spelled={**_FEED_FORWARD, "ffn_norm": "pre_ff_layernorm.weight=", **mamba("mamba", dt_proj=False)},
    ),
    Family(
        arch="jamba",
        types=("jamba",),
        cls="JambaForCausalLM",
        act="",
        keys={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.inner_size": Of(_inner, _expand_back("mamba_expand")),
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": _dt_rank("mamba_dt_rank"),
            "attention.head_count_kv": Of(lambda c: _heads_kv(c, _attends(c)), _period_back),
            "rope.dimension_count": None,
        },
        moves=_MAMBA,
        by_tensors=_expert_layers,
        spelled={
            **_FEED_FORWARD,
            **mamba("mamba"),
            "ffn_gate_inp": "feed_forward.router",
            **experts("feed_forward.experts"),
        },
    ),
    Family(
        arch="nemotron_h",
        types=("nemotron_h",),
        cls="NemotronHForCausalLM",
        told=("expand", "time_step_limit", "moe_shared_expert_overlap"),
        act="relu2",
        keys={
            "ssm.conv_kernel": ("conv_kernel", "mamba_d_conv"),
            "ssm.state_size": ("ssm_state_size", "mamba_d_state"),
            "ssm.group_count": ("n_groups", "mamba_n_groups"),
            "ssm.time_step_rank": Of(
                lambda c: c.integer("mamba_num_heads"), _heads_back("mamba_num_heads", "mamba_head_dim")
            ),
            "ssm.inner_size": Of(lambda c: c.integer("mamba_num_heads") * c.integer("mamba_head_dim")),
            "attention.head_count_kv": Of(lambda c: _heads_kv(c, _attends(c))),
            "attention.layer_norm_rms_epsilon": ("layer_norm_epsilon", "rms_norm_eps"),
            "feed_forward_length": Of(_nemotron_ff, _nemotron_back),
            "ssm.time_step_min": "time_step_min",  # a lower limit; models/mamba.py reads it
            **dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length")),
            **dict.fromkeys(("expert_group_count", "expert_group_used_count")),
        },
        moves=_MAMBA2,
        names=_DT_BIAS,
        spelled={
            **_BACKBONE,
            **mamba("mixer", dt_proj=False),
            **{f"attn_{x}": f"mixer.{x}_proj" for x in "qkv"},
            "attn_output": "mixer.o_proj",
            "ffn_up": "mixer.up_proj",
            "ffn_down": "mixer.down_proj",
        },
        layers="backbone.layers",
    ),
    Family(
        arch="lfm2",
        types=("lfm2",),
        cls="Lfm2ForCausalLM",
        act="",
        keys={**_SHORT_CONV, "feed_forward_length": Of(_lfm2_ff, lambda n, keys: {"intermediate_size": n})},
        moves={"shortconv.conv.weight": CONV1D},
        constants={"block_auto_adjust_ff_dim": False},
        spelled=_SHORT_CONV_SPELLED,
    ),
    Family(
        arch="lfm2moe",
        types=("lfm2_moe",),
        cls="Lfm2MoeForCausalLM",
        act="",
        keys={
            **_SHORT_CONV,
            "leading_dense_block_count": "num_dense_layers",
            "expert_gating_func": 2,
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
        },
        moves={"shortconv.conv.weight": CONV1D},
        by_tensors=lambda ne: {"use_expert_bias": _has(ne, ".exp_probs_b.bias")},
        spelled=_SHORT_CONV_SPELLED,
        names={r"^model\.(layers\.\d+\.feed_forward\.experts\.)": r"\1", r"\.expert_bias$": ".expert_bias.bias"},
    ),
)
